"""`GET /v1/sessions/{id}` while things go on: what it shows, and a stream that goes on behind it."""

import asyncio
import json
import tempfile
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from tests.integration.test_conversations_deliveries import send
from tests.support.served_api import Caller, ServedApi, running_worker, served_api
from tests.support.streaming import OwnRedis


@pytest.fixture
async def api(database_url: str, redis_url: str) -> AsyncIterator[ServedApi]:
    async with served_api(database_url, redis_url) as api:
        yield api


@pytest.fixture
async def me(database_url: str, redis_url: str, api: ServedApi) -> AsyncIterator[Caller]:
    async with running_worker(database_url, redis_url):
        yield await api.caller()


async def state(me: Caller, session: str) -> Any:
    return (await me.get(f"/v1/sessions/{session}"))["live"]


async def seen(me: Caller, session: str, is_there: Callable[[Any], bool]) -> Any:
    """The state once `is_there`."""
    async with asyncio.timeout(60):
        while not is_there(found := await state(me, session)):  # noqa: ASYNC110 - it is another process's
            await asyncio.sleep(0.02)
    return found


def text_of(unfinished: Any, kind: str = "agent.message") -> str:
    deltas = [delta for each in unfinished if each["type"] == kind for delta in each["deltas"]]
    return "".join(delta["content"]["text"] for delta in deltas)


async def test_an_idle_session_has_nothing_going_on(me: Caller) -> None:
    session = await me.session()
    assert await state(me, session) == {
        "cursor": "0",
        "run_id": None,
        "run_state": None,
        "unfinished": [],
        "pending_calls": [],
        "queue": {"count": 0, "prompt_ids": []},
        "last_error": None,
    }


async def test_the_message_that_is_being_written_is_shown_and_a_stream_goes_on_behind_it(me: Caller) -> None:
    session = await me.session()
    await send(me, session, "pace: 20\nlong: 60")
    now = await seen(me, session, lambda live: len(text_of(live["unfinished"])) > 20)
    assert now["run_state"] == "running"
    assert now["run_id"].startswith("run_")
    assembled, events = text_of(now["unfinished"]), []
    (writing,) = [each for each in now["unfinished"] if each["type"] == "agent.message"]
    query = {"after": now["cursor"], "until": "idle", "event_deltas": "agent.message"}
    async with me.http.stream("GET", f"/v1/sessions/{session}/events/stream", params=query) as stream:
        async for line in stream.aiter_lines():
            if not line.startswith("data:"):
                continue
            event = json.loads(line[5:])
            if event["type"] == "event_start" and event["event"]["id"] == writing["id"]:
                assembled = ""  # it begins again, with all of its text
            elif event["type"] == "event_delta" and event["event_id"] == writing["id"]:
                assembled += event["delta"]["content"]["text"]
            elif "seq" in event:
                events.append(event)
    first = int(now["cursor"].split("-")[0]) + 1
    assert [event["seq"] for event in events] == list(range(first, first + len(events)))
    (message,) = [event for event in events if event["type"] == "agent.message"]
    assert message["id"] == writing["id"]
    assert message["content"][0]["text"] == assembled
    after = await state(me, session)
    assert (after["unfinished"], after["run_state"], after["cursor"]) == ([], None, str(events[-1]["seq"]))


async def test_calls_without_a_result_and_prompts_that_wait_are_shown(me: Caller) -> None:
    agent = await me.agent(
        tools=[
            {"type": "builtin", "name": "delay"},
            {"type": "custom", "name": "ask", "description": "Asks.", "input_schema": {"type": "object"}},
        ]
    )
    session = await me.session(agent)
    script = 'call: delay {"seconds": 0.05}\ncall: delay {"seconds": 500}\ncall: ask {"colour": true}'
    await send(me, session, script)
    now = await seen(me, session, lambda live: len(live["pending_calls"]) == 2)
    assert [(call["name"], call["state"]) for call in now["pending_calls"]] == [
        ("delay", "running"),
        ("ask", "open"),
    ]
    assert now["pending_calls"][1]["input"] == {"colour": True}
    waiting = await send(me, session, "say: later", delivery="queue")
    now = await state(me, session)
    assert now["queue"] == {"count": 1, "prompt_ids": [waiting["data"][0]["id"]]}


async def test_the_last_error_is_shown_until_another_run_begins(me: Caller) -> None:
    session = await me.session()
    await send(me, session, "fail: request_rejected")
    now = await seen(me, session, lambda live: live["last_error"] is not None and live["run_id"] is None)
    assert now["last_error"]["error"]["code"] == "request_rejected"
    await send(me, session, "say: fine")
    await seen(me, session, lambda live: live["last_error"] is None and live["run_id"] is None)


async def test_previews_of_a_lost_worker_are_not_shown(api: ServedApi, me: Caller) -> None:
    session = await me.session()
    await send(me, session, "say: So far.\nhang: after 2 deltas")
    await seen(me, session, lambda live: bool(text_of(live["unfinished"])))
    async with api.database.transaction() as tx:
        await tx.execute("UPDATE sessions SET epoch = epoch + 1")
    assert (await state(me, session))["unfinished"] == []


async def test_the_state_is_shown_while_redis_is_away(database_url: str) -> None:
    with tempfile.TemporaryDirectory(prefix="arm-") as folder:
        redis = OwnRedis(Path(folder))
        await redis.start()
        try:
            await shown_without(redis, database_url)
        finally:
            redis.kill()


async def shown_without(redis: OwnRedis, database_url: str) -> None:
    async with served_api(database_url, redis.url) as api:
        me = await api.caller()
        session = await me.session()
        await send(me, session, "say: hello")
        redis.kill()
        now = await asyncio.wait_for(state(me, session), 30)
        assert (now["run_state"], now["unfinished"]) == ("queued", [])
        assert now["queue"]["count"] == 1
