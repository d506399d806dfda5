"""A session's whole state, read to be carried elsewhere, and sessions that begin from such a state."""

from collections.abc import Callable
from uuid import UUID

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from agents.config import AgentConfig
from agents.drafts import Draft
from agents.events import SessionForked, SessionImported
from agents.transcript import repaired
from db.arrivals import Admission, append, draft_of_session, lock_session
from db.engine import Record, Transaction
from db.errors import Conflict
from db.ids import public, to_uuid
from db.parts import encode_json
from db.sessions import SessionCounters, create_session, get_session
from providers.ids import new_id
from providers.types import Block, JsonObject, Message, NativeBlocks

_blocks = msgspec.json.Decoder(tuple[Block, ...])


class CopiedMemory(Struct, frozen=True, kw_only=True):
    """A memory of the first `position` messages of the same state."""

    position: int
    text: str
    is_in_effect: bool = False


class SessionState(Struct, frozen=True, kw_only=True):
    """All that a session has come to: what the model sees, without what was rolled back.

    `agent`: the configuration that it ran with. `usage`: what it has used where it comes from.
    """

    title: str | None
    end_user_id: str | None
    metadata: dict[str, str]
    agent: AgentConfig
    messages: tuple[Message, ...]
    memories: tuple[CopiedMemory, ...]
    usage: SessionCounters
    last_seq: int


async def read_state(tx: Transaction, session_id: str, *, until_seq: int | None = None) -> SessionState:
    """The state after the event `until_seq`; None: as it is now.

    Raises: NotFound, Conflict (`no_such_event`).
    """
    session = await get_session(tx, session_id)
    until_seq = session.last_seq if until_seq is None else until_seq
    if until_seq > session.last_seq:
        raise Conflict("no_such_event", f"The session's log ends at event {session.last_seq}.")
    key = to_uuid(session_id)
    rows = await tx.fetch(
        """
        SELECT position, role, blocks, native_api, native_model, native_body FROM messages
        WHERE tenant_id = $1 AND session_id = $2 AND rolled_back_at IS NULL AND seq <= $3 ORDER BY position
        """,
        tx.tenant_id,
        key,
        until_seq,
    )
    memories = await tx.fetch(
        """
        SELECT m.position, m.text, m.id = s.memory_id AS is_in_effect
        FROM memories m JOIN sessions s ON s.id = m.session_id
        WHERE m.tenant_id = $1 AND m.session_id = $2 ORDER BY m.created_at, m.id
        """,
        tx.tenant_id,
        key,
    )
    old = tuple(_message(row) for row in rows)
    index = {row["position"]: at for at, row in enumerate(rows, start=1)}
    return SessionState(
        title=session.title,
        end_user_id=session.end_user_id,
        metadata=session.metadata,
        agent=session.agent,
        messages=repaired(old),
        memories=tuple(
            CopiedMemory(
                position=len(repaired(old[: index[row["position"]]])),
                text=row["text"],
                is_in_effect=bool(row["is_in_effect"]),
            )
            for row in memories
            if row["position"] in index
        ),
        usage=session.counters,
        last_seq=until_seq,
    )


def _message(row: Record) -> Message:
    native = None
    if row["native_body"] is not None:
        native = NativeBlocks(api=row["native_api"], model=row["native_model"], body=row["native_body"])
    return Message(role=row["role"], blocks=_blocks.decode(row["blocks"]), native=native)


