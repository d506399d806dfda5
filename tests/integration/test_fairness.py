"""Turns among tenants, and what a claim costs, when one tenant has a thousand runs queued."""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from typing import Any
from uuid import UUID

import pytest

from db.engine import Database
from db.holds import _FIND, Claim
from db.ids import to_uuid
from db.steps import store_step
from tests.support.held_sessions import (
    Writer,
    batch_of,
    claim,
    fence_of,
    new_sessions,
    new_tenant,
    new_worker,
    post,
    take,
)

QUEUED = 1000
WORKERS = 4
ROWS_OF_A_CLAIM = 100  # a claim looks at a few runs of each tenant


@pytest.fixture
async def database(database_url: str) -> AsyncIterator[Database]:
    database = Database.open(database_url)
    yield database
    await database.close()


async def greedy_tenant(database: Database) -> UUID:
    """A tenant with a thousand queued runs, each in a session of its own."""
    tenant = await new_tenant(database)
    sessions = await new_sessions(database, QUEUED, tenant_id=tenant)
    async with database.transaction() as tx:
        await tx.execute(
            """
            INSERT INTO runs (id, tenant_id, session_id, state, after_seq)
            SELECT gen_random_uuid(), $1, session_id, 'queued', 0 FROM unnest($2::uuid[]) AS session_id
            """,
            tenant,
            [to_uuid(session) for session in sessions],
        )
    return tenant


async def finish(database: Database, claimed: Claim) -> None:
    batch = await batch_of(database, claimed)
    async with database.transaction() as tx:
        assert await store_step(tx, fence_of(claimed), Writer(claimed).close(batch))


async def test_thousand_queued_runs_of_one_tenant_delay_another_by_one_run_at_most(
    database: Database,
) -> None:
    greedy = await greedy_tenant(database)
    workers = [await new_worker(database) for _ in range(WORKERS)]
    working = [await take(database, worker) for worker in workers]  # every slot is taken by the greedy one
    assert {claimed.tenant_id for claimed in working} == {greedy}
    modest = await new_tenant(database)
    for session in await new_sessions(database, 3, tenant_id=modest):
        await post(database, session, "hello")

        await finish(database, working.pop(0))
        # All workers reach for the one place, as they do when one wake-up meets several sweeps.
        claims = await asyncio.gather(*(claim(database, worker) for worker in workers))
        taken = [claimed for claimed in claims if claimed is not None]
        assert [claimed.hold.session_id for claimed in taken].count(session) == 1
        working.extend(taken)
        first = next(claimed for claimed in taken if claimed.hold.session_id == session)
        working.remove(first)
        working.insert(0, first)  # the run that ends next


async def test_tenants_take_turns_also_when_one_run_is_worked_on_at_a_time(database: Database) -> None:
    tenants = [await new_tenant(database) for _ in range(3)]
    for tenant in tenants:
        for session in await new_sessions(database, 4, tenant_id=tenant):
            await post(database, session, "hello")
    worker = await new_worker(database)
    served = []
    for _ in range(9):
        claimed = await take(database, worker)
        served.append(claimed.tenant_id)
        await finish(database, claimed)
    assert [set(served[at : at + 3]) for at in (0, 3, 6)] == [set(tenants)] * 3


async def test_claim_reads_a_few_rows_however_long_the_queue_is(database: Database) -> None:
    await greedy_tenant(database)
    (other,) = await new_sessions(database)
    await post(database, other, "hello")
    async with database.transaction() as tx:
        await tx.execute("ANALYZE runs")
        [row] = await tx.fetch(f"EXPLAIN (ANALYZE, FORMAT JSON) {_FIND}")
    [plan] = json.loads(row[0])
    read = [_rows_read(node) for node in _nodes(plan["Plan"]) if node.get("Relation Name") == "runs"]
    assert read
    assert sum(read) < ROWS_OF_A_CLAIM


def _nodes(plan: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield plan
    for child in plan.get("Plans", ()):
        yield from _nodes(child)


def _rows_read(node: dict[str, Any]) -> float:
    each = node["Actual Rows"] + node.get("Rows Removed by Filter", 0)
    return float(each * node["Actual Loops"])
