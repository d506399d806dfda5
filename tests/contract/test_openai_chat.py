"""The Chat Completions adapter through the real SDK, against scripted bytes on loopback."""

import asyncio
import json
from contextlib import aclosing
from decimal import Decimal
from typing import Any

import pytest

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
from providers.openai_chat import OpenAIChat
from providers.openai_chat_endpoint import DEEPSEEK_CHAT, OPENAI_CHAT, OPENROUTER_CHAT, ChatEndpoint
from providers.openai_sse import SseReader, decode_json
from providers.types import (
    Base64Source,
    Block,
    FileSource,
    ImageBlock,
    Message,
    MessageEnd,
    MessageStart,
    NativeBlocks,
    ProviderEvent,
    ProviderRequest,
    Role,
    Stop,
    TextBlock,
    TextDelta,
    ThinkingBlock,
    ThinkingDelta,
    ToolCallDelta,
    ToolCallEnd,
    ToolCallStart,
    ToolChoice,
    ToolResultBlock,
    ToolSpec,
    ToolUseBlock,
    UrlSource,
    UsageUpdate,
)
from tests.support.model_server import Answer, ModelServer, json_answer, split_every, sse

KEY = "sk-very-secret"
DONE = "data: [DONE]\n\n"


def message(role: Role, *blocks: Block, native: NativeBlocks | None = None) -> Message:
    return Message(role=role, blocks=blocks, native=native)


def text(value: str) -> TextBlock:
    return TextBlock(text=value)


def request(*messages: Message, **fields: Any) -> ProviderRequest:
    return ProviderRequest(
        **({"model": "some-model", "messages": messages or (message("user", text("hello")),)} | fields)
    )


def chunk(delta: Any = None, reason: Any = None, **fields: Any) -> dict[str, Any]:
    choice = {"index": 0, "delta": {} if delta is None else delta, "finish_reason": reason}
    return {"id": "c1", "object": "chat.completion.chunk", "model": "m1", "choices": [choice]} | fields


def content(value: str) -> dict[str, Any]:
    return chunk({"content": value})


def call(index: int, **fields: Any) -> dict[str, Any]:
    function = {key: fields.pop(key) for key in ("name", "arguments") if key in fields}
    return chunk({"tool_calls": [{"index": index, "type": "function", "function": function} | fields]})


async def play(
    answer: Answer, asked: ProviderRequest | None = None, **options: Any
) -> tuple[list[ProviderEvent], Any, ProviderError | None]:
    """The events of one answer, the body of the request, and the error that ended it."""
    events: list[ProviderEvent] = []
    failure = None
    async with ModelServer() as server:
        server.enqueue(answer)
        provider = OpenAIChat(api_key=KEY, base_url=server.base_url + "/v1", **options)
        try:
            async for event in provider.stream(asked or request()):
                events.append(event)
        except ProviderError as error:
            failure = error
        finally:
            await provider.aclose()
        assert [(sent.method, sent.path) for sent in server.requests] == [("POST", "/v1/chat/completions")]
        assert server.requests[0].headers["authorization"] == f"Bearer {KEY}"
        return events, server.requests[0].body_json, failure


async def events_of(*frames: str | dict[str, Any], **options: Any) -> list[ProviderEvent]:
    events, _, failure = await play(Answer(chunks=[sse(*frames)]), **options)
    if failure is not None:
        raise failure
    return events


async def sent_for(asked: ProviderRequest, **options: Any) -> Any:
    """The body that was sent for a request."""
    answer = Answer(chunks=[sse(content("ok"), chunk(None, "stop"), DONE)])
    _, body, failure = await play(answer, asked, **options)
    assert failure is None
    return body


def text_of(events: list[ProviderEvent]) -> str:
    return "".join(event.text for event in events if isinstance(event, TextDelta))


def end_of(events: list[ProviderEvent]) -> MessageEnd:
    assert [event for event in events if isinstance(event, MessageEnd)] == [events[-1]]
    end = events[-1]
    assert isinstance(end, MessageEnd)
    return end


FULL_STREAM = sse(
    chunk({"role": "assistant", "content": "", "reasoning_content": "let me "}),
    chunk({"content": None, "reasoning_content": "see 修"}),
    content("Hé"),
    content("llo 🙂"),
    call(0, id="call_a", name="look", arguments=""),
    call(0, arguments='{"where":"修复'),
    call(0, arguments='"}'),
    call(1, id="call_b", name="count", arguments='{"n":2}'),
    chunk(None, "tool_calls"),
    {
        "choices": [],
        "usage": {
            "prompt_tokens": 2572,
            "completion_tokens": 40,
            "prompt_tokens_details": {"cached_tokens": 2048},
            "completion_tokens_details": {"reasoning_tokens": 25},
        },
    },
    DONE,
)


