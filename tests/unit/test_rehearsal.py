import asyncio
import re
from collections.abc import AsyncGenerator
from decimal import Decimal
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest

from providers.errors import (
    ContextTooLong,
    Overloaded,
    ProviderError,
    RateLimited,
    RequestRejected,
    StreamTruncated,
)
from providers.rehearsal import Rehearsal
from providers.rehearsal_script import DIRECTIVES, ERROR_CLASSES, is_script, parse_script
from providers.types import (
    Base64Source,
    ImageBlock,
    Message,
    MessageEnd,
    MessageStart,
    NativeBlocks,
    ProviderEvent,
    ProviderRequest,
    Stop,
    TextBlock,
    TextDelta,
    ThinkingDelta,
    ToolCallDelta,
    ToolCallEnd,
    ToolCallStart,
    ToolChoice,
    ToolResultBlock,
    ToolSpec,
    ToolUseBlock,
    Usage,
    UsageUpdate,
)

CALCULATE = ToolSpec(name="calculate", description="Works out a sum.", input_schema={"type": "object"})
CURRENT_TIME = ToolSpec(name="current_time", description="Tells the time.", input_schema={"type": "object"})


def user(text: str) -> Message:
    return Message(role="user", blocks=(TextBlock(text=text),))


def calls(*names: str) -> Message:
    return Message(role="assistant", blocks=tuple(ToolUseBlock(id=f"id_{name}", name=name) for name in names))


def results(**texts: str) -> Message:
    return Message(
        role="tool",
        blocks=tuple(
            ToolResultBlock(tool_use_id=f"id_{name}", content=(TextBlock(text=text),))
            for name, text in texts.items()
        ),
    )


def asked(*messages: Message | str, model: str = "fast", **fields: Any) -> ProviderRequest:
    transcript = tuple(user(message) if isinstance(message, str) else message for message in messages)
    return ProviderRequest(model=model, messages=transcript, **fields)


async def answer(request: ProviderRequest, provider: Rehearsal | None = None) -> list[ProviderEvent]:
    return [event async for event in (provider or Rehearsal()).stream(request)]


def said(events: list[ProviderEvent]) -> str:
    return "".join(event.text for event in events if isinstance(event, TextDelta))


def thought(events: list[ProviderEvent]) -> str:
    return "".join(event.text for event in events if isinstance(event, ThinkingDelta))


def calls_of(events: list[ProviderEvent]) -> list[tuple[str, ToolCallEnd]]:
    names = {event.index: event.name for event in events if isinstance(event, ToolCallStart)}
    return [(names[event.index], event) for event in events if isinstance(event, ToolCallEnd)]


def end(events: list[ProviderEvent]) -> MessageEnd:
    assert isinstance(events[-1], MessageEnd)
    assert sum(isinstance(event, MessageEnd) for event in events) == 1
    return events[-1]


async def test_a_script_thinks_speaks_and_ends_its_turn() -> None:
    events = await answer(asked("think: Let me see.\nsay: Hello you."))
    assert isinstance(events[0], MessageStart)
    assert isinstance(events[1], UsageUpdate)
    assert thought(events) == "Let me see."
    assert said(events) == "Hello you."
    assert end(events).stop is Stop.END_TURN


async def test_text_streams_word_by_word_and_loses_no_space() -> None:
    events = await answer(asked("say:   two  spaces, and more "))
    deltas = [event.text for event in events if isinstance(event, TextDelta)]
    assert deltas == ["  two  ", "spaces, ", "and ", "more"]


async def test_indented_lines_continue_the_text_above() -> None:
    assert said(await answer(asked("say: one\n  two\n\tthree\n    four"))) == "one\ntwo\nthree\n  four"


async def test_comments_and_blank_lines_are_skipped() -> None:
    assert said(await answer(asked("\n# a greeting\n\nsay: Hi\r\n# done"))) == "Hi"


async def test_line_separators_of_unicode_stay_in_the_text() -> None:
    assert said(await answer(asked("say: a\u2028b\x0cc\x85d"))) == "a\u2028b\x0cc\x85d"


async def test_chunk_sets_the_characters_of_each_delta() -> None:
    events = await answer(asked("chunk: 3\nsay: abcdefgh\nchunk: 100\nsay: one two"))
    assert [event.text for event in events if isinstance(event, TextDelta)] == ["abc", "def", "gh", "one two"]


async def test_long_speaks_numbered_words() -> None:
    assert said(await answer(asked("long: 3"))) == "word1 word2 word3"
    assert said(await answer(asked("chunk: 4\nlong: 3"))) == "word1 word2 word3"


