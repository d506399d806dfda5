"""Transactions: what is left of them when they end well, badly, or in the middle."""

import asyncio
import shutil
import tempfile
from collections.abc import AsyncIterator, Iterator
from functools import partial
from pathlib import Path
from uuid import uuid4

import asyncpg
import pytest

from db.engine import Database, connect_arguments
from db.errors import DatabaseAway, DatabaseBusy
from tests.support.held_sessions import eventually
from tests.support.postgres_proxy import postgres_proxy

# Other backends of this database in a transaction, but the one that asks.
OPEN = """
    SELECT count(*) FROM pg_stat_activity
    WHERE datname = current_database() AND pid <> pg_backend_pid() AND state LIKE 'idle in transaction%'
"""
ADD = "INSERT INTO tenants (id, name) VALUES ($1, $2)"
COUNT = "SELECT count(*) FROM tenants WHERE name = $1"


class UnexpectedError(Exception):
    pass


@pytest.fixture
async def database(database_url: str) -> AsyncIterator[Database]:
    database = Database.open(database_url, pool_size=4)
    yield database
    await database.close()


@pytest.fixture
async def watcher(database_url: str) -> AsyncIterator[asyncpg.Connection]:
    connection = await asyncpg.connect(database_url)
    yield connection
    await connection.close()


@pytest.fixture
def folder() -> Iterator[Path]:
    """Short, since a socket's path must be."""
    path = Path(tempfile.mkdtemp(prefix="arm-"))
    yield path
    shutil.rmtree(path)


async def test_block_that_ends_is_committed(database: Database, watcher: asyncpg.Connection) -> None:
    async with database.transaction() as tx:
        await tx.execute(ADD, uuid4(), "kept")
        assert await watcher.fetchval(COUNT, "kept") == 0
    assert await watcher.fetchval(COUNT, "kept") == 1
    assert (await watcher.fetchval(OPEN), database.checked_out) == (0, 0)


async def test_block_that_raises_is_rolled_back(database: Database, watcher: asyncpg.Connection) -> None:
    with pytest.raises(UnexpectedError):
        async with database.transaction() as tx:
            await tx.execute(ADD, uuid4(), "lost")
            raise UnexpectedError
    assert await watcher.fetchval(COUNT, "lost") == 0
    assert (await watcher.fetchval(OPEN), database.checked_out) == (0, 0)


async def test_statement_that_fails_leaves_a_connection_that_works(database: Database) -> None:
    with pytest.raises(asyncpg.UniqueViolationError):
        async with database.transaction() as tx:
            await tx.execute(ADD, uuid4(), "one")
            await tx.execute(ADD, uuid4(), "one")
    async with database.transaction() as tx:
        assert await tx.fetchval(COUNT, "one") == 0


async def test_cancel_between_statements_leaves_no_transaction(
    database: Database, watcher: asyncpg.Connection
) -> None:
    is_inside = asyncio.Event()

    async def work() -> None:
        async with database.transaction() as tx:
            await tx.execute(ADD, uuid4(), "cancelled")
            is_inside.set()
            await asyncio.Event().wait()

    task = asyncio.create_task(work())
    await is_inside.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await watcher.fetchval(COUNT, "cancelled") == 0
    assert (await watcher.fetchval(OPEN), database.checked_out) == (0, 0)


async def test_cancel_in_the_middle_of_a_statement_ends_it_at_the_server(
    database: Database, watcher: asyncpg.Connection
) -> None:
    async def work() -> None:
        async with database.transaction() as tx:
            await tx.fetchval("SELECT pg_sleep(60) /* cancelled */")

    async def is_asleep() -> bool:
        return bool(await watcher.fetchval(
            "SELECT count(*) FROM pg_stat_activity WHERE wait_event = 'PgSleep'"
            " AND datname = current_database()"
        ))  # fmt: skip

    async def is_gone() -> bool:
        return not await is_asleep()

    task = asyncio.create_task(work())
    await eventually(is_asleep)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await eventually(is_gone)
    assert database.checked_out == 0
    await database.ping()


async def test_pool_survives_a_hundred_transactions_cancelled_at_any_point(
    database: Database, watcher: asyncpg.Connection
) -> None:
    async def work(number: int) -> None:
        async with database.transaction() as tx:
            for _ in range(20):
                await tx.execute("SELECT 1")
            await tx.execute(ADD, uuid4(), f"number {number}")

    for start in range(0, 100, 10):
        tasks = [asyncio.create_task(work(number)) for number in range(start, start + 10)]
        for turns in range(10):
            for _ in range(turns):
                await asyncio.sleep(0)
            tasks[turns].cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(result is None or isinstance(result, asyncio.CancelledError) for result in results)

    assert database.checked_out == 0
    await asyncio.gather(*(database.ping() for _ in range(8)))

    async def is_none_open() -> bool:
        return bool(await watcher.fetchval(OPEN) == 0)

    await eventually(is_none_open)  # the server hears of a connection that was broken off a little later


