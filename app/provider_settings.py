"""From the settings of a process to those of its providers; without the web framework, for workers too."""

from typing import Any, get_args

import msgspec
from msgspec.structs import replace

from app.plugins import Plugins
from app.settings import Settings, Timeouts, Vendor
from providers.pricing import ModelPrice
from providers.registry import ProviderSettings, Registry, VendorSettings


def provider_registry(settings: Settings, plugins: Plugins) -> Registry:
    """The providers of this service and of its plug-ins, for api and worker alike."""
    own = replace(provider_settings(settings), key_sources=plugins.key_sources)
    return Registry(own, vendors=plugins.vendors)


def provider_settings(settings: Settings) -> ProviderSettings:
    """What the providers need to know."""
    return ProviderSettings(
        vendors={vendor.replace("_", "-"): _vendor(settings, vendor) for vendor in get_args(Vendor)},
        prices={
            name: ModelPrice(**msgspec.structs.asdict(price))
            for name, price in settings.price_overrides.items()
        },
        capabilities={
            name: {key: value for key, value in msgspec.structs.asdict(facts).items() if value is not None}
            for name, facts in settings.capability_overrides.items()
        },
        first_event_timeout_s=settings.provider_first_event_s,
        idle_timeout_s=settings.provider_idle_s,
        total_timeout_s=settings.provider_total_s,
    )


def _vendor(settings: Settings, vendor: Vendor) -> VendorSettings:
    own = settings.provider_timeouts.get(vendor, Timeouts())
    options: dict[str, Any] = {}
    if vendor == "ollama":
        options = {
            "context_tokens": settings.ollama_context_tokens,
            "keep_alive": settings.ollama_keep_alive,
        }
    elif vendor == "openrouter":
        origin = {
            "HTTP-Referer": settings.openrouter_app_url,
            "X-OpenRouter-Title": settings.openrouter_app_title,
        }
        options = {"headers": {name: value for name, value in origin.items() if value is not None}}
    return VendorSettings(
        api_keys=settings.api_keys(vendor),
        base_url=settings.base_url(vendor),
        first_event_timeout_s=own.first_event_s,
        idle_timeout_s=own.idle_s,
        total_timeout_s=own.total_s,
        options=options,
    )
