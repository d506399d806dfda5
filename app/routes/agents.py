"""`/v1/agents`: stored, versioned configurations."""

from datetime import datetime
from functools import partial
from typing import Annotated, Any, Literal, get_args

import msgspec
from litestar import get, post
from litestar.di import NamedDependency
from litestar.params import FromPath, JSONBody, QueryParameter
from msgspec import UNSET, Meta, Struct, UnsetType

from agents.config import (
    LONGEST_WAIT_S,
    MAX_FALLBACK_MODELS,
    AgentConfig,
    AgentTool,
    ModelChoice,
    ModelName,
    Name,
    QueueMode,
)
from app.auth import Principal
from app.errors import InvalidField
from app.http_json import ApiRequest, invalid_field
from app.idempotency import once
from app.pagination import DEFAULT_LIMIT, Cursor, IncludeArchived, Limit, Page, PageQuery, make_page
from app.resources import Resources
from app.routes.agent_inputs import (
    MAX_METADATA,
    MetadataKey,
    MetadataValue,
    ModelParam,
    ToolParams,
    Unsupported,
    check_fallback_models,
    check_output_schema,
    refuse_unsupported,
    to_model,
    to_tools,
)
from app.routes.override_inputs import LONGEST_RUN_S, MOST_TURNS
from app.routes.positions import position_page, read_position
from db import agents
from db.agents import Agent
from db.ids import parse_id, public
from providers.think_effort import nearest
from providers.types import JsonObject

Description = Annotated[str, Meta(max_length=4096)]
System = Annotated[str, Meta(max_length=1_000_000, description="The system prompt.")]
Metadata = Annotated[dict[MetadataKey, MetadataValue], Meta(max_length=MAX_METADATA)]
MetadataPatch = Annotated[dict[MetadataKey, MetadataValue | None], Meta(max_length=2 * MAX_METADATA)]
MaxTurns = Annotated[int, Meta(ge=1, le=MOST_TURNS, description="Model requests of one run at most.")]
TimeLimit = Annotated[float, Meta(gt=0, le=LONGEST_RUN_S, description="Working time of one run.")]
WaitTimeout = Annotated[
    float,
    Meta(gt=0, le=LONGEST_WAIT_S, description="How long a run waits for you; null: for ever."),
]
MaxOutput = Annotated[int, Meta(ge=1, le=1_000_000, description="Tokens of one answer at most.")]
FallbackModels = Annotated[
    list[ModelName],
    Meta(max_length=MAX_FALLBACK_MODELS, description="Asked in order when the model before failed for good."),
]
OutputSchema = Annotated[
    JsonObject, Meta(description="JSON Schema of type `object` that the text of each answer fits.")
]
CompactAt = Annotated[
    int,
    Meta(
        ge=1_000,
        le=10_000_000,
        description="How many tokens a request may have before older messages are replaced by a memory;"
        " null: half of the model's window.",
    ),
]
Execution = Literal["parallel", "sequential"]
VersionQuery = Annotated[
    int | None, QueryParameter(name="version", ge=1, le=2**31 - 1, description="Default: the newest.")
]


