"""`/v1/sessions`: conversations with one version of an agent."""

from functools import partial
from typing import Annotated, Literal

import msgspec
from litestar import delete, get, post
from litestar.di import NamedDependency
from litestar.params import FromPath, JSONBody, QueryParameter
from msgspec import UNSET, Meta, Struct, UnsetType

from agents.config import QueueMode
from agents.drafts import Draft
from agents.events import SessionUpdated, StatusTerminated
from app.auth import SESSION_TOKENS, Principal
from app.errors import InvalidField
from app.http_json import ApiRequest
from app.idempotency import once
from app.pagination import IncludeArchived, Page, PageQuery, make_page
from app.resources import Resources
from app.routes.admissions import announce
from app.routes.agent_inputs import (
    ModelParam,
    ToolParams,
    Unsupported,
    refuse_unsupported,
    to_model,
    to_tools,
)
from app.routes.agents import Metadata, MetadataPatch, System
from app.routes.inputs import (
    MAX_EVENTS,
    EventParam,
    model_of_agent,
    require_image_files,
    require_sight,
    to_inputs,
)
from app.routes.positions import Direction
from app.routes.session_views import LiveSessionView, SessionView, view_live_session, view_session
from app.streaming.live import first_base, kept_batches, live
from db import sessions
from db.admission import Admission, Input, PromptInput, admit, append_events, roll_back
from db.ids import to_uuid
from db.live import get_live_state
from db.sessions import SessionFilter, SessionStatus
from providers.ids import is_id
from providers.types import JsonObject

Title = Annotated[str, Meta(max_length=1000)]
EndUserId = Annotated[
    str, Meta(min_length=1, max_length=256, description="Your name for the person behind the session.")
]
EnvironmentId = Annotated[str, Meta(max_length=256, description="Any text; it is shown again, not used.")]
AgentVersion = Annotated[int, Meta(ge=1, le=2**31 - 1, description="Default: the newest.")]


class AgentParam(
    Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="agent", tag_field="type"
):
    """An agent in one of its versions."""

    id: str
    version: AgentVersion | None = None


class AgentOverridesParam(
    Struct,
    frozen=True,
    kw_only=True,
    forbid_unknown_fields=True,
    tag="agent_with_overrides",
    tag_field="type",
):
    """An agent of which this session changes something. What is given replaces the agent's own."""

    id: str
    version: AgentVersion | None = None
    model: str | ModelParam | UnsetType = UNSET
    system: Annotated[System | UnsetType | None, Meta(description="Null: no system prompt.")] = UNSET
    tools: ToolParams | UnsetType = UNSET
    steering_mode: QueueMode | UnsetType = UNSET
    follow_up_mode: QueueMode | UnsetType = UNSET
    skills: Unsupported = None
    mcp_servers: Unsupported = None