async def test_several_calls_of_one_step_come_in_one_message() -> None:
    events = await answer(asked('call: current_time\ncall: calculate {"expression": "1+1"}'))
    (first, empty), (second, full) = calls_of(events)
    assert (first, empty.input, second, full.input) == (
        "current_time",
        {},
        "calculate",
        {"expression": "1+1"},
    )
    ids = {event.id for event in events if isinstance(event, ToolCallStart)}
    assert len(ids) == 2
    assert end(events).stop is Stop.TOOL_USE


async def test_malformed_arguments_are_passed_on_as_they_are() -> None:
    events = await answer(asked('call: calculate {"expression": tru'))
    assert "".join(event.json for event in events if isinstance(event, ToolCallDelta)) == '{"expression": tru'
    [(_, call)] = calls_of(events)
    assert call.input == {}
    assert call.input_error
    assert call.input_raw == '{"expression": tru'


async def test_steps_follow_the_number_of_assistant_messages() -> None:
    script = "call: a\n---\ncall: b\n---\nsay: both done"
    first = asked("say: earlier prompt", calls("x"), results(x="old"), script)
    assert [name for name, _ in calls_of(await answer(first))] == ["a"]
    second = asked(script, calls("a"), results(a="A"))
    assert [name for name, _ in calls_of(await answer(second))] == ["b"]
    third = asked(script, calls("a"), results(a="A"), calls("b"), results(b="B"))
    assert said(await answer(third)) == "both done"


async def test_another_process_gives_the_same_answer() -> None:
    request = asked("think: hm\ncall: a {}\nsay: x", cache_key="sess_1")
    assert await answer(request, Rehearsal()) == await answer(request, Rehearsal())


async def test_after_the_last_step_the_tool_results_are_repeated() -> None:
    events = await answer(asked("call: a\ncall: b", calls("a", "b"), results(a="42", b="7")))
    assert said(events) == "42\n7"
    assert said(await answer(asked("say: hi", calls("a")))) == "Done."


async def test_echo_repeats_the_tool_results_within_a_step() -> None:
    script = "call: a\n---\nsay: It said:\necho"
    events = await answer(asked(script, calls("a"), results(a="42")))
    assert [(event.index, event.text) for event in events if isinstance(event, TextDelta)] == [
        (0, "It "),
        (0, "said:"),
        (1, "42"),
    ]


@pytest.mark.parametrize("code", sorted(ERROR_CLASSES))
async def test_every_error_class_can_be_rehearsed(code: str) -> None:
    with pytest.raises(ERROR_CLASSES[code]) as caught:
        await answer(asked(f"fail: {code}"))
    assert caught.value.code == code


async def test_a_failure_may_come_after_some_deltas() -> None:
    seen: list[ProviderEvent] = []
    with pytest.raises(Overloaded):
        async for event in Rehearsal().stream(
            asked("say: one two three\nfail: provider_overloaded after 2 deltas")
        ):
            seen.append(event)
    assert said(seen) == "one two "


async def test_a_failure_after_more_deltas_than_there_are_comes_at_the_end() -> None:
    seen: list[ProviderEvent] = []
    with pytest.raises(ProviderError):
        async for event in Rehearsal().stream(asked("say: one\ncall: a\nfail: provider_failed after 99")):
            seen.append(event)
    assert said(seen) == "one"
    assert len(calls_of(seen)) == 1


async def test_a_failure_carries_what_the_api_asks_to_wait() -> None:
    with pytest.raises(RateLimited) as caught:
        await answer(asked("fail: rate_limited\nretry_after: 1.5"))
    assert (caught.value.retry_after_s, caught.value.status) == (1.5, 429)


async def test_a_step_fails_as_often_as_asked_and_then_plays() -> None:
    provider = Rehearsal()
    request = asked("say: at last\nfail: provider_failed times 2", cache_key="sess_1")
    for _ in range(2):
        with pytest.raises(ProviderError):
            await answer(request, provider)
    assert said(await answer(request, provider)) == "at last"
    with pytest.raises(ProviderError):
        await answer(msgspec.structs.replace(request, cache_key="sess_2"), provider)


async def test_a_failure_counted_before_compaction_counts_after_it() -> None:
    provider = Rehearsal()
    script = "say: it fits\nfail: context_too_long times 1"
    with pytest.raises(ContextTooLong):
        await answer(asked("say: old", calls("a"), results(a="A"), script), provider)
    assert said(await answer(asked(script), provider)) == "it fits"


