"""The Responses adapter through the real SDK, against scripted bytes on loopback."""

import asyncio
import json
from contextlib import aclosing
from typing import Any

import pytest

from providers.errors import (
    AuthRefused,
    BadPayload,
    ContextTooLong,
    Overloaded,
    ProviderError,
    QuotaExceeded,
    RateLimited,
    RequestRejected,
    RequestTimedOut,
    ServerFailed,
    StreamTruncated,
)
from providers.openai_responses import OpenAIResponses
from providers.types import (
    Base64Source,
    Block,
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
MODEL = "gpt-6.1-sol"
LOOK = ToolSpec(name="look", description="Looks.", input_schema={"type": "object"})
REASONING = {
    "id": "rs_1",
    "type": "reasoning",
    "summary": [{"type": "summary_text", "text": "I think."}],
    "encrypted_content": "gAAA==",
}
SAID = {
    "id": "msg_1",
    "type": "message",
    "role": "assistant",
    "status": "completed",
    "phase": "commentary",
    "content": [{"type": "output_text", "text": "Hé 🙂", "annotations": []}],
}
CALL_A = {
    "id": "fc_1",
    "type": "function_call",
    "call_id": "call_a",
    "name": "look",
    "arguments": '{"x": 1}',
    "status": "completed",
}
CALL_B = CALL_A | {"id": "fc_2", "call_id": "call_b", "name": "count", "arguments": "{}"}
USAGE = {
    "input_tokens": 2572,
    "input_tokens_details": {"cached_tokens": 2048, "cache_write_tokens": 100},
    "output_tokens": 40,
    "output_tokens_details": {"reasoning_tokens": 25},
    "total_tokens": 2612,
}


def message(role: Role, *blocks: Block, native: NativeBlocks | None = None) -> Message:
    return Message(role=role, blocks=blocks, native=native)


def text(value: str) -> TextBlock:
    return TextBlock(text=value)


def request(*messages: Message, **fields: Any) -> ProviderRequest:
    return ProviderRequest(
        **({"model": MODEL, "messages": messages or (message("user", text("hello")),)} | fields)
    )


def event(kind: str, **fields: Any) -> dict[str, Any]:
    return {"type": f"response.{kind}"} | fields


def created() -> dict[str, Any]:
    return event("created", response={"id": "resp_1", "model": "gpt-6.1-sol-2026", "status": "in_progress"})


def added(index: int, item: dict[str, Any]) -> dict[str, Any]:
    return event("output_item.added", output_index=index, item=item)


def done(index: int, item: dict[str, Any]) -> dict[str, Any]:
    return event("output_item.done", output_index=index, item=item)


def ended(status: str = "completed", **fields: Any) -> dict[str, Any]:
    return event(status, response={"id": "resp_1", "status": status, "error": None, "usage": USAGE} | fields)


def delta(kind: str, index: int, value: str, **fields: Any) -> dict[str, Any]:
    return event(f"{kind}.delta", output_index=index, item_id=f"item_{index}", delta=value, **fields)


async def play(
    answer: Answer, asked: ProviderRequest | None = None, **options: Any
) -> tuple[list[ProviderEvent], Any, ProviderError | None]:
    """The events of one answer, the body of the request, and the error that ended it."""
    events: list[ProviderEvent] = []
    failure = None
    async with ModelServer() as server:
        server.enqueue(answer)
        provider = OpenAIResponses(api_key=KEY, base_url=server.base_url + "/v1", **options)
        try:
            async for got in provider.stream(asked or request(tools=(LOOK,))):
                events.append(got)
        except ProviderError as error:
            failure = error
        finally:
            await provider.aclose()
        assert [(sent.method, sent.path) for sent in server.requests] == [("POST", "/v1/responses")]
        assert server.requests[0].headers["authorization"] == f"Bearer {KEY}"
        return events, server.requests[0].body_json, failure


async def events_of(*frames: str | dict[str, Any]) -> list[ProviderEvent]:
    events, _, failure = await play(Answer(chunks=[sse(*frames)]))
    if failure is not None:
        raise failure
    return events


async def sent_for(asked: ProviderRequest, **options: Any) -> Any:
    """The body that was sent for a request."""
    _, body, failure = await play(Answer(chunks=[sse(created(), ended())]), asked, **options)
    assert failure is None
    return body


def text_of(events: list[ProviderEvent]) -> str:
    return "".join(got.text for got in events if isinstance(got, TextDelta))


def calls_of(events: list[ProviderEvent]) -> list[ToolCallEnd]:
    return [got for got in events if isinstance(got, ToolCallEnd)]


def end_of(events: list[ProviderEvent]) -> MessageEnd:
    assert [got for got in events if isinstance(got, MessageEnd)] == [events[-1]]
    end = events[-1]
    assert isinstance(end, MessageEnd)
    return end


def native(*items: dict[str, Any], model: str = MODEL) -> NativeBlocks:
    return NativeBlocks(api="openai_responses", model=model, body=json.dumps(items).encode())


FULL_STREAM = sse(
    created(),
    event("in_progress", response={"id": "resp_1"}),
    added(0, {"id": "rs_1", "type": "reasoning", "summary": [], "encrypted_content": "partial"}),
    delta("reasoning_summary_text", 0, "I ", summary_index=0),
    delta("reasoning_summary_text", 0, "think.", summary_index=0),
    done(0, REASONING),
    added(1, SAID | {"content": []}),
    delta("output_text", 1, "Hé ", content_index=0),
    'event: keepalive\ndata: {"type":"keepalive"}\n\n',
    delta("output_text", 1, "🙂", content_index=0),
    event("output_text.done", output_index=1, content_index=0, text="Hé 🙂"),
    done(1, SAID),
    added(2, CALL_A | {"arguments": ""}),
    delta("function_call_arguments", 2, '{"x"'),
    delta("function_call_arguments", 2, ": 1}"),
    event("function_call_arguments.done", output_index=2, arguments='{"x": 1}'),
    done(2, CALL_A),
    added(3, CALL_B | {"arguments": ""}),
    delta("function_call_arguments", 3, "{}"),
    done(3, CALL_B),
    event("something.new", output_index=4),
    ended(),
)


@pytest.mark.parametrize("size", [1, 3, 100_000])
async def test_thinking_text_calls_and_usage_arrive_whatever_the_chunks(size: int) -> None:
    """SSE-16, A-01."""
    events, _, failure = await play(Answer(chunks=split_every(FULL_STREAM, size), end="chunked_end"))
    assert failure is None
    usage = next(got.usage for got in events if isinstance(got, UsageUpdate))
    end = end_of(events)
    assert events == [
        MessageStart(model="gpt-6.1-sol-2026", provider_message_id="resp_1"),
        ThinkingDelta(index=0, text="I "),
        ThinkingDelta(index=0, text="think."),
        TextDelta(index=1, text="Hé "),
        TextDelta(index=1, text="🙂"),
        ToolCallStart(index=2, id="call_a", name="look"),
        ToolCallDelta(index=2, json='{"x"'),
        ToolCallDelta(index=2, json=": 1}"),
        ToolCallEnd(index=2, input={"x": 1}),
        ToolCallStart(index=3, id="call_b", name="count"),
        ToolCallDelta(index=3, json="{}"),
        ToolCallEnd(index=3),
        UsageUpdate(usage=usage),
        end,
    ]
    assert (usage.input_tokens, usage.cache_read_tokens, usage.cache_write_tokens) == (2572, 2048, 100)
    assert (usage.output_tokens, usage.reasoning_tokens, usage.raw) == (40, 25, USAGE)
    assert (end.stop, end.native_stop) == (Stop.TOOL_USE, "completed")


async def test_output_items_are_kept_to_the_byte_and_sent_back_to_the_byte() -> None:
    strange = '{"type":"reasoning", "id":"rs_1" ,"encrypted_content":"g\\u0041==","summary":[],"new":1.0e2}'
    said = (
        '{"id":"msg_1","type":"message","role":"assistant","content":[{"type":"output_text","text":"a\\/b"}]}'
    )
    frames = [
        f'data: {{"type":"response.output_item.done","output_index":{index},"item":{item}}}\n\n'
        for index, item in ((1, said), (0, strange))
    ]
    kept = end_of(await events_of(created(), *frames, ended())).native
    assert kept is not None
    assert kept.body.decode() == f"[{strange},{said}]"
    assert (kept.api, kept.model) == ("openai_responses", MODEL)
    async with ModelServer() as server:
        server.enqueue(Answer(chunks=[sse(created(), ended())]))
        provider = OpenAIResponses(api_key=KEY, base_url=server.base_url)
        asked = request(message("user", text("q")), message("assistant", text("a/b"), native=kept))
        async for _ in provider.stream(asked):
            pass
        await provider.aclose()
        assert f"{strange},{said}".encode() in server.requests[0].body


async def test_arguments_that_come_only_when_they_are_done_are_streamed_then() -> None:
    whole = '{"x": 1}'
    for frames in (
        [event("function_call_arguments.done", output_index=0, arguments=whole), done(0, CALL_A)],
        [done(0, CALL_A)],
        [delta("function_call_arguments", 0, '{"x"'), done(0, CALL_A)],
    ):
        events = await events_of(created(), added(0, CALL_A | {"arguments": ""}), *frames, ended())
        assert "".join(got.json for got in events if isinstance(got, ToolCallDelta)) == whole
        assert calls_of(events) == [ToolCallEnd(index=0, input={"x": 1})]


async def test_items_that_come_only_with_the_end_are_not_lost() -> None:
    events = await events_of(ended(output=[REASONING, SAID, CALL_A]))
    assert text_of(events) == "Hé 🙂"
    assert [got.text for got in events if isinstance(got, ThinkingDelta)] == ["I think."]
    assert calls_of(events) == [ToolCallEnd(index=2, input={"x": 1})]
    kept = end_of(events).native
    assert kept is not None
    assert json.loads(kept.body) == [REASONING, SAID, CALL_A]


async def test_items_are_not_told_twice_by_the_end() -> None:
    events = await events_of(
        created(),
        delta("output_text", 0, "Hé 🙂", content_index=0),
        done(0, SAID),
        done(1, CALL_A),
        ended(output=[SAID, CALL_A]),
    )
    assert text_of(events) == "Hé 🙂"
    assert len(calls_of(events)) == 1


async def test_items_without_a_position_are_known_by_their_ids() -> None:
    def bare(kind: str, item: dict[str, Any]) -> dict[str, Any]:
        return event(f"output_item.{kind}", item=item)

    pieces = [event("function_call_arguments.delta", item_id="fc_1", delta=part) for part in ('{"x"', ": 1}")]
    events = await events_of(
        created(),
        bare("done", SAID),
        bare("added", CALL_A | {"arguments": ""}),
        *pieces,
        bare("done", CALL_A),
        ended(output=[SAID, CALL_A]),
    )
    assert text_of(events) == "Hé 🙂"
    assert calls_of(events) == [ToolCallEnd(index=1, input={"x": 1})]
    kept = end_of(events).native
    assert kept is not None
    assert json.loads(kept.body) == [SAID, CALL_A]


async def test_a_whole_document_in_place_of_a_stream_is_one_answer() -> None:
    """P-18."""
    document = {"id": "r", "status": "completed", "error": None, "output": [SAID], "usage": USAGE}
    events, _, failure = await play(json_answer(document))
    assert failure is None
    assert text_of(events) == "Hé 🙂"
    assert end_of(events).stop is Stop.END_TURN


async def test_a_byte_order_mark_and_empty_frames_are_passed_over() -> None:
    """SSE-18."""
    events = await events_of("\ufeff", created(), "data:\n\n", ": hb\n\n", done(0, SAID), ended())
    assert isinstance(events[0], MessageStart)
    assert text_of(events) == "Hé 🙂"


async def test_escaped_halves_of_a_surrogate_pair_do_not_break_the_stream_or_the_next_request() -> None:
    """H-07."""
    frame = 'data: {"type":"response.output_text.delta","output_index":0,"content_index":0,"delta":"%s"}\n\n'
    item = json.dumps(SAID | {"content": [{"type": "output_text", "text": "hi \ud83d"}]})
    finished = f'data: {{"type":"response.output_item.done","output_index":0,"item":{item}}}\n\n'
    events = await events_of(created(), frame % r"hi \ud83d", finished, ended())
    assert text_of(events) == "hi \ud83d"
    body = await sent_for(request(message("assistant", text("hi \ufffd"), native=end_of(events).native)))
    assert body["input"][0]["content"][0]["text"] == "hi \ufffd"


# -- what counts as complete ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "frames",
    [
        pytest.param([created(), delta("output_text", 0, "Hel", content_index=0)], id="text"),
        pytest.param([created(), added(0, CALL_A | {"arguments": ""})], id="call"),
        pytest.param([created(), done(0, SAID)], id="done item"),
        pytest.param([created(), "data: [DONE]\n\n"], id="done marker"),
        pytest.param([], id="nothing"),
    ],
)
@pytest.mark.parametrize("end", ["close", "cut", "reset"])
async def test_an_end_without_a_terminal_event_is_truncation(frames: list[Any], end: Any) -> None:
    """P-03."""
    events, _, failure = await play(Answer(chunks=[sse(*frames)], end=end))
    assert type(failure) is StreamTruncated
    assert not any(isinstance(got, MessageEnd) for got in events)