async def test_cancel_that_comes_while_rolling_back_is_not_swallowed(database_url: str, folder: Path) -> None:
    is_failing, go_on = asyncio.Event(), asyncio.Event()
    async with postgres_proxy(database_url, folder) as proxy:
        database = Database.open(proxy.url, pool_size=1)

        async def work() -> None:
            async with database.transaction() as tx:
                await tx.fetchval("SELECT 1")
                proxy.freeze()
                is_failing.set()
                await go_on.wait()
                raise UnexpectedError

        task = asyncio.create_task(work())
        await is_failing.wait()
        go_on.set()
        for _ in range(5):
            await asyncio.sleep(0)  # it is rolling back, and nothing answers
        task.cancel()
        proxy.thaw()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert database.checked_out == 0
        await database.ping()
        await database.close()


async def test_connection_that_does_not_roll_back_is_given_up(database_url: str, folder: Path) -> None:
    async with postgres_proxy(database_url, folder) as proxy:
        database = Database.open(proxy.url, pool_size=1)
        with pytest.raises(UnexpectedError):
            async with database.transaction() as tx:
                await tx.fetchval("SELECT 1")
                proxy.freeze()
                raise UnexpectedError
        proxy.thaw()
        assert database.checked_out == 0
        await database.ping()
        await database.close()


async def test_backend_that_is_killed_inside_a_transaction_is_the_database_being_away(
    database: Database, watcher: asyncpg.Connection
) -> None:
    with pytest.raises(DatabaseAway):
        async with database.transaction() as tx:
            pid = await tx.fetchval("SELECT pg_backend_pid()")
            await watcher.execute("SELECT pg_terminate_backend($1)", pid)
            await tx.fetchval("SELECT 1")
    await database.ping()
    assert database.checked_out == 0


async def test_idle_connections_that_were_killed_are_replaced(
    database: Database, watcher: asyncpg.Connection
) -> None:
    await asyncio.gather(*(database.ping() for _ in range(4)))
    await watcher.execute(
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
        " WHERE datname = current_database() AND pid <> pg_backend_pid() AND backend_type = 'client backend'"
    )

    async def are_gone() -> bool:
        others: int = await watcher.fetchval(
            "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()"
            " AND pid <> pg_backend_pid() AND backend_type = 'client backend'"
        )
        return others == 0

    await eventually(are_gone)
    # The server is gone, but the end of a connection may not be read yet.
    await eventually(partial(_answers, database, at_once=8))


async def test_server_that_refuses_is_away_and_heals(database_url: str, folder: Path) -> None:
    async with postgres_proxy(database_url, folder) as proxy:
        database = Database.open(proxy.url, pool_size=2)
        await database.ping()
        proxy.go_away()
        for _ in range(3):
            with pytest.raises(DatabaseAway):
                await database.ping()
        proxy.come_back()
        await database.ping()
        assert database.checked_out == 0
        await database.close()


