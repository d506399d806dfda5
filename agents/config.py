"""What an agent is made of, as stored in its versions, and what a session or a run may override."""

from typing import Annotated, Literal

from msgspec import Meta, Struct
from msgspec.structs import replace

from providers.types import JsonObject, ThinkEffort, ToolChoice

Name = Annotated[str, Meta(min_length=1, max_length=256)]
ToolName = Annotated[str, Meta(min_length=1, max_length=128, pattern=r"^[^\s\x00-\x1f]+$")]
MAX_TOOLS = 256
ModelName = Annotated[str, Meta(min_length=1, max_length=256)]
MAX_FALLBACK_MODELS = 4
LONGEST_WAIT_S = 31_536_000  # a year


class ModelChoice(Struct, frozen=True, kw_only=True):
    """Which model answers. `id` is `vendor:model` or a name of the catalogue; `effort` from 0 to 1."""

    id: Annotated[str, Meta(min_length=1, max_length=256)]
    effort: ThinkEffort | None = None
    speed: Literal["standard", "fast"] | None = None


class BuiltinTool(Struct, frozen=True, kw_only=True, omit_defaults=True, tag="builtin", tag_field="type"):
    """A tool of this server, by its name in `GET /v1/tools`.

    `requires_approval`: whether its calls wait until the client has allowed them; null: as the tool says.
    """

    name: ToolName
    requires_approval: bool | None = None


class ClientTool(Struct, frozen=True, kw_only=True, tag="custom", tag_field="type"):
    """A tool that the client runs: the run waits for `user.custom_tool_result`."""

    name: ToolName
    description: Annotated[str, Meta(max_length=16_384)]
    input_schema: JsonObject


AgentTool = BuiltinTool | ClientTool
QueueMode = Literal["one_at_a_time", "all"]


class QueueModes(Struct, frozen=True, kw_only=True):
    """How many pending batches are taken up together, of steering prompts and of those that follow up."""

    steering: QueueMode = "one_at_a_time"
    follow_up: QueueMode = "one_at_a_time"

    def of(self, delivery: str) -> QueueMode:
        """The mode for a `delivery`. Interrupting prompts go together: each of them is to be next."""
        modes: dict[str, QueueMode] = {"interrupt": "all", "steer": self.steering}
        return modes.get(delivery, self.follow_up)


class AgentConfig(Struct, frozen=True, kw_only=True):
    """One version of an agent.

    `max_turns` bounds the model requests of one run; `time_limit_s` bounds a run's working time.
    `wait_timeout_s` bounds each time that a run waits for the client; null: it waits for ever.
    `tool_execution` `sequential` runs the calls of a turn one after the other. The queue modes say whether
    pending prompts are taken up `one_at_a_time` (with those of the same POST) or `all` together.
    `fallback_models` are asked, in order, when the model before has failed for good. `output_schema` is a
    JSON Schema of type object that the text of each answer fits. `compact_at_tokens`: how long a request may
    get before older messages are replaced by a memory; null: half of the model's window, when it is known.
    """

    name: Name
    model: ModelChoice
    description: Annotated[str, Meta(max_length=4096)] | None = None
    system: Annotated[str, Meta(max_length=1_000_000)] | None = None
    tools: Annotated[tuple[AgentTool, ...], Meta(max_length=MAX_TOOLS)] = ()
    metadata: JsonObject = {}
    max_turns: Annotated[int, Meta(ge=1, le=1000)] = 20
    time_limit_s: Annotated[float, Meta(gt=0, le=86_400)] = 3600.0
    wait_timeout_s: Annotated[float, Meta(gt=0, le=LONGEST_WAIT_S)] | None = None
    max_output_tokens: Annotated[int, Meta(ge=1, le=1_000_000)] | None = None
    tool_execution: Literal["parallel", "sequential"] = "parallel"
    steering_mode: QueueMode = "one_at_a_time"
    follow_up_mode: QueueMode = "one_at_a_time"
    fallback_models: Annotated[tuple[ModelName, ...], Meta(max_length=MAX_FALLBACK_MODELS)] = ()
    output_schema: JsonObject | None = None
    compact_at_tokens: Annotated[int, Meta(ge=1_000, le=10_000_000)] | None = None
    tool_choice: ToolChoice = ToolChoice()
    extra_body: JsonObject = {}

    @property
    def queue_modes(self) -> QueueModes:
        """Both modes as what takes prompts up reads them."""
        return QueueModes(steering=self.steering_mode, follow_up=self.follow_up_mode)


class RunOverrides(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a prompt changes of its agent for its own run. None: nothing."""

    model: ModelChoice | None = None
    think_effort: ThinkEffort | None = None
    tools: tuple[AgentTool, ...] | None = None
    tool_choice: ToolChoice | None = None
    max_turns: int | None = None
    time_limit_s: float | None = None
    extra_body: JsonObject | None = None

    def applied_to(self, agent: AgentConfig) -> AgentConfig:
        """The configuration that the run works with."""
        names = ("tools", "tool_choice", "max_turns", "time_limit_s", "extra_body")
        changes = {name: value for name in names if (value := getattr(self, name)) is not None}
        model = self.model or agent.model
        if self.think_effort is not None:
            model = replace(model, effort=self.think_effort)
        return replace(agent, model=model, **changes)
