"""The hold on a session: who may write, who may take, and what a storm of all of it leaves behind."""

import asyncio
import json
import random
import shutil
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from msgspec.structs import replace

from agents.closing import model_usage, next_run
from agents.config import QueueModes
from agents.errors import HoldLost, InboxChanged
from agents.events import RequestEnd, RequestStart, TokenUsage
from agents.types import RequestClosed, RequestOpened, Step, ToolCall
from app.holding import HoldSink
from app.streaming.publisher import Publisher
from db.admission import InterruptInput, cancel_run
from db.engine import Database, Transaction
from db.errors import Conflict, DatabaseBusy, NotFound
from db.holds import Claim, claim_run, end_lease
from db.ids import public, to_uuid
from db.keys import create_key
from db.steps import store_step
from db.sweeping import Swept, hand_over, stale_sessions, sweep_session
from providers.ids import new_id
from providers.types import Usage
from tests.support.held_sessions import (
    Writer,
    answer,
    batch_of,
    check_invariants,
    claim,
    eventually,
    expire,
    fence_of,
    fetch,
    interrupt,
    is_waiting_for_a_lock,
    long_transaction,
    new_session,
    new_sessions,
    new_tenant,
    new_worker,
    post,
    snapshot_of,
    states_of,
    steady_worker,
    take,
    types_of,
)
from tests.support.postgres_proxy import PostgresProxy, postgres_proxy

ENOUGH = 10  # of each kind of thing that may happen in the storm


@pytest.fixture
async def database(database_url: str) -> AsyncIterator[Database]:
    database = Database.open(database_url, pool_size=12)
    yield database
    try:
        await check_invariants(database)
    finally:
        await database.close()


@pytest.fixture
def folder() -> Iterator[Path]:
    """Short, since a socket's path must be."""
    path = Path(tempfile.mkdtemp(prefix="arm-"))
    yield path
    shutil.rmtree(path)


@pytest.fixture
async def proxy(database_url: str, folder: Path) -> AsyncIterator[PostgresProxy]:
    async with postgres_proxy(database_url, folder) as proxy:
        yield proxy


@pytest.fixture
async def publisher(redis_url: str) -> AsyncIterator[Publisher]:
    publisher = Publisher.open(redis_url)
    yield publisher
    await publisher.aclose()


async def held(database: Database, *texts: str) -> Claim:
    """A claim of a run with these prompts, which its first commit has applied."""
    session = await new_session(database)
    await post(database, session, *(texts or ("hello",)))
    return await take(database)


async def sweep(database: Database, session: str) -> Swept | None:
    async with database.transaction() as tx:
        return await sweep_session(tx, to_uuid(session))


def sink_of(database: Database, publisher: Publisher, claimed: Claim) -> HoldSink:
    hold = claimed.hold
    return HoldSink(
        database=database,
        hold=hold,
        commit_no=claimed.commit_no,
        last_seq=claimed.last_seq,
        publisher=publisher.hold(session_id=hold.session_id, epoch=hold.epoch, base_seq=claimed.last_seq),
    )


# -- the fence ------------------------------------------------------------------------------------------


async def test_commit_that_was_blocked_while_its_run_was_taken_over_writes_nothing(
    database: Database,
) -> None:
    claimed = await held(database)
    session = claimed.hold.session_id
    await fetch(database, "UPDATE workers SET lease_until = clock_timestamp() - interval '1 s' RETURNING 1")
    other = await new_worker(database)

    async def zombie() -> Any:
        async with database.transaction() as tx:
            return await store_step(tx, fence_of(claimed), Writer(claimed).say("from the grave"))

    async with long_transaction(database) as tx:
        swept = await sweep_session(tx, to_uuid(session))
        assert swept is not None
        blocked = asyncio.create_task(zombie())
        await eventually(lambda: is_waiting_for_a_lock(database))
    assert await blocked is None
    again = await take(database, other)
    assert again.hold.run_id == claimed.hold.run_id
    assert again.hold.epoch > swept.epoch - 1 > claimed.hold.epoch - 1
    # The run is running once more, in another's name: a fence on the run's row alone would let this pass.
    assert await zombie() is None
    assert "agent.message" not in await types_of(database, session)


