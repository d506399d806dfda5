"""The pool and the one way to open a transaction.

SQLAlchemy owns the connections; statements go to asyncpg as they are, which costs a fifth of the time.
Every transaction says in its first round trip whose it is and how long it may wait, so that a stopped process
cannot hold a session and a query without a tenant sees nothing.
"""

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, cast
from uuid import UUID

import asyncpg
from sqlalchemy import event
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import DBAPIError, DisconnectionError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine

from db.errors import DatabaseAway, DatabaseBusy
from db.tables import TENANT_ROLE

Record = asyncpg.Record
if TYPE_CHECKING:
    Connection = asyncpg.Connection[Record]  # generic in its type stubs only
else:
    Connection = asyncpg.Connection

LOCK_TIMEOUT_S = 5
IDLE_IN_TRANSACTION_TIMEOUT_S = 2
ROLLBACK_TIMEOUT_S = 2.0

_BEGIN = (
    f"BEGIN; SET LOCAL lock_timeout = '{LOCK_TIMEOUT_S}s';"
    f" SET LOCAL idle_in_transaction_session_timeout = '{IDLE_IN_TRANSACTION_TIMEOUT_S}s'"
)

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
    PoolTimeout,
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

    async def fetch(self, statement: str, *values: Any) -> list[Record]:
        return await self._connection.fetch(statement, *values)

    async def fetchrow(self, statement: str, *values: Any) -> Record | None:
        return await self._connection.fetchrow(statement, *values)

    async def fetchval(self, statement: str, *values: Any) -> Any:
        return await self._connection.fetchval(statement, *values)

    async def execute(self, statement: str, *values: Any) -> str:
        return await self._connection.execute(statement, *values)


class Database:
    """A pool of connections to one Postgres database."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine

    @classmethod
    def open(cls, url: str, *, pooler: bool = False, pool_size: int = 8) -> "Database":
        """A pool that connects when first used.

        `url` is a libpq URL, such as `postgresql://user@host/name` or `postgresql://user@/name?host=/socket/dir`.
        `pooler`: a transaction-mode pooler stands in between, so nothing may be prepared on a connection.
        """
        engine = create_async_engine(
            sqlalchemy_url(url),
            isolation_level="AUTOCOMMIT",  # transactions are opened by `transaction`, in one round trip
            pool_size=pool_size,
            max_overflow=0,
            pool_timeout=LOCK_TIMEOUT_S,
            pool_use_lifo=True,
            json_deserializer=str,  # JSON columns are read as text: each query decodes into its own type
            connect_args=connect_arguments(pooler=pooler),
        )
        event.listen(engine.sync_engine, "checkout", _refuse_closed)
        return cls(engine)

    @asynccontextmanager
    async def transaction(self, tenant_id: UUID | None = None) -> AsyncIterator[Transaction]:
        """A transaction that commits at the end of the block and rolls back on any exception.

        With a tenant, row-level security hides all other tenants' rows. Without one everything is visible:
        that is for the worker, for authentication and for administration.
        Raises: DatabaseBusy, DatabaseAway.
        """
        async with self._connection() as (pooled, connection):
            try:
                await connection.execute(_begin(tenant_id))
                yield Transaction(connection, tenant_id)
                await connection.execute("COMMIT")
            except BaseException:
                await _to_the_end(_release(pooled, connection))
                raise

    @asynccontextmanager
    async def statements(self) -> AsyncIterator[Transaction]:
        """For reads without a tenant that need no common moment: each statement stands for itself.

        Saves the two round trips of a transaction. Not for anything that locks or writes.
        Raises: DatabaseBusy, DatabaseAway.
        """
        async with self._connection() as (pooled, connection):
            try:
                yield Transaction(connection, None)
            except BaseException:
                await _to_the_end(_release(pooled, connection))
                raise

    @asynccontextmanager
    async def _connection(self) -> AsyncIterator[tuple[AsyncConnection, Connection]]:
        try:
            async with self._engine.connect() as pooled:
                raw = await pooled.get_raw_connection()
                yield pooled, cast(Connection, raw.driver_connection)
        except _BUSY as error:
            raise DatabaseBusy(f"The database was busy: {error}") from error
        except _AWAY as error:
            raise DatabaseAway(f"The database is away: {error}") from error
        except DBAPIError as error:
            raise DatabaseAway(f"The database is away: {error.orig}") from error

    async def ping(self) -> None:
        """One round trip. Raises: DatabaseAway."""
        async with self.statements() as tx:
            await tx.fetchval("SELECT 1")

    @property
    def checked_out(self) -> int:
        """How many connections are in use at this moment."""
        return cast("Any", self._engine.pool).checkedout()  # type: ignore[no-any-return]

    async def close(self) -> None:
        """Closes all connections. Safe to call twice."""
        await self._engine.dispose()


def _begin(tenant_id: UUID | None) -> str:
    if tenant_id is None:
        return _BEGIN
    return f"{_BEGIN}; SET LOCAL ROLE {TENANT_ROLE}; SET LOCAL armillary.tenant_id = '{tenant_id}'"


def _refuse_closed(connection: Any, *_: Any) -> None:
    """Has the pool connect again in place of a connection that the server has closed meanwhile."""
    if connection.driver_connection.is_closed():
        raise DisconnectionError


async def _release(pooled: AsyncConnection, connection: Connection) -> None:
    """Leaves no transaction open: rolls back, or closes a connection whose state is not known."""
    if connection.is_closed():
        await pooled.invalidate()
        return
    try:
        async with asyncio.timeout(ROLLBACK_TIMEOUT_S):
            await connection.execute("ROLLBACK")
    except (*_AWAY, asyncpg.PostgresError):
        connection.terminate()  # a polite close would wait for the server once more
        await pooled.invalidate()


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


def sqlalchemy_url(url: str) -> URL:
    """A libpq URL with SQLAlchemy's driver name for asyncpg."""
    return make_url(url).set(drivername="postgresql+asyncpg")


def connect_arguments(*, pooler: bool) -> dict[str, Any]:
    """Arguments for asyncpg. Behind a transaction-mode pooler statements cannot stay prepared."""
    arguments: dict[str, Any] = {"timeout": 5, "server_settings": {"application_name": "armillary"}}
    if pooler:
        arguments |= {"statement_cache_size": 0, "prepared_statement_cache_size": 0}
    return arguments
