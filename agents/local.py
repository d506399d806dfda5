"""The agent loop without the service: a session in the memory of this process.

For programs, notebooks and tests that want the loop, tools, hooks and compaction of an agent, and nothing
stored. The loop is the one that workers run.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from decimal import Decimal

from msgspec import Struct

from agents.answers import allowed, answered, denied
from agents.config import AgentConfig
from agents.context import tail_of
from agents.errors import InboxChanged
from agents.events import Delivery, Event, StopReason
from agents.hooks import HookChain, Hooks
from agents.loop import run_agent
from agents.targets import Target
from agents.types import (
    CancelRequest,
    CloseRun,
    InboxView,
    Memory,
    PendingPrompt,
    Preview,
    Pricer,
    RequestClosed,
    RunOptions,
    Snapshot,
    Step,
    StoredMessage,
    ToolCall,
    WaitForClient,
)
from providers.ids import new_id
from providers.retry import RetryPolicy
from providers.types import Base64Source, Message, Provider, TextBlock, Usage
from tools.registry import ToolRegistry
from tools.types import ToolResult


class RunTotals(Struct, frozen=True, kw_only=True):
    """Sums over a run's requests of what is known. `cost_usd` None: no request had a price."""

    requests: int
    input_tokens: int
    output_tokens: int
    cost_usd: Decimal | None
    raw: tuple[dict[str, object], ...]


class LocalResult(Struct, frozen=True, kw_only=True):
    """What a run has come to. `stop` says `requires_action` while calls wait for `answer` or `confirm`.

    `text`: of the last assistant message. `data`: of a direct return. `tool_results`: by tool name.
    """

    stop: StopReason
    text: str
    data: dict[str, object] | None
    tool_results: dict[str, tuple[ToolResult, ...]]
    turns: int
    usage: RunTotals


@dataclass(kw_only=True)
class _Run:
    """Where the run stands that is in progress, or was last."""

    batch: tuple[PendingPrompt, ...]
    first_position: int
    deadline_at: datetime
    id: str = field(default_factory=lambda: new_id("run"))
    turns: int = 0
    last_turn: int | None = None
    calls: dict[str, ToolCall] = field(default_factory=dict)
    finished: list[ToolCall] = field(default_factory=list)
    requests: list[RequestClosed] = field(default_factory=list)
    ending: CloseRun | WaitForClient | None = None
    cancel: CancelRequest | None = None
    is_cancelled: asyncio.Event = field(default_factory=asyncio.Event)


class _Clock:
    def now(self) -> datetime:
        return datetime.now(UTC)

    def monotonic(self) -> float:
        return time.monotonic()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


def no_price(_: Usage) -> tuple[Decimal | None, str | None]:
    """Nothing is known of what requests cost."""
    return None, None