async def test_zombie_is_refused_in_the_very_transaction_that_takes_over_and_claims(
    database: Database,
) -> None:
    claimed = await held(database)
    session = claimed.hold.session_id
    await fetch(database, "UPDATE workers SET lease_until = clock_timestamp() - interval '1 s' RETURNING 1")
    other = await new_worker(database)

    async def zombie() -> Any:
        async with database.transaction() as tx:
            return await store_step(tx, fence_of(claimed), Writer(claimed).say())

    async with long_transaction(database) as tx:
        await sweep_session(tx, to_uuid(session))
        blocked = asyncio.create_task(zombie())
        await eventually(lambda: is_waiting_for_a_lock(database))
        # Nothing of this is visible before the commit: the zombie's snapshot has the run as its own.
        assert await claim_run(tx, worker_id=other) is not None
    assert await blocked is None


@pytest.mark.parametrize("has_seen", [True, False])
async def test_prompt_between_decision_and_commit_only_refuses_what_rests_on_the_inbox(
    database: Database, publisher: Publisher, *, has_seen: bool
) -> None:
    claimed = await held(database)
    seen = (await snapshot_of(database, claimed.hold)).inbox.inbox_no
    sink = sink_of(database, publisher, claimed)
    await post(database, claimed.hold.session_id, "and this")
    if has_seen:
        with pytest.raises(InboxChanged):
            await sink.commit(Writer(claimed).say(), seen=seen)
        view = (await snapshot_of(database, claimed.hold)).inbox
        await sink.commit(Writer(claimed).say(), seen=view.inbox_no)
    else:
        await sink.commit(Writer(claimed).say())
    assert (await types_of(database, claimed.hold.session_id)).count("agent.message") == 1


async def test_prompt_that_is_being_admitted_while_the_commit_waits_refuses_it(database: Database) -> None:
    claimed = await held(database)
    session = claimed.hold.session_id
    snapshot = await snapshot_of(database, claimed.hold)
    batch = await batch_of(database, claimed)

    async def close() -> Any:
        async with database.transaction() as tx:
            fence = fence_of(claimed, seen=snapshot.inbox.inbox_no)
            return await store_step(tx, fence, Writer(claimed).close(batch))

    async with long_transaction(database) as tx:
        await tx.execute("UPDATE sessions SET inbox_no = inbox_no + 1 WHERE id = $1", to_uuid(session))
        closing = asyncio.create_task(close())
        await eventually(lambda: is_waiting_for_a_lock(database))
    assert await closing is None
    assert await states_of(database, session) == ["running"]


# -- commits whose answer is lost -----------------------------------------------------------------------


async def test_commit_whose_answer_is_lost_is_written_once(
    database: Database, proxy: PostgresProxy, publisher: Publisher
) -> None:
    claimed = await held(database)
    flaky = Database.open(proxy.url, pool_size=2)
    sink, writer = sink_of(flaky, publisher, claimed), Writer(claimed)
    for _ in range(3):
        proxy.lose_commits = 1
        await sink.commit(writer.say())
    await sink.commit(writer.say())
    await flaky.close()
    assert proxy.delivered.is_set()
    assert (await types_of(database, claimed.hold.session_id)).count("agent.message") == 4


async def test_lost_answer_of_a_commit_that_gave_up_the_hold_is_recognised(
    database: Database, proxy: PostgresProxy, publisher: Publisher
) -> None:
    claimed = await held(database)
    batch = await batch_of(database, claimed)
    flaky = Database.open(proxy.url, pool_size=2)
    sink, writer = sink_of(flaky, publisher, claimed), Writer(claimed)
    step, calls = writer.ask("client")
    await sink.commit(Step(**{name: getattr(step, name) for name in step.__struct_fields__} | {
        "applied": batch}))  # fmt: skip
    proxy.lose_commits = 1
    await sink.commit(writer.wait(calls))  # raises the epoch itself
    await flaky.close()
    assert sink.has_left
    assert (await types_of(database, claimed.hold.session_id)).count("session.status_idle") == 1
    assert await states_of(database, claimed.hold.session_id) == ["waiting"]