class SessionCreate(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A new session. `initial_events` are prompts that are admitted with it."""

    agent: Annotated[str | AgentParam | AgentOverridesParam, Meta(description="An agent's id, or an object.")]
    title: Title | None = None
    end_user_id: EndUserId | None = None
    environment_id: EnvironmentId | None = None
    metadata: Metadata | None = None
    initial_events: Annotated[tuple[EventParam, ...], Meta(max_length=MAX_EVENTS)] = ()
    budget: Unsupported = None
    messages: Unsupported = None
    resources: Unsupported = None
    vault_ids: Unsupported = None


class SessionUpdate(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What changes. `metadata` is patched: null removes a key, a null patch removes all.

    The queue modes count from the next turn on; null: as the agent has it.
    """

    title: Title | UnsetType | None = UNSET
    metadata: MetadataPatch | UnsetType | None = UNSET
    steering_mode: QueueMode | UnsetType | None = UNSET
    follow_up_mode: QueueMode | UnsetType | None = UNSET
    agent: Unsupported = None
    budget: Unsupported = None
    vault_ids: Unsupported = None


class SessionDeleted(Struct, frozen=True, kw_only=True):
    id: str
    type: Literal["session_deleted"] = "session_deleted"


Statuses = Annotated[
    list[SessionStatus] | None, QueryParameter(name="statuses", description="Only sessions in these states.")
]
StatusesInBrackets = Annotated[
    list[SessionStatus] | None, QueryParameter(name="statuses[]", description="As `statuses`.")
]
OfAgent = Annotated[str | None, QueryParameter(name="agent_id", description="Only sessions of this agent.")]
OfVersion = Annotated[
    int | None,
    QueryParameter(name="agent_version", ge=1, le=2**31 - 1, description="Only sessions of this version."),
]
OfEndUser = Annotated[str | None, QueryParameter(name="end_user_id", description="Only sessions of them.")]


@post("/v1/sessions", tags=["Sessions"])
async def create_session(
    request: ApiRequest,
    data: JSONBody[SessionCreate],
    principal: NamedDependency[Principal],
    resources: NamedDependency[Resources],
) -> SessionView:
    """Makes a session of an agent, and starts a run when there are initial events."""
    refuse_unsupported(
        budget=data.budget, messages=data.messages, resources=data.resources, vault_ids=data.vault_ids
    )
    overrides = to_overrides(data.agent, resources)
    inputs = _initial_inputs(data.initial_events, resources)
    await require_sight(resources, inputs, partial(_model_of, resources, principal, data.agent, overrides))
    admission: Admission | None = None
    async with resources.database.transaction(principal.tenant_id) as tx:

        async def make() -> JsonObject:
            nonlocal admission
            session_id = await sessions.create_session(
                tx,
                agent_id=data.agent if isinstance(data.agent, str) else data.agent.id,
                version=None if isinstance(data.agent, str) else data.agent.version,
                overrides=overrides,
                environment_id=data.environment_id,
                title=data.title,
                end_user_id=data.end_user_id,
                metadata=data.metadata,
            )
            if inputs:
                await require_image_files(tx, inputs)
                admission = await admit(
                    tx,
                    session_id=session_id,
                    inputs=inputs,
                    api_key_id=principal.public_key_id,
                    bounds=resources.queue_bounds,
                )
            return {"session_id": session_id}

        made = await once(tx, request, make)
        session = await sessions.get_session(tx, made["session_id"])
    await announce(resources, admission)
    return view_session(session)


@get("/v1/sessions", tags=["Sessions"])
async def list_sessions(
    *,
    principal: NamedDependency[Principal],
    resources: NamedDependency[Resources],
    page_query: NamedDependency[PageQuery],
    agent_id: OfAgent = None,
    agent_version: OfVersion = None,
    end_user_id: OfEndUser = None,
    statuses: Statuses = None,
    statuses_in_brackets: StatusesInBrackets = None,
    include_archived: IncludeArchived = False,
    order: Direction = "desc",
) -> Page[SessionView]:
    """Lists sessions, newest first unless `order` says otherwise."""
    created = page_query.created
    where = SessionFilter(
        agent_id=agent_id,
        agent_version=agent_version,
        end_user_id=end_user_id,
        statuses=(*(statuses or ()), *(statuses_in_brackets or ())),
        include_archived=include_archived,
        created_gt=created.gt,
        created_gte=created.gte,
        created_lt=created.lt,
        created_lte=created.lte,
    )
    async with resources.database.transaction(principal.tenant_id) as tx:
        rows = await sessions.list_sessions(
            tx, where=where, limit=page_query.fetch, order=order, after=page_query.before
        )
    return make_page(rows, page_query, view_session, lambda row: (row.created_at, to_uuid(row.id)))


@get("/v1/sessions/{session_id:str}", opt=SESSION_TOKENS, tags=["Sessions"])
async def get_session(
    session_id: FromPath[str], principal: NamedDependency[Principal], resources: NamedDependency[Resources]
) -> LiveSessionView:
    """Reads a session as it stands at this moment, with what is going on in it.

    A client that shows `live` and then reads the stream from `live.cursor` misses nothing.
    """
    kept = await resources.hub.kept_previews(session_id) if is_id("sess", session_id) else []
    batches = kept_batches(kept)
    async with resources.database.transaction(principal.tenant_id) as tx:
        session = await sessions.get_session(tx, session_id)
        state = await get_live_state(tx, session_id, after_seq=first_base(batches))
    return view_live_session(session, state, live(state, batches, resources.hub.limits))


@post("/v1/sessions/{session_id:str}", status_code=200, tags=["Sessions"])
async def update_session(
    request: ApiRequest,
    session_id: FromPath[str],
    data: JSONBody[SessionUpdate],
    principal: NamedDependency[Principal],
    resources: NamedDependency[Resources],
) -> SessionView:
    """Changes the title, the metadata, and how many pending prompts are taken up together."""
    refuse_unsupported(agent=data.agent, budget=data.budget, vault_ids=data.vault_ids)
    given = {"steering_mode": data.steering_mode, "follow_up_mode": data.follow_up_mode}
    modes = {field: mode for field, mode in given.items() if mode is not UNSET}
    admission: Admission | None = None
    async with resources.database.transaction(principal.tenant_id) as tx:

        async def make() -> JsonObject:
            nonlocal admission
            changes = await sessions.update_session(
                tx, session_id=session_id, title=data.title, metadata=data.metadata, modes=modes
            )

            def write(draft: Draft) -> None:
                draft.event(SessionUpdated, changes=changes)

            if changes:
                admission = await append_events(tx, session_id=session_id, write=write)
            return {"session_id": session_id}

        await once(tx, request, make)
        session = await sessions.get_session(tx, session_id)
    await announce(resources, admission)
    return view_session(session)


@post("/v1/sessions/{session_id:str}/archive", status_code=200, tags=["Sessions"])
async def archive_session(
    request: ApiRequest,
    session_id: FromPath[str],
    principal: NamedDependency[Principal],
    resources: NamedDependency[Resources],
) -> SessionView:
    """Ends the session for good: it takes no more prompts and stays readable. Refused while a run is open."""
    admission: Admission | None = None
    async with resources.database.transaction(principal.tenant_id) as tx:

        def write(draft: Draft) -> None:
            draft.event(StatusTerminated)

        async def make() -> JsonObject:
            nonlocal admission
            if await sessions.archive_session(tx, session_id):
                admission = await append_events(tx, session_id=session_id, write=write)
            return {"session_id": session_id}

        await once(tx, request, make)
        session = await sessions.get_session(tx, session_id)
    await announce(resources, admission)
    return view_session(session)


@post("/v1/sessions/{session_id:str}/rollback", opt=SESSION_TOKENS, status_code=200, tags=["Sessions"])
async def roll_back_session(
    request: ApiRequest,
    session_id: FromPath[str],
    principal: NamedDependency[Principal],
    resources: NamedDependency[Resources],
) -> SessionView:
    """Takes the last run back: the model no longer sees its messages. Once more takes back the one before.

    Nothing is deleted: the messages are marked, the log says so, and usage stays counted. Effects of tools
    are not undone. Refused while a run is open.
    """
    admission: Admission | None = None
    async with resources.database.transaction(principal.tenant_id) as tx:

        async def make() -> JsonObject:
            nonlocal admission
            admission = await roll_back(tx, session_id=session_id)
            return {"session_id": session_id}

        await once(tx, request, make)
        session = await sessions.get_session(tx, session_id)
    await announce(resources, admission)
    return view_session(session)


@delete("/v1/sessions/{session_id:str}", status_code=200, tags=["Sessions"])
async def delete_session(
    session_id: FromPath[str], principal: NamedDependency[Principal], resources: NamedDependency[Resources]
) -> SessionDeleted:
    """Deletes the session with its log and transcript; what it has used stays in the accounts.

    Refused while a run is open.
    """
    async with resources.database.transaction(principal.tenant_id) as tx:
        await sessions.delete_session(tx, session_id)
    return SessionDeleted(id=session_id)


def to_overrides(agent: str | AgentParam | AgentOverridesParam, resources: Resources) -> JsonObject:
    """Whole values that replace the agent's own. Raises: InvalidField, NotAvailable."""
    if not isinstance(agent, AgentOverridesParam):
        return {}
    refuse_unsupported(skills=agent.skills, mcp_servers=agent.mcp_servers)
    overrides: JsonObject = {}
    if agent.model is not UNSET:
        overrides["model"] = msgspec.to_builtins(to_model(agent.model, resources))
    if agent.system is not UNSET:
        overrides["system"] = agent.system
    if agent.tools is not UNSET:
        overrides["tools"] = msgspec.to_builtins(to_tools(agent.tools, resources))
    if agent.steering_mode is not UNSET:
        overrides["steering_mode"] = agent.steering_mode
    if agent.follow_up_mode is not UNSET:
        overrides["follow_up_mode"] = agent.follow_up_mode
    return overrides


def _initial_inputs(events: tuple[EventParam, ...], resources: Resources) -> tuple[Input, ...]:
    inputs = to_inputs(events, resources, field="initial_events")
    for index, item in enumerate(inputs):
        if not isinstance(item, PromptInput):
            field = f"initial_events[{index}].type"
            raise InvalidField(f"{field}: a session can only begin with `user.message`.", field=field)
    return inputs


async def _model_of(
    resources: Resources,
    principal: Principal,
    agent: str | AgentParam | AgentOverridesParam,
    overrides: JsonObject,
) -> str:
    """The name of the model that a new session would run with. Raises: NotFound."""
    if "model" in overrides:
        return str(overrides["model"]["id"])
    if isinstance(agent, str):
        return await model_of_agent(resources, principal, agent)
    return await model_of_agent(resources, principal, agent.id, agent.version)


ROUTES = [
    create_session,
    list_sessions,
    get_session,
    update_session,
    archive_session,
    roll_back_session,
    delete_session,
]
