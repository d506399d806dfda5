"""A session in memory that keeps the rules of the database: a scripted twin of the hold for the agent loop.

What the database would refuse is an AssertionError here; what the fence would refuse is HoldLost or
InboxChanged. Anything can be made to happen at a chosen moment (`MemoryHold.at`), a kill too: a killed hold
stops at that moment as a killed process does, and its session is queued again as the sweeper does it.
"""

import asyncio
from collections import Counter, defaultdict
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any, Literal

import msgspec

from agents.answers import allowed, answered, denied, replied
from agents.closing import OpenWork, close_step, record_result, requeue_step, stops_here
from agents.config import AgentConfig, QueueMode
from agents.context import tail_of
from agents.drafts import Draft
from agents.errors import HoldLost, InboxChanged
from agents.events import (
    CancelMode,
    Confirmation,
    Delivery,
    Event,
    PromptUpdated,
    PromptWithdrawn,
    StatusIdle,
    StopReason,
    SystemMessage,
    UserCustomToolResult,
    UserMessage,
    UserToolConfirmation,
)
from agents.log import number
from agents.types import (
    CancelRequest,
    CloseRun,
    InboxView,
    Memory,
    PendingPrompt,
    Preview,
    PreviewStart,
    RequestClosed,
    RequestOpened,
    RequeueRun,
    RunOptions,
    Snapshot,
    Step,
    StoredMessage,
    ToolCall,
    WaitForClient,
)
from providers.ids import new_id
from providers.types import Message, TextBlock

Moment = Literal["before_commit", "after_commit", "preview", "look"]
Json = dict[str, Any]

START = datetime(2030, 1, 1, tzinfo=UTC)
NO_OPTIONS = RunOptions()
SKIPPED_BELOW_S = 600.0  # pauses between retries are skipped, the time limit of a run is not


class FakeClock:
    """Time that passes only when it is told to, or at once for whoever sleeps a short while.

    `on_sleep` is called with the seconds of each short sleep, before time is moved.
    """

    def __init__(self) -> None:
        self.elapsed_s = 0.0
        self.slept: list[float] = []
        self.on_sleep: Callable[[float], None] = lambda _: None
        self._sleepers: list[tuple[float, asyncio.Event]] = []

    def now(self) -> datetime:
        return START + timedelta(seconds=self.elapsed_s)

    def monotonic(self) -> float:
        return self.elapsed_s

    async def sleep(self, seconds: float) -> None:
        if seconds < SKIPPED_BELOW_S:
            self.slept.append(seconds)
            self.on_sleep(seconds)
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            self.advance(seconds)
            return
        is_due = asyncio.Event()
        self._sleepers.append((self.elapsed_s + seconds, is_due))
        await is_due.wait()

    def advance(self, seconds: float) -> None:
        self.elapsed_s += seconds
        for due_s, is_due in self._sleepers:
            if due_s <= self.elapsed_s:
                is_due.set()


class MemoryRun:
    """A run that is not closed, or was the last to close."""

    def __init__(self, run_id: str, prompt_ids: tuple[str, ...], options: RunOptions = NO_OPTIONS) -> None:
        self.id = run_id
        self.options = options
        self.prompt_ids = prompt_ids
        self.state: Literal["queued", "running", "waiting", "closed"] = "queued"
        self.turns = 0
        self.deadline_at: datetime | None = None
        self.cancel: CancelRequest | None = None
        self.stop: StopReason | None = None


