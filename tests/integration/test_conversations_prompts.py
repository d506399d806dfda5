"""Prompts that wait, runs that have no worker yet, and the short way. Nothing here needs a worker."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from db.ids import to_uuid
from tests.support.served_api import Caller, ServedApi, served_api

TEXT = [{"type": "text", "text": "edited"}]


@pytest.fixture
async def api(database_url: str, redis_url: str) -> AsyncIterator[ServedApi]:
    async with served_api(database_url, redis_url) as api:
        yield api


async def test_pending_prompt_can_be_edited_until_a_run_takes_it_up(api: ServedApi) -> None:
    me = await api.caller()
    session = await me.session()
    [event] = await me.say(session, "first")
    path = f"/v1/sessions/{session}/prompts/{event['id']}"

    edited = await me.post(path, {"content": TEXT})

    assert edited["content"] == TEXT
    assert edited["state"] == "pending"
    log = (await me.get(f"/v1/sessions/{session}/events"))["data"]
    assert [row["type"] for row in log] == ["user.message", "prompt.updated"]
    assert log[1]["prompt_id"] == event["id"]
    await _begin(api, event["run_id"])
    problem = await me.post(path, {"content": TEXT}, 409)
    assert problem["code"] == "prompt_not_pending"


async def test_withdrawn_prompt_ends_the_run_that_had_no_other(api: ServedApi) -> None:
    me = await api.caller()
    session = await me.session()
    [first] = await me.say(session, "first")
    [second] = await me.say(session, "second")

    gone = await me.delete(f"/v1/sessions/{session}/prompts/{second['id']}")
    assert (gone["state"], gone["run_id"]) == ("withdrawn", None)
    await me.delete(f"/v1/sessions/{session}/prompts/{first['id']}")

    assert (await me.get(f"/v1/runs/{first['run_id']}"))["stop_reason"]["type"] == "cancelled"
    assert (await me.get(f"/v1/sessions/{session}"))["status"] == "idle"
    problem = await me.delete(f"/v1/sessions/{session}/prompts/{first['id']}", 409)
    assert problem["code"] == "prompt_not_pending"


async def test_withdrawing_one_prompt_of_a_batch_leaves_the_run_to_the_others(api: ServedApi) -> None:
    me = await api.caller()
    session = await me.session()
    first, second = await me.say(session, "first", "second")
    await me.delete(f"/v1/sessions/{session}/prompts/{first['id']}")
    assert (await me.get(f"/v1/runs/{second['run_id']}"))["state"] == "queued"


async def test_prompts_are_listed_by_state_and_page(api: ServedApi) -> None:
    me = await api.caller()
    session = await me.session()
    events = [(await me.say(session, f"{number}"))[0] for number in range(4)]
    await me.delete(f"/v1/sessions/{session}/prompts/{events[2]['id']}")
    path = f"/v1/sessions/{session}/prompts"

    everything = await me.get(path)
    pending = await me.get(path, params={"states": "pending", "limit": 2})
    rest = await me.get(path, params={"states[]": ["pending"], "limit": 2, "page": pending["next_page"]})

    assert [row["seq"] for row in everything["data"]] == [1, 2, 3, 4]
    assert [row["id"] for row in [*pending["data"], *rest["data"]]] == [
        event["id"] for event in (events[0], events[1], events[3])
    ]
    assert rest["next_page"] is None


async def test_cancelling_a_queued_run_closes_it_in_the_answer_and_only_once(api: ServedApi) -> None:
    me = await api.caller()
    session = await me.session()
    [event] = await me.say(session, "hello")
    path = f"/v1/runs/{event['run_id']}/cancel"

    answers = await asyncio.gather(*(me.post(path, {"reason": "enough"}) for _ in range(5)))
    later = await me.post(path)

    for answer in [*answers, later]:
        assert (answer["state"], answer["stop_reason"]["type"]) == ("closed", "cancelled")
    log = (await me.get(f"/v1/sessions/{session}/events"))["data"]
    assert [row["type"] for row in log].count("session.status_idle") == 1


async def test_cancelling_a_running_run_leaves_a_mark_for_its_worker(api: ServedApi) -> None:
    me = await api.caller()
    session = await me.session()
    [event] = await me.say(session, "hello")
    await _begin(api, event["run_id"])

    first = await me.post(f"/v1/runs/{event['run_id']}/cancel")
    second = await me.post(f"/v1/runs/{event['run_id']}/cancel")

    assert first["state"] == "running"
    assert first["cancel_requested_at"] is not None
    assert second["cancel_requested_at"] == first["cancel_requested_at"]


async def test_runs_of_a_session_are_listed_newest_first_in_pages(api: ServedApi) -> None:
    me = await api.caller()
    session = await me.session()
    made = []
    for number in range(3):
        [event] = await me.say(session, f"{number}")
        made.append(event["run_id"])
        await me.post(f"/v1/runs/{event['run_id']}/cancel")
    path = f"/v1/sessions/{session}/runs"

    first = await me.get(path, params={"limit": 2})
    second = await me.get(path, params={"limit": 2, "page": first["next_page"]})

    assert [run["id"] for run in [*first["data"], *second["data"]]] == made[::-1]
    assert [run["id"] for run in (await me.get(path, params={"order": "asc"}))["data"]] == made


async def test_wait_answers_as_soon_as_the_run_is_closed(api: ServedApi) -> None:
    me = await api.caller()
    session = await me.session()
    [event] = await me.say(session, "hello")
    waiting = asyncio.create_task(me.get(f"/v1/runs/{event['run_id']}/wait", params={"timeout_s": 20}))
    await me.post(f"/v1/runs/{event['run_id']}/cancel")
    run = await waiting
    assert (run["state"], run["result"]["text"]) == ("closed", "")


async def test_wait_tells_how_the_run_stands_when_time_is_over(api: ServedApi) -> None:
    me = await api.caller()
    session = await me.session()
    [event] = await me.say(session, "hello")
    run = await me.get(f"/v1/runs/{event['run_id']}/wait", params={"timeout_s": 0})
    assert (run["state"], run["result"]) == ("queued", None)
    await me.get(f"/v1/runs/{event['run_id']}/wait?timeout_s=601", 400)


async def test_waiting_clients_hold_no_database_connection(database_url: str, redis_url: str) -> None:
    async with served_api(database_url, redis_url, database_pool_size=2) as api:
        me = await api.caller()
        session = await me.session()
        [event] = await me.say(session, "hello")
        path = f"/v1/runs/{event['run_id']}/wait"
        waits = [asyncio.create_task(me.get(path, params={"timeout_s": 20})) for _ in range(12)]
        for _ in range(10):
            await me.get(f"/v1/sessions/{session}")
        await me.post(f"/v1/runs/{event['run_id']}/cancel")
        assert {run["state"] for run in await asyncio.gather(*waits)} == {"closed"}


async def test_run_that_waits_for_the_client_names_the_calls_and_takes_each_answer_once(
    api: ServedApi,
) -> None:
    me = await api.caller()
    session = await me.session()
    [event] = await me.say(session, "hello")
    calls = await _wait_for_client(api, session, event["run_id"], count=2)
    path = f"/v1/sessions/{session}/events"

    def answer(call: str, text: str) -> dict[str, Any]:
        content = [{"type": "text", "text": text}]
        return {"type": "user.custom_tool_result", "custom_tool_use_id": call, "content": content}

    run = await me.get(f"/v1/runs/{event['run_id']}/wait", params={"timeout_s": 20})
    assert run["state"] == "waiting"
    assert run["stop_reason"] == {"type": "requires_action", "event_ids": calls}
    assert (await me.get(f"/v1/sessions/{session}"))["status"] == "idle"

    sent = await me.post(path, {"events": [answer(calls[0], "7")]})
    again = await me.post(path, {"events": [answer(calls[0], "7")]})
    other = await me.post(path, {"events": [answer(calls[0], "8")]}, 409)
    assert again == sent
    assert other["code"] == "already_answered"
    idle = (await me.get(path, params={"order": "desc", "limit": 1}))["data"][0]
    assert idle["stop_reason"] == {"type": "requires_action", "event_ids": [calls[1]]}

    await me.post(path, {"events": [answer(calls[1], "9")]})
    assert (await me.get(f"/v1/runs/{event['run_id']}"))["state"] == "queued"
    assert (await me.get(f"/v1/sessions/{session}"))["status"] == "running"


async def test_short_way_makes_a_session_and_says_where_to_wait_when_it_takes_longer(api: ServedApi) -> None:
    me = await api.caller()
    agent = await me.agent()
    body = {"prompt": "hello", "wait_s": 0, "title": "Short", "metadata": {"a": "b"}, "end_user_id": "ann"}

    answer = await me.http.post(f"/v1/agents/{agent}/prompt", json=body)

    assert answer.status_code == 202
    made = answer.json()
    assert made["status"] == "queued"
    assert made["text"] is None
    assert answer.headers["armillary-session-id"] == made["session_id"]
    assert answer.headers["armillary-run-id"] == made["run_id"]
    session = await me.get(f"/v1/sessions/{made['session_id']}")
    assert (session["title"], session["metadata"], session["end_user_id"]) == ("Short", {"a": "b"}, "ann")


async def test_short_way_goes_on_in_a_given_session_behind_its_open_run(api: ServedApi) -> None:
    me = await api.caller()
    agent = await me.agent()
    session = await me.session(agent)
    [first] = await me.say(session, "first")
    path = f"/v1/agents/{agent}/prompt"

    behind = await me.post(path, {"prompt": "second", "session_id": session, "wait_s": 0}, 202)
    assert (behind["status"], behind["run_id"]) == ("pending", None)
    waiting = asyncio.create_task(
        me.post(path, {"prompt": "third", "session_id": session, "wait_s": 20}, 200)
    )

    async def has_come() -> bool:
        return len((await me.get(f"/v1/sessions/{session}/prompts"))["data"]) == 3

    await _until(has_come)
    third = (await me.get(f"/v1/sessions/{session}/prompts"))["data"][2]
    await me.delete(f"/v1/sessions/{session}/prompts/{third['id']}")
    assert (await waiting)["status"] == "withdrawn"
    assert first["run_id"] is not None


async def test_short_way_answers_with_the_close_of_its_run(api: ServedApi) -> None:
    me = await api.caller()
    agent = await me.agent()
    asking = asyncio.create_task(me.post(f"/v1/agents/{agent}/prompt", {"prompt": "hello", "wait_s": 20}))
    found = await _sessions_of(me, agent)
    [run] = (await me.get(f"/v1/sessions/{found[0]['id']}/runs"))["data"]
    await me.post(f"/v1/runs/{run['id']}/cancel", {"reason": "enough"})

    answer = await asking

    assert (answer["status"], answer["run_id"]) == ("closed", run["id"])
    assert answer["stop_reason"] == {"type": "cancelled", "message": "enough"}
    assert (answer["text"], answer["tool_results"]) == ("", {})
    assert answer["usage"]["requests"] == 0


async def test_short_way_streams_its_run_and_the_same_key_attaches_again(api: ServedApi) -> None:
    me = await api.caller()
    agent = await me.agent()
    body = {"prompt": "hello", "stream": True}
    key = {"Idempotency-Key": "stream-1"}

    async with me.http.stream("POST", f"/v1/agents/{agent}/prompt", json=body, headers=key) as stream:
        assert stream.status_code == 200
        assert stream.headers["content-type"].startswith("text/event-stream")
        session, run = stream.headers["armillary-session-id"], stream.headers["armillary-run-id"]
        assert (await _first_event(stream))["type"] == "user.message"
    await me.post(f"/v1/runs/{run}/cancel")
    again = await me.http.post(f"/v1/agents/{agent}/prompt", json=body, headers=key)
    rest = await me.http.post(f"/v1/agents/{agent}/prompt", json=body, headers=key | {"Last-Event-ID": "1"})

    assert again.headers["armillary-session-id"] == session
    assert again.headers["armillary-run-id"] == run
    assert _types(again.text) == ["user.message", "prompt.withdrawn", "session.status_idle"]
    assert _types(rest.text) == ["prompt.withdrawn", "session.status_idle"]
    assert len((await me.get("/v1/sessions"))["data"]) == 1


async def test_client_that_leaves_the_short_way_cancels_nothing(api: ServedApi) -> None:
    me = await api.caller()
    agent = await me.agent()
    asking = asyncio.create_task(me.post(f"/v1/agents/{agent}/prompt", {"prompt": "hello", "wait_s": 600}))
    found = await _sessions_of(me, agent)
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    [run] = (await me.get(f"/v1/sessions/{found[0]['id']}/runs"))["data"]
    assert (run["state"], run["cancel_requested_at"]) == ("queued", None)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"prompt": ""}, "prompt"),
        ({"prompt": "  "}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"wait_s": 601}, "wait_s"),
        ({"stream": 1}, "stream"),
        ({"event_deltas": ["everything"]}, "event_deltas[0]"),
        ({"model": "nobody:knows"}, "model"),
    ],
)
async def test_short_way_refuses_what_it_does_not_know(
    api: ServedApi, change: dict[str, Any], field: str
) -> None:
    me = await api.caller()
    agent = await me.agent()
    problem = await me.post(f"/v1/agents/{agent}/prompt", {"prompt": "hello"} | change, 422)
    assert problem["field"] == field


async def test_short_way_sets_nothing_on_a_session_that_exists(api: ServedApi) -> None:
    me = await api.caller()
    agent = await me.agent()
    session = await me.session(agent)
    body = {"prompt": "hello", "session_id": session}
    path = f"/v1/agents/{agent}/prompt"
    assert (await me.post(path, body | {"title": "x"}, 422))["field"] == "title"
    other = await me.agent()
    assert (await me.post(f"/v1/agents/{other}/prompt", body, 422))["field"] == "session_id"


async def test_transcript_memories_and_usage_of_a_fresh_session_are_empty(api: ServedApi) -> None:
    me = await api.caller()
    session = await me.session()
    assert await me.get(f"/v1/sessions/{session}/messages") == {"data": [], "next_page": None}
    assert await me.get(f"/v1/sessions/{session}/memories") == {"data": [], "next_page": None}
    usage = await me.get(f"/v1/sessions/{session}/usage")
    assert usage["total"] == {"cache_hit_tokens": 0, "cache_miss_tokens": 0, "output_tokens": 0}
    assert usage["by_model"] == []


async def test_transcript_pages_show_blocks_in_order(api: ServedApi) -> None:
    me = await api.caller()
    session = await me.session()
    async with api.database.transaction() as tx:
        for position, (role, blocks) in enumerate(
            [
                ("user", [{"type": "text", "text": "hi"}]),
                ("assistant", [{"type": "thinking", "thinking": "hm"}, {"type": "text", "text": "hello"}]),
                ("user", [{"type": "text", "text": "bye"}]),
            ],
            start=1,
        ):
            await tx.execute(
                "INSERT INTO messages (session_id, tenant_id, position, id, role, blocks)"
                " VALUES ($1, $2, $3, gen_random_uuid(), $4, $5)",
                to_uuid(session),
                me.tenant_id,
                position,
                role,
                json.dumps(blocks),
            )
    path = f"/v1/sessions/{session}/messages"
    first = await me.get(path, params={"limit": 2})
    second = await me.get(path, params={"limit": 2, "page": first["next_page"]})
    assert [row["position"] for row in [*first["data"], *second["data"]]] == [1, 2, 3]
    assert [block["type"] for block in first["data"][1]["content"]] == ["thinking", "text"]
    newest = await me.get(path, params={"limit": 1, "order": "desc"})
    assert newest["data"][0]["content"] == [{"type": "text", "text": "bye"}]


async def test_usage_counts_what_is_known_and_says_what_is_not(api: ServedApi) -> None:
    """A-04: sums tell how many requests have no price."""
    me = await api.caller()
    session = await me.session()
    entries = [("closed", 10, 4, 5, "0.25"), ("closed", 7, 0, 1, None), ("abandoned", None, None, None, None)]
    async with api.database.transaction() as tx:
        for state, input_tokens, cache_read_tokens, output_tokens, cost in entries:
            await tx.execute(
                """
                INSERT INTO usage_entries (id, tenant_id, agent_id, session_id, run_id, turn, epoch, purpose,
                    provider, model, state, input_tokens, cache_read_tokens, output_tokens, cost_usd)
                SELECT gen_random_uuid(), tenant_id, agent_id, id, gen_random_uuid(), 1, 1, 'main',
                    'rehearsal', 'demo', $2, $3, $4, $5, $6::numeric FROM sessions WHERE id = $1
                """,
                to_uuid(session),
                state,
                input_tokens,
                cache_read_tokens,
                output_tokens,
                cost,
            )
    [row] = (await me.get(f"/v1/sessions/{session}/usage"))["by_model"]
    assert (row["requests"], row["uncounted_requests"], row["unpriced_requests"]) == (3, 1, 2)
    assert (row["input_tokens"], row["cache_read_tokens"], row["output_tokens"]) == (17, 4, 6)
    assert row["cost_usd"] == "0.25"


async def _until(is_true: Callable[[], Awaitable[bool]]) -> None:
    """Returns when the server says so; a test fails when it never does."""
    async with asyncio.timeout(60):
        while not await is_true():  # noqa: ASYNC110
            await asyncio.sleep(0.02)


async def _sessions_of(me: Caller, agent: str) -> Any:
    """The agent's sessions, as soon as there is one."""

    async def has_come() -> bool:
        return bool((await me.get("/v1/sessions", params={"agent_id": agent}))["data"])

    await _until(has_come)
    return (await me.get("/v1/sessions", params={"agent_id": agent}))["data"]


