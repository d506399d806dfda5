"""The vendors by which models are named (`vendor:model`): one row each, no vendor SDK is imported here."""

from collections.abc import Callable
from typing import Any

from msgspec import Struct

from providers.types import Capabilities, Provider

MakeProvider = Callable[..., Provider]  # called with api_key, base_url and the two time-outs


class Vendor(Struct, frozen=True, kw_only=True):
    """A row. `make` None: no provider of ours speaks to it yet.

    `settings`: the first part of the names of its settings, and in `fallback_env` the vendor's own name for
    the key. `shares_keys_of`: whose settings are used when it has none. `default_base_url` None leaves the
    address to the adapter; `needs_base_url`: there is no such default. `needs_key`: also with a base URL.
    """

    name: str
    title: str
    api: str
    make: MakeProvider | None
    capabilities: Callable[[str], Capabilities]
    default_base_url: str | None = None
    needs_key: bool = True
    needs_base_url: bool = False
    shares_keys_of: str | None = None
    fallback_env: str | None = None

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


def _rehearsal(**_: Any) -> Provider:
    from providers.rehearsal import Rehearsal

    return Rehearsal()


def _claude_capabilities(model: str) -> Capabilities:
    from providers.anthropic_models import claude_model

    row = claude_model(model)
    return Capabilities(
        tools=True,
        images=True,
        thinking=row.thinking != "none",
        context_window_tokens=row.context_window_tokens,
        max_output_tokens=row.max_output_tokens,
    )


def _openai_capabilities(model: str) -> Capabilities:
    from providers.openai_models import model_family

    return model_family(model).capabilities


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
            capabilities=_openai_capabilities,
        ),
        Vendor(
            name="deepseek",
            title="DeepSeek",
            make=_deepseek,
            default_base_url="https://api.deepseek.com",
            fallback_env="DEEPSEEK_API_KEY",
            api="openai_chat",
            capabilities=_openai_capabilities,
        ),
        Vendor(
            name="openrouter",
            title="OpenRouter",
            make=_openrouter,
            default_base_url="https://openrouter.ai/api/v1",
            fallback_env="OPENROUTER_API_KEY",
            api="openai_chat",
            capabilities=_openai_capabilities,
        ),
        Vendor(
            name="litellm",
            title="LiteLLM proxy",
            make=_litellm,
            needs_key=False,
            needs_base_url=True,
            api="openai_chat",
            capabilities=_openai_capabilities,
        ),
        Vendor(
            name="ollama",
            title="Ollama",
            make=None,
            needs_key=False,
            api="ollama",
            capabilities=_openai_capabilities,
        ),
        Vendor(
            name="rehearsal",
            title="Rehearsal",
            make=_rehearsal,
            needs_key=False,
            api="rehearsal",
            capabilities=_rehearsal_capabilities,
        ),
    )
}