@pytest.mark.parametrize("size", [1, 3, 100_000])
async def test_text_thinking_calls_and_usage_arrive_whatever_the_chunks(size: int) -> None:
    """SSE-16, A-01."""
    tools = tuple(ToolSpec(name=name, description="", input_schema={}) for name in ("look", "count"))
    events, _, failure = await play(
        Answer(chunks=split_every(FULL_STREAM, size), end="chunked_end"), request(tools=tools)
    )
    assert failure is None
    usage = next(event.usage for event in events if isinstance(event, UsageUpdate))
    assert events == [
        MessageStart(model="m1", provider_message_id="c1"),
        ThinkingDelta(index=0, text="let me "),
        ThinkingDelta(index=0, text="see 修"),
        TextDelta(index=1, text="Hé"),
        TextDelta(index=1, text="llo 🙂"),
        ToolCallStart(index=2, id="call_a", name="look"),
        ToolCallDelta(index=2, json='{"where":"修复'),
        ToolCallDelta(index=2, json='"}'),
        ToolCallStart(index=3, id="call_b", name="count"),
        ToolCallDelta(index=3, json='{"n":2}'),
        UsageUpdate(usage=usage),
        ToolCallEnd(index=2, input={"where": "修复"}),
        ToolCallEnd(index=3, input={"n": 2}),
        MessageEnd(stop=Stop.TOOL_USE, native_stop="tool_calls"),
    ]
    assert (usage.input_tokens, usage.cache_read_tokens, usage.cache_write_tokens) == (2572, 2048, None)
    assert (usage.output_tokens, usage.reasoning_tokens) == (40, 25)


def test_a_frame_is_the_same_at_every_split_point() -> None:
    """SSE-16."""
    stream = bytes.fromhex("646174613a207b2274223a22e4bfaee5a48d20f09f998220c3a9227d0a0a")
    for split in range(len(stream) + 1):
        reader = SseReader()
        frames = reader.feed(stream[:split]) + reader.feed(stream[split:]) + reader.finish()
        assert [decode_json(frame.data) for frame in frames] == [{"t": "修复 🙂 é"}]


def test_a_line_end_of_two_characters_is_one_at_every_split_point() -> None:
    stream = b'event: error\r\ndata: {"a":\r\ndata: 1}\r\n\r\n'
    for split in range(len(stream) + 1):
        reader = SseReader()
        frames = reader.feed(stream[:split]) + reader.feed(stream[split:]) + reader.finish()
        assert frames == [("error", b'{"a":\n1}')]


@pytest.mark.parametrize("line_end", ["\r\n", "\r"])
async def test_every_line_end_of_the_standard_is_read(line_end: str) -> None:
    stream = sse(content("a"), chunk(None, "stop"), DONE).replace(b"\n", line_end.encode())
    events, _, failure = await play(Answer(chunks=split_every(stream, 1)))
    assert failure is None
    assert text_of(events) == "a"


@pytest.mark.parametrize("size", [1, 2, 4, 1000])
async def test_a_byte_order_mark_does_not_hide_the_first_frame(size: int) -> None:
    """SSE-18."""
    stream = bytes.fromhex(
        "efbbbf646174613a207b2263686f69636573223a5b7b22696e646578223a302c2264656c7461223a7b22636f6e74656e74"
        "223a2278227d2c2266696e6973685f726561736f6e223a2273746f70227d5d7d0a0a646174613a205b444f4e455d0a0a"
    )
    events, _, failure = await play(Answer(chunks=split_every(stream, size)))
    assert failure is None
    assert text_of(events) == "x"


async def test_comments_and_empty_frames_are_passed_over() -> None:
    """Traps 7 and 8: they end the SDK's own iterator with a JSONDecodeError."""
    events = await events_of(
        ": PROCESSING\n\n",
        "id: 1\n" + sse(content("a")).decode(),
        ": keep-alive\n\n",
        "data:\n\n",
        "event: ping\n\n",
        content("b"),
        chunk(None, "stop"),
        DONE,
    )
    assert text_of(events) == "ab"


async def test_escaped_halves_of_a_surrogate_pair_do_not_break_the_stream() -> None:
    """H-07: joining them is the loop's part."""
    frame = 'data: {"choices":[{"index":0,"delta":{"content":"%s"}}]}\n\n'
    events = await events_of(frame % r"hi \ud83d", frame % r"\ude42!", chunk(None, "stop"), DONE)
    assert text_of(events) == "hi \ud83d\ude42!"


