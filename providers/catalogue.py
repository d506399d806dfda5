"""The models that are known by name, for clients that choose one. Any other name of a vendor works too."""

from collections.abc import Mapping
from datetime import datetime
from decimal import Decimal

from msgspec import Struct

from providers.pricing import ModelPrice, listed_model, listed_price, price_list_source
from providers.types import Capabilities
from providers.vendors import Vendor

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
KNOWN_MODELS = tuple((vendor, model) for vendor, models in _KNOWN.items() for model in models)
_FREE = ModelPrice(input_usd=Decimal(0), output_usd=Decimal(0))
_VENDOR_OF = {model: vendor for vendor, model in KNOWN_MODELS}


class ModelEntry(Struct, frozen=True, kw_only=True):
    """One known model. `id` is what an agent's `model` takes.

    `prices` are for short requests; None: not known. `price_source`: `override`, `rehearsal`, or the price
    list with its version. `is_configured`: what the vendor needs is set here.
    """

    id: str
    vendor: str
    api: str
    display_name: str
    capabilities: Capabilities
    prices: ModelPrice | None
    price_source: str | None
    is_configured: bool


def find_vendor_of(model: str) -> str | None:
    """The vendor of a model that is known by its bare name."""
    return _VENDOR_OF.get(model)


def describe(
    vendor: Vendor,
    model: str,
    at: datetime,
    *,
    capabilities: Capabilities,
    override: ModelPrice | None,
    is_configured: bool,
) -> ModelEntry:
    """A model with its prices at the moment `at` (aware): `override`, else the price list, which it loads."""
    if override is not None:
        prices: ModelPrice | None = override
        source = "override"
    elif vendor.name == "rehearsal":
        prices, source = _FREE, "rehearsal"
    else:
        prices, source = listed_price(vendor.name, model, at), price_list_source()
    return ModelEntry(
        id=f"{vendor.name}:{model}",
        vendor=vendor.name,
        api=vendor.api,
        display_name=_display_name(vendor.name, model),
        capabilities=capabilities,
        prices=prices,
        price_source=None if prices is None else source,
        is_configured=is_configured,
    )


def _display_name(vendor: str, model: str) -> str:
    if vendor == "rehearsal":
        return f"Rehearsal ({model})"
    name = getattr(listed_model(vendor, model), "name", None)
    return name if isinstance(name, str) else model
