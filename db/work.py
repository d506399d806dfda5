"""What of a session is unfinished: prompts without a run, calls without results, requests without an end."""

from collections.abc import Mapping
from datetime import datetime
from typing import Any
from uuid import UUID

import msgspec
from msgspec import Struct

from agents.closing import OpenWork
from agents.config import QueueModes
from agents.events import CancelMode, UserContent
from agents.types import CancelRequest, InboxView, PendingPrompt, ToolCall
from db.engine import Record, Transaction
from db.ids import public
from tools.types import ToolResult

_content = msgspec.json.Decoder(tuple[UserContent, ...])
_result = msgspec.json.Decoder(ToolResult)

CALL_COLUMNS = "id, tool_use_id, position, index, kind, name, input, state, idempotent, outcome, result"
_PROMPT_COLUMNS = "id, batch_id, content, delivery, run_id"


class LockedSession(Struct, frozen=True, kw_only=True):
    """A session whose row this transaction has locked, and its open run. `now` is the database's time."""

    id: UUID
    tenant_id: UUID
    epoch: int
    inbox_no: int
    last_seq: int
    last_position: int
    archived_at: datetime | None
    now: datetime
    run_id: UUID | None = None
    run_state: str | None = None
    run_takeovers: int = 0
    run_takeovers_since_progress: int = 0
    run_worker_id: UUID | None = None
    cancel_requested_at: datetime | None = None
    cancel_mode: CancelMode | None = None
    cancel_reason: str | None = None
    wait_until: datetime | None = None


_RUN_COLUMNS = """
    runs.id AS run_id, runs.state AS run_state, coalesce(runs.takeovers, 0) AS run_takeovers,
    coalesce(runs.takeovers_since_progress, 0) AS run_takeovers_since_progress,
    runs.worker_id AS run_worker_id, runs.cancel_requested_at, runs.cancel_mode, runs.cancel_reason,
    runs.wait_until, clock_timestamp() AS now
"""

# The lock is on the newest version of the session's row, the run is as the statement's snapshot has it. They
# belong together if the snapshot has that same version: nobody changes a run without changing its session.
_LOCK = f"""
SELECT sessions.id, sessions.tenant_id, sessions.epoch, sessions.inbox_no, sessions.last_seq,
    sessions.last_position, sessions.archived_at,
    sessions.xmin = (SELECT seen.xmin FROM sessions AS seen WHERE seen.id = $1) AS is_of_snapshot,
    {_RUN_COLUMNS}
FROM sessions LEFT JOIN runs ON runs.session_id = sessions.id AND runs.state <> 'closed'
WHERE sessions.id = $1 AND ($2::uuid IS NULL OR sessions.tenant_id = $2)
FOR NO KEY UPDATE OF sessions
"""
_LOCK_IF_FREE = f"{_LOCK} SKIP LOCKED"

# As `db.sessions.effective_agent` has them, without reading the whole configuration.
_VERSION = """
    agent_versions ON agent_versions.agent_id = sessions.agent_id
        AND agent_versions.version = sessions.agent_version
"""
_MODES = """
    coalesce(sessions.agent_overrides ->> 'steering_mode', agent_versions.config ->> 'steering_mode')
        AS steering_mode,
    coalesce(sessions.agent_overrides ->> 'follow_up_mode', agent_versions.config ->> 'follow_up_mode')
        AS follow_up_mode
"""

_OPEN_RUN = f"""
SELECT {_RUN_COLUMNS}
FROM (SELECT) AS one LEFT JOIN runs ON runs.session_id = $1 AND runs.state <> 'closed'
"""

# The run counts finished requests only; its last one may have failed, and wait to be made again.
LAST_TURN = """
    (SELECT CASE WHEN run_id = $2 THEN turn END FROM usage_entries WHERE session_id = $1
        ORDER BY opened_at DESC LIMIT 1) AS last_turn
"""
_REQUESTS = f"""
SELECT {LAST_TURN},
    (SELECT id FROM usage_entries WHERE session_id = $1 AND state = 'open' AND run_id = $2) AS open_request
"""


async def find_locked(
    tx: Transaction, session_id: UUID, *, skip_locked: bool = False
) -> LockedSession | None:
    """Locks the session and reads its open run, as it is once the lock is had.

    None: no such session for this tenant, or (`skip_locked`) somebody else has it just now.
    """
    session = await tx.fetchrow(_LOCK_IF_FREE if skip_locked else _LOCK, session_id, tx.tenant_id)
    if session is None:
        return None
    values = dict(session)
    if not values.pop("is_of_snapshot"):
        # Somebody changed the session after the snapshot was taken: a second one is newer than the lock.
        run = await tx.fetchrow(_OPEN_RUN, session_id)
        assert run is not None
        values |= run
    return LockedSession(**values)


async def load_work(tx: Transaction, locked: LockedSession) -> OpenWork:
    """What the locked session's open run has not finished."""
    assert locked.run_id is not None
    requests = await tx.fetchrow(_REQUESTS, locked.id, locked.run_id)
    assert requests is not None
    open_request = requests["open_request"]
    prompts = await _pending(tx, locked.id)
    return OpenWork(
        session_id=public("sess", locked.id),
        run_id=public("run", locked.run_id),
        turn=requests["last_turn"],
        next_position=locked.last_position + 1,
        open_request=None if open_request is None else public("evt", open_request),
        calls=await unsettled_calls(tx, locked.id, locked.last_position),
        batch=tuple(prompt for prompt, run_id in prompts if run_id == locked.run_id),
        pending=tuple(prompt for prompt, run_id in prompts if run_id is None),
        modes=await _queue_modes(tx, locked.id),
    )


