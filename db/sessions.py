"""Sessions of one tenant: made, read, listed, changed, archived, deleted.

What changes a session's log (a title, an archive) only prepares the row here; the event is appended by
`db.admission` in the same transaction.
"""

from datetime import datetime
from decimal import Decimal
from typing import Any, Literal
from uuid import UUID

import msgspec
from msgspec import UNSET, Struct, UnsetType

from agents.config import AgentConfig, QueueMode
from db.engine import Record, Transaction
from db.errors import Conflict, NotFound
from db.ids import parse_id, public, to_uuid
from providers.ids import new_id
from providers.types import JsonObject

SessionStatus = Literal["rescheduling", "running", "idle", "terminated"]
"""running: a run is queued, worked on, or waits for a child. idle: nothing to do, or the client's turn.
rescheduling: the run lost its worker or was handed back, and waits for another. terminated: archived."""


class TokenCounters(Struct, frozen=True, kw_only=True):
    """Sums of the ledger. `cache_miss_tokens`: input that no cache served; cache writes are among them."""

    cache_hit_tokens: int
    cache_miss_tokens: int
    output_tokens: int


class SessionCounters(Struct, frozen=True, kw_only=True):
    """`current` since the last compaction, `full` for the segments before it, `total` of both."""

    current: TokenCounters
    full: TokenCounters
    total: TokenCounters


class Session(Struct, frozen=True, kw_only=True):
    """A session as it stands.

    `agent` is the configuration in effect: the agent's version with the session's overrides. `cost_usd` sums
    the requests whose price is known; `unpriced_requests` counts the others. `active_s` adds up its runs,
    each from its start to its close.
    """

    id: str
    agent_id: str
    agent_version: int
    agent: AgentConfig
    status: SessionStatus
    waits_for: tuple[str, ...]
    title: str | None
    end_user_id: str | None
    environment_id: str | None
    metadata: dict[str, str]
    counters: SessionCounters
    cost_usd: Decimal
    unpriced_requests: int
    active_s: float
    duration_s: float
    last_seq: int
    created_at: datetime
    updated_at: datetime
    archived_at: datetime | None


class SessionFilter(Struct, frozen=True, kw_only=True):
    """Which sessions to list. None and empty: no restriction. Moments bound `created_at`."""

    agent_id: str | None = None
    agent_version: int | None = None
    end_user_id: str | None = None
    statuses: tuple[SessionStatus, ...] = ()
    include_archived: bool = False
    created_gt: datetime | None = None
    created_gte: datetime | None = None
    created_lt: datetime | None = None
    created_lte: datetime | None = None


Position = tuple[datetime, UUID]
"""A place in the list of sessions: `created_at` and id of the last one that was read."""

# The last status event tells a run that was re-queued from one whose wait for the client has ended.
_STATUS = """
    CASE
        WHEN s.archived_at IS NOT NULL THEN 'terminated'
        WHEN r.id IS NULL THEN 'idle'
        WHEN r.state = 'waiting' AND EXISTS (
            SELECT FROM tool_calls c WHERE c.run_id = r.id AND c.state = 'open' AND c.child_run_id IS NULL
        ) THEN 'idle'
        WHEN r.state = 'queued' AND r.started_at IS NOT NULL AND (
            SELECT e.type FROM events e
            WHERE e.session_id = s.id AND e.seq > r.after_seq AND e.type LIKE 'session.status\\_%'
            ORDER BY e.seq DESC LIMIT 1
        ) = 'session.status_rescheduled' THEN 'rescheduling'
        ELSE 'running'
    END
"""

_SELECT = f"""
    SELECT s.*, v.config, {_STATUS} AS status,
        CASE WHEN r.state = 'waiting' THEN (
            SELECT array_agg(c.id ORDER BY c.position, c.index) FROM tool_calls c
            WHERE c.run_id = r.id AND c.state = 'open' AND c.child_run_id IS NULL
        ) END AS waits_for,
        extract(epoch FROM coalesce(s.archived_at, clock_timestamp()) - s.created_at)::float8 AS duration_s,
        coalesce((
            SELECT sum(extract(epoch FROM coalesce(t.closed_at, clock_timestamp()) - t.started_at))
            FROM runs t WHERE t.session_id = s.id AND t.started_at IS NOT NULL
        ), 0)::float8 AS active_s
    FROM sessions s
    JOIN agent_versions v ON v.agent_id = s.agent_id AND v.version = s.agent_version
    LEFT JOIN runs r ON r.session_id = s.id AND r.state <> 'closed'
"""


