"""What stops a run from outside: a cancel, the time limit; while a tool works, while a retry waits."""

import asyncio

import pytest

from providers.errors import ConnectionLost, Overloaded
from providers.types import JsonObject, MessageStart, TextDelta
from tests.support.loop_driver import (
    ScriptedModel,
    agent,
    calls,
    check,
    client_tool,
    end,
    text,
    work,
    work_to_the_end,
)
from tests.support.memory_hold import MemoryHold, MemorySession
from tools.registry import ToolRegistry
from tools.types import Tool, ToolContext, ToolResult, text_result

OBJECT: JsonObject = {"type": "object"}


def stop_of(session: MemorySession) -> tuple[str, str | None]:
    stop = session.runs[0].stop
    assert stop is not None
    return stop.type, stop.message


def codes(session: MemorySession) -> list[tuple[str, str | None]]:
    return [
        (event["outcome"], (event["details"] or {}).get("code"))
        for event in session.find_events("agent.tool_result")
    ]


class Stubborn:
    """A tool that is cancelled in the middle, and what it makes of it."""

    def __init__(self, session: MemorySession, *, reaction: str) -> None:
        self.session = session
        self.reaction = reaction
        self.is_over = asyncio.Event()

    async def execute(self, _: JsonObject, context: ToolContext) -> ToolResult:
        self.session.cancel("enough")
        while not self.is_over.is_set():
            try:
                await self.is_over.wait()
            except asyncio.CancelledError:
                if self.reaction == "heeds":
                    raise
                if self.reaction == "answers":
                    return text_result("aborted")
                if self.reaction == "fails":
                    raise ValueError from None
        return text_result("late")


