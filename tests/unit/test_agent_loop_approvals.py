"""Calls that wait until the client has allowed them: none runs before that, none twice, none when denied."""

import asyncio
from collections import Counter
from collections.abc import Callable

import pytest

from agents.config import BuiltinTool
from agents.types import WaitForClient
from providers.types import JsonObject
from tests.support.loop_driver import ScriptedModel, agent, calls, check, text, work, work_to_the_end
from tests.support.memory_hold import MemoryHold, MemorySession, Moment
from tools.registry import ToolRegistry
from tools.types import Tool, ToolContext, ToolResult, text_result

OBJECT: JsonObject = {"type": "object"}


class Tools:
    """`pay` requires approval, `look` does not. `ran`: how often each was executed."""

    def __init__(self) -> None:
        self.ran: Counter[str] = Counter()
        self.registry = ToolRegistry(
            [
                self._tool("pay", requires_approval=True),
                self._tool("look", idempotent=True),
                self._tool("alone", execution="sequential"),
            ]
        )

    def _tool(self, name: str, **fields: object) -> Tool:
        async def execute(_: JsonObject, __: ToolContext) -> ToolResult:
            self.ran[name] += 1
            await asyncio.sleep(0)
            return text_result(f"{name} ran")

        return Tool(name=name, description="A tool.", input_schema=OBJECT, execute=execute, **fields)  # type: ignore[arg-type]


def asked(session: MemorySession) -> list[str]:
    """What the session says that it waits for."""
    idle = session.events[-1]
    assert idle["type"] == "session.status_idle"
    assert idle["stop_reason"]["type"] == "requires_action"
    return list(idle["stop_reason"]["event_ids"])


def results(session: MemorySession) -> list[tuple[str, bool]]:
    message = next(message for message in session.transcript() if message["role"] == "tool")
    return [(block["content"][0]["text"], block["is_error"]) for block in message["content"]]


def permissions(session: MemorySession) -> list[str]:
    return [event["evaluated_permission"] for event in session.find_events("agent.tool_use")]


async def asking(*names: str, tools: Tools, **fields: object) -> tuple[MemorySession, ScriptedModel]:
    """A session whose model has called `names` in one turn, after its first hold."""
    session = MemorySession(agent("pay", "look", "alone", **fields))
    session.post("go")
    model = ScriptedModel(calls(*names), text("ok"))
    await work(session, model=model, tools=tools.registry)
    return session, model


async def test_calls_that_need_nothing_run_while_the_others_wait_for_approval() -> None:
    tools = Tools()
    session, model = await asking("pay", "look", "pay", tools=tools)
    first, second = session.open_calls()
    assert asked(session) == [first.id, second.id]
    assert permissions(session) == ["ask", "allow", "ask"]
    assert tools.ran == {"look": 1}

    session.confirm(second.id, "deny", "Too dear.")
    assert asked(session) == [first.id]
    session.confirm(first.id, "allow")
    await work(session, model=model, tools=tools.registry)
    check(session)
    assert tools.ran == {"look": 1, "pay": 1}
    assert results(session) == [
        ("pay ran", False),
        ("look ran", False),
        ("Denied by the user: it was not run. They say: Too dear.", True),
    ]


async def test_a_denial_is_a_result_of_its_own_kind() -> None:
    """H-14: denied is neither interrupted nor not started, in words and in code."""
    tools = Tools()
    session, model = await asking("pay", tools=tools)
    session.confirm(session.open_calls()[0].id, "deny")
    await work(session, model=model, tools=tools.registry)
    check(session)
    (result,) = session.find_events("agent.tool_result")
    assert (result["outcome"], result["details"]) == ("denied", {"code": "denied"})
    assert results(session) == [("Denied by the user: it was not run.", True)]
    assert not tools.ran


async def test_an_agent_asks_for_a_tool_that_needs_nothing_and_waives_what_another_needs() -> None:
    tools = Tools()
    entries = (
        BuiltinTool(name="pay", requires_approval=False),
        BuiltinTool(name="look", requires_approval=True),
    )
    session = MemorySession(agent(*entries))
    session.post("go")
    await work(session, model=ScriptedModel(calls("pay", "look")), tools=tools.registry)
    assert permissions(session) == ["allow", "ask"]
    assert tools.ran == {"pay": 1}
    assert [call.name for call in session.open_calls()] == ["look"]


async def test_a_call_that_cannot_be_made_is_refused_without_asking_anybody() -> None:
    schema = {"type": "object", "required": ["amount"]}

    async def execute(_: JsonObject, __: ToolContext) -> ToolResult:
        raise AssertionError

    pay = Tool(name="pay", description="Pays.", input_schema=schema, execute=execute, requires_approval=True)
    session = MemorySession(agent("pay"))
    session.post("go")
    await work(session, model=ScriptedModel(calls("pay"), text("ok")), tools=ToolRegistry([pay]))
    check(session)
    assert session.find_events("agent.tool_result")[0]["details"] == {"code": "invalid_arguments"}


async def test_nothing_overtakes_a_call_that_waits_for_approval_in_a_sequential_batch() -> None:
    tools = Tools()
    session, model = await asking("alone", "pay", "look", tools=tools)
    assert tools.ran == {"alone": 1}
    session.confirm(session.open_calls()[0].id, "allow")
    await work(session, model=model, tools=tools.registry)
    check(session)
    starts = [event["tool_use_id"] for event in session.find_events("span.tool_start")]
    assert starts == [event["id"] for event in session.find_events("agent.tool_use")]
    assert tools.ran == {"alone": 1, "pay": 1, "look": 1}


