"""Answers of the Anthropic API, as byte streams through the vendor's real SDK."""

import asyncio
import json

import pytest

from providers.errors import (
    BadPayload,
    StreamTruncated,
)
from providers.types import (
    MessageEnd,
    MessageStart,
    ProviderEvent,
    Stop,
    TextDelta,
    ThinkingDelta,
    ToolCallDelta,
    ToolCallEnd,
    ToolCallStart,
    UsageUpdate,
)
from tests.support.anthropic_script import (
    DONE,
    REQUEST,
    api,
    block,
    call,
    calls_of,
    collect,
    delta,
    end_of,
    ended,
    fail,
    last_usage,
    native_of,
    play,
    start,
    stop,
    text,
)
from tests.support.model_server import Answer, split_every, sse

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


async def test_an_answer_that_pauses_is_asked_to_go_on_and_stays_one_answer() -> None:
    """Trap 41: a pause is no end, and nothing may follow what there is of the answer."""
    search = {"type": "server_tool_use", "id": "srv_1", "name": "web_search", "input": {"query": "q"}}
    first = [start(input_tokens=10, output_tokens=1), block(0, **search), stop(0)]
    paused = ended("pause_turn", output_tokens=5, server_tool_use={"web_search_requests": 1})
    second = [start(input_tokens=30, output_tokens=1), *text(0, "Found."), ended("end_turn", output_tokens=7)]
    async with api() as (server, provider):
        server.enqueue(
            Answer(chunks=[sse(*first, paused, DONE)]),
            Answer(chunks=[sse(start(input_tokens=20), *text(0, "Wait. "), ended("pause_turn"), DONE)]),
            Answer(chunks=[sse(*second, DONE)]),
        )
        events = await collect(provider)
        asked = [request.body_json for request in server.requests]
    assert [type(event) for event in events].count(MessageStart) == 1
    assert [event.text for event in events if isinstance(event, TextDelta)] == ["Wait. ", "Found."]
    assert [event.index for event in events if isinstance(event, TextDelta)] == [1, 2]
    assert end_of(events).stop is Stop.END_TURN
    assert [block["type"] for block in native_of(events)] == ["server_tool_use", "text", "text"]
    assert asked[1]["messages"] == [*asked[0]["messages"], {"role": "assistant", "content": [search]}]
    assert asked[2]["messages"][-1]["content"] == [search, {"type": "text", "text": "Wait. "}]
    assert {key: asked[2][key] for key in asked[0] if key != "messages"} == {
        key: value for key, value in asked[0].items() if key != "messages"
    }
    usage = [event.usage for event in events if isinstance(event, UsageUpdate)][-1]
    assert (usage.input_tokens, usage.output_tokens) == (60, 5 + 9 + 7)
    assert usage.raw["server_tool_use"] == {"web_search_requests": 1}


async def test_an_answer_that_pauses_for_ever_ends_as_paused() -> None:
    async with api() as (server, provider):
        server.enqueue(
            *(Answer(chunks=[sse(start(), *text(0, "…"), ended("pause_turn"), DONE)]) for _ in range(7))
        )
        assert end_of(await collect(provider)).stop is Stop.PAUSE
        assert server.answers_left == 0


async def test_indexes_with_gaps_are_only_an_order() -> None:
    """Trap 28: the SDK's own assembly ends in an IndexError."""
    events = await play(start(), *text(4, "a"), *text(9, "b"), ended("end_turn"), DONE)
    assert [(event.index, event.text) for event in events if isinstance(event, TextDelta)] == [
        (0, "a"),
        (1, "b"),
    ]
