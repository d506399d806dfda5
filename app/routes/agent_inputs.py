"""The parts of an agent as clients send them, checked against what this server can run."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from agents.config import MAX_TOOLS, AgentTool, BuiltinTool, ClientTool, ModelChoice, ToolName
from app.errors import InvalidField, NotAvailable
from app.resources import Resources
from providers.errors import UnknownModel
from providers.think_effort import parse_effort
from providers.types import JsonObject, ThinkEffort
from tools.errors import SchemaRefused, UnknownTool
from tools.validation import check_schema

EffortName = Literal["off", "minimal", "low", "medium", "high", "xhigh", "max"]

_NOT_YET = Meta(description="Null or empty. Anything else is refused with `not_available`.")
Unsupported = Annotated[Any, _NOT_YET]
MetadataKey = Annotated[str, Meta(min_length=1, max_length=64)]
MetadataValue = Annotated[str, Meta(max_length=1024)]
MAX_METADATA = 64


class EffortParam(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    type: EffortName


class ModelParam(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A model and how it is asked. `effort`: 0 to 1, a name, or `{"type": name}`."""

    id: Annotated[str, Meta(min_length=1, max_length=256)]
    effort: ThinkEffort | EffortName | EffortParam | None = None
    speed: Literal["standard", "fast"] | None = None


class BuiltinToolParam(
    Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="builtin", tag_field="type"
):
    """A tool of this server, by its name in `GET /v1/tools`."""

    name: ToolName
    requires_approval: Annotated[
        bool | None, Meta(description="Whether its calls wait for your approval; null: as the tool says.")
    ] = None


class CustomToolParam(
    Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="custom", tag_field="type"
):
    """A tool that the client runs: the run waits for `user.custom_tool_result`."""

    name: ToolName
    description: Annotated[str, Meta(max_length=16_384)]
    input_schema: Annotated[JsonObject, Meta(description="JSON Schema of the arguments, of type `object`.")]


class AgentToolsetParam(Struct, frozen=True, kw_only=True, tag="agent_toolset_20260401", tag_field="type"):
    """Refused with `not_available`: list the tools by name instead."""


class McpToolsetParam(Struct, frozen=True, kw_only=True, tag="mcp_toolset", tag_field="type"):
    """Refused with `not_available`: tools of other servers cannot be used yet."""


ToolParam = BuiltinToolParam | CustomToolParam | AgentToolsetParam | McpToolsetParam
ToolParams = Annotated[list[ToolParam], Meta(max_length=MAX_TOOLS)]


def to_model(given: str | ModelParam, resources: Resources, *, field: str = "model") -> ModelChoice:
    """Raises: InvalidField, for a model that no provider answers for."""
    if isinstance(given, str):
        given = ModelParam(id=given)
    effort = given.effort.type if isinstance(given.effort, EffortParam) else given.effort
    try:
        resources.providers.check_model(given.id)
    except UnknownModel as error:
        raise InvalidField(f"{field}: {error}", field=field) from error
    return ModelChoice(
        id=given.id, effort=None if effort is None else parse_effort(effort), speed=given.speed
    )


def check_fallback_models(given: Sequence[str], resources: Resources) -> None:
    """Raises: InvalidField, for a model that no provider answers for."""
    for index, name in enumerate(given):
        try:
            resources.providers.check_model(name)
        except UnknownModel as error:
            field = f"fallback_models[{index}]"
            raise InvalidField(f"{field}: {error}", field=field) from error


def check_output_schema(schema: JsonObject, model: str, resources: Resources) -> None:
    """Raises: InvalidField, for what is no schema, and for a model that cannot be held to one."""
    try:
        check_schema(schema)
    except SchemaRefused as error:
        raise InvalidField(f"output_schema: {error}", field="output_schema") from error
    if not resources.providers.capabilities(model).output_schema:
        raise InvalidField(
            f"output_schema: the model {model} cannot be held to a schema; `GET /v1/models` tells which can.",
            field="output_schema",
        )


def to_tools(
    given: Sequence[ToolParam] | None, resources: Resources, *, field: str = "tools"
) -> tuple[AgentTool, ...]:
    """Raises: InvalidField, NotAvailable."""
    tools = tuple(_to_tool(tool, f"{field}[{index}]", resources) for index, tool in enumerate(given or ()))
    seen: set[str] = set()
    for index, tool in enumerate(tools):
        if tool.name in seen:
            name = f"{field}[{index}].name"
            raise InvalidField(f"{name}: there are two tools named {tool.name!r}.", field=name)
        seen.add(tool.name)
    return tools


def refuse_unsupported(**fields: Any) -> None:
    """Raises: NotAvailable for the first field that is neither unset, null nor empty."""
    for name, value in fields.items():
        if value not in (None, [], {}):
            raise NotAvailable(
                f"{name}: this server does not support it yet; leave it out, or send null.", field=name
            )


def _to_tool(given: ToolParam, field: str, resources: Resources) -> AgentTool:
    match given:
        case BuiltinToolParam():
            try:
                tool = resources.tools.get(given.name)
            except UnknownTool as error:
                raise InvalidField(f"{field}.name: {error}", field=f"{field}.name") from error
            if given.requires_approval and tool.asks_user:
                field = f"{field}.requires_approval"
                raise InvalidField(f"{field}: {tool.name!r} asks the user anyway.", field=field)
            return BuiltinTool(name=given.name, requires_approval=given.requires_approval)
        case CustomToolParam():
            try:
                check_schema(given.input_schema)
            except SchemaRefused as error:
                raise InvalidField(f"{field}.input_schema: {error}", field=f"{field}.input_schema") from error
            return ClientTool(name=given.name, description=given.description, input_schema=given.input_schema)
        case AgentToolsetParam():
            names = ", ".join(resources.tools.names())
            message = f'list tools by name, as {{"type": "builtin", "name": …}}. There are: {names}.'
            raise NotAvailable(f"{field}: {message}", field=field)
        case McpToolsetParam():
            raise NotAvailable(f"{field}: tools of MCP servers are not supported yet.", field=field)
