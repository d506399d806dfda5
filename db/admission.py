"""What comes in for a session: prompts, answers, cancels. Each locks the session row first, then the run.

Everything here raises `sessions.inbox_no`, so that a worker that decided before it came in decides again.
`commit_no` belongs to workers and is not touched.
"""

from collections.abc import Callable, Sequence
from uuid import UUID

from msgspec import Struct

from agents.closing import close_step, stops_here
from agents.config import RunOverrides
from agents.drafts import Draft
from agents.events import (
    CancelMode,
    Delivery,
    PromptUpdated,
    PromptWithdrawn,
    SessionRolledBack,
    StopReason,
    SystemMessage,
    UserContent,
    UserInterrupt,
    UserMessage,
)
from agents.types import CloseRun, RunOptions
from db.answers import (
    AnswerInput,
    ConfirmationInput,
    admit_answer,
    admit_confirmation,
    admit_reply,
    open_questions,
)
from db.arrivals import (
    Admission,
    NewPrompt,
    NewRun,
    append,
    draft_of_session,
    lock_session,
    raise_inbox,
    require_idle,
)
from db.engine import Transaction
from db.errors import Conflict, NotFound
from db.ids import parse_id, public, public_or_none, to_uuid
from db.memories import forget_after
from db.parts import encode_json
from db.queue_depth import QueueBounds
from db.steps import Fence, store_step
from db.work import LockedSession, load_work
from providers.ids import new_id
from providers.types import TextBlock

__all__ = [
    "Admission",
    "AnswerInput",
    "ConfirmationInput",
    "Input",
    "InterruptInput",
    "PromptInput",
    "admit",
    "append_events",
    "cancel_run",
    "continue_session",
    "edit_prompt",
    "roll_back",
    "withdraw_prompt",
]


class PromptInput(Struct, frozen=True, kw_only=True, tag="user.message"):
    """User input. Prompts admitted together are one batch. `delivery` None: the client named none.

    `overrides` hold for the run of the batch; they stand on its first prompt.
    """

    content: tuple[UserContent, ...]
    delivery: Delivery | None = None
    overrides: RunOverrides = RunOverrides()


class InterruptInput(Struct, frozen=True, kw_only=True, tag="user.interrupt"):
    """Stops the open run, if there is one."""

    mode: CancelMode = "now"
    reason: str | None = None


class SystemInput(Struct, frozen=True, kw_only=True, tag="system.message"):
    """Instructions for the conversation from here on; `section` names what a later one replaces."""

    content: tuple[TextBlock, ...]
    section: str | None = None


Input = PromptInput | InterruptInput | AnswerInput | ConfirmationInput | SystemInput

REPLACES = "The section {!r} of the instructions reads as follows from here on:"
INTERRUPTED = "A prompt took the place of the run."


async def admit(
    tx: Transaction,
    *,
    session_id: str,
    inputs: Sequence[Input],
    api_key_id: str | None,
    bounds: QueueBounds | None = None,
) -> Admission:
    """Stores `inputs` in order; prompts among them are one batch and have one delivery.

    Raises: NotFound, Conflict (`session_archived`, `session_busy`, `wrong_answer`, `not_waiting`,
    `already_answered`), AnswerRefused, QueueFull.
    """
    admission = Admission(session_id=session_id)
    batch_id = new_id("batch")
    for item in inputs:
        # Locked again for each input: a row lock that is held is free, and each sees what the one before did.
        locked = await lock_session(tx, session_id)
        match item:
            case PromptInput():
                await _admit_prompt(
                    tx,
                    locked,
                    item,
                    batch_id=batch_id,
                    api_key_id=api_key_id,
                    admission=admission,
                    bounds=bounds,
                )
            case SystemInput():
                await _admit_system(
                    tx, locked, item, api_key_id=api_key_id, admission=admission, bounds=bounds
                )
            case InterruptInput():
                await _admit_interrupt(tx, locked, item, admission)
            case AnswerInput():
                await admit_answer(tx, locked, item, admission)
            case ConfirmationInput():
                await admit_confirmation(tx, locked, item, admission)
    return admission


