"""Hooks: what they see, what they change, and that none of them can break a run."""

import asyncio
import logging
from collections.abc import Sequence
from decimal import Decimal
from typing import Any

import pytest
from msgspec.structs import replace

from agents.events import StopReason
from agents.hooks import HookContext, Hooks, RequestInfo, ToolVerdict, TurnDecision, TurnReport
from agents.types import PendingPrompt, ToolCall
from providers.errors import Overloaded
from providers.types import (
    Message,
    MessageStart,
    ProviderRequest,
    Stop,
    TextBlock,
    ThinkingDelta,
    ToolCallEnd,
    ToolCallStart,
    Usage,
)
from tests.support.loop_driver import (
    Answer,
    ScriptedModel,
    agent,
    call,
    calls,
    check,
    end,
    text,
    work,
    work_to_the_end,
)
from tests.support.memory_hold import MemorySession
from tools.registry import ToolRegistry
from tools.schema import tool
from tools.types import ToolResult, text_result

ran: list[Any] = []


@tool()
async def look(at: str = "") -> str:
    """Looks."""
    ran.append(at)
    return f"seen {at}"


TOOLS = ToolRegistry((look,))


@pytest.fixture(autouse=True)
def _nothing_ran() -> None:
    ran.clear()


async def played(
    *answers: Answer, hooks: Sequence[Hooks], session: MemorySession | None = None
) -> tuple[MemorySession, ScriptedModel]:
    session = session or MemorySession(agent("look"))
    session.post("go")
    model = ScriptedModel(*answers)
    await work_to_the_end(session, model=model, tools=TOOLS, hooks=hooks)
    check(session)
    return session, model


def results(session: MemorySession) -> list[tuple[str, str]]:
    return [
        (event["outcome"], event["content"][0]["text"]) for event in session.find_events("agent.tool_result")
    ]


def said(session: MemorySession) -> list[str]:
    return [event["content"][0]["text"] for event in session.find_events("agent.message")]


class Diary(Hooks):
    """Writes down what it is told."""

    def __init__(self) -> None:
        self.lines: list[Any] = []

    async def run_start(self, context: HookContext) -> None:
        self.lines.append("run_start")

    async def run_end(self, context: HookContext, stop: StopReason) -> None:
        self.lines.append(("run_end", stop.type))

    async def message_received(self, context: HookContext, prompt: PendingPrompt) -> None:
        self.lines.append(("message_received", [block.text for block in prompt.content]))  # type: ignore[union-attr]

    async def before_prompt_build(self, context: HookContext) -> None:
        self.lines.append(("before_prompt_build", context.turn))

    async def model_request(self, context: HookContext, request: RequestInfo) -> None:
        self.lines.append(("model_request", request.turn, request.messages, request.roles, request.tools))
        assert request.prompt_tokens > 0

    async def status(self, context: HookContext, status: str) -> None:
        self.lines.append(status)

    async def content(self, context: HookContext, text: str) -> None:
        self.lines.append(("content", text))

    async def thinking(self, context: HookContext, text: str) -> None:
        self.lines.append(("thinking", text))

    async def usage(self, context: HookContext, usage: Usage, cost_usd: Decimal | None) -> None:
        self.lines.append(("usage", usage.input_tokens, cost_usd))

    async def tool_call(self, context: HookContext, call: ToolCall) -> None:
        self.lines.append(("tool_call", call.name))

    async def tool_error(self, context: HookContext, call: ToolCall, raw: str | None) -> None:
        self.lines.append(("tool_error", call.name, raw))

    async def tool_result(self, context: HookContext, call: ToolCall) -> None:
        assert call.result is not None
        self.lines.append(("tool_result", call.outcome, call.result.content[0].text))  # type: ignore[union-attr]

    async def error(self, context: HookContext, code: str, message: str) -> None:
        self.lines.append(("error", code))


async def test_observers_see_a_run_from_its_start_to_its_end_in_order() -> None:
    diary = Diary()
    thinks: Answer = [MessageStart(), ThinkingDelta(index=0, text="hm"), *call(1, "look", '{"at": "it"}')]
    await played([*thinks, *end(Stop.TOOL_USE)], text("so", " it is"), hooks=[diary])
    assert diary.lines == [
        "run_start",
        ("message_received", ["go"]),
        ("before_prompt_build", 1),
        ("model_request", 1, 1, {"user": 1}, 1),
        "requested",
        "connected",
        ("thinking", "hm"),
        ("usage", 10, Decimal("0.000015")),
        ("tool_call", "look"),
        ("tool_result", "ok", "seen it"),
        ("before_prompt_build", 2),
        ("model_request", 2, 3, {"user": 1, "assistant": 1, "tool": 1}, 1),
        "requested",
        "connected",
        ("content", "so"),
        ("content", " it is"),
        ("usage", 10, Decimal("0.000015")),
        ("run_end", "end_turn"),
    ]


