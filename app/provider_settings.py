"""From the settings of a process to those of its providers; without the web framework, for workers too."""

from typing import get_args

import msgspec

from app.settings import Settings, Vendor
from providers.pricing import ModelPrice
from providers.registry import ProviderSettings, VendorSettings


def provider_settings(settings: Settings) -> ProviderSettings:
    """What the providers need to know, for api and worker alike."""
    return ProviderSettings(
        vendors={
            vendor.replace("_", "-"): VendorSettings(
                api_keys=settings.api_keys(vendor), base_url=settings.base_url(vendor)
            )
            for vendor in get_args(Vendor)
        },
        prices={
            name: ModelPrice(**msgspec.structs.asdict(price))
            for name, price in settings.price_overrides.items()
        },
    )
