"""Public ids at the edge of the database: `sess_<hex>` outside, UUID inside."""

from uuid import UUID

from db.errors import NotFound
from providers.ids import Prefix, is_id

_NOUNS: dict[Prefix, str] = {
    "agent": "agent",
    "sess": "session",
    "run": "run",
    "evt": "event",
    "msg": "message",
    "file": "file",
    "key": "key",
    "ten": "tenant",
    "work": "worker",
    "mem": "memory",
    "batch": "batch",
}


def to_uuid(public_id: str) -> UUID:
    """The UUID of an id that this server made."""
    return UUID(hex=public_id[-32:])


def parse_id(prefix: Prefix, text: str) -> UUID:
    """The UUID of an id that a client sent. Raises: NotFound, as for an unknown id."""
    if not is_id(prefix, text):
        raise NotFound(_NOUNS[prefix], text[:80])
    return UUID(hex=text[-32:])


def public(prefix: Prefix, value: UUID) -> str:
    """The id as clients see it."""
    return f"{prefix}_{value.hex}"


def public_or_none(prefix: Prefix, value: UUID | None) -> str | None:
    return None if value is None else f"{prefix}_{value.hex}"
