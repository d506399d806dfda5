"""Runs the agent loop on sessions in memory, with a model that answers by a script."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from decimal import Decimal

import msgspec

from agents.config import AgentConfig, AgentTool, BuiltinTool, ClientTool, ModelChoice
from agents.errors import HandOver
from agents.hooks import HookChain, Hooks
from agents.loop import run_agent
from agents.targets import Target
from providers.errors import ProviderError
from providers.rehearsal import Rehearsal
from providers.retry import RetryPolicy
from providers.types import (
    Base64Source,
    Capabilities,
    MessageEnd,
    MessageStart,
    Provider,
    ProviderEvent,
    ProviderRequest,
    Stop,
    TextDelta,
    ToolCallDelta,
    ToolCallEnd,
    ToolCallStart,
    Usage,
    UsageUpdate,
)
from tests.support.memory_hold import MemoryHold, MemorySession
from tests.support.transcript_rules import log_problems, stream_problems, transcript_problems
from tools.registry import ToolRegistry

MAX_HOLDS = 40
HOOK_LIMIT_S = 0.2
READY_ROUNDS = 5  # of the event loop, in which a cancel that was heard reaches what it ends
WAIT_S = 60.0  # for what happens within milliseconds

ScriptLine = ProviderEvent | ProviderError | BaseException | Callable[[], Awaitable[None]]
Answer = Sequence[ScriptLine]


class ScriptedModel:
    """Plays one answer per request, in order; the last one again and again.

    A line is an event, an error to raise, or a coroutine function to wait for. Each request is checked
    against the rules of transcripts.
    """

    api = "rehearsal"

    def __init__(self, *answers: Answer, capabilities: Capabilities | None = None) -> None:
        self._answers = answers
        self._capabilities = capabilities or Capabilities()
        self.requests: list[ProviderRequest] = []

    def capabilities(self, model: str) -> Capabilities:
        return self._capabilities

    async def stream(self, request: ProviderRequest) -> AsyncIterator[ProviderEvent]:
        messages = msgspec.to_builtins(request.messages)
        assert transcript_problems(messages) == []
        assert messages[-1]["role"] in {"user", "tool"}
        answer = self._answers[min(len(self.requests), len(self._answers) - 1)]
        self.requests.append(request)
        for line in answer:
            if isinstance(line, BaseException):
                raise line
            if callable(line):
                await line()
            else:
                yield line

    async def aclose(self) -> None:
        """Nothing is kept open."""


class SlowRehearsal(Rehearsal):
    """The rehearsal model with a gap before each event, wide enough for all else that is ready to run."""

    async def stream(self, request: ProviderRequest) -> AsyncIterator[ProviderEvent]:
        async for event in super().stream(request):
            for _ in range(READY_ROUNDS):
                await asyncio.sleep(0)
            yield event


def text(*pieces: str, stop: Stop = Stop.END_TURN) -> list[ScriptLine]:
    """A whole answer of one text."""
    deltas = [TextDelta(index=0, text=piece) for piece in pieces]
    return [MessageStart(), *deltas, *end(stop)]


def call(index: int, name: str, arguments: str = "{}", *, call_id: str | None = None) -> list[ScriptLine]:
    """The events of one call whose arguments are JSON."""
    return [
        ToolCallStart(index=index, id=call_id or f"call_{index}", name=name),
        ToolCallDelta(index=index, json=arguments),
        ToolCallEnd(index=index, input=msgspec.json.decode(arguments)),
    ]


def calls(*names: str) -> list[ScriptLine]:
    """A whole answer of calls without arguments."""
    lines = [line for index, name in enumerate(names) for line in call(index, name)]
    return [MessageStart(), *lines, *end(Stop.TOOL_USE)]


def end(stop: Stop = Stop.END_TURN) -> list[ScriptLine]:
    return [UsageUpdate(usage=Usage(input_tokens=10, output_tokens=5)), MessageEnd(stop=stop)]


def agent(*tools: str | AgentTool, **fields: object) -> AgentConfig:
    """An agent with built-in tools by name."""
    config = {"name": "tester", "model": ModelChoice(id="rehearsal:fast"), **fields}
    entries = tuple(BuiltinTool(name=tool) if isinstance(tool, str) else tool for tool in tools)
    return AgentConfig(tools=entries, **config)  # type: ignore[arg-type]


def client_tool(name: str) -> ClientTool:
    return ClientTool(name=name, description="Run by the client.", input_schema={"type": "object"})


def price(usage: Usage) -> tuple[Decimal | None, str | None]:
    return Decimal((usage.input_tokens or 0) + (usage.output_tokens or 0)) / 1_000_000, "test"


async def no_image(_: str) -> Base64Source | None:
    return None


async def work(
    session: MemorySession,
    *,
    model: Provider | None = None,
    tools: ToolRegistry | None = None,
    prepare: Callable[[MemoryHold], None] = lambda _: None,
    retry: RetryPolicy | None = None,
    fallbacks: dict[str, Provider] | None = None,
    hooks: Sequence[Hooks] = (),
) -> MemoryHold:
    """One hold, until the run is left or the hold is killed. A hand-over is done as a worker does it."""
    hold = session.claim()
    prepare(hold)
    first = model or SlowRehearsal()
    targets = [
        Target(
            vendor="rehearsal",
            model=name,
            provider=provider,
            capabilities=provider.capabilities(name),
            price=price,
        )
        for name, provider in {"fast": first, **(fallbacks or {})}.items()
    ]
    run = asyncio.create_task(
        run_agent(
            session.snapshot(),
            targets=targets,
            tools=tools or ToolRegistry(),
            sink=hold,
            inbox=hold,
            clock=session.clock,
            load_image=no_image,
            retry=retry or RetryPolicy(),
            hooks=HookChain(hooks, limit_s=HOOK_LIMIT_S),
        )
    )
    killed = asyncio.create_task(hold.killed.wait())
    try:
        async with asyncio.timeout(WAIT_S):
            await asyncio.wait({run, killed}, return_when=asyncio.FIRST_COMPLETED)
        if hold.killed.is_set():
            run.cancel()
            await asyncio.gather(run, return_exceptions=True)
        else:
            await run
    except HandOver:
        session.requeue(takeover=False)
    finally:
        killed.cancel()
        run.cancel()
        await asyncio.gather(run, killed, return_exceptions=True)
    return hold


async def work_to_the_end(
    session: MemorySession,
    *,
    model: Provider | None = None,
    tools: ToolRegistry | None = None,
    prepare: Callable[[MemoryHold], None] = lambda _: None,
    hooks: Sequence[Hooks] = (),
) -> list[MemoryHold]:
    """Holds until nothing is queued; answers or allows what is open. Only the first hold is prepared."""
    holds: list[MemoryHold] = []
    while session.run is not None and session.run.state != "closed":
        assert len(holds) < MAX_HOLDS, "the run does not come to an end"
        for waiting in session.open_calls():
            if waiting.kind == "server":
                session.confirm(waiting.id, "allow")
            else:
                session.answer(waiting.id, f"answer to {waiting.index}")
        holds.append(await work(session, model=model, tools=tools, prepare=prepare, hooks=hooks))
        prepare = lambda _: None  # noqa: E731
    return holds


def check(session: MemorySession) -> None:
    """All rules at once, for a session with nothing left to do."""
    assert transcript_problems(session.transcript()) == []
    assert log_problems(session.events, ledger=session.ledger.values()) == []
    assert stream_problems(session.frames) == []
