"""A session and its run as a hold finds them: all that the loop starts from."""

from uuid import UUID

import msgspec
from msgspec import Struct

from agents.context import tail_of
from agents.errors import HoldLost
from agents.types import Memory, RunOptions, Snapshot, StoredMessage
from db.engine import Record, Transaction
from db.holds import Hold
from db.ids import public, to_uuid
from db.sessions import effective_agent
from db.work import INBOX, LAST_TURN, inbox_of
from providers.ids import is_id
from providers.types import Base64Source, Block, Message, NativeBlocks, Role

_blocks = msgspec.json.Decoder(tuple[Block, ...])
_options = msgspec.json.Decoder(RunOptions)

_MESSAGE_COLUMNS = "id, position, role, blocks, native_api, native_model, native_body"

_HEAD = f"""
SELECT {INBOX}, agent_versions.config, sessions.agent_overrides, sessions.end_user_id, runs.turns,
    runs.options, {LAST_TURN}, runs.deadline_at, sessions.last_position,
    memories.id AS memory_id, memories.position AS memory_position, memories.seen_position, memories.text
FROM sessions JOIN runs ON runs.session_id = sessions.id
JOIN agent_versions ON agent_versions.agent_id = sessions.agent_id
    AND agent_versions.version = sessions.agent_version
LEFT JOIN memories ON memories.id = sessions.memory_id
WHERE sessions.id = $1 AND runs.id = $2
"""


async def load_snapshot(tx: Transaction, hold: Hold) -> Snapshot:
    """Reads the whole state of a run.

    The inbox is read first: what comes in while the rest is read makes a commit that relies on it fail.
    Raises: HoldLost.
    """
    session, run = to_uuid(hold.session_id), to_uuid(hold.run_id)
    row = await tx.fetchrow(_HEAD, session, run)
    if row is None:  # deleted
        raise HoldLost
    unfinished = inbox_of(row, run)
    if unfinished.epoch != hold.epoch:
        raise HoldLost
    memory = _memory(row)
    options = _options.decode(row["options"]) if row["options"] else RunOptions()
    messages = await load_messages(tx, session, after=memory.position if memory is not None else 0)
    folded = await _folded_tail(tx, session, memory.position) if memory is not None else None
    return Snapshot(
        session_id=hold.session_id,
        run_id=hold.run_id,
        agent=options.overrides.applied_to(effective_agent(row["config"], row["agent_overrides"])),
        messages=messages,
        tail_role=tail_of(messages) or (folded.tail_role if folded else None),
        task=folded.task if folded else None,
        memory=memory,
        options=options,
        batch=unfinished.batch,
        inbox=unfinished.view,
        turns=row["turns"],
        last_turn=row["last_turn"],
        next_position=row["last_position"] + 1,
        deadline_at=row["deadline_at"],
        end_user_id=row["end_user_id"],
    )


async def load_messages(tx: Transaction, session: UUID, *, after: int = 0) -> tuple[StoredMessage, ...]:
    """The transcript as the model sees it, in order, from the message that follows the position `after`."""
    rows = await tx.fetch(
        f"""
        SELECT {_MESSAGE_COLUMNS} FROM messages
        WHERE session_id = $1 AND position > $2 AND rolled_back_at IS NULL ORDER BY position
        """,
        session,
        after,
    )
    return tuple(_stored(row) for row in rows)


class _Folded(Struct, frozen=True, kw_only=True):
    """Of the messages that a memory stands for: the role of the last one, and the last prompt."""

    tail_role: Role
    task: Message | None


async def _folded_tail(tx: Transaction, session: UUID, position: int) -> _Folded | None:
    rows = await tx.fetch(
        f"""
        (SELECT {_MESSAGE_COLUMNS} FROM messages
            WHERE session_id = $1 AND position <= $2 AND rolled_back_at IS NULL AND role <> 'system'
            ORDER BY position DESC LIMIT 1)
        UNION ALL
        (SELECT {_MESSAGE_COLUMNS} FROM messages
            WHERE session_id = $1 AND position <= $2 AND rolled_back_at IS NULL AND role = 'user'
            ORDER BY position DESC LIMIT 1)
        """,
        session,
        position,
    )
    if not rows:
        return None
    last, *prompts = (_stored(row).message for row in rows)
    return _Folded(tail_role=last.role, task=prompts[0] if prompts else None)


def _memory(row: Record) -> Memory | None:
    if row["memory_id"] is None:
        return None
    return Memory(
        id=public("mem", row["memory_id"]),
        position=row["memory_position"],
        seen_position=row["seen_position"],
        text=row["text"],
    )


async def find_image(tx: Transaction, file_id: str) -> Base64Source | None:
    """An uploaded image, ready to be sent; None when the file is gone. The caller scopes by its tenant."""
    if not is_id("file", file_id):
        return None
    row = await tx.fetchrow(
        "SELECT media_type, encode(content, 'base64') AS data FROM files WHERE id = $1 AND tenant_id = $2",
        to_uuid(file_id),
        tx.tenant_id,
    )
    if row is None:
        return None
    return Base64Source(media_type=row["media_type"], data=row["data"].replace("\n", ""))


def _stored(row: Record) -> StoredMessage:
    native = None
    if row["native_body"] is not None:
        native = NativeBlocks(api=row["native_api"], model=row["native_model"], body=row["native_body"])
    return StoredMessage(
        id=public("msg", row["id"]),
        position=row["position"],
        message=Message(role=row["role"], blocks=_blocks.decode(row["blocks"]), native=native),
    )
