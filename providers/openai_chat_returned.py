"""Fields of a Chat Completions answer that the server wants back: signed or encrypted reasoning."""

from typing import Any

import msgspec

from providers.cleaning import clean_json
from providers.types import JsonObject

_GROWING = ("text", "thinking", "summary", "data")  # these keys of a detail arrive piece by piece
_SIGNED = "signature"  # it ends a piece that has no index


class ReturnedFields:
    """Collects the fields named in `names` from the deltas: text is appended, lists are merged by entry."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self._names = names
        self._fields: dict[str, str | list[JsonObject]] = {}

    def feed(self, delta: JsonObject) -> None:
        for name in self._names:
            value = delta.get(name)
            kept = self._fields.get(name)
            if isinstance(value, str) and isinstance(kept, str | None):
                self._fields[name] = (kept or "") + value
            elif isinstance(value, list):
                entries = kept if isinstance(kept, list) else []
                for entry in value:
                    if isinstance(entry, dict):
                        _merge(entries, entry)
                self._fields[name] = entries

    def native_body(self, call_extras: dict[str, JsonObject]) -> bytes | None:
        """A JSON array of one assistant message that has only these fields; None if there are none."""
        kept: dict[str, Any] = {name: value for name, value in self._fields.items() if value}
        if call_extras:
            kept["tool_calls"] = [{"id": call_id} | extra for call_id, extra in call_extras.items()]
        if not kept:
            return None
        message = {"role": "assistant"} | kept
        try:
            return msgspec.json.encode([message])
        except UnicodeEncodeError:  # halves of surrogate pairs, which no request could carry either
            return msgspec.json.encode([clean_json(message)])


def _merge(entries: list[JsonObject], piece: JsonObject) -> None:
    kind, index = piece.get("type"), piece.get("index")
    for entry in reversed(entries):
        if entry.get("type") == kind and entry.get("index") == index:
            if index is None and entry.get(_SIGNED):
                break
            for key, value in piece.items():
                if key in _GROWING and isinstance(value, str) and isinstance(entry.get(key), str):
                    entry[key] += value
                elif value is not None:
                    entry[key] = value
            return
    entries.append(dict(piece))
