"""What both OpenAI adapters do to a transcript before it is written in their format."""

import hashlib
from collections.abc import Iterator
from typing import NamedTuple

from providers.errors import RequestRejected
from providers.types import (
    Base64Source,
    Block,
    FileSource,
    ImageBlock,
    Message,
    TextBlock,
    ToolResultBlock,
    UrlSource,
)

NO_OUTPUT = "(no output)"
IMAGE_FOLLOWS = "(see the image below)"


class Step(NamedTuple):
    """A message, and for an assistant message the results of its calls, in the order of the calls."""

    message: Message
    results: tuple[ToolResultBlock, ...] = ()


def steps(messages: tuple[Message, ...]) -> Iterator[Step]:
    """The transcript with each tool result directly behind its call, wherever it stands.

    Results are looked for up to the next assistant message, since ids need not be unique beyond it.
    """
    for position, message in enumerate(messages):
        if message.role == "assistant":
            yield Step(message, _results_after(messages, position))
        elif message.role != "tool":
            yield Step(message)


def _results_after(messages: tuple[Message, ...], position: int) -> tuple[ToolResultBlock, ...]:
    found: dict[str, ToolResultBlock] = {}
    for message in messages[position + 1 :]:
        if message.role == "assistant":
            break
        for block in message.blocks:
            if isinstance(block, ToolResultBlock):
                found.setdefault(block.tool_use_id, block)
    return tuple(found[use.id] for use in messages[position].tool_uses if use.id in found)


def text_of(message: Message) -> str:
    """The text blocks that say something, joined; empty if there are none."""
    text = message.text
    return text if text.strip() else ""


def texts_and_images(
    blocks: tuple[Block, ...],
) -> Iterator[TextBlock | ImageBlock]:
    """The blocks that can be shown to the model as input; blank text is left out."""
    for block in blocks:
        if isinstance(block, ImageBlock) or (isinstance(block, TextBlock) and block.text.strip()):
            yield block


def result_text(result: ToolResultBlock) -> str:
    """The text of a tool result, never empty: an empty one would be refused, a missing one breaks pairing."""
    text = "\n".join(block.text for block in result.content if isinstance(block, TextBlock))
    if text.strip():
        return text
    return IMAGE_FOLLOWS if result_images(result) else NO_OUTPUT


def result_images(result: ToolResultBlock) -> tuple[ImageBlock, ...]:
    return tuple(block for block in result.content if isinstance(block, ImageBlock))


def image_url(image: ImageBlock) -> str:
    """The image as one URL, inline data as a `data:` URL.

    Raises: RequestRejected, for an uploaded file: it must have been read before.
    """
    match image.source:
        case Base64Source(media_type=media_type, data=data):
            return f"data:{media_type};base64,{data}"
        case UrlSource(url=url):
            return url
        case FileSource(file_id=file_id):
            raise RequestRejected(f"image {file_id} was not read before the request: send its data")


def wire_call_id(use_id: str, *, max_chars: int) -> str:
    """`use_id`, or a digest of it where another API's id is longer than this one takes."""
    if len(use_id) <= max_chars:
        return use_id
    return "call_" + hashlib.sha256(use_id.encode()).hexdigest()[:32]


def bounded_key(text: str, *, max_chars: int = 64) -> str:
    """`text`, or a digest of it where it is longer than the API takes."""
    return text if len(text) <= max_chars else hashlib.sha256(text.encode()).hexdigest()[:max_chars]