async def test_lost_answer_of_the_commit_that_closed_the_run_is_recognised(
    database: Database, proxy: PostgresProxy, publisher: Publisher
) -> None:
    claimed = await held(database)
    session = claimed.hold.session_id
    await post(database, session, "next")
    snapshot = await snapshot_of(database, claimed.hold)
    flaky = Database.open(proxy.url, pool_size=2)
    sink = sink_of(flaky, publisher, claimed)
    proxy.lose_commits = 1
    batch = tuple(bound.id for bound in snapshot.batch)
    step = Writer(claimed).close(batch, next_run(snapshot.inbox.pending, QueueModes()))
    await sink.commit(step, seen=snapshot.inbox.inbox_no)
    await flaky.close()
    assert await states_of(database, session) == ["closed", "queued"]


async def test_step_without_events_whose_answer_is_lost_is_recognised(
    database: Database, proxy: PostgresProxy, publisher: Publisher
) -> None:
    claimed = await held(database)
    flaky = Database.open(proxy.url, pool_size=2)
    sink, writer = sink_of(flaky, publisher, claimed), Writer(claimed)
    proxy.lose_commits = 1
    await sink.commit(Step())
    await sink.commit(writer.say())
    await flaky.close()
    assert (await types_of(database, claimed.hold.session_id)).count("agent.message") == 1


async def test_hold_that_is_taken_over_while_its_answer_is_lost_ends_at_the_next_commit(
    database: Database, proxy: PostgresProxy, publisher: Publisher
) -> None:
    claimed = await held(database)
    session = claimed.hold.session_id
    flaky = Database.open(proxy.url, pool_size=2)
    sink, writer = sink_of(flaky, publisher, claimed), Writer(claimed)
    proxy.lose_commits = 1
    committing = asyncio.create_task(sink.commit(writer.say()))
    await proxy.delivered.wait()
    proxy.go_away()
    await fetch(database, "UPDATE workers SET lease_until = clock_timestamp() - interval '1 s' RETURNING 1")
    assert await sweep(database, session) is not None
    proxy.come_back()
    await committing
    with pytest.raises(HoldLost):
        await sink.commit(writer.say())
    await flaky.close()
    assert (await types_of(database, session)).count("agent.message") == 1


async def test_commit_goes_on_when_the_database_is_back(
    database: Database, proxy: PostgresProxy, publisher: Publisher
) -> None:
    claimed = await held(database)
    flaky = Database.open(proxy.url, pool_size=2)
    sink = sink_of(flaky, publisher, claimed)
    proxy.go_away()
    committing = asyncio.create_task(sink.commit(Writer(claimed).say()))
    while sink.committing_since_s is None:  # noqa: ASYNC110 - one turn of the event loop
        await asyncio.sleep(0)
    proxy.come_back()
    await committing
    await flaky.close()


# -- claims ---------------------------------------------------------------------------------------------


async def test_workers_that_claim_at_once_take_each_run_once(database: Database) -> None:
    sessions = await new_sessions(database, 20)
    for session in sessions:
        await post(database, session, "hello")
    workers = [await new_worker(database) for _ in range(2)]
    claims: list[Claim] = []

    async def take_some(worker: str) -> None:
        while (claimed := await claim(database, worker)) is not None:
            claims.append(claimed)

    await asyncio.gather(*(take_some(worker) for worker in workers * 3))
    while (late := await claim(database, workers[0])) is not None:
        claims.append(late)  # found all candidates locked
    assert sorted(claimed.hold.session_id for claimed in claims) == sorted(sessions)
    assert {claimed.hold.epoch for claimed in claims} == {1}