@pytest.mark.parametrize(
    "cut",
    [
        pytest.param([], id="never done"),
        pytest.param(
            [done(1, CALL_B | {"arguments": '{"pa', "status": "incomplete"})], id="done as incomplete"
        ),
        pytest.param(
            [done(1, CALL_B | {"arguments": '{"pa', "status": "completed"})], id="done as if complete"
        ),
        pytest.param([done(1, CALL_B | {"status": "incomplete"})], id="incomplete, though it reads well"),
        pytest.param([done(1, CALL_B | {"arguments": "", "status": "completed"})], id="nothing of it"),
    ],
)
async def test_the_output_limit_ends_only_whole_calls_and_keeps_no_half_one(cut: list[Any]) -> None:
    """P-06."""
    events = await events_of(
        created(),
        done(0, CALL_A),
        added(1, CALL_B | {"arguments": ""}),
        *cut,
        ended("incomplete", incomplete_details={"reason": "max_output_tokens"}),
    )
    assert calls_of(events) == [ToolCallEnd(index=0, input={"x": 1})]
    end = end_of(events)
    assert (end.stop, end.native_stop) == (Stop.MAX_TOKENS, "max_output_tokens")
    assert end.native is not None
    assert json.loads(end.native.body) == [CALL_A]


@pytest.mark.parametrize(
    ("reason", "stop"),
    [("content_filter", Stop.REFUSAL), ("steered", Stop.UNKNOWN), (None, Stop.UNKNOWN)],
)
async def test_incomplete_answers_say_why(reason: str | None, stop: Stop) -> None:
    events = await events_of(created(), ended("incomplete", incomplete_details={"reason": reason}))
    assert (end_of(events).stop, end_of(events).native_stop) == (stop, reason or "incomplete")