async def _queue_modes(tx: Transaction, session_id: UUID) -> QueueModes:
    row = await tx.fetchrow(
        f"SELECT {_MODES} FROM sessions JOIN {_VERSION} WHERE sessions.id = $1", session_id
    )
    assert row is not None, "the session is locked"
    return _modes_of(row)


class Incoming(Struct, frozen=True, kw_only=True):
    """What has come in for a session and its run. `epoch` is -1 when the session is gone.

    `batch`: the run's own prompts that its transcript does not hold yet.
    """

    epoch: int
    view: InboxView
    batch: tuple[PendingPrompt, ...] = ()


INBOX = f"""
    sessions.epoch, sessions.inbox_no, runs.cancel_requested_at, runs.cancel_mode, runs.cancel_reason,
    {_MODES},
    ARRAY(
        SELECT ROW({_PROMPT_COLUMNS}) FROM prompts
        WHERE session_id = $1 AND prompts.state = 'pending' ORDER BY seq
    ) AS prompts,
    ARRAY(
        SELECT ROW({CALL_COLUMNS}) FROM tool_calls
        WHERE session_id = $1 AND position = sessions.last_position ORDER BY index
    ) AS calls
"""
"""Columns that `inbox_of` reads, of `sessions`, `agent_versions` and the run `runs`; `$1` is the session."""


async def load_inbox(tx: Transaction, session_id: UUID, run_id: UUID) -> Incoming:
    """Everything that is not taken up yet, as of one moment."""
    row = await tx.fetchrow(
        f"""
        SELECT {INBOX} FROM sessions JOIN {_VERSION} LEFT JOIN runs ON runs.id = $2 WHERE sessions.id = $1
        """,
        session_id,
        run_id,
    )
    if row is None:  # deleted
        return Incoming(epoch=-1, view=InboxView(inbox_no=-1))
    return inbox_of(row, run_id)


def inbox_of(row: Record, run_id: UUID) -> Incoming:
    """What `row`, which has the columns of `INBOX`, says of the run."""
    cancel = None
    if row["cancel_requested_at"] is not None:
        cancel = CancelRequest(
            requested_at=row["cancel_requested_at"], mode=row["cancel_mode"], reason=row["cancel_reason"]
        )
    prompt_rows = _named(_PROMPT_COLUMNS, row["prompts"])
    prompts = [(_prompt_of(prompt), prompt["run_id"]) for prompt in prompt_rows]
    view = InboxView(
        inbox_no=row["inbox_no"],
        modes=_modes_of(row),
        cancel=cancel,
        pending=tuple(prompt for prompt, prompt_run in prompts if prompt_run is None),
        calls=tuple(call_of(call) for call in _named(CALL_COLUMNS, row["calls"])),
    )
    batch = tuple(prompt for prompt, prompt_run in prompts if prompt_run == run_id)
    return Incoming(epoch=row["epoch"], view=view, batch=batch)


async def unsettled_calls(tx: Transaction, session_id: UUID, last_position: int) -> tuple[ToolCall, ...]:
    """The calls of the transcript's last message, in source order; empty unless it asks for tools."""
    rows = await tx.fetch(
        f"SELECT {CALL_COLUMNS} FROM tool_calls WHERE session_id = $1 AND position = $2 ORDER BY index",
        session_id,
        last_position,
    )
    return tuple(call_of(row) for row in rows)


async def _pending(tx: Transaction, session_id: UUID) -> list[tuple[PendingPrompt, UUID | None]]:
    rows = await tx.fetch(
        f"""
        SELECT {_PROMPT_COLUMNS} FROM prompts
        WHERE session_id = $1 AND state = 'pending' ORDER BY seq
        """,
        session_id,
    )
    return [(_prompt_of(row), row["run_id"]) for row in rows]


def _modes_of(row: Record | Mapping[str, Any]) -> QueueModes:
    """Versions that were stored before there were modes have none."""
    steering, follow_up = row["steering_mode"], row["follow_up_mode"]
    return QueueModes(steering=steering or "one_at_a_time", follow_up=follow_up or "one_at_a_time")


def _named(columns: str, rows: list[tuple[Any, ...]]) -> list[dict[str, Any]]:
    """Rows that were selected as an array, which have lost the names of their columns."""
    names = columns.split(", ")
    return [dict(zip(names, row, strict=True)) for row in rows]


def call_of(row: Record | Mapping[str, Any]) -> ToolCall:
    """A call from a row of `tool_calls`."""
    return ToolCall(
        id=public("evt", row["id"]),
        tool_use_id=row["tool_use_id"],
        position=row["position"],
        index=row["index"],
        kind=row["kind"],
        name=row["name"],
        input=msgspec.json.decode(row["input"]),
        state=row["state"],
        idempotent=row["idempotent"],
        outcome=row["outcome"],
        result=None if row["result"] is None else _result.decode(row["result"]),
    )


def _prompt_of(row: Record | Mapping[str, Any]) -> PendingPrompt:
    return PendingPrompt(
        id=public("evt", row["id"]),
        batch_id=public("batch", row["batch_id"]),
        content=_content.decode(row["content"]),
        delivery=row["delivery"],
    )
