"""How much may wait: runs for a worker, of one tenant, and prompts for a run, in one session."""

import math
from datetime import timedelta

from msgspec import Struct

from db.engine import Transaction
from db.errors import QueueFull
from db.parts import Parts
from db.work import LockedSession

RATE_WINDOW = timedelta(minutes=1)
RUNS_LOOKED_AT = 5
MAX_RETRY_AFTER_S = 60


class QueueBounds(Struct, frozen=True, kw_only=True):
    """`queued_runs`: of a tenant that has no bound of its own. `pending_prompts`: of one session."""

    queued_runs: int
    pending_prompts: int


def add_depth(parts: Parts, bounds: QueueBounds, *, makes_run: bool) -> None:
    """Adds the part `waiting` with `depth` and `bound`, as they are before the statement.

    Runs are counted up to their bound only. Prompts that come in at once may exceed that bound by as many.
    """
    if makes_run:
        parts.add(
            "waiting",
            """
            SELECT tenant.bound, (
                SELECT count(*) FROM (
                    SELECT FROM runs WHERE runs.tenant_id = tenant.id AND runs.state = 'queued'
                    LIMIT tenant.bound
                ) AS queued
            ) AS depth
            FROM (
                SELECT tenants.id, coalesce(tenants.max_queued_runs, {}::int) AS bound
                FROM tenants, fence WHERE tenants.id = fence.tenant_id
            ) AS tenant
            """,
            bounds.queued_runs,
        )
    else:
        parts.add(
            "waiting",
            """
            SELECT {}::int AS bound, count(*) AS depth FROM fence JOIN prompts USING (session_id)
            WHERE prompts.state = 'pending'
            """,
            bounds.pending_prompts,
        )


async def queue_full(tx: Transaction, locked: LockedSession, depth: int, *, makes_run: bool) -> QueueFull:
    """What to raise, with the time after which there may be room, guessed from how long runs took lately."""
    if makes_run:
        started = await tx.fetchval(
            """
            SELECT count(*) FROM runs
            WHERE tenant_id = $1 AND started_at > clock_timestamp() - $2::interval
            """,
            locked.tenant_id,
            RATE_WINDOW,
        )
        wait_s = RATE_WINDOW.total_seconds() / started if started else MAX_RETRY_AFTER_S
        message = f"{depth} runs wait for a worker already; send the prompt again later."
    else:
        wait_s = await tx.fetchval(
            """
            SELECT coalesce(avg(extract(epoch FROM closed_at - started_at)), 1)::float8 FROM (
                SELECT closed_at, started_at FROM runs
                WHERE session_id = $1 AND state = 'closed' AND started_at IS NOT NULL
                ORDER BY queued_at DESC LIMIT $2
            ) AS lately
            """,
            locked.id,
            RUNS_LOOKED_AT,
        )
        message = f"{depth} prompts of the session wait already; withdraw some, or send it again later."
    retry_after_s = min(max(math.ceil(wait_s), 1), MAX_RETRY_AFTER_S)
    return QueueFull(message, depth=depth, retry_after_s=retry_after_s)