async def test_a_refusal_is_shown_and_named() -> None:
    part = {"type": "refusal", "refusal": "I will not."}
    events = await events_of(
        created(),
        delta("refusal", 0, "I will ", content_index=0),
        done(0, SAID | {"content": [part]}),
        ended(),
    )
    assert text_of(events) == "I will not."
    assert end_of(events).stop is Stop.REFUSAL


@pytest.mark.parametrize("arguments", ["", " ", "null", "{}", None])
async def test_a_call_without_arguments_has_an_empty_input(arguments: str | None) -> None:
    """P-08."""
    events = await events_of(created(), done(0, CALL_A | {"arguments": arguments}), ended())
    assert calls_of(events) == [ToolCallEnd(index=0)]
    assert end_of(events).stop is Stop.TOOL_USE


@pytest.mark.parametrize("arguments", ['{"a": tru]', "[1,2]", '{"a":1}{"a":2}', "{'a':1}"])
async def test_unreadable_arguments_reach_the_loop_as_an_error_and_are_replayed_as_valid_json(
    arguments: str,
) -> None:
    """P-09."""
    events = await events_of(
        created(), done(0, REASONING), done(1, CALL_A | {"arguments": arguments}), ended()
    )
    (call,) = calls_of(events)
    assert call.input_error
    assert call.input_raw == arguments
    use = ToolUseBlock(id="call_a", name="look", input_error=call.input_error, input_raw=arguments)
    body = await sent_for(request(message("assistant", use, native=end_of(events).native)))
    assert [item.get("arguments") for item in body["input"]] == [None, "{}"]


