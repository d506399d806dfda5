"""Deliveries, queue modes and rollback, as clients use them; those that need one have a worker."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from db.ids import to_uuid
from tests.support.served_api import Caller, ServedApi, prompt, running_worker, served_api

HANG = "say: So far.\nhang: after 2 deltas"


@pytest.fixture
async def api(database_url: str, redis_url: str) -> AsyncIterator[ServedApi]:
    async with served_api(database_url, redis_url) as api:
        yield api


@pytest.fixture
async def worker(database_url: str, redis_url: str, api: ServedApi) -> AsyncIterator[None]:
    async with running_worker(database_url, redis_url):
        yield


async def send(me: Caller, session: str, *texts: str, status: int = 200, **fields: Any) -> Any:
    """The answer to prompts of one POST. `fields` are those of each."""
    body = {"events": [prompt(text) | fields for text in texts]}
    return await me.post(f"/v1/sessions/{session}/events", body, status)


async def settled(me: Caller, session: str, *, runs: int) -> list[Any]:
    """The session's runs, oldest first, once there are so many and all are closed."""
    path = f"/v1/sessions/{session}/runs"
    async with asyncio.timeout(60):
        while True:
            found: list[Any] = (await me.get(path, params={"order": "asc", "limit": 100}))["data"]
            if len(found) == runs and all(run["state"] == "closed" for run in found):
                return found
            await asyncio.sleep(0.05)


async def transcript(me: Caller, session: str, **params: Any) -> list[tuple[int, str]]:
    """Position and text of each message."""
    path = f"/v1/sessions/{session}/messages"
    rows = (await me.get(path, params={"limit": 200, **params}))["data"]
    return [(row["position"], row["content"][0]["text"]) for row in rows]


async def log_types(me: Caller, session: str) -> list[str]:
    rows = (await me.get(f"/v1/sessions/{session}/events", params={"limit": 500}))["data"]
    return [row["type"] for row in rows]


async def begin(api: ServedApi, run_id: str) -> None:
    """Puts the run where a worker's claim puts it."""
    async with api.database.transaction() as tx:
        await tx.execute(
            "UPDATE runs SET state = 'running', started_at = clock_timestamp() WHERE id = $1", to_uuid(run_id)
        )


async def test_pending_prompts_are_listed_in_the_order_in_which_they_are_taken(api: ServedApi) -> None:
    me = await api.caller()
    session = await me.session()
    [event] = (await send(me, session, "go"))["data"]
    await begin(api, event["run_id"])
    for text, delivery in (("later", None), ("left", "steer"), ("no", "interrupt"), ("right", "steer")):
        await send(me, session, text, delivery=delivery)
    path = f"/v1/sessions/{session}/prompts"

    rows: list[Any] = []
    page = None
    while page is not None or not rows:
        answer = await me.get(
            path, params={"states": "pending", "limit": 2} | ({"page": page} if page else {})
        )
        rows, page = rows + answer["data"], answer["next_page"]

    listed = [(row["delivery"], row["content"][0]["text"]) for row in rows]
    assert listed == [
        ("queue", "go"),
        ("interrupt", "no"),
        ("steer", "left"),
        ("steer", "right"),
        ("queue", "later"),
    ]
    assert [row["seq"] for row in (await me.get(path))["data"]] == [1, 2, 3, 4, 5]


async def test_rejected_prompt_is_a_conflict_and_nothing_of_its_request_is_stored(api: ServedApi) -> None:
    me = await api.caller()
    session = await me.session()
    [event] = (await send(me, session, "go", delivery="reject"))["data"]
    await begin(api, event["run_id"])
    events = [{"type": "user.interrupt"}, prompt("again") | {"delivery": "reject"}]
    problem = await me.post(f"/v1/sessions/{session}/events", {"events": events}, 409)
    assert problem["code"] == "session_busy"
    assert await log_types(me, session) == ["user.message"]
    assert (await me.get(f"/v1/runs/{event['run_id']}"))["cancel_mode"] is None


async def test_prompts_of_one_request_need_one_delivery(api: ServedApi) -> None:
    me = await api.caller()
    session = await me.session()
    events = [prompt("a"), prompt("b") | {"delivery": "queue"}, prompt("c") | {"delivery": "steer"}]
    problem = await me.post(f"/v1/sessions/{session}/events", {"events": events}, 422)
    assert problem["field"] == "events[2].delivery"
    await me.post(f"/v1/sessions/{session}/events", {"events": events[:2]})


