"""A session and its run as a hold finds them: all that the loop starts from."""

from uuid import UUID

import msgspec

from agents.errors import HoldLost
from agents.types import Snapshot, StoredMessage
from db.engine import Record, Transaction
from db.holds import Hold
from db.ids import public, to_uuid
from db.sessions import effective_agent
from db.work import INBOX, LAST_TURN, inbox_of
from providers.ids import is_id
from providers.types import Base64Source, Block, Message, NativeBlocks

_blocks = msgspec.json.Decoder(tuple[Block, ...])


_HEAD = f"""
SELECT {INBOX}, agent_versions.config, sessions.agent_overrides, sessions.end_user_id, runs.turns,
    {LAST_TURN}, runs.deadline_at, sessions.last_position
FROM sessions JOIN runs ON runs.session_id = sessions.id
JOIN agent_versions ON agent_versions.agent_id = sessions.agent_id
    AND agent_versions.version = sessions.agent_version
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
    return Snapshot(
        session_id=hold.session_id,
        run_id=hold.run_id,
        agent=effective_agent(row["config"], row["agent_overrides"]),
        messages=await load_messages(tx, session),
        batch=unfinished.batch,
        inbox=unfinished.view,
        turns=row["turns"],
        last_turn=row["last_turn"],
        next_position=row["last_position"] + 1,
        deadline_at=row["deadline_at"],
        end_user_id=row["end_user_id"],
    )


async def load_messages(tx: Transaction, session: UUID) -> tuple[StoredMessage, ...]:
    """The transcript as the model sees it, in order."""
    rows = await tx.fetch(
        """
        SELECT id, position, role, blocks, native_api, native_model, native_body FROM messages
        WHERE session_id = $1 AND rolled_back_at IS NULL ORDER BY position
        """,
        session,
    )
    return tuple(_stored(row) for row in rows)


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