# -- errors -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("frame", "kind"),
    [
        (event("failed", response={"error": {"code": "server_error", "message": "x"}}), ServerFailed),
        (event("failed", response={"error": {"code": "rate_limit_exceeded", "message": "x"}}), RateLimited),
        (event("failed", response={"error": {"code": "invalid_prompt", "message": "x"}}), RequestRejected),
        (event("failed", response={"error": {"code": "invalid_base64_image"}}), RequestRejected),
        (event("failed", response={"error": {"code": "bio_policy", "message": "x"}}), RequestRejected),
        (event("failed", response={}), ServerFailed),
        ({"type": "error", "code": "server_is_overloaded", "message": "x", "param": None}, Overloaded),
        ({"type": "error", "code": "context_length_exceeded", "message": "x"}, ContextTooLong),
        ({"type": "error", "error": {"type": "insufficient_quota", "message": "x"}}, QuotaExceeded),
        ({"type": "error", "error": {"code": "rate_limit_exceeded", "message": "x"}}, RateLimited),
        ('event: error\ndata: {"message":"overloaded"}\n\n', ServerFailed),
        ("<html><body>502 Bad Gateway</body></html>", BadPayload),
        ('{"id":"r","status":"failed","error":{"code":"server_error","message":"x"}}', ServerFailed),
        ('{"hello":"world"}', BadPayload),
        ("data: {half\n\n", BadPayload),
    ],
)
async def test_errors_in_the_stream_have_classes(frame: Any, kind: type[ProviderError]) -> None:
    """P-18."""
    for before in ([], [created(), delta("output_text", 0, "a", content_index=0)]):
        if before and isinstance(frame, str) and not frame.startswith(("data", "event")):
            continue  # a page or a document comes alone
        events, _, failure = await play(Answer(chunks=[sse(*before, frame)]))
        assert type(failure) is kind
        assert text_of(events) == ("a" if before else "")
        assert not any(isinstance(got, MessageEnd) for got in events)


