"""What a prompt changes for its own run: checked, stored, obeyed after a crash too, and gone with the run."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from db.ids import to_uuid
from tests.integration.test_conversations_deliveries import send, settled
from tests.support.served_api import ServedApi, prompt, running_worker, served_api

TWO_TURNS = 'call: calculate {"expression": "1 + 1"}\n---\nsay: done'


@pytest.fixture
async def api(database_url: str, redis_url: str) -> AsyncIterator[ServedApi]:
    async with served_api(database_url, redis_url) as api:
        yield api


@pytest.fixture
async def worker(database_url: str, redis_url: str, api: ServedApi) -> AsyncIterator[None]:
    async with running_worker(database_url, redis_url):
        yield


async def ledger(api: ServedApi, session: str) -> list[tuple[str, str]]:
    async with api.database.transaction() as tx:
        rows = await tx.fetch(
            "SELECT provider, model FROM usage_entries WHERE session_id = $1 ORDER BY opened_at",
            to_uuid(session),
        )
    return [(row["provider"], row["model"]) for row in rows]


@pytest.mark.usefixtures("worker")
async def test_another_model_answers_one_prompt(api: ServedApi) -> None:
    me = await api.caller()
    session = await me.session(await me.agent(model="rehearsal:fast"))
    await send(me, session, "say: one")
    await settled(me, session, runs=1)
    await send(me, session, "say: two", model="rehearsal:small", think_effort="low")
    await settled(me, session, runs=2)
    await send(me, session, "say: three")
    runs = await settled(me, session, runs=3)
    assert await ledger(api, session) == [("rehearsal", name) for name in ("fast", "small", "fast")]
    changed = [run["overrides"] for run in runs]
    assert changed[0] == changed[2] == {}
    assert changed[1]["model"]["id"] == "rehearsal:small"
    assert changed[1]["think_effort"] > 0


@pytest.mark.usefixtures("worker")
async def test_tools_turns_and_time_hold_for_one_run(api: ServedApi) -> None:
    me = await api.caller()
    session = await me.session()
    calculate = {"type": "builtin", "name": "calculate"}
    await send(me, session, TWO_TURNS, tools=[calculate])
    await settled(me, session, runs=1)
    await send(me, session, TWO_TURNS, tools=[calculate], max_turns=1)
    await settled(me, session, runs=2)
    await send(me, session, TWO_TURNS)
    await settled(me, session, runs=3)
    await send(me, session, "say: so far\nhang: after 2 deltas", time_limit_s=0.2)
    runs = await settled(me, session, runs=4)
    assert [run["stop_reason"]["type"] for run in runs] == ["end_turn", "max_turns", "end_turn", "timed_out"]
    log = (await me.get(f"/v1/sessions/{session}/events", params={"types": "agent.tool_result"}))["data"]
    assert [event["is_error"] for event in log] == [False, False, True]


@pytest.mark.usefixtures("worker")
async def test_the_short_way_takes_them_too(api: ServedApi) -> None:
    me = await api.caller()
    agent = await me.agent()
    body = {"prompt": "say: hi", "model": {"id": "rehearsal:fast", "effort": 0.5}, "max_turns": 3}
    answer = await me.post(f"/v1/agents/{agent}/prompt", body)
    run = await me.get(f"/v1/runs/{answer['run_id']}")
    assert run["overrides"] == {
        "model": {"id": "rehearsal:fast", "effort": 0.5, "speed": None},
        "max_turns": 3,
    }


async def test_a_prompt_that_waits_keeps_them_for_the_run_that_it_becomes(
    api: ServedApi, database_url: str, redis_url: str
) -> None:
    """They survive: the api that took them is not the process that runs them, nor the run before."""
    me = await api.caller()
    session = await me.session(await me.agent(model="rehearsal:fast"))
    await send(me, session, "say: one")
    await send(me, session, "say: two", model="rehearsal:small", delivery="queue")
    await send(me, session, "say: three", delivery="queue")
    async with running_worker(database_url, redis_url):
        await settled(me, session, runs=3)
    assert [model for _, model in await ledger(api, session)] == ["fast", "small", "fast"]


@pytest.mark.usefixtures("worker")
async def test_a_tool_must_not_be_called_or_must_be_there(api: ServedApi) -> None:
    me = await api.caller()
    session = await me.session(await me.agent(tools=[{"type": "builtin", "name": "calculate"}]))
    await send(me, session, "What is 6 * 7?", tool_choice={"type": "none"})
    await settled(me, session, runs=1)
    await send(me, session, "What is 6 * 7?", tool_choice={"type": "tool", "name": "calculate"})
    await settled(me, session, runs=2)
    await send(me, session, "What is 6 * 7?", tool_choice={"type": "tool", "name": "missing"})
    runs = await settled(me, session, runs=3)
    assert [run["stop_reason"]["type"] for run in runs] == ["end_turn", "end_turn", "error"]
    assert runs[2]["stop_reason"]["code"] == "tool_not_offered"
    log = (await me.get(f"/v1/sessions/{session}/events", params={"types": "agent.tool_use"}))["data"]
    assert [event["run_id"] for event in log] == [runs[1]["id"]]


BAD: list[tuple[dict[str, Any], str]] = [
    ({"model": "nobody:knows"}, "events[0].model"),
    ({"think_effort": 2}, "events[0].think_effort"),
    ({"tools": [{"type": "builtin", "name": "missing"}]}, "events[0].tools[0].name"),
    ({"tool_choice": {"type": "tool"}}, "events[0].tool_choice.name"),
    ({"tool_choice": {"type": "any", "name": "x"}}, "events[0].tool_choice.name"),
    ({"max_turns": 0}, "events[0].max_turns"),
    ({"time_limit_s": -1}, "events[0].time_limit_s"),
    ({"extra_body": []}, "events[0].extra_body"),
    ({"model": "rehearsal:fast", "delivery": "steer"}, "events[0].delivery"),
]


@pytest.mark.parametrize(("fields", "field"), BAD, ids=lambda value: json.dumps(value)[:40])
async def test_what_cannot_be_is_refused_and_nothing_is_stored(
    api: ServedApi, fields: dict[str, Any], field: str
) -> None:
    me = await api.caller()
    session = await me.session()
    problem = await send(me, session, "hello", status=422, **fields)
    assert problem["field"] == field
    assert (await me.get(f"/v1/sessions/{session}/prompts"))["data"] == []


async def test_they_stand_on_the_first_prompt_of_a_request(api: ServedApi) -> None:
    me = await api.caller()
    session = await me.session()
    events = [prompt("one"), prompt("two") | {"max_turns": 2}]
    problem = await me.post(f"/v1/sessions/{session}/events", {"events": events}, 422)
    assert problem["field"] == "events[1]"


@pytest.mark.usefixtures("worker")
async def test_a_run_that_failed_is_continued_without_a_prompt(api: ServedApi) -> None:
    me = await api.caller()
    session = await me.session()
    path = f"/v1/sessions/{session}/continue"
    assert (await me.post(path, None, 409))["code"] == "nothing_to_continue"
    await send(me, session, "fail: request_rejected times 1\nsay: Here I am.")
    await settled(me, session, runs=1)
    run = await me.post(path, {"model": "rehearsal:small"}, 202)
    assert (run["state"], run["prompt_ids"]) == ("queued", [])
    runs = await settled(me, session, runs=2)
    assert [run["stop_reason"]["type"] for run in runs] == ["error", "end_turn"]
    log = (await me.get(f"/v1/sessions/{session}/events", params={"types": "agent.message"}))["data"]
    assert [event["content"][0]["text"] for event in log] == ["Here I am."]
    assert (await ledger(api, session))[-1] == ("rehearsal", "small")
    assert (await me.post(path, None, 409))["code"] == "nothing_to_continue"


@pytest.mark.usefixtures("worker")
async def test_a_cancelled_run_is_continued_and_repeats_no_call(api: ServedApi) -> None:
    me = await api.caller()
    session = await me.session(await me.agent(tools=[{"type": "builtin", "name": "delay"}]))
    await send(me, session, 'call: delay {"seconds": 500}\n---\nsay: On with it.')
    query = {"types": "span.tool_start"}
    async with asyncio.timeout(60):
        while not (await me.get(f"/v1/sessions/{session}/events", params=query))["data"]:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    assert (await me.post(f"/v1/sessions/{session}/continue", None, 409))["code"] == "session_busy"
    (run,) = (await me.get(f"/v1/sessions/{session}/runs"))["data"]
    await me.post(f"/v1/runs/{run['id']}/cancel", None)
    await settled(me, session, runs=1)
    await me.post(f"/v1/sessions/{session}/continue", None, 202)
    runs = await settled(me, session, runs=2)
    assert [run["stop_reason"]["type"] for run in runs] == ["cancelled", "end_turn"]
    assert len((await me.get(f"/v1/sessions/{session}/events", params=query))["data"]) == 1
