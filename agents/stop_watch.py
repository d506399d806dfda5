"""Ends what a run is waiting for when it is cancelled or its time is over."""

import asyncio
from collections.abc import Coroutine
from datetime import datetime
from types import TracebackType
from typing import Any, Literal, TypeVar

from agents.errors import Stopped
from agents.types import Clock, Inbox

T = TypeVar("T")
StopCause = Literal["cancelled", "timed_out"]


class StopWatch:
    """An async context: while it is open, a cancel or the deadline ends the `guard`ed work at once.

    `cause` is the first thing that stopped the run, None as long as nothing has.
    """

    def __init__(self, *, inbox: Inbox, clock: Clock, deadline_at: datetime) -> None:
        self._inbox = inbox
        self._clock = clock
        self._deadline_at = deadline_at
        self._guarded: asyncio.Task[Any] | None = None
        self._watch: asyncio.Task[None] | None = None
        self.cause: StopCause | None = None

    async def __aenter__(self) -> "StopWatch":
        self._watch = asyncio.create_task(self._wait())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.gather(self._watch, return_exceptions=True)

    async def guard(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of `work`, which runs as a task of its own.

        Raises: Stopped, after `work` has been cancelled and has ended, whatever it made of the cancel; else
        what `work` raises, and RuntimeError when it ends by a cancel that nobody asked for.
        """
        if self.has_stopped():
            work.close()
            raise Stopped
        task: asyncio.Task[T] = asyncio.create_task(work)
        self._guarded = task
        try:
            return await task
        except asyncio.CancelledError as error:
            if _is_being_cancelled():
                raise
            if self.has_stopped():
                raise Stopped from None
            raise RuntimeError("the awaited work cancelled itself") from error
        except Exception as error:
            # Client libraries make a broken connection of a cancel.
            if self.has_stopped():
                raise Stopped from error
            raise
        finally:
            self._guarded = None

    def has_stopped(self) -> bool:
        """True when the run must end. Knows that time is over even before the watch has come to notice."""
        if self.cause is None and self._left_s() <= 0:
            self.cause = "timed_out"
        return self.cause is not None

    async def _wait(self) -> None:
        cancelled = asyncio.create_task(self._inbox.cancelled())
        overdue = asyncio.create_task(self._clock.sleep(max(self._left_s(), 0.0)))
        try:
            await asyncio.wait((cancelled, overdue), return_when=asyncio.FIRST_COMPLETED)
            self.cause = self.cause or ("cancelled" if cancelled.done() else "timed_out")
            if self._guarded is not None:
                self._guarded.cancel()
        finally:
            cancelled.cancel()
            overdue.cancel()

    def _left_s(self) -> float:
        return (self._deadline_at - self._clock.now()).total_seconds()


def _is_being_cancelled() -> bool:
    """True when the task that asks is itself cancelled from outside."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