async def test_calls_that_cannot_be_made_and_failed_requests_are_told_with_what_was_sent() -> None:
    diary = Diary()
    bad: Answer = [
        MessageStart(),
        ToolCallStart(index=0, id="a", name="look"),
        ToolCallEnd(index=0, input_error="not JSON", input_raw='{"at": '),
        *call(1, "missing", "{}", call_id="b"),
        *end(Stop.TOOL_USE),
    ]
    await played([Overloaded("busy")], bad, text("so"), hooks=[diary])
    assert ("error", "provider_overloaded") in diary.lines
    assert ("tool_error", "look", '{"at": ') in diary.lines
    assert ("tool_error", "missing", None) in diary.lines


async def test_the_context_is_changed_for_one_request_and_not_in_the_transcript() -> None:
    class Shortens(Hooks):
        async def transform_context(
            self, context: HookContext, messages: Sequence[Message]
        ) -> Sequence[Message]:
            return [*messages[:-1], Message(role="user", blocks=(TextBlock(text="changed"),))]

    session, model = await played(text("so"), hooks=[Shortens()])
    assert model.requests[0].messages[-1].text == "changed"
    assert session.transcript()[0]["content"][0]["text"] == "go"


async def test_a_context_that_is_not_valid_any_more_is_repaired() -> None:
    class Cuts(Hooks):
        async def transform_context(
            self, context: HookContext, messages: Sequence[Message]
        ) -> Sequence[Message]:
            return [message for message in messages if message.role != "tool"]

    _, model = await played(calls("look"), text("so"), hooks=[Cuts()])
    assert len(model.requests) == 2  # whose rules the model has checked


async def test_a_request_is_prepared_last_and_each_hook_gets_what_the_one_before_left() -> None:
    class Adds(Hooks):
        def __init__(self, word: str) -> None:
            self.word = word

        async def prepare_request(self, context: HookContext, request: ProviderRequest) -> ProviderRequest:
            return replace(request, system=f"{request.system} {self.word}")

    _, model = await played(text("so"), hooks=[Adds("one"), Adds("two")])
    assert model.requests[0].system == " one two"


class Judge(Hooks):
    def __init__(self, verdict: ToolVerdict | None) -> None:
        self.verdict = verdict
        self.seen: list[ToolCall] = []

    async def before_tool_call(self, context: HookContext, call: ToolCall) -> ToolVerdict | None:
        self.seen.append(call)
        return self.verdict


async def test_a_call_is_blocked_with_a_reason_that_the_model_reads() -> None:
    session, _ = await played(
        calls("look"), text("so"), hooks=[Judge(ToolVerdict(action="block", reason="Not there."))]
    )
    assert results(session) == [("denied", "Not there.")]
    assert ran == []
    assert said(session) == ["so"]


async def test_a_call_is_made_with_changed_arguments_which_the_next_hook_sees() -> None:
    second = Judge(None)
    changing = Judge(ToolVerdict(action="change", input={"at": "that"}))
    session, _ = await played(calls("look"), text("so"), hooks=[changing, second])
    assert ran == ["that"]
    assert second.seen[0].input == {"at": "that"}
    assert session.find_events("agent.tool_use")[0]["input"] == {"at": "that"}


async def test_arguments_that_do_not_fit_are_not_run_with() -> None:
    session, _ = await played(
        calls("look"), text("so"), hooks=[Judge(ToolVerdict(action="change", input={"where": 1}))]
    )
    assert ran == []
    assert results(session)[0][0] == "error"


async def test_a_call_waits_for_the_client_when_a_hook_asks() -> None:
    session = MemorySession(agent("look"))
    session.post("go")
    model = ScriptedModel(calls("look"), text("so"))
    hooks = [Judge(ToolVerdict(action="ask"))]
    await work(session, model=model, tools=TOOLS, hooks=hooks)
    (waiting,) = session.open_calls()
    assert (waiting.kind, ran) == ("server", [])
    session.confirm(waiting.id, "allow")
    await work(session, model=model, tools=TOOLS, hooks=hooks)
    check(session)
    assert len(ran) == 1
    assert len(hooks[0].seen) == 1


async def test_a_call_ends_the_run_when_a_hook_says_so() -> None:
    session, model = await played(
        calls("look", "look"), text("never"), hooks=[Judge(ToolVerdict(action="end", reason="Enough."))]
    )
    assert len(model.requests) == 1
    assert results(session) == [("denied", "Enough.")] * 2


async def test_a_result_is_changed_before_anybody_sees_it() -> None:
    class Redacts(Hooks):
        async def after_tool_call(
            self, context: HookContext, call: ToolCall, result: ToolResult
        ) -> ToolResult:
            return text_result("hidden", is_error=True)

    session, model = await played(calls("look"), text("so"), hooks=[Redacts()])
    assert results(session) == [("error", "hidden")]
    assert "seen" not in str(model.requests[-1].messages)


