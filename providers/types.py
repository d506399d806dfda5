"""The conversation vocabulary: messages and their blocks, requests, provider events, usage.

Everything here is immutable and has one JSON form (snake_case, `type` as the tag), which is the same in
Postgres, on the wire and in the API documents. Unknown fields are ignored when a stored value is read.
"""

from collections.abc import AsyncIterator
from decimal import Decimal
from enum import StrEnum
from typing import Annotated, Any, Literal, Protocol, runtime_checkable

from msgspec import Meta, Struct

JsonObject = dict[str, Any]
ThinkEffort = Annotated[float, Meta(ge=0, le=1, description="0 is off, 1 is the most that the model offers.")]


# -- blocks ---------------------------------------------------------------------------------------------


class TextBlock(Struct, frozen=True, kw_only=True, tag="text", tag_field="type"):
    """Plain text."""

    text: str


class ThinkingBlock(Struct, frozen=True, kw_only=True, tag="thinking", tag_field="type"):
    """Readable reasoning. Signatures and encrypted parts live in the message's `native` blocks only."""

    thinking: str


class ToolUseBlock(Struct, frozen=True, kw_only=True, tag="tool_use", tag_field="type"):
    """A call that the model asked for.

    `id` is the provider's id of the call, or one of ours where it sent none; unique in its message.
    `input_error` says why the arguments could not be read; then `input` is empty, `input_raw` has the text.
    """

    id: str
    name: str
    input: JsonObject = {}
    input_error: str | None = None
    input_raw: str | None = None


class Base64Source(Struct, frozen=True, kw_only=True, tag="base64", tag_field="type"):
    media_type: Annotated[str, Meta(max_length=100)]
    data: str


class UrlSource(Struct, frozen=True, kw_only=True, tag="url", tag_field="type"):
    url: Annotated[str, Meta(max_length=8192)]


class FileSource(Struct, frozen=True, kw_only=True, tag="file", tag_field="type"):
    file_id: Annotated[str, Meta(max_length=64)]


class ImageBlock(Struct, frozen=True, kw_only=True, tag="image", tag_field="type"):
    """An image given inline, by URL, or as an uploaded file."""

    source: Base64Source | UrlSource | FileSource


class ToolResultBlock(Struct, frozen=True, kw_only=True, tag="tool_result", tag_field="type"):
    """The answer to the `ToolUseBlock` of the same id."""

    tool_use_id: str
    content: tuple[TextBlock | ImageBlock, ...] = ()
    is_error: bool = False


Block = TextBlock | ThinkingBlock | ToolUseBlock | ToolResultBlock | ImageBlock


class NativeBlocks(Struct, frozen=True, kw_only=True):
    """What the provider sent, kept to the byte so that it can be sent back unchanged.

    `body` is a JSON array in the provider's own format. It is replayed only to the same `api`, and its
    signed or encrypted parts only to the same `model`.
    """

    api: str
    model: str
    body: bytes


Role = Literal["user", "assistant", "tool", "system"]


class Message(Struct, frozen=True, kw_only=True):
    """One transcript entry. A `tool` message holds all results for the assistant message before it."""

    role: Role
    blocks: tuple[Block, ...]
    native: NativeBlocks | None = None

    @property
    def tool_uses(self) -> tuple[ToolUseBlock, ...]:
        return tuple(block for block in self.blocks if isinstance(block, ToolUseBlock))

    @property
    def text(self) -> str:
        """All text blocks joined, without thinking."""
        return "".join(block.text for block in self.blocks if isinstance(block, TextBlock))


# -- requests -------------------------------------------------------------------------------------------


class ToolSpec(Struct, frozen=True, kw_only=True):
    """A tool as the model sees it. `input_schema` is a JSON Schema of type object."""

    name: str
    description: str
    input_schema: JsonObject
    strict: bool = False


class ToolChoice(Struct, frozen=True, kw_only=True):
    """Whether the model may (`auto`), must (`any`), must not (`none`) call a tool, or must call `name`."""

    type: Literal["auto", "any", "none", "tool"] = "auto"
    name: str | None = None
    parallel: bool = True


Purpose = Literal["main", "compaction"]
"""main: the next message of the conversation. compaction: a summary of a part of it."""


class ProviderRequest(Struct, frozen=True, kw_only=True):
    """One request for the next assistant message.

    `model` is the vendor's own name, without our prefix. `system` and `tools` form a byte-stable prefix.
    `think_effort` None leaves the choice to the API. `cache_key` is the same for all requests of a session.
    `output_schema` is a JSON Schema of type object that the answer's text must fit; for models that have
    `Capabilities.output_schema`. `extra_body` is merged into the request body last.
    """

    model: str
    messages: tuple[Message, ...]
    system: str = ""
    tools: tuple[ToolSpec, ...] = ()
    tool_choice: ToolChoice = ToolChoice()
    think_effort: float | None = None
    max_output_tokens: int | None = None
    cache_key: str | None = None
    end_user_id: str | None = None
    output_schema: JsonObject | None = None
    extra_body: JsonObject = {}
    purpose: Purpose = "main"


