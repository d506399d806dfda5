"""What a prompt changes of its agent for its own run."""

from typing import Annotated, Literal

from msgspec import Meta, Struct

from agents.config import RunOverrides, ToolName
from app.errors import InvalidField
from app.resources import Resources
from app.routes.agent_inputs import EffortName, EffortParam, ModelParam, ToolParams, to_model, to_tools
from providers.think_effort import parse_effort
from providers.types import JsonObject, ThinkEffort, ToolChoice

MOST_TURNS = 1000
LONGEST_RUN_S = 86_400.0


class ToolChoiceParam(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Whether the model may (`auto`), must (`any`), must not (`none`) call a tool, or must call `name`.

    `any` and `tool` hold for the run's first request. `parallel` false: one call at a time.
    """

    type: Literal["auto", "any", "none", "tool"] = "auto"
    name: ToolName | None = None
    parallel: bool = True


class Overridable(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Fields of a prompt that hold for its run alone; null: as the agent and the session say."""

    model: str | ModelParam | None = None
    think_effort: ThinkEffort | EffortName | EffortParam | None = None
    tools: ToolParams | None = None
    tool_choice: ToolChoiceParam | None = None
    max_turns: Annotated[int, Meta(ge=1, le=MOST_TURNS)] | None = None
    time_limit_s: Annotated[float, Meta(gt=0, le=LONGEST_RUN_S)] | None = None
    extra_body: JsonObject | None = None


def to_overrides(given: Overridable, resources: Resources, *, field: str = "") -> RunOverrides:
    """`field` is what stands before the names in errors. Raises: InvalidField, NotAvailable."""
    effort = given.think_effort.type if isinstance(given.think_effort, EffortParam) else given.think_effort
    return RunOverrides(
        model=None if given.model is None else to_model(given.model, resources, field=f"{field}model"),
        think_effort=None if effort is None else parse_effort(effort),
        tools=None if given.tools is None else to_tools(given.tools, resources, field=f"{field}tools"),
        tool_choice=None if given.tool_choice is None else _tool_choice(given.tool_choice, field),
        max_turns=given.max_turns,
        time_limit_s=given.time_limit_s,
        extra_body=given.extra_body,
    )


def _tool_choice(given: ToolChoiceParam, field: str) -> ToolChoice:
    name = f"{field}tool_choice.name"
    if (given.type == "tool") != (given.name is not None):
        raise InvalidField(f"{name}: goes with the type `tool`, and only with it.", field=name)
    return ToolChoice(type=given.type, name=given.name, parallel=given.parallel)
