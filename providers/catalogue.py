"""The models that are known by name, for clients that choose one. Any other name of a vendor works too."""

from collections.abc import Collection, Mapping
from datetime import datetime
from decimal import Decimal

from msgspec import Struct
from msgspec.structs import replace

from providers.pricing import ModelPrice, listed_model, listed_price
from providers.types import Capabilities, JsonObject
from providers.vendors import VENDORS

# Source: the vendors' model lists by way of genai-prices 0.2.3 and the SDKs, read 2026-11-30. The order is
# that of the list: newest first.
_KNOWN: Mapping[str, tuple[str, ...]] = {
    "anthropic": (
        "claude-fable-5-2",
        "claude-mythos-5-2",
        "claude-opus-5-5",
        "claude-sonnet-5-5",
        "claude-haiku-5-5",
        "claude-opus-5",
        "claude-sonnet-5",
        "claude-opus-4-8",
        "claude-sonnet-4-6",
        "claude-haiku-4-5",
    ),
    "openai": (
        "gpt-6-astra",
        "gpt-6.1-sol",
        "gpt-6.1-terra",
        "gpt-6-sol",
        "gpt-6-luna",
        "gpt-5.6-sol",
        "gpt-5.6-terra",
        "gpt-5.6-luna",
        "gpt-5.5",
        "gpt-5.4",
        "gpt-5.4-mini",
        "gpt-5.4-nano",
        "gpt-4.1",
    ),
    "deepseek": ("deepseek-flash", "deepseek-v4-pro"),
    "rehearsal": ("demo", "fast", "no-tools", "small"),
}
_FREE = ModelPrice(input_usd=Decimal(0), output_usd=Decimal(0))
_VENDOR_OF = {model: vendor for vendor, models in _KNOWN.items() for model in models}


class ModelEntry(Struct, frozen=True, kw_only=True):
    """One known model. `id` is what an agent's `model` takes.

    `prices` are for short requests; None: not known. `is_configured`: the key that it needs is set here.
    """

    id: str
    vendor: str
    api: str
    display_name: str
    capabilities: Capabilities
    prices: ModelPrice | None
    is_configured: bool


def find_vendor_of(model: str) -> str | None:
    """The vendor of a model that is known by its bare name."""
    return _VENDOR_OF.get(model)


def list_models(
    at: datetime,
    *,
    configured: Collection[str],
    prices: Mapping[str, ModelPrice],
    capabilities: Mapping[str, JsonObject],
) -> tuple[ModelEntry, ...]:
    """All known models with the prices of the moment `at` (aware). Loads the price list.

    `configured` names the vendors that can be used here. `prices` and `capabilities` win over the tables; a
    model that only they name, as `vendor:model`, is listed too.
    """
    known = [(vendor, model) for vendor, models in _KNOWN.items() for model in models]
    added = [
        (vendor, model)
        for vendor, colon, model in (name.partition(":") for name in (*capabilities, *prices))
        if colon and vendor in VENDORS
    ]
    return tuple(
        ModelEntry(
            id=f"{vendor}:{model}",
            vendor=vendor,
            api=VENDORS[vendor].api,
            display_name=_display_name(vendor, model),
            capabilities=replace(
                VENDORS[vendor].capabilities(model), **capabilities.get(f"{vendor}:{model}", {})
            ),
            prices=prices.get(f"{vendor}:{model}") or prices.get(model) or _tabled_price(vendor, model, at),
            is_configured=vendor in configured,
        )
        for vendor, model in dict.fromkeys((*known, *added))
    )


def _tabled_price(vendor: str, model: str, at: datetime) -> ModelPrice | None:
    return _FREE if vendor == "rehearsal" else listed_price(vendor, model, at)


def _display_name(vendor: str, model: str) -> str:
    if vendor == "rehearsal":
        return f"Rehearsal ({model})"
    name = getattr(listed_model(vendor, model), "name", None)
    return name if isinstance(name, str) else model