# -- what counts as complete ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "frames",
    [
        pytest.param([content("Hel")], id="text"),
        pytest.param([call(0, id="c1", name="write", arguments='{"path":"a"}')], id="whole call"),
        pytest.param([chunk({"reasoning_content": "hm"})], id="reasoning alone"),
        pytest.param([], id="nothing"),
        pytest.param(['data: {"choices":[{"index":0,"del'], id="half a frame"),
        pytest.param([DONE], id="done alone"),
    ],
)
@pytest.mark.parametrize("end", ["close", "cut", "reset"])
@pytest.mark.parametrize("requires_finish_reason", [True, False])
async def test_an_end_without_a_marker_is_truncation_and_ends_no_call(
    frames: list[Any], end: Any, requires_finish_reason: bool
) -> None:
    """P-03."""
    events, _, failure = await play(
        Answer(chunks=[sse(*frames)], end=end), requires_finish_reason=requires_finish_reason
    )
    assert type(failure) is StreamTruncated
    assert not any(isinstance(event, MessageEnd | ToolCallEnd) for event in events)


async def test_usage_reported_before_a_truncation_is_passed_on() -> None:
    """P-03."""
    usage = {"prompt_tokens": 5, "completion_tokens": 1}
    events, _, failure = await play(Answer(chunks=[sse(chunk({"content": "a"}, usage=usage))]))
    assert isinstance(failure, StreamTruncated)
    assert [event.usage.input_tokens for event in events if isinstance(event, UsageUpdate)] == [5]


async def test_a_stream_that_ends_inside_a_character_is_truncated() -> None:
    """SSE-16."""
    stream = sse(content("é"))
    _, _, failure = await play(Answer(chunks=[stream[: stream.index("é".encode()) + 1]]))
    assert type(failure) is StreamTruncated


async def test_done_without_a_reason_is_truncation_where_a_reason_is_required() -> None:
    """P-04."""
    with pytest.raises(StreamTruncated):
        await events_of(content("Hello"), DONE, requires_finish_reason=True)


@pytest.mark.parametrize("reason", [None, "max_tool_calls"])
async def test_done_without_a_known_reason_is_complete_where_none_is_required(reason: str | None) -> None:
    """P-04."""
    events = await events_of(chunk({"content": "Hello"}, reason), DONE, requires_finish_reason=False)
    assert end_of(events) == MessageEnd(stop=Stop.UNKNOWN, native_stop=reason)


async def test_done_without_a_reason_ends_a_whole_call_and_refuses_a_half_one() -> None:
    """P-04."""
    whole = await events_of(call(0, id="c1", name="f", arguments="{}"), DONE, requires_finish_reason=False)
    assert end_of(whole).stop is Stop.TOOL_USE
    with pytest.raises(StreamTruncated):
        await events_of(call(0, id="c1", name="f", arguments='{"a'), DONE, requires_finish_reason=False)


async def test_a_connection_that_breaks_after_the_reason_does_not_spoil_the_answer() -> None:
    events, _, failure = await play(Answer(chunks=[sse(content("a"), chunk(None, "stop"))], end="cut"))
    assert failure is None
    assert end_of(events).stop is Stop.END_TURN


async def test_a_server_that_never_closes_after_the_reason_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("providers.openai_chat.AFTER_FINISH_S", 0.05)
    events, _, failure = await play(Answer(chunks=[sse(content("a"), chunk(None, "stop"))], end="hang"))
    assert failure is None
    assert end_of(events).stop is Stop.END_TURN


async def test_the_output_limit_ends_only_whole_calls() -> None:
    """P-06."""
    events = await events_of(
        call(0, id="c1", name="ls", arguments="{}"),
        call(1, id="c2", name="write", arguments='{"path":"a","cont'),
        chunk(None, "length"),
        DONE,
    )
    assert [event for event in events if isinstance(event, ToolCallEnd)] == [ToolCallEnd(index=0)]
    assert end_of(events) == MessageEnd(stop=Stop.MAX_TOKENS, native_stop="length")


@pytest.mark.parametrize("arguments", ["", " ", "null", "{}", None])
async def test_a_call_without_arguments_has_an_empty_input(arguments: str | None) -> None:
    """P-08."""
    events = await events_of(call(0, id="c1", name="f", arguments=arguments), chunk(None, "stop"), DONE)
    assert [event for event in events if isinstance(event, ToolCallEnd)] == [ToolCallEnd(index=0)]
    assert end_of(events).stop is Stop.TOOL_USE, "presence of a call wins over the reason"


async def test_unreadable_arguments_reach_the_loop_as_an_error() -> None:
    """P-09."""
    events = await events_of(call(0, id="c1", name="f", arguments='{"a": tru]'), chunk(None, "stop"), DONE)
    (ended,) = (event for event in events if isinstance(event, ToolCallEnd))
    assert ended.input_error
    assert ended.input_raw == '{"a": tru]'


async def test_a_reason_of_tool_calls_without_any_call_ends_the_turn() -> None:
    """Trap 27."""
    assert end_of(await events_of(content("a"), chunk(None, "tool_calls"), DONE)).stop is Stop.END_TURN


