"""One run with everything in it, ended at every moment there is: by a crash, by a cancel."""

import asyncio
from collections import Counter
from collections.abc import Callable
from typing import Literal

import pytest

from agents.errors import HoldLost
from providers.types import JsonObject
from tests.support.loop_driver import WAIT_S, agent, check, client_tool, work, work_to_the_end
from tests.support.memory_hold import MemoryHold, MemorySession, Moment
from tools.registry import ToolRegistry
from tools.types import Tool, ToolContext, ToolResult, text_result

PROMPT = """
think: I should save it and look it up.
say: Let me see.
call: save {"n": 1}
call: look_up {"n": 2}
call: ask {"q": "sure?"}
---
think: They have answered.
fail: stream_truncated after 1 times 1
retry_after: 0.01
say: All is done.
"""
OBJECT: JsonObject = {"type": "object"}
COMMITS = 9
PREVIEWS = 40


class Tools:
    """`save` has effects, `look_up` has none. Counts how often each call began and ended, by its id."""

    def __init__(self) -> None:
        self.begun: Counter[str] = Counter()
        self.ended: Counter[str] = Counter()
        self.registry = ToolRegistry(
            [
                Tool(name="save", description="Saves.", input_schema=OBJECT, execute=self._run),
                Tool(
                    name="look_up",
                    description="Looks up.",
                    input_schema=OBJECT,
                    execute=self._run,
                    idempotent=True,
                ),
            ]
        )

    async def _run(self, arguments: JsonObject, context: ToolContext) -> ToolResult:
        self.begun[context.tool_use_id] += 1
        context.progress({"share": 0.5})
        for _ in range(arguments["n"]):
            await asyncio.sleep(0)
        self.ended[context.tool_use_id] += 1
        return text_result(f"did {arguments['n']}")


def new_session() -> MemorySession:
    session = MemorySession(agent("save", "look_up", client_tool("ask")))
    session.post(PROMPT)
    return session


async def undisturbed() -> tuple[list[MemoryHold], MemorySession]:
    session = new_session()
    return await work_to_the_end(session, tools=Tools().registry), session


def outcomes(session: MemorySession) -> dict[str, str]:
    names = {event["id"]: event["name"] for event in session.find_events("agent.tool_use")}
    return {
        names[event["tool_use_id"]]: event["outcome"]
        for event in session.find_events("agent.tool_result")
        if event["tool_use_id"] in names
    }


async def test_an_undisturbed_run_has_no_moment_that_the_other_tests_leave_out() -> None:
    holds, session = await undisturbed()
    check(session)
    assert len(holds) == 2
    assert session.runs[0].stop is not None
    assert session.runs[0].stop.type == "end_turn"
    assert outcomes(session) == {"save": "ok", "look_up": "ok"}
    assert [message["role"] for message in session.transcript()] == ["user", "assistant", "tool", "assistant"]
    assert max(hold.counts["before_commit"] for hold in holds) < COMMITS
    assert max(hold.counts["preview"] for hold in holds) < PREVIEWS
    assert session.event_types().count("session.status_running") == 2


@pytest.mark.parametrize("hold_no", [1, 2])
@pytest.mark.parametrize(
    ("moment", "most"), [("before_commit", COMMITS), ("after_commit", COMMITS), ("preview", PREVIEWS)]
)
async def test_a_run_whose_worker_is_killed_at_any_moment_is_finished_by_the_next(
    moment: Moment, most: int, hold_no: int
) -> None:
    """H-01, Q-01."""
    killed = 0
    for n in range(1, most + 1):
        session, tools = new_session(), Tools()
        if hold_no == 2:
            await work(session, tools=tools.registry)
            session.answer(session.open_calls()[0].id, "yes")
        finished = Counter(tools.ended)

        def kill_at(hold: MemoryHold, n: int = n) -> None:
            hold.at(moment, n, hold.kill)

        holds = await work_to_the_end(session, tools=tools.registry, prepare=kill_at)
        killed += holds[0].killed.is_set()
        check(session)
        run = session.runs[0]
        assert run.stop is not None
        assert run.stop.type == "end_turn", (n, run.stop)
        assert len(session.runs) == 1
        for call in session.calls.values():
            assert call.state == "done"
            times = tools.begun[call.id]
            if call.name == "save":
                # Not idempotent: it began once, or never when its worker died before; then nobody knows.
                assert times <= 1
                assert (call.outcome == "ok") == (times == 1 and call.outcome != "unknown")
                assert call.outcome in {"ok", "unknown"}
            elif call.name == "look_up":
                assert call.outcome == "ok"
            if finished[call.id]:
                assert times == finished[call.id], "a finished call ran again"
    assert killed > 2


async def test_a_call_whose_result_is_stored_never_runs_again() -> None:
    """Q-04."""
    for n in range(1, COMMITS):
        session, tools = new_session(), Tools()
        stored: list[str] = []

        def kill_later(hold: MemoryHold, n: int = n, stored: list[str] = stored) -> None:
            def kill() -> None:
                stored.extend(call.id for call in hold.session.calls.values() if call.state == "done")
                hold.kill()

            hold.at("after_commit", n, kill)

        first = await work(session, tools=tools.registry, prepare=kill_later)
        begun = Counter(tools.begun)
        if first.killed.is_set():
            await work_to_the_end(session, tools=tools.registry)
        assert {key: tools.begun[key] for key in stored} == {key: begun[key] for key in stored}


