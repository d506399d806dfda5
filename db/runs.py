"""Runs of one tenant, as clients see them, and what became of a prompt."""

from datetime import datetime
from decimal import Decimal
from typing import Literal
from uuid import UUID

import msgspec
from msgspec import Struct

from agents.events import CancelMode, Outcome, StopReason
from agents.types import RunOptions
from db.engine import Record, Transaction
from db.errors import NotFound
from db.ids import parse_id, public, public_or_none, to_uuid
from providers.types import Block, JsonObject, TextBlock
from tools.types import ToolResult

RunState = Literal["queued", "running", "waiting", "closed"]
"""queued: waits for a worker; running: has one; waiting: for the client or a child; closed: for good."""

PromptState = Literal["pending", "applied", "withdrawn"]


class Run(Struct, frozen=True, kw_only=True):
    """The handling of one batch of prompts.

    `stop_reason` is set when the run is closed, and says `requires_action` with the ids of the tool uses that
    the client must answer while it waits for them, until `wait_until` (None: for ever). `after_seq` is the
    log position before its first event. `turns` counts model requests, without retries. `queue_position`: 1
    for the tenant's run that has waited longest, counted up to `MAX_POSITION`; None when it is not queued.
    """

    id: str
    session_id: str
    state: RunState
    stop_reason: StopReason | None
    prompt_ids: tuple[str, ...]
    options: RunOptions
    turns: int
    after_seq: int
    queue_position: int | None
    cancel_requested_at: datetime | None
    cancel_mode: CancelMode | None
    queued_at: datetime
    started_at: datetime | None
    wait_until: datetime | None
    closed_at: datetime | None

    @property
    def is_settled(self) -> bool:
        """True when nothing more happens by itself: it is closed, or it is the client's turn."""
        return self.state == "closed" or (self.state == "waiting" and self.stop_reason is not None)


class RunToolResult(Struct, frozen=True, kw_only=True):
    """One finished call of the run. `content` is what the model read, `details` is for user interfaces."""

    tool_use_id: str
    outcome: Outcome
    is_error: bool
    content: tuple[JsonObject, ...]
    details: JsonObject | None


class RunUsage(Struct, frozen=True, kw_only=True):
    """Sums over the run's requests of what is known; the last two count those that are over and lack it.

    `input_tokens` includes cache reads and writes, `output_tokens` reasoning.
    """

    requests: int
    input_tokens: int
    cache_read_tokens: int
    cache_write_tokens: int
    output_tokens: int
    reasoning_tokens: int
    cost_usd: Decimal
    unpriced_requests: int
    uncounted_requests: int


class RunResult(Struct, frozen=True, kw_only=True):
    """What a run has come to so far.

    `text` is that of its last assistant message, empty when there is none. `tool_results` are those of its
    finished calls by tool name, in the order of the calls. `data`: what a tool has returned directly.
    `turns`: its finished requests. `raw_usage`: what the provider said of each request, as it said it.
    """

    text: str
    data: JsonObject | None
    turns: int
    raw_usage: tuple[JsonObject, ...]
    tool_results: dict[str, tuple[RunToolResult, ...]]
    usage: RunUsage


class PromptOutcome(Struct, frozen=True, kw_only=True):
    """Where a prompt stands. `run_id` is null as long as no run has been made for it."""

    state: PromptState
    run_id: str | None


_stop_reason = msgspec.json.Decoder(StopReason)

RunPosition = tuple[datetime, UUID]
"""A place in a session's list of runs: `queued_at` and id of the last one that was read."""

MAX_POSITION = 10_000

_SELECT = f"""
    SELECT r.*,
        (SELECT array_agg(p.id ORDER BY p.seq) FROM prompts p WHERE p.run_id = r.id) AS prompt_ids,
        CASE WHEN r.state = 'waiting' THEN (
            SELECT array_agg(c.id ORDER BY c.position, c.index) FROM tool_calls c
            WHERE c.run_id = r.id AND c.state = 'open' AND c.child_run_id IS NULL
        ) END AS open_calls,
        CASE WHEN r.state = 'queued' THEN 1 + (SELECT count(*) FROM (
            SELECT FROM runs q
            WHERE q.tenant_id = r.tenant_id AND q.state = 'queued'
                AND (q.queued_at, q.id) < (r.queued_at, r.id)
            LIMIT {MAX_POSITION - 1}
        ) AS earlier) END AS queue_position
    FROM runs r
"""


async def get_run(tx: Transaction, run_id: str) -> Run:
    """Raises: NotFound."""
    row = await tx.fetchrow(
        f"{_SELECT} WHERE r.tenant_id = $1 AND r.id = $2", tx.tenant_id, parse_id("run", run_id)
    )
    if row is None:
        raise NotFound("run", run_id)
    return _run(row)


async def list_runs(
    tx: Transaction,
    *,
    session: UUID,
    limit: int,
    order: Literal["asc", "desc"] = "desc",
    after: RunPosition | None = None,
) -> list[Run]:
    """At most `limit` runs of the session by the time they were queued."""
    direction, follows = ("ASC", ">") if order == "asc" else ("DESC", "<")
    moment, last = after if after is not None else (None, None)
    rows = await tx.fetch(
        f"{_SELECT} WHERE r.tenant_id = $1 AND r.session_id = $2"
        f" AND ($3::timestamptz IS NULL OR (r.queued_at, r.id) {follows} ($3, $4::uuid))"
        f" ORDER BY r.queued_at {direction}, r.id {direction} LIMIT $5",
        tx.tenant_id,
        session,
        moment,
        last,
        limit,
    )
    return [_run(row) for row in rows]


