"""Answers of the Anthropic API that fail or break off, as byte streams through the vendor's real SDK."""

import asyncio
from typing import Any

import pytest

from providers.anthropic_messages import AnthropicMessages
from providers.errors import (
    AuthRefused,
    BadPayload,
    ConnectionLost,
    ContextTooLong,
    ModelNotFound,
    Overloaded,
    ProviderError,
    QuotaExceeded,
    RateLimited,
    RequestRejected,
    RequestTimedOut,
    ServerFailed,
    StreamTruncated,
)
from providers.types import (
    MessageEnd,
    ProviderRequest,
    Stop,
    TextDelta,
)
from tests.support.anthropic_script import (
    DONE,
    MODEL,
    REQUEST,
    Frame,
    api,
    api_error,
    call,
    calls_of,
    collect,
    end_of,
    ended,
    fail,
    start,
    text,
)
from tests.support.model_server import Answer, ModelServer, json_answer, sse

# -- answers that break off -----------------------------------------------------------------------------

HALF_TEXT = sse(start(), *text(0, "Hel")[:-1])
HALF_CALL = sse(start(), *call(0, "t1", "write", '{"path":"a","content":"hel')[:-1])
WHOLE_CALL = sse(start(), *call(0, "t1", "ls", ""))


@pytest.mark.parametrize("data", [HALF_TEXT, HALF_CALL, WHOLE_CALL, sse(start()), b""])
@pytest.mark.parametrize("end", ["close", "cut", "reset"])
async def test_an_answer_without_its_terminal_marker_is_truncated(data: bytes, end: Any) -> None:
    """P-03"""
    error, events = await fail(Answer(chunks=[data], end=end))
    assert isinstance(error, StreamTruncated)
    assert error.is_retryable
    assert calls_of(events) == []
    assert not any(isinstance(event, MessageEnd) for event in events)


async def test_message_stop_alone_or_a_stop_reason_alone_is_no_terminal_marker() -> None:
    """P-03"""
    for frames in ([ended(None), DONE], [ended("end_turn")]):
        error, _ = await fail(Answer(chunks=[sse(start(), *text(0, "a"), *frames)]))
        assert isinstance(error, StreamTruncated)


async def test_an_answer_that_ends_inside_a_character_is_truncated() -> None:
    """SSE-16"""
    data = sse(start(), *text(0, "a")[:-1]) + b'event: x\ndata: {"t":"\xe4\xbf'
    error, _ = await fail(Answer(chunks=[data]))
    assert isinstance(error, StreamTruncated)


async def test_a_second_answer_inside_the_first_is_never_spliced() -> None:
    error, _ = await fail(
        Answer(chunks=[sse(start(), *text(0, "a"), start(), *text(0, "b"), ended("end_turn"), DONE)])
    )
    assert isinstance(error, BadPayload)


async def test_what_comes_after_the_terminal_marker_is_ignored() -> None:
    whole = sse(start(), *text(0, "a"), ended("end_turn"), DONE)
    for answer in (
        Answer(chunks=[whole, b"data: [DONE]\n\n", b"event: error\ndata: junk \xff\n\n"]),
        Answer(chunks=[whole], end="reset"),
        Answer(chunks=[whole], end="cut"),
        Answer(chunks=[whole], end="hang"),
    ):
        async with api() as (server, provider):
            server.enqueue(answer)
            assert end_of(await collect(provider)).stop is Stop.END_TURN


# -- errors ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("overloaded_error", Overloaded),
        ("rate_limit_error", RateLimited),
        ("api_error", ServerFailed),
        ("timeout_error", ServerFailed),
        ("authentication_error", AuthRefused),
        ("permission_error", AuthRefused),
        ("billing_error", QuotaExceeded),
        ("not_found_error", ModelNotFound),
        ("invalid_request_error", RequestRejected),
        ("request_too_large", RequestRejected),
        ("something_new", ServerFailed),
    ],
)
@pytest.mark.parametrize("before", [[], [start()], [start(), *text(0, "a")]])
async def test_an_error_inside_a_stream_is_classified_by_its_type(
    kind: str, expected: type[ProviderError], before: list[Frame]
) -> None:
    """P-01"""
    error, events = await fail(Answer(chunks=[sse(*before, api_error(kind))]))
    assert type(error) is expected
    assert (error.status, error.vendor_code) == (None, kind)
    assert not any(isinstance(event, MessageEnd) for event in events)


