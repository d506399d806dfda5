"""API keys and session tokens. Only their SHA-256 is stored; the text exists once, in the answer."""

import hashlib
import secrets
from collections.abc import Collection, Sequence
from datetime import datetime
from typing import Literal, cast
from uuid import UUID

from msgspec import Struct

from db.engine import Record, Transaction
from db.errors import NotFound
from db.ids import public, to_uuid
from providers.ids import new_id

Scope = Literal["admin", "write", "read"]

KEY_PREFIX = "arm_"
SESSION_TOKEN_PREFIX = "armt_"
_SECRET_BYTES = 32
_COLUMNS = (
    "id, tenant_id, name, hint, scopes, session_id, max_running_runs, created_at, expires_at, revoked_at"
)


class ApiKey(Struct, frozen=True, kw_only=True):
    """A key without its text. `hint` is its beginning, to tell keys apart.

    `max_running_runs`: how many runs that it asked for may be worked on at once; None: no bound of its own.
    """

    id: UUID
    tenant_id: UUID
    name: str
    hint: str
    scopes: tuple[Scope, ...]
    session_id: UUID | None
    max_running_runs: int | None
    created_at: datetime
    expires_at: datetime | None
    revoked_at: datetime | None


async def create_key(
    tx: Transaction,
    *,
    tenant_id: UUID,
    name: str,
    scopes: Sequence[str],
    session_id: UUID | None = None,
    max_running_runs: int | None = None,
    expires_at: datetime | None = None,
) -> tuple[ApiKey, str]:
    """The key and its text, which is nowhere else: not stored, not to be logged.

    With `session_id` it is a token that opens this session only.
    Raises: NotFound, when there is no such tenant.
    """
    secret = (KEY_PREFIX if session_id is None else SESSION_TOKEN_PREFIX) + secrets.token_urlsafe(
        _SECRET_BYTES
    )
    row = await tx.fetchrow(
        f"""INSERT INTO api_keys
            (id, tenant_id, name, sha256, hint, scopes, session_id, max_running_runs, expires_at)
        SELECT $1, tenants.id, $3, $4, $5, $6, $7, $8, $9 FROM tenants WHERE tenants.id = $2
        RETURNING {_COLUMNS}""",
        to_uuid(new_id("key")),
        tenant_id,
        name,
        hashlib.sha256(secret.encode()).digest(),
        secret[:12],
        list(scopes),
        session_id,
        max_running_runs,
        expires_at,
    )
    if row is None:
        raise NotFound("tenant", public("ten", tenant_id))
    return _key(row), secret


async def find_key(tx: Transaction, secret: str) -> ApiKey | None:
    """The key with this text, unless it or its tenant is out of use at this moment."""
    return (await find_keys(tx, [secret])).get(secret)


async def find_keys(tx: Transaction, plaintexts: Collection[str]) -> dict[str, ApiKey]:
    """Keys by their texts; those that are out of use, or whose tenant is, are missing."""
    texts = {hashlib.sha256(text.encode()).digest(): text for text in plaintexts}
    rows = await tx.fetch(
        f"""SELECT k.sha256, {_columns_of("k")} FROM api_keys k JOIN tenants t ON t.id = k.tenant_id
        WHERE k.sha256 = ANY($1) AND k.revoked_at IS NULL AND t.archived_at IS NULL
          AND (k.expires_at IS NULL OR k.expires_at > clock_timestamp())""",
        list(texts),
    )
    return {texts[row["sha256"]]: _key(row) for row in rows}


async def get_key(tx: Transaction, key_id: UUID) -> ApiKey:
    """Raises: NotFound."""
    row = await tx.fetchrow(f"SELECT {_COLUMNS} FROM api_keys WHERE id = $1", key_id)
    return _found(row, key_id)


async def list_keys(
    tx: Transaction,
    *,
    limit: int,
    before: tuple[datetime, UUID] | None = None,
    tenant_id: UUID | None = None,
) -> list[ApiKey]:
    """Newest first, without session tokens; of one tenant or of all."""
    at, key_id = before or (None, None)
    rows = await tx.fetch(
        f"""SELECT {_COLUMNS} FROM api_keys
        WHERE session_id IS NULL AND ($1::uuid IS NULL OR tenant_id = $1)
          AND ($2::timestamptz IS NULL OR (created_at, id) < ($2, $3::uuid))
        ORDER BY created_at DESC, id DESC LIMIT $4""",
        tenant_id,
        at,
        key_id,
        limit,
    )
    return [_key(row) for row in rows]


async def bound_key(tx: Transaction, key_id: UUID, *, max_running_runs: int | None) -> ApiKey:
    """Sets how many of its runs may be worked on at once, from the next claim on. Raises: NotFound."""
    row = await tx.fetchrow(
        f"UPDATE api_keys SET max_running_runs = $2 WHERE id = $1 RETURNING {_COLUMNS}",
        key_id,
        max_running_runs,
    )
    return _found(row, key_id)


async def revoke_key(tx: Transaction, key_id: UUID) -> ApiKey:
    """Out of use from the commit on; revoking again changes nothing. Raises: NotFound."""
    row = await tx.fetchrow(
        f"""UPDATE api_keys SET revoked_at = coalesce(revoked_at, clock_timestamp()) WHERE id = $1
        RETURNING {_COLUMNS}""",
        key_id,
    )
    return _found(row, key_id)


def _found(row: Record | None, key_id: UUID) -> ApiKey:
    if row is None:
        raise NotFound("key", public("key", key_id))
    return _key(row)


def _columns_of(alias: str) -> str:
    return ", ".join(f"{alias}.{column}" for column in _COLUMNS.split(", "))


def _key(row: Record) -> ApiKey:
    return ApiKey(
        id=row["id"],
        tenant_id=row["tenant_id"],
        name=row["name"],
        hint=row["hint"],
        scopes=cast("tuple[Scope, ...]", tuple(row["scopes"])),
        session_id=row["session_id"],
        max_running_runs=row["max_running_runs"],
        created_at=row["created_at"],
        expires_at=row["expires_at"],
        revoked_at=row["revoked_at"],
    )
