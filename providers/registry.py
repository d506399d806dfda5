"""From the name of a model to the provider that speaks to it."""

import asyncio
import logging
import math
import re
import threading
import time
from collections.abc import Callable, Mapping
from datetime import datetime
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from providers.catalogue import KNOWN_MODELS, ModelEntry, describe, find_vendor_of
from providers.errors import ProviderError, UnknownModel
from providers.keys import FreshKey, KeySource, file_key
from providers.pricing import ModelPrice, Price, load_price_list, price
from providers.rotation import KeyRotation
from providers.time_limit import TimeLimit
from providers.types import Capabilities, JsonObject, ModelLister, Provider, Usage
from providers.vendors import VENDORS, Vendor

DISCOVERY_S = 3.0
DISCOVERED_FOR_S = 30.0

_log = logging.getLogger(__name__)
_NAME = re.compile(r"[^\s\x00-\x1f\x7f]{1,200}")


class VendorSettings(Struct, frozen=True, kw_only=True):
    """Access to one vendor: keys to rotate over, and where its API is (None: the vendor's own address).

    A key may be a source that gives one, or text that names a source: `file:PATH`, or `plugin:NAME` for one
    of `ProviderSettings.key_sources`. The time-outs win over those for all vendors. `options` are further
    arguments of the vendor's adapter.
    """

    api_keys: tuple[str | KeySource, ...] = ()
    base_url: str | None = None
    first_event_timeout_s: float | None = None
    idle_timeout_s: float | None = None
    total_timeout_s: float | None = None
    options: Mapping[str, Any] = {}

    def __repr__(self) -> str:
        return f"VendorSettings({len(self.api_keys)} keys)"


class ProviderSettings(Struct, frozen=True, kw_only=True):
    """Plain data, by the names of `providers.vendors` (`openai-chat`, with a hyphen).

    The time-outs: to the first event of an answer, between two of them, and for all of one (None: the run's
    own limit only). A vendor's row or settings may have others. `prices` win over the price list, by
    `vendor:model` or the model alone; `capabilities` are the fields of `Capabilities` that win over what the
    tables and servers say, by `vendor:model`.
    """

    vendors: dict[str, VendorSettings] = {}
    prices: dict[str, ModelPrice] = {}
    capabilities: dict[str, JsonObject] = {}
    key_sources: dict[str, KeySource] = {}
    first_event_timeout_s: float = 120.0
    idle_timeout_s: float = 120.0
    total_timeout_s: float | None = None


class ResolvedModel(NamedTuple):
    """`model` is the vendor's own name of it; `vendor:model` names it for us."""

    vendor: str
    api: str
    model: str
    provider: Provider
    capabilities: Capabilities

    @property
    def name(self) -> str:
        return f"{self.vendor}:{self.model}"


