"""What the loop works on and talks to: the snapshot it starts from, the steps it commits, its partners.

The loop keeps nothing that matters in memory. Where it stands follows from the snapshot, and everything it
does becomes a `Step`: what belongs together is one step, and a step is committed whole or not at all.
"""

from collections.abc import Callable
from datetime import datetime
from decimal import Decimal
from typing import Literal, Protocol

from msgspec import Struct

from agents.config import AgentConfig, QueueModes, RunOverrides
from agents.events import CancelMode, Event, Outcome, PromptDelivery, StopReason, UserContent
from providers.types import JsonObject, Message, Purpose, Role, Usage
from tools.types import ToolResult

# -- what stands in the database ------------------------------------------------------------------------


class StoredMessage(Struct, frozen=True, kw_only=True):
    """A transcript entry at its `position` (1, 2, 3 … in the session)."""

    id: str
    position: int
    message: Message


CallState = Literal["pending", "running", "open", "done"]
"""pending: not begun; running: begun by some hold; open: waits for the client; done: has its result."""

CallKind = Literal["server", "client", "question"]
"""server: runs on our side; open while it waits for its approval. client: the client sends its result.
question: it asks the user, so that the next message of the client can be its result."""


class ToolCall(Struct, frozen=True, kw_only=True):
    """The durable row of one call. `id` is its event's id, `tool_use_id` the id that the transcript uses.

    `index` orders the calls of the assistant message at `position`. `idempotent` as it was at the start.
    """

    id: str
    tool_use_id: str
    position: int
    index: int
    name: str
    input: JsonObject
    state: CallState
    kind: CallKind = "server"
    idempotent: bool = False
    outcome: Outcome | None = None
    result: ToolResult | None = None


class PendingPrompt(Struct, frozen=True, kw_only=True):
    """A prompt that no transcript holds yet. `next_request`: a system message."""

    id: str
    batch_id: str
    content: tuple[UserContent, ...]
    delivery: PromptDelivery

    @property
    def role(self) -> Role:
        """What it becomes in the transcript."""
        return "system" if self.delivery == "next_request" else "user"


class CancelRequest(Struct, frozen=True, kw_only=True):
    """Somebody asked to stop the run: `now`, or when the turn in progress is finished. `reason` is theirs."""

    requested_at: datetime
    mode: CancelMode = "now"
    reason: str | None = None


class InboxView(Struct, frozen=True, kw_only=True):
    """What has come in for a session, as of `inbox_no`.

    `pending`: prompts that belong to no run yet, oldest first; `modes`: how many of them go together.
    `calls`: those of the last assistant message, as long as the transcript lacks their results.
    """

    inbox_no: int
    modes: QueueModes = QueueModes()
    cancel: CancelRequest | None = None
    pending: tuple[PendingPrompt, ...] = ()
    calls: tuple[ToolCall, ...] = ()


class Memory(Struct, frozen=True, kw_only=True):
    """What stands for the transcript up to `position` in requests. The messages themselves stay stored.

    `seen_position`: the last message there was when it was made.
    """

    id: str
    position: int
    seen_position: int
    text: str


