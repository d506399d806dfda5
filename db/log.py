"""Reading the event log of a session: pages of events, and where its end is."""

from collections.abc import Sequence
from datetime import datetime
from typing import Literal

from msgspec import Struct

from agents.log import LoggedEvent
from db.engine import Record, Transaction
from db.errors import NotFound
from db.ids import public, to_uuid

PAGE_EVENTS = 500
PAGE_BYTES = 512 * 1024

# A waiting run keeps its session busy unless the client has something to do for it.
_IS_BUSY = """
    EXISTS (
        SELECT FROM runs r
        WHERE r.session_id = s.id AND r.state <> 'closed'
            AND (
                r.state <> 'waiting'
                OR NOT EXISTS (
                    SELECT FROM tool_calls c
                    WHERE c.session_id = s.id AND c.run_id = r.id AND c.state = 'open'
                        AND c.child_run_id IS NULL
                )
            )
    )
"""


class Head(Struct, frozen=True, kw_only=True):
    """Where the log of a session ends.

    `is_busy`: a run is queued, running, or waits for child runs only, so more events come without a client.
    """

    last_seq: int
    epoch: int
    is_busy: bool


class LogExtent(Struct, frozen=True, kw_only=True):
    """What cursors are judged by.

    `first_seq` is the earliest event that is kept, `last_seq + 1` when there is none. `run_after_seq` is the
    position just before the first event of the newest run, or None when there was no run.
    """

    first_seq: int
    last_seq: int
    epoch: int
    is_busy: bool
    run_after_seq: int | None


async def events_after(
    tx: Transaction,
    session_id: str,
    after_seq: int,
    *,
    limit: int = PAGE_EVENTS,
    max_bytes: int = PAGE_BYTES,
) -> list[LoggedEvent]:
    """The events that follow `after_seq`, in order; empty at the end of the log.

    At most `limit`, and as many as fit into `max_bytes` of bodies; the first one comes whatever its size.
    """
    rows = await tx.fetch(
        """
        SELECT seq, id, type, body FROM (
            SELECT seq, id, type, body,
                sum(octet_length(body)) OVER (ORDER BY seq) - octet_length(body) AS bytes_before
            FROM (
                SELECT seq, id, type, body FROM events
                WHERE session_id = $1 AND seq > $2 ORDER BY seq LIMIT $3
            ) page
        ) measured
        WHERE bytes_before < $4 ORDER BY seq
        """,
        to_uuid(session_id),
        after_seq,
        limit,
        max_bytes,
    )
    return [_event(row) for row in rows]


async def list_events(
    tx: Transaction,
    session_id: str,
    *,
    after_seq: int | None = None,
    before_seq: int | None = None,
    types: Sequence[str] = (),
    created_gt: datetime | None = None,
    created_gte: datetime | None = None,
    created_lt: datetime | None = None,
    created_lte: datetime | None = None,
    order: Literal["asc", "desc"] = "asc",
    limit: int = 100,
) -> list[LoggedEvent]:
    """Events between two positions, both exclusive, oldest first or newest first. No `types`: of any type."""
    rows = await tx.fetch(
        f"""
        SELECT seq, id, type, body FROM events
        WHERE session_id = $1
            AND seq > coalesce($2, 0)
            AND ($3::bigint IS NULL OR seq < $3)
            AND (cardinality($4::text[]) = 0 OR type = ANY($4))
            AND ($6::timestamptz IS NULL OR created_at > $6)
            AND ($7::timestamptz IS NULL OR created_at >= $7)
            AND ($8::timestamptz IS NULL OR created_at < $8)
            AND ($9::timestamptz IS NULL OR created_at <= $9)
        ORDER BY seq {"ASC" if order == "asc" else "DESC"} LIMIT $5
        """,
        to_uuid(session_id),
        after_seq,
        before_seq,
        list(types),
        limit,
        created_gt,
        created_gte,
        created_lt,
        created_lte,
    )
    return [_event(row) for row in rows]


async def heads(tx: Transaction, session_ids: Sequence[str]) -> dict[str, Head]:
    """Where each log ends, all of one moment. Sessions that do not exist are missing."""
    rows = await tx.fetch(
        f"SELECT id, last_seq, epoch, {_IS_BUSY} AS is_busy FROM sessions s WHERE id = ANY($1)",
        [to_uuid(session_id) for session_id in session_ids],
    )
    return {
        public("sess", row["id"]): Head(last_seq=row["last_seq"], epoch=row["epoch"], is_busy=row["is_busy"])
        for row in rows
    }


async def get_extent(tx: Transaction, session_id: str) -> LogExtent:
    """All of one moment. Raises: NotFound, also when the session belongs to another tenant."""
    row = await tx.fetchrow(
        f"""
        SELECT last_seq, epoch, {_IS_BUSY} AS is_busy,
            coalesce((SELECT min(e.seq) FROM events e WHERE e.session_id = s.id), last_seq + 1) AS first_seq,
            (
                SELECT r.after_seq FROM runs r
                WHERE r.session_id = s.id ORDER BY r.queued_at DESC, r.id DESC LIMIT 1
            ) AS run_after_seq
        FROM sessions s WHERE id = $1
        """,
        to_uuid(session_id),
    )
    if row is None:
        raise NotFound("session", session_id)
    return LogExtent(
        first_seq=row["first_seq"],
        last_seq=row["last_seq"],
        epoch=row["epoch"],
        is_busy=row["is_busy"],
        run_after_seq=row["run_after_seq"],
    )


def _event(row: Record) -> LoggedEvent:
    return LoggedEvent(seq=row["seq"], id=public("evt", row["id"]), type=row["type"], body=row["body"])
