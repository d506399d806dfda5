"""Token counts of the OpenAI-shaped APIs in our one meaning. Both formats count cached tokens as input."""

import math
from decimal import Decimal, InvalidOperation
from typing import Any, Literal

from providers.types import JsonObject, Usage


def responses_usage(raw: JsonObject) -> Usage:
    """From the `usage` of a response."""
    return _usage(
        raw,
        raw.get("input_tokens"),
        raw.get("output_tokens"),
        "input_tokens_details",
        "output_tokens_details",
    )


def chat_usage(raw: JsonObject, *, cost: Literal["no", "exact", "positive"]) -> Usage:
    """From the `usage` of a chunk. `cost`: whether the endpoint states what it bills, 0 included or not."""
    billed = None if cost == "no" else _cost(raw)
    return _usage(
        raw,
        raw.get("prompt_tokens"),
        raw.get("completion_tokens"),
        "prompt_tokens_details",
        "completion_tokens_details",
        cost_usd=None if cost == "positive" and not billed else billed,
    )


def _usage(
    raw: JsonObject,
    input_tokens: Any,
    output_tokens: Any,
    input_details: str,
    output_details: str,
    *,
    cost_usd: Decimal | None = None,
) -> Usage:
    into, out = _object(raw.get(input_details)), _object(raw.get(output_details))
    total_in, total_out = _count(input_tokens), _count(output_tokens)
    cached = into.get("cached_tokens")
    if cached is None:
        cached = raw.get("prompt_cache_hit_tokens")  # DeepSeek
    return Usage(
        input_tokens=total_in,
        cache_read_tokens=_part(cached, total_in),
        cache_write_tokens=_part(into.get("cache_write_tokens"), total_in),
        output_tokens=total_out,
        reasoning_tokens=_part(out.get("reasoning_tokens"), total_out),
        cost_usd=cost_usd,
        raw=raw,
    )


def _object(value: Any) -> JsonObject:
    return value if isinstance(value, dict) else {}


def _count(value: Any) -> int | None:
    """Counts are never negative, whatever a server subtracts."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return max(int(value), 0)


def _part(value: Any, whole: int | None) -> int | None:
    """A count that is part of `whole` and so not larger."""
    count = _count(value)
    return count if count is None or whole is None else min(count, whole)


def _cost(raw: JsonObject) -> Decimal | None:
    """What OpenRouter bills; with the customer's own key that is only the fee beside the upstream cost."""
    cost = _decimal(raw.get("cost"))
    if cost is None or not raw.get("is_byok"):
        return cost
    upstream = _decimal(_object(raw.get("cost_details")).get("upstream_inference_cost"))
    return None if upstream is None else cost + upstream


def _decimal(value: Any) -> Decimal | None:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        number = Decimal(str(value))
    except InvalidOperation:
        return None
    return number if number.is_finite() else None
