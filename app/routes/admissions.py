"""What is left to do when a commit has brought something into a session: tell readers and workers.

All of it only makes things quicker. What gets lost here is found in Postgres by the readers' and the workers'
own sweeps, so it is done after the commit and never fails a request.
"""

from app.resources import Resources
from db.admission import Admission


async def announce(resources: Resources, *admissions: Admission | None) -> None:
    """Publishes what each admission says, in order. None: nothing was admitted."""
    for admission in admissions:
        if admission is None:
            continue
        if admission.wake:  # first: the model is what takes time
            await resources.wake_ups.wake()
        if admission.events:
            await resources.publisher.announce(admission.session_id, admission.events)
        if admission.signal_cancel:
            await resources.publisher.signal_cancel(admission.session_id)