async def test_chunks_without_choice_or_delta_are_passed_over_and_usage_is_counted_once() -> None:
    """P-16."""
    usage = {"prompt_tokens": 5, "completion_tokens": 2, "total_tokens": 7}
    events = await events_of(
        {"id": "", "model": "", "choices": [], "prompt_filter_results": []},
        {"choices": None},
        {"choices": [{"index": 0, "delta": None, "finish_reason": None}]},
        chunk({"role": "assistant", "content": "Hi", "unknown": 1}),
        chunk({"content": None}, "stop"),
        {"choices": [], "usage": usage},
        {"id": "c", "usage": usage},
        DONE,
    )
    assert text_of(events) == "Hi"
    (update,) = (event for event in events if isinstance(event, UsageUpdate))
    assert (update.usage.input_tokens, update.usage.output_tokens) == (5, 2)


async def test_running_totals_replace_each_other() -> None:
    """A-06."""
    events = await events_of(
        *(chunk({"content": "a"}, usage={"prompt_tokens": 4, "completion_tokens": n}) for n in (1, 2, 3)),
        chunk(None, "stop", usage=None),
        DONE,
    )
    last = [event for event in events if isinstance(event, UsageUpdate)][-1]
    assert (last.usage.input_tokens, last.usage.output_tokens) == (4, 3)


async def test_impossible_counts_are_clamped_and_missing_ones_stay_unknown() -> None:
    """A-01."""
    usage = {"prompt_tokens": 5, "completion_tokens": -2, "prompt_tokens_details": {"cached_tokens": 9}}
    events = await events_of(chunk({"content": "a"}, "stop", usage=usage), DONE)
    (update,) = (event for event in events if isinstance(event, UsageUpdate))
    assert (update.usage.cache_read_tokens, update.usage.output_tokens) == (5, 0)
    assert update.usage.reasoning_tokens is None


async def test_the_cost_that_an_endpoint_reports_is_kept_exactly() -> None:
    usage = {"prompt_tokens": 5, "completion_tokens": 2, "cost": 0.1}
    byok = usage | {"is_byok": True, "cost_details": {"upstream_inference_cost": 0.2}}
    for raw, cost in ((usage, "0.1"), (byok, "0.3")):
        events = await events_of(chunk({"content": "a"}, "stop", usage=raw), DONE, endpoint=OPENROUTER_CHAT)
        (update,) = (event for event in events if isinstance(event, UsageUpdate))
        assert update.usage.cost_usd == Decimal(cost)


async def test_content_parts_of_thinking_and_text_are_told_apart() -> None:
    parts = [
        {"type": "thinking", "thinking": [{"type": "text", "text": "hm"}]},
        {"type": "text", "text": "a"},
    ]
    events = await events_of(chunk({"content": parts}), chunk({"reasoning": "again"}), chunk(None, "stop"))
    assert events[1:-1] == [
        ThinkingDelta(index=0, text="hm"),
        TextDelta(index=1, text="a"),
        ThinkingDelta(index=2, text="again"),
    ]


async def test_a_refusal_is_shown_and_named() -> None:
    events = await events_of(chunk({"refusal": "I will not."}), chunk(None, "stop"), DONE)
    assert text_of(events) == "I will not."
    assert end_of(events).stop is Stop.REFUSAL


# -- errors -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("chunks", "content_type", "kind"),
    [
        (
            [sse({"error": {"message": "overloaded", "type": "server_error"}})],
            "text/event-stream",
            ServerFailed,
        ),
        ([b'event: error\ndata: {"message":"overloaded"}\n\n'], "text/event-stream", ServerFailed),
        ([b'data: {"error":"out of memory"}\n\n'], "text/event-stream", ServerFailed),
        ([sse({"error": {"code": 429, "message": "slow"}, "choices": []})], "text/event-stream", RateLimited),
        (
            [
                sse(
                    {
                        "error": {
                            "code": 502,
                            "message": "x",
                            "metadata": {"error_type": "provider_overloaded"},
                        }
                    }
                )
            ],
            "text/event-stream",
            Overloaded,
        ),
        (
            [sse({"error": {"code": "context_length_exceeded", "message": "x"}})],
            "text/event-stream",
            ContextTooLong,
        ),
        ([sse(content("a"), chunk(None, "error"))], "text/event-stream", ServerFailed),
        (
            [sse(chunk(None, "stop") | {"error": {"code": 402, "message": "x"}})],
            "text/event-stream",
            QuotaExceeded,
        ),
        ([b"<html><body>502 Bad Gateway</body></html>"], "text/event-stream", BadPayload),
        ([b"<html><body>502 Bad Gateway</body></html>"], "text/html", BadPayload),
        ([b'data: {"choices":[{"index":0,"del\n\n'], "text/event-stream", BadPayload),
        ([b"data: \xff\xfe\n\n"], "text/event-stream", BadPayload),
        ([b"data: 17\n\n"], "text/event-stream", BadPayload),
        ([b'{"error":{"message":"no","type":"server_error"}}'], "application/json", ServerFailed),
        ([b'{"detail":"no"}'], "application/json", BadPayload),
        ([b"[]"], "application/json", BadPayload),
    ],
)
async def test_what_is_no_answer_is_an_error_and_never_text(
    chunks: list[bytes], content_type: str, kind: type[ProviderError]
) -> None:
    """P-18."""
    events, _, failure = await play(Answer(chunks=chunks, content_type=content_type))
    assert type(failure) is kind
    assert not any(isinstance(event, MessageEnd) for event in events)
    assert text_of(events) in ("", "a")


