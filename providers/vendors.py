"""The vendors by which models are named (`vendor:model`): one row each, no vendor SDK is imported here."""

from collections.abc import Callable
from typing import Any

from msgspec import Struct

from providers.types import Capabilities, Provider

MakeProvider = Callable[..., Provider]  # called with api_key, base_url, two time-outs and the `options`


class Vendor(Struct, frozen=True, kw_only=True):
    """A row. `capabilities` answers without I/O and without an SDK.

    `fallback_env` is the vendor's own name for the key, beside ours. `shares_keys_of`: whose settings are
    used when it has none. `default_base_url` None leaves the address to the adapter; `needs_base_url`: there
    is no such default. `needs_key`: also with a base URL. `needs_nothing`: neither key nor address.
    `first_event_timeout_s` None: as for all. `tells_models`: it is asked what its models can do, since no
    table knows them.
    """

    name: str
    title: str
    api: str
    make: MakeProvider
    capabilities: Callable[[str], Capabilities]
    default_base_url: str | None = None
    needs_key: bool = True
    needs_base_url: bool = False
    needs_nothing: bool = False
    shares_keys_of: str | None = None
    fallback_env: str | None = None
    first_event_timeout_s: float | None = None
    tells_models: bool = False

    @property
    def key_setting(self) -> str:
        return f"ARMILLARY_{self.name.upper().replace('-', '_')}_API_KEY"

    @property
    def base_url_setting(self) -> str:
        return f"ARMILLARY_{self.name.upper().replace('-', '_')}_BASE_URL"


def _anthropic(**settings: Any) -> Provider:
    from providers.anthropic_messages import AnthropicMessages

    return AnthropicMessages(**settings)


def _openai(**settings: Any) -> Provider:
    from providers.openai_responses import OpenAIResponses

    return OpenAIResponses(**settings)


def _openai_chat(**settings: Any) -> Provider:
    from providers.openai_chat import OpenAIChat

    return OpenAIChat(**settings)


def _deepseek(**settings: Any) -> Provider:
    from providers.openai_chat import OpenAIChat
    from providers.openai_chat_endpoint import DEEPSEEK_CHAT

    return OpenAIChat(endpoint=DEEPSEEK_CHAT, **settings)


def _openrouter(**settings: Any) -> Provider:
    from providers.openai_chat import OpenAIChat
    from providers.openai_chat_endpoint import OPENROUTER_CHAT

    return OpenAIChat(endpoint=OPENROUTER_CHAT, **settings)


def _litellm(**settings: Any) -> Provider:
    from providers.openai_chat import OpenAIChat
    from providers.openai_chat_endpoint import LITELLM_CHAT

    return OpenAIChat(endpoint=LITELLM_CHAT, **settings)


def _ollama(**settings: Any) -> Provider:
    from providers.ollama import Ollama

    return Ollama(**settings)


def _rehearsal(**_: Any) -> Provider:
    from providers.rehearsal import Rehearsal

    return Rehearsal()


def _claude_capabilities(model: str) -> Capabilities:
    from providers.anthropic_models import claude_model

    return claude_model(model).capabilities


def _openai_capabilities(model: str) -> Capabilities:
    from providers.openai_models import model_family

    return model_family(model).capabilities


def _chat_capabilities(model: str) -> Capabilities:
    from providers.openai_chat_endpoint import GENERIC_CHAT
    from providers.openai_chat_models import chat_capabilities

    return chat_capabilities(model, GENERIC_CHAT)


def _deepseek_capabilities(model: str) -> Capabilities:
    from providers.openai_chat_endpoint import DEEPSEEK_CHAT
    from providers.openai_chat_models import chat_capabilities

    return chat_capabilities(model, DEEPSEEK_CHAT)


def _ollama_capabilities(model: str) -> Capabilities:
    from providers.ollama_models import guessed_model

    return guessed_model(model).capabilities(window_tokens=None)


def _rehearsal_capabilities(model: str) -> Capabilities:
    from providers.rehearsal import Rehearsal

    return Rehearsal().capabilities(model)


VENDORS: dict[str, Vendor] = {
    vendor.name: vendor
    for vendor in (
        Vendor(
            name="anthropic",
            title="Anthropic",
            api="anthropic_messages",
            make=_anthropic,
            capabilities=_claude_capabilities,
            fallback_env="ANTHROPIC_API_KEY",
        ),
        Vendor(
            name="openai",
            title="OpenAI",
            api="openai_responses",
            make=_openai,
            capabilities=_openai_capabilities,
            fallback_env="OPENAI_API_KEY",
        ),
        Vendor(
            name="openai-chat",
            title="Chat Completions",
            make=_openai_chat,
            needs_key=False,
            shares_keys_of="openai",
            api="openai_chat",
            capabilities=_chat_capabilities,
        ),
        Vendor(
            name="deepseek",
            title="DeepSeek",
            make=_deepseek,
            default_base_url="https://api.deepseek.com",
            fallback_env="DEEPSEEK_API_KEY",
            api="openai_chat",
            capabilities=_deepseek_capabilities,
        ),
        Vendor(
            name="openrouter",
            title="OpenRouter",
            make=_openrouter,
            default_base_url="https://openrouter.ai/api/v1",
            tells_models=True,
            fallback_env="OPENROUTER_API_KEY",
            api="openai_chat",
            capabilities=_chat_capabilities,
        ),
        Vendor(
            name="litellm",
            title="LiteLLM proxy",
            make=_litellm,
            needs_key=False,
            needs_base_url=True,
            api="openai_chat",
            capabilities=_chat_capabilities,
        ),
        Vendor(
            name="ollama",
            title="Ollama",
            make=_ollama,
            needs_key=False,
            needs_base_url=True,
            first_event_timeout_s=300.0,  # a model is loaded from disk first
            api="ollama",
            capabilities=_ollama_capabilities,
        ),
        Vendor(
            name="rehearsal",
            title="Rehearsal",
            make=_rehearsal,
            needs_nothing=True,
            api="rehearsal",
            capabilities=_rehearsal_capabilities,
        ),
    )
}
