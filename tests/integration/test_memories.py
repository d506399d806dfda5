"""Memories over HTTP, with a worker that makes them."""

from collections.abc import AsyncIterator
from typing import Any

import pytest

from db.ids import to_uuid
from tests.integration.test_conversations_deliveries import send, settled, transcript
from tests.support.served_api import Caller, ServedApi, running_worker, served_api

LONG = "say: " + "word " * 300


@pytest.fixture
async def api(database_url: str, redis_url: str) -> AsyncIterator[ServedApi]:
    async with served_api(database_url, redis_url) as api:
        yield api


@pytest.fixture
async def me(database_url: str, redis_url: str, api: ServedApi) -> AsyncIterator[Caller]:
    async with running_worker(database_url, redis_url):
        yield await api.caller()


async def talk(me: Caller, session: str, *prompts: str, runs: int) -> list[Any]:
    for at, text in enumerate(prompts, start=runs - len(prompts) + 1):
        await send(me, session, text)
        found = await settled(me, session, runs=at)
    return found


async def memories(me: Caller, session: str) -> list[Any]:
    found: list[Any] = (await me.get(f"/v1/sessions/{session}/memories"))["data"]
    return found


async def compacted(me: Caller, session: str) -> list[Any]:
    query = {"types": "agent.thread_context_compacted"}
    found: list[Any] = (await me.get(f"/v1/sessions/{session}/events", params=query))["data"]
    return found


async def compact(me: Caller, session: str, *, runs: int) -> Any:
    run = await me.post(f"/v1/sessions/{session}/compact", {}, 202)
    assert (run["state"], run["prompt_ids"]) == ("queued", [])
    return (await settled(me, session, runs=runs))[-1]


async def test_a_memory_is_made_on_request_and_its_tokens_close_a_segment(me: Caller) -> None:
    session = await me.session()
    await talk(me, session, LONG, LONG, LONG, runs=3)
    before = await me.get(f"/v1/sessions/{session}/usage")
    run = await compact(me, session, runs=4)
    assert run["stop_reason"]["type"] == "end_turn"
    (memory,) = await memories(me, session)
    (event,) = await compacted(me, session)
    assert (memory["id"], memory["text"]) == (event["memory_id"], event["memory"])
    assert memory["is_in_effect"]
    after = await me.get(f"/v1/sessions/{session}/usage")
    assert set(after["current"].values()) == {0}
    assert after["full"] == after["total"]
    assert after["total"]["output_tokens"] > before["total"]["output_tokens"]
    assert len(await transcript(me, session)) == 6


async def test_a_conversation_goes_on_from_its_memory_and_keeps_every_message(me: Caller) -> None:
    session = await me.session(await me.agent(model="rehearsal:small"))
    await talk(me, session, *[LONG] * 8, "say: done", runs=9)
    made = await memories(me, session)
    assert len(made) >= 1
    assert [memory["is_in_effect"] for memory in made] == [True] + [False] * (len(made) - 1)
    assert {event["trigger"] for event in await compacted(me, session)} == {"threshold"}
    texts = [text for _, text in await transcript(me, session)]
    assert len(texts) == 18
    assert texts[-1] == "done"


async def test_what_cannot_be_compacted_is_refused(api: ServedApi, me: Caller) -> None:
    session = await me.session()
    path = f"/v1/sessions/{session}/compact"
    assert (await me.post(path, {}, 409))["code"] == "nothing_to_compact"
    await send(me, session, "say: So far.\nhang: after 2 deltas")
    assert (await me.post(path, {}, 409))["code"] == "session_busy"
    assert (await me.post(path, {"unknown": 1}, 422))["code"]
    stranger = await api.caller()
    assert (await stranger.post(path, {}, 404))["code"] == "not_found"


async def test_an_earlier_memory_is_put_into_effect_again(api: ServedApi, me: Caller) -> None:
    session = await me.session()
    await talk(me, session, LONG, LONG, LONG, runs=3)
    await compact(me, session, runs=4)
    await talk(me, session, LONG, LONG, runs=6)
    await compact(me, session, runs=7)
    newest, first = await memories(me, session)
    assert (newest["is_in_effect"], first["is_in_effect"]) == (True, False)
    path = f"/v1/sessions/{session}/memories/{first['id']}/restore"
    assert (await me.post(path, None))["is_in_effect"]
    assert [memory["is_in_effect"] for memory in await memories(me, session)] == [False, True]
    last = (await me.get(f"/v1/sessions/{session}/events", params={"order": "desc", "limit": 1}))["data"][0]
    assert (last["type"], last["changes"]) == ("session.updated", {"memory_id": first["id"]})
    stranger = await api.caller()
    assert (await stranger.post(path, None, 404))["code"] == "not_found"


async def test_a_rollback_puts_off_a_memory_of_what_was_rolled_back(api: ServedApi, me: Caller) -> None:
    session = await me.session()
    await talk(me, session, LONG, LONG, LONG, runs=3)
    await compact(me, session, runs=4)
    (first,) = await memories(me, session)
    async with api.database.transaction() as tx:
        await tx.execute("UPDATE memories SET position = seen_position WHERE id = $1", to_uuid(first["id"]))
    await me.post(f"/v1/sessions/{session}/rollback", None)
    assert [memory["is_in_effect"] for memory in await memories(me, session)] == [False]
    path = f"/v1/sessions/{session}/memories/{first['id']}/restore"
    assert (await me.post(path, None, 409))["code"] == "memory_rolled_back"
    await talk(me, session, "say: on", runs=5)
    assert (await transcript(me, session))[-1][1] == "on"