async def test_usage_of_a_failed_answer_is_passed_on() -> None:
    answer = Answer(chunks=[sse(ended("failed", error={"code": "server_error", "message": "x"}))])
    events, _, failure = await play(answer)
    assert isinstance(failure, ServerFailed)
    assert [got.usage.output_tokens for got in events if isinstance(got, UsageUpdate)] == [40]


@pytest.mark.parametrize(
    ("status", "error", "kind"),
    [
        (400, {"message": "x", "code": "context_length_exceeded"}, ContextTooLong),
        (401, {"message": f"Incorrect API key: {KEY}"}, AuthRefused),
        (429, {"message": "x", "code": "insufficient_quota"}, QuotaExceeded),
        (429, {"message": "x", "code": "rate_limit_exceeded"}, RateLimited),
        (500, {"message": "x"}, ServerFailed),
    ],
)
async def test_error_statuses_have_classes_and_tell_no_key(
    status: int, error: dict[str, Any], kind: type[ProviderError]
) -> None:
    """P-15: `play` asserts that one request was sent."""
    answer = json_answer({"error": error}, status=status, headers={"retry-after-ms": "1500"})
    _, _, failure = await play(answer)
    assert type(failure) is kind
    assert (failure.status, failure.retry_after_s) == (status, 1.5)
    assert KEY not in str(failure)


async def test_silence_within_an_answer_times_out() -> None:
    _, _, failure = await play(Answer(chunks=[sse(created())], end="hang"), idle_timeout_s=0.5)
    assert type(failure) is RequestTimedOut


async def test_closing_the_iterator_early_aborts_the_request() -> None:
    async with ModelServer() as server:
        answer = Answer(chunks=[sse(created())], end="hang")
        server.enqueue(answer)
        provider = OpenAIResponses(api_key=KEY, base_url=server.base_url)
        async with aclosing(provider.stream(request())) as events:
            await anext(events)
        async with asyncio.timeout(30):
            await answer.client_gone.wait()
        await provider.aclose()
        await provider.aclose()


