"""The one place where text from outside is made fit to store and to stream.

Postgres refuses NUL, UTF-8 has no lone surrogates, and JSON has no NaN. Text is cleaned once, before it is
both streamed and stored, so that replay equals live. Signed provider blocks never pass through here.
"""

import math
from typing import Any

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
MAX_DEPTH = 64  # nesting of a stored JSON value; deeper ones are refused, not cut


class UncleanJson(ValueError):
    """A JSON value that cannot be stored: NaN, Infinity or too deep. The message says which."""


def clean_text(text: str) -> str:
    """`text` with NUL and lone surrogates replaced and split surrogate pairs joined."""
    if "\x00" in text:
        text = text.replace("\x00", REPLACEMENT)
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text


def clean_json(value: Any, *, depth: int = MAX_DEPTH) -> Any:
    """A copy of a decoded JSON value with every string and key cleaned.

    Raises: UncleanJson.
    """
    if isinstance(value, str):
        return clean_text(value)
    if isinstance(value, float) and not math.isfinite(value):
        raise UncleanJson("NaN and Infinity are not JSON numbers")
    if isinstance(value, dict | list) and depth == 0:
        raise UncleanJson(f"nested deeper than {MAX_DEPTH} levels")
    if isinstance(value, dict):
        return {clean_text(key): clean_json(item, depth=depth - 1) for key, item in value.items()}
    if isinstance(value, list):
        return [clean_json(item, depth=depth - 1) for item in value]
    return value


class TextCleaner:
    """Cleans text that arrives in pieces: a high surrogate at the end of a piece waits for its other half."""

    def __init__(self) -> None:
        self._held = ""

    def feed(self, piece: str) -> str:
        """What can be passed on after `piece`; may be empty."""
        text = self._held + piece
        self._held = ""
        if text and "\ud800" <= text[-1] <= "\udbff":
            text, self._held = text[:-1], text[-1]
        return clean_text(text)

    def finish(self) -> str:
        """What was held back, as a replacement character. Empty most of the time."""
        held, self._held = self._held, ""
        return clean_text(held)