async def create_session(
    tx: Transaction,
    *,
    agent_id: str,
    version: int | None,
    overrides: JsonObject | None = None,
    environment_id: str | None = None,
    title: str | None = None,
    end_user_id: str | None = None,
    metadata: dict[str, str] | None = None,
) -> str:
    """The id of a session of `agent_id`, in `version` or the newest. `overrides`: see `effective_agent`.

    Raises: NotFound (agent or version), Conflict `agent_archived`.
    """
    agent = await tx.fetchrow(
        "SELECT a.archived_at, coalesce($3, a.version) AS version, v.agent_id IS NOT NULL AS is_known"
        " FROM agents a"
        " LEFT JOIN agent_versions v ON v.agent_id = a.id AND v.version = coalesce($3, a.version)"
        " WHERE a.tenant_id = $1 AND a.id = $2",
        tx.tenant_id,
        parse_id("agent", agent_id),
        version,
    )
    if agent is None:
        raise NotFound("agent", agent_id)
    if not agent["is_known"]:
        raise NotFound("version of this agent", str(version))
    if agent["archived_at"] is not None:
        raise Conflict("agent_archived", "The agent is archived; no session can be made of it.")
    session_id = new_id("sess")
    await tx.execute(
        "INSERT INTO sessions (id, tenant_id, agent_id, agent_version, agent_overrides, title, end_user_id,"
        " environment_id, metadata) VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9)",
        to_uuid(session_id),
        tx.tenant_id,
        to_uuid(agent_id),
        agent["version"],
        _json(overrides) if overrides else None,
        title,
        end_user_id,
        environment_id,
        _json(metadata or {}),
    )
    return session_id


async def get_session(tx: Transaction, session_id: str) -> Session:
    """Raises: NotFound."""
    row = await tx.fetchrow(
        f"{_SELECT} WHERE s.tenant_id = $1 AND s.id = $2", tx.tenant_id, parse_id("sess", session_id)
    )
    if row is None:
        raise NotFound("session", session_id)
    return _session(row)


async def require_session(tx: Transaction, session_id: str) -> UUID:
    """The session's UUID, once it is known to be this tenant's. Raises: NotFound."""
    key = parse_id("sess", session_id)
    if not await tx.fetchval("SELECT true FROM sessions WHERE tenant_id = $1 AND id = $2", tx.tenant_id, key):
        raise NotFound("session", session_id)
    return key


async def list_sessions(
    tx: Transaction,
    *,
    where: SessionFilter,
    limit: int,
    order: Literal["asc", "desc"] = "desc",
    after: Position | None = None,
) -> list[Session]:
    """At most `limit` sessions by time of creation, those that follow `after` in that order.

    A filter by an agent that is not this tenant's finds nothing. Raises: NotFound, for an id of another kind.
    """
    conditions, values = _conditions(where)
    values.insert(0, tx.tenant_id)
    direction, follows = ("ASC", ">") if order == "asc" else ("DESC", "<")
    if after is not None:
        values += after
        conditions.append(f"(s.created_at, s.id) {follows} (${len(values) - 1}, ${len(values)})")
    values.append(limit)
    rows = await tx.fetch(
        f"{_SELECT} WHERE {' AND '.join(['s.tenant_id = $1', *conditions])}"
        f" ORDER BY s.created_at {direction}, s.id {direction} LIMIT ${len(values)}",
        *values,
    )
    return [_session(row) for row in rows]


def _conditions(where: SessionFilter) -> tuple[list[str], list[Any]]:
    """Conditions and their values, numbered from `$2`."""
    tests: list[tuple[str, Any]] = []
    if where.agent_id is not None:
        tests.append(("s.agent_id = {}", parse_id("agent", where.agent_id)))
    if where.agent_version is not None:
        tests.append(("s.agent_version = {}", where.agent_version))
    if where.end_user_id is not None:
        tests.append(("s.end_user_id = {}", where.end_user_id))
    if where.statuses:
        tests.append((f"({_STATUS}) = ANY({{}}::text[])", list(where.statuses)))
    for comparison, moment in (
        (">", where.created_gt),
        (">=", where.created_gte),
        ("<", where.created_lt),
        ("<=", where.created_lte),
    ):
        if moment is not None:
            tests.append((f"s.created_at {comparison} {{}}", moment))
    conditions = [test.format(f"${number}") for number, (test, _) in enumerate(tests, start=2)]
    # Whoever asks for terminated sessions asks for archived ones: they are the same.
    if not where.include_archived and "terminated" not in where.statuses:
        conditions.append("s.archived_at IS NULL")
    return conditions, [value for _, value in tests]


