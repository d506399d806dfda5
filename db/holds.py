"""Who works on what: leases of workers and claims of runs.

All times are the database's. A worker's lease is one row; what it holds are the running runs that name it.
"""

from datetime import datetime
from uuid import UUID

from msgspec import Struct

from db.engine import Database, Record, Transaction
from db.errors import DatabaseBusy
from db.ids import parse_id, public

LEASE_S = 3.0
DEFAULT_TIME_LIMIT_S = 3600.0  # of a run whose agent version was stored without one
CANDIDATES_PER_TENANT = 8
CLAIM_TRIES = 4


class Hold(Struct, frozen=True, kw_only=True):
    """A run that a worker holds. Its writes are good as long as the session has this `epoch`."""

    session_id: str
    run_id: str
    epoch: int


class Claim(Struct, frozen=True, kw_only=True):
    """A hold just made, and where its session stands. `now` is the database's time at the claim."""

    hold: Hold
    commit_no: int
    last_seq: int
    now: datetime
    tenant_id: UUID


# -- leases ---------------------------------------------------------------------------------------------


async def renew_lease(
    tx: Transaction, *, worker_id: str, host: str, pid: int, slots: int, lease_s: float = LEASE_S
) -> tuple[tuple[Hold, ...], tuple[str, ...]]:
    """Makes or renews the lease. Renewing late is allowed: what is left of the holds is returned.

    Returns: the holds that stand in the worker's name, and the ids of those sessions whose run was cancelled.
    """
    worker = parse_id("work", worker_id)
    await tx.execute(
        """
        INSERT INTO workers (id, host, pid, slots, lease_until)
        VALUES ($1, $2, $3, $4, clock_timestamp() + make_interval(secs => $5))
        ON CONFLICT (id) DO UPDATE SET lease_until = excluded.lease_until, steady_since =
            CASE WHEN workers.lease_until < clock_timestamp() THEN clock_timestamp()
            ELSE workers.steady_since END
        """,
        worker,
        host,
        pid,
        slots,
        lease_s,
    )
    rows = await tx.fetch(
        """
        SELECT runs.id, session_id, epoch, coalesce(cancel_mode = 'now', false) AS is_cancelled
        FROM runs JOIN sessions ON sessions.id = session_id WHERE worker_id = $1 AND state = 'running'
        """,
        worker,
    )
    holds = tuple(
        Hold(
            session_id=public("sess", row["session_id"]),
            run_id=public("run", row["id"]),
            epoch=row["epoch"],
        )
        for row in rows
    )
    return holds, tuple(public("sess", row["session_id"]) for row in rows if row["is_cancelled"])


async def end_lease(tx: Transaction, *, worker_id: str) -> None:
    """Gives up the lease at shutdown; what the worker still holds is taken over at once."""
    await tx.execute("DELETE FROM workers WHERE id = $1", parse_id("work", worker_id))


# -- claims ---------------------------------------------------------------------------------------------

# Candidates are the oldest few runs of each tenant with a queue: first of the tenant with the least running,
# among equals of the one that was served longest ago, so that tenants take turns however long their queues.
# The tenants are found by skipping through the index, so that a long queue of one costs the others nothing.
# Runs of a key that has as many at work as it may are passed over, so that they hide none behind them.
_CANDIDATES = f"""
WITH RECURSIVE queues AS (
    (SELECT tenant_id FROM runs WHERE state = 'queued' ORDER BY tenant_id LIMIT 1)
    UNION ALL
    SELECT (SELECT tenant_id FROM runs WHERE state = 'queued' AND tenant_id > queues.tenant_id
            ORDER BY tenant_id LIMIT 1)
    FROM queues WHERE queues.tenant_id IS NOT NULL
),
loads AS (
    SELECT queues.tenant_id, (
        SELECT count(*) FROM runs WHERE runs.tenant_id = queues.tenant_id AND state = 'running'
    ) AS running, (
        SELECT max(started_at) FROM runs WHERE runs.tenant_id = queues.tenant_id
    ) AS served_at
    FROM queues WHERE queues.tenant_id IS NOT NULL
),
full_keys AS MATERIALIZED (
    SELECT id FROM api_keys WHERE max_running_runs <= (
        SELECT count(*) FROM runs WHERE api_key_id = api_keys.id AND state = 'running'
    )
),
candidates AS (
    SELECT head.id AS run_id, head.session_id, head.queued_at, loads.running, loads.served_at,
        tenants.id AS tenant_id, tenants.max_running_runs, api_keys.id AS key_id,
        api_keys.max_running_runs AS key_max_running_runs
    FROM loads JOIN tenants ON tenants.id = loads.tenant_id, LATERAL (
        SELECT id, session_id, queued_at, api_key_id FROM runs
        WHERE tenant_id = loads.tenant_id AND state = 'queued'
            AND (api_key_id IS NULL OR api_key_id <> ALL (ARRAY(SELECT id FROM full_keys)))
        ORDER BY queued_at, id LIMIT {CANDIDATES_PER_TENANT}
    ) AS head LEFT JOIN api_keys ON api_keys.id = head.api_key_id
    WHERE tenants.max_running_runs IS NULL OR loads.running < tenants.max_running_runs
)
"""