async def _begin(api: ServedApi, run_id: str) -> None:
    """Puts the run where a worker's claim puts it."""
    async with api.database.transaction() as tx:
        await tx.execute(
            "UPDATE runs SET state = 'running', started_at = clock_timestamp() WHERE id = $1",
            to_uuid(run_id),
        )


async def _wait_for_client(api: ServedApi, session: str, run_id: str, *, count: int) -> list[str]:
    """Puts the run where a worker leaves it that needs the client; the ids of the open calls."""
    async with api.database.transaction() as tx:
        await tx.execute(
            "UPDATE runs SET state = 'waiting', started_at = clock_timestamp() WHERE id = $1",
            to_uuid(run_id),
        )
        rows = await tx.fetch(
            """
            INSERT INTO tool_calls (id, tenant_id, session_id, run_id, tool_use_id, position, index, kind,
                name, input, state)
            SELECT gen_random_uuid(), s.tenant_id, s.id, $2, 'call_' || n, 2, n, 'client', 'ask', '{}', 'open'
            FROM sessions s, generate_series(1, $3::int) AS n WHERE s.id = $1 RETURNING id, index
            """,
            to_uuid(session),
            to_uuid(run_id),
            count,
        )
        calls = [row["id"] for row in sorted(rows, key=lambda row: row["index"])]
        for call in calls:
            await tx.execute(
                """
                WITH numbered AS (
                    UPDATE sessions SET last_seq = last_seq + 1 WHERE id = $1 RETURNING tenant_id, last_seq
                )
                INSERT INTO events (session_id, tenant_id, seq, id, run_id, type, body)
                SELECT $1, tenant_id, last_seq, $2, $3, 'agent.custom_tool_use', '{}' FROM numbered
                """,
                to_uuid(session),
                call,
                to_uuid(run_id),
            )
    return [f"evt_{call.hex}" for call in calls]


async def _first_event(stream: Any) -> Any:
    async for line in stream.aiter_lines():
        if line.startswith("data: "):
            return json.loads(line[6:])
    raise AssertionError("the stream ended without an event")


def _types(text: str) -> list[str]:
    return [line.removeprefix("event: ") for line in text.splitlines() if line.startswith("event: ")]