async def update_session(
    tx: Transaction,
    *,
    session_id: str,
    title: str | UnsetType | None = UNSET,
    metadata: dict[str, str | None] | UnsetType | None = UNSET,
    modes: dict[str, QueueMode | None] | None = None,
) -> JsonObject:
    """Changes the session and gives the new values of the fields that differ now; empty when none does.

    `metadata` is a patch: null removes a key, a null patch removes all. `modes` are the queue modes to
    override, by field of the agent; None gives up the override. Locks the session.
    Raises: NotFound, Conflict `session_archived`.
    """
    row = await _locked(tx, session_id)
    if row["archived_at"] is not None:
        raise Conflict("session_archived", "The session is archived and cannot be changed.")
    changes: JsonObject = {}
    if title is not UNSET and title != row["title"]:
        changes["title"] = title
    old: dict[str, str] = msgspec.json.decode(row["metadata"])
    new = patched(old, metadata)
    if new != old:
        changes["metadata"] = new
    overrides: JsonObject = msgspec.json.decode(row["agent_overrides"] or "{}")
    for field, mode in (modes or {}).items():
        if overrides.get(field) != mode:
            changes[field] = overrides[field] = mode
    overrides = {field: value for field, value in overrides.items() if field not in changes or value}
    if changes:
        await tx.execute(
            "UPDATE sessions SET title = $3, metadata = $4, agent_overrides = $5,"
            " updated_at = clock_timestamp() WHERE tenant_id = $1 AND id = $2",
            tx.tenant_id,
            row["id"],
            changes.get("title", row["title"]),
            _json(new),
            _json(overrides) if overrides else None,
        )
    return changes


def patched(old: dict[str, str], patch: dict[str, str | None] | UnsetType | None) -> dict[str, str]:
    """`old` with the keys of `patch` set, or removed where it says null."""
    if patch is UNSET:
        return old
    if patch is None:
        return {}
    return {key: value for key, value in {**old, **patch}.items() if value is not None}


async def archive_session(tx: Transaction, session_id: str) -> bool:
    """Marks the session as archived; False when it was already. Locks it.

    Raises: NotFound, Conflict `run_open`.
    """
    row = await _locked(tx, session_id)
    if row["archived_at"] is not None:
        return False
    await _require_no_open_run(tx, row["id"])
    await tx.execute(
        "UPDATE sessions SET archived_at = clock_timestamp(), updated_at = clock_timestamp()"
        " WHERE tenant_id = $1 AND id = $2",
        tx.tenant_id,
        row["id"],
    )
    return True


async def delete_session(tx: Transaction, session_id: str) -> None:
    """Deletes the session and all that is in it; its ledger entries stay. Locks it.

    Raises: NotFound, Conflict `run_open`.
    """
    row = await _locked(tx, session_id)
    await _require_no_open_run(tx, row["id"])
    await tx.execute("DELETE FROM sessions WHERE tenant_id = $1 AND id = $2", tx.tenant_id, row["id"])


async def _locked(tx: Transaction, session_id: str) -> Record:
    row = await tx.fetchrow(
        "SELECT id, title, metadata, agent_overrides, archived_at FROM sessions"
        " WHERE tenant_id = $1 AND id = $2 FOR UPDATE",
        tx.tenant_id,
        parse_id("sess", session_id),
    )
    if row is None:
        raise NotFound("session", session_id)
    return row


async def _require_no_open_run(tx: Transaction, session: UUID) -> None:
    run = await tx.fetchval(
        "SELECT id FROM runs WHERE tenant_id = $1 AND session_id = $2 AND state <> 'closed'",
        tx.tenant_id,
        session,
    )
    if run is not None:
        raise Conflict(
            "run_open",
            f"The session has an open run; cancel {public('run', run)} first, or wait for its end.",
        )


def effective_agent(config: str, overrides: str | None) -> AgentConfig:
    """The configuration that a session runs with, from both columns' JSON texts.

    `overrides` holds whole values of fields that replace the agent's own.
    """
    fields = msgspec.json.decode(config, type=JsonObject)
    if overrides is not None:
        fields |= msgspec.json.decode(overrides, type=JsonObject)
    return msgspec.convert(fields, AgentConfig)


def _session(row: Record) -> Session:
    current, full = _counters(row, "current"), _counters(row, "full")
    total = TokenCounters(
        cache_hit_tokens=current.cache_hit_tokens + full.cache_hit_tokens,
        cache_miss_tokens=current.cache_miss_tokens + full.cache_miss_tokens,
        output_tokens=current.output_tokens + full.output_tokens,
    )
    return Session(
        id=public("sess", row["id"]),
        agent_id=public("agent", row["agent_id"]),
        agent_version=row["agent_version"],
        agent=effective_agent(row["config"], row["agent_overrides"]),
        status=row["status"],
        waits_for=tuple(public("evt", call) for call in row["waits_for"] or ()),
        title=row["title"],
        end_user_id=row["end_user_id"],
        environment_id=row["environment_id"],
        metadata=msgspec.json.decode(row["metadata"]),
        counters=SessionCounters(current=current, full=full, total=total),
        cost_usd=row["cost_usd"],
        unpriced_requests=row["unpriced_requests"],
        active_s=row["active_s"],
        duration_s=row["duration_s"],
        last_seq=row["last_seq"],
        created_at=row["created_at"],
        updated_at=row["updated_at"],
        archived_at=row["archived_at"],
    )


def _counters(row: Record, segment: str) -> TokenCounters:
    return TokenCounters(
        cache_hit_tokens=row[f"{segment}_cache_hit_tokens"],
        cache_miss_tokens=row[f"{segment}_cache_miss_tokens"],
        output_tokens=row[f"{segment}_output_tokens"],
    )


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode()
