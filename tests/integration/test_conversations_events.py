"""What clients put into a session's log and how they read it. Nothing here needs a worker."""

import asyncio
import base64
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from tests.support.served_api import Caller, ServedApi, prompt, served_api
from tests.support.sse_client import open_sse

PIXEL = base64.b64encode(b"\x89PNG\r\n\x1a\n" + bytes(24)).decode()


@pytest.fixture
async def api(database_url: str, redis_url: str) -> AsyncIterator[ServedApi]:
    async with served_api(database_url, redis_url) as api:
        yield api


async def test_prompt_is_answered_with_its_stored_event_and_starts_a_run(api: ServedApi) -> None:
    me = await api.caller()
    session = await me.session()

    [event] = await me.say(session, "hello")

    assert event["seq"] == 1
    assert event["type"] == "user.message"
    assert event["content"] == [{"type": "text", "text": "hello"}]
    assert event["delivery"] == "queue"
    assert event["processed_at"] is None
    run = await me.get(f"/v1/runs/{event['run_id']}")
    assert (run["state"], run["session_id"], run["prompt_ids"]) == ("queued", session, [event["id"]])
    assert run["after_seq"] == 0
    assert run["result"] is None
    assert (await me.get(f"/v1/sessions/{session}"))["status"] == "running"


async def test_prompts_of_one_request_are_one_batch_and_one_run(api: ServedApi) -> None:
    me = await api.caller()
    session = await me.session()
    events = await me.say(session, "one", "two")
    assert len({event["batch_id"] for event in events}) == 1
    assert len({event["run_id"] for event in events}) == 1
    later = await me.say(session, "three")
    assert later[0]["run_id"] is None


async def test_log_lists_the_same_bytes_that_a_stream_delivers(api: ServedApi) -> None:
    me = await api.caller()
    session = await me.session()
    await me.say(session, "line\u2028separator", "two\nlines")

    listed = (await me.http.get(f"/v1/sessions/{session}/events")).content
    frames = await _read_stream(me, f"/v1/sessions/{session}/events/stream?after=0", count=2)

    assert [event for event in frames if event in listed] == frames
    assert b"\\u2028" in frames[0]


async def test_pages_of_the_log_go_both_ways_and_after_reads_on(api: ServedApi) -> None:
    me = await api.caller()
    session = await me.session()
    for number in range(5):
        await me.say(session, f"{number}")
    path = f"/v1/sessions/{session}/events"

    assert await _seqs(me, path, limit=2) == [1, 2, 3, 4, 5]
    assert await _seqs(me, path, limit=2, order="desc") == [5, 4, 3, 2, 1]
    assert await _seqs(me, path, after=3) == [4, 5]
    assert await _seqs(me, path, after="3-17", limit=1) == [4, 5]
    assert await _seqs(me, path, after=1, limit=2, order="desc") == [5, 4, 3, 2]
    assert await _seqs(me, path, types="user.message") == [1, 2, 3, 4, 5]
    assert await _seqs(me, path, **{"types[]": ["user.interrupt", "agent.message"]}) == []
    assert (await me.get(f"{path}?after=x", 400))["field"] == "after"
    assert (await me.get(f"{path}?page=x", 400))["field"] == "page"


async def test_log_can_be_bounded_in_time(api: ServedApi) -> None:
    me = await api.caller()
    session = await me.session()
    events = [(await me.say(session, text))[0] for text in ("a", "b", "c")]
    path, middle = f"/v1/sessions/{session}/events", events[1]["created_at"]

    assert await _seqs(me, path, **{"created_at[gt]": middle}) == [3]
    assert await _seqs(me, path, **{"created_at[gte]": middle}) == [2, 3]
    assert await _seqs(me, path, **{"created_at[lt]": middle}) == [1]
    assert await _seqs(me, path, **{"created_at[lte]": middle}) == [1, 2]


async def test_prompts_of_many_clients_at_once_get_one_dense_order(api: ServedApi) -> None:
    """Q-10."""
    me = await api.caller()
    session = await me.session()

    answers = await asyncio.gather(*(me.say(session, f"{number}", f"{number} again") for number in range(20)))

    assert sorted(event["seq"] for events in answers for event in events) == list(range(1, 41))
    for first, second in answers:
        assert second["seq"] == first["seq"] + 1
    open_runs = (await me.get(f"/v1/sessions/{session}/runs"))["data"]
    assert [run["state"] for run in open_runs] == ["queued"]
    assert len(open_runs[0]["prompt_ids"]) == 2


