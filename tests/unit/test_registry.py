import subprocess
import sys
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path

import pytest

from providers.errors import Overloaded, ProviderError, RateLimited, UnknownModel
from providers.pricing import ModelPrice
from providers.registry import ProviderSettings, Registry, VendorSettings
from providers.rotation import KeyRotation
from providers.types import Capabilities, Message, ProviderEvent, ProviderRequest, TextBlock, TextDelta, Usage
from providers.vendors import VENDORS

AT = datetime(2026, 11, 30, 12, tzinfo=UTC)
KEY = VendorSettings(api_keys=("key-of-a-test",))
USAGE = Usage(input_tokens=1_000_000, output_tokens=0)


def with_keys(**vendors: VendorSettings) -> Registry:
    named = {name.replace("_", "-"): settings for name, settings in vendors.items()}
    return Registry(ProviderSettings(vendors=named))


@pytest.mark.parametrize(
    ("name", "vendor", "api", "model"),
    [
        ("anthropic:claude-opus-5-5", "anthropic", "anthropic_messages", "claude-opus-5-5"),
        ("openai:gpt-6-sol", "openai", "openai_responses", "gpt-6-sol"),
        ("openai-chat:gpt-5.4", "openai-chat", "openai_chat", "gpt-5.4"),
        ("deepseek:deepseek-flash", "deepseek", "openai_chat", "deepseek-flash"),
        ("openrouter:vendor/model:free", "openrouter", "openai_chat", "vendor/model:free"),
        ("rehearsal:demo", "rehearsal", "rehearsal", "demo"),
        ("claude-opus-5-5", "anthropic", "anthropic_messages", "claude-opus-5-5"),
        ("gpt-6-sol", "openai", "openai_responses", "gpt-6-sol"),
    ],
)
async def test_a_name_resolves_to_a_vendor_an_api_and_the_vendors_own_name(
    name: str, vendor: str, api: str, model: str
) -> None:
    registry = with_keys(anthropic=KEY, openai=KEY, deepseek=KEY, openrouter=KEY)
    resolved = registry.resolve(name)
    assert (resolved.vendor, resolved.api, resolved.model) == (vendor, api, model)
    assert resolved.name == registry.check_model(name) == f"{vendor}:{model}"
    assert resolved.provider.api == api
    assert resolved.capabilities == resolved.provider.capabilities(model)
    await registry.aclose()
    await registry.aclose()


async def test_one_provider_serves_all_models_of_a_vendor() -> None:
    registry = with_keys()
    assert registry.resolve("rehearsal:demo").provider is registry.resolve("rehearsal:fast").provider
    await registry.aclose()


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("m-unknown", "anthropic:m-unknown"),
        ("", "vendor:model"),
        ("acme:model", "a vendor of anthropic, openai, openai-chat"),
        ("rehearsal:", "no proper name"),
        ("rehearsal:a b", "no proper name"),
        ("rehearsal:a\n", "no proper name"),
        ("rehearsal:" + "x" * 201, "no proper name"),
        ("anthropic:claude-opus-5-5", "ARMILLARY_ANTHROPIC_API_KEY or ANTHROPIC_API_KEY"),
        ("claude-opus-5-5", "ARMILLARY_ANTHROPIC_API_KEY or ANTHROPIC_API_KEY"),
        ("openai:gpt-6-sol", "ARMILLARY_OPENAI_API_KEY or OPENAI_API_KEY"),
        (
            "openai-chat:x",
            "ARMILLARY_OPENAI_CHAT_API_KEY or ARMILLARY_OPENAI_API_KEY, or ARMILLARY_OPENAI_CHAT_BASE_URL",
        ),
        ("litellm:x", "set ARMILLARY_LITELLM_BASE_URL"),
        ("ollama:llama", "set ARMILLARY_OLLAMA_BASE_URL"),
    ],
)
async def test_a_model_that_cannot_be_used_is_refused_with_what_to_do(name: str, told: str) -> None:
    registry = with_keys()
    for refuse in (registry.check_model, registry.resolve):
        with pytest.raises(UnknownModel) as caught:
            refuse(name)
        assert told in caught.value.message


async def test_a_local_server_needs_a_base_url_and_no_key() -> None:
    local = VendorSettings(base_url="http://127.0.0.1:9/v1")
    registry = with_keys(openai_chat=local, litellm=local, ollama=local)
    assert registry.resolve("ollama:qwen3:8b").model == "qwen3:8b"
    assert registry.check_model("openai-chat:llama") == "openai-chat:llama"
    assert registry.resolve("litellm:llama").api == "openai_chat"
    await registry.aclose()


def test_checking_a_model_imports_no_sdk() -> None:
    program = (
        "import sys\n"
        "from providers.registry import *\n"
        "registry = Registry(ProviderSettings(vendors={'anthropic': VendorSettings(api_keys=('k',))}))\n"
        "registry.check_model('anthropic:claude-opus-5-5')\n"
        "print(sorted({'anthropic', 'openai', 'httpx2', 'genai_prices'} & set(sys.modules)))\n"
    )
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=root, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


