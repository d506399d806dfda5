"""The pool and the ways to open a transaction.

Statements go to asyncpg as they are, on its own pool: a connection is taken and given back without a round
trip. Each connection says when it is made how long a transaction may wait, so that a stopped process cannot
hold a session; behind a pooler, where connections are shared, each transaction says it. With a tenant its
first round trip says whose it is, so that a query without a tenant sees nothing.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any
from uuid import UUID

import asyncpg

from db.errors import DatabaseAway, DatabaseBusy

Record = asyncpg.Record
if TYPE_CHECKING:
    # Both are generic in their type stubs only.
    Connection = asyncpg.pool.PoolConnectionProxy[Record]
    Pool = asyncpg.Pool[Record]
else:
    Connection = asyncpg.pool.PoolConnectionProxy
    Pool = asyncpg.Pool

TENANT_ROLE = "armillary_tenant"
"""The role that api transactions take on; row-level security binds it to `armillary.tenant_id`."""

LOCK_TIMEOUT_S = 5
IDLE_IN_TRANSACTION_TIMEOUT_S = 2
ROLLBACK_TIMEOUT_S = 2.0
CLOSE_TIMEOUT_S = 2.0  # for transactions to end
CONNECT_TIMEOUT_S = 5.0
ACQUIRE_TIMEOUT_S = 5.0
STATEMENT_TIMEOUT_S = 8.0  # longer than a lock is waited for; a server that hangs is away

_BOUNDS = {
    "lock_timeout": f"{LOCK_TIMEOUT_S}s",
    "idle_in_transaction_session_timeout": f"{IDLE_IN_TRANSACTION_TIMEOUT_S}s",
}

# What passes by itself: the connection is gone, the server stops, starts, fails over or has no room.
_AWAY = (
    asyncpg.PostgresConnectionError,
    asyncpg.InterfaceError,
    asyncpg.InternalClientError,  # on a connection that the server ended between two statements
    asyncpg.OperatorInterventionError,
    asyncpg.InsufficientResourcesError,
    asyncpg.ReadOnlySQLTransactionError,
    asyncpg.IdleInTransactionSessionTimeoutError,
    OSError,
    TimeoutError,
)
_BUSY = (
    asyncpg.LockNotAvailableError,
    asyncpg.DeadlockDetectedError,
    asyncpg.SerializationError,
    asyncpg.QueryCanceledError,
    # A migration has changed a table under statements that this connection had prepared.
    asyncpg.InvalidCachedStatementError,
    asyncpg.OutdatedSchemaCacheError,
)


class Transaction:
    """An open transaction. Positional parameters are `$1`, `$2` …; nothing is committed by its methods."""

    def __init__(self, connection: Connection, tenant_id: UUID | None) -> None:
        self._connection = connection
        self.tenant_id = tenant_id

    def _next(self) -> Connection:
        """Where the next statement goes."""
        return self._connection

    async def fetch(self, statement: str, *values: Any) -> list[Record]:
        return await self._next().fetch(statement, *values)

    async def fetchrow(self, statement: str, *values: Any) -> Record | None:
        return await self._next().fetchrow(statement, *values)

    async def fetchval(self, statement: str, *values: Any) -> Any:
        return await self._next().fetchval(statement, *values)

    async def execute(self, statement: str, *values: Any) -> str:
        return await self._next().execute(statement, *values)


class _OneStatement(Transaction):
    """Outside of a transaction block, where each statement is committed by itself: there may be only one."""

    def __init__(self, connection: Connection) -> None:
        super().__init__(connection, None)
        self._is_used = False

    def _next(self) -> Connection:
        if self._is_used:
            raise RuntimeError("a second statement needs a transaction")
        self._is_used = True
        return super()._next()


class Database:
    """A pool of connections to one Postgres database."""

    def __init__(self, url: str, *, pool_size: int, pooler: bool) -> None:
        self._url = url
        self._pool_size = pool_size
        self._pooler = pooler
        self._begin = "; ".join(["BEGIN", *_set_local(pooler=pooler)])
        self._pool: Pool | None = None

    @classmethod
    def open(cls, url: str, *, pooler: bool = False, pool_size: int = 8) -> "Database":
        """A pool that connects when first used.

        `url` is a libpq URL, such as `postgresql://user@host/name` or `postgresql://user@/name?host=/socket/dir`.
        `pooler`: a transaction-mode pooler stands in between, so nothing may be prepared on a connection.
        """
        return cls(url, pool_size=pool_size, pooler=pooler)

    @asynccontextmanager
    async def transaction(self, tenant_id: UUID | None = None) -> AsyncIterator[Transaction]:
        """A transaction that commits at the end of the block and rolls back on any exception.

        With a tenant, row-level security hides all other tenants' rows. Without one everything is visible:
        that is for the worker, for authentication and for administration.
        Raises: DatabaseBusy, DatabaseAway.
        """
        async with self._connection() as connection:
            try:
                await connection.execute(self._begin + _as_tenant(tenant_id))
                yield Transaction(connection, tenant_id)
                await connection.execute("COMMIT")
            except BaseException:
                await _to_the_end(_roll_back(connection))
                raise

    @asynccontextmanager
    async def one_statement(self) -> AsyncIterator[Transaction]:
        """A transaction of a single statement, without a tenant: committed when the statement has returned.

        Saves the round trips of BEGIN and COMMIT, and is as durable. When it raises DatabaseAway, or is
        cancelled, the statement may have been committed, as with a COMMIT whose answer is lost.
        Raises: DatabaseBusy, DatabaseAway; RuntimeError at a second statement.
        """
        if self._pooler:  # which lets no connection keep the bounds of its own
            async with self.transaction() as tx:
                yield _OneStatement(tx._next())
            return
        async with self._connection() as connection:
            yield _OneStatement(connection)

    @asynccontextmanager
    async def statements(self) -> AsyncIterator[Transaction]:
        """For reads without a tenant that need no common moment: each statement stands for itself.

        Saves the two round trips of a transaction. Not for anything that locks or writes.
        Raises: DatabaseBusy, DatabaseAway.
        """
        async with self._connection() as connection:
            yield Transaction(connection, None)

    @asynccontextmanager
    async def _connection(self) -> AsyncIterator[Connection]:
        try:
            if self._pool is None:
                self._pool = self._make_pool()
            pool = await self._pool
            async with pool.acquire(timeout=ACQUIRE_TIMEOUT_S) as connection:
                yield connection
        except _BUSY as error:
            raise DatabaseBusy(f"The database was busy: {error}") from error
        except _AWAY as error:
            raise DatabaseAway(f"The database is away: {error}") from error

    def _make_pool(self) -> Pool:
        arguments = connect_arguments(pooler=self._pooler)
        if not self._pooler:
            arguments["server_settings"] |= _BOUNDS
        return asyncpg.create_pool(
            self._url,
            min_size=0,
            max_size=self._pool_size,
            max_inactive_connection_lifetime=0,
            reset=_leave_as_it_is,
            command_timeout=STATEMENT_TIMEOUT_S,
            **arguments,
        )

    async def ping(self) -> None:
        """One round trip. Raises: DatabaseAway."""
        async with self.statements() as tx:
            await tx.fetchval("SELECT 1")

    @property
    def checked_out(self) -> int:
        """How many connections are in use at this moment."""
        return 0 if self._pool is None else self._pool.get_size() - self._pool.get_idle_size()

    async def close(self) -> None:
        """Closes all connections. Safe to call twice."""
        pool, self._pool = self._pool, None
        if pool is None:
            return
        try:
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await pool.close()
        except TimeoutError:
            pool.terminate()


def _set_local(*, pooler: bool) -> list[str]:
    return [f"SET LOCAL {name} = '{value}'" for name, value in _BOUNDS.items()] if pooler else []


def _as_tenant(tenant_id: UUID | None) -> str:
    if tenant_id is None:
        return ""
    return f"; SET LOCAL ROLE {TENANT_ROLE}; SET LOCAL armillary.tenant_id = '{tenant_id}'"


async def _leave_as_it_is(_: Any) -> None:
    """In place of asyncpg's reset: whatever a transaction sets, it sets for itself only."""


