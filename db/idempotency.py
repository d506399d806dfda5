"""Which requests were answered, so that the same request again has the same effect as once."""

from typing import Any
from uuid import UUID

import msgspec
from msgspec import Struct

from db.engine import Transaction


class Earlier(Struct, frozen=True, kw_only=True):
    """A request that committed before: its hash and what it made."""

    request_sha256: bytes
    resources: dict[str, Any]


async def begin(
    tx: Transaction, *, tenant_id: UUID, key_sha256: bytes, request_sha256: bytes, status: int, hours: int
) -> Earlier | None:
    """Takes the key, or returns what the request that has it made.

    A double that runs at the same time waits here until the first commits (then it gets its resources) or
    rolls back (then it takes the key). A key older than `hours` is free again.
    """
    taken = await tx.fetchval(
        """INSERT INTO idempotency_keys AS k (tenant_id, key_sha256, request_sha256, resources, status)
        VALUES ($1, $2, $3, '{}', $4)
        ON CONFLICT (tenant_id, key_sha256) DO UPDATE
          SET request_sha256 = excluded.request_sha256, resources = '{}', status = excluded.status,
              created_at = clock_timestamp()
          WHERE k.created_at < clock_timestamp() - make_interval(hours => $5)
        RETURNING true""",
        tenant_id,
        key_sha256,
        request_sha256,
        status,
        hours,
    )
    if taken:
        return None
    row = await tx.fetchrow(
        "SELECT request_sha256, resources FROM idempotency_keys WHERE tenant_id = $1 AND key_sha256 = $2",
        tenant_id,
        key_sha256,
    )
    assert row is not None  # the conflict has locked it
    return Earlier(request_sha256=row["request_sha256"], resources=msgspec.json.decode(row["resources"]))


async def finish(tx: Transaction, *, tenant_id: UUID, key_sha256: bytes, resources: dict[str, Any]) -> None:
    """Stores what the request of `begin` made; ids only, never a secret."""
    await tx.execute(
        "UPDATE idempotency_keys SET resources = $3 WHERE tenant_id = $1 AND key_sha256 = $2",
        tenant_id,
        key_sha256,
        msgspec.json.encode(resources).decode(),
    )


async def delete_expired(tx: Transaction, *, hours: int) -> None:
    """Forgets keys older than `hours`."""
    await tx.execute(
        "DELETE FROM idempotency_keys WHERE created_at < clock_timestamp() - make_interval(hours => $1)",
        hours,
    )