@pytest.mark.parametrize(
    ("event", "code", "field"),
    [
        (prompt("x") | {"delivery": "now"}, "invalid_field", "events[0].delivery"),
        (prompt("x") | {"id": "evt_1"}, "invalid_field", "events[0].id"),
        (prompt(" \n "), "invalid_field", "events[0].content"),
        ({"type": "user.message", "content": []}, "invalid_field", "events[0].content"),
        (
            {"type": "user.message", "content": [{"type": "document"}]},
            "invalid_field",
            "events[0].content[0].type",
        ),
        ({"type": "user.tool_confirmation", "tool_use_id": "x"}, "invalid_field", "events[0]"),
        (
            {"type": "user.tool_confirmation", "tool_use_id": "x", "result": "allow", "deny_message": "y"},
            "invalid_field",
            "events[0].deny_message",
        ),
        ({"type": "user.tool_result", "tool_use_id": "x"}, "not_available", "events[0].type"),
        ({"type": "user.define_outcome", "rubric": {}}, "not_available", "events[0].type"),
        ({"type": "custom.message", "kind": "x"}, "not_available", "events[0].type"),
        ({"type": "agent.message", "content": []}, "invalid_field", "events[0].type"),
    ],
)
async def test_events_that_cannot_be_sent_are_refused_by_name(
    api: ServedApi, event: dict[str, Any], code: str, field: str
) -> None:
    me = await api.caller()
    session = await me.session()
    answer = await me.http.post(f"/v1/sessions/{session}/events", json={"events": [event]})
    problem = answer.json()
    assert answer.status_code == 422
    assert answer.headers["content-type"] == "application/problem+json"
    assert (problem["code"], problem["field"]) == (code, field)
    assert problem["error"]["type"] == "invalid_request_error"
    assert (await me.get(f"/v1/sessions/{session}/events"))["data"] == []


async def test_one_bad_event_keeps_all_others_of_its_request_out(api: ServedApi) -> None:
    me = await api.caller()
    session = await me.session()
    unknown = "evt_" + "0" * 32
    answer = {"type": "user.custom_tool_result", "custom_tool_use_id": unknown}
    await me.post(f"/v1/sessions/{session}/events", {"events": [prompt("kept out"), answer]}, 404)
    assert (await me.get(f"/v1/sessions/{session}/events"))["data"] == []
    assert (await me.get(f"/v1/sessions/{session}/runs"))["data"] == []


async def test_events_need_at_least_one_and_at_most_fifty(api: ServedApi) -> None:
    me = await api.caller()
    session = await me.session()
    for events in ([], [prompt("x")] * 51):
        problem = await me.post(f"/v1/sessions/{session}/events", {"events": events}, 422)
        assert problem["field"] == "events"
    assert (
        len((await me.post(f"/v1/sessions/{session}/events", {"events": [prompt("x")] * 50}))["data"]) == 50
    )


async def test_images_reach_only_models_that_can_see(database_url: str, redis_url: str) -> None:
    async with served_api(database_url, redis_url, deepseek_api_key="not-used") as api:
        me = await api.caller()
        seeing = await me.session(await me.agent(model="rehearsal:demo"))
        blind_agent = await me.agent(model="deepseek:deepseek-chat")
        blind = await me.session(blind_agent)
        for source in (
            {"type": "base64", "media_type": "image/png", "data": PIXEL},
            {"type": "url", "url": "https://example.com/a.png"},
        ):
            message = {"type": "user.message", "content": [{"type": "image", "source": source}]}
            body = {"events": [message]}

            [stored] = (await me.post(f"/v1/sessions/{seeing}/events", body))["data"]
            assert stored["content"] == message["content"]

            assert "cannot see" in (await me.post(f"/v1/sessions/{blind}/events", body, 422))["detail"]
            new = {"agent": blind_agent, "initial_events": [message]}
            assert "cannot see" in (await me.post("/v1/sessions", new, 422))["detail"]
            short = {"prompt": message["content"]}
            path = f"/v1/agents/{blind_agent}/prompt"
            assert "cannot see" in (await me.post(path, short, 422))["detail"]
            [waiting] = await me.say(blind, "text")
            path = f"/v1/sessions/{blind}/prompts/{waiting['id']}"
            edit = {"content": message["content"]}
            assert "cannot see" in (await me.post(path, edit, 422))["detail"]


@pytest.mark.parametrize(
    ("source", "field"),
    [
        ({"type": "base64", "media_type": "image/png", "data": "!"}, ".source.data"),
        ({"type": "base64", "media_type": "text/html", "data": PIXEL}, ".source.media_type"),
        ({"type": "url", "url": "file:///etc/passwd"}, ".source.url"),
        ({"type": "url", "url": "https:///x"}, ".source.url"),
    ],
)
async def test_images_that_are_none_are_refused(api: ServedApi, source: dict[str, Any], field: str) -> None:
    me = await api.caller()
    session = await me.session()
    body = {"events": [{"type": "user.message", "content": [{"type": "image", "source": source}]}]}
    problem = await me.post(f"/v1/sessions/{session}/events", body, 422)
    assert problem["field"] == f"events[0].content[0]{field}"


async def test_unfit_characters_of_a_prompt_are_replaced_once_for_log_and_stream(api: ServedApi) -> None:
    """H-05, H-07: what a user says is repaired."""
    me = await api.caller()
    session = await me.session()
    raw = b'{"events": [{"type": "user.message", "content": [{"type": "text", "text": "a\\u0000b\\ud800"}]}]}'
    sent = await me.call(
        "POST",
        f"/v1/sessions/{session}/events",
        200,
        content=raw,
        headers={"content-type": "application/json"},
    )
    assert sent["data"][0]["content"] == [{"type": "text", "text": "a\ufffdb\ufffd"}]