async def test_cancelling_the_reader_aborts_the_request() -> None:
    async with ModelServer() as server:
        answer = Answer(chunks=[sse(created())], end="hang")
        server.enqueue(answer)
        provider = OpenAIResponses(api_key=KEY, base_url=server.base_url)
        has_started = asyncio.Event()

        async def read() -> None:
            async with aclosing(provider.stream(request())) as events:
                async for _ in events:
                    has_started.set()

        async with asyncio.timeout(30):
            reader = asyncio.create_task(read())
            await has_started.wait()
            reader.cancel()
            await asyncio.wait([reader])
            await answer.client_gone.wait()
        assert reader.cancelled()
        await provider.aclose()


# -- what is sent -----------------------------------------------------------------------------------------

USE_A = ToolUseBlock(id="call_a", name="look", input={"x": 1})
RESULT_A = ToolResultBlock(tool_use_id="call_a", content=(text("seen"),))


async def test_the_request_is_stateless_and_asks_for_encrypted_reasoning() -> None:
    body = await sent_for(
        request(
            system="Be terse.",
            tools=(LOOK,),
            cache_key="sess_1",
            end_user_id="u",
            max_output_tokens=10**9,
            think_effort=1.0,
            extra_body={"service_tier": "flex"},
        )
    )
    assert body.pop("safety_identifier") not in ("", "u")
    assert body == {
        "model": MODEL,
        "instructions": "Be terse.",
        "input": [{"role": "user", "content": [{"type": "input_text", "text": "hello"}]}],
        "stream": True,
        "store": False,
        "stream_options": {"include_obfuscation": False},
        "tools": [
            {
                "type": "function",
                "name": "look",
                "description": "Looks.",
                "parameters": {"type": "object"},
                "strict": False,
            }
        ],
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "include": ["reasoning.encrypted_content"],
        "reasoning": {"effort": "max", "summary": "auto"},
        "max_output_tokens": 128_000,
        "prompt_cache_key": "sess_1",
        "service_tier": "flex",
    }


@pytest.mark.parametrize(
    ("model", "effort", "reasoning"),
    [
        ("gpt-4.1", 1.0, None),
        ("llama-9", 0.5, None),
        ("gpt-6-astra", 0.0, {"effort": "low", "summary": "auto"}),
        ("gpt-6-sol", 0.0, {"effort": "none"}),
        ("gpt-6-sol-2026-10-01", 0.01, {"effort": "low", "summary": "auto"}),
        ("gpt-5.4", 0.5, {"effort": "medium", "summary": "auto"}),
        ("gpt-5.4", 1.0, {"effort": "xhigh", "summary": "auto"}),
        ("gpt-5.5-pro", 0.0, {"effort": "medium", "summary": "auto"}),
        ("gpt-5-mini", 0.0, {"effort": "minimal", "summary": "auto"}),
        ("o3", 0.9, {"effort": "high", "summary": "auto"}),
        ("gpt-6.2-astra", 0.75, {"effort": "high", "summary": "auto"}),
        ("gpt-6-sol", None, {"summary": "auto"}),
    ],
)
async def test_effort_is_one_that_the_model_accepts(
    model: str, effort: float | None, reasoning: dict[str, Any] | None
) -> None:
    body = await sent_for(request(model=model, think_effort=effort))
    assert body.get("reasoning") == reasoning
    assert ("include" in body) is (reasoning is not None)


async def test_the_summary_can_be_left_out() -> None:
    assert "reasoning" not in await sent_for(request(), reasoning_summary=None)


@pytest.mark.parametrize(
    ("choice", "sent"),
    [
        (ToolChoice(type="any"), "required"),
        (ToolChoice(type="none", parallel=False), "none"),
        (ToolChoice(type="tool", name="look"), {"type": "function", "name": "look"}),
    ],
)
async def test_tool_choice_is_sent(choice: ToolChoice, sent: Any) -> None:
    body = await sent_for(request(tools=(LOOK,), tool_choice=choice))
    assert (body["tool_choice"], body["parallel_tool_calls"]) == (sent, choice.parallel)


