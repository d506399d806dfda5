"""The durable events of a session, as clients read them.

An event is encoded once, without its `seq`: the number is known only when its transaction commits, and the
reader's frame puts it in as the first field. All ids in events are public ids; `tool_use_id`,
`custom_tool_use_id` and `model_request_start_id` are ids of events.
"""

from datetime import datetime
from decimal import Decimal
from typing import Annotated, Literal

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from providers.types import ImageBlock, JsonObject, Purpose, TextBlock

UserContent = TextBlock | ImageBlock
Delivery = Literal["queue", "steer", "interrupt", "reject"]
"""What a prompt does to a busy session: it waits for its own run, is taken up by the run in progress, stops
that run and takes its place, or is refused."""

PromptDelivery = Delivery | Literal["next_request"]
"""`next_request`: it starts and stops nothing, and goes with the next request that is made anyway."""

CancelMode = Literal["now", "after_turn"]
"""now: at once. after_turn: when the model request in progress and its tool calls are finished."""

Outcome = Literal["ok", "error", "denied", "cancelled", "skipped", "unknown"]
"""How a call ended. `unknown`: its worker died in the middle, so it may or may not have had effects."""

Confirmation = Literal["allow", "deny"]

CompactionTrigger = Literal["threshold", "context_too_long", "client", "tool"]

CloseType = Literal[
    "end_turn",
    "max_turns",
    "timed_out",
    "budget_reached",
    "refusal",
    "cancelled",
    "direct_return",
    "retries_exhausted",
    "error",
]


