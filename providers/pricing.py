"""What a request cost, in exact decimals; None where it is not known, never 0 for lack of a price."""

from collections.abc import Mapping
from datetime import datetime
from decimal import Decimal
from functools import lru_cache
from importlib.metadata import version
from types import MappingProxyType
from typing import Any, NamedTuple

from msgspec import Struct

from providers.types import Usage

PER_TOKENS = 1_000_000

# Our vendors by the names that the price list has for them.
_LISTED_VENDORS = {
    "anthropic": "anthropic",
    "openai": "openai",
    "openai-chat": "openai",
    "deepseek": "deepseek",
    "openrouter": "openrouter",
}


class ModelPrice(Struct, frozen=True, kw_only=True):
    """US dollars per million tokens.

    None in `input_usd` or `output_usd`: not known. None in a cache price: as the kind that contains it
    (`cache_write_1h_usd` as `cache_write_usd`, the others as `input_usd`).
    """

    input_usd: Decimal | None = None
    output_usd: Decimal | None = None
    cache_read_usd: Decimal | None = None
    cache_write_usd: Decimal | None = None
    cache_write_1h_usd: Decimal | None = None


class Price(NamedTuple):
    """A cost, and where it comes from: `reported`, `override`, `rehearsal` or the price list's version."""

    cost_usd: Decimal | None
    source: str | None


UNKNOWN = Price(None, None)


def price(
    vendor: str,
    model: str,
    usage: Usage,
    at: datetime,
    *,
    overrides: Mapping[str, ModelPrice] = MappingProxyType({}),
) -> Price:
    """The cost of one request at the moment `at` (aware).

    A cost that the provider reported counts first, then `overrides` (by `vendor:model`, or by model), then
    the price list. Unknown is: a model that is in none of them, a usage without input or output counts, and a
    price that lacks a kind of token that was used. A cache count of None counts as 0.
    """
    if usage.cost_usd is not None:
        return Price(usage.cost_usd, "reported")
    override = overrides.get(f"{vendor}:{model}", overrides.get(model))
    if override is not None:
        cost = _cost(override, usage)
        return Price(cost, None if cost is None else "override")
    if vendor == "rehearsal":
        return Price(Decimal(0), "rehearsal")
    return _listed_cost(vendor, model, usage, at)


class TokenCounts(NamedTuple):
    """Tokens by what they are billed as; the kinds do not overlap."""

    input: int
    cache_read: int
    cache_write: int
    cache_write_1h: int
    output: int


def billed_counts(usage: Usage) -> TokenCounts | None:
    """The counts of `usage` taken apart, never negative. None when input or output is not known."""
    if usage.input_tokens is None or usage.output_tokens is None:
        return None
    cache_read = min(usage.cache_read_tokens or 0, usage.input_tokens)
    written = min(usage.cache_write_tokens or 0, usage.input_tokens - cache_read)
    written_1h = min(usage.cache_write_1h_tokens or 0, written)
    return TokenCounts(
        input=usage.input_tokens - cache_read - written,
        cache_read=cache_read,
        cache_write=written - written_1h,
        cache_write_1h=written_1h,
        output=usage.output_tokens,
    )


def _cost(prices: ModelPrice, usage: Usage) -> Decimal | None:
    counts = billed_counts(usage)
    if counts is None:
        return None
    cache_write_usd = _first_known(prices.cache_write_usd, prices.input_usd)
    billed = (
        (counts.input, prices.input_usd),
        (counts.cache_read, _first_known(prices.cache_read_usd, prices.input_usd)),
        (counts.cache_write, cache_write_usd),
        (counts.cache_write_1h, _first_known(prices.cache_write_1h_usd, cache_write_usd)),
        (counts.output, prices.output_usd),
    )
    total = Decimal(0)
    for tokens, price_usd in billed:
        if tokens and price_usd is None:
            return None
        total += tokens * (price_usd or 0)
    return total / PER_TOKENS


def _first_known(*prices: Decimal | None) -> Decimal | None:
    return next((price for price in prices if price is not None), None)


# -- the price list -------------------------------------------------------------------------------------


def load_price_list() -> None:
    """Imports the price list, which takes up to half a second: call it in a thread before the first price."""
    import genai_prices.data_snapshot

    genai_prices.data_snapshot.get_snapshot()


@lru_cache(maxsize=1)
def price_list_source() -> str:
    """The price list and its version, as the ledger names them."""
    return f"genai-prices {version('genai-prices')}"


def _listed_cost(vendor: str, model: str, usage: Usage, at: datetime) -> Price:
    listed = listed_model(vendor, model)
    counts = billed_counts(usage)
    if listed is None or counts is None:
        return UNKNOWN
    from genai_prices import Usage as ListUsage

    prices = listed.get_prices(at)
    if prices.input_mtok is None or prices.output_mtok is None:
        return UNKNOWN
    counted = ListUsage(
        input_tokens=counts.input + counts.cache_read + counts.cache_write + counts.cache_write_1h,
        cache_read_tokens=counts.cache_read,
        cache_write_tokens=counts.cache_write + counts.cache_write_1h,
        cache_write_1h_tokens=counts.cache_write_1h,
        output_tokens=counts.output,
    )
    try:
        return Price(prices.calc_price(counted)["total_price"], price_list_source())
    except ValueError:  # prices that the list itself cannot combine
        return UNKNOWN


def listed_model(vendor: str, model: str) -> Any:
    """The price list's entry (`name`, `context_window`, `get_prices`), or None."""
    listed_vendor = _LISTED_VENDORS.get(vendor)
    if listed_vendor is None:
        return None
    from genai_prices.data_snapshot import get_snapshot

    try:
        _, entry = get_snapshot().find_provider_model(model, None, listed_vendor, None)
    except LookupError:
        return None
    return entry


def listed_price(vendor: str, model: str, at: datetime) -> ModelPrice | None:
    """The list's prices for short requests; some models cost more beyond a number of input tokens."""
    listed = listed_model(vendor, model)
    if listed is None:
        return None
    prices = listed.get_prices(at)

    def usd(name: str) -> Decimal | None:
        value = getattr(prices, name, None)
        return getattr(value, "base", value)

    return ModelPrice(
        input_usd=usd("input_mtok"),
        output_usd=usd("output_mtok"),
        cache_read_usd=usd("cache_read_mtok"),
        cache_write_usd=usd("cache_write_mtok"),
        cache_write_1h_usd=usd("cache_write_1h_mtok"),
    )