class MemorySession:
    """One session: transcript, calls, log, ledger, prompts, and the numbers of the fence.

    `frames` is what a reader gets: durable events and previews in the order in which they became visible.
    """

    def __init__(self, agent: AgentConfig, *, clock: FakeClock | None = None) -> None:
        self.id = new_id("sess")
        self.agent = agent
        self.clock = clock or FakeClock()
        self.epoch = 0
        self.commit_no = 0
        self.inbox_no = 0
        self.messages: list[StoredMessage] = []
        self.memory: Memory | None = None
        self.calls: dict[str, ToolCall] = {}
        self.events: list[Json] = []
        self.frames: list[Json] = []
        self.ledger: dict[str, Json] = {}
        self.prompts: dict[str, PendingPrompt] = {}  # those that are pending
        self.taken: dict[str, str] = {}  # the run of each prompt that a transcript holds
        self.run: MemoryRun | None = None
        self.runs: list[MemoryRun] = []
        self.hold: MemoryHold | None = None

    # -- what clients do --------------------------------------------------------------------------------

    def post(self, *texts: str, delivery: Delivery = "queue") -> tuple[str, ...]:
        """Admits one batch of prompts; makes a run when none is open. Returns their ids."""
        is_free = self.run is None or self.run.state == "closed"
        assert is_free or delivery != "reject", "refused with session_busy"
        batch_id = new_id("batch")
        draft = self._draft()
        prompts = []
        for text in texts:
            content = (TextBlock(text=text),)
            event = draft.event(
                UserMessage, content=content, delivery=delivery, batch_id=batch_id, processed=False
            )
            prompts.append(PendingPrompt(id=event.id, batch_id=batch_id, content=content, delivery=delivery))
        self._append(draft.build().events)
        self.prompts |= {prompt.id: prompt for prompt in prompts}
        if is_free:
            self._begin_run(new_id("run"), tuple(prompt.id for prompt in prompts))
        elif delivery == "interrupt":
            self.cancel("A prompt took the place of the run.")
        self.inbox_no += 1
        return tuple(prompt.id for prompt in prompts)

    def instruct(self, text: str) -> str:
        """A system message."""
        draft = self._draft()
        content = (TextBlock(text=text),)
        event = draft.event(SystemMessage, content=content, processed=False)
        self._append(draft.build().events)
        self.prompts[event.id] = PendingPrompt(
            id=event.id, batch_id=new_id("batch"), content=content, delivery="next_request"
        )
        self.inbox_no += 1
        return event.id

    def compact(self, instructions: str | None = None) -> None:
        """Asks for a memory while nothing runs."""
        assert self.run is None or self.run.state == "closed", "refused with session_busy"
        run = MemoryRun(new_id("run"), (), RunOptions(compact=True, instructions=instructions))
        self.run = run
        self.runs.append(run)
        self.inbox_no += 1

    def edit(self, prompt_id: str, text: str) -> bool:
        """Changes a prompt that nobody has taken up; False when it is too late."""
        if not self._is_pending(prompt_id):
            return False
        content = (TextBlock(text=text),)
        self.prompts[prompt_id] = msgspec.structs.replace(self.prompts[prompt_id], content=content)
        draft = self._draft()
        draft.event(PromptUpdated, prompt_id=prompt_id, content=content)
        self._append(draft.build().events)
        self.inbox_no += 1
        return True

    def withdraw(self, prompt_id: str) -> bool:
        """Takes back a prompt that waits behind the run; False when it is too late."""
        if not self._is_pending(prompt_id):
            return False
        del self.prompts[prompt_id]
        draft = self._draft()
        draft.event(PromptWithdrawn, prompt_id=prompt_id, reason="client")
        self._append(draft.build().events)
        self.inbox_no += 1
        return True

    def set_modes(self, **modes: QueueMode) -> None:
        """Changes how many pending prompts go together."""
        self.agent = msgspec.structs.replace(self.agent, **modes)
        self.inbox_no += 1

    def answer(self, call_id: str, text: str, *, is_error: bool = False) -> None:
        """The client's result for a call that is open."""
        call = self.calls[call_id]
        assert call.kind != "server"
        assert call.state == "open"
        content = (TextBlock(text=text),)
        draft = self._draft()
        draft.event(UserCustomToolResult, custom_tool_use_id=call_id, content=content, is_error=is_error)
        self._answered(draft, answered(call, content, is_error=is_error))

    def reply(self, text: str) -> None:
        """A plain message while only questions are open."""
        content = (TextBlock(text=text),)
        for call in self.open_calls():
            assert call.kind == "question"
            draft = self._draft()
            draft.event(UserCustomToolResult, custom_tool_use_id=call.id, content=content, is_error=False)
            self._answered(draft, replied(call, content))

    def confirm(self, call_id: str, result: Confirmation, message: str | None = None) -> None:
        """The client allows or denies a call that waits for its approval."""
        call = self.calls[call_id]
        assert call.kind == "server"
        assert call.state == "open"
        draft = self._draft()
        draft.event(UserToolConfirmation, tool_use_id=call_id, result=result, deny_message=message)
        if result == "deny":
            call = denied(call, message)
            record_result(draft, call)
        else:
            call = allowed(call)
        self._answered(draft, call)

    def _answered(self, draft: Draft, call: ToolCall) -> None:
        self.calls[call.id] = call
        assert self.run is not None
        if self.run.state == "waiting":
            left = tuple(call.id for call in self.open_calls())
            if left:
                draft.event(StatusIdle, stop_reason=StopReason(type="requires_action", event_ids=left))
            else:
                self.run.state = "queued"
        self._append(draft.build().events)
        self.inbox_no += 1

    def cancel(self, reason: str | None = None, *, mode: CancelMode = "now", is_heard: bool = True) -> None:
        """Stops the open run. `is_heard` False: the worker is not told and has to find out by itself."""
        run = self.run
        assert run is not None
        self.inbox_no += 1
        if run.state == "running" or (run.state != "closed" and not stops_here(mode, self._work())):
            if run.cancel is None or (run.cancel.mode == "after_turn" and mode == "now"):
                run.cancel = CancelRequest(requested_at=self.clock.now(), mode=mode, reason=reason)
            if run.state == "running" and mode == "now" and is_heard and self.hold is not None:
                self.hold.heard_cancel.set()
        elif run.state in {"queued", "waiting"}:
            stop = StopReason(type="cancelled", message=reason)
            self._store(close_step(self._work(), stop, self.clock.now()))

    # -- what workers do --------------------------------------------------------------------------------

    def claim(self) -> "MemoryHold":
        """A hold on the run that is queued."""
        assert self.run is not None
        assert self.run.state == "queued"
        self.run.state = "running"
        self.epoch += 1
        self.hold = MemoryHold(self)
        return self.hold

    def requeue(self, *, takeover: bool) -> None:
        """Takes the run from its worker, as the sweeper or a shutdown does; closes it if it is to stop."""
        assert self.run is not None
        cancel, work = self.run.cancel, self._work()
        if cancel is not None and stops_here(cancel.mode, work):
            stop = StopReason(type="cancelled", message=cancel.reason)
            self._store(close_step(work, stop, self.clock.now()))
            self.epoch += 1
        else:
            self._store(requeue_step(work, self.clock.now(), takeover=takeover))

    def snapshot(self) -> Snapshot:
        run = self.run
        assert run is not None
        reach = 0 if self.memory is None else self.memory.position
        run.deadline_at = run.deadline_at or self.clock.now() + timedelta(seconds=self.agent.time_limit_s)
        return Snapshot(
            session_id=self.id,
            run_id=run.id,
            agent=self.agent,
            messages=tuple(self.messages[reach:]),
            tail_role=tail_of(self.messages),
            task=next((s.message for s in self.messages[:reach][::-1] if s.message.role == "user"), None),
            memory=self.memory,
            options=run.options,
            batch=tuple(self.prompts[key] for key in run.prompt_ids if key in self.prompts),
            inbox=self.inbox(),
            turns=run.turns,
            last_turn=self._last_turn(),
            next_position=len(self.messages) + 1,
            deadline_at=run.deadline_at,
        )

    def inbox(self) -> InboxView:
        assert self.run is not None
        return InboxView(
            inbox_no=self.inbox_no,
            modes=self.agent.queue_modes,
            cancel=self.run.cancel,
            pending=self._unbound(),
            calls=self._unsettled(),
        )

    def open_calls(self) -> list[ToolCall]:
        """What waits for the client, in source order."""
        return [call for call in self._unsettled() if call.state == "open"]

    def transcript(self) -> list[Json]:
        """The messages as the API shows them."""
        return [
            {
                "id": stored.id,
                "position": stored.position,
                "role": stored.message.role,
                "content": msgspec.json.decode(msgspec.json.encode(stored.message.blocks)),
            }
            for stored in self.messages
        ]

    def event_types(self) -> list[str]:
        return [event["type"] for event in self.events]

    def find_events(self, kind: str) -> list[Json]:
        return [event for event in self.events if event["type"] == kind]

    # -- the rules --------------------------------------------------------------------------------------

    def store(self, step: Step, *, epoch: int, commit_no: int, seen: int | None) -> None:
        """One commit of a worker, behind the fence."""
        if (self.epoch, self.commit_no) != (epoch, commit_no):
            raise HoldLost
        if seen is not None and seen != self.inbox_no:
            raise InboxChanged
        self.commit_no += 1
        self._store(step)

    def _store(self, step: Step) -> None:
        run = self.run
        assert run is not None
        assert run.state != "closed", "a closed run is written to"
        for stored in step.messages:
            assert stored.position == len(self.messages) + 1, "positions are dense"
            self.messages.append(_stored_copy(stored))
        if step.memory is not None:
            assert step.memory.position <= step.memory.seen_position == len(self.messages)
            assert self.messages[step.memory.position - 1].message.tool_uses == ()
            self.memory = step.memory
        for call in step.calls:
            before = self.calls.get(call.id)
            assert before is None or before.state != "done", "a finished call is changed"
            self.calls[call.id] = msgspec.convert(msgspec.to_builtins(call), ToolCall)
        takes = {"steer", "next_request"}
        unbound = {prompt.id for prompt in self._unbound() if prompt.delivery in takes}
        for prompt_id in step.withdrawn:
            assert prompt_id in run.prompt_ids, "only a run's own prompts end with it"
            del self.prompts[prompt_id]
        for prompt_id in step.applied:
            assert prompt_id in run.prompt_ids or prompt_id in unbound
            self.taken[prompt_id] = run.id
            del self.prompts[prompt_id]
        self._book(step.opened, step.closed)
        self._append(step.events)
        if step.turns is not None:
            assert step.turns == run.turns + 1
            run.turns = step.turns
        match step.ending:
            case CloseRun(stop_reason=stop, next_run=next_run):
                run.state, run.stop = "closed", stop
                if next_run is not None:
                    self._begin_run(next_run.id, next_run.prompt_ids)
                else:
                    left = [prompt for prompt in self._unbound() if prompt.delivery != "next_request"]
                    assert not left, "prompts are forgotten"
            case WaitForClient():
                run.state, run.deadline_at = "waiting", None
                self.epoch += 1
            case RequeueRun():
                run.state = "queued"
                self.epoch += 1

    def _book(self, opened: RequestOpened | None, closed: RequestClosed | None) -> None:
        if opened is not None:
            assert not any(row["state"] == "open" for row in self.ledger.values()), "two open requests"
            assert opened.id not in self.ledger
            assert self.run is not None
            fields = msgspec.to_builtins(opened)
            self.ledger[opened.id] = {**fields, "run_id": self.run.id, "state": "open"}
        if closed is not None:
            row = self.ledger[closed.id]
            assert row["state"] == "open", "a ledger entry is closed twice"
            fields = msgspec.to_builtins(closed)
            row.update(fields.pop("usage"))
            row.update(fields)
            row["state"] = "abandoned" if closed.abandoned else "closed"

    def _append(self, events: tuple[Event, ...]) -> None:
        for logged in number(events, after_seq=len(self.events)):
            event = msgspec.json.decode(logged.json)
            self.events.append(event)
            self.frames.append(event)

    def show(self, preview: Preview) -> None:
        if isinstance(preview, PreviewStart):
            frame: Json = {"type": "event_start", "event": {"id": preview.event_id, "type": preview.kind}}
        else:
            frame = {"type": "event_delta", "event_id": preview.event_id, "delta": preview.delta}
        self.frames.append(msgspec.json.decode(msgspec.json.encode(frame)))

    def _begin_run(self, run_id: str, prompt_ids: tuple[str, ...]) -> None:
        self.run = MemoryRun(run_id, prompt_ids)
        self.runs.append(self.run)

    def _is_pending(self, prompt_id: str) -> bool:
        return any(prompt.id == prompt_id for prompt in self._unbound())

    def _unbound(self) -> tuple[PendingPrompt, ...]:
        bound = {prompt_id for run in self.runs for prompt_id in run.prompt_ids}
        return tuple(prompt for key, prompt in self.prompts.items() if key not in bound)

    def _unsettled(self) -> tuple[ToolCall, ...]:
        calls = [call for call in self.calls.values() if call.position == len(self.messages)]
        return tuple(sorted(calls, key=lambda call: call.index))

    def _last_turn(self) -> int | None:
        assert self.run is not None
        turns = [row["turn"] for row in self.ledger.values() if row["run_id"] == self.run.id]
        return turns[-1] if turns else None

    def _work(self) -> OpenWork:
        assert self.run is not None
        opened = [key for key, row in self.ledger.items() if row["state"] == "open"]
        return OpenWork(
            session_id=self.id,
            run_id=self.run.id,
            turn=self._last_turn(),
            next_position=len(self.messages) + 1,
            open_request=opened[0] if opened else None,
            calls=self._unsettled(),
            batch=tuple(self.prompts[key] for key in self.run.prompt_ids if key in self.prompts),
            pending=self._unbound(),
            modes=self.agent.queue_modes,
        )

    def _draft(self) -> Draft:
        is_open = self.run is not None and self.run.state != "closed"
        return Draft(
            session_id=self.id,
            run_id=self.run.id if self.run is not None and is_open else None,
            now=self.clock.now(),
            next_position=len(self.messages) + 1,
        )