async def test_truncate_ends_without_a_terminal_marker() -> None:
    seen: list[ProviderEvent] = []
    with pytest.raises(StreamTruncated):
        async for event in Rehearsal().stream(asked("say: half a\ntruncate")):
            seen.append(event)
    assert said(seen) == "half a"


async def test_refuse_is_a_complete_answer_that_declines() -> None:
    events = await answer(asked("say: I would rather not.\nrefuse"))
    assert said(events) == "I would rather not."
    assert end(events).stop is Stop.REFUSAL


async def test_max_tokens_leaves_the_last_call_open() -> None:
    events = await answer(asked('call: a {}\ncall: b {"path": "x"}\nmax_tokens'))
    assert [name for name, _ in calls_of(events)] == ["a"]
    assert sum(isinstance(event, ToolCallStart) for event in events) == 2
    assert end(events).stop is Stop.MAX_TOKENS


async def test_max_tokens_may_cut_after_some_deltas() -> None:
    events = await answer(asked("say: one two three\nmax_tokens: after 2 deltas"))
    assert said(events) == "one two "
    assert end(events).stop is Stop.MAX_TOKENS


async def test_the_output_limit_of_the_request_cuts_the_answer() -> None:
    events = await answer(asked("long: 100", max_output_tokens=5))
    assert said(events) == "word1 word2 word3 "
    assert end(events).stop is Stop.MAX_TOKENS


async def test_usage_is_counted_from_the_texts() -> None:
    events = await answer(asked("think: abcd\nsay: efghi"))
    totals = [event.usage for event in events if isinstance(event, UsageUpdate)]
    assert (totals[0].input_tokens, totals[0].output_tokens) == (6, 0)
    assert (totals[-1].output_tokens, totals[-1].reasoning_tokens) == (3, 1)


async def test_usage_can_be_scripted() -> None:
    events = await answer(
        asked("usage: in=2572 out=40 cache_read=2048 cache_write=512 reasoning=25 cost=0.01")
    )
    assert [event.usage for event in events if isinstance(event, UsageUpdate)][-1] == Usage(
        input_tokens=2572,
        output_tokens=40,
        cache_read_tokens=2048,
        cache_write_tokens=512,
        reasoning_tokens=25,
        cost_usd=Decimal("0.01"),
    )
    events = await answer(asked("say: hi\nusage: none"))
    assert [event.usage for event in events if isinstance(event, UsageUpdate)][-1] == Usage()


async def test_native_blocks_are_passed_on_to_the_byte() -> None:
    events = await answer(asked('say: hi\nnative: [ {"signature": "s"} ]'))
    assert end(events).native == NativeBlocks(api="rehearsal", model="fast", body=b'[ {"signature": "s"} ]')


async def test_hang_never_answers_and_can_be_cancelled() -> None:
    task = asyncio.ensure_future(answer(asked("hang")))
    done, _ = await asyncio.wait({task}, timeout=0.05)
    assert not done
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_closing_the_stream_early_stops_it() -> None:
    stream = cast(AsyncGenerator[ProviderEvent, None], Rehearsal().stream(asked("pace: 60000\nlong: 5")))
    assert isinstance(await anext(stream), MessageStart)
    await stream.aclose()
    with pytest.raises(StopAsyncIteration):
        await anext(stream)


async def test_a_long_answer_without_pace_lets_others_run() -> None:
    async def count() -> int:
        turns = 0
        while not playing.done():
            await asyncio.sleep(0)
            turns += 1
        return turns

    playing = asyncio.ensure_future(answer(asked("long: 3200")))
    assert await count() >= 100


@pytest.mark.parametrize(
    ("script", "named"),
    [
        ("say: hi\nsing: la", "line 2"),
        ("fail: nonsense", "rate_limited"),
        ("fail: rate_limited after some", "after N deltas"),
        ("pace: fast", "a number from 0 to"),
        ("chunk: 0", "whole number from 1"),
        ("long: 1.5", "whole number"),
        ("wait: nan", "a number"),
        ("call:", "name of a tool"),
        ("usage: in=x", "in=120"),
        ("hang: please", "after N deltas"),
        ("echo: x", "nothing"),
        ("native: {}", "JSON array"),
    ],
)
async def test_a_line_that_cannot_be_read_is_refused_by_name(script: str, named: str) -> None:
    with pytest.raises(RequestRejected, match=r"rehearsal script, line \d") as caught:
        await answer(asked(script))
    assert named in caught.value.message