async def test_cap_of_a_tenant_is_kept_by_claims_at_once(database: Database) -> None:
    capped = await new_tenant(database, max_running_runs=3)
    for session in await new_sessions(database, 12, tenant_id=capped):
        await post(database, session, "hello")
    workers = [await new_worker(database) for _ in range(10)]
    await asyncio.gather(*(claim(database, worker) for worker in workers))
    while await claim(database, workers[0]) is not None:
        pass
    rows = await fetch(database, "SELECT FROM runs WHERE state = 'running'")
    assert len(rows) == 3
    (other,) = await new_sessions(database)
    await post(database, other, "hello")
    assert (await take(database, workers[0])).hold.session_id == other


async def test_claim_that_waits_for_another_of_its_tenant_sees_that_the_last_place_is_gone(
    database: Database,
) -> None:
    capped = await new_tenant(database, max_running_runs=1)
    for session in await new_sessions(database, 2, tenant_id=capped):
        await post(database, session, "hello")
    worker = await new_worker(database)
    async with long_transaction(database) as tx:
        assert await claim_run(tx, worker_id=worker) is not None
        late = asyncio.create_task(claim(database, worker))
        await eventually(lambda: is_waiting_for_a_lock(database))
    assert await late is None


async def new_key(database: Database, tenant_id: UUID, *, max_running_runs: int) -> str:
    async with database.transaction() as tx:
        key, _ = await create_key(
            tx, tenant_id=tenant_id, name="capped", scopes=("write",), max_running_runs=max_running_runs
        )
    return public("key", key.id)


async def test_cap_of_a_key_is_kept_by_claims_at_once_and_hides_no_other_run(database: Database) -> None:
    tenant = await new_tenant(database)
    key = await new_key(database, tenant, max_running_runs=2)
    for session in await new_sessions(database, 15, tenant_id=tenant):
        await post(database, session, "hello", api_key_id=key)
    (free,) = await new_sessions(database, tenant_id=tenant)
    await post(database, free, "hello")  # behind more of the capped key's than a claim looks at
    workers = [await new_worker(database) for _ in range(8)]
    claims = await asyncio.gather(*(claim(database, worker) for worker in workers))
    held = [taken.hold.session_id for taken in claims if taken is not None]
    while (more := await claim(database, workers[0])) is not None:
        held.append(more.hold.session_id)
    assert len(held) == 3
    assert free in held


async def test_place_that_a_run_of_a_capped_key_frees_is_taken_by_the_next(database: Database) -> None:
    tenant = await new_tenant(database)
    key = await new_key(database, tenant, max_running_runs=1)
    for session in await new_sessions(database, 2, tenant_id=tenant):
        await post(database, session, "hello", api_key_id=key)
    worker = await new_worker(database)
    first = await take(database, worker)
    assert await claim(database, worker) is None
    batch = await batch_of(database, first)
    async with database.transaction() as tx:
        assert await store_step(tx, fence_of(first), Writer(first).close(batch))
    assert (await take(database, worker)).hold.session_id != first.hold.session_id


async def test_claim_needs_a_live_lease(database: Database) -> None:
    session = await new_session(database)
    await post(database, session, "hello")
    worker = await new_worker(database)
    await expire(database, worker)
    assert await claim(database, worker) is None
    assert await claim(database, new_id("work")) is None
    assert await states_of(database, session) == ["queued"]
    assert await claim(database, await new_worker(database)) is not None


async def test_claim_passes_over_sessions_that_somebody_has_locked(database: Database) -> None:
    one, two = await new_sessions(database, 2)
    for session in (one, two):
        await post(database, session, "hello")
    async with long_transaction(database) as tx:
        await tx.execute("SELECT FROM sessions WHERE id = $1 FOR UPDATE", to_uuid(one))
        assert (await take(database)).hold.session_id == two
        with pytest.raises(DatabaseBusy):
            async with database.transaction() as other:
                await claim_run(other, worker_id=await new_worker(database))


