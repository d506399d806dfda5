"""Brings a database to the newest schema. Safe to call from many processes at once."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from alembic import command
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, text
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncConnection, create_async_engine
from sqlalchemy.pool import NullPool

from db.engine import connect_arguments
from db.errors import DatabaseAway

MIGRATION_LOCK = 4_711_042  # any number; the same in all releases, so that two migrations never overlap


def alembic_config(connection: Connection) -> Config:
    """Alembic's settings, with the connection that `migrations/env.py` is to use."""
    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent.parent / "migrations"))
    config.attributes["connection"] = connection
    return config


async def upgrade(url: str, *, pooler: bool = False) -> None:
    """Runs all migrations that are missing, in one transaction, one process at a time.

    Raises: DatabaseAway, when the database cannot be reached.
    """
    async with _connected(url, pooler=pooler) as connection, connection.begin():
        await connection.execute(text(f"SELECT pg_advisory_xact_lock({MIGRATION_LOCK})"))
        await connection.run_sync(lambda sync: command.upgrade(alembic_config(sync), "head"))


async def find_versions(url: str, *, pooler: bool = False) -> tuple[str | None, str | None]:
    """The schema's revision in the database (None: none yet) and the newest one that this code knows.

    Raises: DatabaseAway, when the database cannot be reached.
    """
    async with _connected(url, pooler=pooler) as connection:
        return await connection.run_sync(_versions)


@asynccontextmanager
async def _connected(url: str, *, pooler: bool) -> AsyncIterator[AsyncConnection]:
    arguments = connect_arguments(pooler=pooler)
    if pooler:
        arguments["prepared_statement_cache_size"] = 0  # SQLAlchemy has a cache of its own
    engine = create_async_engine(sqlalchemy_url(url), poolclass=NullPool, connect_args=arguments)
    try:
        try:
            connection = await engine.connect()
        except (OSError, DBAPIError) as error:
            reason = getattr(error, "orig", error)
            raise DatabaseAway(f"The database cannot be reached: {reason}") from error
        try:
            yield connection
        finally:
            await connection.close()
    finally:
        await engine.dispose()


def sqlalchemy_url(url: str) -> URL:
    """A libpq URL with SQLAlchemy's driver name for asyncpg."""
    return make_url(url).set(drivername="postgresql+asyncpg")


def _versions(connection: Connection) -> tuple[str | None, str | None]:
    script = ScriptDirectory.from_config(alembic_config(connection))
    return MigrationContext.configure(connection).get_current_revision(), script.get_current_head()
