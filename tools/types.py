"""What a tool is: a name, a schema, a coroutine, and what the loop may assume about it."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from msgspec import Struct

from providers.types import ImageBlock, JsonObject, TextBlock

Execution = Literal["parallel", "sequential"]


class ToolResult(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The answer to one call: `content` is for the model, `details` for user interfaces only.

    `data`: closes the run with this as its result, see `DirectReturn`. `terminate`: the run may end here; it
    does when every result of the turn says so. `ends_turn`: as its tool says.
    """

    content: tuple[TextBlock | ImageBlock, ...] = ()
    details: JsonObject | None = None
    is_error: bool = False
    data: JsonObject | None = None
    terminate: bool = False
    ends_turn: bool = False


class DirectReturn(Struct, frozen=True, kw_only=True):
    """What a tool returns to close the run with `data`, without asking the model again.

    Other calls of the turn that are not finished are skipped. `text` is what the transcript shows as the
    result of the call; empty: the data as JSON.
    """

    data: JsonObject
    text: str = ""


@dataclass(frozen=True, kw_only=True)
class ToolContext:
    """What a call may know and do besides its arguments.

    `idempotency_key` is the same when the call is run again after a crash. `progress` publishes a preview to
    readers of the stream: best effort, never stored. A call is cancelled by `asyncio.CancelledError`.
    """

    session_id: str
    run_id: str
    tool_use_id: str
    idempotency_key: str
    progress: Callable[[JsonObject], None]


ToolFunction = Callable[[JsonObject, ToolContext], Awaitable[ToolResult]]


@dataclass(frozen=True, kw_only=True)
class Tool:
    """A callable that the model may request.

    `execution`: `sequential` makes the whole batch of a turn run one call after the other.
    `idempotent`: the call may be run again when its worker died in the middle of it.
    `requires_approval`: no call runs before the client has allowed it. An agent can say otherwise.
    `asks_user`: it is never executed; the run waits until the client has answered.
    `ends_turn`: once the calls of its turn are finished, the run ends, unless this one has failed.
    `timeout_s`: None means no limit but the run's.
    """

    name: str
    description: str
    input_schema: JsonObject
    execute: ToolFunction
    label: str = ""
    strict: bool = False
    execution: Execution = "parallel"
    idempotent: bool = False
    requires_approval: bool = False
    asks_user: bool = False
    ends_turn: bool = False
    timeout_s: float | None = None
    tags: frozenset[str] = field(default_factory=frozenset)


def text_result(text: str, *, is_error: bool = False, details: dict[str, Any] | None = None) -> ToolResult:
    """A result of one text block."""
    return ToolResult(content=(TextBlock(text=text),), is_error=is_error, details=details)
