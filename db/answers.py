"""The client's answers to what its session waits for. The first one stands."""

import hashlib
from typing import Any
from uuid import UUID

import msgspec
from msgspec import Struct

from agents.answers import allowed, answered, denied, replied
from agents.closing import record_result
from agents.drafts import Draft
from agents.events import (
    Confirmation,
    StatusIdle,
    StopReason,
    UserContent,
    UserCustomToolResult,
    UserMessage,
    UserToolConfirmation,
)
from agents.log import LoggedEvent
from agents.types import ToolCall
from db.arrivals import Admission, NewPrompt, append, draft_of_session
from db.engine import Transaction
from db.errors import Conflict, NotFound
from db.ids import parse_id, public, to_uuid
from db.parts import encode_json
from db.work import CALL_COLUMNS, LockedSession, call_of
from providers.ids import new_id


class AnswerInput(Struct, frozen=True, kw_only=True, tag="user.custom_tool_result"):
    """The client's result for a tool that it runs."""

    custom_tool_use_id: str
    content: tuple[UserContent, ...] = ()
    is_error: bool = False


class ConfirmationInput(Struct, frozen=True, kw_only=True, tag="user.tool_confirmation"):
    """The client allows or denies a call that waits for its approval. `deny_message` is for the model."""

    tool_use_id: str
    result: Confirmation
    deny_message: str | None = None


class _StoredCall(Struct, frozen=True, kw_only=True):
    """A call and what has been answered to it: None for nothing."""

    call: ToolCall
    run_id: UUID
    answer_sha256: bytes | None


async def admit_answer(
    tx: Transaction, locked: LockedSession, answer: AnswerInput, admission: Admission
) -> None:
    """Raises: NotFound, Conflict (`wrong_answer`, `not_waiting`, `already_answered`), AnswerRefused."""
    found = await _find_call(tx, locked, answer.custom_tool_use_id)
    if found.call.kind == "server":
        raise _wrong(found.call, "is no call of a client's tool: it takes a `user.tool_confirmation`, if any")
    digest = _digest(answer.content, answer.is_error)
    if found.call.state != "open":
        admission.answered.append(await _earlier_answer(tx, locked, found, digest))
        return
    draft = draft_of_session(locked, run_id=found.run_id)
    draft.event(
        UserCustomToolResult,
        custom_tool_use_id=found.call.id,
        content=answer.content,
        is_error=answer.is_error,
    )
    await _store_call(tx, answered(found.call, answer.content, is_error=answer.is_error), digest)
    await _append_answer(tx, locked, draft, admission)
    await _after_answer(tx, locked, admission)


async def admit_confirmation(
    tx: Transaction, locked: LockedSession, confirmation: ConfirmationInput, admission: Admission
) -> None:
    """Raises: NotFound, Conflict (`wrong_answer`, `not_waiting`, `already_answered`)."""
    found = await _find_call(tx, locked, confirmation.tool_use_id)
    if found.call.kind != "server":
        raise _wrong(found.call, "waits for its result: send a `user.custom_tool_result`")
    digest = _digest(confirmation.result, confirmation.deny_message)
    if found.call.state != "open":
        admission.answered.append(await _earlier_answer(tx, locked, found, digest))
        return
    draft = draft_of_session(locked, run_id=found.run_id)
    draft.event(
        UserToolConfirmation,
        tool_use_id=found.call.id,
        result=confirmation.result,
        deny_message=confirmation.deny_message,
    )
    if confirmation.result == "allow":
        decided = allowed(found.call)
    else:
        decided = denied(found.call, confirmation.deny_message)
        record_result(draft, decided)
    await _store_call(tx, decided, digest)
    await _append_answer(tx, locked, draft, admission)
    await _after_answer(tx, locked, admission)


async def open_questions(tx: Transaction, locked: LockedSession) -> tuple[ToolCall, ...]:
    """What the waiting run asks the user; empty when it waits for anything else too, or does not wait."""
    if locked.run_state != "waiting":
        return ()
    rows = await tx.fetch(
        f"SELECT {CALL_COLUMNS} FROM tool_calls WHERE run_id = $1 AND state = 'open'"
        " ORDER BY position, index",
        locked.run_id,
    )
    calls = tuple(call_of(row) for row in rows)
    return calls if all(call.kind == "question" for call in calls) else ()


