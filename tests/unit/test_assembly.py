"""An answer put together from provider events, and what readers may preview of it."""

import random

import pytest

from agents.assembly import Assembly, Part
from agents.types import PreviewDelta, PreviewStart
from providers.types import (
    MessageEnd,
    MessageStart,
    ProviderEvent,
    Stop,
    TextBlock,
    TextDelta,
    ThinkingBlock,
    ThinkingDelta,
    ToolCallDelta,
    ToolCallEnd,
    ToolCallStart,
    ToolUseBlock,
    Usage,
    UsageUpdate,
)


def fed(*events: ProviderEvent) -> tuple[Assembly, list[PreviewStart | PreviewDelta]]:
    assembly = Assembly()
    return assembly, [preview for event in events for preview in assembly.feed(event)]


def shown(previews: list[PreviewStart | PreviewDelta]) -> str:
    deltas = [preview.delta for preview in previews if isinstance(preview, PreviewDelta)]
    return "".join(delta["content"]["text"] for delta in deltas if delta["type"] == "content_delta")


def texts(parts: tuple[Part, ...]) -> list[str]:
    return [part.block.text for part in parts if isinstance(part.block, TextBlock)]


def test_blocks_come_in_the_order_of_their_indexes_under_the_ids_of_their_previews() -> None:
    assembly, previews = fed(
        MessageStart(),
        ToolCallStart(index=7, id="c", name="ls"),
        TextDelta(index=3, text="Look"),
        ThinkingDelta(index=0, text="hm"),
        ToolCallEnd(index=7, input={"p": 1}),
        TextDelta(index=3, text="ing."),
        MessageEnd(stop=Stop.TOOL_USE),
    )
    parts = assembly.parts()
    assert [part.block for part in parts] == [
        ThinkingBlock(thinking="hm"),
        TextBlock(text="Looking."),
        ToolUseBlock(id="c", name="ls", input={"p": 1}),
    ]
    starts = {preview.event_id: preview.kind for preview in previews if isinstance(preview, PreviewStart)}
    assert [starts[part.event_id] for part in parts] == ["agent.thinking", "agent.message", "agent.tool_use"]


def test_a_blank_block_has_no_preview_and_no_part() -> None:
    assembly, previews = fed(TextDelta(index=0, text="\n"), TextDelta(index=0, text=" "), MessageStart())
    assert previews == []
    assert assembly.parts() == ()


def test_blanks_before_the_first_word_are_shown_with_it() -> None:
    assembly, previews = fed(TextDelta(index=0, text="\n"), TextDelta(index=0, text=" a"))
    assert shown(previews) == "\n a"
    assert texts(assembly.parts()) == ["\n a"]


@pytest.mark.parametrize("seed", range(10))
def test_what_is_shown_is_what_the_text_becomes_wherever_it_is_split(seed: int) -> None:
    """H-07: split anywhere, between the halves of a pair too; a half is never shown."""
    source = random.Random(seed)
    text = "a\U0001f642\x00 b\ud83d" + "".join(source.choices("xy\U0001f600\ud83d\ude42 ", k=20)) + "z"
    units = [text[at : at + 1] for at in range(len(text))]
    halves = "".join(
        unit if ord(unit) < 0x10000 else unit.encode("utf-16-be").decode("utf-16-be", "surrogatepass")
        for unit in units
    )
    pieces = []
    encoded = halves.encode("utf-16-be", "surrogatepass")
    at = 0
    while at < len(encoded):
        step = 2 * source.randint(1, 3)
        pieces.append(encoded[at : at + step].decode("utf-16-be", "surrogatepass"))
        at += step
    assembly, previews = fed(*(TextDelta(index=0, text=piece) for piece in pieces))
    (final,) = texts(assembly.parts())
    assert final == shown(previews)
    final.encode()
    assert "\x00" not in final
    whole, _ = fed(TextDelta(index=0, text=halves))
    assert texts(whole.parts()) == [final]


def test_asking_for_the_parts_twice_gives_the_same() -> None:
    assembly, _ = fed(TextDelta(index=0, text="end \ud83d"))
    assert assembly.parts() == assembly.parts()
    assert texts(assembly.parts()) == ["end \ufffd"]


def test_a_call_without_an_end_is_cut_and_has_no_arguments() -> None:
    assembly, _ = fed(ToolCallStart(index=0, id="c", name="w"), ToolCallDelta(index=0, json='{"a":'))
    (part,) = assembly.parts()
    assert part.is_cut
    assert isinstance(part.block, ToolUseBlock)
    assert part.block.input == {}


def test_arguments_that_cannot_be_stored_become_an_error() -> None:
    assembly, _ = fed(
        ToolCallStart(index=0, id="c", name="w"), ToolCallEnd(index=0, input={"a": float("inf")})
    )
    (part,) = assembly.parts()
    assert isinstance(part.block, ToolUseBlock)
    assert part.block.input == {}
    assert part.block.input_error is not None


def test_keys_and_strings_of_arguments_are_cleaned() -> None:
    assembly, _ = fed(
        ToolCallStart(index=0, id="c\x00", name="w"), ToolCallEnd(index=0, input={"k\x00": ["\ud83d"]})
    )
    assert assembly.parts()[0].block == ToolUseBlock(id="c\ufffd", name="w", input={"k\ufffd": ["\ufffd"]})


def test_deltas_of_a_call_that_never_began_are_ignored() -> None:
    assembly, previews = fed(ToolCallDelta(index=0, json="{}"), ToolCallEnd(index=0))
    assert (assembly.parts(), previews) == ((), [])


def test_the_last_usage_counts() -> None:
    """A-06."""
    assembly, _ = fed(*(UsageUpdate(usage=Usage(output_tokens=n)) for n in (1, 5, 9)))
    assert assembly.usage.output_tokens == 9


@pytest.mark.parametrize(
    ("events", "tokens"),
    [
        ([], 0),
        ([MessageStart()], 0),
        ([TextDelta(index=0, text="a")], 1),
        ([ToolCallStart(index=0, id="c", name="w")], 1),
        ([TextDelta(index=0, text="x" * 9), ThinkingDelta(index=1, text="y" * 8)], 5),
    ],
)
def test_output_that_was_not_counted_is_estimated_at_least_at_one_token(
    events: list[ProviderEvent], tokens: int
) -> None:
    assembly, _ = fed(*events)
    assert assembly.estimated_output_tokens() == tokens
