"""The arguments of a tool call: from the text that a model wrote to a JSON object, or to the reason why not.

Every adapter reads arguments here, so that a model's slips mean the same on every API. A slip is never an
exception: the loop answers the call with the reason, and the model can correct it.
"""

import json
from typing import Any, NamedTuple

from providers.cleaning import UncleanJson, clean_json, clean_text
from providers.types import JsonObject

MAX_QUOTED_CHARS = 2_000  # of unreadable arguments that are kept; enough to see the mistake


class ToolArguments(NamedTuple):
    """The fields of `ToolCallEnd`. With an `input_error`, `input` is empty and `input_raw` has the text."""

    input: JsonObject
    input_error: str | None = None
    input_raw: str | None = None


def read_arguments(raw: str | None) -> ToolArguments:
    """The arguments in `raw`, cleaned and fit to store.

    None, blank text and `null` are an empty object. An object that was encoded twice is accepted. Nothing
    else is guessed: half JSON, another type, NaN, Infinity and excessive nesting give an `input_error`.
    """
    if raw is None or not raw.strip():
        return ToolArguments({})
    try:
        return ToolArguments(_read_object(raw))
    except UncleanJson as error:
        reason = str(error)
    except json.JSONDecodeError as error:
        reason = f"not JSON: {error}"
    except RecursionError:
        reason = "nested too deeply"
    except ValueError:  # an integer longer than Python converts
        reason = "a number has too many digits"
    quoted = clean_text(raw[:MAX_QUOTED_CHARS])
    return ToolArguments({}, f"The arguments could not be read: {reason}.", quoted)


def parse_arguments(raw: str | None) -> tuple[JsonObject, str | None]:
    """The arguments of `read_arguments` and what is wrong with them, for callers that keep the text."""
    arguments = read_arguments(raw)
    return arguments.input, arguments.input_error


def _read_object(raw: str) -> JsonObject:
    value = _decode(raw)
    if isinstance(value, str):
        value = _decode(value)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise UncleanJson(f"a JSON object is needed, this is {_JSON_NAMES[type(value)]}")
    cleaned: JsonObject = clean_json(value)
    return cleaned


def _decode(text: str) -> Any:
    return json.loads(text, parse_constant=_refuse_constant)


def _refuse_constant(name: str) -> None:
    raise UncleanJson(f"{name} is not a JSON number")


_JSON_NAMES = {str: "a string", int: "a number", float: "a number", bool: "a boolean", list: "an array"}
