"""The pool and the one way to open a transaction.

SQLAlchemy owns the connections; statements go to asyncpg as they are, which costs a fifth of the time.
Every transaction says in its first round trip whose it is and how long it may wait, so that a stopped process
cannot hold a session and a query without a tenant sees nothing.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, cast
from uuid import UUID

import asyncpg
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import DBAPIError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

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

# asyncpg's classes for "the connection is gone", and what the operating system adds.
_AWAY = (
    asyncpg.PostgresConnectionError,
    asyncpg.InterfaceError,
    asyncpg.AdminShutdownError,
    asyncpg.CrashShutdownError,
    asyncpg.CannotConnectNowError,
    asyncpg.TooManyConnectionsError,
    asyncpg.IdleInTransactionSessionTimeoutError,
    ConnectionError,
    OSError,
    PoolTimeout,
    TimeoutError,
)
_BUSY = (asyncpg.LockNotAvailableError, asyncpg.DeadlockDetectedError, asyncpg.SerializationError)


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
        return cls(
            create_async_engine(
                sqlalchemy_url(url),
                isolation_level="AUTOCOMMIT",  # transactions are opened by `transaction`, in one round trip
                pool_size=pool_size,
                max_overflow=0,
                pool_timeout=LOCK_TIMEOUT_S,
                pool_use_lifo=True,
                json_deserializer=str,  # JSON columns are read as text: each query decodes into its own type
                connect_args=connect_arguments(pooler=pooler),
            )
        )

    @asynccontextmanager
    async def transaction(self, tenant_id: UUID | None = None) -> AsyncIterator[Transaction]:
        """A transaction that commits at the end of the block and rolls back on any exception.

        With a tenant, row-level security hides all other tenants' rows. Without one everything is visible:
        that is for the worker, for authentication and for administration.
        Raises: DatabaseBusy, DatabaseAway.
        """
        try:
            async with self._engine.connect() as pooled:
                raw = await pooled.get_raw_connection()
                connection = cast(Connection, raw.driver_connection)
                try:
                    await connection.execute(_begin(tenant_id))
                    yield Transaction(connection, tenant_id)
                    await connection.execute("COMMIT")
                except BaseException:
                    if not await _rolled_back(connection):
                        await asyncio.shield(pooled.invalidate())
                    raise
        except _BUSY as error:
            raise DatabaseBusy(f"The database was busy: {error}") from error
        except _AWAY as error:
            raise DatabaseAway(f"The database is away: {error}") from error
        except DBAPIError as error:
            raise DatabaseAway(f"The database is away: {error.orig}") from error

    async def ping(self) -> None:
        """One round trip. Raises: DatabaseAway."""
        async with self.transaction() as tx:
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


async def _rolled_back(connection: Connection) -> bool:
    """False when the connection's state is not known and it must not be used again."""
    if connection.is_closed():
        return False
    try:
        async with asyncio.timeout(ROLLBACK_TIMEOUT_S):
            await asyncio.shield(connection.execute("ROLLBACK"))
    except (*_AWAY, asyncpg.PostgresError, asyncio.CancelledError):
        return False
    return True


def sqlalchemy_url(url: str) -> URL:
    """A libpq URL with SQLAlchemy's driver name for asyncpg."""
    return make_url(url).set(drivername="postgresql+asyncpg")


def connect_arguments(*, pooler: bool) -> dict[str, Any]:
    """Arguments for asyncpg. Behind a transaction-mode pooler statements cannot stay prepared."""
    arguments: dict[str, Any] = {"timeout": 5, "server_settings": {"application_name": "armillary"}}
    if pooler:
        arguments |= {"statement_cache_size": 0, "prepared_statement_cache_size": 0}
    return arguments