async def test_server_that_hangs_is_the_database_being_away(
    database_url: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("db.engine.STATEMENT_TIMEOUT_S", 0.2)
    monkeypatch.setattr("db.engine.ROLLBACK_TIMEOUT_S", 0.2)
    async with postgres_proxy(database_url, folder) as proxy:
        database = Database.open(proxy.url, pool_size=1)
        await eventually(partial(_answers, database))  # which may take longer than these limits
        proxy.freeze()
        with pytest.raises(DatabaseAway):
            async with database.transaction() as tx:
                await tx.fetchval("SELECT 1")
        with pytest.raises(DatabaseAway):
            await database.ping()
        proxy.thaw()
        await eventually(partial(_answers, database))
        assert database.checked_out == 0
        await database.close()


async def _answers(database: Database, *, at_once: int = 1) -> bool:
    try:
        await asyncio.gather(*(database.ping() for _ in range(at_once)))
    except DatabaseAway:
        return False
    return True


async def test_drained_pool_is_the_database_being_away(
    database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    database = Database.open(database_url, pool_size=1)
    await database.ping()  # to connect may take longer than the limit
    monkeypatch.setattr("db.engine.ACQUIRE_TIMEOUT_S", 0.05)
    async with database.transaction():
        with pytest.raises(DatabaseAway):
            await database.ping()
    await database.ping()
    await database.close()


async def test_lock_that_is_not_had_in_time_is_the_database_being_busy(
    database: Database, watcher: asyncpg.Connection
) -> None:
    await watcher.execute(ADD, uuid4(), "locked")
    async with watcher.transaction():
        await watcher.execute("SELECT FROM tenants FOR UPDATE")
        with pytest.raises(DatabaseBusy):
            async with database.transaction() as tx:
                await tx.execute("SET LOCAL lock_timeout = '20ms'")
                await tx.execute("SELECT FROM tenants FOR UPDATE")
    assert await watcher.fetchval(OPEN) == 0
    await database.ping()


@pytest.mark.parametrize("is_pooler", [False, True])
async def test_every_transaction_bounds_its_waits(database_url: str, *, is_pooler: bool) -> None:
    database = Database.open(database_url, pooler=is_pooler)
    async with database.transaction(uuid4()) as tx:
        assert await tx.fetchval("SELECT current_setting('lock_timeout')") == "5s"
        assert await tx.fetchval("SELECT current_setting('idle_in_transaction_session_timeout')") == "2s"
    async with database.one_statement() as tx:
        assert await tx.fetchval("SELECT current_setting('lock_timeout')") == "5s"
    await database.close()


async def test_behind_a_pooler_a_connection_keeps_no_bounds(database_url: str) -> None:
    database = Database.open(database_url, pooler=True)
    async with database.statements() as reads:
        assert await reads.fetchval("SELECT current_setting('lock_timeout')") == "0"
    await database.close()


@pytest.mark.parametrize("is_pooler", [False, True])
async def test_statement_that_stands_alone_is_committed(
    database_url: str, watcher: asyncpg.Connection, *, is_pooler: bool
) -> None:
    database = Database.open(database_url, pooler=is_pooler)
    async with database.one_statement() as tx:
        await tx.execute(ADD, uuid4(), f"alone {is_pooler}")
    assert await watcher.fetchval(COUNT, f"alone {is_pooler}") == 1
    await database.close()


async def test_second_statement_is_refused_where_there_may_be_one(
    database: Database, watcher: asyncpg.Connection
) -> None:
    with pytest.raises(RuntimeError):
        async with database.one_statement() as tx:
            await tx.fetchval("SELECT 1")
            await tx.execute(ADD, uuid4(), "one too many")
    assert await watcher.fetchval(COUNT, "one too many") == 0


async def test_process_that_stops_in_a_transaction_is_thrown_out_and_hears_of_it(
    database: Database, watcher: asyncpg.Connection
) -> None:
    async def is_gone() -> bool:
        return not await watcher.fetchval("SELECT count(*) FROM pg_stat_activity WHERE pid = $1", pid)

    with pytest.raises(DatabaseAway):
        async with database.transaction() as tx:
            await tx.execute(ADD, uuid4(), "stopped")
            await tx.execute("SET LOCAL idle_in_transaction_session_timeout = '20ms'")
            pid = await tx.fetchval("SELECT pg_backend_pid()")
            await eventually(is_gone)
    assert await watcher.fetchval(COUNT, "stopped") == 0
    await database.ping()


async def test_statements_prepared_before_a_migration_are_busy_once_and_then_work(
    database_url: str, watcher: asyncpg.Connection
) -> None:
    database = Database.open(database_url, pool_size=1)
    await watcher.execute("CREATE TABLE changing (a int)")
    try:
        async with database.transaction() as tx:
            await tx.fetch("SELECT * FROM changing")
        await watcher.execute("ALTER TABLE changing ADD b int")
        with pytest.raises(DatabaseBusy):
            async with database.transaction() as tx:
                await tx.fetch("SELECT * FROM changing")
        async with database.transaction() as tx:
            await tx.fetch("SELECT * FROM changing")
    finally:
        await database.close()
        await watcher.execute("DROP TABLE changing")


async def test_behind_a_pooler_nothing_stays_prepared(database_url: str) -> None:
    assert connect_arguments(pooler=False).keys() & {"statement_cache_size"} == set()
    for is_pooler in (True, False):
        database = Database.open(database_url, pooler=is_pooler, pool_size=1)
        tenant_id = uuid4()
        async with database.transaction() as tx:
            await tx.execute(ADD, tenant_id, str(tenant_id))
        async with database.transaction(tenant_id) as tx:
            assert await tx.fetchval(COUNT, str(tenant_id)) == 1
        async with database.transaction() as tx:
            await tx.execute("SELECT 1")
            prepared = await tx.fetchval(
                "SELECT count(*) FROM pg_prepared_statements WHERE statement NOT LIKE '%pg_prepared%'"
            )
        assert (prepared == 0) == is_pooler
        await database.close()