async def test_a_whole_document_in_place_of_a_stream_is_one_answer() -> None:
    """P-18."""
    calls = [{"id": "", "type": "function", "function": {"name": "f", "arguments": "{}"}} for _ in range(2)]
    document = {
        "id": "c1",
        "model": "m1",
        "choices": [{"message": {"role": "assistant", "content": "hi", "tool_calls": calls}}],
        "usage": {"prompt_tokens": 3, "completion_tokens": 1},
    }
    events, _, failure = await play(json_answer(document))
    assert failure is None
    assert text_of(events) == "hi"
    assert len([event for event in events if isinstance(event, ToolCallEnd)]) == 2
    assert end_of(events).stop is Stop.TOOL_USE


@pytest.mark.parametrize(
    ("status", "error", "kind"),
    [
        (400, {"message": "bad", "type": "invalid_request_error"}, RequestRejected),
        (400, {"message": "x", "code": "context_length_exceeded"}, ContextTooLong),
        (400, {"message": "This model's maximum context length is 8192 tokens"}, ContextTooLong),
        (400, {"message": "x", "type": "exceed_context_size_error"}, ContextTooLong),
        (401, {"message": f"Incorrect API key: {KEY}"}, AuthRefused),
        (402, {"message": "pay"}, QuotaExceeded),
        (403, {"message": "no"}, AuthRefused),
        (404, {"message": "no such model", "code": "model_not_found"}, ModelNotFound),
        (429, {"message": "slow down", "code": "rate_limit_exceeded"}, RateLimited),
        (429, {"message": "You exceeded your current quota", "code": "insufficient_quota"}, QuotaExceeded),
        (500, {"message": "oops"}, ServerFailed),
        (503, {"message": "The server is overloaded"}, Overloaded),
    ],
)
async def test_error_statuses_have_classes_and_tell_no_key(
    status: int, error: dict[str, Any], kind: type[ProviderError]
) -> None:
    """P-15."""
    answer = json_answer(
        {"error": error}, status=status, headers={"x-request-id": "req_1", "retry-after": "2"}
    )
    events, _, failure = await play(answer)
    assert events == []
    assert type(failure) is kind
    assert (failure.status, failure.request_id, failure.retry_after_s) == (status, "req_1", 2.0)
    assert KEY not in str(failure)


@pytest.mark.parametrize(
    ("value", "seconds"),
    [("0", 0.0), ("1.5", 1.5), ("2000000", 2e6), ("-5", None), ("abc", None), ("", None)],
)
async def test_retry_after_is_read_and_one_request_is_sent(value: str, seconds: float | None) -> None:
    """P-15: `play` asserts that there was one request."""
    _, _, failure = await play(json_answer({}, status=429, headers={"retry-after": value}))
    assert isinstance(failure, RateLimited)
    assert failure.retry_after_s == seconds


async def test_an_error_page_of_a_proxy_is_a_server_failure() -> None:
    _, _, failure = await play(
        Answer(status=502, chunks=[b"<html>Bad Gateway</html>"], content_type="text/html")
    )
    assert type(failure) is ServerFailed


async def test_silence_before_and_within_an_answer_times_out() -> None:
    _, _, failure = await play(Answer(end="hang"), first_event_timeout_s=0.5)
    assert type(failure) is RequestTimedOut
    answer = Answer(chunks=[sse(content("a"))], end="hang")
    events, _, failure = await play(answer, idle_timeout_s=0.5)
    assert type(failure) is RequestTimedOut
    assert text_of(events) == "a"


async def test_a_port_where_nobody_listens_is_a_lost_connection() -> None:
    async with ModelServer() as server:
        url = server.base_url
    provider = OpenAIChat(api_key=KEY, base_url=url)
    with pytest.raises(ConnectionLost):
        await anext(aiter(provider.stream(request())))
    await provider.aclose()