class Capabilities(Struct, frozen=True, kw_only=True):
    """What a model can do. None: not known. `output_schema`: it can be held to a JSON Schema."""

    tools: bool = True
    images: bool = False
    thinking: bool = False
    output_schema: bool = False
    context_window_tokens: int | None = None
    max_output_tokens: int | None = None
    safe_usage_ratio: float = 0.5


# -- usage ----------------------------------------------------------------------------------------------


class Usage(Struct, frozen=True, kw_only=True):
    """Tokens of one request, in one meaning for all providers.

    `input_tokens` includes `cache_read_tokens` and `cache_write_tokens`; `output_tokens` includes
    `reasoning_tokens`. None: the provider did not say. `cost_usd` only where the provider reports it.
    """

    input_tokens: int | None = None
    cache_read_tokens: int | None = None
    cache_write_tokens: int | None = None
    cache_write_1h_tokens: int | None = None
    output_tokens: int | None = None
    reasoning_tokens: int | None = None
    cost_usd: Decimal | None = None
    raw: JsonObject = {}


# -- provider events ------------------------------------------------------------------------------------


class Stop(StrEnum):
    """Why a message ended, in our words."""

    END_TURN = "end_turn"  # the model has finished
    TOOL_USE = "tool_use"  # it waits for tool results
    MAX_TOKENS = "max_tokens"  # cut by the output limit
    STOP_SEQUENCE = "stop_sequence"  # a stop sequence appeared
    REFUSAL = "refusal"  # the provider or the model declined
    PAUSE = "pause"  # a server tool paused: send the same request again
    CONTEXT_WINDOW = "context_window"  # the window is full
    UNKNOWN = "unknown"  # complete, for a reason that we do not know


class MessageStart(Struct, frozen=True, kw_only=True):
    """The provider has accepted the request and begins to answer. It is not content."""

    model: str | None = None
    provider_message_id: str | None = None


class TextDelta(Struct, frozen=True, kw_only=True):
    """More text of the block at `index`. Indexes order the blocks of a message and may have gaps."""

    index: int
    text: str


class ThinkingDelta(Struct, frozen=True, kw_only=True):
    """More readable reasoning of the block at `index`."""

    index: int
    text: str


class ToolCallStart(Struct, frozen=True, kw_only=True):
    """A call begins at `index`. `name` is the tool's name as the agent knows it."""

    index: int
    id: str
    name: str


class ToolCallDelta(Struct, frozen=True, kw_only=True):
    """More of the JSON text of the arguments."""

    index: int
    json: str


class ToolCallEnd(Struct, frozen=True, kw_only=True):
    """The arguments are complete. `input_error` says why they could not be read as a JSON object."""

    index: int
    input: JsonObject = {}
    input_error: str | None = None
    input_raw: str | None = None


class UsageUpdate(Struct, frozen=True, kw_only=True):
    """Totals of the request so far. Each update replaces the one before."""

    usage: Usage


class MessageEnd(Struct, frozen=True, kw_only=True):
    """The terminal marker of the API was seen. Without this event a message is not complete.

    A call that the output limit cut has no `ToolCallEnd` and must not run.
    """

    stop: Stop
    native_stop: str | None = None
    native: NativeBlocks | None = None


ProviderEvent = (
    MessageStart
    | TextDelta
    | ThinkingDelta
    | ToolCallStart
    | ToolCallDelta
    | ToolCallEnd
    | UsageUpdate
    | MessageEnd
)


class ListedModel(Struct, frozen=True, kw_only=True):
    """A model that a server says it has. `model` is the vendor's own name."""

    model: str
    capabilities: Capabilities


@runtime_checkable
class ModelLister(Protocol):
    """What an adapter has besides, when its API can say which models there are."""

    async def list_models(self) -> tuple[ListedModel, ...]:
        """The models of this server. Raises: ProviderError."""
        ...


class Provider(Protocol):
    """An adapter to one model API. One instance serves many requests at once.

    Obligations: `stream` sends one request, without retries of its own (where an API pauses an answer, it may
    ask it to go on; the counts are then those of all of it); it yields `MessageEnd` exactly once
    and last, or raises a `ProviderError`; no vendor exception leaves it; closing the iterator early aborts
    the request at once and releases its connection.
    """

    api: str
    """The wire: `anthropic_messages`, `openai_responses`, `openai_chat`, `ollama`, `rehearsal`."""

    def capabilities(self, model: str) -> Capabilities:
        """What `model` (the vendor's name) can do. Does no I/O."""
        ...

    def stream(self, request: ProviderRequest) -> AsyncIterator[ProviderEvent]:
        """The events of one answer.

        Raises: ProviderError.
        """
        ...

    async def aclose(self) -> None:
        """Closes the connections that are kept open. Safe to call twice."""
        ...
