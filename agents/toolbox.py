"""The tools of one agent, and what is decided about a call before it runs."""

from dataclasses import dataclass

from msgspec.structs import replace

from agents.assembly import CUT_CALL, Part
from agents.closing import finish_call
from agents.config import AgentConfig, BuiltinTool, ClientTool
from agents.hooks import ToolVerdict
from agents.types import ToolCall
from providers.cleaning import clean_text
from providers.types import ToolSpec, ToolUseBlock
from tools.errors import ToolError, UnknownTool
from tools.registry import ToolRegistry
from tools.types import Tool, text_result
from tools.validation import validate_arguments

MAX_QUOTED = 500


@dataclass(frozen=True)
class Offer:
    """One tool as it is offered to the model. `tool` None: the client runs it."""

    spec: ToolSpec
    tool: Tool | None
    requires_approval: bool = False


class Toolbox:
    """Tools by the names that the model uses, in the order of the agent's list."""

    def __init__(self, agent: AgentConfig, registry: ToolRegistry) -> None:
        self._offers: dict[str, Offer] = {}
        for entry in agent.tools:
            match entry:
                case ClientTool():
                    spec = ToolSpec(
                        name=entry.name, description=entry.description, input_schema=entry.input_schema
                    )
                    self._offers[entry.name] = Offer(spec, None)
                case BuiltinTool():
                    tool = registry.find(entry.name)
                    if tool is not None:  # a tool that this release lacks is not offered
                        self._offers[tool.name] = Offer(_spec(tool), tool, _requires_approval(entry, tool))
        self._is_sequential = agent.tool_execution == "sequential"

    def specs(self) -> tuple[ToolSpec, ...]:
        return tuple(offer.spec for offer in self._offers.values())

    def offers(self, name: str) -> bool:
        """True when the model may call a tool of this name."""
        return name in self._offers

    def find(self, name: str) -> Tool | None:
        """The tool that runs on our side under this name."""
        offer = self._offers.get(name)
        return None if offer is None else offer.tool

    def must_be_sequential(self, calls: tuple[ToolCall, ...]) -> bool:
        """True when the agent or one tool of the batch wants the calls one after the other."""
        if self._is_sequential:
            return True
        tools = (self.find(call.name) for call in calls)
        return any(tool is not None and tool.execution == "sequential" for tool in tools)

    def preflight(self, part: Part, *, position: int, index: int) -> ToolCall:
        """The call that `part` asks for: open, pending, or done with an error that the model can correct."""
        use = part.block
        assert isinstance(use, ToolUseBlock)
        call = ToolCall(
            id=part.event_id,
            tool_use_id=use.id,
            position=position,
            index=index,
            name=use.name,
            input=use.input,
            state="pending",
        )
        code, problem = self._problem(part, use)
        if problem is not None:
            result = text_result(problem, is_error=True, details={"code": code})
            return finish_call(call, result, "error")
        offer = self._offers[use.name]
        if offer.tool is None:
            return replace(call, state="open", kind="client")
        if offer.tool.asks_user:
            return replace(call, state="open", kind="question")
        return replace(call, state="open") if offer.requires_approval else call

    def judged(self, call: ToolCall, verdict: ToolVerdict | None) -> ToolCall:
        """The call after a hook has judged it."""
        if verdict is None:
            return call
        if verdict.action == "ask":
            return replace(call, state="open")
        if verdict.action == "change":
            try:
                validate_arguments(self._offers[call.name].spec.input_schema, verdict.input or {})
            except ToolError as error:
                text = f"The call was changed to what cannot be made: {error}"
                result = text_result(text, is_error=True, details={"code": error.code})
                return finish_call(call, result, "error")
            return replace(call, input=verdict.input or {})
        text = clean_text(verdict.reason) or "The call is not allowed."
        result = text_result(text, is_error=True, details={"code": "blocked"})
        return finish_call(call, replace(result, ends_turn=verdict.action == "end"), "denied")

    def _problem(self, part: Part, use: ToolUseBlock) -> tuple[str, str | None]:
        if part.is_cut:
            return "output_limit", CUT_CALL
        try:
            offer = self._offers.get(use.name)
            if offer is None:
                known = ", ".join(self._offers) or "none"
                raise UnknownTool(f"There is no tool {use.name[:80]!r}. Available: {known}.")
            if use.input_error is not None:
                raw = f" You sent: {use.input_raw[:MAX_QUOTED]}" if use.input_raw else ""
                return "invalid_arguments", f"{use.input_error}{raw}"
            validate_arguments(offer.spec.input_schema, use.input)
        except ToolError as error:
            return error.code, str(error)
        return "", None


def refusal_code(call: ToolCall) -> str | None:
    """Why `Toolbox.preflight` refused the call; None when it may be made."""
    if call.result is None or call.result.details is None:
        return None
    return str(call.result.details["code"])


def _requires_approval(entry: BuiltinTool, tool: Tool) -> bool:
    return tool.requires_approval if entry.requires_approval is None else entry.requires_approval


def _spec(tool: Tool) -> ToolSpec:
    return ToolSpec(
        name=tool.name,
        description=tool.description,
        input_schema=tool.input_schema,
        strict=tool.strict,
    )
