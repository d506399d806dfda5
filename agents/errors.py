"""What ends or turns the loop from outside.

LoopSignal
├── HoldLost        another epoch has the session: stop at once, write nothing more
├── InboxChanged    something came in since we looked: look again and decide again
├── HandOver        this process goes away: give the run back to the queue, between two steps
└── Stopped         the run was cancelled or its time is over
"""


class LoopSignal(Exception):
    """Base of all. None of them is a failure."""


class HoldLost(LoopSignal):
    """The commit was refused by the fence and nothing of it was written."""


class InboxChanged(LoopSignal):
    """The commit was refused because it was decided on an older inbox; nothing of it was written."""


class HandOver(LoopSignal):
    """Everything done so far is stored; another worker carries on from there."""


class Stopped(LoopSignal):
    """What was being awaited has been cancelled. The reason stands in the loop's `StopWatch`."""
