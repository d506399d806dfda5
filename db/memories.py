"""The memories of a session: those that were made, the one in effect, and runs that make one."""

from datetime import datetime
from uuid import UUID

from msgspec import Struct

from agents.events import SessionUpdated
from agents.types import RunOptions
from db.arrivals import Admission, NewRun, append, draft_of_session, lock_session, require_idle
from db.engine import Record, Transaction
from db.errors import Conflict, NotFound
from db.ids import parse_id, public, to_uuid
from db.queue_depth import QueueBounds
from providers.ids import new_id


class MemoryRecord(Struct, frozen=True, kw_only=True):
    """A summary of the messages up to `position`. `is_in_effect`: the model is sent it in their place."""

    id: str
    session_id: str
    position: int
    text: str
    is_in_effect: bool
    created_at: datetime


_SELECT = """
    SELECT m.id, m.session_id, m.position, m.text, m.created_at, m.id = s.memory_id AS is_in_effect
    FROM memories m JOIN sessions s ON s.id = m.session_id
"""


async def list_memories(
    tx: Transaction, *, session: UUID, limit: int, after: tuple[datetime, UUID] | None = None
) -> list[MemoryRecord]:
    """At most `limit` memories, the newest first, those that were made before `after`."""
    moment, last = after if after is not None else (None, None)
    rows = await tx.fetch(
        f"{_SELECT} WHERE m.tenant_id = $1 AND m.session_id = $2"
        " AND ($3::timestamptz IS NULL OR (m.created_at, m.id) < ($3, $4::uuid))"
        " ORDER BY m.created_at DESC, m.id DESC LIMIT $5",
        tx.tenant_id,
        session,
        moment,
        last,
        limit,
    )
    return [_record(row) for row in rows]


async def get_memory(tx: Transaction, *, session_id: str, memory_id: str) -> MemoryRecord:
    """Raises: NotFound."""
    row = await tx.fetchrow(
        f"{_SELECT} WHERE m.tenant_id = $1 AND m.session_id = $2 AND m.id = $3",
        tx.tenant_id,
        parse_id("sess", session_id),
        parse_id("mem", memory_id),
    )
    if row is None:
        raise NotFound("memory", memory_id)
    return _record(row)


async def compact_session(
    tx: Transaction,
    *,
    session_id: str,
    instructions: str | None,
    api_key_id: str | None,
    bounds: QueueBounds | None = None,
) -> Admission:
    """Queues a run that makes a memory.

    Raises: NotFound, Conflict (`session_archived`, `session_busy`, `nothing_to_compact`), QueueFull.
    """
    locked = await lock_session(tx, session_id)
    require_idle(locked)
    has_messages = await tx.fetchval(
        """
        SELECT EXISTS (
            SELECT FROM messages WHERE session_id = $1 AND rolled_back_at IS NULL AND position > coalesce((
                SELECT memories.position FROM memories JOIN sessions ON sessions.memory_id = memories.id
                WHERE sessions.id = $1
            ), 0)
        )
        """,
        locked.id,
    )
    if not has_messages:
        raise Conflict("nothing_to_compact", "No message has come in that a memory does not cover already.")
    run = NewRun(
        id=to_uuid(new_id("run")),
        api_key_id=None if api_key_id is None else to_uuid(api_key_id),
        options=RunOptions(compact=True, instructions=instructions),
    )
    admission = Admission(session_id=session_id, run_id=public("run", run.id))
    await append(tx, locked, draft_of_session(locked), admission, run=run, bounds=bounds)
    return admission


async def restore_memory(tx: Transaction, *, session_id: str, memory_id: str) -> Admission:
    """Puts an earlier memory into effect.

    Raises: NotFound, Conflict (`session_archived`, `session_busy`, `memory_rolled_back`).
    """
    locked = await lock_session(tx, session_id)
    require_idle(locked)
    memory = await get_memory(tx, session_id=session_id, memory_id=memory_id)
    if await _tells_of_rolled_back(tx, locked.id, memory):
        raise Conflict("memory_rolled_back", "The memory tells of messages that were rolled back since.")
    await tx.execute("UPDATE sessions SET memory_id = $2 WHERE id = $1", locked.id, to_uuid(memory_id))
    draft = draft_of_session(locked)
    draft.event(SessionUpdated, changes={"memory_id": memory_id})
    admission = Admission(session_id=session_id)
    await append(tx, locked, draft, admission)
    return admission


async def forget_after(tx: Transaction, session: UUID, position: int) -> None:
    """After a rollback to `position`: puts the newest memory into effect that tells of nothing behind it."""
    await tx.execute(
        """
        UPDATE sessions SET memory_id = (
            SELECT id FROM memories WHERE session_id = $1 AND position <= $2
            ORDER BY created_at DESC, id DESC LIMIT 1
        )
        WHERE id = $1 AND (SELECT position FROM memories WHERE memories.id = sessions.memory_id) > $2
        """,
        session,
        position,
    )


async def _tells_of_rolled_back(tx: Transaction, session: UUID, memory: MemoryRecord) -> bool:
    found = await tx.fetchval(
        """
        SELECT EXISTS (
            SELECT FROM messages WHERE session_id = $1 AND position <= $2 AND rolled_back_at > $3
        )
        """,
        session,
        memory.position,
        memory.created_at,
    )
    return bool(found)


def _record(row: Record) -> MemoryRecord:
    return MemoryRecord(
        id=public("mem", row["id"]),
        session_id=public("sess", row["session_id"]),
        position=row["position"],
        text=row["text"],
        is_in_effect=bool(row["is_in_effect"]),
        created_at=row["created_at"],
    )
