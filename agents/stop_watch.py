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
    """An async context: while it is open, a cancel or the deadline ends the `guard`ed work at once."""

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

        Raises: Stopped, after `work` has been cancelled and has ended.
        """
        if self.cause is not None:
            work.close()
            raise Stopped
        task: asyncio.Task[T] = asyncio.create_task(work)
        self._guarded = task
        try:
            return await task
        except asyncio.CancelledError:
            if self.has_stopped and not _is_being_cancelled():
                raise Stopped from None
            raise
        finally:
            self._guarded = None

    @property
    def has_stopped(self) -> bool:
        return self.cause is not None

    def stop(self, cause: StopCause) -> None:
        """Stops now. The first cause stands."""
        self.cause = self.cause or cause
        if self._guarded is not None:
            self._guarded.cancel()

    async def _wait(self) -> None:
        cancelled = asyncio.create_task(self._inbox.cancelled())
        left_s = max((self._deadline_at - self._clock.now()).total_seconds(), 0.0)
        overdue = asyncio.create_task(self._clock.sleep(left_s))
        try:
            await asyncio.wait((cancelled, overdue), return_when=asyncio.FIRST_COMPLETED)
            self.stop("cancelled" if cancelled.done() else "timed_out")
        finally:
            cancelled.cancel()
            overdue.cancel()


def _is_being_cancelled() -> bool:
    """True when the task that asks is itself cancelled from outside."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