async def _roll_back(connection: Connection) -> None:
    """Leaves no transaction open: rolls back, or breaks off a connection whose state is not known."""
    try:
        async with asyncio.timeout(ROLLBACK_TIMEOUT_S):
            await connection.execute("ROLLBACK")
    except (*_AWAY, asyncpg.PostgresError):
        with contextlib.suppress(asyncpg.InterfaceError):  # gone already, and out of the pool
            connection.terminate()  # a polite close would wait for the server once more


async def _to_the_end(work: Coroutine[Any, Any, None]) -> None:
    """Runs `work`, which is bounded in time, to its end; a cancel that comes meanwhile is raised after it."""
    task = asyncio.ensure_future(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError as error:
            cancelled = error
    task.result()
    if cancelled is not None:
        raise cancelled


def connect_arguments(*, pooler: bool) -> dict[str, Any]:
    """Arguments for asyncpg. Behind a transaction-mode pooler nothing of a connection lasts.

    Elsewhere statements stay prepared, and each is planned once: all of them go by keys, and planning took as
    long as running them.
    """
    settings = {"application_name": "armillary"}
    arguments: dict[str, Any] = {"timeout": CONNECT_TIMEOUT_S, "server_settings": settings}
    if pooler:
        arguments["statement_cache_size"] = 0
    else:
        settings["plan_cache_mode"] = "force_generic_plan"
    return arguments
