from datetime import UTC, datetime
from decimal import Decimal

import pytest

from providers.pricing import UNKNOWN, ModelPrice, Price, billed_counts, listed_price, price
from providers.types import Usage

AT = datetime(2026, 11, 30, 12, tzinfo=UTC)
PRICES = ModelPrice(
    input_usd=Decimal(2), cache_read_usd=Decimal("0.2"), cache_write_usd=Decimal("2.5"), output_usd=Decimal(8)
)
# The same request as one API reports it, with cache tokens beside the input, and as another, with them in it.
WRITTEN = Usage(input_tokens=2572, cache_read_tokens=2048, cache_write_tokens=512, output_tokens=40)
READ_ONLY = Usage(input_tokens=2572, cache_read_tokens=2048, output_tokens=40, reasoning_tokens=25)


@pytest.mark.parametrize(("usage", "cost"), [(WRITTEN, "0.0020336"), (READ_ONLY, "0.0017776")])
def test_a_cost_is_exact_and_counts_each_token_once(usage: Usage, cost: str) -> None:
    """A-01."""
    assert price("anthropic", "m", usage, AT, overrides={"m": PRICES}) == Price(Decimal(cost), "override")


def test_counts_that_contradict_each_other_are_never_negative() -> None:
    """A-01."""
    counts = billed_counts(
        Usage(
            input_tokens=10,
            cache_read_tokens=12,
            cache_write_tokens=5,
            cache_write_1h_tokens=9,
            output_tokens=1,
        )
    )
    assert counts == (0, 10, 0, 0, 1)


def test_a_reported_cost_wins_over_an_override_and_that_over_the_list() -> None:
    reported = Usage(input_tokens=1, output_tokens=1, cost_usd=Decimal("0.5"))
    overrides = {"claude-opus-5-5": PRICES}
    assert price("anthropic", "claude-opus-5-5", reported, AT, overrides=overrides) == Price(
        Decimal("0.5"), "reported"
    )
    assert price("anthropic", "claude-opus-5-5", WRITTEN, AT, overrides=overrides).source == "override"
    listed = price("anthropic", "claude-opus-5-5", WRITTEN, AT)
    assert listed.cost_usd == Decimal("0.0038176")
    assert listed.source is not None
    assert listed.source.startswith("genai-prices ")


def test_an_override_of_one_vendor_is_not_one_of_another() -> None:
    overrides = {"openai-chat:local": PRICES}
    assert price("openai-chat", "local", READ_ONLY, AT, overrides=overrides).source == "override"
    assert price("litellm", "local", READ_ONLY, AT, overrides=overrides) == UNKNOWN


def test_a_long_request_is_priced_by_its_tier() -> None:
    short = price("openai", "gpt-6-sol", Usage(input_tokens=272_000, output_tokens=0), AT)
    long = price("openai", "gpt-6-sol", Usage(input_tokens=300_000, output_tokens=0), AT)
    assert short.cost_usd == Decimal("0.544")
    assert long.cost_usd == Decimal("1.2")


def test_one_hour_cache_writes_have_their_own_price() -> None:
    usage = Usage(input_tokens=100, cache_write_tokens=100, cache_write_1h_tokens=100, output_tokens=0)
    assert price("anthropic", "claude-opus-5-5", usage, AT).cost_usd == Decimal("0.0008")
    assert price("anthropic", "m", usage, AT, overrides={"m": PRICES}).cost_usd == Decimal("0.00025")


@pytest.mark.parametrize(
    ("vendor", "model"),
    [
        ("anthropic", "m-unknown"),
        ("openai", "claude-opus-5-5"),
        ("ollama", "llama"),
        ("openai", "text-embedding-3-small"),
    ],
)
def test_a_model_without_a_price_has_an_unknown_cost(vendor: str, model: str) -> None:
    """A-04."""
    assert price(vendor, model, WRITTEN, AT) == UNKNOWN


@pytest.mark.parametrize("usage", [Usage(), Usage(input_tokens=5), Usage(output_tokens=5)])
@pytest.mark.parametrize("overrides", [{}, {"claude-opus-5-5": PRICES}])
def test_a_usage_without_its_counts_has_an_unknown_cost(
    usage: Usage, overrides: dict[str, ModelPrice]
) -> None:
    assert price("anthropic", "claude-opus-5-5", usage, AT, overrides=overrides) == UNKNOWN


def test_a_partial_price_is_an_unknown_cost_when_the_missing_part_is_used() -> None:
    """A-04."""
    input_only = {"m": ModelPrice(input_usd=Decimal(2))}
    assert price("openai", "m", READ_ONLY, AT, overrides=input_only) == UNKNOWN


def test_an_explicit_price_of_zero_is_zero() -> None:
    """A-04."""
    free = {"m": ModelPrice(input_usd=Decimal(0), output_usd=Decimal(0))}
    assert price("openai-chat", "m", WRITTEN, AT, overrides=free) == Price(Decimal(0), "override")


def test_a_rehearsal_costs_nothing_and_says_so() -> None:
    assert price("rehearsal", "demo", Usage(), AT) == Price(Decimal(0), "rehearsal")


def test_listed_prices_are_per_million_tokens() -> None:
    assert listed_price("openai", "gpt-6-sol", AT) == ModelPrice(
        input_usd=Decimal(2),
        output_usd=Decimal(10),
        cache_read_usd=Decimal("0.2"),
        cache_write_usd=Decimal("2.5"),
    )
    assert listed_price("openai", "m-unknown", AT) is None