class Registry:
    """All providers of a process, each made when it is first needed and shared by all requests.

    Making one imports the vendor's SDK, which takes seconds: `preload` in a thread comes before. `vendors`
    are all there are, by name.
    """

    def __init__(
        self, settings: ProviderSettings, *, vendors: Mapping[str, Vendor] = MappingProxyType(VENDORS)
    ) -> None:
        self._settings = settings
        self._vendors = vendors
        self._providers: dict[str, Provider] = {}
        self._listers: dict[str, ModelLister] = {}
        self._found: dict[str, tuple[str, ...]] = {}
        self._discovered_at_s = -math.inf
        self._lock = threading.Lock()  # `preload` runs beside the event loop

    def check_model(self, name: str) -> str:
        """`vendor:model` for a name that can be resolved. Imports no SDK and does no I/O.

        Raises: UnknownModel with a text that says what to write or which setting to set.
        """
        vendor, model = self._find(name)
        return f"{vendor.name}:{model}"

    def resolve(self, name: str) -> ResolvedModel:
        """The provider of a model given as `vendor:model`, or by a bare name that the catalogue has.

        Raises: UnknownModel, as `check_model`.
        """
        vendor, model = self._find(name)
        provider = self._provider(vendor)
        return ResolvedModel(
            vendor=vendor.name,
            api=provider.api,
            model=model,
            provider=provider,
            capabilities=self.capabilities(name),
        )

    def capabilities(self, name: str) -> Capabilities:
        """What a model can do, from the settings, the tables, and what its server has said so far.

        Imports no SDK and does no I/O.

        Raises: UnknownModel, as `check_model`.
        """
        return self._capabilities(*self._find(name))

    def _capabilities(self, vendor: Vendor, model: str) -> Capabilities:
        made = self._providers.get(vendor.name)  # it may have asked its server
        known = vendor.capabilities(model) if made is None else made.capabilities(model)
        return replace(known, **self._settings.capabilities.get(f"{vendor.name}:{model}", {}))

    def price(self, vendor: str, model: str, usage: Usage, at: datetime) -> Price:
        """The cost of a request, with the prices of the settings.

        The price list knows only the vendors' own addresses: a name that is sent elsewhere is another model.
        """
        if vendor == "openai-chat" and self._access(self._vendors[vendor]).base_url is not None:
            vendor_of_list = "custom"
        else:
            vendor_of_list = vendor
        override = self._price_override(vendor, model)
        return price(vendor_of_list, model, usage, at, overrides={model: override} if override else {})

    def models(self, at: datetime) -> tuple[ModelEntry, ...]:
        """The catalogue, with what is configured here and what servers were found to have.

        Loads the price list: the first call takes a while.
        """
        added = [
            tuple(name.split(":", 1))
            for name in (*self._settings.capabilities, *self._settings.prices)
            if name.partition(":")[0] in self._vendors and ":" in name
        ]
        found = [(vendor, model) for vendor, models in self._found.items() for model in models]
        return tuple(
            describe(
                self._vendors[vendor],
                model,
                at,
                capabilities=self._capabilities(self._vendors[vendor], model),
                override=self._price_override(vendor, model),
                is_configured=self._problem(self._vendors[vendor]) is None,
            )
            for vendor, model in dict.fromkeys((*KNOWN_MODELS, *found, *added))
        )

    def _price_override(self, vendor: str, model: str) -> ModelPrice | None:
        return self._settings.prices.get(f"{vendor}:{model}", self._settings.prices.get(model))

    async def discover(self) -> None:
        """Asks the servers at addresses of the operator's own which models they have. Never fails.

        A vendor that `tells_models` is asked too, for what they can do; the catalogue has none of them.
        Takes seconds at most, and nothing when it was done a moment ago.
        """
        now_s = time.monotonic()
        if now_s - self._discovered_at_s < DISCOVERED_FOR_S:
            return
        self._discovered_at_s = now_s
        askable = [
            vendor
            for vendor in self._vendors.values()
            if self._problem(vendor) is None and (vendor.tells_models or self._has_own_address(vendor))
        ]
        await asyncio.gather(*(self._discover(vendor) for vendor in askable))

    def _has_own_address(self, vendor: Vendor) -> bool:
        return self._access(vendor).base_url is not None

    async def _discover(self, vendor: Vendor) -> None:
        await asyncio.to_thread(self._provider, vendor)  # it may import an SDK
        lister = self._listers.get(vendor.name)
        if lister is None:
            return
        try:
            async with asyncio.timeout(DISCOVERY_S):
                listed = await lister.list_models()
        except (ProviderError, TimeoutError) as error:
            _log.warning("%s did not tell its models: %s", vendor.title, error or type(error).__name__)
            return
        if self._has_own_address(vendor):
            self._found[vendor.name] = tuple(entry.model for entry in listed if _NAME.fullmatch(entry.model))

    def preload(self) -> None:
        """Makes every provider that is configured and loads the price list. Blocks: call it in a thread."""
        for vendor in self._vendors.values():
            if self._problem(vendor) is None:
                self._provider(vendor)
        load_price_list()

    async def aclose(self) -> None:
        """Closes all providers. Safe to call twice."""
        with self._lock:
            providers, self._providers = list(self._providers.values()), {}
        for provider in providers:
            await provider.aclose()

    def _find(self, name: str) -> tuple[Vendor, str]:
        head, colon, model = name.partition(":")
        if not colon:
            found = find_vendor_of(name)
            if found is None:
                raise UnknownModel(
                    f"unknown model {name[:200]!r}: write `vendor:model`, such as "
                    f"`anthropic:{name[:80] or 'NAME'}`, with a vendor of {', '.join(self._vendors)}"
                )
            head, model = found, name
        vendor = self._vendors.get(head)
        if vendor is None:
            raise UnknownModel(
                f"unknown vendor {head[:80]!r} in model {name[:200]!r}: write `vendor:model` "
                f"with a vendor of {', '.join(self._vendors)}"
            )
        if not _NAME.fullmatch(model):
            raise UnknownModel(f"model {name[:200]!r} has no proper name behind `{head}:`")
        problem = self._problem(vendor)
        if problem is not None:
            raise UnknownModel(f"model {name[:200]!r} cannot be used: {problem}")
        return vendor, model

    def _access(self, vendor: Vendor) -> VendorSettings:
        own = self._settings.vendors.get(vendor.name, VendorSettings())
        if vendor.shares_keys_of and not own.api_keys and own.base_url is None:
            return self._settings.vendors.get(vendor.shares_keys_of, own)
        return own

    def _problem(self, vendor: Vendor) -> str | None:
        """Why a vendor cannot be used here, or None."""
        access = self._access(vendor)
        if vendor.needs_base_url and access.base_url is None:
            return f"{vendor.title} has no address; set {vendor.base_url_setting}"
        if vendor.needs_nothing or access.api_keys:
            return None
        if not vendor.needs_key and access.base_url is not None:
            return None
        shared = self._vendors[vendor.shares_keys_of] if vendor.shares_keys_of else None
        names = [vendor.key_setting, vendor.fallback_env, shared.key_setting if shared else None]
        settings = " or ".join(name for name in names if name)
        return f"{vendor.title} has no key; set {settings}" + (
            "" if vendor.needs_key else f", or {vendor.base_url_setting} for a server that needs none"
        )

    def _provider(self, vendor: Vendor) -> Provider:
        with self._lock:
            if vendor.name not in self._providers:
                self._providers[vendor.name] = self._make(vendor)
            return self._providers[vendor.name]

    def _make(self, vendor: Vendor) -> Provider:
        access = self._access(vendor)
        general = self._settings
        first_s = access.first_event_timeout_s or vendor.first_event_timeout_s
        make = partial(
            vendor.make,
            base_url=access.base_url or vendor.default_base_url,
            first_event_timeout_s=first_s or general.first_event_timeout_s,
            idle_timeout_s=access.idle_timeout_s or general.idle_timeout_s,
            **access.options,
        )
        providers = [self._with_key(vendor, make, key) for key in access.api_keys or ("",)]
        if isinstance(providers[0], ModelLister):
            self._listers[vendor.name] = providers[0]
        provider = providers[0] if len(providers) == 1 else KeyRotation(providers)
        total_s = access.total_timeout_s or general.total_timeout_s
        return provider if total_s is None else TimeLimit(provider, total_s)

    def _with_key(self, vendor: Vendor, make: Callable[..., Provider], key: str | KeySource) -> Provider:
        if isinstance(key, str):
            scheme, colon, rest = key.partition(":")
            if not colon or scheme not in ("file", "plugin"):
                return make(api_key=key)
            source = file_key(rest) if scheme == "file" else self._settings.key_sources.get(rest)
            if source is None:
                raise UnknownModel(f"{vendor.title}: no plug-in gives the key {rest!r}")
        else:
            source = key
        return FreshKey(
            api=vendor.api,
            source=source,
            make=lambda value: make(api_key=value),
            capabilities=vendor.capabilities,
        )