async def test_closing_the_iterator_early_aborts_the_request() -> None:
    async with ModelServer() as server:
        answer = Answer(chunks=[sse(content("a"))], end="hang")
        server.enqueue(answer)
        provider = OpenAIChat(api_key=KEY, base_url=server.base_url)
        async with aclosing(provider.stream(request())) as events:
            async for event in events:
                if isinstance(event, TextDelta):
                    break
        async with asyncio.timeout(30):
            await answer.client_gone.wait()
        await provider.aclose()
        await provider.aclose()


async def test_one_connection_serves_answers_that_follow_each_other() -> None:
    async with ModelServer() as server:
        for _ in range(2):
            server.enqueue(Answer(chunks=[sse(content("a"), chunk(None, "stop"), DONE)], end="chunked_end"))
        provider = OpenAIChat(api_key=KEY, base_url=server.base_url)
        for _ in range(2):
            assert text_of([event async for event in provider.stream(request())]) == "a"
        await provider.aclose()
        assert len(server.requests) == 2


# -- what is sent -----------------------------------------------------------------------------------------

LOOK = ToolSpec(name="look", description="Looks.", input_schema={"type": "object"}, strict=True)
USE_A = ToolUseBlock(id="a", name="look", input={"x": 1})
USE_B = ToolUseBlock(id="b", name="look")


async def test_a_transcript_keeps_results_behind_their_calls_in_the_order_of_the_calls() -> None:
    image = ImageBlock(source=Base64Source(media_type="image/png", data="AAAA"))
    body = await sent_for(
        request(
            message("user", text("q"), ImageBlock(source=UrlSource(url="https://x.test/i.png"))),
            message("assistant", ThinkingBlock(thinking="hm"), text("I look."), USE_A, USE_B),
            message("user", text("quick!")),
            message(
                "tool",
                ToolResultBlock(tool_use_id="b", content=(text("seen"), image)),
                ToolResultBlock(tool_use_id="a"),
            ),
            message("assistant", text("done")),
            message("system", text("be brief")),
            message("user", text("more")),
            system="You are terse.",
            tools=(LOOK,),
        )
    )

    def sent_call(call_id: str, arguments: str) -> dict[str, Any]:
        return {"id": call_id, "type": "function", "function": {"name": "look", "arguments": arguments}}

    assert body["messages"] == [
        {"role": "system", "content": "You are terse."},
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "q"},
                {"type": "image_url", "image_url": {"url": "https://x.test/i.png"}},
            ],
        },
        {
            "role": "assistant",
            "content": "I look.",
            "tool_calls": [sent_call("a", '{"x":1}'), sent_call("b", "{}")],
        },
        {"role": "tool", "tool_call_id": "a", "content": "(no output)"},
        {"role": "tool", "tool_call_id": "b", "content": "seen"},
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "Image from tool call b:"},
                {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}},
                {"type": "text", "text": "quick!"},
            ],
        },
        {"role": "assistant", "content": "done"},
        {"role": "user", "content": "<system>\nbe brief\n</system>\n\nmore"},
    ]


async def test_an_id_that_returns_in_a_later_turn_keeps_the_result_of_its_own_turn() -> None:
    def turn(answer: str) -> tuple[Message, Message]:
        result = ToolResultBlock(tool_use_id="a", content=(text(answer),))
        return message("assistant", USE_A), message("tool", result)

    body = await sent_for(request(message("user", text("q")), *turn("first"), *turn("second")))
    assert [sent["content"] for sent in body["messages"] if sent["role"] == "tool"] == ["first", "second"]


async def test_empty_messages_are_not_sent_and_neighbours_are_one() -> None:
    """H-04."""
    touch = ToolUseBlock(id="a", name="touch")
    body = await sent_for(
        request(
            message("user", text("q1")),
            message("assistant"),
            message("user", text("q2")),
            message("assistant", text("")),
            message("user", text("q3")),
            message("assistant", text("\n\n")),
            message("user", text("q4")),
            message("assistant", ThinkingBlock(thinking="hm")),
            message("user", text("q5"), text(" ")),
            message("assistant", touch),
            message("tool", ToolResultBlock(tool_use_id="a", content=(text(""),))),
        )
    )
    user, assistant, result = body["messages"]
    assert user == {"role": "user", "content": "q1\n\nq2\n\nq3\n\nq4\n\nq5"}
    assert (assistant["content"], len(assistant["tool_calls"])) == ("", 1)
    assert result == {"role": "tool", "tool_call_id": "a", "content": "(no output)"}


async def test_the_default_sends_only_what_every_server_takes() -> None:
    body = await sent_for(
        request(tools=(LOOK,), think_effort=1.0, cache_key="s", end_user_id="u", max_output_tokens=9)
    )
    assert body == {
        "model": "some-model",
        "messages": [{"role": "user", "content": "hello"}],
        "stream": True,
        "stream_options": {"include_usage": True},
        "tools": [
            {
                "type": "function",
                "function": {"name": "look", "description": "Looks.", "parameters": {"type": "object"}},
            }
        ],
        "max_tokens": 9,
    }