async def cancel_run(
    tx: Transaction, *, run_id: str, mode: CancelMode = "now", reason: str | None
) -> Admission:
    """Cancels one run; a run that is closed stays as it is. Raises: NotFound."""
    run_uuid = parse_id("run", run_id)
    session_uuid = await tx.fetchval(
        "SELECT session_id FROM runs WHERE id = $1 AND ($2::uuid IS NULL OR tenant_id = $2)",
        run_uuid,
        tx.tenant_id,
    )
    if session_uuid is None:
        raise NotFound("run", run_id)
    locked = await lock_session(tx, public("sess", session_uuid), even_archived=True)
    admission = Admission(session_id=public("sess", session_uuid), run_id=run_id)
    if locked.run_id == run_uuid:
        await raise_inbox(tx, locked)
        await _cancel(tx, locked, mode, reason, admission)
    return admission


async def withdraw_prompt(tx: Transaction, *, session_id: str, prompt_id: str) -> Admission:
    """Takes back a prompt that no run has taken up. Raises: NotFound, Conflict (`prompt_not_pending`)."""
    locked, run_uuid = await _lock_prompt(tx, session_id, prompt_id)
    admission = Admission(session_id=session_id)
    if run_uuid is not None and await _is_last_of_batch(tx, run_uuid, to_uuid(prompt_id)):
        # The run has nothing else to do: it ends with its prompt.
        await raise_inbox(tx, locked)
        await _cancel(tx, locked, "now", "its prompt was withdrawn", admission)
        return admission
    await tx.execute(
        "UPDATE prompts SET state = 'withdrawn', updated_at = clock_timestamp() WHERE id = $1",
        to_uuid(prompt_id),
    )
    draft = draft_of_session(locked)
    draft.event(PromptWithdrawn, prompt_id=prompt_id, reason="client")
    await append(tx, locked, draft, admission)
    return admission


async def edit_prompt(
    tx: Transaction, *, session_id: str, prompt_id: str, content: tuple[UserContent, ...]
) -> Admission:
    """Changes a prompt that no run has taken up. Raises: NotFound, Conflict (`prompt_not_pending`)."""
    locked, _ = await _lock_prompt(tx, session_id, prompt_id)
    admission = Admission(session_id=session_id)
    await tx.execute(
        "UPDATE prompts SET content = $2, updated_at = clock_timestamp() WHERE id = $1",
        to_uuid(prompt_id),
        encode_json(content),
    )
    draft = draft_of_session(locked)
    draft.event(PromptUpdated, prompt_id=prompt_id, content=content)
    await append(tx, locked, draft, admission)
    return admission


async def roll_back(tx: Transaction, *, session_id: str) -> Admission:
    """Takes the last run back that has left anything in the transcript: the model no longer sees it.

    Nothing is deleted, and usage stays counted. Raises: NotFound, Conflict (`session_archived`,
    `session_busy`, `nothing_to_roll_back`).
    """
    locked = await lock_session(tx, session_id)
    require_idle(locked)
    run_id = await tx.fetchval(
        """
        SELECT run_id FROM messages WHERE session_id = $1 AND rolled_back_at IS NULL
        ORDER BY position DESC LIMIT 1
        """,
        locked.id,
    )
    if run_id is None:
        raise Conflict("nothing_to_roll_back", "No run of the session has left anything to take back.")
    # A run's messages stand together, and they are the last ones that the model sees.
    await tx.execute(
        """
        UPDATE messages SET rolled_back_at = clock_timestamp()
        WHERE session_id = $1 AND run_id = $2 AND rolled_back_at IS NULL
        """,
        locked.id,
        run_id,
    )
    position = await tx.fetchval(
        "SELECT coalesce(max(position), 0) FROM messages WHERE session_id = $1 AND rolled_back_at IS NULL",
        locked.id,
    )
    await forget_after(tx, locked.id, position)
    draft = draft_of_session(locked)
    draft.event(SessionRolledBack, rolled_back_run_id=public("run", run_id), position=position)
    admission = Admission(session_id=session_id)
    await append(tx, locked, draft, admission)
    return admission


