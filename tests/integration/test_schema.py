"""The schema: what migrations build, and what the tenant role may see of it."""

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit, urlunsplit
from uuid import UUID, uuid4

import asyncpg
import pytest
import sqlalchemy as sa
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy.dialects.postgresql import ARRAY, BYTEA, JSONB
from sqlalchemy.ext.asyncio import create_async_engine

from db.engine import Database
from db.migrate import find_versions, sqlalchemy_url, upgrade
from db.tables import TENANT_TABLES, metadata

ROOT = Path(__file__).parents[2]
STATES = {"runs": "queued", "prompts": "pending", "tool_calls": "open", "usage_entries": "open"}
VALUES: dict[type, Any] = {
    sa.Uuid: uuid4,
    sa.Text: lambda: str(uuid4()),
    sa.Integer: lambda: 1,
    sa.BigInteger: lambda: 1,
    sa.Boolean: lambda: True,
    sa.Numeric: lambda: 1,
    sa.DateTime: lambda: datetime.now(UTC),
    sa.JSON: lambda: "{}",
    JSONB: lambda: "{}",
    BYTEA: lambda: uuid4().bytes,
    ARRAY: lambda: ["read"],
}
TENANT_SCOPED = tuple(name for name in TENANT_TABLES if name != "tenants")


@contextlib.asynccontextmanager
async def empty_database(url: str) -> AsyncIterator[str]:
    """A database without any table."""
    name = f"empty_{uuid4().hex}"
    admin = await asyncpg.connect(urlunsplit(urlsplit(url)._replace(path="/postgres")))
    try:
        await admin.execute(f"CREATE DATABASE {name}")
        yield urlunsplit(urlsplit(url)._replace(path=f"/{name}"))
        await admin.execute(f"DROP DATABASE {name}")
    finally:
        await admin.close()


@pytest.fixture
async def database(database_url: str) -> AsyncIterator[Database]:
    database = Database.open(database_url, pool_size=2)
    yield database
    await database.close()


def differences(connection: sa.Connection) -> list[Any]:
    context = MigrationContext.configure(
        connection, opts={"compare_type": True, "compare_server_default": True}
    )
    return list(compare_metadata(context, metadata))


async def test_migrations_from_empty_build_exactly_the_tables_of_the_code(database_url: str) -> None:
    async with empty_database(database_url) as url:
        await upgrade(url)
        engine = create_async_engine(sqlalchemy_url(url))
        async with engine.connect() as connection:
            assert await connection.run_sync(differences) == []
        await engine.dispose()


async def test_comparison_notices_a_default_that_differs(database_url: str) -> None:
    async with empty_database(database_url) as url:
        await upgrade(url)
        connection = await asyncpg.connect(url)
        await connection.execute("ALTER TABLE sessions ALTER COLUMN epoch SET DEFAULT 1")
        await connection.close()
        engine = create_async_engine(sqlalchemy_url(url))
        async with engine.connect() as changed:
            found = await changed.run_sync(differences)
        await engine.dispose()
        assert "modify_default" in str(found)


async def test_upgrading_again_and_by_four_processes_at_once_changes_nothing(database_url: str) -> None:
    code = "import asyncio, sys; from db.migrate import upgrade; asyncio.run(upgrade(sys.argv[1]))"
    async with empty_database(database_url) as url:
        processes = [
            await asyncio.create_subprocess_exec(
                sys.executable, "-c", code, url, cwd=ROOT, stderr=asyncio.subprocess.PIPE
            )
            for _ in range(4)
        ]
        outputs = await asyncio.gather(*(process.communicate() for process in processes))
        assert [process.returncode for process in processes] == [0] * 4, outputs
        await upgrade(url)
        current, newest = await find_versions(url)
        assert current == newest is not None


async def test_all_tenant_tables_have_row_level_security(database: Database) -> None:
    async with database.transaction() as tx:
        rows = await tx.fetch(
            """
            SELECT c.relname, c.relrowsecurity, count(p.polname) AS policies
            FROM pg_class c LEFT JOIN pg_policy p ON p.polrelid = c.oid
            WHERE c.relkind = 'r' AND c.relnamespace = 'public'::regnamespace GROUP BY 1, 2
            """
        )
    secured = {row["relname"] for row in rows if row["relrowsecurity"] and row["policies"] == 1}
    assert secured == set(TENANT_TABLES)
    assert {row["relname"] for row in rows} - secured == {"workers", "alembic_version"}


async def test_large_bodies_are_stored_uncompressed(database: Database) -> None:
    async with database.transaction() as tx:
        rows = await tx.fetch(
            """
            SELECT attrelid::regclass::text AS name, attname FROM pg_attribute
            WHERE attstorage = 'e' AND attnum > 0 AND attrelid IN ('events'::regclass, 'files'::regclass)
            """
        )
    assert {(row["name"], row["attname"]) for row in rows} == {("events", "body"), ("files", "content")}


async def fill(database: Database) -> dict[str, dict[str, Any]]:
    """A row in every table of one new tenant: its values by table."""
    rows: dict[str, dict[str, Any]] = {}
    async with database.transaction() as tx:
        for table in metadata.sorted_tables:
            if table.name in TENANT_TABLES:
                rows[table.name] = row_of(table, rows)
                await tx.execute(*insert(table.name, rows[table.name]))
    return rows