# -- takeovers ------------------------------------------------------------------------------------------


async def test_run_of_a_worker_that_gave_up_its_lease_is_queued_again(database: Database) -> None:
    session = await new_session(database)
    await post(database, session, "hello")
    worker = await new_worker(database)
    await take(database, worker)
    sweeper = await steady_worker(database)
    assert await sweep(database, session) is None

    async with database.transaction() as tx:
        await end_lease(tx, worker_id=worker)
    async with database.transaction() as tx:
        assert await stale_sessions(tx, worker_id=sweeper) == [to_uuid(session)]
    swept = await sweep(database, session)
    assert swept is not None
    assert swept.is_queued
    assert await sweep(database, session) is None
    assert (await types_of(database, session))[-1] == "session.status_rescheduled"


async def test_run_that_is_taken_back_between_two_attempts_stays_in_its_turn(database: Database) -> None:
    session = await new_session(database)
    await post(database, session, "hello")
    worker = await new_worker(database)
    claimed = await take(database, worker)
    opening, closing = Writer(claimed).draft(), Writer(claimed).draft()
    started = opening.event(RequestStart, provider="rehearsal", model="demo")
    opening.opened = RequestOpened(id=started.id, turn=2, provider="rehearsal", model="demo")
    closing.event(
        RequestEnd,
        model_request_start_id=started.id,
        model_usage=model_usage(Usage()),
        usage=TokenUsage(),
        is_error=True,
    )
    closing.closed = RequestClosed(id=started.id, usage=Usage(), error_code="provider_overloaded")
    fence = fence_of(claimed)
    for draft in (opening, closing):
        async with database.transaction() as tx:
            await store_step(tx, fence, draft.build())
        fence = replace(fence, commit_no=claimed.commit_no + 1)
    await expire(database, worker)
    await sweep(database, session)
    event = (await fetch(database, "SELECT body FROM events ORDER BY created_at DESC LIMIT 1"))[0]["body"]
    assert (json.loads(event)["type"], json.loads(event)["turn"]) == ("session.status_rescheduled", 2)


async def test_sweeper_calls_nobody_dead_before_its_own_lease_has_lasted(database: Database) -> None:
    session = await new_session(database)
    await post(database, session, "hello")
    worker = await new_worker(database)
    await take(database, worker)
    await expire(database, worker)
    fresh = await new_worker(database)
    lapsed = await steady_worker(database)
    await expire(database, lapsed)
    for sweeper in (fresh, lapsed, new_id("work")):
        async with database.transaction() as tx:
            assert await stale_sessions(tx, worker_id=sweeper) == []
    async with database.transaction() as tx:
        assert len(await stale_sessions(tx, worker_id=await steady_worker(database))) == 1


async def test_lease_that_is_renewed_before_the_sweeper_has_the_lock_keeps_its_run(
    database: Database,
) -> None:
    """Q-02: a run whose worker lives is never taken."""
    claimed = await held(database)
    assert await sweep(database, claimed.hold.session_id) is None
    assert await states_of(database, claimed.hold.session_id) == ["running"]


@pytest.mark.parametrize(("makes_progress", "takeovers"), [(False, 3), (True, 10)])
async def test_run_that_loses_its_workers_is_closed_at_last(
    database: Database, *, makes_progress: bool, takeovers: int
) -> None:
    session = await new_session(database)
    await post(database, session, "hello")
    for number in range(takeovers):
        assert (await states_of(database, session)) == ["queued"], number
        worker = await new_worker(database)
        claimed = await take(database, worker)
        if makes_progress:
            async with database.transaction() as tx:
                assert await store_step(tx, fence_of(claimed), Writer(claimed, position=number + 1).say())
        await expire(database, worker)
        await sweep(database, session)
    assert await states_of(database, session) == ["closed"]
    types = await types_of(database, session)
    assert types.count("session.error") == 1
    assert types[-1] == "session.status_idle"


