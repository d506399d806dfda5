"""The Anthropic adapter against scripted byte streams, through the vendor's real SDK."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
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
    Message,
    MessageEnd,
    MessageStart,
    Provider,
    ProviderEvent,
    ProviderRequest,
    Stop,
    TextBlock,
    TextDelta,
    ThinkingDelta,
    ToolCallDelta,
    ToolCallEnd,
    ToolCallStart,
    ToolSpec,
    UsageUpdate,
)
from tests.support.model_server import Answer, ModelServer, json_answer, split_every, sse

MODEL = "claude-sonnet-4-6"
SCHEMA = {"type": "object", "properties": {}}
REQUEST = ProviderRequest(
    model=MODEL,
    messages=(Message(role="user", blocks=(TextBlock(text="hi"),)),),
    tools=tuple(
        ToolSpec(name=name, description=name, input_schema=SCHEMA) for name in ("ls", "calendar.list")
    ),
)

Frame = dict[str, Any]


def start(**usage: Any) -> Frame:
    message = {"id": "m1", "type": "message", "role": "assistant", "model": "fake", "content": []}
    usage = usage or {"input_tokens": 11, "output_tokens": 1}
    return {"type": "message_start", "message": {**message, "stop_reason": None, "usage": usage}}


def block(index: int, **content: Any) -> Frame:
    return {"type": "content_block_start", "index": index, "content_block": content}


def delta(index: int, kind: str, **fields: Any) -> Frame:
    return {"type": "content_block_delta", "index": index, "delta": {"type": kind, **fields}}


def stop(index: int) -> Frame:
    return {"type": "content_block_stop", "index": index}


def ended(reason: str | None, **usage: Any) -> Frame:
    usage = usage or {"output_tokens": 9}
    return {"type": "message_delta", "delta": {"stop_reason": reason, "stop_sequence": None}, "usage": usage}


DONE: Frame = {"type": "message_stop"}


def text(index: int, *pieces: str) -> list[Frame]:
    deltas = [delta(index, "text_delta", text=piece) for piece in pieces]
    return [block(index, type="text", text=""), *deltas, stop(index)]


def call(index: int, call_id: str, name: str, *pieces: str) -> list[Frame]:
    deltas = [delta(index, "input_json_delta", partial_json=piece) for piece in pieces]
    return [block(index, type="tool_use", id=call_id, name=name, input={}), *deltas, stop(index)]


@asynccontextmanager
async def api(**settings: Any) -> AsyncIterator[tuple[ModelServer, AnthropicMessages]]:
    async with ModelServer() as server:
        provider = AnthropicMessages(api_key="key-1234567890", base_url=server.base_url, **settings)
        try:
            yield server, provider
        finally:
            await provider.aclose()


async def collect(provider: Provider, request: ProviderRequest = REQUEST) -> list[ProviderEvent]:
    return [event async for event in provider.stream(request)]


async def play(*frames: str | Frame, request: ProviderRequest = REQUEST) -> list[ProviderEvent]:
    """The adapter's events for one answer of these frames."""
    async with api() as (server, provider):
        server.enqueue(Answer(chunks=[sse(*frames)]))
        return await collect(provider, request)


async def fail(answer: Answer, **settings: Any) -> tuple[ProviderError, list[ProviderEvent]]:
    """The error that an answer ends in, and the events before it."""
    events: list[ProviderEvent] = []
    async with api(**settings) as (server, provider):
        server.enqueue(answer)
        with pytest.raises(ProviderError) as caught:
            async for event in provider.stream(REQUEST):
                events.append(event)
        assert len(server.requests) == 1  # no retries of its own
    return caught.value, events


def end_of(events: list[ProviderEvent]) -> MessageEnd:
    ends = [event for event in events if isinstance(event, MessageEnd)]
    assert ends == events[-1:]
    return ends[0]


def native_of(events: list[ProviderEvent]) -> list[Any]:
    native = end_of(events).native
    assert native is not None
    assert (native.api, native.model) == ("anthropic_messages", MODEL)
    blocks: list[Any] = json.loads(native.body)
    return blocks


def calls_of(events: list[ProviderEvent]) -> list[ToolCallEnd]:
    return [event for event in events if isinstance(event, ToolCallEnd)]


# -- whole answers --------------------------------------------------------------------------------------

