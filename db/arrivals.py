"""What all that comes in for a session shares: its lock, its place in the log, what follows the commit."""

from dataclasses import dataclass, field
from typing import Literal
from uuid import UUID

from msgspec import Struct

from agents.config import RunOverrides
from agents.drafts import Draft
from agents.events import PromptDelivery, UserContent
from agents.log import LoggedEvent, number, renumbered
from agents.types import RunOptions
from db.engine import Transaction
from db.errors import Conflict, NotFound
from db.ids import parse_id, public, public_or_none, to_uuid
from db.parts import Parts, add_events, encode_json
from db.queue_depth import QueueBounds, add_depth, queue_full
from db.work import LockedSession, find_locked


@dataclass(kw_only=True)
class Admission:
    """What was stored, and what is left to do after the commit.

    `events`: to be published, in order. `answered`: the stored event of each input, in order; the event of an
    answer that had been given before is the earlier one and not in `events`. `run_id`: the run that the
    first prompt is bound to, None while it waits behind another. `wake`: a run was queued. `signal_cancel`:
    a worker is to be told. `has_prompts`: a prompt is among what was stored.
    """

    session_id: str
    events: list[LoggedEvent] = field(default_factory=list)
    answered: list[LoggedEvent] = field(default_factory=list)
    run_id: str | None = None
    wake: bool = False
    signal_cancel: bool = False
    has_prompts: bool = False


async def lock_session(tx: Transaction, session_id: str, *, even_archived: bool = False) -> LockedSession:
    """The session, locked. Raises: NotFound, Conflict (`session_archived`)."""
    locked = await find_locked(tx, parse_id("sess", session_id))
    if locked is None:
        raise NotFound("session", session_id)
    if locked.archived_at is not None and not even_archived:
        raise Conflict("session_archived", "The session is archived and takes nothing more. Start a new one.")
    return locked


def require_idle(locked: LockedSession) -> None:
    """Raises: Conflict (`session_busy`), when the session has an open run."""
    if locked.run_id is not None:
        raise Conflict(
            "session_busy",
            f"The session has an open run; cancel {public('run', locked.run_id)} first, or wait for its end.",
        )


class NewRun(Struct, frozen=True, kw_only=True):
    """A run to be queued: the session has none that is open."""

    id: UUID
    api_key_id: UUID | None
    options: RunOptions | None = None


class NewPrompt(Struct, frozen=True, kw_only=True):
    """A prompt; `id` is that of its `user.message`. `run_id`: the run that it is bound to.

    `state` `applied`: its run has it already, as the answer to questions.
    """

    id: str
    batch_id: str
    content: tuple[UserContent, ...]
    delivery: PromptDelivery
    api_key_id: UUID | None
    run_id: UUID | None
    overrides: RunOverrides = RunOverrides()
    state: Literal["pending", "applied"] = "pending"


async def append(
    tx: Transaction,
    locked: LockedSession,
    draft: Draft,
    admission: Admission,
    *,
    run: NewRun | None = None,
    prompt: NewPrompt | None = None,
    bounds: QueueBounds | None = None,
) -> None:
    """Numbers and stores the events of `draft`, raises `inbox_no`, adds `run` and `prompt`: one statement.

    The run begins before, the prompt stands at the last of these events.
    Raises: QueueFull, when too much waits already by `bounds`; then the transaction is to be given up.
    """
    events = draft.build().events
    logged = number(events, after_seq=0)
    parts = Parts()
    parts.add(
        "fence",
        """
        UPDATE sessions SET last_seq = last_seq + {}, inbox_no = inbox_no + 1, updated_at = clock_timestamp()
        WHERE id = {} RETURNING id AS session_id, tenant_id, last_seq
        """,
        len(events),
        locked.id,
    )
    add_events(parts, events, logged)
    if run is not None:
        _add_run(parts, run, len(events))
    if prompt is not None:
        _add_prompt(parts, prompt)
    if bounds is not None:
        add_depth(parts, bounds, makes_run=run is not None)
    columns = "last_seq" if bounds is None else "last_seq, waiting.depth, waiting.bound"
    tables = "fence" if bounds is None else "fence, waiting"
    row = await tx.fetchrow(parts.statement(f"SELECT {columns} FROM {tables}"), *parts.values)
    assert row is not None, "the session row is locked"
    if bounds is not None and row["depth"] >= row["bound"]:
        raise await queue_full(tx, locked, row["depth"], makes_run=run is not None)
    admission.events.extend(renumbered(logged, after_seq=row["last_seq"] - len(events)))
    admission.wake = admission.wake or run is not None


def _add_run(parts: Parts, run: NewRun, event_count: int) -> None:
    parts.add(
        "new_run",
        """
        INSERT INTO runs (id, tenant_id, session_id, state, api_key_id, options, after_seq)
        SELECT {}, fence.tenant_id, fence.session_id, 'queued', {}, {}, fence.last_seq - {} FROM fence
        """,
        run.id,
        run.api_key_id,
        None if run.options is None else encode_json(run.options),
        event_count,
    )


def _add_prompt(parts: Parts, prompt: NewPrompt) -> None:
    parts.add(
        "new_prompt",
        """
        INSERT INTO prompts
            (id, tenant_id, session_id, batch_id, seq, state, delivery, content, options, api_key_id, run_id)
        SELECT {}, fence.tenant_id, fence.session_id, {}, fence.last_seq, {}, {}, {}, {}, {}, {} FROM fence
        """,
        to_uuid(prompt.id),
        to_uuid(prompt.batch_id),
        prompt.state,
        prompt.delivery,
        encode_json(prompt.content),
        None if prompt.overrides == RunOverrides() else encode_json(prompt.overrides),
        prompt.api_key_id,
        prompt.run_id,
    )


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