@pytest.mark.parametrize(
    ("status", "payload", "expected"),
    [
        (400, api_error("invalid_request_error"), RequestRejected),
        (400, api_error("invalid_request_error", "prompt is too long: 9 > 8"), ContextTooLong),
        (400, api_error("invalid_request_error", "Your credit balance is too low"), QuotaExceeded),
        (401, api_error("authentication_error"), AuthRefused),
        (402, api_error("billing_error"), QuotaExceeded),
        (403, api_error("permission_error"), AuthRefused),
        (404, api_error("not_found_error"), ModelNotFound),
        (413, api_error("request_too_large"), RequestRejected),
        (429, api_error("rate_limit_error"), RateLimited),
        (429, api_error("rate_limit_error", error_code="ramp_limit_exceeded"), RateLimited),
        (429, api_error("rate_limit_error", error_code="enforced_spend_limit_reached"), QuotaExceeded),
        (500, api_error("api_error"), ServerFailed),
        (503, {"error": "overloaded, come back"}, Overloaded),
        (504, api_error("timeout_error"), ServerFailed),
        (529, api_error("overloaded_error"), Overloaded),
        (500, [], ServerFailed),
        (400, {"error": None, "message": 5}, RequestRejected),
    ],
)
async def test_an_error_status_is_classified(
    status: int, payload: Any, expected: type[ProviderError]
) -> None:
    """P-15"""
    error, events = await fail(json_answer(payload, status=status, headers={"request-id": "req_1"}))
    assert type(error) is expected
    assert (error.status, error.request_id) == (status, "req_1")
    assert events == []


async def test_an_html_error_page_is_an_error_of_bounded_length() -> None:
    """P-18"""
    page = b"<html>" + b"<p>502 Bad Gateway" * 10_000
    error, _ = await fail(Answer(status=502, chunks=[page], content_type="text/html"))
    assert type(error) is ServerFailed
    assert len(error.message) < 600


@pytest.mark.parametrize(
    ("headers", "wait_s"),
    [
        ({"retry-after": "1.5"}, 1.5),
        ({"retry-after-ms": "250", "retry-after": "9"}, 0.25),
        ({"retry-after": "2000000"}, 2_000_000.0),
        ({"retry-after": "soon"}, None),
        ({"retry-after": "Wed, 21 Oct 2015 07:28:00 GMT"}, None),
    ],
)
async def test_the_wait_that_the_api_asks_for_is_reported_and_not_slept(
    headers: dict[str, str], wait_s: float | None
) -> None:
    """P-15"""
    error, _ = await fail(json_answer(api_error("rate_limit_error"), status=429, headers=headers))
    assert error.retry_after_s == wait_s