async def test_starting_an_idempotent_tool_over_and_over_is_no_progress(database: Database) -> None:
    session = await new_session(database)
    await post(database, session, "hello")
    call = ToolCall(id=new_id("evt"), tool_use_id="t", position=1, index=0, name="delay", input={},
                    state="pending", idempotent=True)  # fmt: skip
    for _ in range(3):
        worker = await new_worker(database)
        claimed = await take(database, worker)
        draft = Writer(claimed).draft()
        draft.call(call)
        async with database.transaction() as tx:
            assert await store_step(tx, fence_of(claimed), draft.build()) is not None
        await expire(database, worker)
        await sweep(database, session)
    assert await states_of(database, session) == ["closed"]


async def test_handing_over_does_not_count_as_a_takeover(database: Database) -> None:
    session = await new_session(database)
    await post(database, session, "hello")
    for _ in range(12):
        worker = await new_worker(database)
        claimed = await take(database, worker)
        async with database.transaction() as tx:
            swept = await hand_over(
                tx,
                session_id=to_uuid(session),
                epoch=claimed.hold.epoch,
                worker_id=to_uuid(worker),
            )
        assert swept is not None
    assert await states_of(database, session) == ["queued"]


async def test_handing_over_a_run_that_was_cancelled_closes_it(database: Database) -> None:
    session = await new_session(database)
    await post(database, session, "hello")
    worker = await new_worker(database)
    claimed = await take(database, worker)
    await interrupt(database, session)
    async with database.transaction() as tx:
        await hand_over(tx, session_id=to_uuid(session), epoch=claimed.hold.epoch, worker_id=to_uuid(worker))
    assert await states_of(database, session) == ["closed"]


# -- all of it at once ----------------------------------------------------------------------------------