async def test_prose_that_quotes_a_script_is_prose() -> None:
    events = await answer(asked("Summarise this conversation:\nsay: hello\nfail: rate_limited"))
    assert "rehearsal model" in said(events)


async def test_the_demo_calls_the_offered_tools_that_fit_and_tells_their_results() -> None:
    prompt = "What is 12 * (3 + 4)? And what time is it in Europe/Berlin?"
    first = await answer(asked(prompt, tools=(CALCULATE, CURRENT_TIME)))
    assert thought(first)
    assert [(name, call.input) for name, call in calls_of(first)] == [
        ("calculate", {"expression": "12 * (3 + 4)"}),
        ("current_time", {"timezone": "Europe/Berlin"}),
    ]
    then = await answer(
        asked(prompt, calls("calculate", "current_time"), results(calculate="84", current_time="noon"))
    )
    assert said(then) == "The result is 84.\nIt is noon."


@pytest.mark.parametrize(
    ("prompt", "expression"),
    [
        ("what is 2+2?", "2+2"),
        ("Compute (1 + 2) * 3 - 4.", "(1 + 2) * 3 - 4"),
        ("What's 3.5 × 2 ÷ 7?", "3.5 * 2 / 7"),
        ("2**10", "2**10"),
        ("how much is 10 / 4, please", "10 / 4"),
        ("((2+3)*4)", "((2+3)*4)"),
    ],
)
async def test_the_demo_finds_the_sum_in_a_sentence(prompt: str, expression: str) -> None:
    [(_, call)] = calls_of(await answer(asked(prompt, tools=(CALCULATE,))))
    assert call.input == {"expression": expression}


@pytest.mark.parametrize("prompt", ["I have 3 cats.", "Call me at 5pm", "version 1.2.3", "Hello!"])
async def test_the_demo_calls_nothing_without_a_sum(prompt: str) -> None:
    assert calls_of(await answer(asked(prompt, tools=(CALCULATE,)))) == []


async def test_the_demo_obeys_the_tool_choice() -> None:
    request = asked("2+2 and the time", tools=(CALCULATE, CURRENT_TIME), tool_choice=ToolChoice(type="none"))
    assert calls_of(await answer(request)) == []
    one_by_one = msgspec.structs.replace(request, tool_choice=ToolChoice(parallel=False))
    assert len(calls_of(await answer(one_by_one))) == 1


async def test_the_demo_does_not_think_when_thinking_is_off() -> None:
    assert thought(await answer(asked("Hello", think_effort=0))) == ""


async def test_the_demo_answers_a_prompt_without_text() -> None:
    image = ImageBlock(source=Base64Source(media_type="image/png", data="iVBORw0KGgo="))
    events = await answer(asked(Message(role="user", blocks=(image,))))
    assert "1 image" in said(events)
    assert said(await answer(asked()))


async def test_the_demo_takes_its_time_only_where_a_human_reads() -> None:
    async def is_done_without_waiting(model: str) -> bool:
        playing = asyncio.ensure_future(answer(asked("Hi", model=model)))
        for _ in range(20):
            await asyncio.sleep(0)
        done = playing.done()
        playing.cancel()
        await asyncio.wait({playing})
        return done

    assert await is_done_without_waiting("fast")
    assert not await is_done_without_waiting("demo")


async def test_small_refuses_what_does_not_fit_its_window() -> None:
    assert Rehearsal().capabilities("small").context_window_tokens == 4_000
    fits = "say: " + "x" * 15_990
    assert end(await answer(asked(fits, model="small"))).stop is Stop.END_TURN
    with pytest.raises(ContextTooLong):
        await answer(asked(fits + "xxxxxxxx", model="small"))


async def test_no_tools_refuses_tools() -> None:
    assert not Rehearsal().capabilities("no-tools").tools
    with pytest.raises(RequestRejected):
        await answer(asked("hi", model="no-tools", tools=(CALCULATE,)))


DOCUMENT = (Path(__file__).parents[2] / "docs" / "rehearsal.md").read_text()


@pytest.mark.parametrize("script", re.findall(r"```text\n(.*?)```", DOCUMENT, re.DOTALL))
def test_every_documented_script_can_be_read(script: str) -> None:
    assert is_script(script)
    assert parse_script(script)


def test_every_directive_and_every_error_code_is_documented() -> None:
    for name in (*DIRECTIVES, *ERROR_CLASSES):
        assert f"`{name}" in DOCUMENT, name