async def test_a_key_that_the_api_echoes_does_not_leave() -> None:
    error, _ = await fail(json_answer(api_error("authentication_error", "bad key-1234567890!"), status=401))
    assert error.message == "bad [secret]!"


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (b'data: {"error":{"message":"overloaded","type":"server_error"}}\n\n', ServerFailed),
        (b'event: error\ndata: {"message":"overloaded"}\n\n', ServerFailed),
        (b'event: error\ndata: "overloaded"\n\n', BadPayload),
        (b'{"type":"error","error":{"type":"overloaded_error","message":"x"}}', Overloaded),
        (b"<html><body>502 Bad Gateway</body></html>", BadPayload),
        (b'{"choices":[{"message":{"content":"hi"}}]}', BadPayload),
        (b'data: {"type":"response.failed","response":{"error":{"code":"server_error"}}}\n\n', BadPayload),
        (b'data: {"choices":[{"index":0,"del\n\n', BadPayload),
        (b"data: [1]\n\n", BadPayload),
        (b"data: " + b"[" * 100_000 + b"\n\n", BadPayload),
        (b'data: {"type":"\xff"}\n\n', BadPayload),
        (sse(*text(0, "a"), ended("end_turn"), DONE), BadPayload),
    ],
)
@pytest.mark.parametrize(
    "content_type", ["text/event-stream", "text/html; charset=utf-8", "application/json"]
)
async def test_a_success_that_is_no_answer_is_an_error(
    body: bytes, expected: type[ProviderError], content_type: str
) -> None:
    """P-18"""
    error, events = await fail(Answer(chunks=[body], content_type=content_type))
    if body[:1] == b"{" and content_type == "text/event-stream":
        expected = BadPayload  # a document is no event: only its content type makes it readable
    elif body[:1] != b"{" and content_type != "text/event-stream":
        expected = BadPayload
    assert type(error) is expected
    assert events == []


async def test_a_refused_connection_is_a_lost_one() -> None:
    async with ModelServer() as server:
        url = server.base_url
    provider = AnthropicMessages(api_key="k", base_url=url)
    with pytest.raises(ConnectionLost):
        await collect(provider)
    await provider.aclose()
    await provider.aclose()


async def test_silence_before_the_first_event_and_between_events_ends_the_request() -> None:
    for chunks in ([], [b"event: pi"], [HALF_TEXT]):
        answer = Answer(chunks=chunks, end="hang")
        async with api(first_event_timeout_s=0.5, idle_timeout_s=0.05) as (server, provider):
            server.enqueue(answer)
            with pytest.raises(RequestTimedOut):
                await collect(provider)
            async with asyncio.timeout(30):
                await answer.client_gone.wait()


async def test_text_that_is_not_unicode_in_the_extra_body_is_refused_before_anything_is_sent() -> None:
    async with api() as (server, provider):
        with pytest.raises(RequestRejected):
            await collect(
                provider, ProviderRequest(model=MODEL, messages=REQUEST.messages, extra_body={"a": "\ud800"})
            )
        assert server.requests == []


# -- the connection -------------------------------------------------------------------------------------


async def test_closing_the_iterator_early_aborts_the_request_at_once() -> None:
    answer = Answer(chunks=[HALF_TEXT], end="hang")
    async with api() as (server, provider):
        server.enqueue(answer)
        events = provider.stream(REQUEST)
        async for event in events:
            if isinstance(event, TextDelta):
                break
        await events.aclose()  # type: ignore[attr-defined]
        async with asyncio.timeout(30):
            await answer.client_gone.wait()


async def test_cancelling_the_reader_aborts_the_request() -> None:
    for chunks in ([], [HALF_TEXT]):
        answer = Answer(chunks=chunks, end="hang", chunk_gap=asyncio.Event())
        async with api() as (server, provider):
            server.enqueue(answer)
            first = asyncio.Event()

            async def read(provider: AnthropicMessages, first: asyncio.Event) -> None:
                async for _ in provider.stream(REQUEST):
                    first.set()

            task = asyncio.create_task(read(provider, first))
            async with asyncio.timeout(30):
                if chunks:
                    await first.wait()
                else:
                    await server.wait_for_request()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            async with asyncio.timeout(30):
                await answer.client_gone.wait()


async def test_one_instance_serves_many_requests_at_once_and_uses_connections_again() -> None:
    whole = sse(start(), *text(0, "a"), ended("end_turn"), DONE)
    async with api() as (server, provider):
        server.enqueue(*(Answer(chunks=[whole], end="chunked_end") for _ in range(6)))
        results = await asyncio.gather(*(collect(provider) for _ in range(3)))
        before = server.connections_made
        for _ in range(3):
            results.append(await collect(provider))
        assert all(end_of(events).stop is Stop.END_TURN for events in results)
        assert server.connections_made == before
