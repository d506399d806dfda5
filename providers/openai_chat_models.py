"""What is known of a model behind a Chat Completions server: from the tables, and from the server itself."""

from collections.abc import Mapping
from typing import Any

from msgspec.structs import replace

from providers.anthropic_models import claude_model
from providers.openai_chat_endpoint import ChatEndpoint
from providers.openai_models import model_family
from providers.openai_sse import text_or_none
from providers.types import Capabilities, JsonObject

MAX_LISTED = 1000

_FLAGS: Mapping[str, str] = {
    "supports_function_calling": "tools",
    "supports_vision": "images",
    "supports_reasoning": "thinking",
    "supports_response_schema": "output_schema",
}
_LIMITS: Mapping[str, str] = {
    "max_input_tokens": "context_window_tokens",
    "max_output_tokens": "max_output_tokens",
}


def chat_capabilities(model: str, endpoint: ChatEndpoint) -> Capabilities:
    """From the tables. A proxy has other vendors' models too: `anthropic/claude-opus-4.6:tag`."""
    name = model.rpartition("/")[2].partition(":")[0].lower()
    if name.startswith("claude"):
        known = claude_model(name.replace(".", "-")).capabilities
    else:
        known = model_family(model).capabilities
    return known if endpoint.schema_field else replace(known, output_schema=False)


def model_names(answer: JsonObject) -> tuple[str, ...]:
    """From `/models`."""
    return tuple(name for entry in _entries(answer) if (name := text_or_none(entry.get("id"))))


def told_facts(answer: JsonObject) -> dict[str, JsonObject]:
    """What a LiteLLM proxy's `/model/info` or OpenRouter's `/models` says, by the names that clients use.

    In the words of the former. Entries that say nothing but a name are left out.
    """
    facts: dict[str, JsonObject] = {}
    for entry in _entries(answer):
        name, fields = text_or_none(entry.get("model_name")), entry.get("model_info")
        if isinstance(entry.get("supported_parameters"), list):
            name, fields = text_or_none(entry.get("id")), _openrouter_facts(entry)
        if name and "*" not in name and isinstance(fields, dict):
            facts.setdefault(name, fields)  # several deployments may share a name
    return facts


def _openrouter_facts(entry: JsonObject) -> JsonObject:
    """Source: the official `openrouter` SDK 1.3 types, read 2026-11-30."""
    taken = entry["supported_parameters"]
    inputs = _object(entry.get("architecture")).get("input_modalities")
    return {
        "supports_function_calling": "tools" in taken,
        "supports_vision": isinstance(inputs, list) and "image" in inputs,
        "supports_reasoning": "reasoning" in taken,
        "supports_response_schema": "structured_outputs" in taken,
        "max_input_tokens": entry.get("context_length"),
        "max_output_tokens": _object(entry.get("top_provider")).get("max_completion_tokens"),
    }


def told_capabilities(known: Capabilities, fields: JsonObject) -> Capabilities:
    """`known`, with what the server says of the model; it says null for what it does not know."""
    flags = {ours: value for name, ours in _FLAGS.items() if isinstance(value := fields.get(name), bool)}
    limits = {
        ours: value
        for name, ours in _LIMITS.items()
        if isinstance(value := fields.get(name), int) and not isinstance(value, bool) and value > 0
    }
    return replace(known, **flags, **limits)


def _entries(answer: JsonObject) -> list[Any]:
    found = answer.get("data")
    entries = found[:MAX_LISTED] if isinstance(found, list) else []
    return [entry for entry in entries if isinstance(entry, dict)]


def _object(value: Any) -> JsonObject:
    return value if isinstance(value, dict) else {}
