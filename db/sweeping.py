"""Taking runs from workers that are gone, closing those that do not heed a cancel or wait for too long.

Promise 9 rests on this: no run stays running with nobody working on it for longer than a lease plus a sweep.
"""

from typing import TypeGuard
from uuid import UUID

from msgspec import Struct

from agents.closing import (
    OpenWork,
    abandon_request,
    close,
    close_step,
    draft_of,
    requeue_step,
    stops_here,
)
from agents.events import ErrorDetail, RetryStatus, SessionError, StopReason
from agents.log import LoggedEvent
from agents.types import RequeueRun, Step
from db.engine import Transaction
from db.holds import LEASE_S
from db.ids import public, to_uuid
from db.steps import Fence, store_step
from db.work import LockedSession, find_locked, load_work

MAX_TAKEOVERS_SINCE_PROGRESS = 3
MAX_TAKEOVERS = 10
CANCEL_GRACE_S = 2.0
BATCH = 100
FORGET_WORKERS_AFTER_S = 3600.0
SWEEP_LOCK = 4_711_043  # any number; the same in all releases, so that sweepers do not repeat each other
WAITS_LOCK = 4_711_044

UNANSWERED = "Nobody answered within the time that the run may wait."
_POISONED = "Each worker that took up this run was lost while it worked on it, so it is not tried again."


class Swept(Struct, frozen=True, kw_only=True):
    """What was done to one session: events to publish, and the epoch that puts the old worker off."""

    session_id: str
    events: tuple[LoggedEvent, ...]
    epoch: int
    is_queued: bool


async def stale_sessions(tx: Transaction, *, worker_id: str, lease_s: float = LEASE_S) -> list[UUID]:
    """Sessions whose run lost its worker or goes on after a cancel; empty while another sweeper looks.

    Empty too unless the worker that asks has held its own lease without a break for as long as one lasts:
    after an outage all leases have run out, and their workers must have had the time to renew them.
    """
    if not await tx.fetchval("SELECT pg_try_advisory_xact_lock($1)", SWEEP_LOCK):
        return []
    rows = await tx.fetch(
        """
        SELECT session_id FROM runs LEFT JOIN workers ON workers.id = runs.worker_id
        WHERE state = 'running' AND (
            workers.id IS NULL OR workers.lease_until < clock_timestamp()
            OR (cancel_mode = 'now' AND cancel_requested_at < clock_timestamp() - make_interval(secs => $1))
        )
        AND EXISTS (
            SELECT FROM workers me WHERE me.id = $3 AND me.lease_until > clock_timestamp()
                AND me.steady_since < clock_timestamp() - make_interval(secs => $4)
        )
        ORDER BY runs.id LIMIT $2
        """,
        CANCEL_GRACE_S,
        BATCH,
        to_uuid(worker_id),
        lease_s,
    )
    return [row["session_id"] for row in rows]


async def sweep_session(tx: Transaction, session_id: UUID) -> Swept | None:
    """Queues the session's run again, or closes it; None when there is nothing to do (any more)."""
    locked = await find_locked(tx, session_id, skip_locked=True)
    if locked is None or locked.run_state != "running":
        return None
    is_lost = not await _has_lease(tx, locked.run_worker_id)
    is_overdue = locked.cancel_mode == "now" and await _is_overdue(tx, locked)
    if not is_lost and not is_overdue:
        return None
    work = await load_work(tx, locked)
    return await _store(tx, locked, work, _decide(locked, work, takeover=True))


async def overdue_waits(tx: Transaction) -> list[UUID]:
    """Sessions whose run has waited for the client for too long; empty while another sweeper looks."""
    if not await tx.fetchval("SELECT pg_try_advisory_xact_lock($1)", WAITS_LOCK):
        return []
    rows = await tx.fetch(
        """
        SELECT session_id FROM runs WHERE state = 'waiting' AND wait_until <= clock_timestamp()
        ORDER BY wait_until LIMIT $1
        """,
        BATCH,
    )
    return [row["session_id"] for row in rows]