class StopReason(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Why a session is idle. All types but `requires_action` mean that the run is closed.

    `event_ids`: with `requires_action`, the tool uses that wait for the client. `code` and `message`: with
    `error`, `retries_exhausted`, `cancelled`: what happened, fit for users. `result`: with `direct_return`.
    """

    type: CloseType | Literal["requires_action"]
    event_ids: tuple[str, ...] = ()
    code: str | None = None
    message: str | None = None
    result: JsonObject | None = None


class Event(Struct, frozen=True, kw_only=True, tag_field="type"):
    """What every event carries.

    `seq` is dense within a session. `run_id` and `turn` (1, 2, 3 …) are null outside a run or turn.
    `processed_at` is null on what a client sent until a run has taken it up.
    """

    id: str
    seq: Annotated[int, Meta(ge=1, description="1, 2, 3 … within the session, without gaps.")] | UnsetType = (
        UNSET
    )
    session_id: str
    run_id: str | None = None
    turn: int | None = None
    created_at: datetime
    processed_at: datetime | None = None


# -- from the client ------------------------------------------------------------------------------------


class UserMessage(Event, frozen=True, kw_only=True, tag="user.message"):
    """A prompt was admitted. Its id is the prompt's id; prompts of one POST share `batch_id`.

    `answers`, only where it is no prompt but the answer to questions: the tool uses that asked them. Their
    `user.custom_tool_result`s follow.
    """

    content: tuple[UserContent, ...]
    delivery: Delivery
    batch_id: str
    answers: tuple[str, ...] | UnsetType = UNSET


class SystemMessage(Event, frozen=True, kw_only=True, tag="system.message"):
    """Instructions from the application for the conversation from here on.

    `section`: its name; a later message of the same section replaces it.
    """

    content: tuple[TextBlock, ...]
    section: str | None = None


class UserInterrupt(Event, frozen=True, kw_only=True, tag="user.interrupt"):
    """A client asked to stop the run: at once, or when the turn in progress is finished."""

    mode: CancelMode = "now"
    reason: str | None = None


class UserCustomToolResult(Event, frozen=True, kw_only=True, tag="user.custom_tool_result"):
    """The client's answer to an `agent.custom_tool_use`."""

    custom_tool_use_id: str
    content: tuple[UserContent, ...] = ()
    is_error: bool = False


class UserToolConfirmation(Event, frozen=True, kw_only=True, tag="user.tool_confirmation"):
    """The client's answer to an `agent.tool_use` that waited for its approval."""

    tool_use_id: str
    result: Confirmation
    deny_message: str | None = None


class PromptApplied(Event, frozen=True, kw_only=True, tag="prompt.applied"):
    """Pending prompts became part of the run's transcript, in this order."""

    prompt_ids: tuple[str, ...]


class PromptUpdated(Event, frozen=True, kw_only=True, tag="prompt.updated"):
    """A pending prompt was edited."""

    prompt_id: str
    content: tuple[UserContent, ...]


class PromptWithdrawn(Event, frozen=True, kw_only=True, tag="prompt.withdrawn"):
    """A pending prompt will not run. `reason`: by its client, or with the run that it was bound to."""

    prompt_id: str
    reason: Literal["client", "run_cancelled"] = "client"


# -- state of the session -------------------------------------------------------------------------------


class StatusRunning(Event, frozen=True, kw_only=True, tag="session.status_running"):
    """A worker works on the run."""


class StatusIdle(Event, frozen=True, kw_only=True, tag="session.status_idle"):
    """The run closed, or waits for the client (`requires_action`)."""

    stop_reason: StopReason


class StatusRescheduled(Event, frozen=True, kw_only=True, tag="session.status_rescheduled"):
    """The worker was lost or handed the run back; another carries on. All previews so far are void."""

    reason: Literal["worker_lost", "handed_over"] = "worker_lost"


class StatusTerminated(Event, frozen=True, kw_only=True, tag="session.status_terminated"):
    """The session was archived and takes no more prompts."""


class SessionRolledBack(Event, frozen=True, kw_only=True, tag="session.rolled_back"):
    """The last run, `rolled_back_run_id`, was taken back; its events and its usage stay as they are.

    `position` is that of the last message which the model still sees, 0 when there is none.
    """

    rolled_back_run_id: str
    position: Annotated[int, Meta(ge=0)]


class SessionForked(Event, frozen=True, kw_only=True, tag="session.forked"):
    """The session began with a copy of what another had come to after its event `from_seq`."""

    from_session_id: str
    from_seq: int
    messages: int


class SessionImported(Event, frozen=True, kw_only=True, tag="session.imported"):
    """The session began with what another server had. `usage`: its counters there, no part of ours."""

    messages: int
    usage: JsonObject | None = None


class SessionUpdated(Event, frozen=True, kw_only=True, tag="session.updated"):
    """Fields of the session were changed by a client; `changes` holds their new values."""

    changes: JsonObject


RetryType = Literal["retrying", "exhausted", "terminal"]
ErrorType = Literal[
    "unknown_error",
    "model_overloaded_error",
    "model_rate_limited_error",
    "model_request_failed_error",
    "billing_error",
]


class RetryStatus(Struct, frozen=True, kw_only=True):
    """Whether it is tried again (`retrying`), was tried in vain (`exhausted`), or never is (`terminal`)."""

    type: RetryType


class ErrorDetail(Struct, frozen=True, kw_only=True):
    """`code` is ours and stable; `type` is the class that hosted agent APIs use; `message` is for users."""

    type: ErrorType
    code: str
    message: str
    retry_status: RetryStatus


class SessionError(Event, frozen=True, kw_only=True, tag="session.error"):
    """Something failed. `retry_status` tells whether it is tried again."""

    error: ErrorDetail


# -- model requests -------------------------------------------------------------------------------------


class RequestStart(Event, frozen=True, kw_only=True, tag="span.model_request_start"):
    """A request is about to leave for the provider. Its id is also the id of its ledger entry."""

    provider: str
    model: str
    purpose: Purpose = "main"
    attempt: int = 1


class ModelUsage(Struct, frozen=True, kw_only=True):
    """Tokens as hosted agent APIs count them: `input_tokens` excludes what the cache served or stored."""

    input_tokens: int
    output_tokens: int
    cache_read_input_tokens: int
    cache_creation_input_tokens: int


class TokenUsage(Struct, frozen=True, kw_only=True):
    """Tokens in our meaning: input includes cache reads and writes, output reasoning. Null: unknown."""

    input_tokens: int | None = None
    cache_read_tokens: int | None = None
    cache_write_tokens: int | None = None
    output_tokens: int | None = None
    reasoning_tokens: int | None = None
    cost_usd: Decimal | None = None
    estimated: bool = False


class RequestEnd(Event, frozen=True, kw_only=True, tag="span.model_request_end"):
    """The request is over. With `is_error` its previews are void, unless they got final events."""

    model_request_start_id: str
    model_usage: ModelUsage
    usage: TokenUsage
    is_error: bool = False
    stop: str | None = None
    native_stop: str | None = None
    error_code: str | None = None
    latency_ms: int | None = None
    first_token_ms: int | None = None


# -- content --------------------------------------------------------------------------------------------


class AgentThinking(Event, frozen=True, kw_only=True, tag="agent.thinking"):
    """Readable reasoning, finished."""

    thinking: str


class AgentMessage(Event, frozen=True, kw_only=True, tag="agent.message"):
    """Text of the assistant, finished. `incomplete`: it was cut by a cancel, an error or the output limit."""

    content: tuple[TextBlock, ...]
    incomplete: bool = False


class AgentToolUse(Event, frozen=True, kw_only=True, tag="agent.tool_use"):
    """The model asked for a tool that runs on our side.

    `evaluated_permission` `ask`: it waits for a `user.tool_confirmation`.
    """

    name: str
    input: JsonObject
    input_error: str | None = None
    evaluated_permission: Literal["allow", "ask", "deny"] = "allow"


class AgentCustomToolUse(Event, frozen=True, kw_only=True, tag="agent.custom_tool_use"):
    """The model called a tool of the client, or asks the user: it waits for `user.custom_tool_result`."""

    name: str
    input: JsonObject


class ThreadContextCompacted(Event, frozen=True, kw_only=True, tag="agent.thread_context_compacted"):
    """From here on the model is sent `memory` in place of the messages up to `position`.

    `tokens_before` and `tokens_after` are our estimates of what is sent. `trigger`: the context came to its
    limit, the provider found it too long, a client asked, or the model did.
    """

    memory_id: str
    memory: str
    position: Annotated[int, Meta(ge=1)]
    trigger: CompactionTrigger
    tokens_before: int
    tokens_after: int


class ToolStart(Event, frozen=True, kw_only=True, tag="span.tool_start"):
    """Execution of a call began."""

    tool_use_id: str


class AgentToolResult(Event, frozen=True, kw_only=True, tag="agent.tool_result"):
    """The result of a call, as the model will see it. `details` is for user interfaces only."""

    tool_use_id: str
    content: tuple[UserContent, ...] = ()
    is_error: bool = False
    outcome: Outcome = "ok"
    details: JsonObject | None = None


AnyEvent = (
    UserMessage
    | SystemMessage
    | UserInterrupt
    | UserCustomToolResult
    | UserToolConfirmation
    | PromptApplied
    | PromptUpdated
    | PromptWithdrawn
    | StatusRunning
    | StatusIdle
    | StatusRescheduled
    | StatusTerminated
    | SessionRolledBack
    | SessionForked
    | SessionImported
    | SessionUpdated
    | SessionError
    | RequestStart
    | RequestEnd
    | AgentThinking
    | AgentMessage
    | AgentToolUse
    | AgentCustomToolUse
    | ThreadContextCompacted
    | ToolStart
    | AgentToolResult
)

_encoder = msgspec.json.Encoder(decimal_format="string")
_decoder = msgspec.json.Decoder(AnyEvent)


def event_type(event: Event) -> str:
    """The `type` of an event, such as `agent.message`."""
    tag = event.__struct_config__.tag
    assert isinstance(tag, str)
    return tag


def encode_event(event: Event) -> bytes:
    """One line of compact JSON without `seq`; ready to be stored and framed."""
    return escape_line_ends(_encoder.encode(event))


def decode_event(body: bytes) -> AnyEvent:
    """The event of a stored body."""
    return _decoder.decode(body)


# Inside JSON strings these characters are legal, but naive readers of a stream split lines at them.
_LINE_ENDS = {"\x7f": "\\u007f", "\x85": "\\u0085", "\u2028": "\\u2028", "\u2029": "\\u2029"}
_LINE_END_BYTES = tuple((character.encode(), escape.encode()) for character, escape in _LINE_ENDS.items())


def escape_line_ends(body: bytes) -> bytes:
    """Encoded JSON with the line separators of Unicode escaped. C0 characters are escaped by JSON itself."""
    for raw, escape in _LINE_END_BYTES:
        if raw in body:
            body = body.replace(raw, escape)
    return body