async def prompt_outcome(tx: Transaction, prompt_id: str) -> PromptOutcome:
    """Raises: NotFound, also when its session was deleted."""
    row = await tx.fetchrow(
        "SELECT state, run_id FROM prompts WHERE tenant_id = $1 AND id = $2",
        tx.tenant_id,
        parse_id("evt", prompt_id),
    )
    if row is None:
        raise NotFound("event", prompt_id)
    return PromptOutcome(state=row["state"], run_id=public_or_none("run", row["run_id"]))


async def run_result(tx: Transaction, run_id: str) -> RunResult:
    """What the run has come to. Its existence is not checked: an unknown run has an empty result."""
    key = to_uuid(run_id)
    blocks = await tx.fetchval(
        "SELECT blocks FROM messages WHERE tenant_id = $1 AND run_id = $2 AND role = 'assistant'"
        " AND session_id = (SELECT session_id FROM runs WHERE id = $2)"
        " ORDER BY position DESC LIMIT 1",
        tx.tenant_id,
        key,
    )
    calls = await tx.fetch(
        "SELECT id, name, outcome, result FROM tool_calls"
        " WHERE tenant_id = $1 AND run_id = $2 AND state = 'done'"
        " AND session_id = (SELECT session_id FROM runs WHERE id = $2) ORDER BY position, index",
        tx.tenant_id,
        key,
    )
    usage = await tx.fetchrow(
        "SELECT count(*) AS requests,"
        " coalesce(sum(input_tokens), 0)::int8 AS input_tokens,"
        " coalesce(sum(cache_read_tokens), 0)::int8 AS cache_read_tokens,"
        " coalesce(sum(cache_write_tokens), 0)::int8 AS cache_write_tokens,"
        " coalesce(sum(output_tokens), 0)::int8 AS output_tokens,"
        " coalesce(sum(reasoning_tokens), 0)::int8 AS reasoning_tokens,"
        " coalesce(sum(cost_usd), 0) AS cost_usd,"
        " count(*) FILTER (WHERE state <> 'open' AND cost_usd IS NULL) AS unpriced_requests,"
        " count(*) FILTER (WHERE state <> 'open' AND (input_tokens IS NULL OR output_tokens IS NULL))"
        " AS uncounted_requests,"
        " array_agg(raw ORDER BY opened_at) FILTER (WHERE raw IS NOT NULL) AS raw"
        " FROM usage_entries WHERE tenant_id = $1 AND run_id = $2"
        " AND session_id = (SELECT session_id FROM runs WHERE id = $2)",
        tx.tenant_id,
        key,
    )
    assert usage is not None  # an aggregate without groups has one row
    counts = dict(usage)
    raw = counts.pop("raw") or ()
    run = await tx.fetchrow(
        "SELECT turns, stop_reason FROM runs WHERE tenant_id = $1 AND id = $2", tx.tenant_id, key
    )
    stop = None if run is None or run["stop_reason"] is None else _stop_reason.decode(run["stop_reason"])
    return RunResult(
        text=_text(blocks),
        data=None if stop is None else stop.result,
        turns=0 if run is None else run["turns"],
        tool_results=_tool_results(calls),
        usage=RunUsage(**counts),
        raw_usage=tuple(msgspec.json.decode(said) for said in raw),
    )


def _text(blocks: str | None) -> str:
    if blocks is None:
        return ""
    decoded = msgspec.json.decode(blocks, type=tuple[Block, ...])
    return "".join(block.text for block in decoded if isinstance(block, TextBlock))


def _tool_results(calls: list[Record]) -> dict[str, tuple[RunToolResult, ...]]:
    by_name: dict[str, list[RunToolResult]] = {}
    for call in calls:
        result = (
            ToolResult() if call["result"] is None else msgspec.json.decode(call["result"], type=ToolResult)
        )
        by_name.setdefault(call["name"], []).append(
            RunToolResult(
                tool_use_id=public("evt", call["id"]),
                outcome=call["outcome"] or "ok",
                is_error=result.is_error,
                content=tuple(msgspec.to_builtins(block) for block in result.content),
                details=result.details,
            )
        )
    return {name: tuple(results) for name, results in by_name.items()}


def _run(row: Record) -> Run:
    reason = None
    if row["stop_reason"] is not None:
        reason = _stop_reason.decode(row["stop_reason"])
    elif row["open_calls"]:
        reason = StopReason(
            type="requires_action", event_ids=tuple(public("evt", call) for call in row["open_calls"])
        )
    return Run(
        id=public("run", row["id"]),
        session_id=public("sess", row["session_id"]),
        state=row["state"],
        stop_reason=reason,
        prompt_ids=tuple(public("evt", prompt) for prompt in row["prompt_ids"] or ()),
        options=msgspec.json.decode(row["options"] or "{}", type=RunOptions),
        turns=row["turns"],
        after_seq=row["after_seq"],
        queue_position=row["queue_position"],
        cancel_requested_at=row["cancel_requested_at"],
        cancel_mode=row["cancel_mode"],
        queued_at=row["queued_at"],
        started_at=row["started_at"],
        wait_until=row["wait_until"],
        closed_at=row["closed_at"],
    )