async def test_openai_itself_gets_its_own_fields() -> None:
    body = await sent_for(
        request(
            message("user", text("q")),
            message("assistant", USE_A),
            message("tool", ToolResultBlock(tool_use_id="a", content=(text("r"),))),
            model="gpt-4.1",
            tools=(LOOK,),
            cache_key="s",
            end_user_id="u",
            max_output_tokens=10**9,
        ),
        endpoint=OPENAI_CHAT,
    )
    assert body["max_completion_tokens"] == 32_768, "more than the model has is refused"
    assert body["prompt_cache_key"] == "s"
    assert body["safety_identifier"] not in ("", "u"), "the user's id stays with us"
    assert body["tools"][0]["function"]["strict"] is True
    assert body["messages"][1]["content"] is None


@pytest.mark.parametrize(
    ("endpoint", "model", "effort", "with_tools", "fields"),
    [
        (OPENAI_CHAT, "gpt-5.4", 1.0, False, {"reasoning_effort": "xhigh"}),
        (OPENAI_CHAT, "gpt-5.4", 1.0, True, {"reasoning_effort": "none"}),
        (OPENAI_CHAT, "gpt-6.1-sol", 1.0, False, {"reasoning_effort": "xhigh"}),
        (OPENAI_CHAT, "gpt-4.1", 1.0, False, {}),
        (OPENAI_CHAT, "o3", 0.0, False, {"reasoning_effort": "low"}),
        (DEEPSEEK_CHAT, "deepseek-flash", 0.0, True, {"thinking": {"type": "disabled"}}),
        (
            DEEPSEEK_CHAT,
            "deepseek-flash",
            0.5,
            True,
            {"thinking": {"type": "enabled"}, "reasoning_effort": "high"},
        ),
        (OPENROUTER_CHAT, "a/b", 0.5, True, {"reasoning": {"effort": "medium"}}),
        (OPENROUTER_CHAT, "a/b", 0.0, True, {"reasoning": {"enabled": False}}),
    ],
)
async def test_effort_is_sent_on_the_scale_of_the_endpoint(
    endpoint: ChatEndpoint, model: str, effort: float, with_tools: bool, fields: dict[str, Any]
) -> None:
    asked = request(model=model, think_effort=effort, tools=(LOOK,) if with_tools else ())
    body = await sent_for(asked, endpoint=endpoint)
    assert {key: body[key] for key in ("reasoning_effort", "thinking", "reasoning") if key in body} == fields


@pytest.mark.parametrize(
    ("choice", "fields"),
    [
        (ToolChoice(), {}),
        (ToolChoice(type="any"), {"tool_choice": "required"}),
        (ToolChoice(type="none"), {"tool_choice": "none"}),
        (ToolChoice(parallel=False), {"parallel_tool_calls": False}),
        (
            ToolChoice(type="tool", name="look"),
            {"tool_choice": {"type": "function", "function": {"name": "look"}}},
        ),
    ],
)
async def test_tool_choice_is_sent_where_it_is_not_the_default(
    choice: ToolChoice, fields: dict[str, Any]
) -> None:
    body = await sent_for(request(tools=(LOOK,), tool_choice=choice))
    assert {key: body[key] for key in ("tool_choice", "parallel_tool_calls") if key in body} == fields


async def test_nothing_is_taken_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_ORG_ID", "org")
    monkeypatch.setenv("OPENAI_PROJECT_ID", "project")
    async with ModelServer() as server:
        server.enqueue(Answer(chunks=[sse(content("a"), chunk(None, "stop"), DONE)]))
        provider = OpenAIChat(api_key="", base_url=server.base_url)
        assert text_of([event async for event in provider.stream(request())]) == "a"
        await provider.aclose()
        headers = server.requests[0].headers
    assert not {"openai-organization", "openai-project"} & headers.keys()
    assert headers["authorization"] == "Bearer none", "a server without keys is asked without one"


async def test_extra_body_is_merged_last() -> None:
    body = await sent_for(request(extra_body={"temperature": 0.5, "stream_options": None}))
    assert (body["temperature"], body["stream_options"]) == (0.5, None)


async def test_an_illegal_tool_name_is_legal_on_the_wire_and_comes_back_as_it_was() -> None:
    spec = ToolSpec(name="calendar.list", description="", input_schema={})
    asked = request(tools=(spec,))
    wire = (await sent_for(asked))["tools"][0]["function"]["name"]
    assert "." not in wire
    answer = Answer(chunks=[sse(call(0, id="a", name=wire, arguments="{}"), chunk(None, "stop"), DONE)])
    events, _, _ = await play(answer, asked)
    assert [event.name for event in events if isinstance(event, ToolCallStart)] == ["calendar.list"]


