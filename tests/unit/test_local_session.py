"""The loop in a program of its own: prompts, tools, steering, answers, cancels, compaction, results."""

import asyncio
from decimal import Decimal

import pytest

from agents.config import AgentConfig, AgentTool, BuiltinTool, ClientTool, ModelChoice
from agents.events import Event, event_type
from agents.hooks import HookContext, Hooks, TurnReport
from agents.local import LocalSession
from agents.types import Preview, PreviewDelta
from providers.rehearsal import Rehearsal
from tests.support.loop_driver import price
from tools.builtin import builtin_registry
from tools.registry import ToolRegistry
from tools.schema import tool
from tools.types import DirectReturn

ASK = ClientTool(name="ask", description="Asks.", input_schema={"type": "object"})


def agent(*tools: str | AgentTool, model: str = "rehearsal:fast", **fields: object) -> AgentConfig:
    entries = tuple(BuiltinTool(name=each) if isinstance(each, str) else each for each in tools)
    return AgentConfig(name="local", model=ModelChoice(id=model), tools=entries, **fields)  # type: ignore[arg-type]


async def test_a_prompt_is_answered_with_tools_and_the_result_has_it_all() -> None:
    events: list[Event] = []
    previews: list[Preview] = []
    session = LocalSession(
        agent("calculate"),
        Rehearsal(),
        tools=builtin_registry(),
        price=price,
        on_event=events.append,
        on_preview=previews.append,
    )
    result = await session.run("What is 6 * 7?")
    assert (result.stop.type, result.text, result.turns) == ("end_turn", "The result is 42.", 2)
    assert [one.content[0].text for one in result.tool_results["calculate"]] == ["42"]  # type: ignore[union-attr]
    assert (result.usage.requests, result.data) == (2, None)
    assert result.usage.cost_usd is not None
    assert result.usage.cost_usd > Decimal(0)
    kinds = [event_type(event) for event in events]
    assert kinds[0] == "session.status_running"
    assert kinds[-1] == "session.status_idle"
    shown = "".join(
        each.delta["content"]["text"]
        for each in previews
        if isinstance(each, PreviewDelta) and each.kind == "agent.message"
    )
    assert shown.endswith("The result is 42.")


async def test_a_conversation_goes_on_over_several_runs() -> None:
    session = LocalSession(agent(), Rehearsal())
    await session.run("say: one")
    result = await session.run("say: two")
    assert result.text == "two"
    assert [stored.message.role for stored in session.messages] == ["user", "assistant"] * 2


async def test_steering_goes_into_the_run_and_what_is_queued_follows_it() -> None:
    session = LocalSession(agent(), Rehearsal())

    class Speaks(Hooks):
        async def before_prompt_build(self, context: HookContext) -> None:
            if len(session.messages) == 1:
                session.say("say: steered")
                session.say("say: queued", delivery="queue")

    session._hooks = type(session._hooks)([Speaks()])
    result = await session.run("say: first")
    texts = [stored.message.text for stored in session.messages if stored.message.role == "assistant"]
    assert texts == ["first", "steered", "queued"]
    assert result.text == "queued"


async def test_a_run_waits_for_answers_and_goes_on_with_them() -> None:
    session = LocalSession(agent(ASK), Rehearsal())
    waiting = await session.run('call: ask {"colour": 1}\n---\necho')
    (call,) = session.open_calls
    assert (waiting.stop.type, waiting.stop.event_ids) == ("requires_action", (call.id,))
    with pytest.raises(RuntimeError, match="wait for their answers"):
        await session.run("say: no")
    session.answer(call.id, "blue")
    assert (await session.go_on()).text == "blue"


@pytest.mark.parametrize("is_allowed", [True, False])
async def test_a_call_waits_to_be_allowed(*, is_allowed: bool) -> None:
    session = LocalSession(
        agent(BuiltinTool(name="calculate", requires_approval=True)), Rehearsal(), tools=builtin_registry()
    )
    await session.run('call: calculate {"expression": "6 * 7"}\n---\necho')
    (call,) = session.open_calls
    session.confirm(call.id, is_allowed=is_allowed, message="No.")
    result = await session.go_on()
    assert ("42" in result.text) is is_allowed
    assert result.stop.type == "end_turn"


async def test_a_run_is_cancelled_and_keeps_what_there_is() -> None:
    session = LocalSession(agent(), Rehearsal())
    running = asyncio.create_task(session.run("say: so far\nhang: after 2 deltas"))
    while not session._run.requests and not session.messages:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.05)
    session.cancel("enough")
    result = await asyncio.wait_for(running, 30)
    assert (result.stop.type, result.stop.message) == ("cancelled", "enough")


async def test_a_direct_return_is_the_data_of_the_result() -> None:
    @tool()
    async def hand_in() -> DirectReturn:
        """Hands in."""
        return DirectReturn(data={"answer": 42})

    session = LocalSession(agent("hand_in"), Rehearsal(), tools=ToolRegistry((hand_in,)))
    result = await session.run("call: hand_in")
    assert (result.stop.type, result.data) == ("direct_return", {"answer": 42})


async def test_a_long_conversation_is_compacted() -> None:
    session = LocalSession(agent(model="rehearsal:small"), Rehearsal())
    for _ in range(8):
        result = await session.run("say: " + "word " * 300)
    assert result.stop.type == "end_turn"
    assert session.memory is not None
    assert len(session.messages) == 16


async def test_hooks_are_called() -> None:
    reports: list[str] = []

    class Reads(Hooks):
        async def finish_turn(self, context: HookContext, turn: TurnReport) -> None:
            reports.append(turn.text)

    await LocalSession(agent(), Rehearsal(), hooks=[Reads()]).run("say: hello")
    assert reports == ["hello"]
