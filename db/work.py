"""What of a session is unfinished: prompts without a run, calls without results, requests without an end."""

from datetime import datetime
from uuid import UUID

import msgspec
from msgspec import Struct

from agents.closing import OpenWork
from agents.events import UserContent
from agents.types import CancelRequest, InboxView, PendingPrompt, ToolCall
from db.engine import Record, Transaction
from db.ids import public
from tools.types import ToolResult

_content = msgspec.json.Decoder(tuple[UserContent, ...])
_result = msgspec.json.Decoder(ToolResult)

_CALL_COLUMNS = "id, tool_use_id, position, index, kind, name, input, state, idempotent, outcome, result"


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
    run_turns: int = 0
    run_takeovers: int = 0
    run_takeovers_since_progress: int = 0
    run_worker_id: UUID | None = None
    cancel_requested_at: datetime | None = None
    cancel_reason: str | None = None


async def find_locked(
    tx: Transaction, session_id: UUID, *, skip_locked: bool = False
) -> LockedSession | None:
    """Locks the session, then reads its open run in a second statement: its snapshot is newer than the lock.

    None: no such session for this tenant, or (`skip_locked`) somebody else has it just now.
    """
    session = await tx.fetchrow(
        f"""
        SELECT id, tenant_id, epoch, inbox_no, last_seq, last_position, archived_at FROM sessions
        WHERE id = $1 AND ($2::uuid IS NULL OR tenant_id = $2)
        FOR NO KEY UPDATE {"SKIP LOCKED" if skip_locked else ""}
        """,
        session_id,
        tx.tenant_id,
    )
    if session is None:
        return None
    run = await tx.fetchrow(
        """
        SELECT clock_timestamp() AS now, id AS run_id, state AS run_state, turns AS run_turns,
            takeovers AS run_takeovers, takeovers_since_progress AS run_takeovers_since_progress,
            worker_id AS run_worker_id, cancel_requested_at, cancel_reason
        FROM (SELECT) AS one LEFT JOIN runs ON session_id = $1 AND state <> 'closed'
        """,
        session_id,
    )
    assert run is not None
    values = {**session, **run}
    if values["run_id"] is None:
        values |= {"run_turns": 0, "run_takeovers": 0, "run_takeovers_since_progress": 0}
    return LockedSession(**values)


async def load_work(tx: Transaction, locked: LockedSession) -> OpenWork:
    """What the locked session's open run has not finished."""
    assert locked.run_id is not None
    open_request = await tx.fetchval(
        "SELECT id FROM usage_entries WHERE session_id = $1 AND state = 'open' AND run_id = $2",
        locked.id,
        locked.run_id,
    )
    prompts = await _pending(tx, locked.id)
    return OpenWork(
        session_id=public("sess", locked.id),
        run_id=public("run", locked.run_id),
        turn=locked.run_turns or None,
        next_position=locked.last_position + 1,
        open_request=None if open_request is None else public("evt", open_request),
        calls=await unsettled_calls(tx, locked.id, locked.last_position),
        batch=tuple(prompt for prompt, run_id in prompts if run_id == locked.run_id),
        pending=tuple(prompt for prompt, run_id in prompts if run_id is None),
    )


class Incoming(Struct, frozen=True, kw_only=True):
    """What has come in for a session and its run. `epoch` is -1 when the session is gone.

    `batch`: the run's own prompts that its transcript does not hold yet.
    """

    epoch: int
    view: InboxView
    batch: tuple[PendingPrompt, ...] = ()


async def load_inbox(tx: Transaction, session_id: UUID, run_id: UUID) -> Incoming:
    """Everything that is not taken up yet.

    `inbox_no` is read first, so what came in later than it makes a commit that relies on it fail.
    """
    row = await tx.fetchrow(
        """
        SELECT epoch, inbox_no, last_position, cancel_requested_at, cancel_reason
        FROM sessions LEFT JOIN runs ON runs.id = $2 WHERE sessions.id = $1
        """,
        session_id,
        run_id,
    )
    if row is None:  # deleted
        return Incoming(epoch=-1, view=InboxView(inbox_no=-1))
    cancel = None
    if row["cancel_requested_at"] is not None:
        cancel = CancelRequest(requested_at=row["cancel_requested_at"], reason=row["cancel_reason"])
    prompts = await _pending(tx, session_id)
    view = InboxView(
        inbox_no=row["inbox_no"],
        cancel=cancel,
        pending=tuple(prompt for prompt, prompt_run in prompts if prompt_run is None),
        calls=await unsettled_calls(tx, session_id, row["last_position"]),
    )
    batch = tuple(prompt for prompt, prompt_run in prompts if prompt_run == run_id)
    return Incoming(epoch=row["epoch"], view=view, batch=batch)


async def unsettled_calls(tx: Transaction, session_id: UUID, last_position: int) -> tuple[ToolCall, ...]:
    """The calls of the transcript's last message, in source order; empty unless it asks for tools."""
    rows = await tx.fetch(
        f"SELECT {_CALL_COLUMNS} FROM tool_calls WHERE session_id = $1 AND position = $2 ORDER BY index",
        session_id,
        last_position,
    )
    return tuple(call_of(row) for row in rows)


async def _pending(tx: Transaction, session_id: UUID) -> list[tuple[PendingPrompt, UUID | None]]:
    rows = await tx.fetch(
        """
        SELECT id, batch_id, content, delivery, run_id FROM prompts
        WHERE session_id = $1 AND state = 'pending' ORDER BY seq
        """,
        session_id,
    )
    return [(_prompt_of(row), row["run_id"]) for row in rows]


def call_of(row: Record) -> ToolCall:
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


def _prompt_of(row: Record) -> PendingPrompt:
    return PendingPrompt(
        id=public("evt", row["id"]),
        batch_id=public("batch", row["batch_id"]),
        content=_content.decode(row["content"]),
        delivery=row["delivery"],
    )
