"""The JSON Schema of an answer as the model APIs accept it."""

from typing import Any

from providers.types import JsonObject


def closed(schema: Any) -> Any:
    """`schema` with every object in it closed: the APIs refuse objects that allow further properties.

    An object that says itself what further properties may be is left as it is.
    """
    if isinstance(schema, list):
        return [closed(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    parts: JsonObject = {}
    for name, part in schema.items():
        if name in _BY_NAME and isinstance(part, dict):
            parts[name] = {key: closed(inner) for key, inner in part.items()}
        else:
            parts[name] = part if name in _VALUES else closed(part)
    is_object = schema.get("type") == "object" and isinstance(schema.get("properties"), dict)
    return {"additionalProperties": False} | parts if is_object else parts


_VALUES = frozenset({"const", "default", "enum", "examples", "required"})  # data, not schemas
_BY_NAME = frozenset({"properties", "patternProperties", "$defs", "definitions"})  # schemas by name


def named_schema(schema: JsonObject) -> JsonObject:
    """For the OpenAI formats. They hold a model to it strictly if every property is required."""
    return {"name": "answer", "schema": closed(schema), "strict": _requires_all(schema)}


def _requires_all(schema: Any) -> bool:
    if isinstance(schema, list):
        return all(map(_requires_all, schema))
    if not isinstance(schema, dict):
        return True
    properties = schema.get("properties")
    if isinstance(properties, dict) and set(properties) != set(schema.get("required") or ()):
        return False
    for name, part in schema.items():
        parts = list(part.values()) if name in _BY_NAME and isinstance(part, dict) else part
        if name not in _VALUES and not _requires_all(parts):
            return False
    return True
