"""What each Claude model can do and accepts, as data.

Source: the vendor's model pages by way of pydantic-ai's and LiteLLM's model profiles, and the SDK's own
data, read 2026-11-30.
"""

import re
from dataclasses import dataclass
from typing import Literal

from providers.types import Capabilities

Thinking = Literal["adaptive", "budget", "none"]

FULL_EFFORTS = ("low", "medium", "high", "xhigh", "max")
FOUR_EFFORTS = ("low", "medium", "high", "max")


@dataclass(frozen=True, kw_only=True)
class ClaudeModel:
    """One row.

    `thinking`: `adaptive` takes an effort, `budget` a number of tokens, `none` gets no thinking parameter.
    `thinks_by_default`: it thinks when the parameter is left out.
    `off`: the `thinking.type` that turns thinking off; None where it cannot be turned off.
    `binds_thinking`: it refuses replayed thinking when anything before it has changed.
    `takes_schema`: its answer can be held to a JSON Schema.
    """

    context_window_tokens: int | None = 1_000_000
    max_output_tokens: int = 128_000
    thinking: Thinking = "adaptive"
    efforts: tuple[str, ...] = FULL_EFFORTS
    thinks_by_default: bool = True
    off: str | None = "disabled"
    accepts_forced_tool: bool = True
    binds_thinking: bool = False
    takes_schema: bool = True

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(
            tools=True,
            images=True,
            thinking=self.thinking != "none",
            output_schema=self.takes_schema,
            context_window_tokens=self.context_window_tokens,
            max_output_tokens=self.max_output_tokens,
        )


_ALWAYS_THINKS = ClaudeModel(off=None)
_ALWAYS_THINKS_UNFORCED = ClaudeModel(off=None, accepts_forced_tool=False)
_BOUND = ClaudeModel(off=None, accepts_forced_tool=False, binds_thinking=True)
_ADAPTIVE = ClaudeModel()
_ADAPTIVE_ON_REQUEST = ClaudeModel(thinks_by_default=False)
_FOUR_EFFORTS = ClaudeModel(thinks_by_default=False, efforts=FOUR_EFFORTS)
_BUDGET = ClaudeModel(
    context_window_tokens=200_000,
    max_output_tokens=64_000,
    thinking="budget",
    efforts=(),
    thinks_by_default=False,
)

_MODELS = {
    "claude-fable-5-2": _BOUND,
    "claude-mythos-5-2": _BOUND,
    "claude-fable-5-1": _BOUND,
    "claude-mythos-5-1": _ALWAYS_THINKS_UNFORCED,
    "claude-fable-5": _ALWAYS_THINKS,
    "claude-mythos-5": _ALWAYS_THINKS,
    "claude-opus-5-5": _BOUND,
    "claude-opus-5": _ADAPTIVE,
    "claude-sonnet-5-5": ClaudeModel(off="between_tools", accepts_forced_tool=False, binds_thinking=True),
    "claude-sonnet-5": _ADAPTIVE,
    "claude-haiku-5-5": ClaudeModel(binds_thinking=True),
    "claude-opus-4-8": _ADAPTIVE_ON_REQUEST,
    "claude-opus-4-7": _ADAPTIVE_ON_REQUEST,
    "claude-opus-4-6": _FOUR_EFFORTS,
    "claude-sonnet-4-6": _FOUR_EFFORTS,
    "claude-opus-4-5": _BUDGET,
    "claude-sonnet-4-5": _BUDGET,
    "claude-haiku-4-5": _BUDGET,
}

# Other servers speak this API too. 8,192 output tokens are accepted by every model of this vendor and by
# the compatible servers that check at all; the window is not known.
_UNKNOWN = ClaudeModel(
    context_window_tokens=None,
    max_output_tokens=8_192,
    thinking="none",
    efforts=(),
    thinks_by_default=False,
    takes_schema=False,
)

_DATE = re.compile(r"(-latest|[-@]\d{8})$", re.ASCII)


def claude_model(name: str) -> ClaudeModel:
    """The row for a model by its vendor name, with or without a date; a careful default for others."""
    return _MODELS.get(_DATE.sub("", name.removeprefix("anthropic/")), _UNKNOWN)