async def end_wait(tx: Transaction, session_id: UUID) -> Swept | None:
    """Closes the session's run with its calls unanswered; None when it does not wait (any more)."""
    locked = await find_locked(tx, session_id, skip_locked=True)
    if locked is None or locked.run_state != "waiting":
        return None
    if locked.wait_until is None or locked.wait_until > locked.now:
        return None  # it was answered, and waits again
    work = await load_work(tx, locked)
    stop = StopReason(type="timed_out", code="not_answered", message=UNANSWERED)
    return await _store(tx, locked, work, close_step(work, stop, locked.now))


async def hand_over(
    tx: Transaction, *, session_id: UUID, epoch: int, worker_id: UUID, takeover: bool = False
) -> Swept | None:
    """Gives a worker's own run back to the queue, or closes it when it was cancelled meanwhile.

    Counts as a takeover, and so is not done for ever, unless it is a hand-over at shutdown.
    """
    locked = await find_locked(tx, session_id)
    if not _is_held(locked, epoch, worker_id):
        return None
    work = await load_work(tx, locked)
    return await _store(tx, locked, work, _decide(locked, work, takeover=takeover))


async def fail_run(
    tx: Transaction, *, session_id: UUID, epoch: int, worker_id: UUID, stop: StopReason
) -> Swept | None:
    """Closes a worker's own run whose loop failed; None when the hold was lost before."""
    locked = await find_locked(tx, session_id)
    if not _is_held(locked, epoch, worker_id):
        return None
    work = await load_work(tx, locked)
    return await _store(tx, locked, work, _forced_close(work, locked, stop))


def _is_held(locked: LockedSession | None, epoch: int, worker_id: UUID) -> TypeGuard[LockedSession]:
    return (
        locked is not None
        and locked.run_state == "running"
        and locked.run_worker_id == worker_id
        and locked.epoch == epoch
    )


async def forget_workers(tx: Transaction) -> None:
    """Deletes the rows of workers that have been gone for long and hold nothing."""
    await tx.execute(
        """
        DELETE FROM workers WHERE lease_until < clock_timestamp() - make_interval(secs => $1)
            AND NOT EXISTS (SELECT FROM runs WHERE worker_id = workers.id AND state = 'running')
        """,
        FORGET_WORKERS_AFTER_S,
    )


def _decide(locked: LockedSession, work: OpenWork, *, takeover: bool) -> Step:
    if stops_here(locked.cancel_mode, work):
        return _forced_close(work, locked, StopReason(type="cancelled", message=locked.cancel_reason))
    is_poisoned = takeover and (
        locked.run_takeovers_since_progress + 1 >= MAX_TAKEOVERS_SINCE_PROGRESS
        or locked.run_takeovers + 1 >= MAX_TAKEOVERS
    )
    if is_poisoned:
        return _forced_close(work, locked, StopReason(type="error", code="worker_lost", message=_POISONED))
    return requeue_step(work, locked.now, takeover=takeover)


def _forced_close(work: OpenWork, locked: LockedSession, stop: StopReason) -> Step:
    draft = draft_of(work, locked.now)
    if work.open_request is not None:
        abandon_request(draft, work.open_request)
    if stop.type == "error":
        detail = ErrorDetail(
            type="unknown_error",
            code=stop.code or "error",
            message=stop.message or "",
            retry_status=RetryStatus(type="terminal"),
        )
        draft.event(SessionError, error=detail)
    close(draft, work, stop)
    return draft.build()


async def _store(tx: Transaction, locked: LockedSession, work: OpenWork, step: Step) -> Swept:
    fence = Fence(session_id=work.session_id, run_id=work.run_id, epoch=locked.epoch, raise_epoch=True)
    events = await store_step(tx, fence, step)
    assert events is not None, "the session row is locked"
    return Swept(
        session_id=public("sess", locked.id),
        events=events,
        epoch=locked.epoch + 1,
        is_queued=isinstance(step.ending, RequeueRun) or bool(work.pending),
    )


async def _has_lease(tx: Transaction, worker_id: UUID | None) -> bool:
    return bool(
        await tx.fetchval(
            "SELECT count(*) FROM workers WHERE id = $1 AND lease_until > clock_timestamp()", worker_id
        )
    )


async def _is_overdue(tx: Transaction, locked: LockedSession) -> bool:
    return bool(
        await tx.fetchval(
            "SELECT $1::timestamptz < clock_timestamp() - make_interval(secs => $2)",
            locked.cancel_requested_at,
            CANCEL_GRACE_S,
        )
    )