class RunOptions(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a run was made for, and how it differs from its agent.

    `compact`: it is to make a memory, with `instructions` of the client for it. A run without prompts that is
    not for that goes on from where the transcript stands.
    """

    compact: bool = False
    instructions: str | None = None
    overrides: RunOverrides = RunOverrides()


class Snapshot(Struct, frozen=True, kw_only=True):
    """A session and its run as a hold found them.

    `messages`: those after the one that `memory`, if there is one, reaches. `task`: the last prompt that it
    covers. `tail_role`: of the transcript's last message but system messages, None before the first.
    `batch`: the run's own prompts that are not applied yet. `turns`: requests that the run has finished;
    `last_turn`: that of its last request, finished or not, None before the first.
    `next_position`: where the transcript goes on. `deadline_at`: when the run's time limit is reached.
    """

    session_id: str
    run_id: str
    agent: AgentConfig
    messages: tuple[StoredMessage, ...]
    tail_role: Role | None
    batch: tuple[PendingPrompt, ...]
    inbox: InboxView
    turns: int
    last_turn: int | None
    next_position: int
    deadline_at: datetime
    end_user_id: str | None = None
    memory: Memory | None = None
    task: Message | None = None
    options: RunOptions = RunOptions()


# -- what the loop commits ------------------------------------------------------------------------------


class RequestOpened(Struct, frozen=True, kw_only=True):
    """A ledger entry, made before any byte leaves. `id` is the id of its `span.model_request_start`."""

    id: str
    turn: int
    provider: str
    model: str
    purpose: Purpose = "main"


class RequestClosed(Struct, frozen=True, kw_only=True):
    """The end of a ledger entry. `abandoned`: nobody knows what the provider counted; counts are null."""

    id: str
    usage: Usage
    cost_usd: Decimal | None = None
    price_source: str | None = None
    stop: str | None = None
    native_stop: str | None = None
    error_code: str | None = None
    estimated: bool = False
    abandoned: bool = False
    latency_ms: int | None = None
    first_token_ms: int | None = None


class NextRun(Struct, frozen=True, kw_only=True):
    """The run that follows in the transaction that closes the one before; `prompt_ids` are bound to it."""

    id: str
    prompt_ids: tuple[str, ...]


class CloseRun(Struct, frozen=True, kw_only=True):
    """The run ends here."""

    stop_reason: StopReason
    next_run: NextRun | None = None


class WaitForClient(Struct, frozen=True, kw_only=True):
    """The run gives up its worker until the client has answered, or for `timeout_s`. None: for ever."""

    timeout_s: float | None = None


class RequeueRun(Struct, frozen=True, kw_only=True):
    """The run gives up its worker and is to be taken up by any. `takeover`: its worker was lost."""

    takeover: bool


class Step(Struct, frozen=True, kw_only=True):
    """One commit: all of it or nothing.

    `turns` is the run's new count of finished requests. `applied` are prompts that the transcript holds from
    here on, `withdrawn` those that will not run. `memory` is in effect from here on.
    """

    events: tuple[Event, ...] = ()
    messages: tuple[StoredMessage, ...] = ()
    calls: tuple[ToolCall, ...] = ()
    applied: tuple[str, ...] = ()
    withdrawn: tuple[str, ...] = ()
    opened: RequestOpened | None = None
    closed: RequestClosed | None = None
    memory: Memory | None = None
    turns: int | None = None
    ending: CloseRun | WaitForClient | RequeueRun | None = None


# -- previews -------------------------------------------------------------------------------------------

DeltaKind = Literal["agent.message", "agent.thinking", "agent.tool_use", "tool.progress", "model.status"]


class PreviewStart(Struct, frozen=True, kw_only=True):
    """An event has begun to be produced; it will have this id and type unless it is voided."""

    event_id: str
    kind: DeltaKind


class PreviewDelta(Struct, frozen=True, kw_only=True):
    """More of it. `delta` is what clients read, e.g. `{"type": "content_delta", "index": 0, ...}`."""

    event_id: str
    kind: DeltaKind
    delta: JsonObject


Preview = PreviewStart | PreviewDelta


# -- partners -------------------------------------------------------------------------------------------


class Sink(Protocol):
    """Where steps and previews go. One hold has one sink."""

    async def commit(self, step: Step, *, seen: int | None = None) -> None:
        """Stores `step` and makes its events visible. `seen` is the inbox_no that the decision rests on.

        Returns only when the step is durable. Retries by itself while the hold stands.
        Raises: HoldLost, InboxChanged (only with `seen`); in both cases nothing was written.
        """
        ...

    def preview(self, preview: Preview) -> None:
        """Shows readers what is being produced. Best effort, never blocks, never fails."""
        ...


class Inbox(Protocol):
    """What comes in for the session while the loop works."""

    async def look(self) -> InboxView:
        """The inbox as it is in the database. Raises: HoldLost."""
        ...

    async def cancelled(self) -> None:
        """Returns when somebody has asked to stop the run now."""
        ...

    async def may_start(self) -> bool:
        """True when a tool or a request may be started; waits while the lease is in doubt.

        False: this process is going away, and the run is to be handed over at once.
        Raises: HoldLost.
        """
        ...

    async def until_live(self) -> None:
        """Returns when the lease is not in doubt: at once, unless this process has stood still.

        Before each tool and request that a commit has started. When others have taken the run over, it does
        not return: whoever waits is going to be cancelled.
        """
        ...


class Clock(Protocol):
    """Time, passed in."""

    def now(self) -> datetime:
        """The database's time, aware UTC, as well as this process knows it."""
        ...

    def monotonic(self) -> float:
        """Seconds that only go forward."""
        ...

    async def sleep(self, seconds: float) -> None: ...


Pricer = Callable[[Usage], tuple[Decimal | None, str | None]]
"""Cost of a request in USD with the source of its price; None: not known."""