THINKING_AND_TWO_CALLS = [
    start(input_tokens=12, cache_read_input_tokens=2048, cache_creation_input_tokens=512, output_tokens=1),
    block(0, type="thinking", thinking="", signature=""),
    delta(0, "thinking_delta", thinking="step\u2028one "),
    delta(0, "thinking_delta", thinking="修复 🙂 é"),
    delta(0, "signature_delta", signature="sigA=="),
    stop(0),
    block(1, type="redacted_thinking", data="blob=="),
    stop(1),
    *text(2, "Look", "ing…"),
    *call(3, "toolu_1", "ls", "", '{"path"', ': "a"}'),
    {"type": "ping"},
    *call(4, "toolu_2", "calendar_list_8fe73bc12f"),
    ended("tool_use", output_tokens=40, output_tokens_details={"thinking_tokens": 25}),
    DONE,
]


def assert_thinking_and_two_calls(events: list[ProviderEvent]) -> None:
    plain = [event for event in events if not isinstance(event, UsageUpdate | MessageEnd)]
    assert plain == [
        MessageStart(model="fake", provider_message_id="m1"),
        ThinkingDelta(index=0, text="step\u2028one "),
        ThinkingDelta(index=0, text="修复 🙂 é"),
        TextDelta(index=2, text="Look"),
        TextDelta(index=2, text="ing…"),
        ToolCallStart(index=3, id="toolu_1", name="ls"),
        ToolCallDelta(index=3, json='{"path"'),
        ToolCallDelta(index=3, json=': "a"}'),
        ToolCallEnd(index=3, input={"path": "a"}),
        ToolCallStart(index=4, id="toolu_2", name="calendar.list"),
        ToolCallEnd(index=4),
    ]
    assert end_of(events).stop is Stop.TOOL_USE
    assert native_of(events) == [
        {"type": "thinking", "thinking": "step\u2028one 修复 🙂 é", "signature": "sigA=="},
        {"type": "redacted_thinking", "data": "blob=="},
        {"type": "text", "text": "Looking…"},
        {"type": "tool_use", "id": "toolu_1", "name": "ls", "input": {"path": "a"}},
        {"type": "tool_use", "id": "toolu_2", "name": "calendar_list_8fe73bc12f", "input": {}},
    ]


async def test_thinking_text_and_parallel_calls_are_read_whole() -> None:
    """P-12, P-13"""
    assert_thinking_and_two_calls(await play(*THINKING_AND_TWO_CALLS))


@pytest.mark.parametrize("size", [1, 2, 3, 7])
async def test_chunk_boundaries_inside_characters_and_frames_change_nothing(size: int) -> None:
    """SSE-16"""
    async with api() as (server, provider):
        server.enqueue(Answer(chunks=split_every(sse(*THINKING_AND_TWO_CALLS), size)))
        assert_thinking_and_two_calls(await collect(provider))


async def test_every_single_split_of_a_short_answer_gives_the_same_text() -> None:
    """SSE-16"""
    data = sse(start(), *text(0, "修🙂é"), ended("end_turn"), DONE)
    async with api() as (server, provider):
        for position in range(1, len(data)):
            server.enqueue(Answer(chunks=[data[:position], data[position:]], end="chunked_end"))
            events = await collect(provider)
            assert [event.text for event in events if isinstance(event, TextDelta)] == ["修🙂é"]
            assert end_of(events).stop is Stop.END_TURN


async def test_comments_pings_ids_and_carriage_returns_are_let_through() -> None:
    frames = sse(start(), *text(0, "a"), ended("end_turn"), DONE).decode()
    noisy = (
        ": hello\n\nid: 7\n\n: keep-alive\n\nevent: ping\n\nevent: ping\ndata: {}\n\ndata:\n\nretry: 100\n\n"
        + frames
    )
    for script in (noisy, noisy.replace("\n", "\r\n")):
        events = await play(script)
        assert [event.text for event in events if isinstance(event, TextDelta)] == ["a"]


async def test_frames_without_an_event_line_are_read_by_their_type() -> None:
    frames = [f"data: {json.dumps(frame)}\n\n" for frame in (start(), *text(0, "a"), ended("end_turn"), DONE)]
    events = await play(*frames)
    assert [event.text for event in events if isinstance(event, TextDelta)] == ["a"]


async def test_a_byte_order_mark_never_makes_an_empty_success() -> None:
    """SSE-18"""
    frames = sse(start(), *text(0, "x"), ended("end_turn"), DONE)
    events = await play("\ufeff" + frames.decode())
    assert [event.text for event in events if isinstance(event, TextDelta)] == ["x"]
    lost = frames.replace(b"event: message_start\n", b"")
    error, _ = await fail(Answer(chunks=["\ufeff".encode() + lost]))
    assert isinstance(error, BadPayload)


