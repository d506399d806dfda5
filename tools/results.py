"""What a tool function may return, and how it becomes a result.

The one rule for values that JSON does not have, the same for the model, the log and the store:

| value                    | becomes                                  |
|--------------------------|------------------------------------------|
| NaN, Infinity, -Infinity | the strings `"NaN"`, `"Infinity"`, `"-Infinity"` |
| Decimal                  | a string with all its digits             |
| datetime, date, time     | a string by RFC 3339                     |
| timedelta                | a string by ISO 8601                     |
| UUID                     | a string                                 |
| bytes                    | a string in base64                       |
| set, frozenset           | an array, sorted by the JSON of its items |
| Enum                     | its value                                |
| a key that is no string  | its JSON, as a string                    |
| Struct, dataclass        | an object                                |

Integers keep all their digits. Anything else is an `UnusableResult`, which the model sees.
"""

import json
import math
from collections.abc import Iterable, Mapping, Set
from enum import Enum
from typing import Any

import msgspec
from msgspec.structs import replace

from providers.cleaning import MAX_DEPTH, clean_text
from providers.types import ImageBlock, TextBlock
from tools.errors import UnusableResult
from tools.types import DirectReturn, ToolResult

ToolOutput = Any
"""str, a JSON value, TextBlock, ImageBlock, a list of those two, ToolResult, DirectReturn, or None."""


def to_result(value: ToolOutput) -> ToolResult:
    """The result that `value` stands for. None is an empty result.

    Raises: UnusableResult.
    """
    content: Iterable[TextBlock | ImageBlock]
    match value:
        case ToolResult():
            return _checked(value)
        case DirectReturn():
            data = to_json(value.data)
            return ToolResult(content=_clean((TextBlock(text=value.text or json_text(data)),)), data=data)
        case None:
            content = ()
        case str():
            content = (TextBlock(text=value),)
        case TextBlock() | ImageBlock():
            content = (value,)
        case list() | tuple() if value and all(isinstance(item, TextBlock | ImageBlock) for item in value):
            content = value
        case _:
            content = (TextBlock(text=json_text(value)),)
    return ToolResult(content=_clean(content))


def _checked(result: ToolResult) -> ToolResult:
    details = None if result.details is None else to_json(result.details)
    data = None if result.data is None else to_json(result.data)
    return replace(result, content=_clean(result.content), details=details, data=data)


def _clean(content: Iterable[TextBlock | ImageBlock]) -> tuple[TextBlock | ImageBlock, ...]:
    return tuple(
        TextBlock(text=clean_text(block.text)) if isinstance(block, TextBlock) else block for block in content
    )


def json_text(value: Any) -> str:
    """`value` as strict, cleaned JSON.

    Raises: UnusableResult.
    """
    try:
        return json.dumps(to_json(value), allow_nan=False, ensure_ascii=False)
    except ValueError:  # the interpreter's limit on converting integers
        raise UnusableResult("The tool returned an integer of more than 4,300 digits.") from None


def to_json(value: Any, *, depth: int = MAX_DEPTH) -> Any:
    """`value` as a JSON value, by the table of this module.

    Raises: UnusableResult for a value of another type, or one that is nested too deeply or in itself.
    """
    if depth < 0:
        raise UnusableResult(f"The tool returned a value that is nested deeper than {MAX_DEPTH} levels.")
    plain: Any
    match value:
        case Enum():
            plain = to_json(value.value, depth=depth)
        case str():
            plain = clean_text(value)
        case float() if not math.isfinite(value):
            plain = _name_of(value)
        case None | bool() | int() | float():
            plain = value
        case Mapping():
            plain = {_key(key): to_json(item, depth=depth - 1) for key, item in value.items()}
        case list() | tuple():
            plain = [to_json(item, depth=depth - 1) for item in value]
        case Set():
            items = [to_json(item, depth=depth - 1) for item in value]
            plain = sorted(items, key=lambda item: json.dumps(item, sort_keys=True))
        case _:
            plain = _built_in(value)
            if isinstance(plain, dict | list):  # it may hold what JSON has not, as NaN
                plain = to_json(plain, depth=depth)
    return plain


def _built_in(value: Any) -> Any:
    try:
        return msgspec.to_builtins(value, str_keys=True, order="deterministic")
    except (TypeError, ValueError, RecursionError):
        raise UnusableResult(
            f"The tool returned a value of type {type(value).__name__}, which has no JSON form."
        ) from None


def _key(key: Any) -> str:
    plain = to_json(key)
    return plain if isinstance(plain, str) else json.dumps(plain, ensure_ascii=False)


def _name_of(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    return "Infinity" if value > 0 else "-Infinity"
