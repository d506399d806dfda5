"""Sessions that begin from another one: forks, and states carried between servers."""

import base64
import binascii
from typing import Annotated, Literal

import msgspec
from litestar import get, post
from litestar.di import NamedDependency
from litestar.params import FromPath, JSONBody
from msgspec import Meta, Struct

from agents.config import AgentConfig
from app.auth import Principal
from app.errors import InvalidField
from app.http_json import ApiRequest
from app.idempotency import once
from app.resources import Resources
from app.routes.admissions import announce
from app.routes.agents import Metadata
from app.routes.session_views import SessionView, view_session
from app.routes.sessions import EndUserId, Title
from db.admission import Admission
from db.copies import CopiedMemory, SessionState, fork_session, import_session, read_state
from db.sessions import create_session, get_session
from providers.types import Block, JsonObject, Message, NativeBlocks, Role

MAX_MESSAGES = 20_000
MAX_MEMORIES = 1_000


class NativeState(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the provider sent, for lossless replay to the same API. `body`: base64 of a JSON array."""

    api: Annotated[str, Meta(max_length=64)]
    model: Annotated[str, Meta(max_length=256)]
    body: str


class MessageState(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A transcript entry."""

    role: Role
    content: Annotated[tuple[Block, ...], Meta(max_length=10_000)]
    native: NativeState | None = None


class StateView(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All that a session has come to: what the model sees, its memories, and what it has used.

    `agent`: the configuration that it ran with, for whoever makes the same agent elsewhere.
    """

    format: Literal["armillary.session.1"] = "armillary.session.1"
    messages: Annotated[tuple[MessageState, ...], Meta(max_length=MAX_MESSAGES)]
    memories: Annotated[tuple[CopiedMemory, ...], Meta(max_length=MAX_MEMORIES)] = ()
    title: Title | None = None
    end_user_id: EndUserId | None = None
    metadata: Metadata | None = None
    agent: JsonObject | None = None
    usage: JsonObject | None = None


class SessionImport(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A state of `GET /v1/sessions/{id}/state`, for an agent of this server."""

    agent: Annotated[str, Meta(description="The id of an agent.")]
    state: StateView


class SessionFork(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`at`: the `seq` of the event up to which the session is copied; null: all of it."""

    at: Annotated[int, Meta(ge=0)] | None = None
    title: Title | None = None


@get("/v1/sessions/{session_id:str}/state", tags=["Sessions"])
async def get_state(
    session_id: FromPath[str], principal: NamedDependency[Principal], resources: NamedDependency[Resources]
) -> StateView:
    """Reads the whole session, to be kept, or carried to another server with `POST /v1/sessions/import`.

    Calls that have no result yet are given one that says so.
    """
    async with resources.database.transaction(principal.tenant_id) as tx:
        return _view(await read_state(tx, session_id))


@post("/v1/sessions/import", tags=["Sessions"])
async def import_one(
    request: ApiRequest,
    data: JSONBody[SessionImport],
    principal: NamedDependency[Principal],
    resources: NamedDependency[Resources],
) -> SessionView:
    """Makes a session of a state. What cannot be sent to a model is repaired or left out."""
    messages = tuple(_message(entry, index) for index, entry in enumerate(data.state.messages))
    admission: Admission | None = None
    async with resources.database.transaction(principal.tenant_id) as tx:

        async def make() -> JsonObject:
            nonlocal admission
            session_id = await create_session(
                tx,
                agent_id=data.agent,
                version=None,
                title=data.state.title,
                end_user_id=data.state.end_user_id,
                metadata=data.state.metadata,
            )
            admission = await import_session(
                tx,
                session_id=session_id,
                messages=messages,
                memories=data.state.memories,
                usage=data.state.usage,
            )
            return {"session_id": session_id}

        made = await once(tx, request, make)
        session = await get_session(tx, made["session_id"])
    await announce(resources, admission)
    return view_session(session)


@post("/v1/sessions/{session_id:str}/fork", tags=["Sessions"])
async def fork(
    request: ApiRequest,
    session_id: FromPath[str],
    principal: NamedDependency[Principal],
    resources: NamedDependency[Resources],
    data: JSONBody[SessionFork | None] = None,
) -> SessionView:
    """Makes a session of the same agent that begins with what this one had come to after the event `at`.

    Its log begins anew with `session.forked`. A run that works on this session is not disturbed.
    """
    given = data or SessionFork()
    admission: Admission | None = None
    async with resources.database.transaction(principal.tenant_id) as tx:

        async def make() -> JsonObject:
            nonlocal admission
            admission = await fork_session(tx, session_id=session_id, at_seq=given.at, title=given.title)
            return {"session_id": admission.session_id}

        made = await once(tx, request, make)
        session = await get_session(tx, made["session_id"])
    await announce(resources, admission)
    return view_session(session)


def _view(state: SessionState) -> StateView:
    return StateView(
        messages=tuple(
            MessageState(
                role=message.role,
                content=message.blocks,
                native=None if message.native is None else _native_state(message.native),
            )
            for message in state.messages
        ),
        memories=state.memories,
        title=state.title,
        end_user_id=state.end_user_id,
        metadata=state.metadata,
        agent=_builtins(state.agent),
        usage=msgspec.to_builtins(state.usage),
    )


def _builtins(agent: AgentConfig) -> JsonObject:
    found: JsonObject = msgspec.to_builtins(agent)
    return found


def _native_state(native: NativeBlocks) -> NativeState:
    return NativeState(api=native.api, model=native.model, body=base64.b64encode(native.body).decode())


def _message(entry: MessageState, index: int) -> Message:
    """Raises: InvalidField."""
    native = None
    if entry.native is not None:
        field = f"state.messages[{index}].native.body"
        try:
            body = base64.b64decode(entry.native.body, validate=True)
            msgspec.json.decode(body, type=list[JsonObject])
        except (binascii.Error, ValueError, msgspec.DecodeError) as error:
            raise InvalidField(f"{field}: not a JSON array of objects in base64.", field=field) from error
        native = NativeBlocks(api=entry.native.api, model=entry.native.model, body=body)
    return Message(role=entry.role, blocks=entry.content, native=native)


ROUTES = [get_state, import_one, fork]