class AgentCreate(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A new agent. `model` may be left out where the server has a default."""

    name: Name
    model: str | ModelParam | UnsetType = UNSET
    description: Description | None = None
    system: System | None = None
    tools: ToolParams | None = None
    metadata: Metadata | None = None
    max_turns: MaxTurns | None = None
    time_limit_s: TimeLimit | None = None
    wait_timeout_s: WaitTimeout | None = None
    max_output_tokens: MaxOutput | None = None
    tool_execution: Execution | None = None
    steering_mode: QueueMode | None = None
    follow_up_mode: QueueMode | None = None
    fallback_models: FallbackModels | None = None
    output_schema: OutputSchema | None = None
    compact_at_tokens: CompactAt | None = None
    extra_body: JsonObject | None = None
    skills: Unsupported = None
    mcp_servers: Unsupported = None
    multiagent: Unsupported = None
    execution_identity: Unsupported = None


class AgentUpdate(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What changes. Lists are replaced, `metadata` is patched (null removes a key), null clears a field."""

    version: (
        Annotated[int, Meta(ge=1, description="Refused when the agent is at another version.")] | None
    ) = None
    name: Name | UnsetType = UNSET
    model: str | ModelParam | UnsetType = UNSET
    description: Description | UnsetType | None = UNSET
    system: System | UnsetType | None = UNSET
    tools: ToolParams | UnsetType | None = UNSET
    metadata: MetadataPatch | UnsetType | None = UNSET
    max_turns: MaxTurns | UnsetType | None = UNSET
    time_limit_s: TimeLimit | UnsetType | None = UNSET
    wait_timeout_s: WaitTimeout | UnsetType | None = UNSET
    max_output_tokens: MaxOutput | UnsetType | None = UNSET
    tool_execution: Execution | UnsetType | None = UNSET
    steering_mode: QueueMode | UnsetType | None = UNSET
    follow_up_mode: QueueMode | UnsetType | None = UNSET
    fallback_models: FallbackModels | UnsetType | None = UNSET
    output_schema: OutputSchema | UnsetType | None = UNSET
    compact_at_tokens: CompactAt | UnsetType | None = UNSET
    extra_body: JsonObject | UnsetType | None = UNSET
    skills: Unsupported = None
    mcp_servers: Unsupported = None
    multiagent: Unsupported = None
    execution_identity: Unsupported = None


EffortLevel = Literal["low", "medium", "high", "xhigh", "max"]


class EffortView(Struct, frozen=True, kw_only=True):
    """The name that is nearest to `think_effort`."""

    type: EffortLevel


class ModelView(Struct, frozen=True, kw_only=True):
    """`think_effort` is exact, 0 to 1; `effort` names it for clients of hosted agent APIs."""

    id: str
    effort: EffortView | None
    think_effort: float | None
    speed: Literal["standard", "fast"] | None


class ServiceAccount(Struct, frozen=True, kw_only=True):
    type: Literal["service_account"] = "service_account"


class AgentView(Struct, frozen=True, kw_only=True):
    """An agent in one of its versions. `updated_at` is when this version was made."""

    id: str
    type: Literal["agent"] = "agent"
    version: int
    name: str
    description: str | None
    model: ModelView
    system: str | None
    tools: tuple[AgentTool, ...]
    skills: list[JsonObject]
    mcp_servers: list[JsonObject]
    metadata: JsonObject
    multiagent: None = None
    execution_identity: ServiceAccount
    max_turns: int
    time_limit_s: float
    wait_timeout_s: float | None
    max_output_tokens: int | None
    tool_execution: Execution
    steering_mode: QueueMode
    follow_up_mode: QueueMode
    fallback_models: tuple[str, ...]
    output_schema: JsonObject | None
    compact_at_tokens: int | None
    extra_body: JsonObject
    created_at: datetime
    updated_at: datetime
    archived_at: datetime | None


def view_model(model: ModelChoice) -> ModelView:
    """A model as clients read it."""
    return ModelView(
        id=model.id, effort=_effort_view(model.effort), think_effort=model.effort, speed=model.speed
    )


def view_agent(agent: Agent) -> AgentView:
    """An agent as clients read it."""
    config = agent.config
    return AgentView(
        id=public("agent", agent.id),
        version=agent.version,
        name=config.name,
        description=config.description,
        model=view_model(config.model),
        system=config.system,
        tools=config.tools,
        skills=[],
        mcp_servers=[],
        metadata=config.metadata,
        execution_identity=ServiceAccount(),
        max_turns=config.max_turns,
        time_limit_s=config.time_limit_s,
        wait_timeout_s=config.wait_timeout_s,
        max_output_tokens=config.max_output_tokens,
        tool_execution=config.tool_execution,
        steering_mode=config.steering_mode,
        follow_up_mode=config.follow_up_mode,
        fallback_models=config.fallback_models,
        output_schema=config.output_schema,
        compact_at_tokens=config.compact_at_tokens,
        extra_body=config.extra_body,
        created_at=agent.created_at,
        updated_at=agent.updated_at,
        archived_at=agent.archived_at,
    )


@post("/v1/agents", tags=["Agents"])
async def create_agent(
    request: ApiRequest,
    data: JSONBody[AgentCreate],
    principal: NamedDependency[Principal],
    resources: NamedDependency[Resources],
) -> AgentView:
    """Makes an agent, at version 1."""
    config = _new_config(data, resources)
    async with resources.database.transaction(principal.tenant_id) as tx:

        async def make() -> JsonObject:
            return {"agent_id": public("agent", await agents.create_agent(tx, config))}

        made = await once(tx, request, make)
        return view_agent(await agents.get_agent(tx, parse_id("agent", made["agent_id"]), version=1))


@get("/v1/agents", tags=["Agents"])
async def list_agents(
    principal: NamedDependency[Principal],
    resources: NamedDependency[Resources],
    page_query: NamedDependency[PageQuery],
    include_archived: IncludeArchived = False,
) -> Page[AgentView]:
    """Lists agents in their newest versions, newest agent first."""
    created = page_query.created
    async with resources.database.transaction(principal.tenant_id) as tx:
        found = await agents.list_agents(
            tx,
            limit=page_query.fetch,
            before=page_query.before,
            after_at=created.gt,
            from_at=created.gte,
            before_at=created.lt,
            until_at=created.lte,
            include_archived=include_archived,
        )
    return make_page(found, page_query, view_agent, lambda agent: (agent.created_at, agent.id))


@get("/v1/agents/{agent_id:str}", tags=["Agents"])
async def get_agent(
    agent_id: FromPath[str],
    principal: NamedDependency[Principal],
    resources: NamedDependency[Resources],
    version: VersionQuery = None,
) -> AgentView:
    """Reads an agent in one version."""
    async with resources.database.transaction(principal.tenant_id) as tx:
        return view_agent(await agents.get_agent(tx, parse_id("agent", agent_id), version=version))


@post("/v1/agents/{agent_id:str}", tags=["Agents"], status_code=200)
async def update_agent(
    request: ApiRequest,
    agent_id: FromPath[str],
    data: JSONBody[AgentUpdate],
    principal: NamedDependency[Principal],
    resources: NamedDependency[Resources],
) -> AgentView:
    """Adds a version with the changes. Sessions that exist stay at theirs."""
    uuid = parse_id("agent", agent_id)
    change = partial(_changed, given=data, resources=resources)
    async with resources.database.transaction(principal.tenant_id) as tx:

        async def make() -> JsonObject:
            return {"version": await agents.update_agent(tx, uuid, change, expected_version=data.version)}

        made = await once(tx, request, make)
        return view_agent(await agents.get_agent(tx, uuid, version=made["version"]))


@get("/v1/agents/{agent_id:str}/versions", tags=["Agents"])
async def list_versions(
    agent_id: FromPath[str],
    principal: NamedDependency[Principal],
    resources: NamedDependency[Resources],
    limit: Limit = DEFAULT_LIMIT,
    page: Cursor = None,
) -> Page[AgentView]:
    """Lists the versions of an agent, newest first."""
    uuid = parse_id("agent", agent_id)
    async with resources.database.transaction(principal.tenant_id) as tx:
        found = await agents.list_versions(tx, uuid, limit=limit + 1, below=read_position(page))
    return position_page(found, limit=limit, view=view_agent, place=lambda agent: agent.version)


@post("/v1/agents/{agent_id:str}/archive", tags=["Agents"], status_code=200)
async def archive_agent(
    request: ApiRequest,
    agent_id: FromPath[str],
    principal: NamedDependency[Principal],
    resources: NamedDependency[Resources],
) -> AgentView:
    """Takes an agent out of use: no more sessions of it, while those that exist go on."""
    uuid = parse_id("agent", agent_id)
    async with resources.database.transaction(principal.tenant_id) as tx:

        async def make() -> JsonObject:
            await agents.archive_agent(tx, uuid)
            return {"agent_id": agent_id}

        await once(tx, request, make)
        return view_agent(await agents.get_agent(tx, uuid))


ROUTES = [create_agent, list_agents, get_agent, update_agent, list_versions, archive_agent]


def _new_config(given: AgentCreate, resources: Resources) -> AgentConfig:
    """Raises: InvalidField, NotAvailable."""
    _refuse(given)
    model = resources.settings.default_model if given.model is UNSET else given.model
    fields = _plain_fields(given) | {
        "model": to_model(model, resources),
        "tools": to_tools(given.tools, resources),
        "metadata": given.metadata,
    }
    return _config(fields, resources)


def _changed(config: AgentConfig, *, given: AgentUpdate, resources: Resources) -> AgentConfig:
    """Raises: InvalidField, NotAvailable."""
    _refuse(given)
    fields = msgspec.structs.asdict(config) | _plain_fields(given)
    if given.model is not UNSET:
        fields["model"] = to_model(given.model, resources)
    if given.tools is not UNSET:
        fields["tools"] = to_tools(given.tools, resources)
    if given.metadata is not UNSET:
        patched = (config.metadata | given.metadata) if given.metadata is not None else {}
        fields["metadata"] = {name: value for name, value in patched.items() if value is not None}
    return _config(fields, resources)


def _plain_fields(given: AgentCreate | AgentUpdate) -> dict[str, Any]:
    """The fields that are stored as they are sent; null and "" stand for their defaults."""
    names = (
        "name",
        "description",
        "system",
        "max_turns",
        "time_limit_s",
        "wait_timeout_s",
        "max_output_tokens",
        "tool_execution",
        "steering_mode",
        "follow_up_mode",
        "fallback_models",
        "output_schema",
        "compact_at_tokens",
        "extra_body",
    )
    return {name: value for name in names if (value := getattr(given, name)) is not UNSET}


def _config(given: dict[str, Any], resources: Resources) -> AgentConfig:
    """The configuration of these fields; null and "" stand for the defaults. Raises: InvalidField."""
    settings = resources.settings
    fields = {
        "max_turns": min(settings.run_max_turns, MOST_TURNS),
        "time_limit_s": min(settings.run_timeout_s, LONGEST_RUN_S),
    } | {name: value for name, value in given.items() if value not in (None, "")}
    if len(fields.get("metadata", {})) > MAX_METADATA:
        raise InvalidField(f"metadata: more than {MAX_METADATA} entries.", field="metadata")
    try:
        config = msgspec.convert(fields, AgentConfig)
    except msgspec.ValidationError as error:
        raise invalid_field(error) from error
    check_fallback_models(config.fallback_models, resources)
    if config.output_schema is not None:
        check_output_schema(config.output_schema, config.model.id, resources)
    return config


def _refuse(given: AgentCreate | AgentUpdate) -> None:
    identity = given.execution_identity
    refuse_unsupported(
        skills=given.skills,
        mcp_servers=given.mcp_servers,
        multiagent=given.multiagent,
        execution_identity=None if identity == {"type": "service_account"} else identity,
    )


def _effort_view(effort: float | None) -> EffortView | None:
    if not effort:
        return None
    return msgspec.convert({"type": nearest(effort, get_args(EffortLevel))}, EffortView)