async def test_foreign_messages_are_written_anew_without_their_thinking() -> None:
    image = ImageBlock(source=Base64Source(media_type="image/png", data="AAAA"))
    sent_image = {"type": "input_image", "image_url": "data:image/png;base64,AAAA", "detail": "auto"}
    foreign = NativeBlocks(api="anthropic_messages", model=MODEL, body=b'[{"type":"thinking"}]')
    body = await sent_for(
        request(
            message("user", text("q"), ImageBlock(source=UrlSource(url="https://x.test/i.png"))),
            message("assistant", ThinkingBlock(thinking="hm"), USE_A, text("I look."), native=foreign),
            message("system", text("be brief")),
            message("tool", ToolResultBlock(tool_use_id="call_a", content=(text("seen"), image))),
        )
    )
    assert body["input"] == [
        {
            "role": "user",
            "content": [
                {"type": "input_text", "text": "q"},
                {"type": "input_image", "image_url": "https://x.test/i.png", "detail": "auto"},
            ],
        },
        {"role": "assistant", "content": "I look."},
        {"type": "function_call", "call_id": "call_a", "name": "look", "arguments": '{"x":1}'},
        {
            "type": "function_call_output",
            "call_id": "call_a",
            "output": [{"type": "input_text", "text": "seen"}, sent_image],
        },
        {"role": "system", "content": "be brief"},
    ]


async def test_empty_messages_are_not_sent() -> None:
    """H-04."""
    body = await sent_for(
        request(
            message("user", text("q1")),
            message("assistant"),
            message("assistant", text("\n\n")),
            message("assistant", ThinkingBlock(thinking="hm"), native=native(REASONING)),
            message("assistant", text(""), native=native(SAID | {"content": []})),
            message("user", text(" ")),
            message("assistant", USE_A),
            message("tool", ToolResultBlock(tool_use_id="call_a")),
        )
    )
    assert [item.get("type", item.get("role")) for item in body["input"]] == [
        "user",
        "function_call",
        "function_call_output",
    ]
    assert body["input"][-1]["output"] == "(no output)"


def without_id(item: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in item.items() if key != "id"}


async def sent_items(kept: NativeBlocks, *blocks: Block) -> Any:
    asked = request(
        message("user", text("q")), message("assistant", *blocks, native=kept), message("tool", RESULT_A)
    )
    return (await sent_for(asked))["input"][1:]


OUTPUT_A = {"type": "function_call_output", "call_id": "call_a", "output": "seen"}


async def test_native_items_go_back_in_order_and_unchanged() -> None:
    sent = await sent_items(native(REASONING, SAID, CALL_A), text("Hé 🙂"), USE_A)
    assert sent == [REASONING, SAID, CALL_A, OUTPUT_A]


async def test_reasoning_without_its_content_is_left_out_and_its_followers_lose_their_ids() -> None:
    """Trap 38: an id alone is unknown to an API that stores nothing."""
    id_only = REASONING | {"encrypted_content": None}
    sent = await sent_items(native(id_only, SAID, CALL_A), text("Hé 🙂"), USE_A)
    assert sent == [without_id(SAID), without_id(CALL_A), OUTPUT_A]


async def test_reasoning_of_another_model_is_left_out() -> None:
    sent = await sent_items(native(REASONING, CALL_A, model="gpt-6-sol"), USE_A)
    assert sent == [without_id(CALL_A), OUTPUT_A]


async def test_calls_that_the_message_does_not_have_are_left_out_with_their_reasoning() -> None:
    sent = await sent_items(native(CALL_A, REASONING, CALL_B), USE_A)
    assert sent == [CALL_A, OUTPUT_A]


async def test_calls_and_text_that_the_native_items_lack_are_added() -> None:
    sent = await sent_items(native(REASONING), text("I look."), USE_A)
    assert sent == [
        {"role": "assistant", "content": "I look."},
        {"type": "function_call", "call_id": "call_a", "name": "look", "arguments": '{"x":1}'},
        OUTPUT_A,
    ]


def test_capabilities_come_from_the_table() -> None:
    provider = OpenAIResponses(api_key=KEY)
    known = provider.capabilities("gpt-4.1-mini")
    assert (known.context_window_tokens, known.max_output_tokens, known.thinking) == (
        1_000_000,
        32_768,
        False,
    )
    assert provider.capabilities("gpt-6.2-sol").thinking