def _stored_copy(stored: StoredMessage) -> StoredMessage:
    """What comes back from the store, which keeps no NUL and no half of a surrogate pair."""
    body = msgspec.json.encode(stored.message)
    assert b"\\u0000" not in body, "the store refuses NUL"
    return msgspec.structs.replace(stored, message=msgspec.json.decode(body, type=Message))


class MemoryHold:
    """The sink and the inbox of one hold. Moments are counted from 1."""

    def __init__(self, session: MemorySession) -> None:
        self.session = session
        self.steps: list[Step] = []
        self.previews: list[Preview] = []
        self.counts: Counter[Moment] = Counter()
        self.heard_cancel = asyncio.Event()
        self.killed = asyncio.Event()
        self.is_draining = False
        self.is_live = asyncio.Event()  # what the lease is
        self.is_live.set()
        self.waits_for_lease = asyncio.Event()
        self._epoch = session.epoch
        self._commit_no = session.commit_no
        self._actions: dict[tuple[Moment, int], list[Callable[[], object]]] = defaultdict(list)
        self._is_committing = False

    def at(self, moment: Moment, n: int, action: Callable[[], object]) -> None:
        """Has `action` called at the n-th such moment. `before_commit` counts refused commits too."""
        self._actions[moment, n].append(action)

    def kill(self) -> None:
        """The process is gone: nothing after this moment has any effect."""
        run = self.session.run
        if run is not None and run.state == "running" and self.session.epoch == self._epoch:
            self.session.requeue(takeover=True)
        self.killed.set()

    async def commit(self, step: Step, *, seen: int | None = None) -> None:
        assert not self._is_committing, "one commit is in flight per hold"
        self._is_committing = True
        try:
            await asyncio.sleep(0)
            await self._pass("before_commit")
            self.session.store(step, epoch=self._epoch, commit_no=self._commit_no, seen=seen)
            self._commit_no += 1
            self.steps.append(step)
            await self._pass("after_commit")
        finally:
            self._is_committing = False

    def preview(self, preview: Preview) -> None:
        self._count("preview")
        if self.session.epoch == self._epoch:  # readers take nothing from a hold that was put off
            self.previews.append(preview)
            self.session.show(preview)

    async def look(self) -> InboxView:
        await asyncio.sleep(0)
        await self._pass("look")
        if self.session.epoch != self._epoch:
            raise HoldLost
        return self.session.inbox()

    async def cancelled(self) -> None:
        await self.heard_cancel.wait()

    async def may_start(self) -> bool:
        await asyncio.sleep(0)
        return not self.is_draining

    async def until_live(self) -> None:
        if not self.is_live.is_set():
            self.waits_for_lease.set()
        await self.is_live.wait()

    async def _pass(self, moment: Moment) -> None:
        self._count(moment)
        if self.killed.is_set():
            await asyncio.Event().wait()

    def _count(self, moment: Moment) -> None:
        if self.killed.is_set():
            return
        self.counts[moment] += 1
        for action in self._actions.get((moment, self.counts[moment]), ()):
            action()