async def test_a_killed_call_with_effects_is_unknown_and_an_idempotent_one_runs_again() -> None:
    """H-14: the model is not told that nothing happened."""
    session, tools = new_session(), Tools()

    def kill_when_started(hold: MemoryHold) -> None:
        hold.at("after_commit", 2, hold.kill)

    await work_to_the_end(session, tools=tools.registry, prepare=kill_when_started)
    check(session)
    assert outcomes(session) == {"save": "unknown", "look_up": "ok"}
    (result,) = [e for e in session.find_events("agent.tool_result") if e["outcome"] == "unknown"]
    assert result["details"] == {"code": "worker_lost"}
    assert "not known" in result["content"][0]["text"]
    assert result["is_error"]


Heard = Literal["heard", "unheard"]


@pytest.mark.parametrize("heard", ["heard", "unheard"])
@pytest.mark.parametrize("hold_no", [1, 2])
@pytest.mark.parametrize(
    ("moment", "most"), [("before_commit", COMMITS), ("after_commit", COMMITS), ("preview", PREVIEWS)]
)
async def test_a_cancel_at_any_moment_closes_the_run_once_and_starts_nothing_more(
    moment: Moment, most: int, hold_no: int, heard: Heard
) -> None:
    stops: set[str] = set()
    for n in range(1, most + 1):
        session, tools = new_session(), Tools()
        if hold_no == 2:
            await work(session, tools=tools.registry)
            session.answer(session.open_calls()[0].id, "yes")
        seen: list[Counter[str]] = []
        hold = await work(session, tools=tools.registry, prepare=cancel_at(moment, n, heard, session, seen))
        run = session.runs[0]
        if not seen:
            continue
        if run.state == "waiting":  # told after the commit that freed the worker
            session.cancel()
        assert run.state == "closed", (n, hold.counts)
        check(session)
        assert run.stop is not None
        starts = Counter(session.event_types())
        assert starts["span.model_request_start"] == seen[0]["span.model_request_start"]
        assert starts["span.tool_start"] == seen[0]["span.tool_start"]
        stops.add(run.stop.type)
    assert "cancelled" in stops or heard == "unheard"
    assert stops <= {"cancelled", "end_turn"}  # when the last answer was whole, nothing was left to stop


def cancel_at(
    moment: Moment, n: int, heard: Heard, session: MemorySession, seen: list[Counter[str]]
) -> Callable[[MemoryHold], None]:
    def prepare(hold: MemoryHold) -> None:
        def cancel() -> None:
            seen.append(Counter(session.event_types()))
            if session.run is not None and session.run.state != "closed":
                session.cancel("enough", is_heard=heard == "heard")

        hold.at(moment, n, cancel)

    return prepare


async def test_a_cancel_keeps_the_text_that_was_shown() -> None:
    session = MemorySession(agent())
    session.post("think: hm\nsay: one two three four\nhang: after 3 deltas")

    def cancel(hold: MemoryHold) -> None:
        hold.at("preview", 8, lambda: session.cancel("enough"))

    await work(session, prepare=cancel)
    check(session)
    (message,) = session.find_events("agent.message")
    assert message["incomplete"]
    assert "one two three four".startswith(message["content"][0]["text"])
    assert session.transcript()[-1]["content"] == message["content"]
    assert session.events[-1]["stop_reason"] == {"type": "cancelled", "message": "enough"}
    assert session.find_events("span.model_request_end")[0]["error_code"] == "cancelled"


async def test_a_hold_that_was_put_off_writes_nothing_more() -> None:
    session, tools = new_session(), Tools()

    def put_off(hold: MemoryHold) -> None:
        hold.at("preview", 9, lambda: session.requeue(takeover=True))

    with pytest.raises(HoldLost):
        await work(session, tools=tools.registry, prepare=put_off)
    assert session.event_types()[-1] == "session.status_rescheduled"
    await work_to_the_end(session, tools=tools.registry)
    check(session)


@pytest.mark.parametrize("commit", [1, 2])
async def test_nothing_begins_while_the_lease_is_in_doubt_after_the_commit_that_began_it(commit: int) -> None:
    """A process that stands still in between may have lost the run to another, which is done with it."""
    session = MemorySession(agent("look"))
    session.post("call: look\n---\nsay: Seen.")
    begun: list[str] = []
    claimed: asyncio.Future[MemoryHold] = asyncio.get_running_loop().create_future()

    async def look(_: JsonObject, __: ToolContext) -> ToolResult:
        begun.append("look")
        return text_result("seen")

    def prepare(hold: MemoryHold) -> None:
        hold.at("after_commit", commit, hold.is_live.clear)
        claimed.set_result(hold)

    tools = ToolRegistry()
    tools.register(Tool(name="look", description="Looks.", input_schema={"type": "object"}, execute=look))
    working = asyncio.create_task(work(session, tools=tools, prepare=prepare))
    async with asyncio.timeout(WAIT_S):
        hold = await claimed
        await hold.waits_for_lease.wait()
    assert begun == []
    assert hold.previews == [] or commit == 2
    hold.is_live.set()
    await working
    assert begun == ["look"]
    check(session)