async def continue_session(
    tx: Transaction,
    *,
    session_id: str,
    overrides: RunOverrides,
    api_key_id: str | None,
    bounds: QueueBounds | None = None,
) -> Admission:
    """Queues a run without a prompt, which asks the model from where the transcript stands.

    Raises: NotFound, Conflict (`session_archived`, `session_busy`, `nothing_to_continue`), QueueFull.
    """
    locked = await lock_session(tx, session_id)
    require_idle(locked)
    tail = await tx.fetchval(
        """
        SELECT role FROM messages WHERE session_id = $1 AND rolled_back_at IS NULL AND role <> 'system'
        ORDER BY position DESC LIMIT 1
        """,
        locked.id,
    )
    if tail not in {"user", "tool"}:
        raise Conflict(
            "nothing_to_continue",
            "The transcript ends on nothing that the model could answer; send a prompt.",
        )
    run = NewRun(
        id=to_uuid(new_id("run")),
        api_key_id=None if api_key_id is None else to_uuid(api_key_id),
        options=RunOptions(overrides=overrides),
    )
    admission = Admission(session_id=session_id, run_id=public("run", run.id))
    await append(tx, locked, draft_of_session(locked), admission, run=run, bounds=bounds)
    return admission


async def append_events(tx: Transaction, *, session_id: str, write: Callable[[Draft], None]) -> Admission:
    """Adds events about the session itself, such as `session.updated`. Raises: NotFound."""
    locked = await lock_session(tx, session_id, even_archived=True)
    draft = draft_of_session(locked)
    write(draft)
    admission = Admission(session_id=session_id)
    await append(tx, locked, draft, admission)
    return admission


# -- one input each -------------------------------------------------------------------------------------


async def _admit_prompt(
    tx: Transaction,
    locked: LockedSession,
    prompt: PromptInput,
    *,
    batch_id: str,
    api_key_id: str | None,
    admission: Admission,
    bounds: QueueBounds | None,
) -> None:
    delivery = prompt.delivery or "queue"
    is_first = not admission.has_prompts
    key_id = None if api_key_id is None else to_uuid(api_key_id)
    questions = await open_questions(tx, locked) if prompt.delivery is None else ()
    if questions:
        await admit_reply(tx, locked, prompt.content, questions, api_key_id=key_id, admission=admission)
        admission.run_id = admission.run_id or public_or_none("run", locked.run_id)
        return
    run_id = None if is_first else await _run_for_batch(tx, locked, batch_id)
    if is_first and locked.run_id is not None and delivery == "reject":
        raise Conflict(
            "session_busy",
            f"The session works on the run {public('run', locked.run_id)}, and the prompt was to be rejected"
            " in that case. Send it again later, or with another delivery.",
        )
    run = None
    if locked.run_id is None:
        run_id = to_uuid(new_id("run"))
        run = NewRun(id=run_id, api_key_id=key_id, options=_options(prompt))
    draft = draft_of_session(locked, run_id=run_id)
    event = draft.event(
        UserMessage, content=prompt.content, delivery=delivery, batch_id=batch_id, processed=False
    )
    stored = NewPrompt(
        id=event.id,
        batch_id=batch_id,
        content=prompt.content,
        delivery=delivery,
        api_key_id=key_id,
        run_id=run_id,
        overrides=prompt.overrides,
    )
    await append(tx, locked, draft, admission, run=run, prompt=stored, bounds=bounds)
    admission.answered.append(admission.events[-1])
    admission.has_prompts = True
    admission.run_id = admission.run_id or public_or_none("run", run_id)
    if is_first and locked.run_id is not None and delivery == "interrupt":
        # Once the prompt stands, so that what closes the run makes the next one of it.
        await _cancel(tx, await lock_session(tx, admission.session_id), "now", INTERRUPTED, admission)


async def _admit_system(
    tx: Transaction,
    locked: LockedSession,
    message: SystemInput,
    *,
    api_key_id: str | None,
    admission: Admission,
    bounds: QueueBounds | None,
) -> None:
    draft = draft_of_session(locked)
    event = draft.event(SystemMessage, content=message.content, section=message.section, processed=False)
    told = message.content
    if message.section is not None:
        # Said, and not written over what it replaces: the start of a conversation stays as it was sent.
        told = (TextBlock(text=REPLACES.format(message.section)), *told)
    stored = NewPrompt(
        id=event.id,
        batch_id=new_id("batch"),
        content=told,
        delivery="next_request",
        api_key_id=None if api_key_id is None else to_uuid(api_key_id),
        run_id=None,
    )
    await append(tx, locked, draft, admission, prompt=stored, bounds=bounds)
    admission.answered.append(admission.events[-1])


