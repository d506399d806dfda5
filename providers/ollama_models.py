"""What an Ollama server says of a model, and what to think of one that it says nothing of."""

import re
from typing import Any, Literal

from msgspec import Struct

from providers.types import Capabilities, JsonObject

ThinkStyle = Literal["none", "switch", "levels"]
"""`think` is not sent, is true or false, or is a level and cannot be turned off."""

# Families by their names, for a server that tells no capabilities. Source: the vendor's model library, read
# 2026-11-30.
_LEVELS = re.compile(r"gpt-oss\b.*")
_THINKING = re.compile(
    r"(qwen3|deepseek-(r1|v3\.[1-9]|v4)|magistral|glm-[4-9]|nemotron-3|kimi-k2-thinking)\b.*"
)
_SEEING = re.compile(r"(llava|bakllava|gemma[34]|llama3\.2-vision|llama4|minicpm-v|moondream|.*-?vl)\b.*")
_NUM_CTX = re.compile(r"^num_ctx\s+(\d{1,9})\s*$", re.MULTILINE)


class OllamaModel(Struct, frozen=True, kw_only=True):
    """`context_length_tokens` is the most that the model takes, `preset_tokens` what its file asks for."""

    tools: bool = True
    images: bool = False
    think: ThinkStyle = "none"
    context_length_tokens: int | None = None
    preset_tokens: int | None = None

    def window_tokens(self, wanted: int) -> int:
        """The window to ask for: that of the model's file, else `wanted`, never more than the model takes."""
        return min(self.preset_tokens or wanted, self.context_length_tokens or 1 << 30)

    def capabilities(self, *, window_tokens: int | None) -> Capabilities:
        return Capabilities(
            tools=self.tools,
            images=self.images,
            thinking=self.think != "none",
            output_schema=True,
            context_window_tokens=window_tokens,
        )


def guessed_model(name: str) -> OllamaModel:
    """What the name suggests. Thinking is left out in doubt: a model without it refuses the field."""
    bare = name.rpartition("/")[2].lower()
    style: ThinkStyle = (
        "levels" if _LEVELS.fullmatch(bare) else "switch" if _THINKING.fullmatch(bare) else "none"
    )
    return OllamaModel(think=style, images=_SEEING.fullmatch(bare) is not None)


def told_model(name: str, shown: JsonObject) -> OllamaModel:
    """From the answer of `/api/show`. What it leaves out is guessed."""
    guess = guessed_model(name)
    named = shown.get("capabilities")
    details = shown.get("model_info")
    preset = _NUM_CTX.search(shown["parameters"]) if isinstance(shown.get("parameters"), str) else None
    limits = OllamaModel(
        context_length_tokens=_context_length(details if isinstance(details, dict) else {}),
        preset_tokens=int(preset[1]) if preset else None,
    )
    if not isinstance(named, list) or not named:  # servers before capabilities were told
        tools, images, think = guess.tools, guess.images, guess.think
    else:
        tools, images = "tools" in named, "vision" in named
        think = "none" if "thinking" not in named else "levels" if guess.think == "levels" else "switch"
    return OllamaModel(
        tools=tools,
        images=images,
        think=think,
        context_length_tokens=limits.context_length_tokens,
        preset_tokens=limits.preset_tokens,
    )


def _context_length(details: JsonObject) -> int | None:
    """The key is `<architecture>.context_length`."""
    architecture = details.get("general.architecture")
    found: Any = details.get(f"{architecture}.context_length")
    return found if isinstance(found, int) and not isinstance(found, bool) and found > 0 else None
