"""What the OpenAI models can do, as data: limits, reasoning efforts, quirks of each family.

Source: the tables of pydantic-ai 2.68 and litellm 1.110, the openai SDK 3.57 (read 2026-11-30). A model
that is in no row gets what its name suggests and no limits.
"""

import re
from typing import Literal

from msgspec import Struct

from providers.think_effort import nearest
from providers.types import Capabilities

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]

_CLASSIC: tuple[Effort, ...] = ("low", "medium", "high")
_WITH_MINIMAL: tuple[Effort, ...] = ("minimal", "low", "medium", "high")
_SWITCHABLE: tuple[Effort, ...] = ("none", "low", "medium", "high")
_SWITCHABLE_XHIGH: tuple[Effort, ...] = ("none", "low", "medium", "high", "xhigh")
_SWITCHABLE_MAX: tuple[Effort, ...] = ("none", "low", "medium", "high", "xhigh", "max")
_ALWAYS_MAX: tuple[Effort, ...] = ("low", "medium", "high", "xhigh", "max")
_PRO: tuple[Effort, ...] = ("medium", "high", "xhigh")
_DEEPSEEK: tuple[Effort, ...] = ("none", "low", "high", "max")


class ModelFamily(Struct, frozen=True, kw_only=True):
    """A row: the models whose whole name matches `pattern`.

    `efforts` are accepted by the Responses API, weakest first; empty: not a reasoning model.
    `chat_tools_need_effort_none`: over Chat Completions, tools are refused unless the effort is `none`.
    """

    pattern: str
    efforts: tuple[Effort, ...] = ()
    images: bool = True
    tools: bool = True
    context_window_tokens: int | None = None
    max_output_tokens: int | None = None
    chat_tools_need_effort_none: bool = False
    output_schema: bool = True

    @property
    def is_reasoning(self) -> bool:
        return bool(self.efforts)

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(
            tools=self.tools,
            images=self.images,
            thinking=self.is_reasoning,
            output_schema=self.output_schema,
            context_window_tokens=self.context_window_tokens,
            max_output_tokens=self.max_output_tokens,
        )


def nearest_effort(levels: tuple[Effort, ...], think_effort: float | None) -> str | None:
    """The level nearest to `think_effort`; None leaves the choice to the API, or there are no levels."""
    return nearest(think_effort, levels) if think_effort is not None and levels else None


_DATED = r"(-\d{4}-\d{2}-\d{2})?"

FAMILIES: tuple[ModelFamily, ...] = (
    ModelFamily(
        pattern=rf"gpt-(6-astra|6\.1-sol){_DATED}",
        efforts=_ALWAYS_MAX,
        context_window_tokens=1_050_000,
        max_output_tokens=128_000,
    ),
    ModelFamily(
        pattern=rf"gpt-(6-(sol|luna)|6\.1-terra|5\.6-(sol|terra|luna)){_DATED}",
        efforts=_SWITCHABLE_MAX,
        context_window_tokens=1_050_000,
        max_output_tokens=128_000,
        chat_tools_need_effort_none=True,
    ),
    ModelFamily(
        pattern=rf"gpt-5\.[2-5]-pro{_DATED}",
        efforts=_PRO,
        context_window_tokens=400_000,
        max_output_tokens=128_000,
    ),
    ModelFamily(pattern=r"gpt-5\.\d-chat-latest", efforts=("medium",), max_output_tokens=16_384),
    ModelFamily(
        pattern=rf"gpt-5\.5{_DATED}",
        efforts=_SWITCHABLE_XHIGH,
        context_window_tokens=1_000_000,
        max_output_tokens=128_000,
        chat_tools_need_effort_none=True,
    ),
    ModelFamily(
        pattern=rf"gpt-5\.4-(mini|nano){_DATED}",
        efforts=_SWITCHABLE_XHIGH,
        context_window_tokens=400_000,
        max_output_tokens=128_000,
        chat_tools_need_effort_none=True,
    ),
    ModelFamily(
        pattern=rf"gpt-5\.4{_DATED}",
        efforts=_SWITCHABLE_XHIGH,
        context_window_tokens=1_050_000,
        max_output_tokens=128_000,
        chat_tools_need_effort_none=True,
    ),
    ModelFamily(
        pattern=rf"gpt-5\.[23](-codex)?{_DATED}",
        efforts=_SWITCHABLE_XHIGH,
        context_window_tokens=400_000,
        max_output_tokens=128_000,
    ),
    ModelFamily(
        pattern=rf"gpt-5\.1(-codex(-mini|-max)?)?{_DATED}",
        efforts=_SWITCHABLE,
        context_window_tokens=400_000,
        max_output_tokens=128_000,
    ),
    ModelFamily(
        pattern=rf"gpt-5(-mini|-nano)?{_DATED}",
        efforts=_WITH_MINIMAL,
        context_window_tokens=400_000,
        max_output_tokens=128_000,
    ),
    ModelFamily(
        pattern=r"(o1|o3|o4-mini|o3-mini)(-pro)?(-\d{4}-\d{2}-\d{2})?",
        efforts=_CLASSIC,
        context_window_tokens=200_000,
        max_output_tokens=100_000,
    ),
    ModelFamily(
        pattern=rf"gpt-4\.1(-mini|-nano)?{_DATED}",
        context_window_tokens=1_000_000,
        max_output_tokens=32_768,
    ),
    ModelFamily(pattern=rf"gpt-4o(-mini)?{_DATED}", context_window_tokens=128_000, max_output_tokens=16_384),
    ModelFamily(pattern=r"gpt-oss-.*", efforts=_CLASSIC, images=False, context_window_tokens=131_072),
    ModelFamily(
        pattern=r"deepseek-flash.*",
        efforts=_DEEPSEEK,
        context_window_tokens=1_000_000,
        max_output_tokens=393_216,
    ),
    ModelFamily(
        pattern=r"deepseek-v4-pro.*",
        efforts=_DEEPSEEK,
        images=False,
        context_window_tokens=1_000_000,
        max_output_tokens=393_216,
    ),
    # Guesses for what came out after this table: the efforts that every reasoning family accepts.
    ModelFamily(pattern=r"gpt-([5-9]|\d\d).*|o\d+(-.*)?", efforts=_CLASSIC),
)
_UNKNOWN = ModelFamily(pattern=".*", images=False, output_schema=False)
_COMPILED = tuple((re.compile(family.pattern), family) for family in FAMILIES)


def model_family(model: str) -> ModelFamily:
    """The row of `model`. Paths before the name and tags behind it, as proxies have them, are ignored."""
    name = model.rpartition("/")[2].removeprefix("ft:").partition(":")[0].lower()
    return next((family for pattern, family in _COMPILED if pattern.fullmatch(name)), _UNKNOWN)
