"""Where a run stands, and the one way to move it: a step that was committed."""

from collections.abc import Callable
from typing import Any

from msgspec.structs import replace

from agents.closing import OpenWork, add_session_error, append_results, close, ending_of
from agents.context import Context
from agents.drafts import Draft
from agents.errors import InboxChanged, Stopped
from agents.events import StatusRunning, StopReason
from agents.hooks import NO_HOOKS, HookChain, HookContext
from agents.pending import notes, steering
from agents.stop_watch import StopWatch
from agents.types import (
    Clock,
    CloseRun,
    Inbox,
    PendingPrompt,
    Sink,
    Snapshot,
    Step,
    ToolCall,
    WaitForClient,
)

Write = Callable[[Draft], None]
"""Adds to a draft. May be called several times for one step: it must not remember what it did."""


def nothing(_: Draft) -> None:
    """The `Write` that adds nothing."""


class Progress:
    """What the snapshot said, brought forward by each step that was committed.

    `calls` are those of the last assistant message as long as the transcript lacks their results. The step
    that finishes the last of them puts the results into the transcript, whoever writes that step.
    """

    def __init__(
        self,
        snapshot: Snapshot,
        *,
        sink: Sink,
        inbox: Inbox,
        clock: Clock,
        stop: StopWatch,
        hooks: HookChain = NO_HOOKS,
    ) -> None:
        self.snapshot = snapshot
        self.agent = snapshot.agent
        self.sink = sink
        self.hooks = hooks
        self.clock = clock
        self.context = Context(snapshot)
        self.turns = snapshot.turns
        self.turn = snapshot.last_turn
        self.batch = snapshot.batch
        self.calls: tuple[ToolCall, ...] = snapshot.inbox.calls
        self.finished_calls: tuple[ToolCall, ...] = ()  # of the last turn that had some, with their results
        self.next_position = snapshot.next_position
        self.has_left = False
        self._is_announced = False
        self._view = snapshot.inbox
        self._inbox = inbox
        self._stop = stop

    @property
    def hook_context(self) -> HookContext:
        """What hooks are told about where they are called."""
        snapshot = self.snapshot
        return HookContext(
            session_id=snapshot.session_id,
            run_id=snapshot.run_id,
            agent=self.agent.name,
            end_user_id=snapshot.end_user_id,
            turn=self.turn or 1,
        )

    async def tell(self, name: str, *values: Any) -> None:
        """Tells the observers of this name, if there are any."""
        if self.hooks.has(name):
            await self.hooks.tell(name, self.hook_context, *values)

    def announce(self, draft: Draft) -> None:
        """Says once per hold that somebody works on the run."""
        if not self._is_announced:
            draft.event(StatusRunning)

    async def commit(self, write: Write) -> None:
        """Stores a step that does not depend on what has come in. Raises: HoldLost."""
        draft = self._written(write)
        stop = ending_of(self.calls_after(draft))
        if stop is not None:
            await self.close(stop, write)  # which depends on what has come in
            return
        self._append_finished(draft)
        step = draft.build()
        await self.sink.commit(step)
        self._advance(step)

    async def decide(self, write: Write, *, turn: int | None = None) -> None:
        """Stores a step that was decided on the inbox; decides again as long as something has come in.

        `turn`: of its events, when it is not that of the last request.
        Raises: HoldLost; Stopped when the run was cancelled or its time is over, with nothing written.
        """
        while not self._must_stop():
            draft = self._written(write, turn=turn)
            stop = ending_of(self.calls_after(draft))
            if stop is None:
                self._append_finished(draft)
            else:
                close(draft, self._work(draft), stop)
            if await self._is_stored(draft):
                return
        raise Stopped

    async def begin_turn(self, write: Write, *, turn: int) -> bool:
        """As `decide`, for the step that begins a turn, which a cancel `after_turn` stops too.

        False: the steering that was to be answered has been withdrawn; nothing was written.
        """
        while not (self._must_stop() or self.stops_after_turn):
            if not self.expects_answer:
                return False
            if await self._is_stored(self._written(write, turn=turn)):
                return True
        raise Stopped

    async def end_turn(self, write: Write = nothing) -> None:
        """Closes the run as finished, after what `write` adds; goes on instead when steering has come in.

        Raises: HoldLost.
        """
        while True:
            draft = self._written(write)
            if not self._goes_on(draft.turns or self.turns):
                close(draft, self._work(draft), self._end_reason())
            if draft.is_empty or await self._is_stored(draft):
                return

    async def close(self, stop: StopReason, write: Write = nothing) -> None:
        """Closes the run, after what `write` adds, whatever has come in. Raises: HoldLost."""
        while True:
            draft = self._written(write)
            close(draft, self._work(draft), stop)
            if await self._is_stored(draft):
                return

    async def close_stopped(self, write: Write = nothing) -> None:
        """Closes the run that a cancel or the time limit has stopped. Raises: HoldLost."""
        await self._look()
        if self._stop.cause == "timed_out":
            reason = StopReason(type="timed_out", message="The run reached its time limit.")
        else:
            reason = self._cancelled()
        await self.close(reason, write)

    async def fail(self, code: str, text: str, write: Write = nothing) -> None:
        """Closes the run with an error that is not a provider's. `text` is for users. Raises: HoldLost."""

        def write_error(draft: Draft) -> None:
            write(draft)
            add_session_error(draft, code=code, message=text)

        await self.close(StopReason(type="error", code=code, message=text), write_error)

    async def may_start(self) -> bool:
        """See `Inbox.may_start`."""
        return await self._inbox.may_start()

    async def until_live(self) -> None:
        """See `Inbox.until_live`."""
        await self._inbox.until_live()

    @property
    def expects_answer(self) -> bool:
        """True when the model has something to answer: new prompts, or a transcript that ends on its turn."""
        if self.batch or self._goes_on(self.turns):
            return True
        return not self.snapshot.options.compact and self.context.tail in {"user", "tool"}

    @property
    def stops_after_turn(self) -> bool:
        """True when no further turn is to begin: somebody asked to stop the run."""
        return self._view.cancel is not None

    @property
    def arrivals(self) -> tuple[PendingPrompt, ...]:
        """What the next request takes up: system messages, the run's own prompts, then steering."""
        pending = self._view.pending
        return (*notes(pending), *self.batch, *steering(pending, self._view.modes))

    def calls_after(self, draft: Draft) -> tuple[ToolCall, ...]:
        """The calls as they are once `draft` is stored, in source order."""
        return _changed(self.calls, draft.calls)

    def _must_stop(self) -> bool:
        cancel = self._view.cancel
        return self._stop.has_stopped() or (cancel is not None and cancel.mode == "now")

    def _goes_on(self, turns: int) -> bool:
        """True when steering waits that this run may still take up, after so many turns."""
        if self.snapshot.options.compact:
            return False
        may_go_on = (
            turns < self.agent.max_turns and not self.stops_after_turn and not self._stop.has_stopped()
        )
        return may_go_on and bool(steering(self._view.pending, self._view.modes))

    def _end_reason(self) -> StopReason:
        """Why a run closes whose model has finished: it has, or this was to be its last turn anyway."""
        cancel = self._view.cancel
        is_last = cancel is not None and cancel.mode == "after_turn"
        return self._cancelled() if is_last else StopReason(type="end_turn")

    def _cancelled(self) -> StopReason:
        cancel = self._view.cancel
        return StopReason(type="cancelled", message=None if cancel is None else cancel.reason)

    def _written(self, write: Write, *, turn: int | None = None) -> Draft:
        draft = Draft(
            session_id=self.snapshot.session_id,
            run_id=self.snapshot.run_id,
            now=self.clock.now(),
            next_position=self.next_position,
            turn=self.turn if turn is None else turn,
        )
        write(draft)
        return draft

    def _append_finished(self, draft: Draft) -> None:
        calls = self.calls_after(draft)
        if calls and all(call.state == "done" for call in calls):
            append_results(draft, calls)

    async def _is_stored(self, draft: Draft) -> bool:
        """Commits what was decided on the inbox as we know it. False: it has changed, and was read again."""
        step = draft.build()
        if isinstance(step.ending, CloseRun):
            await self.tell("run_end", step.ending.stop_reason)
        try:
            await self.sink.commit(step, seen=self._view.inbox_no)
        except InboxChanged:
            await self._look()
            return False
        self._advance(step)
        return True

    async def _look(self) -> None:
        """Reads the inbox, and takes over the answers of the client. Raises: HoldLost."""
        self._view = await self._inbox.look()
        stored = {call.id: call for call in self._view.calls}
        self.calls = tuple(stored.get(call.id, call) if call.state == "open" else call for call in self.calls)

    def _work(self, draft: Draft) -> OpenWork:
        return OpenWork(
            session_id=self.snapshot.session_id,
            run_id=self.snapshot.run_id,
            turn=self.turn,
            next_position=self.next_position,
            calls=self.calls_after(draft),
            batch=self.batch,
            pending=self._view.pending,
            modes=self._view.modes,
        )

    def _advance(self, step: Step) -> None:
        self.context.advance(step)
        self.next_position += len(step.messages)
        self.calls = _changed(self.calls, step.calls)
        if any(stored.message.role == "tool" for stored in step.messages):
            self.finished_calls, self.calls = self.calls, ()
        if step.applied:
            self.batch = _without(self.batch, step.applied)
            self._view = replace(self._view, pending=_without(self._view.pending, step.applied))
        if step.opened is not None:
            self.turn = step.opened.turn
        if step.turns is not None:
            self.turns = step.turns
        if any(isinstance(event, StatusRunning) for event in step.events):
            self._is_announced = True
        self.has_left = isinstance(step.ending, CloseRun | WaitForClient)


def _without(prompts: tuple[PendingPrompt, ...], ids: tuple[str, ...]) -> tuple[PendingPrompt, ...]:
    return tuple(prompt for prompt in prompts if prompt.id not in ids)


def _changed(calls: tuple[ToolCall, ...], changes: tuple[ToolCall, ...]) -> tuple[ToolCall, ...]:
    by_id = {call.id: call for call in (*calls, *changes)}
    return tuple(sorted(by_id.values(), key=lambda call: call.index))
