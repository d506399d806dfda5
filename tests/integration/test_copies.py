"""Forks, and states that are carried from one server to another."""

import base64
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.integration.test_conversations_deliveries import send, settled
from tests.integration.test_memories import LONG, compact
from tests.support.served_api import Caller, ServedApi, running_worker, served_api
from tests.support.transcript_rules import transcript_problems

CALCULATE = {"type": "builtin", "name": "calculate"}


@pytest.fixture
async def api(database_url: str, redis_url: str) -> AsyncIterator[ServedApi]:
    async with served_api(database_url, redis_url) as api:
        yield api


@pytest.fixture
async def me(database_url: str, redis_url: str, api: ServedApi) -> AsyncIterator[Caller]:
    async with running_worker(database_url, redis_url):
        yield await api.caller()


async def events(me: Caller, session: str, **params: Any) -> list[Any]:
    found: list[Any] = (await me.get(f"/v1/sessions/{session}/events", params={"limit": 500, **params}))[
        "data"
    ]
    return found


async def messages(me: Caller, session: str) -> list[Any]:
    found: list[Any] = (await me.get(f"/v1/sessions/{session}/messages", params={"limit": 200}))["data"]
    return found


async def talked(me: Caller) -> str:
    """A session with a call and two runs."""
    session = await me.session(await me.agent(tools=[CALCULATE]), title="Sums", metadata={"a": "b"})
    await send(me, session, 'call: calculate {"expression": "6 * 7"}\n---\necho')
    await settled(me, session, runs=1)
    await send(me, session, "say: two")
    await settled(me, session, runs=2)
    return session


async def test_a_fork_at_any_event_is_valid_and_goes_on_by_itself(me: Caller) -> None:
    session = await talked(me)
    log = await events(me, session)
    whole = await messages(me, session)
    counts = []
    for at in range(len(log) + 1):
        fork = await me.post(f"/v1/sessions/{session}/fork", {"at": at}, 201)
        copied = await messages(me, fork["id"])
        assert transcript_problems(copied) == []
        counts.append(len(copied))
        (event,) = await events(me, fork["id"])
        assert (event["seq"], event["type"]) == (1, "session.forked")
        assert (event["from_session_id"], event["from_seq"]) == (session, at)
    assert counts[0] == 0
    assert counts[-1] == len(whole)
    assert counts == sorted(counts)
    assert (fork["title"], fork["metadata"]) == ("Sums", {"a": "b"})
    await send(me, fork["id"], "say: three")
    await settled(me, fork["id"], runs=1)
    assert (await messages(me, fork["id"]))[-1]["content"][0]["text"] == "three"
    assert len(await messages(me, session)) == len(whole)
    assert fork["usage"]["output_tokens"] == 0


async def test_a_fork_in_the_middle_of_a_call_has_a_result_that_says_so(me: Caller) -> None:
    agent = await me.agent(
        tools=[{"type": "custom", "name": "ask", "description": "Asks.", "input_schema": {"type": "object"}}]
    )
    session = await me.session(agent)
    await send(me, session, "call: ask\n---\necho")
    while (await me.get(f"/v1/sessions/{session}"))["waits_for"] == []:
        pass
    fork = await me.post(f"/v1/sessions/{session}/fork", None, 201)
    copied = await messages(me, fork["id"])
    assert [message["role"] for message in copied] == ["user", "assistant", "tool"]
    assert copied[2]["content"][0]["is_error"]
    assert fork["status"] == "idle"
    assert fork["waits_for"] == []
    await me.post(f"/v1/sessions/{fork['id']}/continue", None, 202)
    await settled(me, fork["id"], runs=1)


async def test_a_fork_keeps_the_memories_that_reach_no_further(me: Caller) -> None:
    session = await me.session()
    for runs in (1, 2, 3):
        await send(me, session, LONG)
        await settled(me, session, runs=runs)
    before = (await events(me, session))[-1]["seq"]
    await compact(me, session, runs=4)
    early = await me.post(f"/v1/sessions/{session}/fork", {"at": 3}, 201)
    late = await me.post(f"/v1/sessions/{session}/fork", {"at": before}, 201)
    assert (await me.get(f"/v1/sessions/{early['id']}/memories"))["data"] == []
    (memory,) = (await me.get(f"/v1/sessions/{late['id']}/memories"))["data"]
    assert memory["is_in_effect"]