async def test_preload_makes_what_is_configured_and_nothing_else() -> None:
    registry = with_keys(openai=KEY)
    registry.preload()
    assert registry.resolve("openai:gpt-6-sol").provider is registry.resolve("openai:gpt-5.4").provider
    await registry.aclose()


def test_keys_do_not_show_in_the_settings_text() -> None:
    assert "key-of-a-test" not in repr(ProviderSettings(vendors={"anthropic": KEY}))


async def test_settings_win_over_the_tables() -> None:
    small = Capabilities(tools=False, context_window_tokens=8_000)
    free = ModelPrice(input_usd=Decimal(0), output_usd=Decimal(0))
    registry = Registry(
        ProviderSettings(
            vendors={"openai-chat": VendorSettings(base_url="http://127.0.0.1:9/v1")},
            capabilities={"openai-chat:local": {"tools": False, "context_window_tokens": 8_000}},
            prices={"openai-chat:local": free},
        )
    )
    assert registry.resolve("openai-chat:local").capabilities == small
    assert registry.price("openai-chat", "local", USAGE, AT) == (Decimal(0), "override")
    entry = {model.id: model for model in registry.models(AT)}["openai-chat:local"]
    assert (entry.capabilities, entry.prices, entry.is_configured) == (small, free, True)
    await registry.aclose()


def test_a_known_name_at_another_address_has_no_listed_price() -> None:
    elsewhere = with_keys(openai_chat=VendorSettings(base_url="http://127.0.0.1:9/v1"))
    assert elsewhere.price("openai-chat", "gpt-5.4", USAGE, AT) == (None, None)
    assert with_keys(openai=KEY).price("openai-chat", "gpt-4.1", USAGE, AT).cost_usd == Decimal(2)


def test_the_catalogue_tells_what_each_model_is_and_whether_it_can_be_used() -> None:
    models = {model.id: model for model in with_keys(anthropic=KEY).models(AT)}
    opus = models["anthropic:claude-opus-5-5"]
    assert (opus.display_name, opus.api, opus.is_configured) == (
        "Claude Opus 5.5",
        "anthropic_messages",
        True,
    )
    assert opus.capabilities.context_window_tokens == 1_000_000
    assert opus.prices is not None
    assert opus.prices.output_usd == Decimal(20)
    assert not models["openai:gpt-6-sol"].is_configured
    assert models["rehearsal:demo"].is_configured
    assert all(model.capabilities.context_window_tokens and model.prices for model in models.values())


async def test_each_vendor_says_the_same_of_a_model_as_its_provider() -> None:
    here = VendorSettings(api_keys=("k",), base_url="http://127.0.0.1:9/v1")
    registry = Registry(ProviderSettings(vendors=dict.fromkeys(VENDORS, here)))
    for model in registry.models(AT):
        assert model.capabilities == registry.resolve(model.id).provider.capabilities(
            model.id.partition(":")[2]
        )
    await registry.aclose()


class Limited:
    """A provider whose key is refused with `error`, or that answers with its name."""

    api = "limited"

    def __init__(self, name: str, error: ProviderError | None = None) -> None:
        self.name = name
        self.error = error
        self.is_closed = False

    def capabilities(self, model: str) -> Capabilities:
        return Capabilities()

    async def stream(self, request: ProviderRequest) -> AsyncIterator[ProviderEvent]:
        if self.error:
            raise self.error
        yield TextDelta(index=0, text=self.name)

    async def aclose(self) -> None:
        self.is_closed = True


REQUEST = ProviderRequest(model="m", messages=(Message(role="user", blocks=(TextBlock(text="hi"),)),))


async def test_the_next_attempt_uses_another_key_when_one_is_limited() -> None:
    first, second = Limited("first", RateLimited("slow down")), Limited("second")
    rotation = KeyRotation([first, second])
    with pytest.raises(RateLimited):
        [event async for event in rotation.stream(REQUEST)]
    for _ in range(2):
        assert [event async for event in rotation.stream(REQUEST)] == [TextDelta(index=0, text="second")]
    await rotation.aclose()
    assert first.is_closed
    assert second.is_closed


async def test_a_failure_that_is_not_about_the_key_keeps_it() -> None:
    first = Limited("first", Overloaded("busy"))
    rotation = KeyRotation([first, Limited("second")])
    with pytest.raises(Overloaded):
        [event async for event in rotation.stream(REQUEST)]
    first.error = None
    assert [event async for event in rotation.stream(REQUEST)] == [TextDelta(index=0, text="first")]


async def test_several_keys_of_a_vendor_make_one_provider() -> None:
    registry = with_keys(openai=VendorSettings(api_keys=("one", "two")))
    provider = registry.resolve("openai:gpt-6-sol").provider
    assert isinstance(provider, KeyRotation)
    assert provider.api == "openai_responses"
    await registry.aclose()
