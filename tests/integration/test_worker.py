"""A worker in this process: wake-ups, leases, holds and hand-overs, with Postgres and Redis that fail."""

import asyncio
import logging
import shutil
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from arq.constants import in_progress_key_prefix
from redis.asyncio import Redis
from redis.exceptions import ConnectionError as RedisConnectionError

from agents.config import BuiltinTool, ModelChoice
from agents.events import StopReason
from agents.hooks import HookChain, HookContext, Hooks, ToolVerdict
from agents.types import Step, ToolCall
from app.ending import end
from app.holding import HoldSink
from app.lease import Lease, Renewal
from app.queue import QUEUE_NAME, WakeUps, WakeUpWorker
from app.recovery import sweep_for_ever
from app.streaming.publisher import Publisher
from app.streaming.signals import Signals
from app.supervisor import Supervisor
from db.admission import cancel_run
from db.engine import Database
from db.ids import to_uuid
from providers.ids import new_id
from providers.registry import ProviderSettings, Registry
from providers.retry import RetryPolicy
from tests.support.held_sessions import (
    check_invariants,
    claim,
    eventually,
    expire,
    fetch,
    is_waiting_for_a_lock,
    long_transaction,
    new_session,
    new_sessions,
    new_worker,
    post,
    states_of,
    steady_worker,
    types_of,
)
from tests.support.postgres_proxy import PostgresProxy, postgres_proxy
from tests.support.streaming import OwnRedis
from tools.registry import ToolRegistry
from tools.schema import tool
from tools.types import Tool

LEASE_S = 1.5
HANG = "say: one\nhang"


@pytest.fixture
async def database(database_url: str) -> AsyncIterator[Database]:
    database = Database.open(database_url)
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


@dataclass(kw_only=True)
class Working:
    """A worker of this process. `renewals` are those that it has heard of."""

    id: str
    supervisor: Supervisor
    lease: Lease
    publisher: Publisher
    wake_ups: WakeUps
    database: Database
    queue: WakeUpWorker
    renewals: list[Renewal] = field(default_factory=list)

    @property
    def tasks(self) -> int:
        return len(self.supervisor._active)

    async def renewed(self, times: int = 1) -> None:
        """Returns when the lease has been renewed so often from now on."""
        seen = len(self.renewals)
        await until(lambda: len(self.renewals) >= seen + times)


@asynccontextmanager
async def working(
    database_url: str,
    redis_url: str,
    *,
    slots: int = 4,
    sweeps: bool = False,
    wakes: bool = True,
    tools: tuple[Tool, ...] = (),
    hooks: tuple[Hooks, ...] = (),
    stuck_commit_s: float = 10.0,
    lease_s: float = LEASE_S,
    loop_silence_s: float = 30.0,
) -> AsyncIterator[Working]:
    """`wakes` serves wake-ups by Redis, `sweeps` looks into Postgres once a second."""
    async with AsyncExitStack() as stack:
        database = Database.open(database_url, pool_size=6)
        stack.push_async_callback(database.close)
        publisher = Publisher.open(redis_url)
        stack.push_async_callback(publisher.aclose)
        wake_ups = WakeUps(redis_url)
        stack.push_async_callback(wake_ups.aclose)
        models = Registry(ProviderSettings())
        stack.push_async_callback(models.aclose)
        worker_id = new_id("work")
        supervisor = Supervisor(
            worker_id=worker_id,
            slots=slots,
            database=database,
            publisher=publisher,
            wake_ups=wake_ups,
            models=models,
            tools=ToolRegistry(tools),
            retry=RetryPolicy(),
            hooks=HookChain(hooks),
            stuck_commit_s=stuck_commit_s,
        )
        renewals: list[Renewal] = []

        def renewed(renewal: Renewal) -> None:
            supervisor.renewed(renewal)
            renewals.append(renewal)

        lease = Lease(
            worker_id=worker_id,
            database_url=database_url,
            pooler=False,
            slots=slots,
            lease_s=lease_s,
            on_renewed=renewed,
            loop_silence_s=loop_silence_s,
        )
        supervisor.lease = lease
        queue = WakeUpWorker(redis_url, take=supervisor.take, has_room=supervisor.has_room)
        signals = Signals(redis_url, on_wake=queue.heard, on_cancel=supervisor.cancel)
        lease.start()
        stack.push_async_callback(lease.aclose)
        await asyncio.wait_for(lease.wait_until_live(), 60)
        await signals.start()
        stack.push_async_callback(signals.aclose)
        side = []
        if wakes:
            side.append(asyncio.create_task(queue.run_for_ever()))
        if sweeps:
            sweeping = sweep_for_ever(
                database=database,
                worker_id=worker_id,
                lease=lease,
                supervisor=supervisor,
                publisher=publisher,
                wake_ups=wake_ups,
                idempotency_hours=24,
            )
            side.append(asyncio.create_task(sweeping))
        stack.push_async_callback(_end, side)
        stack.push_async_callback(supervisor.drain, 0.0)
        yield Working(
            id=worker_id,
            supervisor=supervisor,
            lease=lease,
            publisher=publisher,
            wake_ups=wake_ups,
            database=database,
            queue=queue,
            renewals=renewals,
        )


