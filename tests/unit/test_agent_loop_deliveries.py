"""What prompts do to a run in progress, at whatever moment they come: steer, interrupt, queue."""

import asyncio
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import get_args

import pytest

from agents.config import QueueMode
from providers.errors import Overloaded
from providers.types import JsonObject, MessageStart, TextDelta
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
from tests.support.memory_hold import MemoryHold, MemorySession, Moment
from tools.builtin import builtin_registry
from tools.registry import ToolRegistry
from tools.types import Tool, ToolContext, ToolResult, text_result

OBJECT: JsonObject = {"type": "object"}
COMMITS: tuple[Moment, ...] = ("before_commit", "after_commit")
MOMENTS = [(moment, n) for moment in COMMITS for n in range(1, 6)]
"""All commits of a run of two turns, the first with one call: open, answer, result, open, close."""


def a_tool() -> ToolRegistry:
    async def execute(_: JsonObject, __: ToolContext) -> ToolResult:
        return text_result("done")

    return ToolRegistry([Tool(name="a", description="A.", input_schema=OBJECT, execute=execute)])


def two_turns() -> ScriptedModel:
    return ScriptedModel(calls("a"), text("answer"))


def users(session: MemorySession) -> list[str]:
    return [message["content"][0]["text"] for message in session.transcript() if message["role"] == "user"]


def roles(session: MemorySession) -> str:
    return " ".join(message["role"] for message in session.transcript())


def stops(session: MemorySession) -> list[str]:
    return [run.stop.type for run in session.runs if run.stop is not None]


def settled(session: MemorySession) -> None:
    """All rules of logs and transcripts, and each prompt was taken up once or withdrawn once."""
    check(session)
    posted = {event["id"]: event["content"][0]["text"] for event in session.find_events("user.message")}
    posted |= {
        event["prompt_id"]: event["content"][0]["text"] for event in session.find_events("prompt.updated")
    }
    applied = [key for event in session.find_events("prompt.applied") for key in event["prompt_ids"]]
    withdrawn = [event["prompt_id"] for event in session.find_events("prompt.withdrawn")]
    assert sorted([*applied, *withdrawn]) == sorted(posted)
    assert users(session) == [posted[key] for key in applied]
    assert session.prompts == {}


def run_of(session: MemorySession, prompt_id: str) -> int:
    """Which of the session's runs took the prompt up, counted from 0."""
    return [run.id for run in session.runs].index(session.taken[prompt_id])


def doing(*actions: tuple[Moment, int, Callable[[], object]]) -> Callable[[MemoryHold], None]:
    def prepare(hold: MemoryHold) -> None:
        for moment, n, action in actions:
            hold.at(moment, n, action)

    return prepare


Act = Callable[[MemorySession], object]


def steer(session: MemorySession) -> None:
    session.post("left", delivery="steer")


def interrupt(session: MemorySession) -> None:
    session.post("no", delivery="interrupt")


def stop_after_turn(session: MemorySession) -> None:
    session.cancel(mode="after_turn")


def kill(session: MemorySession) -> None:
    assert session.hold is not None
    session.hold.kill()


def at_sleep(act: Act, session: MemorySession, _: float) -> None:
    act(session)


# -- steering -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("moment", "n"), MOMENTS)
async def test_steering_is_taken_up_once_and_before_what_waits_whenever_it_comes(
    moment: Moment, n: int
) -> None:
    session = MemorySession(agent("a"))
    session.post("go")
    [queued] = session.post("later")
    steered: list[str] = []

    def post() -> None:
        steered.extend(session.post("left", "right", delivery="steer"))

    await work_to_the_end(session, model=two_turns(), tools=a_tool(), prepare=doing((moment, n, post)))
    settled(session)
    assert set(stops(session)) == {"end_turn"}
    if (moment, n) == ("after_commit", 5):  # the run is closed, and the next one has been made
        assert users(session) == ["go", "later", "left", "right"]
    else:
        assert users(session) == ["go", "left", "right", "later"]
        assert {run_of(session, prompt_id) for prompt_id in steered} == {0}
        assert run_of(session, queued) == 1


