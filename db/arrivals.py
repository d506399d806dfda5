"""What all that comes in for a session shares: its lock, its place in the log, what follows the commit."""

from dataclasses import dataclass, field
from typing import Any
from uuid import UUID

import msgspec

from agents.drafts import Draft
from agents.log import LoggedEvent, number
from db.engine import Transaction
from db.errors import Conflict, NotFound
from db.ids import parse_id, public, public_or_none, to_uuid
from db.work import LockedSession, find_locked


@dataclass(kw_only=True)
class Admission:
    """What was stored, and what is left to do after the commit.

    `events`: to be published, in order. `answered`: the stored event of each input, in order; the event of an
    answer that had been given before is the earlier one and not in `events`. `run_id`: the run that the
    first prompt is bound to, None while it waits behind another. `wake`: a run was queued. `signal_cancel`:
    a worker is to be told.
    """

    session_id: str
    events: list[LoggedEvent] = field(default_factory=list)
    answered: list[LoggedEvent] = field(default_factory=list)
    run_id: str | None = None
    wake: bool = False
    signal_cancel: bool = False


async def lock_session(tx: Transaction, session_id: str, *, even_archived: bool = False) -> LockedSession:
    """The session, locked. Raises: NotFound, Conflict (`session_archived`)."""
    locked = await find_locked(tx, parse_id("sess", session_id))
    if locked is None:
        raise NotFound("session", session_id)
    if locked.archived_at is not None and not even_archived:
        raise Conflict("session_archived", "The session is archived and takes nothing more. Start a new one.")
    return locked


async def append(tx: Transaction, locked: LockedSession, draft: Draft, admission: Admission) -> None:
    """Numbers and stores the events of `draft`, and raises `inbox_no`."""
    events = draft.build().events
    row = await tx.fetchrow(
        """
        UPDATE sessions SET last_seq = last_seq + $2, inbox_no = inbox_no + 1, updated_at = clock_timestamp()
        WHERE id = $1 RETURNING last_seq
        """,
        locked.id,
        len(events),
    )
    assert row is not None
    logged = number(events, after_seq=row["last_seq"] - len(events))
    for event, entry in zip(events, logged, strict=True):
        await tx.execute(
            """
            INSERT INTO events (session_id, tenant_id, seq, id, run_id, type, body, created_at)
            VALUES ($1, $2, $3, $4, $5, $6, $7, $8)
            """,
            locked.id,
            locked.tenant_id,
            entry.seq,
            to_uuid(event.id),
            None if event.run_id is None else to_uuid(event.run_id),
            entry.type,
            entry.body,
            event.created_at,
        )
    admission.events.extend(logged)


async def raise_inbox(tx: Transaction, locked: LockedSession) -> None:
    """Makes every commit fail that was decided before."""
    await tx.execute("UPDATE sessions SET inbox_no = inbox_no + 1 WHERE id = $1", locked.id)


def draft_of_session(locked: LockedSession, run_id: UUID | None = None) -> Draft:
    """An empty draft at the end of the session."""
    return Draft(
        session_id=public("sess", locked.id),
        run_id=public_or_none("run", run_id),
        now=locked.now,
        next_position=locked.last_position + 1,
    )


def encode_json(value: Any) -> str:
    """For a column of type JSON."""
    return msgspec.json.encode(value).decode()