async def test_the_rest_of_a_sequential_batch_runs_after_a_denial() -> None:
    tools = Tools()
    session, model = await asking("pay", "look", tools=tools, tool_execution="sequential")
    assert not tools.ran
    session.confirm(session.open_calls()[0].id, "deny")
    await work(session, model=model, tools=tools.registry)
    check(session)
    assert tools.ran == {"look": 1}


@pytest.mark.parametrize("result", ["allow", "deny"])
@pytest.mark.parametrize(("moment", "n"), [("after_commit", 2), ("after_commit", 3), ("before_commit", 4)])
async def test_a_confirmation_that_comes_before_the_wait_is_committed_is_taken_at_once(
    moment: Moment, n: int, result: str
) -> None:
    tools = Tools()
    session = MemorySession(agent("pay", "look"))
    session.post("go")

    def early(hold: MemoryHold) -> None:
        def confirm() -> None:
            for call in session.open_calls():
                session.confirm(call.id, "allow" if result == "allow" else "deny")

        hold.at(moment, n, confirm)

    model = ScriptedModel(calls("pay", "look"), text("ok"))
    holds = await work_to_the_end(session, model=model, tools=tools.registry, prepare=early)
    check(session)
    assert len(holds) == 1
    assert tools.ran == ({"pay": 1, "look": 1} if result == "allow" else {"look": 1})


async def test_a_cancel_while_it_waits_says_that_the_call_never_began() -> None:
    tools = Tools()
    session, _ = await asking("pay", "look", tools=tools)
    session.cancel()
    check(session)
    result = session.find_events("agent.tool_result")[-1]
    assert (result["outcome"], result["details"]) == ("cancelled", {"code": "not_started"})
    assert tools.ran == {"look": 1}


async def test_a_cancel_between_the_approval_and_the_start_starts_nothing() -> None:
    tools = Tools()
    session, _ = await asking("pay", tools=tools)
    session.confirm(session.open_calls()[0].id, "allow")
    session.cancel()
    check(session)
    assert not tools.ran
    assert session.find_events("agent.tool_result")[0]["details"] == {"code": "not_started"}


def ends(session: MemorySession, how: str) -> Callable[[MemoryHold], Callable[[], None]]:
    return lambda hold: hold.kill if how == "kill" else session.cancel


@pytest.mark.parametrize("how", ["kill", "cancel"])
@pytest.mark.parametrize("moment", ["before_commit", "after_commit"])
@pytest.mark.parametrize("n", [1, 2, 3, 4])
async def test_an_approved_call_runs_once_at_most_whenever_its_worker_dies_or_it_is_cancelled(
    n: int, moment: Moment, how: str
) -> None:
    """The four commits after the approval: its start, its result, the request, the close."""
    tools = Tools()
    session, model = await asking("pay", tools=tools)
    session.confirm(session.open_calls()[0].id, "allow")

    def end(hold: MemoryHold) -> None:
        hold.at(moment, n, ends(session, how)(hold))

    await work_to_the_end(session, model=model, tools=tools.registry, prepare=end)
    check(session)
    (result,) = session.find_events("agent.tool_result")
    assert tools.ran["pay"] <= 1
    if result["outcome"] == "ok":
        assert tools.ran["pay"] == 1
    if how == "kill" and tools.ran["pay"] and n == 2 and moment == "before_commit":
        assert result["outcome"] == "unknown"


@pytest.mark.parametrize("how", ["kill", "cancel"])
@pytest.mark.parametrize("moment", ["before_commit", "after_commit"])
@pytest.mark.parametrize("n", [1, 2, 3, 4])
async def test_nothing_runs_unasked_whenever_the_worker_dies_before_the_wait(
    n: int, moment: Moment, how: str
) -> None:
    """The four commits up to the wait: the request, the answer of the model, the other result, the wait."""
    tools = Tools()
    session = MemorySession(agent("pay", "look"))
    session.post("go")

    def end(hold: MemoryHold) -> None:
        hold.at(moment, n, ends(session, how)(hold))

    model = ScriptedModel(calls("pay", "look"), text("ok"))
    await work(session, model=model, tools=tools.registry, prepare=end)
    for _ in range(5):
        assert tools.ran["pay"] == 0
        if session.run is None or session.run.state != "queued":
            break
        await work(session, model=ScriptedModel(calls("pay", "look"), text("ok")), tools=tools.registry)
    assert session.run is not None
    if how == "kill":
        assert session.run.state == "waiting"
        await work_to_the_end(session, model=ScriptedModel(text("ok")), tools=tools.registry)
    check(session)
    assert tools.ran["pay"] == (1 if how == "kill" else 0)


@pytest.mark.parametrize("timeout_s", [None, 60.0])
async def test_the_run_waits_for_as_long_as_its_agent_says(timeout_s: float | None) -> None:
    session = MemorySession(agent("pay", wait_timeout_s=timeout_s))
    session.post("go")
    hold = await work(session, model=ScriptedModel(calls("pay")), tools=Tools().registry)
    assert hold.steps[-1].ending == WaitForClient(timeout_s=timeout_s)