async def test_steering_stands_behind_the_results_of_the_turn_in_progress() -> None:
    session = MemorySession(agent("a"))
    session.post("go")
    prepare = doing(("after_commit", 2, partial(steer, session)))
    await work_to_the_end(session, model=two_turns(), tools=a_tool(), prepare=prepare)
    settled(session)
    assert roles(session) == "user assistant tool user assistant"


async def test_steering_during_the_last_answer_makes_the_run_go_on() -> None:
    session = MemorySession(agent())
    session.post("go")
    prepare = doing(("preview", 3, lambda: session.post("left", delivery="steer")))
    await work_to_the_end(session, model=ScriptedModel(text("one"), text("two")), prepare=prepare)
    settled(session)
    assert roles(session) == "user assistant user assistant"
    assert (len(session.runs), session.runs[0].turns) == (1, 2)
    assert len(session.find_events("session.status_idle")) == 1


async def test_steering_that_comes_at_the_last_turn_starts_the_next_run_before_what_waits() -> None:
    """The run has finished and used all its turns: that it could not go on is no reason of its end."""
    session = MemorySession(agent(max_turns=1))
    session.post("go")
    session.post("later")
    prepare = doing(("preview", 3, lambda: session.post("left", delivery="steer")))
    await work_to_the_end(session, model=ScriptedModel(text("one")), prepare=prepare)
    settled(session)
    assert users(session) == ["go", "left", "later"]
    assert stops(session) == ["end_turn"] * 3


async def test_steering_does_not_lift_the_bound_on_turns() -> None:
    session = MemorySession(agent("a", max_turns=1))
    session.post("go")
    prepare = doing(("after_commit", 2, lambda: session.post("left", delivery="steer")))
    await work_to_the_end(session, model=two_turns(), tools=a_tool(), prepare=prepare)
    settled(session)
    assert stops(session) == ["max_turns", "end_turn"]
    assert users(session) == ["go", "left"]


@pytest.mark.parametrize("mode", get_args(QueueMode))
async def test_steering_mode_says_how_many_posts_a_turn_takes_up(mode: QueueMode) -> None:
    session = MemorySession(agent(steering_mode=mode))
    session.post("go")

    def post() -> None:
        session.post("one", "two", delivery="steer")
        session.post("three", delivery="steer")

    model = ScriptedModel(text("answer"))
    await work_to_the_end(session, model=model, prepare=doing(("preview", 3, post)))
    settled(session)
    applied = [len(event["prompt_ids"]) for event in session.find_events("prompt.applied")]
    assert applied == ([1, 2, 1] if mode == "one_at_a_time" else [1, 3])
    assert len(session.runs) == 1


@pytest.mark.parametrize("mode", get_args(QueueMode))
async def test_follow_up_mode_says_how_many_posts_a_run_begins_with(mode: QueueMode) -> None:
    session = MemorySession(agent(follow_up_mode=mode))
    for name in ("one", "two", "three"):
        session.post(name)
    await work_to_the_end(session, model=ScriptedModel(text("answer")))
    settled(session)
    assert [len(run.prompt_ids) for run in session.runs] == ([1, 1, 1] if mode == "one_at_a_time" else [1, 2])
    assert users(session) == ["one", "two", "three"]


async def test_a_mode_that_is_changed_in_the_middle_counts_from_the_next_turn() -> None:
    session = MemorySession(agent())
    session.post("go")

    def post() -> None:
        session.post("one", delivery="steer")
        session.post("two", delivery="steer")
        session.set_modes(steering_mode="all")

    model = ScriptedModel(text("answer"))
    await work_to_the_end(session, model=model, prepare=doing(("preview", 3, post)))
    settled(session)
    assert [len(event["prompt_ids"]) for event in session.find_events("prompt.applied")] == [1, 2]