class Storm:
    """Clients, workers that die, and sweepers, over a few sessions, all at random."""

    def __init__(self, database: Database, sessions: list[str], seed: int) -> None:
        self.database = database
        self.sessions = sessions
        self.random = random.Random(seed)
        self.done: Counter[str] = Counter()
        self.is_over = False

    async def client(self) -> None:
        while not self.is_over:
            session = self.random.choice(self.sessions)
            action = self.random.choice(["post", "post", "batch", "interrupt", "answer", "cancel"])
            try:
                await self.act(session, action)
                self.done[action] += 1
            except (Conflict, NotFound):
                self.done["refused"] += 1
            await asyncio.sleep(self.random.random() * 0.02)

    async def act(self, session: str, action: str) -> None:
        if action == "post":
            await post(self.database, session, "one")
        elif action == "batch":
            await post(self.database, session, "one", "two")
        elif action == "interrupt":
            await post(self.database, session, InterruptInput(), "instead")
        elif action == "answer":
            rows = await fetch(self.database, "SELECT id FROM tool_calls WHERE state = 'open' AND session_id"
                               " = $1", to_uuid(session))  # fmt: skip
            for row in rows:
                await post(self.database, session, answer(f"evt_{row['id'].hex}"))
        else:
            rows = await fetch(self.database, "SELECT id FROM runs WHERE session_id = $1 AND state <> "
                               "'closed'", to_uuid(session))  # fmt: skip
            for row in rows:
                async with self.database.transaction() as tx:
                    await cancel_run(tx, run_id=f"run_{row['id'].hex}", reason=None)

    async def worker(self) -> None:
        while not self.is_over:
            worker = await new_worker(self.database)
            for _ in range(6):
                claimed = await claim(self.database, worker)
                if claimed is None:
                    await asyncio.sleep(0.005)
                    continue
                try:
                    await self.work(claimed)
                except HoldLost:
                    self.done["lost"] += 1
            await expire(self.database, worker)
            self.done["died"] += 1

    async def work(self, claimed: Claim) -> None:
        """What a loop does, as far as the database can tell; sometimes it stops in the middle."""
        snapshot = await snapshot_of(self.database, claimed.hold)
        writer = Writer(claimed, position=snapshot.next_position)
        commits = 0

        async def commit(step: Step, seen: int | None = None) -> bool:
            nonlocal commits
            fence = fence_of(claimed, seen=seen)
            async with self.database.transaction() as tx:
                moved = type(fence)(**{name: getattr(fence, name) for name in fence.__struct_fields__}
                                    | {"commit_no": claimed.commit_no + commits})  # fmt: skip
                if await store_step(tx, moved, step) is None:
                    return False
            commits += 1
            return True

        request = writer.draft()
        started = request.event(RequestStart, provider="rehearsal", model="fast")
        request.opened = RequestOpened(id=started.id, turn=1, provider="rehearsal", model="fast")
        request.apply_prompts(tuple(bound.id for bound in snapshot.batch))
        if snapshot.inbox.calls or not await commit(request.build()):
            return
        if self.random.random() < 0.3:
            self.done["abandoned"] += 1
            return  # it is killed while the model answers
        ended = writer.draft()
        usage = Usage(input_tokens=10, cache_read_tokens=3, output_tokens=5)
        ended.event(
            RequestEnd,
            model_request_start_id=started.id,
            model_usage={"input_tokens": 7, "output_tokens": 5, "cache_read_input_tokens": 3,
                         "cache_creation_input_tokens": 0},
            usage=TokenUsage(input_tokens=10, output_tokens=5),
        )  # fmt: skip
        ended.closed = RequestClosed(id=started.id, usage=usage)
        if not await commit(ended.build()):
            return
        if self.random.random() < 0.4:
            step, calls = writer.ask("client", "client")
            inbox = (await snapshot_of(self.database, claimed.hold)).inbox
            if await commit(step, inbox.inbox_no):
                inbox = (await snapshot_of(self.database, claimed.hold)).inbox
                if await commit(writer.wait(calls), inbox.inbox_no):
                    self.done["waited"] += 1
            return
        while True:
            inbox = (await snapshot_of(self.database, claimed.hold)).inbox
            if await commit(writer.close((), next_run(inbox.pending, QueueModes())), inbox.inbox_no):
                self.done["closed"] += 1
                return

    async def sweeper(self) -> None:
        me = await steady_worker(self.database)
        while not self.is_over:
            async with self.database.transaction() as tx:
                stale = await stale_sessions(tx, worker_id=me)
            for session in stale:
                async with self.database.transaction() as tx:
                    if await sweep_session(tx, session) is not None:
                        self.done["swept"] += 1
            await asyncio.sleep(0.01)


async def test_storm_of_claims_cancels_answers_deaths_and_sweeps_breaks_no_rule(database: Database) -> None:
    storm = Storm(database, await new_sessions(database, 5), seed=20_261_130)
    tasks = [
        asyncio.create_task(work)
        for work in (
            *(storm.client() for _ in range(4)),
            *(storm.worker() for _ in range(4)),
            *(storm.sweeper() for _ in range(2)),
        )
    ]

    async def has_had_enough() -> bool:
        kinds = (
            "post",
            "batch",
            "interrupt",
            "answer",
            "cancel",
            "died",
            "abandoned",
            "waited",
            "closed",
            "swept",
        )
        return all(storm.done[kind] >= ENOUGH for kind in kinds) or any(task.done() for task in tasks)

    await eventually(has_had_enough)
    storm.is_over = True
    await asyncio.gather(*tasks)  # a deadlock would be among what they raise
    async with database.transaction() as tx:
        await _close_all(tx)
    await check_invariants(database)


async def _close_all(tx: Transaction) -> None:
    """Leaves no run open, as after the last sweep: what then is still open was lost."""
    await tx.execute("UPDATE workers SET lease_until = clock_timestamp() - interval '1 s'")
    for row in await tx.fetch("SELECT session_id FROM runs WHERE state = 'running'"):
        await sweep_session(tx, row["session_id"])
