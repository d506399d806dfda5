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
TICK_S = 1.0
RETRY_S = 0.1  # after a failure: the lease goes on running while the database is away
WARN_EACH_S = 5.0  # while it stays away

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Renewal:
    """What a renewal found.

    `began_s`: the monotonic time just before it was asked for. `reachable_since_s`: since when the database
    has answered every renewal in time.
    """

    began_s: float
    reachable_since_s: float
    holds: tuple[Hold, ...]
    cancelled: tuple[str, ...]


class Lease:
    """One worker's lease. `start` returns at once; `is_live` tells whether runs may be taken.

    `on_renewed` is called in the event loop that made this object.
    """

    def __init__(
        self,
        *,
        worker_id: str,
        database_url: str,
        pooler: bool,
        slots: int,
        lease_s: float,
        on_renewed: Callable[[Renewal], None],
        loop_silence_s: float = LOOP_SILENCE_S,
    ) -> None:
        self._worker_id = worker_id
        self._database_url = database_url
        self._pooler = pooler
        self._next_warning_s = 0.0
        self._slots = slots
        self.lease_s = lease_s
        self._on_renewed = on_renewed
        self._loop_silence_s = loop_silence_s
        self._main_loop = asyncio.get_running_loop()
        self._ticked_s = time.monotonic()
        self._ticking: asyncio.TimerHandle | None = None
        self._valid_until_s = 0.0
        self._reachable_since_s: float | None = None
        self._answered_s = 0.0
        self._ended: asyncio.Future[None] = self._main_loop.create_future()
        self._stopping = threading.Event()
        self._renewed = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="lease", daemon=True)

    def start(self) -> None:
        self._tick()
        self._thread.start()

    async def wait_until_ended(self) -> None:
        """Returns when nothing renews the lease any more. Raises: what the renewing failed with."""
        await asyncio.shield(self._ended)

    def _tick(self) -> None:
        """By itself, and not from some task: a task may wait long for the database while the loop is well."""
        self._ticked_s = time.monotonic()
        self._ticking = self._main_loop.call_later(TICK_S, self._tick)

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
        return since_s is not None and time.monotonic() - since_s >= self.lease_s

    async def aclose(self) -> None:
        """Stops renewing and gives the lease up, so that nobody waits for it to run out."""
        self._stopping.set()
        if self._thread.ident is not None:
            await asyncio.to_thread(self._thread.join)
        if self._ticking is not None:
            self._ticking.cancel()
        self._ended.cancel()

    def _run(self) -> None:
        failure: Exception | None = None
        try:
            asyncio.run(self._renew_for_ever())
        except Exception as error:  # noqa: BLE001 - it is raised again where the event loop waits for it
            failure = error
        self._main_loop.call_soon_threadsafe(self._end_waiting, failure)

    def _end_waiting(self, failure: Exception | None) -> None:
        if self._ended.done():
            return
        if failure is None:
            self._ended.set_result(None)
        else:
            self._ended.set_exception(failure)

    async def _renew_for_ever(self) -> None:
        database = Database.open(self._database_url, pooler=self._pooler, pool_size=1)
        try:
            while not self._stopping.is_set():
                began_s = time.monotonic()
                pause_s = self.lease_s / 3
                if began_s - self._ticked_s >= self._loop_silence_s:
                    _log.error("the event loop is stuck: the lease is not renewed")
                elif not await self._renew(database, began_s):
                    pause_s = RETRY_S
                spent_s = time.monotonic() - began_s
                await asyncio.to_thread(self._stopping.wait, max(pause_s - spent_s, RETRY_S / 2))
            await self._end(database)
        finally:
            await database.close()

    async def _renew(self, database: Database, began_s: float) -> bool:
        try:
            async with asyncio.timeout(self.lease_s), database.transaction() as tx:
                holds, cancelled = await renew_lease(
                    tx,
                    worker_id=self._worker_id,
                    host=socket.gethostname(),
                    pid=os.getpid(),
                    slots=self._slots,
                    lease_s=self.lease_s,
                )
        except (DatabaseError, TimeoutError) as error:
            self._reachable_since_s = None
            if began_s >= self._next_warning_s:
                self._next_warning_s = began_s + WARN_EACH_S
                _log.warning("the lease could not be renewed: %s", error)
            return False
        self._next_warning_s = 0.0
        answered_s = time.monotonic()
        if self._reachable_since_s is None or answered_s - self._answered_s > self.lease_s * 2 / 3:
            self._reachable_since_s = answered_s
        self._answered_s = answered_s
        renewal = Renewal(
            began_s=began_s,
            reachable_since_s=self._reachable_since_s,
            holds=holds,
            cancelled=cancelled,
        )
        self._main_loop.call_soon_threadsafe(self._tell, renewal)
        return True

    def _tell(self, renewal: Renewal) -> None:
        """The lease is live again only once the runs are dropped that were lost while it was not."""
        self._on_renewed(renewal)
        if not self._stopping.is_set():
            # From before the request, so that this process never believes in it for longer than others.
            self._valid_until_s = renewal.began_s + self.lease_s
        self._renewed.set()

    async def _end(self, database: Database) -> None:
        self._valid_until_s = 0.0
        try:
            async with database.transaction() as tx:
                await end_lease(tx, worker_id=self._worker_id)
        except DatabaseError as error:
            _log.warning("the lease could not be given up: %s", error)
