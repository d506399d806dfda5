"""The worker's lease, renewed from a thread of its own.

A thread, so that an event loop that is busy for some seconds does not lose its runs; with a limit, so that
one that hangs does. The thread has its own connection: a drained pool does not cost the lease.
"""

import asyncio
import logging
import os
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from db.engine import Database
from db.errors import DatabaseError
from db.holds import Hold, end_lease, renew_lease

LOOP_SILENCE_S = 30.0  # an event loop that has not ticked for so long does not get its lease renewed

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Renewal:
    """What a renewal found. `began_s`: the monotonic time just before it was asked for."""

    began_s: float
    holds: tuple[Hold, ...]
    cancelled: tuple[str, ...]


class Lease:
    """One worker's lease. `start` returns at once; `is_live` tells whether runs may be taken."""

    def __init__(
        self,
        *,
        worker_id: str,
        database_url: str,
        pooler: bool,
        slots: int,
        lease_s: float,
        on_renewed: Callable[[Renewal], None],
    ) -> None:
        self._worker_id = worker_id
        self._database_url = database_url
        self._pooler = pooler
        self._slots = slots
        self._lease_s = lease_s
        self._on_renewed = on_renewed
        self._main_loop = asyncio.get_running_loop()
        self._ticked_s = time.monotonic()
        self._valid_until_s = 0.0
        self._reachable_since_s: float | None = None
        self._stopping = threading.Event()
        self._renewed = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="lease", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def tick(self) -> None:
        """The event loop is alive. To be called from it, about once a second."""
        self._ticked_s = time.monotonic()

    @property
    def is_live(self) -> bool:
        """True while the database is sure to hold this worker for alive."""
        return time.monotonic() < self._valid_until_s

    async def wait_until_live(self) -> None:
        """Returns when the lease is live; at once, most of the time."""
        while not self.is_live:
            self._renewed.clear()
            await self._renewed.wait()

    @property
    def has_seen_a_lease(self) -> bool:
        """True when the database has answered for one whole lease: only then others may be called dead."""
        since_s = self._reachable_since_s
        return since_s is not None and time.monotonic() - since_s >= self._lease_s

    async def aclose(self) -> None:
        """Stops renewing and gives the lease up, so that nobody waits for it to run out."""
        self._stopping.set()
        await asyncio.to_thread(self._thread.join)

    def _run(self) -> None:
        asyncio.run(self._renew_for_ever())

    async def _renew_for_ever(self) -> None:
        database = Database.open(self._database_url, pooler=self._pooler, pool_size=1)
        try:
            while not self._stopping.is_set():
                began_s = time.monotonic()
                if began_s - self._ticked_s < LOOP_SILENCE_S:
                    await self._renew(database, began_s)
                else:
                    _log.error("the event loop is stuck: the lease is not renewed")
                spent_s = time.monotonic() - began_s
                await asyncio.to_thread(self._stopping.wait, max(self._lease_s / 3 - spent_s, 0.05))
            await self._end(database)
        finally:
            await database.close()

    async def _renew(self, database: Database, began_s: float) -> None:
        try:
            async with asyncio.timeout(self._lease_s), database.transaction() as tx:
                holds, cancelled = await renew_lease(
                    tx,
                    worker_id=self._worker_id,
                    host=socket.gethostname(),
                    pid=os.getpid(),
                    slots=self._slots,
                    lease_s=self._lease_s,
                )
        except (DatabaseError, TimeoutError) as error:
            _log.warning("the lease could not be renewed: %s", error)
            self._reachable_since_s = None
            return
        # Counted from before the request, so that this process never believes in it for longer than others.
        self._valid_until_s = began_s + self._lease_s
        self._reachable_since_s = self._reachable_since_s or began_s
        renewal = Renewal(began_s=began_s, holds=holds, cancelled=cancelled)
        self._main_loop.call_soon_threadsafe(self._tell, renewal)

    def _tell(self, renewal: Renewal) -> None:
        self._renewed.set()
        self._on_renewed(renewal)

    async def _end(self, database: Database) -> None:
        self._valid_until_s = 0.0
        try:
            async with database.transaction() as tx:
                await end_lease(tx, worker_id=self._worker_id)
        except DatabaseError as error:
            _log.warning("the lease could not be given up: %s", error)