async def test_same_key_sends_once_even_when_sent_at_the_same_moment(api: ServedApi) -> None:
    me = await api.caller()
    session = await me.session()
    key = {"Idempotency-Key": "send-1"}

    answers = await asyncio.gather(*(me.say(session, "pay invoice 7", headers=key) for _ in range(8)))

    assert all(answer == answers[0] for answer in answers)
    assert [event["seq"] for event in (await me.get(f"/v1/sessions/{session}/events"))["data"]] == [1]
    body = {"events": [prompt("pay invoice 8")]}
    problem = await me.post(f"/v1/sessions/{session}/events", body, 409, headers=key)
    assert problem["code"] == "idempotency_mismatch"


async def test_conflicts_tell_clients_not_to_retry(api: ServedApi) -> None:
    me = await api.caller()
    session = await me.session()
    await me.post(f"/v1/sessions/{session}/archive")
    answer = await me.http.post(f"/v1/sessions/{session}/events", json={"events": [prompt("x")]})
    assert answer.status_code == 409
    assert answer.headers["x-should-retry"] == "false"


async def test_interrupt_of_a_queued_run_closes_it_and_lets_the_next_prompt_run(api: ServedApi) -> None:
    me = await api.caller()
    session = await me.session()
    [first] = await me.say(session, "first")
    [second] = await me.say(session, "second")
    body = {"events": [{"type": "user.interrupt", "reason": "changed my mind"}]}

    await me.post(f"/v1/sessions/{session}/events", body)

    run = await me.get(f"/v1/runs/{first['run_id']}")
    assert run["state"] == "closed"
    assert run["stop_reason"] == {"type": "cancelled", "message": "changed my mind"}
    assert run["result"]["text"] == ""
    prompts = (await me.get(f"/v1/sessions/{session}/prompts"))["data"]
    assert [(row["id"], row["state"]) for row in prompts] == [
        (first["id"], "withdrawn"),
        (second["id"], "pending"),
    ]
    assert prompts[1]["run_id"] is not None


async def test_interrupt_of_an_idle_session_is_logged_and_changes_nothing(api: ServedApi) -> None:
    me = await api.caller()
    session = await me.session()
    body = {"events": [{"type": "user.interrupt"}]}
    [event] = (await me.post(f"/v1/sessions/{session}/events", body))["data"]
    assert event["type"] == "user.interrupt"
    assert (await me.get(f"/v1/sessions/{session}"))["status"] == "idle"


async def test_stream_of_an_idle_session_ends_or_says_that_nothing_follows(api: ServedApi) -> None:
    me = await api.caller()
    session = await me.session()
    [event] = await me.say(session, "hello")
    await me.post(f"/v1/runs/{event['run_id']}/cancel")
    path = f"/v1/sessions/{session}/events/stream?until=idle"

    whole = await me.http.get(path)
    assert whole.headers["content-type"].startswith("text/event-stream")
    assert whole.headers["armillary-session-id"] == session
    assert [line[7:] for line in whole.text.splitlines() if line.startswith("event: ")] == [
        "user.message",
        "prompt.withdrawn",
        "session.status_idle",
    ]
    at_the_end = await me.http.get(f"{path}&after=0", headers={"Last-Event-ID": "3"})
    assert (at_the_end.status_code, at_the_end.content) == (204, b"")
    await me.get(f"{path}&event_deltas=everything", 400)
    await me.get("/v1/sessions/sess_x/events/stream", 404)


async def _read_stream(me: Caller, path: str, *, count: int) -> list[bytes]:
    """The data of the first `count` events."""
    found: list[bytes] = []
    async with me.http.stream("GET", path) as answer:
        assert answer.status_code == 200
        async for line in _lines(answer):
            if line.startswith(b"data: "):
                found.append(line.removeprefix(b"data: "))
            if len(found) == count:
                break
    return found


async def _lines(answer: httpx.Response) -> AsyncIterator[bytes]:
    rest = b""
    async for chunk in answer.aiter_raw():
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            yield line


async def _seqs(me: Caller, path: str, **query: Any) -> list[int]:
    """The numbers of all events on all pages."""
    seqs: list[int] = []
    while True:
        page = await me.get(path, params=query)
        seqs += [event["seq"] for event in page["data"]]
        if page["next_page"] is None:
            return seqs
        query["page"] = page["next_page"]


async def test_streams_leave_the_pool_to_other_requests(database_url: str, redis_url: str) -> None:
    """SSE-15: each stream is authenticated and looks its session up, and then holds nothing."""
    async with (
        served_api(database_url, redis_url, database_pool_size=2) as api,
        AsyncExitStack() as readers,
    ):
        me = await api.caller()
        agent = await me.agent()
        port, headers = urlsplit(api.url).port or 0, {"authorization": f"Bearer {me.key}"}
        for _ in range(25):
            path = f"/v1/sessions/{await me.session(agent)}/events/stream"
            stream = await readers.enter_async_context(open_sse(port, path, headers=headers))
            await stream.until_bytes(b"id: 0\n\n")
        await asyncio.gather(*(me.get("/v1/sessions") for _ in range(50)))