async def test_queue_modes_are_the_agents_until_the_session_has_its_own(api: ServedApi) -> None:
    me = await api.caller()
    session = await me.session(await me.agent(steering_mode="all"))
    path = f"/v1/sessions/{session}"

    async def modes() -> tuple[str, str]:
        agent = (await me.get(path))["agent"]
        return agent["steering_mode"], agent["follow_up_mode"]

    assert await modes() == ("all", "one_at_a_time")
    await me.post(path, {"steering_mode": "one_at_a_time", "follow_up_mode": "all"})
    assert await modes() == ("one_at_a_time", "all")
    await me.post(path, {"steering_mode": None})
    assert await modes() == ("all", "all")
    await me.post(path, {"steering_mode": None})  # changes nothing
    rows = (await me.get(f"{path}/events"))["data"]
    assert [row["changes"] for row in rows] == [
        {"steering_mode": "one_at_a_time", "follow_up_mode": "all"},
        {"steering_mode": None},
    ]
    assert (await me.post(path, {"steering_mode": "some"}, 422))["field"] == "steering_mode"


async def test_run_can_be_cancelled_after_its_turn_and_then_at_once(api: ServedApi) -> None:
    me = await api.caller()
    session = await me.session()
    [event] = (await send(me, session, "go"))["data"]
    await begin(api, event["run_id"])
    path = f"/v1/runs/{event['run_id']}/cancel"
    shown = [(await me.post(path, {"mode": mode}))["cancel_mode"] for mode in ("after_turn", "now")]
    assert shown == ["after_turn", "now"]
    body = {"events": [{"type": "user.interrupt", "mode": "after_turn"}]}
    [stored] = (await me.post(f"/v1/sessions/{session}/events", body))["data"]
    assert stored["mode"] == "after_turn"


@pytest.mark.usefixtures("worker")
async def test_rollback_takes_back_run_after_run_and_leaves_what_was_used(api: ServedApi) -> None:
    me = await api.caller()
    session = await me.session()
    path = f"/v1/sessions/{session}/rollback"
    assert (await me.post(path, None, 409))["code"] == "nothing_to_roll_back"
    for number, text in enumerate(("one", "two"), start=1):
        await send(me, session, f"say: {text}")
        runs = await settled(me, session, runs=number)
    usage = await me.get(f"/v1/sessions/{session}/usage")

    key = {"Idempotency-Key": "undo"}
    view = await me.post(path, headers=key)
    assert (await me.post(path, headers=key))["last_seq"] == view["last_seq"]

    assert await transcript(me, session) == [(1, "say: one"), (2, "one")]
    everything = await transcript(me, session, include_rolled_back=True)
    assert [position for position, _ in everything] == [1, 2, 3, 4]
    [event] = (await me.get(f"/v1/sessions/{session}/events", params={"order": "desc", "limit": 1}))["data"]
    assert (event["type"], event["rolled_back_run_id"]) == ("session.rolled_back", runs[-1]["id"])
    assert event["position"] == 2
    assert await me.get(f"/v1/sessions/{session}/usage") == usage

    await send(me, session, "say: three", "say: four")
    await settled(me, session, runs=3)
    assert await transcript(me, session) == [
        (1, "say: one"),
        (2, "one"),
        (5, "say: three"),
        (6, "say: four"),
        (7, "four"),
    ]
    for position in (2, 0):
        await me.post(path)
        rows = (await me.get(f"/v1/sessions/{session}/events", params={"order": "desc", "limit": 1}))["data"]
        assert rows[0]["position"] == position
    assert await transcript(me, session) == []
    assert (await me.post(path, None, 409))["code"] == "nothing_to_roll_back"
    [running] = (await send(me, session, HANG))["data"]
    assert (await me.post(path, None, 409))["code"] == "session_busy"
    await me.post(f"/v1/runs/{running['run_id']}/cancel")
    await settled(me, session, runs=4)
    other = await api.caller()
    await other.post(path, None, 404)


@pytest.mark.usefixtures("worker")
async def test_prompts_of_many_clients_are_run_in_the_order_of_their_numbers(api: ServedApi) -> None:
    me = await api.caller()
    session = await me.session()
    posts = [[f"{number}.{part}" for part in range(1 + number % 3)] for number in range(12)]
    await asyncio.gather(*(send(me, session, *(f"say: {text}" for text in texts)) for texts in posts))
    await settled(me, session, runs=len(posts))

    log = (await me.get(f"/v1/sessions/{session}/events", params={"limit": 1000}))["data"]
    posted = [row for row in log if row["type"] == "user.message"]
    applied = [key for row in log if row["type"] == "prompt.applied" for key in row["prompt_ids"]]
    assert applied == [row["id"] for row in posted]
    rows = (await me.get(f"/v1/sessions/{session}/messages", params={"limit": 1000}))["data"]
    said = [row["content"][0]["text"] for row in rows if row["role"] == "user"]
    assert said == [row["content"][0]["text"] for row in posted]
    assert len(said) == sum(map(len, posts))


