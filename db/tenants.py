"""Tenants: whose agents, sessions, files and keys are kept apart."""

from datetime import datetime
from uuid import UUID

from msgspec import Struct

from db.engine import Record, Transaction
from db.errors import Conflict, NotFound
from db.ids import public, to_uuid
from providers.ids import new_id

DEFAULT_NAME = "default"
_COLUMNS = "id, name, max_running_runs, max_queued_runs, created_at, archived_at"


class Tenant(Struct, frozen=True, kw_only=True):
    """`max_running_runs`: how many of its runs may be worked on at once; None: no bound of its own.

    `max_queued_runs`: how many may wait for a worker; None: as many as the settings say.
    """

    id: UUID
    name: str
    max_running_runs: int | None
    max_queued_runs: int | None
    created_at: datetime
    archived_at: datetime | None


async def create_tenant(
    tx: Transaction, *, name: str, max_running_runs: int | None = None, max_queued_runs: int | None = None
) -> Tenant:
    """Raises: Conflict, when the name is taken."""
    tenant = await _insert(tx, name, max_running_runs, max_queued_runs)
    if tenant is None:
        raise Conflict("tenant_exists", f"There is a tenant named {name!r} already; choose another name.")
    return tenant


async def ensure_default_tenant(tx: Transaction) -> UUID:
    """The tenant of the first keys, made when there is none."""
    tenant = await _insert(tx, DEFAULT_NAME)
    if tenant is not None:
        return tenant.id
    tenant_id: UUID = await tx.fetchval("SELECT id FROM tenants WHERE name = $1", DEFAULT_NAME)
    return tenant_id


async def get_tenant(tx: Transaction, tenant_id: UUID) -> Tenant:
    """Raises: NotFound."""
    row = await tx.fetchrow(f"SELECT {_COLUMNS} FROM tenants WHERE id = $1", tenant_id)
    return _found(row, tenant_id)


async def list_tenants(
    tx: Transaction,
    *,
    limit: int,
    before: tuple[datetime, UUID] | None = None,
    include_archived: bool = False,
) -> list[Tenant]:
    """Newest first."""
    at, tenant_id = before or (None, None)
    rows = await tx.fetch(
        f"""SELECT {_COLUMNS} FROM tenants
        WHERE ($1 OR archived_at IS NULL) AND ($2::timestamptz IS NULL OR (created_at, id) < ($2, $3::uuid))
        ORDER BY created_at DESC, id DESC LIMIT $4""",
        include_archived,
        at,
        tenant_id,
        limit,
    )
    return [_tenant(row) for row in rows]


async def bound_tenant(
    tx: Transaction, tenant_id: UUID, *, max_running_runs: int | None, max_queued_runs: int | None
) -> Tenant:
    """Sets both bounds, from the next claim and the next prompt on. Raises: NotFound."""
    row = await tx.fetchrow(
        f"""UPDATE tenants SET max_running_runs = $2, max_queued_runs = $3 WHERE id = $1
        RETURNING {_COLUMNS}""",
        tenant_id,
        max_running_runs,
        max_queued_runs,
    )
    return _found(row, tenant_id)


async def archive_tenant(tx: Transaction, tenant_id: UUID) -> Tenant:
    """Its keys open nothing from the commit on. Raises: NotFound."""
    row = await tx.fetchrow(
        f"""UPDATE tenants SET archived_at = coalesce(archived_at, clock_timestamp()) WHERE id = $1
        RETURNING {_COLUMNS}""",
        tenant_id,
    )
    return _found(row, tenant_id)


async def _insert(
    tx: Transaction, name: str, max_running_runs: int | None = None, max_queued_runs: int | None = None
) -> Tenant | None:
    row = await tx.fetchrow(
        f"""INSERT INTO tenants (id, name, max_running_runs, max_queued_runs) VALUES ($1, $2, $3, $4)
        ON CONFLICT (name) DO NOTHING RETURNING {_COLUMNS}""",
        to_uuid(new_id("ten")),
        name,
        max_running_runs,
        max_queued_runs,
    )
    return None if row is None else _tenant(row)


def _found(row: Record | None, tenant_id: UUID) -> Tenant:
    if row is None:
        raise NotFound("tenant", public("ten", tenant_id))
    return _tenant(row)


def _tenant(row: Record) -> Tenant:
    return Tenant(
        id=row["id"],
        name=row["name"],
        max_running_runs=row["max_running_runs"],
        max_queued_runs=row["max_queued_runs"],
        created_at=row["created_at"],
        archived_at=row["archived_at"],
    )