async def _end(tasks: list[asyncio.Task[None]]) -> None:
    assert await end(*tasks) == []


async def until(is_true: Callable[[], bool]) -> None:
    async def looked() -> bool:
        return is_true()

    await eventually(looked)


async def until_states(database: Database, session: str, *states: str) -> None:
    async def looked() -> bool:
        return await states_of(database, session) == list(states)

    await eventually(looked)


async def until_saved(database: Database, session: str, kind: str) -> None:
    async def looked() -> bool:
        return kind in await types_of(database, session)

    await eventually(looked)


async def ask(working: Working, session: str, *texts: str) -> str:
    """Posts as the api does: commit, then wake. The id of the run."""
    admitted = await post(working.database, session, *texts)
    if admitted.wake:
        await working.wake_ups.wake()
    return admitted.run_id or ""


# -- wake-ups -------------------------------------------------------------------------------------------


async def test_prompt_starts_by_its_wake_up_alone(
    database: Database, database_url: str, redis_url: str
) -> None:
    async with working(database_url, redis_url) as worker:
        worker.queue.poll_delay_s = 3600  # what is not heard is not found
        session = await new_session(database)
        await ask(worker, session, "say: hello")
        await until_states(database, session, "closed")
    assert (await types_of(database, session))[-1] == "session.status_idle"