@pytest.mark.parametrize("reaction", ["heeds", "answers", "fails", "ignores"])
async def test_a_cancelled_tool_is_interrupted_whatever_it_makes_of_it(
    reaction: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """H-14: done, interrupted and not started are told apart, by text and by code."""
    monkeypatch.setattr("agents.tool_calls.STOP_GRACE_S", 0.01)
    session = MemorySession(agent("quick", "slow", "later", client_tool("ask"), tool_execution="sequential"))
    session.post("go")
    slow = Stubborn(session, reaction=reaction)

    async def quick(_: JsonObject, __: ToolContext) -> ToolResult:
        return text_result("done")

    tools = ToolRegistry(
        [
            Tool(name="quick", description="Quick.", input_schema=OBJECT, execute=quick),
            Tool(name="slow", description="Slow.", input_schema=OBJECT, execute=slow.execute),
            Tool(name="later", description="Later.", input_schema=OBJECT, execute=quick),
        ]
    )
    await work_to_the_end(session, model=ScriptedModel(calls("quick", "slow", "later", "ask")), tools=tools)
    slow.is_over.set()
    check(session)
    assert stop_of(session) == ("cancelled", "enough")
    assert codes(session) == [
        ("ok", None),
        ("cancelled", "interrupted"),
        ("cancelled", "not_started"),
        ("cancelled", "not_answered"),
    ]
    told = [block["content"][0]["text"] for block in session.transcript()[-1]["content"]]
    assert "may have had effects" in told[1]
    assert "Not started" in told[2]
    assert len(session.find_events("span.tool_start")) == 2


async def test_a_result_that_is_there_when_the_run_is_cancelled_is_kept() -> None:
    """The cancel comes while the result of a is being stored, b ends a little before or after that."""
    seen: set[bool] = set()
    for rounds in range(20):
        session = MemorySession(agent("a", "b"))
        session.post("go")
        a_is_over = asyncio.Event()
        ended: list[str] = []

        async def first(_: JsonObject, __: ToolContext, over: asyncio.Event = a_is_over) -> ToolResult:
            over.set()
            return text_result("A")

        async def second(
            _: JsonObject,
            __: ToolContext,
            over: asyncio.Event = a_is_over,
            ended: list[str] = ended,
            rounds: int = rounds,
        ) -> ToolResult:
            await over.wait()
            for _round in range(rounds):
                await asyncio.sleep(0)
            ended.append("b")
            return text_result("B")

        def cancel(hold: MemoryHold, session: MemorySession = session) -> None:
            hold.at("before_commit", 3, session.cancel)

        tools = ToolRegistry(
            [
                Tool(name="a", description="A.", input_schema=OBJECT, execute=first),
                Tool(name="b", description="B.", input_schema=OBJECT, execute=second),
            ]
        )
        await work_to_the_end(session, model=ScriptedModel(calls("a", "b")), tools=tools, prepare=cancel)
        check(session)
        assert codes(session) == [("ok", None), ("ok", None) if ended else ("cancelled", "interrupted")]
        seen.add(bool(ended))
    assert seen == {True, False}


async def test_a_cancel_ends_the_wait_for_a_retry() -> None:
    session = MemorySession(agent())
    session.post("go")
    session.clock.on_sleep = lambda _: session.cancel("enough")
    model = ScriptedModel([Overloaded("busy")], text("never"))
    await work_to_the_end(session, model=model)
    check(session)
    assert len(model.requests) == 1
    assert stop_of(session) == ("cancelled", "enough")


async def test_a_cancel_that_breaks_the_connection_still_keeps_the_text() -> None:
    """A client library that makes a lost connection of a cancel does not cost the text."""
    session = MemorySession(agent())
    session.post("go")

    async def broken() -> None:
        session.cancel()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            raise ConnectionLost("cancelled") from None

    model = ScriptedModel([MessageStart(), TextDelta(index=0, text="so far"), broken])
    await work_to_the_end(session, model=model)
    check(session)
    assert stop_of(session)[0] == "cancelled"
    assert session.transcript()[-1]["content"][0]["text"] == "so far"
    assert len(model.requests) == 1


async def test_a_cancel_before_the_worker_looked_opens_no_request() -> None:
    session = MemorySession(agent())
    session.post("go")

    def cancel(hold: MemoryHold) -> None:
        session.cancel("early", is_heard=False)

    await work_to_the_end(session, prepare=cancel)
    check(session)
    assert stop_of(session) == ("cancelled", "early")
    assert session.ledger == {}
    assert session.find_events("prompt.withdrawn") != []


async def test_prompts_that_wait_behind_a_cancelled_run_are_run() -> None:
    session = MemorySession(agent())
    session.post("say: one two three\nhang: after 2 deltas")
    session.post("say: next")

    def cancel(hold: MemoryHold) -> None:
        hold.at("preview", 5, session.cancel)

    await work_to_the_end(session, prepare=cancel)
    check(session)
    assert stop_of(session)[0] == "cancelled"
    assert session.transcript()[-1]["content"][0]["text"] == "next"


async def test_the_time_limit_closes_the_run_and_keeps_the_text() -> None:
    """Q-05."""
    session = MemorySession(agent(time_limit_s=900.0))
    session.post("go")

    async def overdue() -> None:
        session.clock.advance(900.0)
        await asyncio.Event().wait()

    model = ScriptedModel([MessageStart(), TextDelta(index=0, text="so far"), overdue])
    await work_to_the_end(session, model=model)
    check(session)
    assert stop_of(session) == ("timed_out", "The run reached its time limit.")
    assert session.find_events("agent.message")[0]["incomplete"]
    assert session.transcript()[-1]["content"][0]["text"] == "so far"
    assert session.find_events("span.model_request_end")[0]["error_code"] == "timed_out"


async def test_the_time_limit_ends_a_tool() -> None:
    session = MemorySession(agent("slow", time_limit_s=900.0))
    session.post("go")

    async def slow(_: JsonObject, __: ToolContext) -> ToolResult:
        session.clock.advance(900.0)
        await asyncio.Event().wait()
        raise AssertionError

    tools = ToolRegistry([Tool(name="slow", description="Slow.", input_schema=OBJECT, execute=slow)])
    await work_to_the_end(session, model=ScriptedModel(calls("slow")), tools=tools)
    check(session)
    assert stop_of(session)[0] == "timed_out"
    assert codes(session) == [("cancelled", "interrupted")]


async def test_a_run_that_is_overdue_when_it_is_taken_up_asks_nothing_more() -> None:
    session = MemorySession(agent(time_limit_s=900.0))
    session.post("go")

    def kill(hold: MemoryHold) -> None:
        hold.at("after_commit", 1, hold.kill)

    await work(session, prepare=kill)
    session.clock.advance(901.0)
    await work_to_the_end(session)
    check(session)
    assert stop_of(session)[0] == "timed_out"
    assert len(session.ledger) == 1


async def test_a_limit_that_is_reached_with_the_last_byte_starts_no_tool() -> None:
    """The answer is whole and kept; nothing has come in, so only the watch knows that time is over."""
    session = MemorySession(agent("a", time_limit_s=900.0))
    session.post("go")

    async def execute(_: JsonObject, __: ToolContext) -> ToolResult:
        raise AssertionError("must not run")

    async def overdue() -> None:
        session.clock.advance(900.0)

    tools = ToolRegistry([Tool(name="a", description="A.", input_schema=OBJECT, execute=execute)])
    answer = calls("a")
    model = ScriptedModel([*answer[: -len(end())], *end()[:1], overdue, *end()[1:]])
    await work_to_the_end(session, model=model, tools=tools)
    check(session)
    assert stop_of(session)[0] == "timed_out"
    assert codes(session) == [("cancelled", "not_started")]
    assert session.find_events("span.tool_start") == []
