"""Files of a tenant: uploads, and what sessions deliver. Their bytes are in the database."""

import hashlib
from collections.abc import Sequence
from datetime import datetime
from uuid import UUID

from msgspec import Struct

from db.engine import Record, Transaction
from db.errors import NotFound
from db.ids import public, to_uuid
from providers.ids import new_id

_COLUMNS = "id, session_id, name, media_type, size_bytes, sha256, created_at"


class StoredFile(Struct, frozen=True, kw_only=True):
    """A file without its bytes. `session_id`: the session that it belongs to, None for an upload."""

    id: UUID
    session_id: UUID | None
    name: str
    media_type: str
    size_bytes: int
    sha256: bytes
    created_at: datetime


async def create_file(
    tx: Transaction, *, name: str, media_type: str, content: bytes, session_id: UUID | None = None
) -> UUID:
    """The id of a new file."""
    file_id = to_uuid(new_id("file"))
    await tx.execute(
        "INSERT INTO files (id, tenant_id, session_id, name, media_type, size_bytes, sha256, content)"
        " VALUES ($1, $2, $3, $4, $5, $6, $7, $8)",
        file_id,
        tx.tenant_id,
        session_id,
        name,
        media_type,
        len(content),
        hashlib.sha256(content).digest(),
        content,
    )
    return file_id


async def get_file(tx: Transaction, file_id: UUID) -> StoredFile:
    """Raises: NotFound."""
    row = await tx.fetchrow(
        f"SELECT {_COLUMNS} FROM files WHERE id = $1 AND tenant_id = $2", file_id, tx.tenant_id
    )
    if row is None:
        raise NotFound("file", public("file", file_id))
    return _file(row)


async def get_content(tx: Transaction, file_id: UUID) -> bytes:
    """Raises: NotFound."""
    content: bytes | None = await tx.fetchval(
        "SELECT content FROM files WHERE id = $1 AND tenant_id = $2", file_id, tx.tenant_id
    )
    if content is None:
        raise NotFound("file", public("file", file_id))
    return content


async def list_files(
    tx: Transaction,
    *,
    limit: int,
    before: tuple[datetime, UUID] | None = None,
    session_id: UUID | None = None,
    ids: Sequence[UUID] | None = None,
) -> list[StoredFile]:
    """Newest first; of one session when `session_id` is set, only those in `ids` when it is set."""
    moment, file_id = before or (None, None)
    rows = await tx.fetch(
        f"""SELECT {_COLUMNS} FROM files
        WHERE tenant_id = $1 AND ($2::uuid IS NULL OR session_id = $2)
          AND ($3::uuid[] IS NULL OR id = ANY($3))
          AND ($4::timestamptz IS NULL OR (created_at, id) < ($4, $5::uuid))
        ORDER BY created_at DESC, id DESC LIMIT $6""",
        tx.tenant_id,
        session_id,
        None if ids is None else list(ids),
        moment,
        file_id,
        limit,
    )
    return [_file(row) for row in rows]


async def delete_file(tx: Transaction, file_id: UUID) -> None:
    """Raises: NotFound."""
    deleted = await tx.fetchval(
        "DELETE FROM files WHERE id = $1 AND tenant_id = $2 RETURNING true", file_id, tx.tenant_id
    )
    if not deleted:
        raise NotFound("file", public("file", file_id))


def _file(row: Record) -> StoredFile:
    return StoredFile(**{name: row[name] for name in StoredFile.__struct_fields__})
