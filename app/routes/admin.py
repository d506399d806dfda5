"""`/v1/admin`: tenants and keys. The scope `admin` is for the operator and reaches all tenants."""

from datetime import UTC, datetime
from typing import Annotated, Literal

from litestar import get, post
from litestar.di import NamedDependency
from litestar.params import FromPath, JSONBody, QueryParameter
from msgspec import UNSET, Meta, Struct, UnsetType

from agents.config import Name
from app.auth import Principal, scope
from app.errors import InvalidField
from app.http_json import ApiRequest
from app.idempotency import once
from app.pagination import IncludeArchived, Page, PageQuery, make_page
from app.resources import Resources
from db import keys, tenants
from db.ids import parse_id, public, public_or_none
from db.keys import ApiKey, Scope
from db.tenants import Tenant
from providers.types import JsonObject

ADMIN = scope("admin")
Scopes = Annotated[list[Scope], Meta(min_length=1, max_length=3)]
RunBound = Annotated[int, Meta(ge=1, le=100_000, description="Runs that are worked on at once at most.")]
QueueBound = Annotated[
    int,
    Meta(ge=1, le=10_000_000, description="Runs that wait for a worker at most; null: see the settings."),
]
TenantFilter = Annotated[
    str | None, QueryParameter(name="tenant_id", description="Only keys of this tenant; default: all.")
]


