"""The transcript as a provider may see it, whatever was stored."""

import random

import msgspec
import pytest

from agents.transcript import MISSING_RESULT, repaired
from providers.types import (
    Base64Source,
    Block,
    ImageBlock,
    Message,
    Role,
    TextBlock,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
)
from tests.support.transcript_rules import transcript_problems


def user(text: str) -> Message:
    return Message(role="user", blocks=(TextBlock(text=text),))


def assistant(*blocks: Block) -> Message:
    return Message(role="assistant", blocks=blocks)


def results(*ids: str) -> Message:
    blocks = tuple(ToolResultBlock(tool_use_id=key, content=(TextBlock(text=f"of {key}"),)) for key in ids)
    return Message(role="tool", blocks=blocks)


def use(call_id: str) -> ToolUseBlock:
    return ToolUseBlock(id=call_id, name="ls")


def test_a_call_without_a_result_gets_one_that_says_so_before_the_next_text() -> None:
    """H-01: the run died between the calls and their results; the user says "go on"."""
    messages = (
        user("list files"),
        assistant(TextBlock(text="Looking."), use("a"), use("b")),
        results("a"),
        user("go on"),
    )
    sent = repaired(messages)
    assert [message.role for message in sent] == ["user", "assistant", "tool", "user"]
    first, second = sent[2].blocks
    assert first == messages[2].blocks[0]
    assert isinstance(second, ToolResultBlock)
    assert second.tool_use_id == "b"
    assert second.is_error
    assert second.content == (TextBlock(text=MISSING_RESULT),)


def test_a_call_at_the_very_end_gets_a_result_too() -> None:
    sent = repaired((user("q"), assistant(use("a"))))
    assert [message.role for message in sent] == ["user", "assistant", "tool"]


def test_results_are_put_in_the_order_of_the_calls() -> None:
    sent = repaired((user("q"), assistant(use("a"), use("b")), results("b"), results("a")))
    assert [block.tool_use_id for block in sent[2].blocks if isinstance(block, ToolResultBlock)] == ["a", "b"]


def test_two_calls_of_one_id_keep_a_result_each() -> None:
    sent = repaired((user("q"), assistant(use("a"), use("a")), results("a", "a")))
    assert len(sent[2].blocks) == 2
    assert not any(block.is_error for block in sent[2].blocks if isinstance(block, ToolResultBlock))


def test_a_result_without_its_call_is_left_out() -> None:
    sent = repaired((user("q"), results("ghost"), assistant(use("a")), results("a", "ghost")))
    assert [message.role for message in sent] == ["user", "assistant", "tool"]
    assert len(sent[2].blocks) == 1


def test_text_behind_a_call_moves_in_front_of_the_calls_and_none_is_lost() -> None:
    """H-02."""
    retry = TextBlock(text="Sorry, let me retry.")
    sent = repaired((user("q"), assistant(use("a"), retry, use("b")), results("a", "b")))
    assert sent[1].blocks == (retry, use("a"), use("b"))


@pytest.mark.parametrize(
    "blocks",
    [(), (TextBlock(text=""),), (TextBlock(text="\n\n"),), (ThinkingBlock(thinking="hm"),)],
)
def test_an_assistant_message_with_nothing_to_say_is_not_sent(blocks: tuple[Block, ...]) -> None:
    """H-04: empty, blank, or only thinking."""
    sent = repaired((user("q1"), assistant(*blocks), user("q2")))
    assert sent == (user("q1"), user("q2"))


def test_an_empty_result_is_kept() -> None:
    """H-04: dropping it would leave its call without an answer. Adapters put words in its place."""
    empty = Message(role="tool", blocks=(ToolResultBlock(tool_use_id="a"),))
    assert repaired((user("q"), assistant(use("a")), empty))[2] == empty


def test_a_valid_transcript_is_not_touched() -> None:
    messages = (
        user("q"),
        assistant(ThinkingBlock(thinking="hm"), TextBlock(text="Let me look."), use("a")),
        results("a"),
        assistant(TextBlock(text="There.")),
    )
    assert repaired(messages) == messages


def random_message(source: random.Random) -> Message:
    def block() -> Block:
        call_id = source.choice("abc")
        blocks: list[Block] = [
            TextBlock(text=source.choice(["", " ", "\n", "text", "more text"])),
            ThinkingBlock(thinking=source.choice(["", "hm"])),
            use(call_id),
            ToolResultBlock(tool_use_id=call_id, content=(TextBlock(text="r"),) * source.randint(0, 1)),
            ImageBlock(source=Base64Source(media_type="image/png", data="aa")),
        ]
        return source.choice(blocks)

    roles: list[Role] = ["user", "assistant", "assistant", "tool", "system"]
    return Message(role=source.choice(roles), blocks=tuple(block() for _ in range(source.randint(0, 4))))


@pytest.mark.parametrize("seed", range(20))
def test_repairing_twice_changes_nothing_and_the_result_keeps_the_rules(seed: int) -> None:
    source = random.Random(seed)
    for _ in range(100):
        messages = tuple(random_message(source) for _ in range(source.randint(0, 8)))
        once = repaired(messages)
        assert repaired(once) == once
        # Who begins, and who follows whom, is for the adapters; so are ids that are not unique.
        ignored = ("could answer", "use id twice")
        problems = [
            problem
            for problem in transcript_problems(msgspec.to_builtins(once))
            if not problem.endswith(ignored)
        ]
        assert problems == [], messages