async def test_each_of_many_prompts_is_run_once_and_leaves_no_job_behind(
    database: Database, database_url: str, redis_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with (
        working(database_url, redis_url, slots=3) as one,
        working(database_url, redis_url, slots=3) as two,
        Redis.from_url(redis_url) as redis,
    ):
        sessions = await new_sessions(database, 15)
        await asyncio.gather(*(ask(one, session, "say: hello") for session in sessions))
        for session in sessions:
            await until_states(database, session, "closed")

        async def is_empty() -> bool:
            return not await redis.zcard(QUEUE_NAME)

        await eventually(is_empty)
        await until(lambda: two.tasks == one.tasks == 0)
    assert [record for record in caplog.records if record.name.startswith("arq")] == []
    for session in sessions:
        assert (await types_of(database, session)).count("span.model_request_start") == 1


async def test_prompts_that_waited_follow_without_another_wake_up(
    database: Database, database_url: str, redis_url: str
) -> None:
    async with working(database_url, redis_url, slots=1) as worker:
        session = await new_session(database)
        await ask(worker, session, "say: one")
        await asyncio.gather(*(ask(worker, session, f"say: {n}") for n in range(4)))
        await until_states(database, session, *["closed"] * 5)


async def test_prompt_starts_while_redis_is_away(database: Database, database_url: str, folder: Path) -> None:
    """Q-09: the queued run itself is what is waited for, its wake-up only a hint."""
    redis = OwnRedis(folder)
    async with working(database_url, redis.url, sweeps=True) as worker:  # it was never there
        session = await new_session(database)
        await ask(worker, session, "say: hello")
        await until_states(database, session, "closed")


async def test_worker_outlives_restarts_of_redis_that_lose_everything(
    database: Database, database_url: str, folder: Path
) -> None:
    redis = OwnRedis(folder)
    await redis.start()
    try:
        async with working(database_url, redis.url, sweeps=True) as worker:
            for _ in range(3):
                session = await new_session(database)
                await ask(worker, session, "say: hello")
                redis.kill()
                await until_states(database, session, "closed")
                await redis.start()

            async def is_woken() -> bool:
                session = await new_session(database)
                await ask(worker, session, "say: hello")
                await until_states(database, session, "closed")
                async with Redis.from_url(redis.url) as client:
                    return not await client.zcard(QUEUE_NAME)

            await eventually(is_woken)
    finally:
        redis.kill()


async def test_redis_that_fails_while_jobs_are_picked_costs_no_place_for_good(
    database: Database, database_url: str, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with working(database_url, redis_url, wakes=False) as worker:
        monkeypatch.setattr("app.queue.PAUSE_S", 0.01)
        queue = worker.queue
        for _ in range(queue.max_jobs + 2):
            await worker.wake_ups.wake()

        async def fail(*_: Any, **__: Any) -> None:
            raise RedisConnectionError("gone")

        with monkeypatch.context() as broken:
            broken.setattr(type(queue.pool), "set", fail)
            for _ in range(queue.max_jobs + 2):
                await queue._poll_iteration()
        assert queue.job_counter == 0
        serving = asyncio.create_task(queue.run_for_ever())
        async with Redis.from_url(redis_url) as redis:

            async def is_empty() -> bool:
                return not await redis.zcard(QUEUE_NAME)

            await eventually(is_empty)
        await _end([serving])


async def test_flushed_redis_disturbs_nobody(
    database: Database, database_url: str, redis_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with working(database_url, redis_url, sweeps=True) as worker, Redis.from_url(redis_url) as redis:
        for _ in range(10):
            sessions = await new_sessions(database, 3)
            await asyncio.gather(*(ask(worker, session, "say: hello") for session in sessions))
            await redis.flushdb()
            for session in sessions:
                await until_states(database, session, "closed")
    assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []


async def test_jobs_that_a_dead_worker_had_picked_are_removed_when_their_mark_is_gone(
    database: Database, database_url: str, redis_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with working(database_url, redis_url) as worker, Redis.from_url(redis_url) as redis:
        worker.queue.poll_delay_s = 0.02
        held = [await worker.wake_ups._redis.enqueue_job("take_run", _defer_by=3600) for _ in range(5)]
        ids = [job.job_id for job in held if job is not None]
        for job_id in ids:
            await redis.set(in_progress_key_prefix + job_id, b"1")
            await redis.incr("arq:retry:" + job_id)  # it was tried once
        await redis.zadd(QUEUE_NAME, dict.fromkeys(ids, 1))
        session = await new_session(database)
        await ask(worker, session, "say: hello")
        await until_states(database, session, "closed")

        async def only_those_are_left() -> bool:
            return bool(await redis.zcard(QUEUE_NAME) == 5)

        await eventually(only_those_are_left)
        await redis.delete(*(in_progress_key_prefix + job_id for job_id in ids))

        async def is_empty() -> bool:
            return not await redis.zcard(QUEUE_NAME)

        await eventually(is_empty)
    assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []


async def test_wake_ups_are_not_worth_a_line_each(
    database: Database, database_url: str, redis_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    async with working(database_url, redis_url) as worker:
        session = await new_session(database)
        await ask(worker, session, "say: hello")
        await until_states(database, session, "closed")
    assert [record for record in caplog.records if record.name.startswith("arq")] == []


# -- leases ---------------------------------------------------------------------------------------------


async def test_blocked_event_loop_does_not_lose_its_runs(
    database: Database, database_url: str, redis_url: str
) -> None:
    async with working(database_url, redis_url, lease_s=1.0) as worker:
        session = await new_session(database)
        await ask(worker, session, HANG)
        await until_saved(database, session, "span.model_request_start")
        [before] = await fetch(database, "SELECT clock_timestamp() AS at")
        time.sleep(4)  # noqa: ASYNC251 - four leases
        [after] = await fetch(database, "SELECT lease_until FROM workers")
        assert after["lease_until"] - before["at"] > timedelta(
            seconds=2
        )  # renewed after the first had run out
        await worker.renewed(2)
        assert worker.tasks == 1
    assert (await types_of(database, session)).count("session.status_rescheduled") == 1  # at the end


async def test_commit_that_waits_for_a_lock_for_three_leases_costs_no_run(
    database: Database, database_url: str, redis_url: str
) -> None:
    may_end = asyncio.Event()

    @tool(label="Gate")
    async def gate() -> str:
        """Waits until it may end."""
        await may_end.wait()
        return "done"

    async with (
        working(database_url, redis_url, lease_s=1.0, tools=(gate,)) as one,
        working(database_url, redis_url, lease_s=1.0, sweeps=True, wakes=False, slots=0) as two,
    ):
        session = await new_session(database, tools=(BuiltinTool(name="gate"),))
        await ask(one, session, "call: gate {}")
        await until_saved(database, session, "span.tool_start")
        async with long_transaction(database) as tx:
            await tx.execute("SELECT FROM sessions WHERE id = $1 FOR UPDATE", to_uuid(session))
            may_end.set()
            await eventually(lambda: is_waiting_for_a_lock(database))
            await two.renewed(9)  # one each third of a lease, and sweeps in between
        await until_states(database, session, "closed")
    assert "session.status_rescheduled" not in await types_of(database, session)


async def test_event_loop_that_hangs_for_good_loses_its_lease(
    database: Database, database_url: str, redis_url: str
) -> None:
    async with working(database_url, redis_url, lease_s=0.6, loop_silence_s=1.5) as worker:
        time.sleep(3)  # noqa: ASYNC251 - it hangs
        assert not worker.lease.is_live
        await until(lambda: worker.lease.is_live)


async def test_worker_whose_runs_were_taken_over_drops_them(
    database: Database, database_url: str, redis_url: str
) -> None:
    async with working(database_url, redis_url) as worker:
        session = await new_session(database)
        await ask(worker, session, HANG)
        await until_saved(database, session, "span.model_request_start")
        await fetch(database, "UPDATE runs SET worker_id = $1 RETURNING 1", to_uuid(new_id("work")))
        await fetch(database, "UPDATE sessions SET epoch = epoch + 1 RETURNING 1")
        await until(lambda: worker.tasks == 0)
        await until(lambda: worker.lease.is_live)
        await fetch(database, "UPDATE runs SET worker_id = $1 RETURNING 1", to_uuid(worker.id))
        await until_saved(database, session, "session.status_rescheduled")  # it is in its name without a task


async def test_worker_that_is_renewed_late_keeps_the_runs_that_nobody_took(
    database: Database, database_url: str, redis_url: str, proxy: PostgresProxy
) -> None:
    async with working(proxy.url, redis_url) as worker:
        kept, taken = await new_sessions(database, 2)
        for session in (kept, taken):
            await ask(worker, session, HANG)
            await until_saved(database, session, "span.model_request_start")
        proxy.go_away()
        await until(lambda: not worker.lease.is_live)
        assert not worker.supervisor.has_room()
        await fetch(
            database, "UPDATE sessions SET epoch = epoch + 1 WHERE id = $1 RETURNING 1", to_uuid(taken)
        )
        await fetch(
            database,
            "UPDATE runs SET worker_id = $2 WHERE session_id = $1 RETURNING 1",
            to_uuid(taken),
            to_uuid(new_id("work")),
        )
        proxy.come_back()
        await until(lambda: taken not in worker.supervisor._active)
        await worker.renewed(2)
        assert set(worker.supervisor._active) == {kept}
        await fetch(database, "UPDATE runs SET worker_id = $1 RETURNING 1", to_uuid(worker.id))


async def test_tool_does_not_begin_when_the_lease_comes_back_without_its_run(
    database: Database, database_url: str, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = []

    @tool()
    async def strike() -> str:
        """Must not be repeated."""
        begun.append("strike")
        return "done"

    async with working(database_url, redis_url, tools=(strike,)) as worker:
        commit = HoldSink._commit

        async def commit_and_stand_still(self: HoldSink, step: Step, seen: int | None) -> Any:
            events = await commit(self, step, seen)
            if any(call.state == "running" for call in step.calls):
                worker.lease._valid_until_s = 0.0
                await fetch(database, "UPDATE sessions SET epoch = epoch + 1 RETURNING 1")
                other = to_uuid(new_id("work"))
                await fetch(database, "UPDATE runs SET worker_id = $1 RETURNING 1", other)
            return events

        monkeypatch.setattr(HoldSink, "_commit", commit_and_stand_still)
        session = await new_session(database, tools=(BuiltinTool(name="strike"),))
        await ask(worker, session, "call: strike {}")
        await until_saved(database, session, "agent.tool_use")
        await until(lambda: worker.tasks == 0)
        await worker.renewed(2)
        assert worker.lease.is_live
        assert begun == []
        await fetch(database, "UPDATE runs SET worker_id = $1 RETURNING 1", to_uuid(worker.id))


async def test_hooks_watch_and_change_the_runs_of_a_worker(
    database: Database, database_url: str, redis_url: str
) -> None:
    told: list[str] = []

    class Guard(Hooks):
        async def before_tool_call(self, context: HookContext, call: ToolCall) -> ToolVerdict | None:
            return ToolVerdict(action="block", reason=f"Not in {context.session_id}.")

        async def run_end(self, context: HookContext, stop: StopReason) -> None:
            told.append(stop.type)

    @tool()
    async def strike() -> str:
        """Must not be called."""
        raise AssertionError("it was blocked")

    async with working(database_url, redis_url, tools=(strike,), hooks=(Guard(),)) as worker:
        session = await new_session(database, tools=(BuiltinTool(name="strike"),))
        await ask(worker, session, "call: strike {}\n---\necho")
        await until_states(database, session, "closed")
    rows = await fetch(database, "SELECT outcome, result ->> 'content' AS said FROM tool_calls")
    assert [row["outcome"] for row in rows] == ["denied"]
    assert f"Not in {session}." in rows[0]["said"]
    assert told == ["end_turn"]


async def test_run_in_our_name_that_nobody_works_on_is_queued_again(
    database: Database, database_url: str, redis_url: str
) -> None:
    async with working(database_url, redis_url, wakes=False) as worker:
        session = await new_session(database)
        await post(database, session, "say: hello")
        assert await claim(database, worker.id) is not None  # and the answer was lost
        await until_saved(database, session, "session.status_rescheduled")
        await until_states(database, session, "queued")
        await worker.supervisor.take()
        await until_states(database, session, "closed")


async def test_claim_that_takes_long_is_not_taken_for_a_run_without_a_task(
    database: Database, database_url: str, redis_url: str, proxy: PostgresProxy,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    is_claimed, go_on = asyncio.Event(), asyncio.Event()

    async with working(database_url, redis_url, wakes=False) as worker:
        one_statement = worker.database.one_statement

        @asynccontextmanager
        async def slow() -> AsyncIterator[Any]:
            async with one_statement() as tx:
                yield tx
            if not is_claimed.is_set():
                is_claimed.set()
                await go_on.wait()

        session = await new_session(database)
        await post(database, session, "say: hello")
        monkeypatch.setattr(worker.database, "one_statement", slow)
        taking = asyncio.create_task(worker.supervisor.take())
        await is_claimed.wait()
        await worker.renewed(4)
        assert await states_of(database, session) == ["running"]
        go_on.set()
        await taking
        await until_states(database, session, "closed")
    assert "session.status_rescheduled" not in await types_of(database, session)


async def test_stuck_commit_is_dropped_and_its_run_done_again(
    database: Database, database_url: str, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    stuck = asyncio.Event()
    async with working(database_url, redis_url, wakes=False, stuck_commit_s=0.2) as worker:
        one_statement = worker.database.one_statement

        @asynccontextmanager
        async def blocked() -> AsyncIterator[Any]:
            task = asyncio.current_task()
            active = [active for active in worker.supervisor._active.values() if active.task is task]
            if active and active[0].sink.committing_since_s is not None and not stuck.is_set():
                stuck.set()
                await asyncio.Event().wait()
            async with one_statement() as tx:
                yield tx

        monkeypatch.setattr(worker.database, "one_statement", blocked)
        session = await new_session(database)
        await post(database, session, "say: hello")
        await worker.supervisor.take()
        await stuck.wait()
        await until_saved(database, session, "session.status_rescheduled")
        monkeypatch.setattr(worker.supervisor, "_stuck_commit_s", 60.0)  # from here on a slow commit is none
        await worker.supervisor.take()
        await until_states(database, session, "closed")
        rows = await fetch(database, "SELECT takeovers FROM runs")
        assert [row["takeovers"] for row in rows] == [1]


async def test_renewing_that_fails_for_good_is_told(
    database: Database, database_url: str, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def broken(*_: Any, **__: Any) -> None:
        raise RuntimeError("a bug")

    async with working(database_url, redis_url) as worker:
        monkeypatch.setattr("app.lease.renew_lease", broken)
        with pytest.raises(RuntimeError, match="a bug"):
            await asyncio.wait_for(worker.lease.wait_until_ended(), 60)


# -- sweeps ---------------------------------------------------------------------------------------------


async def test_runs_of_a_dead_worker_are_finished_by_another(
    database: Database, database_url: str, redis_url: str
) -> None:
    """Q-02: taken back once, though two workers sweep; the prompt behind it is answered too."""
    session = await new_session(database)
    await post(database, session, "say: hello")
    dead = await new_worker(database)
    await claim(database, dead)
    await expire(database, dead)
    await post(database, session, "say: and you")
    async with (
        working(database_url, redis_url, sweeps=True, lease_s=1.0),
        working(database_url, redis_url, sweeps=True, lease_s=1.0),
    ):
        await until_states(database, session, "closed", "closed")
    types = await types_of(database, session)
    assert types.count("session.status_rescheduled") == 1
    assert types.count("agent.message") == 2


async def test_outage_of_the_database_takes_nobodys_runs(
    database: Database, database_url: str, redis_url: str, proxy: PostgresProxy
) -> None:
    async with (
        working(proxy.url, redis_url, sweeps=True) as one,
        working(proxy.url, redis_url, sweeps=True) as two,
    ):
        sessions = await new_sessions(database, 4)
        for session in sessions:
            await ask(one, session, HANG)
            await until_saved(database, session, "span.model_request_start")
        await asyncio.gather(one.renewed(6), two.renewed(6))  # both have seen it for a whole lease
        for silence in (proxy.go_away, proxy.freeze):
            silence()
            await until(lambda: not one.lease.is_live and not two.lease.is_live)
            proxy.come_back()
            proxy.thaw()
            await asyncio.gather(one.renewed(6), two.renewed(6))
            assert one.tasks + two.tasks == 4
        for session in sessions:
            assert "session.status_rescheduled" not in await types_of(database, session)


async def test_run_that_ignores_its_cancel_is_closed_by_force(
    database: Database, database_url: str, redis_url: str
) -> None:
    release = threading.Event()

    @tool(label="Deaf")
    async def deaf() -> str:
        """Hears nothing."""
        while not release.is_set():
            try:
                await asyncio.sleep(0.05)
            except asyncio.CancelledError:
                continue
        return "done"

    async with working(database_url, redis_url, sweeps=True, tools=(deaf,)) as worker:
        await worker.renewed(4)
        session = await new_session(database, tools=(BuiltinTool(name="deaf"),))
        run_id = await ask(worker, session, "call: deaf {}")
        await until_saved(database, session, "span.tool_start")
        async with database.transaction() as tx:
            await cancel_run(tx, run_id=run_id, reason="enough")
        await worker.publisher.signal_cancel(session)
        await until_states(database, session, "closed")
        await until(lambda: worker.tasks == 0)
        release.set()
    rows = await fetch(database, "SELECT outcome FROM tool_calls")
    assert [row["outcome"] for row in rows] == ["cancelled"]


async def test_run_whose_worker_does_not_heed_a_cancel_is_closed_by_another(
    database: Database, database_url: str, redis_url: str
) -> None:
    session = await new_session(database)
    run_id = (await post(database, session, "say: hello")).run_id
    deaf = await new_worker(database)
    await claim(database, deaf)
    assert run_id is not None
    async with database.transaction() as tx:
        await cancel_run(tx, run_id=run_id, reason="enough")
    async with working(database_url, redis_url, sweeps=True):
        await until_states(database, session, "closed")
    rows = await fetch(database, "SELECT stop_reason::jsonb AS stop FROM runs")
    assert '"enough"' in rows[0]["stop"]


async def test_run_that_cannot_be_swept_does_not_keep_the_others(
    database: Database, database_url: str, redis_url: str
) -> None:
    dead = await new_worker(database)
    broken, fine = await new_sessions(database, 2)
    for session in (broken, fine):
        await post(database, session, "say: hello")
        await claim(database, dead)
    await fetch(
        database, "UPDATE prompts SET content = '42' WHERE session_id = $1 RETURNING 1", to_uuid(broken)
    )
    await expire(database, dead)
    async with working(database_url, redis_url, sweeps=True):
        await until_states(database, fine, "closed")
    assert await states_of(database, broken) == ["running"]


async def test_cancel_reaches_the_worker_at_once(
    database: Database, database_url: str, redis_url: str
) -> None:
    async with working(database_url, redis_url) as worker:
        session = await new_session(database)
        run_id = await ask(worker, session, HANG)
        await until_saved(database, session, "span.model_request_start")
        async with database.transaction() as tx:
            await cancel_run(tx, run_id=run_id, reason=None)
        await worker.publisher.signal_cancel(session)
        await until_states(database, session, "closed")
    assert "span.model_request_end" in await types_of(database, session)


async def test_cancel_that_redis_lost_is_heard_by_the_next_renewal(
    database: Database, database_url: str, redis_url: str
) -> None:
    async with working(database_url, redis_url) as worker:
        session = await new_session(database)
        run_id = await ask(worker, session, HANG)
        await until_saved(database, session, "span.model_request_start")
        async with database.transaction() as tx:
            await cancel_run(tx, run_id=run_id, reason=None)
        await until_states(database, session, "closed")


async def test_cancel_that_comes_after_its_run_leaves_the_next_one_alone(
    database: Database, database_url: str, redis_url: str
) -> None:
    """Q-06."""
    async with working(database_url, redis_url) as worker:
        session = await new_session(database)
        await ask(worker, session, "wait: 0.3\nsay: hello")
        await until_saved(database, session, "span.model_request_start")
        worker.supervisor.cancel(session)  # as a signal for the run before would
        await until_states(database, session, "closed")
    rows = await fetch(database, "SELECT stop_reason FROM runs")
    assert ["end_turn" in row["stop_reason"] for row in rows] == [True]


async def test_idempotency_keys_are_forgotten_when_their_time_is_over(
    database: Database, database_url: str, redis_url: str
) -> None:
    session = await new_session(database)
    async with database.transaction() as tx:
        await tx.execute(
            """
            INSERT INTO idempotency_keys
                (tenant_id, key_sha256, request_sha256, resources, status, created_at)
            SELECT tenant_id, key, ''::bytea, '{}', 200, clock_timestamp() - make_interval(hours => age)
            FROM sessions, (VALUES ('old'::bytea, 25), ('new'::bytea, 23)) AS kept (key, age)
            WHERE sessions.id = $1
            """,
            to_uuid(session),
        )

    async def only_the_new_is_left() -> bool:
        rows = await fetch(database, "SELECT key_sha256 FROM idempotency_keys")
        return [row["key_sha256"] for row in rows] == [b"new"]

    async with working(database_url, redis_url, sweeps=True):
        await eventually(only_the_new_is_left)


# -- the end --------------------------------------------------------------------------------------------


async def test_drain_hands_back_what_it_holds_and_another_worker_finishes_it(
    database: Database, database_url: str, redis_url: str
) -> None:
    async with working(database_url, redis_url) as leaving:
        session = await new_session(database)
        await ask(leaving, session, "wait: 2\nsay: hello")  # it must be drained before that
        await until_saved(database, session, "span.model_request_start")
        await leaving.supervisor.drain(0.0)
        assert await states_of(database, session) == ["queued"]
        assert not leaving.supervisor.has_room()
        async with working(database_url, redis_url):
            await until_states(database, session, "closed")
    rows = await fetch(database, "SELECT takeovers FROM runs")
    assert [row["takeovers"] for row in rows] == [0]


async def test_drain_lets_a_turn_reach_its_commit(
    database: Database, database_url: str, redis_url: str
) -> None:
    async with working(database_url, redis_url) as worker:
        session = await new_session(database)
        await ask(worker, session, "wait: 0.3\nsay: hello")
        await until_saved(database, session, "span.model_request_start")
        await worker.supervisor.drain(20.0)
        assert await states_of(database, session) == ["closed"]


async def test_run_that_is_claimed_while_the_worker_drains_is_handed_back(
    database: Database, database_url: str, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_claimed, go_on = asyncio.Event(), asyncio.Event()
    async with working(database_url, redis_url, wakes=False) as worker:
        one_statement = worker.database.one_statement

        @asynccontextmanager
        async def slow() -> AsyncIterator[Any]:
            async with one_statement() as tx:
                yield tx
            if not is_claimed.is_set():
                is_claimed.set()
                await go_on.wait()

        session = await new_session(database)
        await post(database, session, "say: hello")
        monkeypatch.setattr(worker.database, "one_statement", slow)
        taking = asyncio.create_task(worker.supervisor.take())
        await is_claimed.wait()
        taking.cancel()  # as arq does with a job
        draining = asyncio.create_task(worker.supervisor.drain(20.0))
        await asyncio.sleep(0)
        go_on.set()
        await draining
        assert await states_of(database, session) == ["queued"]
    rows = await fetch(database, "SELECT takeovers FROM runs")
    assert [row["takeovers"] for row in rows] == [0]


async def test_end_of_a_worker_leaves_neither_lease_nor_run(
    database: Database, database_url: str, redis_url: str
) -> None:
    async with working(database_url, redis_url, sweeps=True) as worker:
        session = await new_session(database)
        await ask(worker, session, HANG)
        await until_saved(database, session, "span.model_request_start")
    assert await fetch(database, "SELECT FROM workers") == []
    assert await states_of(database, session) == ["queued"]
    await steady_worker(database)


async def test_model_that_is_not_there_closes_the_run_with_a_reason(
    database: Database, database_url: str, redis_url: str
) -> None:
    async with working(database_url, redis_url) as worker:
        session = await new_session(database, model=ModelChoice(id="nobody:nothing"))
        await ask(worker, session, "hello")
        await until_states(database, session, "closed")
    assert "session.error" in await types_of(database, session)


async def test_task_that_loses_a_cancel_is_cancelled_again() -> None:
    lost = 0

    async def forgetful() -> None:
        nonlocal lost
        while True:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                lost += 1
                if lost == 3:
                    raise

    task = asyncio.create_task(forgetful())
    await asyncio.sleep(0)
    assert await end(task) == []
    assert lost == 3


async def test_queue_ends_though_redis_py_lost_the_cancel(
    database: Database, database_url: str, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with working(database_url, redis_url, wakes=False) as worker:
        is_polling = asyncio.Event()

        async def zrangebyscore(*_: Any, **__: Any) -> list[bytes]:
            is_polling.set()
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                return []
            raise AssertionError

        monkeypatch.setattr(worker.queue.pool, "zrangebyscore", zrangebyscore)
        serving = asyncio.create_task(worker.queue.run_for_ever())
        await is_polling.wait()
        assert await end(serving) == []