class TenantCreate(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: Name
    max_running_runs: RunBound | None = None
    max_queued_runs: QueueBound | None = None


class TenantUpdate(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What changes; null removes the tenant's own bound."""

    max_running_runs: RunBound | UnsetType | None = UNSET
    max_queued_runs: QueueBound | UnsetType | None = UNSET


class TenantView(Struct, frozen=True, kw_only=True):
    """Whose agents, sessions, files and keys are kept apart from all others."""

    id: str
    type: Literal["tenant"] = "tenant"
    name: str
    max_running_runs: int | None
    max_queued_runs: int | None
    created_at: datetime
    archived_at: datetime | None


class KeyCreate(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A new key. `write` includes `read`, `admin` includes both. Without `tenant_id` it is of your tenant."""

    name: Name
    tenant_id: str | None = None
    scopes: Scopes
    max_running_runs: RunBound | None = None
    expires_at: datetime | None = None


class KeyUpdate(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What changes; null removes the bound."""

    max_running_runs: RunBound | None


class KeyView(Struct, frozen=True, kw_only=True):
    """A key without its text. `hint` is its beginning."""

    id: str
    type: Literal["api_key"] = "api_key"
    tenant_id: str
    name: str
    hint: str
    scopes: tuple[Scope, ...]
    session_id: str | None
    max_running_runs: int | None
    created_at: datetime
    expires_at: datetime | None
    revoked_at: datetime | None


class NewKeyView(KeyView, frozen=True, kw_only=True):
    """A key with its text, which is shown once: a repeated request gets null."""

    key: str | None


@post("/v1/admin/tenants", tags=["Administration"], opt=ADMIN)
async def create_tenant(
    request: ApiRequest, data: JSONBody[TenantCreate], resources: NamedDependency[Resources]
) -> TenantView:
    """Makes a tenant."""
    async with resources.database.transaction() as tx:

        async def make() -> JsonObject:
            tenant = await tenants.create_tenant(
                tx,
                name=data.name,
                max_running_runs=data.max_running_runs,
                max_queued_runs=data.max_queued_runs,
            )
            return {"tenant_id": public("ten", tenant.id)}

        made = await once(tx, request, make)
        return _view_tenant(await tenants.get_tenant(tx, parse_id("ten", made["tenant_id"])))


@get("/v1/admin/tenants", tags=["Administration"], opt=ADMIN)
async def list_tenants(
    resources: NamedDependency[Resources],
    page_query: NamedDependency[PageQuery],
    include_archived: IncludeArchived = False,
) -> Page[TenantView]:
    """Lists tenants, newest first."""
    async with resources.database.transaction() as tx:
        found = await tenants.list_tenants(
            tx, limit=page_query.fetch, before=page_query.before, include_archived=include_archived
        )
    return make_page(found, page_query, _view_tenant, lambda tenant: (tenant.created_at, tenant.id))


@get("/v1/admin/tenants/{tenant_id:str}", tags=["Administration"], opt=ADMIN)
async def get_tenant(tenant_id: FromPath[str], resources: NamedDependency[Resources]) -> TenantView:
    """Reads a tenant."""
    async with resources.database.transaction() as tx:
        return _view_tenant(await tenants.get_tenant(tx, parse_id("ten", tenant_id)))


@post("/v1/admin/tenants/{tenant_id:str}", tags=["Administration"], opt=ADMIN, status_code=200)
async def update_tenant(
    request: ApiRequest,
    tenant_id: FromPath[str],
    data: JSONBody[TenantUpdate],
    resources: NamedDependency[Resources],
) -> TenantView:
    """Changes the bounds of a tenant. What is worked on or waits already goes on."""
    uuid = parse_id("ten", tenant_id)
    async with resources.database.transaction() as tx:

        async def make() -> JsonObject:
            old = await tenants.get_tenant(tx, uuid)
            running, queued = data.max_running_runs, data.max_queued_runs
            await tenants.bound_tenant(
                tx,
                uuid,
                max_running_runs=old.max_running_runs if running is UNSET else running,
                max_queued_runs=old.max_queued_runs if queued is UNSET else queued,
            )
            return {"tenant_id": tenant_id}

        await once(tx, request, make)
        return _view_tenant(await tenants.get_tenant(tx, uuid))


@post("/v1/admin/tenants/{tenant_id:str}/archive", tags=["Administration"], opt=ADMIN, status_code=200)
async def archive_tenant(
    request: ApiRequest, tenant_id: FromPath[str], resources: NamedDependency[Resources]
) -> TenantView:
    """Takes all keys of a tenant out of use. Its data stay."""
    uuid = parse_id("ten", tenant_id)
    async with resources.database.transaction() as tx:

        async def make() -> JsonObject:
            await tenants.archive_tenant(tx, uuid)
            return {"tenant_id": tenant_id}

        await once(tx, request, make)
        return _view_tenant(await tenants.get_tenant(tx, uuid))


@post("/v1/admin/keys", tags=["Administration"], opt=ADMIN)
async def create_key(
    request: ApiRequest,
    data: JSONBody[KeyCreate],
    principal: NamedDependency[Principal],
    resources: NamedDependency[Resources],
) -> NewKeyView:
    """Makes a key. Its text is in this answer and nowhere else."""
    tenant_id = principal.tenant_id if data.tenant_id is None else parse_id("ten", data.tenant_id)
    shown: str | None = None
    async with resources.database.transaction() as tx:

        async def make() -> JsonObject:
            nonlocal shown
            key, shown = await keys.create_key(
                tx,
                tenant_id=tenant_id,
                name=data.name,
                scopes=sorted(set(data.scopes)),
                max_running_runs=data.max_running_runs,
                expires_at=_future(data.expires_at),
            )
            return {"key_id": public("key", key.id)}

        made = await once(tx, request, make)
        key = await keys.get_key(tx, parse_id("key", made["key_id"]))
    return NewKeyView(**_key_fields(key), key=shown)


@get("/v1/admin/keys", tags=["Administration"], opt=ADMIN)
async def list_keys(
    resources: NamedDependency[Resources],
    page_query: NamedDependency[PageQuery],
    tenant_id: TenantFilter = None,
) -> Page[KeyView]:
    """Lists keys, newest first, revoked ones too."""
    async with resources.database.transaction() as tx:
        found = await keys.list_keys(
            tx,
            limit=page_query.fetch,
            before=page_query.before,
            tenant_id=None if tenant_id is None else parse_id("ten", tenant_id),
        )
    return make_page(found, page_query, _view_key, lambda key: (key.created_at, key.id))


@get("/v1/admin/keys/{key_id:str}", tags=["Administration"], opt=ADMIN)
async def get_key(key_id: FromPath[str], resources: NamedDependency[Resources]) -> KeyView:
    """Reads a key, without its text."""
    async with resources.database.transaction() as tx:
        return _view_key(await keys.get_key(tx, parse_id("key", key_id)))


@post("/v1/admin/keys/{key_id:str}", tags=["Administration"], opt=ADMIN, status_code=200)
async def update_key(
    request: ApiRequest,
    key_id: FromPath[str],
    data: JSONBody[KeyUpdate],
    resources: NamedDependency[Resources],
) -> KeyView:
    """Changes how many runs of a key are worked on at once."""
    uuid = parse_id("key", key_id)
    async with resources.database.transaction() as tx:

        async def make() -> JsonObject:
            await keys.bound_key(tx, uuid, max_running_runs=data.max_running_runs)
            return {"key_id": key_id}

        await once(tx, request, make)
        return _view_key(await keys.get_key(tx, uuid))


@post("/v1/admin/keys/{key_id:str}/revoke", tags=["Administration"], opt=ADMIN, status_code=200)
async def revoke_key(
    request: ApiRequest, key_id: FromPath[str], resources: NamedDependency[Resources]
) -> KeyView:
    """Takes a key out of use at once."""
    uuid = parse_id("key", key_id)
    async with resources.database.transaction() as tx:

        async def make() -> JsonObject:
            await keys.revoke_key(tx, uuid)
            return {"key_id": key_id}

        await once(tx, request, make)
        return _view_key(await keys.get_key(tx, uuid))


ROUTES = [
    create_tenant,
    list_tenants,
    get_tenant,
    update_tenant,
    archive_tenant,
    create_key,
    list_keys,
    get_key,
    update_key,
    revoke_key,
]


def _future(moment: datetime | None) -> datetime | None:
    """Raises: InvalidField, for a time that is over or has no offset."""
    if moment is None:
        return None
    message = "expires_at: must be a future time with an offset, such as `2030-01-01T00:00:00Z`."
    if moment.tzinfo is None or moment <= datetime.now(UTC):
        raise InvalidField(message, field="expires_at")
    try:
        return moment.astimezone(UTC)
    except OverflowError as error:  # the year 10000 of UTC
        raise InvalidField(message, field="expires_at") from error


def _view_tenant(tenant: Tenant) -> TenantView:
    return TenantView(
        id=public("ten", tenant.id),
        name=tenant.name,
        max_running_runs=tenant.max_running_runs,
        max_queued_runs=tenant.max_queued_runs,
        created_at=tenant.created_at,
        archived_at=tenant.archived_at,
    )


def _view_key(key: ApiKey) -> KeyView:
    return KeyView(**_key_fields(key))


def _key_fields(key: ApiKey) -> JsonObject:
    return {
        "id": public("key", key.id),
        "tenant_id": public("ten", key.tenant_id),
        "name": key.name,
        "hint": key.hint,
        "scopes": key.scopes,
        "session_id": public_or_none("sess", key.session_id),
        "max_running_runs": key.max_running_runs,
        "created_at": key.created_at,
        "expires_at": key.expires_at,
        "revoked_at": key.revoked_at,
    }
