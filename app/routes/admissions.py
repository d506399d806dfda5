"""What is left to do when a commit has brought something into a session: tell readers and workers.

All of it only makes things quicker. What gets lost here is found in Postgres by the readers' and the workers'
own sweeps, so it is done after the commit and never fails a request.
"""

import asyncio

from app.resources import Resources
from db.admission import Admission


async def announce(resources: Resources, *admissions: Admission | None) -> None:
    """Publishes what each admission says, in order. None: nothing was admitted."""
    for admission in admissions:
        if admission is not None:
            # At once: while Redis hangs, each of the two takes all the time that it is given.
            await asyncio.gather(_wake(resources, admission), _publish(resources, admission))


async def _wake(resources: Resources, admission: Admission) -> None:
    if admission.wake:
        await resources.wake_ups.wake()


async def _publish(resources: Resources, admission: Admission) -> None:
    if admission.events:
        await resources.publisher.announce(admission.session_id, admission.events)
    if admission.signal_cancel:
        await resources.publisher.signal_cancel(admission.session_id)
