"""Where a run stands, and the one way to move it: a step that was committed."""

from collections.abc import Callable

from agents.closing import OpenWork, close
from agents.drafts import Draft
from agents.errors import InboxChanged, Stopped
from agents.events import StatusRunning, StopReason
from agents.stop_watch import StopCause
from agents.types import (
    Clock,
    CloseRun,
    Inbox,
    InboxView,
    Sink,
    Snapshot,
    Step,
    ToolCall,
    WaitForClient,
)
from providers.types import Message


class Progress:
    """What the snapshot said, brought forward by each step that was committed.

    `calls` are those of the last assistant message as long as the transcript lacks their results.
    """

    def __init__(self, snapshot: Snapshot, *, sink: Sink, inbox: Inbox, clock: Clock) -> None:
        self.snapshot = snapshot
        self.agent = snapshot.agent
        self.clock = clock
        self.messages: list[Message] = [stored.message for stored in snapshot.messages]
        self.last_calls: tuple[ToolCall, ...] = ()
        self.turns = snapshot.turns
        self.batch = snapshot.batch
        self.calls: tuple[ToolCall, ...] = snapshot.inbox.calls
        self.has_left = False
        self._is_announced = False
        self._next_position = snapshot.next_position
        self._view = snapshot.inbox
        self._sink = sink
        self._inbox = inbox

    def draft(self, *, turn: int | None = None) -> Draft:
        """An empty draft of the present moment."""
        return Draft(
            session_id=self.snapshot.session_id,
            run_id=self.snapshot.run_id,
            now=self.clock.now(),
            next_position=self._next_position,
            turn=turn if turn is not None else self.turns or None,
        )

    def announce(self, draft: Draft) -> None:
        """Says once per hold that somebody works on the run."""
        if not self._is_announced:
            draft.event(StatusRunning)

    async def commit(self, draft: Draft) -> None:
        """Stores a step that does not depend on what has come in. Raises: HoldLost."""
        step = draft.build()
        await self._sink.commit(step)
        self._advance(step)

    async def decide(self, write: Callable[[InboxView], Draft]) -> None:
        """Stores a step that was decided on the inbox; decides again as long as something has come in.

        Raises: HoldLost; Stopped when the run was cancelled meanwhile, with nothing written.
        """
        while True:
            if self._view.cancel is not None:
                raise Stopped
            step = write(self._view).build()
            try:
                await self._sink.commit(step, seen=self._view.inbox_no)
            except InboxChanged:
                await self.look()
                continue
            self._advance(step)
            return

    async def close(
        self,
        stop: StopReason,
        write: Callable[[Draft], None] | None = None,
        *,
        turn: int | None = None,
    ) -> None:
        """Closes the run, after what `write` adds, whatever has come in. Raises: HoldLost."""
        while True:
            draft = self.draft(turn=turn)
            if write is not None:
                write(draft)
            close(draft, self._work(), stop)
            try:
                step = draft.build()
                await self._sink.commit(step, seen=self._view.inbox_no)
            except InboxChanged:
                await self.look()
                continue
            self._advance(step)
            return

    async def look(self) -> None:
        """Reads the inbox, and takes over the answers of the client. Raises: HoldLost."""
        self._view = await self._inbox.look()
        answers = {call.id: call for call in self._view.calls if call.kind == "client"}
        self.calls = tuple(answers.get(call.id, call) for call in self.calls)

    async def may_start(self) -> bool:
        """See `Inbox.may_start`."""
        return await self._inbox.may_start()

    @property
    def expects_answer(self) -> bool:
        """True when the model has something to answer: new prompts, or a transcript that ends on its turn."""
        return bool(self.batch) or (bool(self.messages) and self.messages[-1].role in {"user", "tool"})

    def stop_reason(self, cause: StopCause | None) -> StopReason:
        """Why the run closes early, after `look`."""
        if cause == "timed_out":
            return StopReason(type="timed_out", message="The run reached its time limit.")
        cancel = self._view.cancel
        return StopReason(type="cancelled", message=None if cancel is None else cancel.reason)

    @property
    def sink(self) -> Sink:
        return self._sink

    @property
    def inbox(self) -> InboxView:
        """The inbox as it was when it was last read."""
        return self._view

    def _work(self) -> OpenWork:
        return OpenWork(
            session_id=self.snapshot.session_id,
            run_id=self.snapshot.run_id,
            turn=self.turns or None,
            next_position=self._next_position,
            calls=self.calls,
            batch=self.batch,
            pending=self._view.pending,
        )

    def _advance(self, step: Step) -> None:
        self.messages.extend(stored.message for stored in step.messages)
        self._next_position += len(step.messages)
        changed = {call.id: call for call in step.calls}
        known = {call.id for call in self.calls}
        self.calls = tuple(changed.get(call.id, call) for call in self.calls)
        self.calls += tuple(call for call in step.calls if call.id not in known)
        self.last_calls = self.calls
        if any(stored.message.role == "tool" for stored in step.messages):
            self.calls = ()
        if step.applied:
            self.batch = tuple(prompt for prompt in self.batch if prompt.id not in step.applied)
        if step.turns is not None:
            self.turns = step.turns
        if any(isinstance(event, StatusRunning) for event in step.events):
            self._is_announced = True
        self.has_left = self.has_left or isinstance(step.ending, CloseRun | WaitForClient)