async def admit_reply(
    tx: Transaction,
    locked: LockedSession,
    content: tuple[UserContent, ...],
    questions: tuple[ToolCall, ...],
    *,
    api_key_id: UUID | None,
    admission: Admission,
) -> None:
    """A plain message that answers all open questions. It is the run's from the start, and never pending."""
    batch_id = new_id("batch")  # its own: prompts that were sent with it are for another run
    draft = draft_of_session(locked, run_id=locked.run_id)
    message = draft.event(
        UserMessage,
        content=content,
        delivery="queue",
        batch_id=batch_id,
        answers=tuple(call.id for call in questions),
    )
    stored = NewPrompt(
        id=message.id,
        batch_id=batch_id,
        content=content,
        delivery="queue",
        api_key_id=api_key_id,
        run_id=locked.run_id,
        state="applied",
    )
    await append(tx, locked, draft, admission, prompt=stored)
    admission.answered.append(admission.events[-1])
    draft = draft_of_session(locked, run_id=locked.run_id)
    for call in questions:
        draft.event(UserCustomToolResult, custom_tool_use_id=call.id, content=content, is_error=False)
        await _store_call(tx, replied(call, content), _digest(content, False))
    await append(tx, locked, draft, admission)
    await _after_answer(tx, locked, admission)


async def _find_call(tx: Transaction, locked: LockedSession, tool_use_id: str) -> _StoredCall:
    row = await tx.fetchrow(
        f"SELECT {CALL_COLUMNS}, run_id, answer_sha256 FROM tool_calls WHERE session_id = $1 AND id = $2",
        locked.id,
        parse_id("evt", tool_use_id),
    )
    if row is None:
        raise NotFound("tool use", tool_use_id)
    return _StoredCall(call=call_of(row), run_id=row["run_id"], answer_sha256=row["answer_sha256"])


def _wrong(call: ToolCall, why: str) -> Conflict:
    return Conflict("wrong_answer", f"The tool use {call.id} {why}.")


def _digest(*parts: Any) -> bytes:
    """Of an answer as it was sent, to tell the same one again from another."""
    return hashlib.sha256(encode_json(parts).encode()).digest()


async def _store_call(tx: Transaction, call: ToolCall, digest: bytes) -> None:
    """Stores the call as an answer has left it."""
    await tx.execute(
        """
        UPDATE tool_calls SET state = $2, outcome = $3, result = $4, answer_sha256 = $5,
            finished_at = CASE WHEN $2 = 'done' THEN clock_timestamp() END
        WHERE id = $1
        """,
        to_uuid(call.id),
        call.state,
        call.outcome,
        None if call.result is None else encode_json(call.result),
        digest,
    )


async def _append_answer(tx: Transaction, locked: LockedSession, draft: Draft, admission: Admission) -> None:
    """Stores the events of `draft`, the first of which is the answer's own."""
    position = len(admission.events)
    await append(tx, locked, draft, admission)
    admission.answered.append(admission.events[position])


async def _after_answer(tx: Transaction, locked: LockedSession, admission: Admission) -> None:
    """Queues a waiting run when nothing is open any more; else says what remains."""
    if locked.run_state != "waiting":
        return
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
        "UPDATE runs SET state = 'queued', queued_at = clock_timestamp(), wait_until = NULL WHERE id = $1",
        locked.run_id,
    )
    admission.wake = True


_AnswerEvent = UserCustomToolResult | UserToolConfirmation


async def _earlier_answer(
    tx: Transaction, locked: LockedSession, found: _StoredCall, digest: bytes
) -> LoggedEvent:
    """The event of the same answer that was given before: it stands in the log after its tool use.

    Raises: Conflict (`not_waiting`, `already_answered`).
    """
    tool_use_id = found.call.id
    if found.answer_sha256 is None:
        text = f"The tool use {tool_use_id} takes no answer: it needs none, or was closed without one."
        raise Conflict("not_waiting", text)
    if found.answer_sha256 != digest:
        text = f"The tool use {tool_use_id} takes no answer: it has another one already."
        raise Conflict("already_answered", text)
    rows = await tx.fetch(
        """
        SELECT seq, id, type, body FROM events
        WHERE session_id = $1 AND type IN ('user.custom_tool_result', 'user.tool_confirmation')
            AND seq > (SELECT seq FROM events WHERE session_id = $1 AND id = $2)
        ORDER BY seq
        """,
        locked.id,
        to_uuid(tool_use_id),
    )
    for row in rows:
        event = msgspec.json.decode(row["body"], type=_AnswerEvent)
        answers = event.tool_use_id if isinstance(event, UserToolConfirmation) else event.custom_tool_use_id
        if answers == tool_use_id:
            return LoggedEvent(
                seq=row["seq"], id=public("evt", row["id"]), type=row["type"], body=row["body"]
            )
    raise NotFound("answer to the tool use", tool_use_id)