async def test_a_result_is_changed_also_when_the_run_is_cancelled_meanwhile() -> None:
    session = MemorySession(agent("look"))

    class Redacts(Hooks):
        async def after_tool_call(
            self, context: HookContext, call: ToolCall, result: ToolResult
        ) -> ToolResult:
            if session.run is not None and session.run.cancel is None:
                session.cancel("enough")
                await asyncio.sleep(0.05)
            return text_result("hidden")

    await played(calls("look"), text("never"), hooks=[Redacts()], session=session)
    assert [words for _, words in results(session)] == ["hidden"]
    assert session.runs[0].stop is not None
    assert session.runs[0].stop.type == "cancelled"


class Decides(Hooks):
    def __init__(self, *decisions: TurnDecision | None) -> None:
        self.decisions = list(decisions)
        self.reports: list[TurnReport] = []

    async def finish_turn(self, context: HookContext, turn: TurnReport) -> TurnDecision | None:
        self.reports.append(turn)
        return self.decisions.pop(0) if self.decisions else None


async def test_a_run_goes_on_after_its_last_answer_when_a_hook_has_something_to_say() -> None:
    decides = Decides(TurnDecision(action="continue", message="And why?"))
    session, model = await played(text("so"), text("because"), hooks=[decides])
    assert said(session) == ["so", "because"]
    assert model.requests[-1].messages[-1].text == "And why?"
    assert [(report.text, report.status) for report in decides.reports] == [
        ("so", "done"),
        ("because", "done"),
    ]


async def test_a_run_ends_after_its_tools_when_a_hook_says_so() -> None:
    decides = Decides(TurnDecision(action="end"))
    session, model = await played(calls("look"), text("never"), hooks=[decides])
    assert len(model.requests) == 1
    assert [call.outcome for call in decides.reports[0].calls] == ["ok"]
    assert session.runs[0].stop == StopReason(type="end_turn")


async def test_a_run_that_ends_by_a_hook_leaves_steering_to_the_next() -> None:
    session = MemorySession(agent("look"))

    class Ends(Hooks):
        async def finish_turn(self, context: HookContext, turn: TurnReport) -> TurnDecision | None:
            if len(session.runs) == 1:
                session.post("steering", delivery="steer")
            return TurnDecision(action="end")

    await played(text("one"), text("two"), hooks=[Ends()], session=session)
    assert len(session.runs) == 2
    assert said(session) == ["one", "two"]


async def test_decisions_on_turns_that_failed_are_ignored() -> None:
    decides = Decides(TurnDecision(action="continue", message="Try!"))
    session, model = await played([Overloaded("busy")], hooks=[decides])
    assert [report.status for report in decides.reports] == ["failed"]
    assert len(model.requests) == 4
    assert session.runs[0].stop is not None
    assert session.runs[0].stop.type == "retries_exhausted"


NAMES = [name for name in vars(Hooks) if not name.startswith("_")]


class Breaks(Hooks):
    """Fails in one method, in one of three ways."""


def breaking(name: str, how: str) -> Hooks:
    async def method(*_: Any, **__: Any) -> Any:
        if how == "raises":
            raise ValueError("broken")
        if how == "cancels itself":
            raise asyncio.CancelledError
        await asyncio.Event().wait()

    return type("Breaks", (Hooks,), {name: method})()  # type: ignore[no-any-return]


@pytest.mark.parametrize("how", ["raises", "cancels itself", "hangs"])
@pytest.mark.parametrize("name", NAMES)
async def test_a_hook_that_fails_is_named_and_the_run_goes_on(
    name: str, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    diary = Diary()
    answers: list[Answer] = [
        [Overloaded("busy")],
        [
            MessageStart(),
            ThinkingDelta(index=0, text="hm"),
            *call(1, "look"),
            *call(2, "no"),
            *end(Stop.TOOL_USE),
        ],
        text("so"),
    ]
    with caplog.at_level(logging.ERROR):
        session, _ = await played(*answers, hooks=[breaking(name, how), diary])
    assert session.runs[0].stop == StopReason(type="end_turn")
    assert said(session) == ["so"]
    assert diary.lines[-1] == ("run_end", "end_turn")
    assert any("Breaks" in record.getMessage() and name in record.getMessage() for record in caplog.records)
    blocked = name == "before_tool_call"
    assert ([outcome for outcome, _ in results(session)] == ["denied", "error"]) is blocked
    assert (ran == []) is blocked


async def test_a_cancel_does_not_wait_for_a_hook() -> None:
    session = MemorySession(agent("look"))

    class Slow(Hooks):
        async def before_prompt_build(self, context: HookContext) -> None:
            session.cancel("enough")
            await asyncio.Event().wait()

    session.post("go")
    await work(session, model=ScriptedModel(text("never")), tools=TOOLS, hooks=[Slow()])
    check(session)
    assert session.runs[0].stop == StopReason(type="cancelled", message="enough")