def _options(prompt: PromptInput) -> RunOptions | None:
    return None if prompt.overrides == RunOverrides() else RunOptions(overrides=prompt.overrides)


async def _run_for_batch(tx: Transaction, locked: LockedSession, batch_id: str) -> UUID | None:
    """The run that earlier prompts of the batch are bound to; all prompts of one POST go together."""
    found = await tx.fetchval(
        "SELECT run_id FROM prompts WHERE session_id = $1 AND batch_id = $2 AND state = 'pending' LIMIT 1",
        locked.id,
        to_uuid(batch_id),
    )
    return found if found == locked.run_id else None


async def _admit_interrupt(
    tx: Transaction, locked: LockedSession, interrupt: InterruptInput, admission: Admission
) -> None:
    draft = draft_of_session(locked, run_id=locked.run_id)
    draft.event(UserInterrupt, mode=interrupt.mode, reason=interrupt.reason)
    await append(tx, locked, draft, admission)
    admission.answered.append(admission.events[-1])
    if locked.run_id is not None:
        locked = await lock_session(tx, admission.session_id)
        await _cancel(tx, locked, interrupt.mode, interrupt.reason, admission)


async def _cancel(
    tx: Transaction, locked: LockedSession, mode: CancelMode, reason: str | None, admission: Admission
) -> None:
    """Running: sets the flag, its worker closes the run. Queued or waiting: closes it here and now.

    With `after_turn` that is only done between two turns. While calls of the turn are unfinished, as they
    are when the client has to answer them, the flag is set, and the worker that finishes them closes the run.
    """
    assert locked.run_id is not None
    if locked.run_state == "running":
        await _request_cancel(tx, locked, mode, reason)
        admission.signal_cancel = True
        return
    work = await load_work(tx, locked)
    if not stops_here(mode, work):
        await _request_cancel(tx, locked, mode, reason)
        return
    stop = StopReason(type="cancelled", message=reason)
    step = close_step(work, stop, locked.now)
    fence = Fence(session_id=work.session_id, run_id=work.run_id, epoch=locked.epoch)
    events = await store_step(tx, fence, step)
    assert events is not None, "the session row is locked"
    admission.events.extend(events)
    assert isinstance(step.ending, CloseRun)
    following = step.ending.next_run
    if following is not None:
        admission.wake = True
        if any(event.id in following.prompt_ids for event in admission.answered):
            admission.run_id = following.id


async def _request_cancel(
    tx: Transaction, locked: LockedSession, mode: CancelMode, reason: str | None
) -> None:
    """Sets the flag, if nothing as strong was asked for before. The first moment and reason stand."""
    if locked.cancel_mode is None or (locked.cancel_mode == "after_turn" and mode == "now"):
        await tx.execute(
            """
            UPDATE runs SET cancel_requested_at = clock_timestamp(), cancel_mode = $2, cancel_reason = $3
            WHERE id = $1
            """,
            locked.run_id,
            mode,
            reason,
        )


# -- shared ---------------------------------------------------------------------------------------------


async def _lock_prompt(tx: Transaction, session_id: str, prompt_id: str) -> tuple[LockedSession, UUID | None]:
    locked = await lock_session(tx, session_id)
    row = await tx.fetchrow(
        "SELECT state, run_id FROM prompts WHERE session_id = $1 AND id = $2",
        locked.id,
        parse_id("evt", prompt_id),
    )
    if row is None:
        raise NotFound("prompt", prompt_id)
    is_taken = row["run_id"] is not None and locked.run_state != "queued"
    if row["state"] != "pending" or is_taken:
        raise Conflict("prompt_not_pending", f"The prompt {prompt_id} is not pending any more.")
    return locked, row["run_id"]


async def _is_last_of_batch(tx: Transaction, run_uuid: UUID, prompt_uuid: UUID) -> bool:
    others = await tx.fetchval(
        "SELECT count(*) FROM prompts WHERE run_id = $1 AND id <> $2 AND state <> 'withdrawn'",
        run_uuid,
        prompt_uuid,
    )
    return int(others) == 0
