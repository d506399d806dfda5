"""Deltas of one event put together: texts are appended, of other kinds the newest stay."""

from collections.abc import Iterable
from typing import Any

from providers.types import JsonObject

# Where each kind of delta keeps the text that is appended. Everything else in it must be equal.
_TEXT_PATHS: dict[str, tuple[str, ...]] = {
    "content_delta": ("content", "text"),
    "thinking_delta": ("thinking",),
    "input_json_delta": ("partial_json",),
}

MAX_SEPARATE_DELTAS = 64
"""How many deltas without a text to append are kept of one event; progress and status outdate themselves."""


class DeltaPile:
    """Deltas of one event in order. `build` gives as few as say the same."""

    def __init__(self, deltas: Iterable[JsonObject] = ()) -> None:
        self._piles: list[tuple[JsonObject, list[str]]] = []
        for delta in deltas:
            self.add(delta)

    def add(self, delta: JsonObject) -> int:
        """Returns about how many bytes were added."""
        text = _text_of(delta)
        if text is None:
            if len(self._piles) >= MAX_SEPARATE_DELTAS:
                self._forget_one()
            self._piles.append((delta, []))
            return 256
        if self._piles and _have_one_frame(self._piles[-1][0], delta):
            self._piles[-1][1].append(text)
        else:
            self._piles.append((delta, [text]))
        return len(text)

    def build(self) -> list[JsonObject]:
        return [_with_text(delta, "".join(texts)) if texts else delta for delta, texts in self._piles]

    def _forget_one(self) -> None:
        for position, (_, texts) in enumerate(self._piles):
            if not texts:
                del self._piles[position]
                return


def _text_of(delta: JsonObject) -> str | None:
    path = _TEXT_PATHS.get(delta.get("type", ""))
    if path is None:
        return None
    value: Any = delta
    for name in path:
        value = value.get(name) if isinstance(value, dict) else None
    return value if isinstance(value, str) else None


def _have_one_frame(first: JsonObject, second: JsonObject) -> bool:
    """Both are equal but for their texts."""
    return first.get("type") == second.get("type") and _with_text(first, "") == _with_text(second, "")


def _with_text(delta: JsonObject, text: str) -> JsonObject:
    path = _TEXT_PATHS[delta["type"]]
    if len(path) == 1:
        return {**delta, path[0]: text}
    return {**delta, path[0]: {**delta[path[0]], path[1]: text}}