_FIRST = """
SELECT candidates.run_id, candidates.tenant_id, candidates.max_running_runs, candidates.key_id,
    candidates.key_max_running_runs
FROM candidates JOIN sessions ON sessions.id = session_id
ORDER BY candidates.running, candidates.served_at NULLS FIRST, candidates.queued_at LIMIT 1
FOR NO KEY UPDATE OF sessions SKIP LOCKED
"""
_FIND = f"{_CANDIDATES} {_FIRST}"

_BEGIN_RUN = f"""
UPDATE runs SET state = 'running', worker_id = $1, started_at = coalesce(started_at, clock_timestamp()),
    deadline_at = coalesce(deadline_at, clock_timestamp() + make_interval(secs => (
        SELECT coalesce((runs.options #>> '{{overrides,time_limit_s}}')::float8,
            (config ->> 'time_limit_s')::float8, {DEFAULT_TIME_LIMIT_S})
        FROM sessions JOIN agent_versions USING (agent_id)
        WHERE sessions.id = runs.session_id AND version = agent_version
    )))
"""
_HAS_LEASE = "EXISTS (SELECT FROM workers WHERE id = $1 AND lease_until > clock_timestamp())"
_RAISE_EPOCH = """
UPDATE sessions SET epoch = epoch + 1 FROM taken WHERE sessions.id = taken.session_id
RETURNING sessions.id, sessions.tenant_id, sessions.epoch, sessions.commit_no, sessions.last_seq
"""

# The session is locked first, since the run is looked up by what was found. A run that somebody else began
# after the snapshot is not queued in its newest version, which is the one that an update compares.
_CLAIM = f"""
{_CANDIDATES},
found AS MATERIALIZED (
    {_FIRST}
),
taken AS (
    {_BEGIN_RUN} FROM found
    WHERE runs.id = found.run_id AND runs.state = 'queued' AND {_HAS_LEASE}
        AND found.max_running_runs IS NULL AND found.key_max_running_runs IS NULL
    RETURNING runs.session_id, runs.id AS run_id
),
claimed AS (
    {_RAISE_EPOCH}, taken.run_id
)
SELECT claimed.*, clock_timestamp() AS now, EXISTS (SELECT FROM candidates) AS is_left
FROM (SELECT) AS one LEFT JOIN claimed ON true
"""

# A statement of its own: it counts what was committed while the locks of tenant and key were waited for.
_TAKE = f"""
WITH taken AS (
    {_BEGIN_RUN}
    WHERE id = $2 AND state = 'queued' AND {_HAS_LEASE}
        AND ($3::int IS NULL OR $3 > (
            SELECT count(*) FROM runs others WHERE others.tenant_id = runs.tenant_id AND state = 'running'
        ))
        AND ($4::int IS NULL OR $4 > (
            SELECT count(*) FROM runs others WHERE others.api_key_id = runs.api_key_id AND state = 'running'
        ))
    RETURNING session_id, id AS run_id
)
{_RAISE_EPOCH}, taken.run_id, clock_timestamp() AS now
"""


async def claim_next(database: Database, *, worker_id: str) -> Claim | None:
    """As `claim_run`, in its own transaction: one statement where no other claim and no cap is in the way.

    Raises: DatabaseBusy, DatabaseAway; then a run may have been claimed whose answer was lost.
    """
    async with database.one_statement() as tx:
        row = await tx.fetchrow(_CLAIM, parse_id("work", worker_id))
    assert row is not None
    if row["id"] is not None:
        return _claim(row)
    if not row["is_left"]:
        return None
    async with database.transaction() as tx:
        return await claim_run(tx, worker_id=worker_id)


async def claim_run(tx: Transaction, *, worker_id: str) -> Claim | None:
    """The next run in fair order, held by the worker from now on; None when nothing can be taken.

    Takes another one when its choice was gone before its lock was had. Locks of sessions are never waited
    for here, so that keeping those of earlier tries cannot deadlock.
    Raises: DatabaseBusy, when there are runs but somebody else has all of their sessions locked just now.
    """
    worker = parse_id("work", worker_id)
    for _ in range(CLAIM_TRIES):
        found = await tx.fetchrow(_FIND)
        if found is None:
            if await tx.fetchval(f"{_CANDIDATES} SELECT true FROM candidates LIMIT 1"):
                raise DatabaseBusy("The sessions of all runs that could be taken are locked.")
            return None
        cap, key_cap = found["max_running_runs"], found["key_max_running_runs"]
        # Claims where there is a cap go one at a time, or two at once would both find the last place.
        if cap is not None:
            await tx.execute("SELECT FROM tenants WHERE id = $1 FOR NO KEY UPDATE", found["tenant_id"])
        if key_cap is not None:
            await tx.execute("SELECT FROM api_keys WHERE id = $1 FOR NO KEY UPDATE", found["key_id"])
        taken = await tx.fetchrow(_TAKE, worker, found["run_id"], cap, key_cap)
        if taken is not None:
            return _claim(taken)
    return None


def _claim(taken: Record) -> Claim:
    hold = Hold(
        session_id=public("sess", taken["id"]),
        run_id=public("run", taken["run_id"]),
        epoch=taken["epoch"],
    )
    return Claim(
        hold=hold,
        commit_no=taken["commit_no"],
        last_seq=taken["last_seq"],
        now=taken["now"],
        tenant_id=taken["tenant_id"],
    )
