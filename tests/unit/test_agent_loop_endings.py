"""Tools that end the run: direct returns, tools that end their turn, hints to terminate."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from providers.types import JsonObject
from tests.support.loop_driver import (
    ScriptedModel,
    agent,
    calls,
    check,
    client_tool,
    text,
    work,
    work_to_the_end,
)
from tests.support.memory_hold import MemoryHold, MemorySession
from tools.errors import ToolError
from tools.registry import ToolRegistry
from tools.results import to_result
from tools.types import DirectReturn, Tool, ToolContext, ToolResult, text_result

DATA = {"answer": 42}
HINT = ToolResult(content=text_result("enough").content, terminate=True)


def tool(name: str, run: Callable[[], Awaitable[Any]], **fields: Any) -> Tool:
    async def execute(_: JsonObject, __: ToolContext) -> ToolResult:
        return to_result(await run())

    return Tool(name=name, description="A tool.", input_schema={"type": "object"}, execute=execute, **fields)


def gives(name: str, value: Any, after: asyncio.Event | None = None, **fields: Any) -> Tool:
    async def run() -> Any:
        if after is not None:
            await after.wait()
        if isinstance(value, Exception):
            raise value
        return value

    return tool(name, run, **fields)


async def played(*tools: Tool, model: ScriptedModel | None = None, **fields: Any) -> MemorySession:
    session = MemorySession(agent(*(tool.name for tool in tools), **fields))
    session.post("go")
    model = model or ScriptedModel(calls(*(tool.name for tool in tools)), text("again"))
    await work_to_the_end(session, model=model, tools=ToolRegistry(tools))
    check(session)
    return session


def stop_of(session: MemorySession, run: int = 0) -> tuple[str, JsonObject | None]:
    stop = session.runs[run].stop
    assert stop is not None
    return stop.type, stop.result


def outcomes(session: MemorySession) -> list[str]:
    by_id = {event["tool_use_id"]: event["outcome"] for event in session.find_events("agent.tool_result")}
    return [by_id[use["id"]] for use in session.find_events("agent.tool_use")]


async def test_a_direct_return_closes_the_run_with_its_data_and_asks_nothing_more() -> None:
    model = ScriptedModel(calls("hand_in"), text("never"))
    session = await played(gives("hand_in", DirectReturn(data=DATA)), model=model)
    assert stop_of(session) == ("direct_return", DATA)
    assert len(model.requests) == 1
    assert session.transcript()[-1]["content"][0]["content"] == [{"type": "text", "text": '{"answer": 42}'}]


async def test_other_calls_of_the_turn_are_skipped_whether_they_run_wait_or_have_not_begun() -> None:
    never = asyncio.Event()
    session = await played(
        gives("slow", "never", after=never),
        gives("hand_in", DirectReturn(data=DATA, text="Handed in.")),
        gives("approved", "never", requires_approval=True),
    )
    assert stop_of(session) == ("direct_return", DATA)
    assert outcomes(session) == ["skipped", "ok", "skipped"]


async def test_calls_after_a_direct_return_do_not_begin_when_they_go_in_sequence() -> None:
    session = await played(
        gives("hand_in", DirectReturn(data=DATA)), gives("second", "never"), tool_execution="sequential"
    )
    assert outcomes(session) == ["ok", "skipped"]
    assert len(session.find_events("span.tool_start")) == 1


async def test_calls_that_were_finished_before_a_direct_return_keep_their_results() -> None:
    first = asyncio.Event()

    async def sets() -> str:
        first.set()
        return "first"

    async def follows() -> DirectReturn:
        await first.wait()
        for _ in range(20):
            await asyncio.sleep(0)
        return DirectReturn(data=DATA)

    session = await played(tool("sets", sets), tool("hand_in", follows))
    assert outcomes(session) == ["ok", "ok"]
    assert stop_of(session) == ("direct_return", DATA)


async def test_a_tool_that_ends_its_turn_lets_the_others_finish() -> None:
    model = ScriptedModel(calls("a", "last"), text("never"))
    session = await played(gives("a", "A"), gives("last", "L", ends_turn=True), model=model)
    assert stop_of(session) == ("end_turn", None)
    assert outcomes(session) == ["ok", "ok"]
    assert len(model.requests) == 1


async def test_a_tool_that_ends_its_turn_and_fails_lets_the_model_try_again() -> None:
    session = await played(gives("last", ToolError("no"), ends_turn=True))
    assert session.find_events("agent.message")[-1]["content"][0]["text"] == "again"


@pytest.mark.parametrize(
    ("results", "ends"),
    [((HINT, HINT), True), ((HINT, "go on"), False), ((HINT, ToolError("no")), False), ((HINT,), True)],
    ids=["all", "one of two", "one failed", "the only one"],
)
async def test_hints_to_terminate_count_when_every_result_has_one(
    results: tuple[Any, ...], *, ends: bool
) -> None:
    session = await played(*(gives(f"t{at}", result) for at, result in enumerate(results)))
    assert (len(session.find_events("span.model_request_start")) == 1) is ends
    assert stop_of(session) == ("end_turn", None)


async def test_a_turn_ends_with_the_last_answer_of_the_client_when_a_tool_says_so() -> None:
    last = gives("last", "L", ends_turn=True)
    session = MemorySession(agent("last", client_tool("ask")))
    session.post("go")
    model = ScriptedModel(calls("last", "ask"), text("never"))
    holds = await work_to_the_end(session, model=model, tools=ToolRegistry((last,)))
    check(session)
    assert len(holds) == 2
    assert len(model.requests) == 1
    assert stop_of(session) == ("end_turn", None)


async def test_what_waits_behind_a_direct_return_is_the_next_run() -> None:
    tools = ToolRegistry((gives("hand_in", DirectReturn(data=DATA)),))
    session = MemorySession(agent("hand_in"))
    session.post("go")

    def prepare(hold: MemoryHold) -> None:
        hold.at("after_commit", 2, lambda: session.post("steering", delivery="steer"))

    model = ScriptedModel(calls("hand_in"), text("second"))
    await work_to_the_end(session, model=model, tools=tools, prepare=prepare)
    check(session)
    assert [stop_of(session, run) for run in (0, 1)] == [("direct_return", DATA), ("end_turn", None)]


@pytest.mark.parametrize("n", range(1, 5))
async def test_a_crash_does_not_change_how_the_run_ends(n: int) -> None:
    for moment in ("before_commit", "after_commit"):
        tools = (gives("hand_in", DirectReturn(data=DATA), idempotent=True),)
        session = MemorySession(agent("hand_in"))
        session.post("go")

        def prepare(hold: MemoryHold) -> None:
            hold.at(moment, n, hold.kill)  # noqa: B023

        model = ScriptedModel(calls("hand_in"))
        await work_to_the_end(session, model=model, tools=ToolRegistry(tools), prepare=prepare)
        check(session)
        assert stop_of(session) == ("direct_return", DATA)


async def test_a_cancel_that_is_first_wins_over_a_direct_return() -> None:
    never = asyncio.Event()
    tools = ToolRegistry((gives("hand_in", DirectReturn(data=DATA), after=never),))
    session = MemorySession(agent("hand_in"))
    session.post("go")

    def prepare(hold: MemoryHold) -> None:
        hold.at("after_commit", 2, lambda: session.cancel("enough"))

    await work(session, model=ScriptedModel(calls("hand_in")), tools=tools, prepare=prepare)
    check(session)
    assert stop_of(session) == ("cancelled", None)