async def test_reasoning_that_a_server_wants_back_is_sent_back() -> None:
    first = await events_of(
        chunk({"reasoning_content": "I sh"}),
        chunk({"reasoning_content": "ould look"}),
        call(0, id="a", name="look", arguments='{"x":1}'),
        chunk(None, "tool_calls"),
        DONE,
        endpoint=DEEPSEEK_CHAT,
    )
    body = await sent_for(
        request(
            message("user", text("q")),
            message("assistant", USE_A, native=end_of(first).native),
            message("tool", ToolResultBlock(tool_use_id="a", content=(text("r"),))),
            message("assistant", ThinkingBlock(thinking="of another model"), text("made elsewhere")),
            message("user", text("q2")),
        ),
        endpoint=DEEPSEEK_CHAT,
    )
    assistants = [sent for sent in body["messages"] if sent["role"] == "assistant"]
    assert [sent["reasoning_content"] for sent in assistants] == ["I should look", ""]


async def test_signed_details_are_merged_and_go_back_to_the_same_model_only() -> None:
    first = await events_of(
        chunk(
            {"reasoning_details": [{"type": "reasoning.text", "index": 0, "text": "a", "signature": None}]}
        ),
        chunk({"reasoning_details": [{"type": "reasoning.text", "index": 0, "text": "b"}]}),
        chunk({"reasoning_details": [{"type": "reasoning.text", "index": 0, "signature": "sig"}]}),
        chunk({"reasoning_details": [{"type": "reasoning.encrypted", "index": 1, "data": "xyz"}]}),
        call(
            0, id="a", name="look", arguments='{"x":1}', extra_content={"google": {"thought_signature": "t"}}
        ),
        chunk(None, "tool_calls"),
        DONE,
        endpoint=OPENROUTER_CHAT,
    )
    messages = (
        message("user", text("q")),
        message("assistant", USE_A, native=end_of(first).native),
        message("tool", ToolResultBlock(tool_use_id="a", content=(text("r"),))),
    )
    same = (await sent_for(request(*messages), endpoint=OPENROUTER_CHAT))["messages"][1]
    assert same["reasoning_details"] == [
        {"type": "reasoning.text", "index": 0, "text": "ab", "signature": "sig"},
        {"type": "reasoning.encrypted", "index": 1, "data": "xyz"},
    ]
    assert same["tool_calls"][0]["extra_content"] == {"google": {"thought_signature": "t"}}
    other = (await sent_for(request(*messages, model="another"), endpoint=OPENROUTER_CHAT))["messages"][1]
    assert "reasoning_details" not in other
    assert "extra_content" not in other["tool_calls"][0]


async def test_ids_of_other_apis_that_are_too_long_stay_paired() -> None:
    use = ToolUseBlock(id="x" * 400, name="look")
    body = await sent_for(
        request(
            message("user", text("q")),
            message("assistant", use),
            message("tool", ToolResultBlock(tool_use_id=use.id, content=(text("r"),))),
        )
    )
    _, assistant, result = body["messages"]
    assert assistant["tool_calls"][0]["id"] == result["tool_call_id"]
    assert len(result["tool_call_id"]) <= 40


async def test_an_image_that_nobody_read_is_refused_before_any_request() -> None:
    provider = OpenAIChat(api_key=KEY, base_url="http://127.0.0.1:9")
    asked = request(message("user", ImageBlock(source=FileSource(file_id="file_1"))))
    with pytest.raises(RequestRejected, match="file_1"):
        await anext(aiter(provider.stream(asked)))
    await provider.aclose()


async def test_text_that_is_no_unicode_is_refused_before_any_request() -> None:
    provider = OpenAIChat(api_key=KEY, base_url="http://127.0.0.1:9")
    with pytest.raises(RequestRejected):
        await anext(aiter(provider.stream(request(message("user", text("\ud83d"))))))
    await provider.aclose()


def test_capabilities_come_from_the_table_and_unknown_models_have_no_limits() -> None:
    provider = OpenAIChat(api_key=KEY)
    known = provider.capabilities("gpt-6.1-sol")
    assert (known.context_window_tokens, known.max_output_tokens) == (1_050_000, 128_000)
    assert known.thinking
    assert known.images
    assert provider.capabilities("ft:gpt-4.1-mini:us::1").max_output_tokens == 32_768
    assert provider.capabilities("openai/gpt-4.1:online").max_output_tokens == 32_768
    assert provider.capabilities("anthropic/claude-opus-4.6:online").context_window_tokens == 1_000_000
    unknown = provider.capabilities("llama-9-tiny")
    assert (unknown.context_window_tokens, unknown.thinking, unknown.tools) == (None, False, True)
    assert json.dumps(unknown.safe_usage_ratio) == "0.5"