@pytest.mark.parametrize(("moment", "n"), [moment for moment in MOMENTS if moment[1] > 1])
async def test_withdrawn_steering_is_never_seen_and_leaves_nothing_to_answer(moment: Moment, n: int) -> None:
    """Posted while the first request streams. What was to be answered may be gone at the last moment."""
    session = MemorySession(agent())
    session.post("go")
    posted: list[str] = []
    withdrawn: list[bool] = []
    prepare = doing(
        ("preview", 3, lambda: posted.extend(session.post("left", delivery="steer"))),
        (moment, n, lambda: withdrawn.append(session.withdraw(posted[0]))),
    )
    await work_to_the_end(session, model=ScriptedModel(text("answer")), prepare=prepare)
    settled(session)
    assert users(session) == (["go"] if withdrawn == [True] else ["go", "left"])
    assert len(session.ledger) == len(users(session))
    assert stops(session) == ["end_turn"]


@pytest.mark.parametrize(("moment", "n"), [moment for moment in MOMENTS if moment[1] in {2, 3}])
async def test_edited_steering_is_taken_up_as_edited_or_not_edited_at_all(moment: Moment, n: int) -> None:
    session = MemorySession(agent())
    session.post("go")
    posted: list[str] = []
    edited: list[bool] = []
    prepare = doing(
        ("preview", 3, lambda: posted.extend(session.post("left", delivery="steer"))),
        (moment, n, lambda: edited.append(session.edit(posted[0], "right"))),
    )
    await work_to_the_end(session, model=ScriptedModel(text("answer")), prepare=prepare)
    settled(session)
    assert users(session) == ["go", "right" if edited == [True] else "left"]
    assert edited == [(moment, n) != ("after_commit", 3)]


@pytest.mark.parametrize(("moment", "n"), MOMENTS)
async def test_steering_survives_the_loss_of_the_worker(moment: Moment, n: int) -> None:
    """It is posted early; the worker is killed at one of its commits, and another one goes on."""
    session = MemorySession(agent("a"))
    session.post("go")
    session.post("left", delivery="steer")

    def prepare(hold: MemoryHold) -> None:
        hold.at("preview", 2, lambda: session.post("right", delivery="steer"))
        hold.at(moment, n, hold.kill)

    await work_to_the_end(session, model=two_turns(), tools=a_tool(), prepare=prepare)
    settled(session)
    wanted = ["go", "left", "right"] if "right" in users(session) else ["go", "left"]
    assert users(session) == wanted
    assert len(session.runs) == 1


async def test_steering_joins_the_run_that_is_queued() -> None:
    session = MemorySession(agent())
    session.post("go")
    session.post("left", delivery="steer")
    model = ScriptedModel(text("answer"))
    await work_to_the_end(session, model=model)
    settled(session)
    assert (len(model.requests), users(session)) == (1, ["go", "left"])


async def test_steering_is_taken_up_with_a_retry() -> None:
    session = MemorySession(agent())
    session.post("go")
    session.clock.on_sleep = partial(at_sleep, steer, session)
    await work_to_the_end(session, model=ScriptedModel([Overloaded("busy")], text("answer")))
    settled(session)
    assert users(session) == ["go", "left"]
    assert roles(session) == "user user assistant"


async def test_a_session_that_waits_for_the_client_takes_up_steering_first_when_it_is_answered() -> None:
    session = MemorySession(agent(client_tool("ask")))
    session.post("go")
    await work(session, model=ScriptedModel(calls("ask")))
    assert session.run is not None
    assert session.run.state == "waiting"
    [queued] = session.post("later")
    [steered] = session.post("left", delivery="steer")
    assert session.run.state == "waiting"
    await work_to_the_end(session, model=ScriptedModel(text("answer")))
    settled(session)
    assert users(session) == ["go", "left", "later"]
    assert (run_of(session, steered), run_of(session, queued)) == (0, 1)


