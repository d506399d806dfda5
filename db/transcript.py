"""What a session's transcript is made of: messages, prompts, and the files they name."""

from collections.abc import Iterable
from datetime import datetime
from typing import Literal
from uuid import UUID

import msgspec
from msgspec import Struct

from agents.events import PromptDelivery, UserContent
from agents.log import LoggedEvent
from db.engine import Record, Transaction
from db.errors import NotFound
from db.ids import parse_id, public, public_or_none
from db.runs import PromptState
from providers.types import Block, Role

Order = Literal["asc", "desc"]


class TranscriptMessage(Struct, frozen=True, kw_only=True):
    """A transcript entry as clients read it. `position` is 1, 2, 3 … in the session.

    `rolled_back_at`: the model no longer sees it.
    """

    id: str
    session_id: str
    run_id: str | None
    position: int
    role: Role
    blocks: tuple[Block, ...]
    created_at: datetime
    rolled_back_at: datetime | None


class Prompt(Struct, frozen=True, kw_only=True):
    """User input. Its id is that of its `user.message` event; prompts of one POST share `batch_id`.

    `run_id` is null until a run has been made for it or has taken it up. `place` is where it stands in the
    list that it was read from.
    """

    id: str
    session_id: str
    batch_id: str
    run_id: str | None
    seq: int
    place: int
    state: PromptState
    delivery: PromptDelivery
    content: tuple[UserContent, ...]
    created_at: datetime
    updated_at: datetime


# A rank above the log position: the prompts of the open run, then by delivery as `agents.pending` takes them.
_TAKE_UP = """
    ((CASE WHEN run_id IS NOT NULL OR delivery = 'next_request' THEN 0
        WHEN delivery = 'interrupt' THEN 1 WHEN delivery = 'steer' THEN 2 ELSE 3 END)::int8 << 56) + seq
"""


async def list_messages(
    tx: Transaction,
    *,
    session: UUID,
    limit: int,
    order: Order = "asc",
    after: int | None = None,
    include_rolled_back: bool = False,
) -> list[TranscriptMessage]:
    """At most `limit` messages by position, those that follow the position `after` in that order."""
    direction, follows = _direction(order)
    rows = await tx.fetch(
        "SELECT id, session_id, run_id, position, role, blocks, created_at, rolled_back_at FROM messages"
        f" WHERE tenant_id = $1 AND session_id = $2 AND ($3::int8 IS NULL OR position {follows} $3)"
        " AND ($5 OR rolled_back_at IS NULL)"
        f" ORDER BY position {direction} LIMIT $4",
        tx.tenant_id,
        session,
        after,
        limit,
        include_rolled_back,
    )
    return [_message(row) for row in rows]


async def list_prompts(
    tx: Transaction,
    *,
    session: UUID,
    limit: int,
    states: tuple[PromptState, ...] = (),
    order: Order = "asc",
    after: int | None = None,
) -> list[Prompt]:
    """At most `limit` prompts that follow the place `after`; those in one of `states`, or all.

    They stand as they came in, but those that are pending, when only these are asked for, as they will be
    taken up.
    """
    direction, follows = _direction(order)
    place = _TAKE_UP if states == ("pending",) else "seq"
    rows = await tx.fetch(
        f"SELECT * FROM (SELECT *, {place} AS place FROM prompts WHERE tenant_id = $1 AND session_id = $2"
        "  AND ($4::text[] IS NULL OR state = ANY($4))) placed"
        f" WHERE $3::int8 IS NULL OR place {follows} $3 ORDER BY place {direction} LIMIT $5",
        tx.tenant_id,
        session,
        after,
        list(states) or None,
        limit,
    )
    return [_prompt(row) for row in rows]


async def get_prompt(tx: Transaction, *, session: UUID, prompt_id: str) -> Prompt:
    """Raises: NotFound."""
    row = await tx.fetchrow(
        "SELECT *, seq AS place FROM prompts WHERE tenant_id = $1 AND session_id = $2 AND id = $3",
        tx.tenant_id,
        session,
        parse_id("evt", prompt_id),
    )
    if row is None:
        raise NotFound("prompt", prompt_id)
    return _prompt(row)


async def get_events(tx: Transaction, *, session: UUID, seqs: Iterable[int]) -> list[LoggedEvent]:
    """The session's events with these numbers, in the order of `seqs`. Raises: NotFound, when one is gone."""
    wanted = list(seqs)
    rows = await tx.fetch(
        "SELECT seq, id, type, body FROM events"
        " WHERE tenant_id = $1 AND session_id = $2 AND seq = ANY($3::int8[])",
        tx.tenant_id,
        session,
        wanted,
    )
    by_seq = {
        row["seq"]: LoggedEvent(
            seq=row["seq"], id=public("evt", row["id"]), type=row["type"], body=bytes(row["body"])
        )
        for row in rows
    }
    for seq in wanted:
        if seq not in by_seq:
            raise NotFound("event", str(seq))
    return [by_seq[seq] for seq in wanted]


async def require_files(tx: Transaction, file_ids: Iterable[str]) -> None:
    """Returns when each file is this tenant's. Raises: NotFound, with the first that is not."""
    keys = {parse_id("file", file_id): file_id for file_id in file_ids}
    if not keys:
        return
    rows = await tx.fetch(
        "SELECT id FROM files WHERE tenant_id = $1 AND id = ANY($2::uuid[])", tx.tenant_id, list(keys)
    )
    for missing in keys.keys() - {row["id"] for row in rows}:
        raise NotFound("file", keys[missing])


def _direction(order: Order) -> tuple[str, str]:
    return ("ASC", ">") if order == "asc" else ("DESC", "<")


def _message(row: Record) -> TranscriptMessage:
    return TranscriptMessage(
        id=public("msg", row["id"]),
        session_id=public("sess", row["session_id"]),
        run_id=public_or_none("run", row["run_id"]),
        position=row["position"],
        role=row["role"],
        blocks=msgspec.json.decode(row["blocks"], type=tuple[Block, ...]),
        created_at=row["created_at"],
        rolled_back_at=row["rolled_back_at"],
    )


def _prompt(row: Record) -> Prompt:
    return Prompt(
        id=public("evt", row["id"]),
        session_id=public("sess", row["session_id"]),
        batch_id=public("batch", row["batch_id"]),
        run_id=public_or_none("run", row["run_id"]),
        seq=row["seq"],
        place=row["place"],
        state=row["state"],
        delivery=row["delivery"],
        content=msgspec.json.decode(row["content"], type=tuple[UserContent, ...]),
        created_at=row["created_at"],
        updated_at=row["updated_at"],
    )