async def test_a_state_is_carried_to_another_server_whole(me: Caller, api: ServedApi) -> None:
    session = await talked(me)
    await compact(me, session, runs=3)
    state = await me.get(f"/v1/sessions/{session}/state")
    assert state["format"] == "armillary.session.1"
    elsewhere = await api.caller()  # another tenant, for which the first server might as well be far away
    agent = await elsewhere.agent(tools=[CALCULATE])
    made = await elsewhere.post("/v1/sessions/import", {"agent": agent, "state": state}, 201)
    assert (made["title"], made["metadata"]) == ("Sums", {"a": "b"})
    assert made["usage"]["output_tokens"] == 0
    (event,) = await events(elsewhere, made["id"])
    assert (event["type"], event["usage"]) == ("session.imported", state["usage"])
    again = await elsewhere.get(f"/v1/sessions/{made['id']}/state")
    assert again["messages"] == state["messages"]
    assert again["memories"] == state["memories"]
    await send(elsewhere, made["id"], "say: on")
    await settled(elsewhere, made["id"], runs=1)
    assert (await messages(elsewhere, made["id"]))[-1]["content"][0]["text"] == "on"


def state_of(*entries: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"messages": list(entries), **fields}


def entry(role: str, *blocks: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"role": role, "content": list(blocks), **fields}


async def test_what_no_model_would_take_is_repaired(me: Caller) -> None:
    use = {"type": "tool_use", "id": "a", "name": "calculate", "input": {}}
    text = {"type": "text", "text": "a\u0000b"}
    state = state_of(
        entry("tool", {"type": "tool_result", "tool_use_id": "x", "content": []}),
        entry("user", text),
        entry("assistant", use),
        entry("user", {"type": "text", "text": " "}),
        memories=[{"position": 3, "text": "notes", "is_in_effect": True}, {"position": 99, "text": "far"}],
    )
    made = await me.post("/v1/sessions/import", {"agent": await me.agent(), "state": state}, 201)
    copied = await messages(me, made["id"])
    assert transcript_problems(copied) == []
    assert [message["role"] for message in copied] == ["user", "assistant", "tool"]
    assert "\u0000" not in copied[0]["content"][0]["text"]
    (memory,) = (await me.get(f"/v1/sessions/{made['id']}/memories"))["data"]
    assert (memory["position"], memory["is_in_effect"]) == (3, True)


async def test_provider_blocks_are_carried_to_the_byte(me: Caller) -> None:
    body = b'[{"type": "text",  "text": "kept to the byte"}]'
    native = {"api": "rehearsal", "model": "demo", "body": base64.b64encode(body).decode()}
    state = state_of(
        entry("user", {"type": "text", "text": "hi"}),
        entry("assistant", {"type": "text", "text": "kept"}, native=native),
    )
    made = await me.post("/v1/sessions/import", {"agent": await me.agent(), "state": state}, 201)
    back = await me.get(f"/v1/sessions/{made['id']}/state")
    assert back["messages"][1]["native"] == native


BAD: list[dict[str, Any]] = [
    {"messages": [entry("user", {"type": "video"})]},
    {"messages": [entry("nobody", {"type": "text", "text": "x"})]},
    {"messages": [entry("assistant", native={"api": "x", "model": "y", "body": "no base64!"})]},
    {"messages": [entry("assistant", native={"api": "x", "model": "y", "body": "e30="})]},
    {"format": "other", "messages": []},
    {"messages": [], "unknown": 1},
]


@pytest.mark.parametrize("state", BAD, ids=lambda state: json.dumps(state)[:50])
async def test_states_that_cannot_be_read_are_refused(api: ServedApi, state: dict[str, Any]) -> None:
    me = await api.caller()
    await me.post("/v1/sessions/import", {"agent": await me.agent(), "state": state}, 422)


async def test_a_fork_beyond_the_end_is_refused(api: ServedApi) -> None:
    me = await api.caller()
    session = await me.session()
    assert (await me.post(f"/v1/sessions/{session}/fork", {"at": 1}, 409))["code"] == "no_such_event"