# -- interrupting ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("moment", "n"), MOMENTS)
async def test_an_interrupting_prompt_is_next_whenever_it_comes(moment: Moment, n: int) -> None:
    session = MemorySession(agent("a"))
    session.post("go")
    session.post("later")
    sent: list[str] = []
    requests: list[int] = []
    model = two_turns()

    def interrupt() -> None:
        sent.extend(session.post("no", "stop", delivery="interrupt"))
        requests.append(len(model.requests))

    await work_to_the_end(session, model=model, tools=a_tool(), prepare=doing((moment, n, interrupt)))
    settled(session)
    is_next_run = (moment, n) == ("after_commit", 5)  # that of "later", which has not begun
    assert {run_of(session, prompt_id) for prompt_id in sent} == {2 if is_next_run else 1}
    assert users(session)[-3 if not is_next_run else -2 :][:2] == ["no", "stop"]
    assert stops(session)[-1] == "end_turn"


async def test_an_interrupting_prompt_keeps_the_text_so_far_and_goes_on_behind_it() -> None:
    session = MemorySession(agent())
    session.post("go")

    async def interrupt() -> None:
        session.post("no", delivery="interrupt")
        await asyncio.Event().wait()

    model = ScriptedModel([MessageStart(), TextDelta(index=0, text="so far"), interrupt], text("yes"))
    await work_to_the_end(session, model=model)
    settled(session)
    assert stops(session) == ["cancelled", "end_turn"]
    assert [message["content"][0]["text"] for message in session.transcript()] == [
        "go",
        "so far",
        "no",
        "yes",
    ]


async def test_an_interrupting_prompt_ends_the_wait_for_a_silent_provider() -> None:
    session = MemorySession(agent())
    session.post("go")

    async def interrupt() -> None:
        session.post("no", delivery="interrupt")
        await asyncio.Event().wait()

    await work_to_the_end(session, model=ScriptedModel([interrupt], text("yes")))
    settled(session)
    assert stops(session) == ["cancelled", "end_turn"]
    assert roles(session) == "user user assistant"


async def test_an_interrupting_prompt_ends_the_wait_for_a_retry() -> None:
    session = MemorySession(agent())
    session.post("go")
    session.clock.on_sleep = partial(at_sleep, interrupt, session)
    model = ScriptedModel([Overloaded("busy")], text("yes"))
    await work_to_the_end(session, model=model)
    settled(session)
    assert (stops(session), len(model.requests)) == (["cancelled", "end_turn"], 2)