async def fork_session(
    tx: Transaction, *, session_id: str, at_seq: int | None, title: str | None = None
) -> Admission:
    """A new session of the same agent that begins with what this one had come to after the event `at_seq`.

    Calls without a result get one that says so. Raises: NotFound, Conflict (`no_such_event`,
    `agent_archived`).
    """
    state = await read_state(tx, session_id, until_seq=at_seq)
    old = await tx.fetchrow(
        "SELECT agent_id, agent_version, agent_overrides, environment_id FROM sessions WHERE id = $1",
        to_uuid(session_id),
    )
    assert old is not None, "it was just read"
    new_session = await create_session(
        tx,
        agent_id=public("agent", old["agent_id"]),
        version=old["agent_version"],
        overrides=msgspec.json.decode(old["agent_overrides"] or "{}"),
        environment_id=old["environment_id"],
        title=title or state.title,
        end_user_id=state.end_user_id,
        metadata=state.metadata,
    )
    await tx.execute(
        "UPDATE sessions SET forked_from = $2 WHERE id = $1", to_uuid(new_session), to_uuid(session_id)
    )

    def write(draft: Draft) -> None:
        count = len(state.messages)
        draft.event(SessionForked, from_session_id=session_id, from_seq=state.last_seq, messages=count)

    return await _begin(tx, new_session, state.messages, state.memories, write)


async def import_session(
    tx: Transaction,
    *,
    session_id: str,
    messages: tuple[Message, ...],
    memories: tuple[CopiedMemory, ...],
    usage: JsonObject | None,
) -> Admission:
    """Fills a new session with what another server had. Its usage is told, and no part of our ledger.

    A memory that would part a call from its result is left out.
    """
    places = {
        memory.position: len(repaired(messages[: memory.position]))
        for memory in memories
        if 0 < memory.position <= len(messages) and _ends_group(messages, memory.position)
    }
    kept = tuple(
        replace(memory, position=places[memory.position]) for memory in memories if memory.position in places
    )
    whole = repaired(messages)

    def write(draft: Draft) -> None:
        draft.event(SessionImported, messages=len(whole), usage=usage)

    return await _begin(tx, session_id, whole, kept, write)


def _ends_group(messages: tuple[Message, ...], position: int) -> bool:
    return position == len(messages) or messages[position].role != "tool"


async def _begin(
    tx: Transaction,
    session_id: str,
    messages: tuple[Message, ...],
    memories: tuple[CopiedMemory, ...],
    write: Callable[[Draft], None],
) -> Admission:
    locked = await lock_session(tx, session_id)
    draft = draft_of_session(locked)
    write(draft)
    admission = Admission(session_id=session_id)
    await append(tx, locked, draft, admission)
    await _fill(tx, locked.id, messages, memories)
    return admission


async def _fill(
    tx: Transaction, session: UUID, messages: tuple[Message, ...], memories: tuple[CopiedMemory, ...]
) -> None:
    natives = [message.native for message in messages]
    await tx.execute(
        """
        INSERT INTO messages
            (session_id, tenant_id, position, seq, id, role, blocks, native_api, native_model, native_body)
        SELECT $1, $2, new.position, 1, new.id, new.role, new.blocks, new.api, new.model, new.body
        FROM unnest($3::uuid[], $4::text[], $5::json[], $6::text[], $7::text[], $8::bytea[])
            WITH ORDINALITY AS new (id, role, blocks, api, model, body, position)
        """,
        session,
        tx.tenant_id,
        [to_uuid(new_id("msg")) for _ in messages],
        [message.role for message in messages],
        [encode_json(message.blocks) for message in messages],
        [None if native is None else native.api for native in natives],
        [None if native is None else native.model for native in natives],
        [None if native is None else native.body for native in natives],
    )
    memory_id = None
    for memory in memories:
        made = to_uuid(new_id("mem"))
        await tx.execute(
            """
            INSERT INTO memories (id, tenant_id, session_id, position, seen_position, text)
            VALUES ($1, $2, $3, $4, $5, $6)
            """,
            made,
            tx.tenant_id,
            session,
            memory.position,
            len(messages),
            memory.text,
        )
        if memory.is_in_effect and memory.position:
            memory_id = made
    await tx.execute(
        "UPDATE sessions SET last_position = $2, memory_id = $3 WHERE id = $1",
        session,
        len(messages),
        memory_id,
    )