async def test_unknown_events_blocks_deltas_and_stop_reasons_pass_and_are_kept() -> None:
    unknown = {"type": "new_block", "payload": {"at": "2026-01-01T00:00:00Z", "n": 1.50}}
    events = await play(
        start(),
        {"type": "new_event", "x": 1},
        block(0, **unknown),
        delta(0, "new_delta", x=1),
        stop(0),
        block(5, type="server_tool_use", id="srvtoolu_1", name="web_search", input={}),
        delta(5, "input_json_delta", partial_json='{"query": "x"}'),
        stop(5),
        block(9, type="text", text="", citations=None),
        delta(9, "text_delta", text="a"),
        delta(9, "citations_delta", citation={"type": "char_location"}),
        stop(9),
        ended("new_reason"),
        DONE,
    )
    assert [event for event in events if isinstance(event, TextDelta)] == [TextDelta(index=2, text="a")]
    assert calls_of(events) == []
    assert (end_of(events).stop, end_of(events).native_stop) == (Stop.UNKNOWN, "new_reason")
    assert native_of(events) == [
        unknown,
        {"type": "server_tool_use", "id": "srvtoolu_1", "name": "web_search", "input": {"query": "x"}},
        {"type": "text", "text": "a", "citations": [{"type": "char_location"}]},
    ]


@pytest.mark.parametrize(
    ("native", "expected"),
    [
        ("end_turn", Stop.END_TURN),
        ("max_tokens", Stop.MAX_TOKENS),
        ("stop_sequence", Stop.STOP_SEQUENCE),
        ("pause_turn", Stop.PAUSE),
        ("refusal", Stop.REFUSAL),
        ("model_context_window_exceeded", Stop.CONTEXT_WINDOW),
        ("tool_use", Stop.END_TURN),
    ],
)
async def test_stop_reasons_are_named_and_tool_use_without_a_call_is_an_end(
    native: str, expected: Stop
) -> None:
    end = end_of(await play(start(), *text(0, "a"), ended(native), DONE))
    assert (end.stop, end.native_stop) == (expected, native)


async def test_a_call_counts_although_the_api_says_that_the_turn_ended() -> None:
    events = await play(start(), *call(0, "t1", "ls", "{}"), ended("end_turn"), DONE)
    assert end_of(events).stop is Stop.TOOL_USE


async def test_odd_types_in_known_fields_break_nothing() -> None:
    events = await play(
        start(input_tokens="many", cache_creation=[], output_tokens=-1),
        {"type": "content_block_start", "index": {}, "content_block": {"type": "text", "text": None}},
        {"type": "content_block_delta", "index": [], "delta": {"type": "text_delta", "text": "a"}},
        {"type": "content_block_delta", "index": [], "delta": {"type": "text_delta", "text": 5}},
        {"type": "content_block_delta", "index": 77, "delta": None},
        {"type": "content_block_stop", "index": 77},
        {"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": None},
        DONE,
    )
    assert [event for event in events if isinstance(event, TextDelta)] == [TextDelta(index=0, text="a")]


# -- tool calls -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("pieces", [(), ("",), (" ",), ("\n",), ("null",), ("{}",)])
async def test_a_call_without_arguments_gets_an_empty_object(pieces: tuple[str, ...]) -> None:
    """P-08"""
    events = await play(start(), *call(0, "t1", "ls", *pieces), ended("tool_use"), DONE)
    assert calls_of(events) == [ToolCallEnd(index=0)]
    assert native_of(events)[0]["input"] == {}


@pytest.mark.parametrize("raw", ['{"a": tru]', "[1,2]", '{"a":1}{"a":2}', "```json\n{}\n```", "[" * 50_000])
async def test_unreadable_arguments_are_an_error_of_the_call_and_the_answer_goes_on(raw: str) -> None:
    """P-09"""
    events = await play(
        start(), *call(0, "t1", "ls", raw), *call(1, "t2", "ls", '{"b": 1}'), ended("tool_use"), DONE
    )
    bad, good = calls_of(events)
    assert bad.input == {}
    assert bad.input_error
    assert bad.input_raw == raw
    assert good == ToolCallEnd(index=1, input={"b": 1})
    assert native_of(events)[0]["input"] == {}


async def test_a_whole_call_is_announced_before_the_answer_ends() -> None:
    gap = asyncio.Event()
    head = sse(start(), *call(0, "t1", "ls", '{"a": 1}'))
    async with api() as (server, provider):
        server.enqueue(Answer(chunks=[head, sse(ended("tool_use"), DONE)], chunk_gap=gap))
        async for event in provider.stream(REQUEST):
            if isinstance(event, ToolCallEnd):
                gap.set()  # only then does the server go on
        assert gap.is_set()


@pytest.mark.parametrize("piece", ['{"path":"a","content":"hel', "", '{"a": 1', "nul"])
@pytest.mark.parametrize("reason", ["max_tokens", "model_context_window_exceeded", "refusal"])
async def test_a_call_that_the_output_limit_cuts_never_ends(piece: str, reason: str) -> None:
    """P-06"""
    events = await play(
        start(), *call(0, "t1", "ls", "{}"), *call(1, "t2", "write", piece), ended(reason), DONE
    )
    assert calls_of(events) == [ToolCallEnd(index=0)]
    assert native_of(events)[1] == {"type": "tool_use", "id": "t2", "name": "write", "input": {}}