async def test_an_interrupting_prompt_does_not_wait_for_a_tool_that_ignores_cancels(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("agents.tool_calls.STOP_GRACE_S", 0.01)
    session = MemorySession(agent("a"))
    session.post("go")
    is_over = asyncio.Event()

    async def execute(_: JsonObject, __: ToolContext) -> ToolResult:
        session.post("no", delivery="interrupt")
        while not is_over.is_set():
            try:
                await is_over.wait()
            except asyncio.CancelledError:
                continue
        return text_result("late")

    tools = ToolRegistry([Tool(name="a", description="A.", input_schema=OBJECT, execute=execute)])
    await work_to_the_end(session, model=two_turns(), tools=tools)
    is_over.set()
    settled(session)
    assert stops(session) == ["cancelled", "end_turn"]
    assert [event["outcome"] for event in session.find_events("agent.tool_result")] == ["cancelled"]
    assert roles(session) == "user assistant tool user assistant"


async def test_an_interrupting_prompt_closes_what_waits_for_the_client() -> None:
    session = MemorySession(agent(client_tool("ask")))
    session.post("go")
    await work(session, model=ScriptedModel(calls("ask")))
    session.post("later")
    session.post("no", delivery="interrupt")
    assert [run.state for run in session.runs] == ["closed", "queued"]
    await work_to_the_end(session, model=ScriptedModel(text("yes")))
    settled(session)
    assert users(session) == ["go", "no", "later"]
    assert [event["outcome"] for event in session.find_events("agent.tool_result")] == ["cancelled"]


async def test_an_interrupting_prompt_takes_the_place_of_a_run_that_is_queued() -> None:
    session = MemorySession(agent())
    session.post("go")
    session.post("no", delivery="interrupt")
    await work_to_the_end(session, model=ScriptedModel(text("yes")))
    settled(session)
    assert (users(session), stops(session)) == (["no"], ["cancelled", "end_turn"])


async def test_two_interrupting_prompts_are_the_next_run_together() -> None:
    session = MemorySession(agent())
    session.post("go")
    session.post("later")

    def interrupt() -> None:
        session.post("no", delivery="interrupt")
        session.post("do this", delivery="interrupt")

    await work_to_the_end(session, model=ScriptedModel(text("yes")), prepare=doing(("preview", 3, interrupt)))
    settled(session)
    assert users(session) == ["go", "no", "do this", "later"]
    assert [len(run.prompt_ids) for run in session.runs] == [1, 2, 1]


async def test_an_interrupting_prompt_goes_before_steering_that_was_there_first() -> None:
    session = MemorySession(agent(client_tool("ask")))
    session.post("go")
    await work(session, model=ScriptedModel(calls("ask")))
    steer(session)
    interrupt(session)
    await work_to_the_end(session, model=ScriptedModel(text("yes")))
    settled(session)
    assert users(session) == ["go", "no", "left"]
    assert run_of(session, session.runs[1].prompt_ids[0]) == 1
    assert len(session.runs) == 2


# -- stopping after the turn ----------------------------------------------------------------------------


@pytest.mark.parametrize(("moment", "n"), MOMENTS)
async def test_a_stop_after_the_turn_finishes_the_turn_and_begins_no_other(moment: Moment, n: int) -> None:
    session = MemorySession(agent("a"))
    session.post("go")
    begun: list[int] = []

    def cancel() -> None:
        session.cancel("enough", mode="after_turn")
        begun.append(len(session.ledger))

    model = two_turns()
    await work_to_the_end(session, model=model, tools=a_tool(), prepare=doing((moment, n, cancel)))
    settled(session)
    assert len(session.ledger) == begun[0]
    stop = session.runs[0].stop
    assert stop is not None
    if (moment, n) == ("after_commit", 5):  # it came too late
        assert stop.type == "end_turn"
    else:
        assert (stop.type, stop.message) == ("cancelled", "enough")
    assert {event["outcome"] for event in session.find_events("agent.tool_result")} <= {"ok"}
    assert not any(event["incomplete"] for event in session.find_events("agent.message"))


async def test_steering_is_not_taken_up_by_a_run_that_stops_after_its_turn() -> None:
    session = MemorySession(agent())
    session.post("go")

    def stop() -> None:
        session.post("left", delivery="steer")
        session.cancel(mode="after_turn")

    await work_to_the_end(session, model=ScriptedModel(text("answer")), prepare=doing(("preview", 3, stop)))
    settled(session)
    assert stops(session) == ["cancelled", "end_turn"]
    assert roles(session) == "user assistant user assistant"


async def test_a_stop_now_on_top_of_a_stop_after_the_turn_is_at_once() -> None:
    session = MemorySession(agent())
    session.post("go")

    async def stop() -> None:
        session.cancel("soon", mode="after_turn")
        session.cancel("now")
        session.cancel("late", mode="after_turn")
        await asyncio.Event().wait()

    await work_to_the_end(session, model=ScriptedModel([MessageStart(), TextDelta(index=0, text="a"), stop]))
    settled(session)
    stopped = session.runs[0].stop
    assert stopped is not None
    assert (stopped.type, stopped.message) == ("cancelled", "now")
    assert session.find_events("agent.message")[0]["incomplete"]


async def test_a_stop_after_the_turn_lets_a_retry_of_the_turn_go_on() -> None:
    session = MemorySession(agent())
    session.post("go")
    session.clock.on_sleep = lambda _: session.cancel("enough", mode="after_turn")
    await work_to_the_end(session, model=ScriptedModel([Overloaded("busy")], text("answer")))
    settled(session)
    assert (stops(session), roles(session)) == (["cancelled"], "user assistant")


async def test_a_stop_after_the_turn_waits_for_the_clients_answer() -> None:
    session = MemorySession(agent(client_tool("ask")))
    session.post("go")
    await work(session, model=ScriptedModel(calls("ask")))
    session.cancel("enough", mode="after_turn")
    assert session.run is not None
    assert session.run.state == "waiting"
    await work_to_the_end(session, model=ScriptedModel(text("never")))
    settled(session)
    assert (stops(session), roles(session)) == (["cancelled"], "user assistant tool")
    assert len(session.ledger) == 1


async def test_a_stop_after_the_turn_closes_at_once_what_has_not_begun() -> None:
    session = MemorySession(agent())
    session.post("go")
    session.cancel(mode="after_turn")
    settled(session)
    assert (stops(session), users(session)) == (["cancelled"], [])


# -- everything at once ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("one", "two"),
    [
        (steer, interrupt),
        (steer, stop_after_turn),
        (steer, steer),
        (interrupt, kill),
        (stop_after_turn, kill),
    ],
)
async def test_nothing_is_lost_or_taken_twice_wherever_two_things_come(one: Act, two: Act) -> None:
    for first, second in product(MOMENTS, MOMENTS):
        session = MemorySession(agent("a"))
        session.post("go")
        session.post("later")
        prepare = doing((*first, partial(one, session)), (*second, partial(two, session)))
        await work_to_the_end(session, model=two_turns(), tools=a_tool(), prepare=prepare)
        settled(session)
        assert "later" in users(session) or session.find_events("prompt.withdrawn")


