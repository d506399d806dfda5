"""How hard a model thinks: one scale from 0 (off) to 1 (the most that the model offers), and its names."""

import math
from collections.abc import Mapping, Sequence

from providers.types import ThinkEffort

LEVELS: Mapping[str, float] = {
    "off": 0.0,
    "minimal": 0.1,
    "low": 0.25,
    "medium": 0.5,
    "high": 0.75,
    "xhigh": 0.9,
    "max": 1.0,
}
OFF_NAMES = frozenset({"off", "none"})  # what APIs call a model that does not think


def parse_effort(value: str | float) -> ThinkEffort:
    """A number from 0 to 1, as such, as text, or by the name of a level.

    Raises: ValueError saying what may be written.
    """
    if isinstance(value, str):
        name = value.strip().lower()
        if name in OFF_NAMES:
            return 0.0
        if name in LEVELS:
            return LEVELS[name]
        try:
            value = float(name)
        except ValueError:
            value = math.nan
    if isinstance(value, bool) or not 0 <= value <= 1:
        raise ValueError(f"think_effort must be a number from 0 to 1 or one of {', '.join(LEVELS)}")
    return float(value)


def effort_name(effort: float) -> str:
    """The name of the level nearest to `effort`; of two as near, the stronger."""
    return nearest(effort, tuple(LEVELS))


def nearest(effort: float, offered: Sequence[str]) -> str:
    """The level of an API that comes nearest to `effort`; of two as near, the stronger.

    `offered` are names of `LEVELS`, or `none` for off, in any order, at least one. 0 is off where that is
    offered and else the weakest; above 0 the model thinks, if it can.
    Raises: ValueError for no level, or one that is not known.
    """
    positions = {name: 0.0 if name in OFF_NAMES else LEVELS.get(name, math.nan) for name in offered}
    if not positions or any(math.isnan(position) for position in positions.values()):
        raise ValueError(f"not levels of effort: {list(offered)}")
    if effort <= 0:
        return min(positions, key=lambda name: positions[name])
    thinking = {name: position for name, position in positions.items() if position > 0} or positions
    return min(thinking, key=lambda name: (abs(thinking[name] - effort), -thinking[name]))


def budget_tokens(
    effort: float,
    *,
    least_tokens: int,
    most_tokens: int,
    max_output_tokens: int,
    budgets: Mapping[str, int] | None = None,
) -> int | None:
    """Tokens to think with, for APIs that take a number. None: do not think.

    Grows evenly with `effort` from `least_tokens` to `most_tokens`; `budgets` gives the number for a level by
    name instead, and the level nearest to `effort` counts. Always less than `max_output_tokens`, which the
    answer shares. None also when the output limit leaves no room for the least.
    """
    if effort <= 0 or max_output_tokens <= least_tokens:
        return None
    if budgets:
        wanted = budgets[nearest(effort, tuple(budgets))]
    else:
        wanted = least_tokens + round((most_tokens - least_tokens) * min(effort, 1.0))
    return max(least_tokens, min(wanted, most_tokens, max_output_tokens - 1))
