"""What installed packages add to this service: model vendors, sources of API keys, tools, hooks.

A package has an entry point in the group `armillary`, which names a function. The function is called once in
every api and every worker with a `PluginSite`, and says there what it brings.
"""

import logging
from importlib.metadata import EntryPoint, entry_points

from msgspec import Struct

from agents.hooks import Hooks
from providers.keys import KeySource
from providers.vendors import VENDORS, Vendor
from tools.builtin import builtin_registry
from tools.registry import ToolRegistry
from tools.types import Tool

GROUP = "armillary"

_log = logging.getLogger(__name__)


class PluginSite:
    """What one plug-in brings. It counts only if the plug-in's function returns."""

    def __init__(self) -> None:
        self.vendors: list[Vendor] = []
        self.tools: list[Tool] = []
        self.key_sources: dict[str, KeySource] = {}
        self.hooks: list[Hooks] = []

    def add_hooks(self, hooks: Hooks) -> None:
        """Called in each run, in the order of the plug-ins' names, then of these calls."""
        self.hooks.append(hooks)

    def add_vendor(self, vendor: Vendor) -> None:
        """Models of it are named `<vendor.name>:<model>`."""
        self.vendors.append(vendor)

    def add_tool(self, tool: Tool) -> None:
        """Agents have it as a built-in one."""
        self.tools.append(tool)

    def add_key_source(self, name: str, source: KeySource) -> None:
        """A setting for an API key refers to it as `plugin:<name>`."""
        self.key_sources[name] = source


class Plugins(Struct, frozen=True, kw_only=True):
    """All there is, that of this service included.

    `loaded` names the plug-ins that brought something; `failures` says of the others why they were left out.
    """

    vendors: dict[str, Vendor]
    tools: ToolRegistry
    key_sources: dict[str, KeySource]
    hooks: list[Hooks]
    loaded: list[str]
    failures: dict[str, str]


def load_plugins() -> Plugins:
    """Loads every installed plug-in, in the order of their names.

    One that fails is logged by name and left out whole; the others and the service are as without it.
    """
    plugins = Plugins(
        vendors=dict(VENDORS), tools=builtin_registry(), key_sources={}, hooks=[], loaded=[], failures={}
    )
    for point in sorted(entry_points(group=GROUP), key=lambda point: point.name):
        try:
            _add(plugins, _visit(point))
        except Exception as error:  # noqa: BLE001 - a stranger's code must not keep the service from starting
            _log.exception("plug-in %s is left out", point.name)
            plugins.failures[point.name] = f"{type(error).__name__}: {error}"
        else:
            plugins.loaded.append(point.name)
    return plugins


def _visit(point: EntryPoint) -> PluginSite:
    site = PluginSite()
    point.load()(site)
    return site


def _add(plugins: Plugins, site: PluginSite) -> None:
    """All of it or nothing.

    Raises: ValueError, SchemaRefused, for a name that is taken and a tool that cannot be.
    """
    vendors = {vendor.name: vendor for vendor in site.vendors}
    for taken in (*(vendors.keys() & plugins.vendors), *(site.key_sources.keys() & plugins.key_sources)):
        raise ValueError(f"the name {taken!r} is taken")
    ToolRegistry((*plugins.tools, *site.tools))
    for tool in site.tools:
        plugins.tools.register(tool)
    plugins.vendors.update(vendors)
    plugins.key_sources.update(site.key_sources)
    plugins.hooks.extend(site.hooks)
