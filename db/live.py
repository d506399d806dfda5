"""What goes on in a session at one moment, beside the session itself."""

from datetime import datetime
from uuid import UUID

import msgspec
from msgspec import Struct

from agents.events import ErrorDetail, SessionError, decode_event
from agents.types import CallState
from db.engine import Transaction
from db.errors import NotFound
from db.ids import parse_id, public, public_or_none
from db.runs import RunState
from providers.types import JsonObject

LISTED_PROMPTS = 100


class PendingCall(Struct, frozen=True, kw_only=True):
    """A call without a result. `state`: `pending`, `running`, or `open` while it waits for the client."""

    tool_use_id: str
    name: str
    input: JsonObject
    state: CallState


class LastError(Struct, frozen=True, kw_only=True):
    """The newest `session.error` of the newest run."""

    seq: int
    created_at: datetime
    error: ErrorDetail


class LoggedId(Struct, frozen=True, kw_only=True):
    """An event without its body."""

    seq: int
    id: str
    type: str


class LiveState(Struct, frozen=True, kw_only=True):
    """All as of `seq`, the end of the log. `events`: those after the one that was asked for.

    `prompt_ids`: of the prompts that wait, the first of them as they came; `prompt_count`: of all.
    """

    seq: int
    epoch: int
    run_id: str | None
    run_state: RunState | None
    calls: tuple[PendingCall, ...]
    prompt_ids: tuple[str, ...]
    prompt_count: int
    last_error: LastError | None
    events: tuple[LoggedId, ...]


_STATE = f"""
SELECT s.last_seq, s.epoch, r.id AS run_id, r.state AS run_state,
    ARRAY(
        SELECT ROW(c.id, c.name, c.input, c.state) FROM tool_calls c
        WHERE c.session_id = s.id AND c.position = s.last_position AND c.state <> 'done' ORDER BY c.index
    ) AS calls,
    ARRAY(
        SELECT p.id FROM prompts p WHERE p.session_id = s.id AND p.state = 'pending'
        ORDER BY p.seq LIMIT {LISTED_PROMPTS}
    ) AS prompts,
    (SELECT count(*) FROM prompts p WHERE p.session_id = s.id AND p.state = 'pending') AS prompt_count,
    (
        SELECT ROW(e.seq, e.body) FROM events e
        WHERE e.session_id = s.id AND e.type = 'session.error' AND e.seq > (
            SELECT n.after_seq FROM runs n WHERE n.session_id = s.id
            ORDER BY n.queued_at DESC, n.id DESC LIMIT 1
        )
        ORDER BY e.seq DESC LIMIT 1
    ) AS error,
    ARRAY(
        SELECT ROW(e.seq, e.id, e.type) FROM events e
        WHERE e.session_id = s.id AND e.seq > $3 ORDER BY e.seq
    ) AS events
FROM sessions s LEFT JOIN runs r ON r.session_id = s.id AND r.state <> 'closed'
WHERE s.tenant_id = $1 AND s.id = $2
"""


async def get_live_state(tx: Transaction, session_id: str, *, after_seq: int | None) -> LiveState:
    """One moment's state, with the events after `after_seq`; None: with none. Raises: NotFound."""
    row = await tx.fetchrow(_STATE, tx.tenant_id, parse_id("sess", session_id), after_seq)
    if row is None:
        raise NotFound("session", session_id)
    return LiveState(
        seq=row["last_seq"],
        epoch=row["epoch"],
        run_id=public_or_none("run", row["run_id"]),
        run_state=row["run_state"],
        calls=tuple(_call(*call) for call in row["calls"]),
        prompt_ids=tuple(public("evt", prompt) for prompt in row["prompts"]),
        prompt_count=row["prompt_count"],
        last_error=None if row["error"] is None else _error(*row["error"]),
        events=tuple(
            LoggedId(seq=seq, id=public("evt", event_id), type=kind) for seq, event_id, kind in row["events"]
        ),
    )


def _call(call_id: UUID, name: str, arguments: str, state: CallState) -> PendingCall:
    return PendingCall(
        tool_use_id=public("evt", call_id), name=name, input=msgspec.json.decode(arguments), state=state
    )


def _error(seq: int, body: bytes) -> LastError:
    event = decode_event(body)
    assert isinstance(event, SessionError)
    return LastError(seq=seq, created_at=event.created_at, error=event.error)
