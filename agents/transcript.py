"""The transcript as a provider may see it: always valid, whatever was stored.

What the loop stores is valid already; this is the second lock on the same door, and it repairs imports and
whatever an older release wrote. Repairing twice changes nothing.
"""

from collections.abc import Iterable

from msgspec.structs import replace

from providers.types import (
    Block,
    ImageBlock,
    Message,
    Role,
    TextBlock,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
)

MISSING_RESULT = "Interrupted: no result of this call was recorded. Whether it had effects is not known."


_MAY_HOLD: dict[Role, tuple[type[Block], ...]] = {
    "user": (TextBlock, ImageBlock),
    "assistant": (TextBlock, ThinkingBlock, ToolUseBlock),
    "tool": (ToolResultBlock,),
    "system": (TextBlock,),
}


def repaired(messages: Iterable[Message]) -> tuple[Message, ...]:
    """`messages` with each tool use followed by its result, no empty message and no blank text.

    A block that its role cannot hold is left out.
    """
    result: list[Message] = []
    pending = list(messages)
    index = 0
    while index < len(pending):
        message = pending[index]
        index += 1
        if message.role == "tool":
            continue  # an answer to nothing: those that answer are taken with their question
        cleaned = _cleaned(message)
        if cleaned is None:
            continue
        result.append(cleaned)
        if not cleaned.tool_uses:
            continue
        answers: list[ToolResultBlock] = []
        while index < len(pending) and pending[index].role == "tool":
            answers.extend(block for block in pending[index].blocks if isinstance(block, ToolResultBlock))
            index += 1
        result.append(_answered(cleaned.tool_uses, answers))
    return tuple(result)


def _answered(uses: tuple[ToolUseBlock, ...], answers: list[ToolResultBlock]) -> Message:
    """One result per use, in the order of the uses. Equal ids are matched in order."""
    left = list(answers)
    blocks: list[Block] = []
    for use in uses:
        found = next((answer for answer in left if answer.tool_use_id == use.id), None)
        if found is None:
            missing = (TextBlock(text=MISSING_RESULT),)
            found = ToolResultBlock(tool_use_id=use.id, content=missing, is_error=True)
        else:
            left.remove(found)
        blocks.append(found)
    return Message(role="tool", blocks=tuple(blocks))


def _cleaned(message: Message) -> Message | None:
    """The message without blank text, its calls last; None when nothing is left to send."""
    kept = [
        block
        for block in message.blocks
        if isinstance(block, _MAY_HOLD[message.role])
        and not (isinstance(block, TextBlock) and not block.text.strip())
    ]
    if not any(not isinstance(block, ThinkingBlock) for block in kept):
        return None
    # A sort is stable: text and calls keep their order among themselves.
    ordered = tuple(sorted(kept, key=lambda block: isinstance(block, ToolUseBlock)))
    return message if ordered == message.blocks else replace(message, blocks=ordered)