@pytest.mark.usefixtures("worker")
async def test_short_way_steers_the_run_in_progress_or_takes_its_place(api: ServedApi) -> None:
    me = await api.caller()
    agent = await me.agent()
    session = await me.session(agent)
    path = f"/v1/agents/{agent}/prompt"
    [first] = (await send(me, session, "say: one\nwait: 1"))["data"]

    steered = await me.post(path, {"prompt": "say: two", "session_id": session, "delivery": "steer"})
    assert (steered["run_id"], steered["text"]) == (first["run_id"], "two")
    await send(me, session, HANG)
    asked = {"prompt": "say: three", "session_id": session, "delivery": "interrupt"}
    placed = await me.post(path, asked)
    assert (placed["text"], placed["stop_reason"]["type"]) == ("three", "end_turn")
    runs = await settled(me, session, runs=3)
    assert [run["stop_reason"]["type"] for run in runs] == ["end_turn", "cancelled", "end_turn"]
    [hanging] = (await send(me, session, HANG))["data"]
    assert (await me.post(path, asked | {"delivery": "reject"}, 409))["code"] == "session_busy"
    await me.post(f"/v1/runs/{hanging['run_id']}/cancel")
    await settled(me, session, runs=4)


@pytest.mark.usefixtures("worker")
async def test_system_messages_go_with_the_next_request_and_name_what_they_replace(api: ServedApi) -> None:
    me = await api.caller()
    session = await me.session()
    path = f"/v1/sessions/{session}/events"

    def told(text: str, **fields: Any) -> dict[str, Any]:
        return {"type": "system.message", "content": [{"type": "text", "text": text}], **fields}

    (sent,) = (await me.post(path, {"events": [told("Be brief.", section="tone")]}))["data"]
    assert (sent["section"], sent["processed_at"]) == ("tone", None)
    assert (await me.get(f"/v1/sessions/{session}"))["status"] == "idle"
    (waiting,) = (await me.get(f"/v1/sessions/{session}/prompts", params={"states": "pending"}))["data"]
    assert (waiting["id"], waiting["delivery"]) == (sent["id"], "next_request")
    await me.post(path, {"events": [told("Answer in French."), prompt("say: one")]})
    await settled(me, session, runs=1)
    await me.post(path, {"events": [told("Be long.", section="tone")]})
    assert (await me.post(f"/v1/sessions/{session}/continue", None, 409))["code"] == "nothing_to_continue"
    await send(me, session, "say: two")
    await settled(me, session, runs=2)
    rows = (await me.get(f"/v1/sessions/{session}/messages"))["data"]
    said = [(row["role"], row["content"][-1]["text"]) for row in rows]
    assert said == [
        ("system", "Be brief."),
        ("system", "Answer in French."),
        ("user", "say: one"),
        ("assistant", "one"),
        ("system", "Be long."),
        ("user", "say: two"),
        ("assistant", "two"),
    ]
    assert "'tone'" in rows[4]["content"][0]["text"]


async def test_system_messages_are_edited_and_withdrawn_while_they_wait(api: ServedApi) -> None:
    me = await api.caller()
    session = await me.session()
    event = {"type": "system.message", "content": [{"type": "text", "text": "Be brief."}]}
    (sent,) = (await me.post(f"/v1/sessions/{session}/events", {"events": [event]}))["data"]
    path = f"/v1/sessions/{session}/prompts/{sent['id']}"
    await me.post(path, {"content": [{"type": "text", "text": "Be kind."}]})
    await me.delete(path)
    assert (await me.get(f"/v1/sessions/{session}/prompts", params={"states": "pending"}))["data"] == []


@pytest.mark.parametrize(
    "fields", [{"content": []}, {"content": [{"type": "text", "text": " "}]}, {"section": ""}, {"x": 1}]
)
async def test_system_messages_that_say_nothing_are_refused(api: ServedApi, fields: dict[str, Any]) -> None:
    me = await api.caller()
    session = await me.session()
    event = {"type": "system.message", "content": [{"type": "text", "text": "Be brief."}]} | fields
    await me.post(f"/v1/sessions/{session}/events", {"events": [event]}, 422)
