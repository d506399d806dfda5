"""The client's answers to what its session waits for. The first one stands."""

import hashlib

import msgspec
from msgspec import Struct

from agents.events import StatusIdle, StopReason, UserContent, UserCustomToolResult
from agents.log import LoggedEvent
from db.arrivals import Admission, append, draft_of_session, lock_session
from db.engine import Transaction
from db.errors import Conflict, NotFound
from db.ids import parse_id, public, to_uuid
from db.parts import encode_json
from db.work import LockedSession
from tools.types import ToolResult


class AnswerInput(Struct, frozen=True, kw_only=True, tag="user.custom_tool_result"):
    """The client's result for a tool that it runs."""

    custom_tool_use_id: str
    content: tuple[UserContent, ...] = ()
    is_error: bool = False


async def admit_answer(
    tx: Transaction, locked: LockedSession, answer: AnswerInput, admission: Admission
) -> None:
    """Raises: NotFound, Conflict (`not_waiting`, `already_answered`)."""
    call_uuid = parse_id("evt", answer.custom_tool_use_id)
    digest = hashlib.sha256(encode_json((answer.content, answer.is_error)).encode()).digest()
    call = await tx.fetchrow(
        "SELECT run_id, kind, state, answer_sha256 FROM tool_calls WHERE session_id = $1 AND id = $2",
        locked.id,
        call_uuid,
    )
    if call is None or call["kind"] != "client":
        raise NotFound("open custom tool use", answer.custom_tool_use_id)
    if call["state"] != "open":
        if call["answer_sha256"] == digest:
            admission.answered.append(await _earlier_answer(tx, locked, answer.custom_tool_use_id))
            return
        reason = "not_waiting" if call["answer_sha256"] is None else "already_answered"
        raise Conflict(
            reason,
            f"The tool use {answer.custom_tool_use_id} takes no answer: "
            + ("it was closed without one." if reason == "not_waiting" else "it has another one already."),
        )
    draft = draft_of_session(locked, run_id=call["run_id"])
    draft.event(
        UserCustomToolResult,
        custom_tool_use_id=answer.custom_tool_use_id,
        content=answer.content,
        is_error=answer.is_error,
    )
    result = ToolResult(content=answer.content, is_error=answer.is_error)
    await tx.execute(
        """
        UPDATE tool_calls SET state = 'done', outcome = $2, result = $3, answer_sha256 = $4,
            finished_at = clock_timestamp() WHERE id = $1
        """,
        call_uuid,
        "error" if answer.is_error else "ok",
        encode_json(result),
        digest,
    )
    await append(tx, locked, draft, admission)
    admission.answered.append(admission.events[-1])
    if locked.run_state == "waiting":
        await _after_answer(tx, await lock_session(tx, admission.session_id), admission)


async def _after_answer(tx: Transaction, locked: LockedSession, admission: Admission) -> None:
    """Queues the waiting run when nothing is open any more; else says what remains."""
    rows = await tx.fetch(
        "SELECT id FROM tool_calls WHERE run_id = $1 AND state = 'open' ORDER BY position, index",
        locked.run_id,
    )
    if rows:
        remaining = tuple(public("evt", row["id"]) for row in rows)
        draft = draft_of_session(locked, run_id=locked.run_id)
        draft.event(StatusIdle, stop_reason=StopReason(type="requires_action", event_ids=remaining))
        await append(tx, locked, draft, admission)
        return
    await tx.execute(
        "UPDATE runs SET state = 'queued', queued_at = clock_timestamp() WHERE id = $1", locked.run_id
    )
    admission.wake = True


async def _earlier_answer(tx: Transaction, locked: LockedSession, tool_use_id: str) -> LoggedEvent:
    """The event of the answer that was given before: it stands in the log after its tool use."""
    rows = await tx.fetch(
        """
        SELECT seq, id, type, body FROM events
        WHERE session_id = $1 AND type = 'user.custom_tool_result'
            AND seq > (SELECT seq FROM events WHERE session_id = $1 AND id = $2)
        ORDER BY seq
        """,
        locked.id,
        to_uuid(tool_use_id),
    )
    for row in rows:
        event = msgspec.json.decode(row["body"], type=UserCustomToolResult)
        if event.custom_tool_use_id == tool_use_id:
            return LoggedEvent(
                seq=row["seq"], id=public("evt", row["id"]), type=row["type"], body=row["body"]
            )
    raise NotFound("answer to the tool use", tool_use_id)
