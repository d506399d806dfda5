import pytest

from providers.think_effort import LEVELS, budget_tokens, effort_name, nearest, parse_effort


@pytest.mark.parametrize(
    ("value", "effort"),
    [("off", 0), ("none", 0), (" High ", 0.75), ("max", 1), ("0.3", 0.3), (0, 0), (1, 1), (0.42, 0.42)],
)
def test_names_and_numbers_are_one_scale(value: str | float, effort: float) -> None:
    assert parse_effort(value) == effort


@pytest.mark.parametrize("value", ["", "hard", "-0.1", "1.1", "nan", "inf", -1, 2, float("nan"), True])
def test_anything_else_is_refused_with_what_may_be_written(value: str | float) -> None:
    with pytest.raises(ValueError, match="from 0 to 1 or one of off, minimal, low, medium, high, xhigh, max"):
        parse_effort(value)


def test_each_level_is_named_by_its_own_number() -> None:
    assert [effort_name(number) for number in LEVELS.values()] == list(LEVELS)


@pytest.mark.parametrize(
    ("effort", "offered", "level"),
    [
        (0, ["none", "low", "high"], "none"),
        (0, ["high", "low"], "low"),
        (0.01, ["none", "low", "high"], "low"),
        (0.5, ["low", "high"], "high"),
        (0.49, ["low", "high"], "low"),
        (1, ["low", "medium", "high"], "high"),
        (1, ["low", "max", "xhigh"], "max"),
        (0.9, ["off"], "off"),
        (0.9, ["medium"], "medium"),
    ],
)
def test_the_nearest_level_that_an_api_offers_is_taken(effort: float, offered: list[str], level: str) -> None:
    assert nearest(effort, offered) == level


@pytest.mark.parametrize("offered", [[], ["low", "extreme"]])
def test_levels_that_are_not_known_are_refused(offered: list[str]) -> None:
    with pytest.raises(ValueError, match="not levels"):
        nearest(0.5, offered)


@pytest.mark.parametrize(
    ("effort", "max_output_tokens", "tokens"),
    [(0, 64_000, None), (1, 64_000, 32_000), (0.5, 64_000, 16_512), (1, 8_000, 7_999), (0.1, 1_024, None)],
)
def test_a_budget_leaves_room_for_the_answer(
    effort: float, max_output_tokens: int, tokens: int | None
) -> None:
    budget = budget_tokens(
        effort, least_tokens=1_024, most_tokens=32_000, max_output_tokens=max_output_tokens
    )
    assert budget == tokens


def test_budgets_can_be_set_per_level() -> None:
    def budget(effort: float) -> int | None:
        return budget_tokens(
            effort,
            least_tokens=1_024,
            most_tokens=32_000,
            max_output_tokens=64_000,
            budgets={"low": 2_000, "high": 10_000, "max": 99_000},
        )

    assert [budget(effort) for effort in (0, 0.2, 0.75, 1)] == [None, 2_000, 10_000, 32_000]
