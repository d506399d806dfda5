"""Plug-ins: installed packages that bring vendors, keys and tools. Each test installs its own on the path."""

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent

import pytest

from agents.hooks import HookChain, HookContext
from app.plugins import load_plugins
from app.provider_settings import provider_registry
from app.settings import Settings
from providers.errors import UnknownModel
from providers.types import Message, MessageEnd, ProviderRequest, TextBlock, TextDelta
from providers.vendors import VENDORS

PAGE = Path(__file__).parents[2] / "docs" / "providers.md"


class Site:
    """A folder of packages that is on the path."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def install(self, name: str, source: str, function: str = "install") -> None:
        """A module of that name whose function is the plug-in."""
        (self._folder / f"{name}.py").write_text(dedent(source))
        metadata = self._folder / f"{name}-1.0.dist-info"
        metadata.mkdir()
        (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        (metadata / "entry_points.txt").write_text(f"[armillary]\n{name} = {name}:{function}\n")


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    before = set(sys.modules)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield Site(tmp_path)
    for name in set(sys.modules) - before:
        if getattr(sys.modules[name], "__file__", None) and str(tmp_path) in str(sys.modules[name].__file__):
            del sys.modules[name]


async def test_the_provider_of_the_handbook_works_once_it_is_installed(site: Site) -> None:
    [source] = re.findall(r"```python\n(.*?class Echo.*?)```", PAGE.read_text(), re.DOTALL)
    adapter = source.partition("\nif __name__")[0].strip().splitlines()
    assert len(adapter) < 40
    site.install("echo_plugin", source)
    plugins = load_plugins()
    assert (plugins.loaded, plugins.failures) == (["echo_plugin"], {})
    registry = provider_registry(Settings(), plugins)
    assert registry.check_model("echo:any") == "echo:any"
    hello = Message(role="user", blocks=(TextBlock(text="hello there"),))
    stream = registry.resolve("echo:any").provider.stream(ProviderRequest(model="any", messages=(hello,)))
    events = [event async for event in stream]
    assert "".join(event.text for event in events if isinstance(event, TextDelta)) == "hello there "
    assert isinstance(events[-1], MessageEnd)
    assert not registry.capabilities("echo:any").tools
    await registry.aclose()


async def test_a_tool_and_a_key_of_a_plug_in_are_used_by_their_names(site: Site) -> None:
    site.install(
        "vault",
        """
        from providers.keys import ApiKey
        from tools.schema import tool

        @tool()
        async def shout(text: str) -> str:
            \"\"\"Says it loudly.\"\"\"
            return text.upper()

        async def key() -> ApiKey:
            return ApiKey(value="from-the-vault", good_for_s=60)

        def install(site):
            site.add_tool(shout)
            site.add_key_source("vault", key)
        """,
    )
    plugins = load_plugins()
    assert "shout" in plugins.tools
    assert "calculate" in plugins.tools
    registry = provider_registry(Settings(anthropic_api_key="plugin:vault"), plugins)
    assert registry.resolve("anthropic:claude-opus-5-5").provider.api == "anthropic_messages"
    unknown = provider_registry(Settings(openai_api_key="plugin:elsewhere"), plugins)
    with pytest.raises(UnknownModel, match="elsewhere"):
        unknown.resolve("openai:gpt-6-sol")
    await registry.aclose()
    await unknown.aclose()


@pytest.mark.parametrize(
    ("source", "told"),
    [
        ("raise RuntimeError('no licence')", "no licence"),
        ("import not_there_at_all", "not_there_at_all"),
        ("x = 1", "install"),
        ("def install(site):\n    raise SystemError('half way')", "half way"),
        (
            "from providers.vendors import VENDORS\n"
            "def install(site):\n    site.add_vendor(VENDORS['anthropic'])",
            "'anthropic' is taken",
        ),
        (
            "from tools.builtin import builtin_registry\n"
            "def install(site):\n    site.add_tool(builtin_registry().get('calculate'))",
            "calculate",
        ),
    ],
)
def test_a_plug_in_that_fails_is_named_and_the_others_are_loaded(site: Site, source: str, told: str) -> None:
    site.install("a_broken_one", source)
    site.install(
        "b_good",
        "async def key(): ...\ndef install(site):\n    site.add_key_source('b', key)",
    )
    plugins = load_plugins()
    assert (plugins.loaded, list(plugins.failures)) == (["b_good"], ["a_broken_one"])
    assert told in plugins.failures["a_broken_one"]
    assert plugins.key_sources.keys() == {"b"}
    assert plugins.vendors == VENDORS


def test_a_plug_in_that_fails_half_way_leaves_nothing_behind(site: Site) -> None:
    site.install(
        "half",
        """
        from dataclasses import replace
        from tools.builtin import builtin_registry

        async def key(): ...

        def install(site):
            calculate = builtin_registry().get("calculate")
            site.add_key_source("k", key)
            site.add_tool(replace(calculate, name="mine"))
            site.add_tool(calculate)
        """,
    )
    plugins = load_plugins()
    assert "half" in plugins.failures
    assert "mine" not in plugins.tools
    assert plugins.key_sources == {}


async def test_hooks_of_plug_ins_are_called_in_the_order_of_their_names(site: Site) -> None:
    source = """
    from agents.hooks import Hooks

    class Adds(Hooks):
        async def prepare_request(self, context, request):
            from msgspec.structs import replace
            return replace(request, system=request.system + "{word}")

    def install(site):
        site.add_hooks(Adds())
    """
    site.install("b_plugin", source.replace("{word}", "b"))
    site.install("a_plugin", source.replace("{word}", "a"))
    plugins = load_plugins()
    assert plugins.failures == {}
    context = HookContext(session_id="sess_1", run_id="run_1", agent="x", end_user_id=None, turn=1)
    request = ProviderRequest(model="any", messages=())
    changed = await HookChain(plugins.hooks).change("prepare_request", context, request)
    assert changed.system == "ab"