# -- system messages --------------------------------------------------------------------------------------


async def test_a_system_message_starts_nothing_and_goes_before_the_next_prompt() -> None:
    session = MemorySession(agent())
    session.instruct("Be brief.")
    assert session.run is None
    session.post("say: hello")
    await work_to_the_end(session)
    check(session)
    assert [message["role"] for message in session.transcript()] == ["system", "user", "assistant"]
    assert [run.stop.type for run in session.runs if run.stop] == ["end_turn"]


async def test_a_system_message_goes_with_the_next_request_of_a_run_that_is_made_anyway() -> None:
    session = MemorySession(agent("calculate"))
    session.post('call: calculate {"expression": "1"}\n---\nsay: done')

    def prepare(hold: MemoryHold) -> None:
        hold.at("after_commit", 2, lambda: session.instruct("Be brief."))

    await work_to_the_end(session, tools=builtin_registry(), prepare=prepare)
    check(session)
    roles = [message["role"] for message in session.transcript()]
    assert roles == ["user", "assistant", "tool", "system", "assistant"]


async def test_a_system_message_that_no_request_follows_waits_and_makes_no_run() -> None:
    session = MemorySession(agent())
    session.post("say: one")

    def prepare(hold: MemoryHold) -> None:
        hold.at("after_commit", 1, lambda: session.instruct("Be brief."))

    await work_to_the_end(session, prepare=prepare)
    check(session)
    assert len(session.runs) == 1
    assert len(session.prompts) == 1
    session.post("say: two")
    await work_to_the_end(session)
    check(session)
    assert [message["role"] for message in session.transcript()][2:] == ["system", "user", "assistant"]


@pytest.mark.parametrize("n", range(1, 6))
async def test_a_system_message_survives_a_crash_at_any_commit(n: int) -> None:
    for moment in ("before_commit", "after_commit"):
        session = MemorySession(agent("calculate"))
        session.post('call: calculate {"expression": "1"}\n---\nsay: done')

        def prepare(hold: MemoryHold) -> None:
            hold.at("before_commit", 3, lambda: session.instruct("Be brief."))  # noqa: B023
            hold.at(moment, n, hold.kill)  # noqa: B023

        session.instruct("Be kind.")
        await work_to_the_end(session, tools=builtin_registry(), prepare=prepare)
        check(session)
        roles = [message["role"] for message in session.transcript()]
        assert roles[:2] == ["system", "user"]
        assert roles[-1] == "assistant"
        assert session.find_events("agent.message")[-1]["content"][0]["text"] == "done"