class LocalSession:
    """One conversation. Implements `agents.types.Sink` and `Inbox`.

    `on_event` is called with each event, `on_preview` with each piece of what is being produced.
    """

    def __init__(
        self,
        agent: AgentConfig,
        provider: Provider,
        *,
        tools: ToolRegistry | None = None,
        hooks: Sequence[Hooks] = (),
        price: Pricer = no_price,
        retry: RetryPolicy | None = None,
        on_event: Callable[[Event], None] = lambda _: None,
        on_preview: Callable[[Preview], None] = lambda _: None,
    ) -> None:
        vendor, _, model = agent.model.id.rpartition(":")
        self.id = new_id("sess")
        self.agent = agent
        self.messages: list[StoredMessage] = []
        self.memory: Memory | None = None
        self._target = Target(
            vendor=vendor,
            model=model,
            provider=provider,
            capabilities=provider.capabilities(model),
            price=price,
        )
        self._tools = tools or ToolRegistry()
        self._hooks = HookChain(hooks)
        self._retry = retry or RetryPolicy()
        self._on_event = on_event
        self._on_preview = on_preview
        self._pending: list[PendingPrompt] = []
        self._inbox_no = 0
        self._run = self._new_run(())

    # -- what a program does ------------------------------------------------------------------------------

    async def run(self, *prompts: str) -> LocalResult:
        """Runs `prompts` together, and what was queued meanwhile; the result of the last run.

        Raises: RuntimeError while calls wait for their answers.
        """
        if any(call.state == "open" for call in self._run.calls.values()):
            raise RuntimeError("calls wait for their answers: call `answer` or `confirm`, then `go_on`")
        self._run = self._new_run(tuple(_prompt(text, "queue", batch_id=self.id) for text in prompts))
        return await self.go_on()

    async def go_on(self) -> LocalResult:
        """Goes on after `answer` and `confirm`."""
        while True:
            ending = await self._work()
            if not isinstance(ending, CloseRun) or ending.next_run is None:
                return self._result()
            batch = tuple(prompt for prompt in self._pending if prompt.id in ending.next_run.prompt_ids)
            self._pending = [prompt for prompt in self._pending if prompt not in batch]
            self._run = self._new_run(batch)

    async def _work(self) -> CloseRun | WaitForClient | None:
        await run_agent(
            self._snapshot(),
            targets=[self._target],
            tools=self._tools,
            sink=self,
            inbox=self,
            clock=_Clock(),
            load_image=_no_image,
            retry=self._retry,
            hooks=self._hooks,
        )
        return self._run.ending

    def say(self, text: str, *, delivery: Delivery = "steer") -> None:
        """While a run goes on: `steer` goes into it, `queue` follows it."""
        self._pending.append(_prompt(text, delivery, batch_id=new_id("batch")))
        self._inbox_no += 1

    def cancel(self, reason: str | None = None) -> None:
        """Stops the run at once; what there is is kept."""
        self._run.cancel = CancelRequest(requested_at=datetime.now(UTC), reason=reason)
        self._inbox_no += 1
        self._run.is_cancelled.set()

    @property
    def open_calls(self) -> tuple[ToolCall, ...]:
        """Calls that wait for `answer`, or, when their kind is `server`, for `confirm`."""
        return tuple(call for call in self._run.calls.values() if call.state == "open")

    def answer(self, call_id: str, text: str, *, is_error: bool = False) -> None:
        """The result of a call that runs outside. Raises: KeyError."""
        self._run.calls[call_id] = answered(
            self._run.calls[call_id], (TextBlock(text=text),), is_error=is_error
        )
        self._inbox_no += 1

    def confirm(self, call_id: str, *, is_allowed: bool, message: str | None = None) -> None:
        """Allows or denies a call that waits for it. Raises: KeyError."""
        call = self._run.calls[call_id]
        self._run.calls[call_id] = allowed(call) if is_allowed else denied(call, message)
        self._inbox_no += 1

    # -- for the loop: Sink -------------------------------------------------------------------------------

    async def commit(self, step: Step, *, seen: int | None = None) -> None:
        """See `agents.types.Sink`."""
        if seen is not None and seen != self._inbox_no:
            raise InboxChanged
        self.messages += step.messages
        self._run.calls |= {call.id: call for call in step.calls}
        if any(stored.message.role == "tool" for stored in step.messages):
            self._run.finished += self._run.calls.values()
            self._run.calls = {}
        gone = {*step.applied, *step.withdrawn}
        self._run.batch = tuple(prompt for prompt in self._run.batch if prompt.id not in gone)
        self._pending = [prompt for prompt in self._pending if prompt.id not in gone]
        self.memory = step.memory or self.memory
        self._run.turns = self._run.turns if step.turns is None else step.turns
        self._run.last_turn = self._run.last_turn if step.opened is None else step.opened.turn
        if step.closed is not None:
            self._run.requests.append(step.closed)
        self._run.ending = step.ending if isinstance(step.ending, CloseRun | WaitForClient) else None
        for event in step.events:
            self._on_event(event)

    def preview(self, preview: Preview) -> None:
        self._on_preview(preview)

    # -- for the loop: Inbox ------------------------------------------------------------------------------

    async def look(self) -> InboxView:
        return InboxView(
            inbox_no=self._inbox_no,
            modes=self.agent.queue_modes,
            cancel=self._run.cancel,
            pending=tuple(self._pending),
            calls=tuple(self._run.calls.values()),
        )

    async def cancelled(self) -> None:
        await self._run.is_cancelled.wait()

    async def may_start(self) -> bool:
        return True

    async def until_live(self) -> None:
        """There is no lease."""

    # -- inside -------------------------------------------------------------------------------------------

    def _new_run(self, batch: tuple[PendingPrompt, ...]) -> "_Run":
        return _Run(
            batch=batch,
            first_position=len(self.messages) + 1,
            deadline_at=datetime.now(UTC) + timedelta(seconds=self.agent.time_limit_s),
        )

    def _snapshot(self) -> Snapshot:
        reach = 0 if self.memory is None else self.memory.position
        folded = [stored.message for stored in self.messages[:reach]]
        return Snapshot(
            session_id=self.id,
            run_id=self._run.id,
            agent=self.agent,
            messages=tuple(self.messages[reach:]),
            tail_role=tail_of(self.messages),
            batch=self._run.batch,
            inbox=InboxView(
                inbox_no=self._inbox_no,
                modes=self.agent.queue_modes,
                cancel=self._run.cancel,
                pending=tuple(self._pending),
                calls=tuple(self._run.calls.values()),
            ),
            turns=self._run.turns,
            last_turn=self._run.last_turn,
            next_position=len(self.messages) + 1,
            deadline_at=self._run.deadline_at,
            memory=self.memory,
            task=next((message for message in reversed(folded) if message.role == "user"), None),
            options=RunOptions(),
        )

    def _result(self) -> LocalResult:
        if isinstance(self._run.ending, CloseRun):
            stop = self._run.ending.stop_reason
        else:
            waiting = tuple(call.id for call in self.open_calls)
            stop = StopReason(type="requires_action", event_ids=waiting)
        own = [stored.message for stored in self.messages[self._run.first_position - 1 :]]
        answers: list[Message] = [message for message in own if message.role == "assistant"]
        by_name: dict[str, tuple[ToolResult, ...]] = {}
        for call in (*self._run.finished, *self._run.calls.values()):
            if call.result is not None:
                by_name[call.name] = (*by_name.get(call.name, ()), call.result)
        return LocalResult(
            stop=stop,
            text=answers[-1].text if answers else "",
            data=stop.result,
            tool_results=by_name,
            turns=self._run.turns,
            usage=_totals(self._run.requests),
        )


def _totals(requests: list[RequestClosed]) -> RunTotals:
    costs = [request.cost_usd for request in requests if request.cost_usd is not None]
    return RunTotals(
        requests=len(requests),
        input_tokens=sum(request.usage.input_tokens or 0 for request in requests),
        output_tokens=sum(request.usage.output_tokens or 0 for request in requests),
        cost_usd=sum(costs, Decimal(0)) if costs else None,
        raw=tuple(request.usage.raw for request in requests if request.usage.raw),
    )


def _prompt(text: str, delivery: Delivery, *, batch_id: str) -> PendingPrompt:
    return PendingPrompt(
        id=new_id("evt"), batch_id=batch_id, content=(TextBlock(text=text),), delivery=delivery
    )


async def _no_image(_: str) -> Base64Source | None:
    return None
