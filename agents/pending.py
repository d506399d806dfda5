"""Which of the prompts that wait are taken up next, and how many of them together.

`interrupt` goes before `steer`, `steer` before all others, and what came first before what came later. A
batch, the prompts of one POST, is never taken apart. `db.transcript` lists them in the same order.
"""

from agents.config import QueueModes
from agents.types import PendingPrompt

Prompts = tuple[PendingPrompt, ...]

_RANKS = {"interrupt": 0, "steer": 1}
_LAST_RANK = 2


def steering(pending: Prompts, modes: QueueModes) -> Prompts:
    """What the run in progress takes up before its next request. `pending`: oldest first."""
    return _taken(pending, _RANKS["steer"], modes)


def notes(pending: Prompts) -> Prompts:
    """System messages, which go with the next request, whoever makes it."""
    return tuple(prompt for prompt in pending if prompt.delivery == "next_request")


def next_batch(pending: Prompts, modes: QueueModes) -> Prompts:
    """What the next run of the session begins with; empty when nothing is pending that makes a run."""
    pending = tuple(prompt for prompt in pending if prompt.delivery != "next_request")
    return _taken(pending, min(map(_rank, pending), default=_LAST_RANK), modes)


def _rank(prompt: PendingPrompt) -> int:
    return _RANKS.get(prompt.delivery, _LAST_RANK)


def _taken(pending: Prompts, rank: int, modes: QueueModes) -> Prompts:
    waiting = tuple(prompt for prompt in pending if _rank(prompt) == rank)
    if not waiting or modes.of(waiting[0].delivery) == "all":
        return waiting
    return tuple(prompt for prompt in waiting if prompt.batch_id == waiting[0].batch_id)
