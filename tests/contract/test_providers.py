"""What every provider promises, played on each adapter's own wire by `tests.support.provider_stages`."""

import asyncio
from base64 import b64encode
from collections.abc import AsyncGenerator
from typing import cast

import pytest
from msgspec.structs import replace

from providers.errors import Overloaded, ProviderError, StreamTruncated
from providers.rehearsal_script import ERROR_CLASSES
from providers.types import (
    Base64Source,
    ImageBlock,
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
from tests.support.provider_stages import (
    CACHE_READ_TOKENS,
    INPUT_TOKENS,
    KEY,
    OUTPUT_TOKENS,
    REASONING_TOKENS,
    RETRY_AFTER_S,
    STAGES,
    Performance,
    Scene,
    Stage,
)

on_every_stage = pytest.mark.parametrize("stage", STAGES, ids=lambda stage: stage.name)
FAILURES = [
    pytest.param(stage, code, id=f"{stage.name}-{code}")
    for stage in STAGES
    for code in sorted(stage.failures)
]
EARLY_ENDS = [
    pytest.param(stage, stop, id=f"{stage.name}-{stop}") for stage in STAGES for stop in sorted(stage.stops)
]


async def collect(performance: Performance) -> list[ProviderEvent]:
    return [event async for event in performance.provider.stream(performance.request)]


async def play(stage: Stage, scene: Scene) -> list[ProviderEvent]:
    async with stage.play(scene) as performance:
        events = await collect(performance)
    assert_in_order(events)
    assert isinstance(events[-1], MessageEnd)
    return events


async def play_until_it_breaks(stage: Stage, scene: Scene) -> tuple[list[ProviderEvent], ProviderError]:
    events: list[ProviderEvent] = []
    async with stage.play(scene) as performance:
        with pytest.raises(ProviderError) as caught:
            async for event in performance.provider.stream(performance.request):
                events.append(event)
    assert_in_order(events)
    assert not any(isinstance(event, MessageEnd) for event in events)
    return events, caught.value


def assert_in_order(events: list[ProviderEvent]) -> None:
    """A message starts once and ends once and last; each block has one kind, each call one start and end."""
    kinds: dict[int, str] = {}
    ended: set[int] = set()
    assert isinstance(events[0], MessageStart)
    assert sum(isinstance(event, MessageStart) for event in events) == 1
    assert all(not isinstance(event, MessageEnd) for event in events[:-1])
    for event in events:
        match event:
            case TextDelta() | ThinkingDelta():
                assert event.text
                assert kinds.setdefault(event.index, type(event).__name__) == type(event).__name__
            case ToolCallStart():
                assert event.index not in kinds
                assert event.id
                kinds[event.index] = "call"
            case ToolCallDelta() | ToolCallEnd():
                assert kinds[event.index] == "call"
                assert event.index not in ended
                if isinstance(event, ToolCallEnd):
                    ended.add(event.index)
                else:
                    assert event.json
    assert list(kinds) == sorted(kinds)


def said(events: list[ProviderEvent]) -> str:
    return "".join(event.text for event in events if isinstance(event, TextDelta))


def thought(events: list[ProviderEvent]) -> str:
    return "".join(event.text for event in events if isinstance(event, ThinkingDelta))


def stop_of(events: list[ProviderEvent]) -> Stop:
    end = events[-1]
    assert isinstance(end, MessageEnd)
    return end.stop


def calls_of(events: list[ProviderEvent]) -> list[tuple[str, ToolCallEnd]]:
    names = {event.index: event.name for event in events if isinstance(event, ToolCallStart)}
    return [(names[event.index], event) for event in events if isinstance(event, ToolCallEnd)]


@on_every_stage
async def test_text_arrives_in_order_and_whole(stage: Stage) -> None:
    events = await play(stage, Scene(text=("Hé, 🙂 w", "orld 修复")))
    assert said(events) == "Hé, 🙂 world 修复"
    assert sum(isinstance(event, TextDelta) for event in events) >= 2
    assert stop_of(events) is Stop.END_TURN


@on_every_stage
async def test_thinking_is_told_apart_from_text_and_comes_before_it(stage: Stage) -> None:
    events = await play(stage, Scene(thinking="Let me see.", text=("So.",)))
    assert (thought(events), said(events)) == ("Let me see.", "So.")
    content = [type(event) for event in events if isinstance(event, TextDelta | ThinkingDelta)]
    assert content == sorted(content, key=lambda kind: kind is TextDelta)


@on_every_stage
async def test_a_call_comes_with_its_arguments_and_stops_for_the_result(stage: Stage) -> None:
    events = await play(
        stage, Scene(text=("Looking",), calls=(("look", '{"x": [1, "修"]}'),), stop=Stop.TOOL_USE)
    )
    [(name, call)] = calls_of(events)
    assert (name, call.input, call.input_error) == ("look", {"x": [1, "修"]}, None)
    assert "".join(event.json for event in events if isinstance(event, ToolCallDelta)) == '{"x": [1, "修"]}'
    assert said(events) == "Looking"
    assert stop_of(events) is Stop.TOOL_USE


@on_every_stage
async def test_two_calls_of_one_message_keep_their_order_and_have_their_own_ids(stage: Stage) -> None:
    scene = Scene(calls=(("count", '{"n": 1}'), ("look", '{"n": 2}')), stop=Stop.TOOL_USE)
    events = await play(stage, scene)
    assert [(name, call.input) for name, call in calls_of(events)] == [
        ("count", {"n": 1}),
        ("look", {"n": 2}),
    ]
    assert len({event.id for event in events if isinstance(event, ToolCallStart)}) == 2
    assert stop_of(events) is Stop.TOOL_USE


@on_every_stage
async def test_a_call_without_arguments_has_empty_ones(stage: Stage) -> None:
    [(_, call)] = calls_of(await play(stage, Scene(calls=(("look", ""),), stop=Stop.TOOL_USE)))
    assert (call.input, call.input_error) == ({}, None)


@on_every_stage
@pytest.mark.parametrize("arguments", ["[1, 2]", '{"x": tru]', '"text"'])
async def test_arguments_that_are_no_object_are_told_and_do_not_end_the_stream(
    stage: Stage, arguments: str
) -> None:
    events = await play(stage, Scene(calls=(("look", arguments),), stop=Stop.TOOL_USE))
    [(_, call)] = calls_of(events)
    assert call.input == {}
    assert call.input_error
    assert call.input_raw == arguments


@on_every_stage
async def test_a_tool_that_nobody_offered_is_called_by_the_name_that_the_model_gave_it(stage: Stage) -> None:
    """P-10: the loop answers it with the names that exist."""
    events = await play(stage, Scene(calls=(("serch_web", '{"q": "x"}'),), stop=Stop.TOOL_USE))
    assert [(name, call.input) for name, call in calls_of(events)] == [("serch_web", {"q": "x"})]


@on_every_stage
async def test_an_image_of_the_user_reaches_the_model(stage: Stage) -> None:
    pixel = b64encode(b"a pixel of its own").decode()
    image = ImageBlock(source=Base64Source(media_type="image/png", data=pixel))
    async with stage.play(Scene(text=("Seen",))) as performance:
        [asked] = performance.request.messages
        message = replace(asked, blocks=(*asked.blocks, image))
        request = replace(performance.request, messages=(message,))
        events = [event async for event in performance.provider.stream(request)]
        assert said(events) == "Seen"
        assert all(pixel.encode() in sent.body for sent in performance.requests[-1:])


@on_every_stage
async def test_a_call_cut_by_the_output_limit_has_no_end(stage: Stage) -> None:
    scene = Scene(calls=(("look", '{"n": 1}'), ("count", '{"path": "a')), stop=Stop.MAX_TOKENS)
    events = await play(stage, scene)
    assert [name for name, _ in calls_of(events)] == ["look"]
    assert sum(isinstance(event, ToolCallStart) for event in events) == 2
    assert stop_of(events) is Stop.MAX_TOKENS


@pytest.mark.parametrize(("stage", "stop"), EARLY_ENDS)
async def test_a_text_that_ends_early_says_why(stage: Stage, stop: Stop) -> None:
    events = await play(stage, Scene(text=("I would",), stop=stop))
    assert said(events) == "I would"
    assert stop_of(events) is stop


@on_every_stage
async def test_usage_has_one_meaning(stage: Stage) -> None:
    events = await play(stage, Scene(thinking="Hm.", text=("Hi",)))
    usage = [event.usage for event in events if isinstance(event, UsageUpdate)][-1]
    cached = CACHE_READ_TOKENS if stage.counts_cache else None
    assert (usage.input_tokens, usage.cache_read_tokens) == (INPUT_TOKENS, cached)
    assert not usage.cache_write_tokens
    assert usage.output_tokens == OUTPUT_TOKENS
    assert usage.reasoning_tokens in (REASONING_TOKENS, None)


@on_every_stage
async def test_an_answer_without_its_terminal_marker_is_truncated_and_ends_no_half_call(stage: Stage) -> None:
    events, error = await play_until_it_breaks(stage, Scene(text=("Hel", "lo"), breaks="truncated"))
    assert isinstance(error, StreamTruncated)
    assert said(events) == "Hello"


@on_every_stage
async def test_an_error_in_the_middle_of_an_answer_keeps_its_category(stage: Stage) -> None:
    events, error = await play_until_it_breaks(stage, Scene(text=("Hel", "lo"), breaks="overloaded"))
    assert isinstance(error, Overloaded)
    assert error.status in (None, 200)
    assert said(events) == "Hello"


@pytest.mark.parametrize(("stage", "code"), FAILURES)
async def test_a_failure_is_told_in_our_words_before_any_content(stage: Stage, code: str) -> None:
    async with stage.fail(code) as performance:
        with pytest.raises(ProviderError) as caught:
            await collect(performance)
    assert type(caught.value) is ERROR_CLASSES[code]
    assert caught.value.message
    assert KEY not in caught.value.message
    if code == "rate_limited":
        assert caught.value.retry_after_s == RETRY_AFTER_S


def test_every_stage_plays_every_failure_that_an_api_can_report() -> None:
    reported = ERROR_CLASSES.keys() - {"stream_truncated", "provider_timeout", "unknown_model"}
    assert {stage.name: reported - stage.failures for stage in STAGES} == {
        stage.name: set() for stage in STAGES
    }


@on_every_stage
async def test_closing_a_stream_early_releases_its_connection(stage: Stage) -> None:
    async with stage.play(Scene(text=("Hel", "lo"), breaks="silence")) as performance:
        stream = cast(AsyncGenerator[ProviderEvent, None], performance.provider.stream(performance.request))
        async for event in stream:
            if isinstance(event, TextDelta):
                break
        await stream.aclose()
        await performance.until_the_connection_is_released()


@on_every_stage
async def test_cancelling_a_silent_stream_ends_it_and_releases_its_connection(stage: Stage) -> None:
    async with stage.play(Scene(text=("Hel", "lo"), breaks="silence")) as performance:
        spoken = asyncio.Event()

        async def listen() -> None:
            async for event in performance.provider.stream(performance.request):
                if isinstance(event, TextDelta):
                    spoken.set()

        listening = asyncio.ensure_future(listen())
        await spoken.wait()
        listening.cancel()
        with pytest.raises(asyncio.CancelledError):
            await listening
        await performance.until_the_connection_is_released()


@on_every_stage
async def test_one_provider_serves_many_requests_at_once(stage: Stage) -> None:
    async with stage.play(Scene(text=("One ", "two")), times=5) as performance:
        answers = await asyncio.gather(*(collect(performance) for _ in range(5)))
    assert [said(events) for events in answers] == ["One two"] * 5


@on_every_stage
async def test_capabilities_are_known_without_a_request(stage: Stage) -> None:
    async with stage.play(Scene(), times=0) as performance:
        assert performance.provider.capabilities(stage.model).tools
        assert performance.provider.api == stage.api
        await performance.provider.aclose()  # and once more when the stage closes
