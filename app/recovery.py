"""The sweeper of a worker: once a second it looks for what nobody works on."""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from uuid import UUID

from app.lease import Lease
from app.queue import WakeUps
from app.streaming.publisher import Publisher
from app.supervisor import Supervisor, announce_swept
from db.engine import Database, Transaction
from db.errors import DatabaseError
from db.idempotency import delete_expired
from db.ids import public
from db.sweeping import Swept, end_wait, forget_workers, overdue_waits, stale_sessions, sweep_session

SWEEP_S = 1.0

_log = logging.getLogger(__name__)


async def sweep_for_ever(
    *,
    database: Database,
    worker_id: str,
    lease: Lease,
    supervisor: Supervisor,
    publisher: Publisher,
    wake_ups: WakeUps,
    idempotency_hours: int,
) -> None:
    """Takes up queued runs that no wake-up reached, ends waits, and sweeps the runs of workers that are gone.

    Others are called dead only after the database has answered for a whole lease: after an outage all leases
    have run out, and their workers must have had the time to renew them. This process looks at its own
    renewals, and the database at the lease that they made, since it may stand still between two looks.
    """
    while True:
        try:
            await supervisor.take_all()
            await _end_waits(database, publisher, wake_ups)
            if lease.has_seen_a_lease:
                await _sweep(database, worker_id, lease.lease_s, publisher, wake_ups)
                await _tidy(database, idempotency_hours)
        except DatabaseError as error:
            _log.warning("the sweep is put off: %s", error)
        await asyncio.sleep(SWEEP_S)


async def _sweep(
    database: Database, worker_id: str, lease_s: float, publisher: Publisher, wake_ups: WakeUps
) -> None:
    async with database.transaction() as tx:
        stale = await stale_sessions(tx, worker_id=worker_id, lease_s=lease_s)
    async for swept in _swept(database, stale, sweep_session):
        _log.warning(
            "took back a run from a worker that is gone or does not heed a cancel",
            extra={"session_id": swept.session_id, "is_queued": swept.is_queued},
        )
        await announce_swept(swept, publisher=publisher, wake_ups=wake_ups)


async def _end_waits(database: Database, publisher: Publisher, wake_ups: WakeUps) -> None:
    async with database.transaction() as tx:
        overdue = await overdue_waits(tx)
    async for swept in _swept(database, overdue, end_wait):
        _log.info("closed a run that nobody answered in time", extra={"session_id": swept.session_id})
        await announce_swept(swept, publisher=publisher, wake_ups=wake_ups)


async def _swept(
    database: Database,
    session_ids: Iterable[UUID],
    sweep: Callable[[Transaction, UUID], Awaitable[Swept | None]],
) -> AsyncIterator[Swept]:
    """What `sweep` has done to each of the sessions, in a transaction of its own."""
    for session_id in session_ids:
        try:
            async with database.transaction() as tx:
                swept = await sweep(tx, session_id)
        except DatabaseError:
            raise
        except Exception:  # noqa: BLE001 - one run that cannot be read must not keep the others waiting
            _log.exception("a run could not be swept", extra={"session_id": public("sess", session_id)})
            continue
        if swept is not None:
            yield swept


async def _tidy(database: Database, idempotency_hours: int) -> None:
    """Forgets what has served its time. Both look at an index and mostly find nothing."""
    async with database.transaction() as tx:
        await forget_workers(tx)
        await delete_expired(tx, hours=idempotency_hours)