def row_of(table: sa.Table, rows: dict[str, dict[str, Any]]) -> dict[str, Any]:
    row: dict[str, Any] = {}
    for column in table.columns:
        keys = [key.target_fullname.split(".") for key in column.foreign_keys]
        if column.name == "state":
            row["state"] = STATES[table.name]
        elif keys and not column.nullable:
            name, key = next((key for key in keys if key[0] != "agent_versions"), keys[0])
            row[column.name] = rows[name][key]
        elif not column.nullable and column.server_default is None:
            row[column.name] = VALUES[type(column.type)]()
    return row


def insert(table: str, row: dict[str, Any]) -> tuple[Any, ...]:
    columns = ", ".join(f'"{name}"' for name in row)
    places = ", ".join(f"${number}" for number in range(1, len(row) + 1))
    return f"INSERT INTO {table} ({columns}) VALUES ({places})", *row.values()


def primary_key(table: str, row: dict[str, Any]) -> tuple[str, list[Any]]:
    names = [column.name for column in metadata.tables[table].primary_key]
    condition = " AND ".join(f"{name} = ${number}" for number, name in enumerate(names, start=1))
    return condition, [row[name] for name in names]


@pytest.mark.parametrize("table", TENANT_TABLES)
async def test_tenant_role_sees_only_its_tenant(database: Database, table: str) -> None:
    mine, theirs = await fill(database), await fill(database)
    async with database.transaction(mine["tenants"]["id"]) as tx:
        assert await tx.fetchval(f"SELECT count(*) FROM {table}") == 1
        for rows, seen in ((mine, 1), (theirs, 0)):
            condition, values = primary_key(table, rows[table])
            assert await tx.fetchval(f"SELECT count(*) FROM {table} WHERE {condition}", *values) == seen
    async with database.transaction() as tx:
        assert await tx.fetchval(f"SELECT count(*) FROM {table}") == 2


@pytest.mark.parametrize("table", TENANT_SCOPED)
async def test_tenant_role_cannot_write_rows_of_another(database: Database, table: str) -> None:
    mine, theirs = await fill(database), await fill(database)
    tenant_id: UUID = mine["tenants"]["id"]
    condition, values = primary_key(table, theirs[table])
    column = next(column.name for column in metadata.tables[table].columns if column.name != "tenant_id")

    async with database.transaction(tenant_id) as tx:
        changed = await tx.execute(f"UPDATE {table} SET {column} = {column} WHERE {condition}", *values)
        deleted = await tx.execute(f"DELETE FROM {table} WHERE {condition}", *values)
    assert (changed, deleted) == ("UPDATE 0", "DELETE 0")

    other = row_of(metadata.tables[table], theirs)
    with pytest.raises(asyncpg.InsufficientPrivilegeError, match="row-level security"):
        async with database.transaction(tenant_id) as tx:
            await tx.execute(*insert(table, other))
    with pytest.raises(asyncpg.InsufficientPrivilegeError, match="row-level security"):
        async with database.transaction(tenant_id) as tx:
            await tx.execute(f"UPDATE {table} SET tenant_id = $1", theirs["tenants"]["id"])


@pytest.mark.parametrize("change", ["INSERT INTO tenants (id, name) VALUES (gen_random_uuid(), 'x')",
                                    "UPDATE tenants SET name = 'x'", "DELETE FROM tenants"])  # fmt: skip
async def test_tenant_role_cannot_change_tenants(database: Database, change: str) -> None:
    mine = await fill(database)
    with pytest.raises(asyncpg.InsufficientPrivilegeError):
        async with database.transaction(mine["tenants"]["id"]) as tx:
            await tx.execute(change)


@pytest.mark.parametrize("table", ["workers", "alembic_version"])
async def test_tables_without_a_tenant_are_closed_to_the_tenant_role(database: Database, table: str) -> None:
    for access in (f"SELECT FROM {table}", f"DELETE FROM {table}"):
        with pytest.raises(asyncpg.InsufficientPrivilegeError):
            async with database.transaction(uuid4()) as tx:
                await tx.execute(access)


@pytest.mark.parametrize("table", TENANT_TABLES)
async def test_tenant_role_without_a_tenant_sees_nothing(database: Database, table: str) -> None:
    await fill(database)
    async with database.transaction() as tx:
        await tx.execute("SET LOCAL ROLE armillary_tenant")
        assert await tx.fetchval(f"SELECT count(*) FROM {table}") == 0


async def test_neither_role_nor_tenant_outlives_its_transaction(database_url: str) -> None:
    database = Database.open(database_url, pool_size=1)
    mine = await fill(database)
    await fill(database)
    async with database.transaction(mine["tenants"]["id"]) as tx:
        assert await tx.fetchval("SELECT count(*) FROM tenants") == 1
    async with database.transaction() as tx:
        assert await tx.fetchval("SELECT count(*) FROM tenants") == 2
        assert await tx.fetchval("SELECT coalesce(current_setting('armillary.tenant_id', true), '')") == ""
    await database.close()