async def test_a_whole_call_before_the_output_limit_may_run() -> None:
    """P-06"""
    events = await play(start(), *call(0, "t1", "ls", '{"a": 1}'), ended("max_tokens"), DONE)
    assert calls_of(events) == [ToolCallEnd(index=0, input={"a": 1})]
    assert end_of(events).stop is Stop.MAX_TOKENS


async def test_arguments_that_come_whole_at_the_start_are_taken() -> None:
    whole = block(0, type="tool_use", id="t1", name="ls", input={"a": 1})
    events = await play(start(), whole, stop(0), ended("max_tokens"), DONE)
    assert calls_of(events) == [ToolCallEnd(index=0, input={"a": 1})]


async def test_calls_without_an_id_or_with_the_same_one_get_ids_of_their_own() -> None:
    frames = [*call(0, "t1", "ls", "{}"), *call(0, "t1", "ls", "{}"), *call(0, "", "ls", "{}")]
    events = await play(start(), *frames, ended("tool_use"), DONE)
    starts = [event for event in events if isinstance(event, ToolCallStart)]
    assert starts[0].id == "t1"
    assert len({event.id for event in starts}) == 3
    assert [event.index for event in calls_of(events)] == [0, 1, 2]
    assert [native["id"] for native in native_of(events)] == [event.id for event in starts]


async def test_blocks_that_never_stop_are_complete_when_the_message_is() -> None:
    frames = [*text(0, "a")[:-1], *call(1, "t1", "ls", '{"a": 1}')[:-1]]
    events = await play(start(), *frames, ended("tool_use"), DONE)
    assert calls_of(events) == [ToolCallEnd(index=1, input={"a": 1})]
    assert native_of(events)[0] == {"type": "text", "text": "a"}


# -- usage ----------------------------------------------------------------------------------------------


def last_usage(events: list[ProviderEvent]) -> UsageUpdate:
    return [event for event in events if isinstance(event, UsageUpdate)][-1]


async def test_cached_tokens_are_part_of_the_input() -> None:
    """A-01"""
    usage = last_usage(await play(*THINKING_AND_TWO_CALLS)).usage
    assert (usage.input_tokens, usage.cache_read_tokens, usage.cache_write_tokens) == (2572, 2048, 512)
    assert (usage.output_tokens, usage.reasoning_tokens) == (40, 25)
    assert usage.cache_write_1h_tokens is None
    assert usage.raw["input_tokens"] == 12


async def test_running_totals_replace_each_other_and_nulls_change_nothing() -> None:
    """A-06"""
    split = {"ephemeral_5m_input_tokens": 3, "ephemeral_1h_input_tokens": 4}
    first = start(input_tokens=11, output_tokens=1, cache_creation_input_tokens=7, cache_creation=split)
    events = await play(
        first,
        *text(0, "a"),
        ended(None, output_tokens=5, input_tokens=None),
        ended(None, output_tokens=9),
        ended("end_turn", output_tokens=9, cache_creation_input_tokens=None),
        DONE,
    )
    usage = last_usage(events).usage
    assert (usage.input_tokens, usage.output_tokens) == (18, 9)
    assert (usage.cache_read_tokens, usage.cache_write_tokens, usage.cache_write_1h_tokens) == (None, 7, 4)


async def test_usage_is_known_as_soon_as_the_answer_begins() -> None:
    """A-03"""
    cut = Answer(
        chunks=[
            sse(start(input_tokens=11, output_tokens=1, cache_read_input_tokens=30), *text(0, "one two")[:-1])
        ]
    )
    error, events = await fail(cut)
    assert isinstance(error, StreamTruncated)
    usage = last_usage(events).usage
    assert (usage.input_tokens, usage.cache_read_tokens) == (41, 30)


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


def api_error(kind: str, message: str = "x", **details: Any) -> Frame:
    return {
        "type": "error",
        "error": {"type": kind, "message": message, "details": details},
        "request_id": "r",
    }


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
        async with api(first_event_timeout_s=0.2, idle_timeout_s=0.05) as (server, provider):
            server.enqueue(answer)
            with pytest.raises(RequestTimedOut):
                await collect(provider)
            async with asyncio.timeout(5):
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
        async with asyncio.timeout(5):
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
            async with asyncio.timeout(5):
                if chunks:
                    await first.wait()
                else:
                    await server.wait_for_request()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            async with asyncio.timeout(5):
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
