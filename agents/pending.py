"""Which of the prompts that wait are taken up next, and how many of them together.

`interrupt` goes before `steer`, `steer` before `queue`, and what came first before what came later. A batch,
the prompts of one POST, is never taken apart.
"""

from agents.config import QueueModes
from agents.events import Delivery
from agents.types import PendingPrompt

Prompts = tuple[PendingPrompt, ...]

_ORDER: tuple[Delivery, ...] = ("interrupt", "steer", "queue")


def steering(pending: Prompts, modes: QueueModes) -> Prompts:
    """What the run in progress takes up before its next request. `pending`: oldest first."""
    return _taken(pending, "steer", modes)


def next_batch(pending: Prompts, modes: QueueModes) -> Prompts:
    """What the next run of the session begins with; empty when nothing is pending."""
    present = {prompt.delivery for prompt in pending}
    first = next((delivery for delivery in _ORDER if delivery in present), None)
    return () if first is None else _taken(pending, first, modes)


def _taken(pending: Prompts, delivery: Delivery, modes: QueueModes) -> Prompts:
    waiting = tuple(prompt for prompt in pending if prompt.delivery == delivery)
    if not waiting or modes.of(delivery) == "all":
        return waiting
    return tuple(prompt for prompt in waiting if prompt.batch_id == waiting[0].batch_id)
