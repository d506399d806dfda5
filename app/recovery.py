"""The sweeper of a worker: once a second it looks for what nobody works on."""

import asyncio
import logging

from app.lease import Lease
from app.queue import WakeUps
from app.streaming.publisher import Publisher
from app.supervisor import Supervisor, announce_swept
from db.engine import Database
from db.errors import DatabaseError
from db.sweeping import forget_workers, stale_sessions, sweep_session

SWEEP_S = 1.0

_log = logging.getLogger(__name__)


async def sweep_for_ever(
    *,
    database: Database,
    lease: Lease,
    supervisor: Supervisor,
    publisher: Publisher,
    wake_ups: WakeUps,
) -> None:
    """Takes up queued runs that no wake-up reached, and sweeps the runs of workers that are gone.

    Others are called dead only after the database has answered for a whole lease: after an outage all leases
    have run out, and their workers must have had the time to renew them.
    """
    while True:
        lease.tick()
        try:
            await supervisor.take_all()
            if lease.has_seen_a_lease:
                await _sweep(database, publisher, wake_ups)
        except DatabaseError as error:
            _log.warning("the sweep is put off: %s", error)
        await asyncio.sleep(SWEEP_S)


async def _sweep(database: Database, publisher: Publisher, wake_ups: WakeUps) -> None:
    async with database.transaction() as tx:
        stale = await stale_sessions(tx)
        if not stale:
            await forget_workers(tx)
    for session_id in stale:
        async with database.transaction() as tx:
            swept = await sweep_session(tx, session_id)
        await announce_swept(swept, publisher=publisher, wake_ups=wake_ups)
