"""What ends or turns the loop from outside.

LoopSignal
├── HoldLost        another epoch has the session: stop at once, write nothing more
└── InboxChanged    something came in since we looked: look again and decide again
"""


class LoopSignal(Exception):
    """Base of the signals that a sink raises on a commit. Neither is a failure."""


class HoldLost(LoopSignal):
    """The commit was refused by the fence and nothing of it was written."""


class InboxChanged(LoopSignal):
    """The commit was refused because it was decided on an older inbox; nothing of it was written."""
