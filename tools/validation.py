"""JSON Schema for tools: which schemas are accepted, and checking arguments against them.

Schemas come from tenants and from third-party servers, arguments from a model, so neither is trusted. Nothing
is fetched, patterns are matched in linear time, and the work of a validation is bounded by the schema's size.
"""

import copy
from collections.abc import Iterator
from functools import cached_property, lru_cache
from typing import Any
from urllib.parse import unquote

import jsonschema_rs
import msgspec

from providers.types import JsonObject
from tools.errors import InvalidArguments, SchemaRefused

MAX_SCHEMA_BYTES = 65_536
MAX_SCHEMA_DEPTH = 64
MAX_REFERENCE_DEPTH = 128  # nesting with references followed
MAX_EXPANDED_NODES = 10_000  # places in the schema with every reference written out
MAX_COMPILED = 512  # validators kept, the least recently used dropped first
MAX_PROBLEMS = 5  # that are told to the model at once
MAX_PROBLEM_CHARS = 300
_PATTERN_BYTES = 1 << 20  # of one compiled pattern
# Keywords that may refuse what they would accept if a part below them were stricter: what they say is not
# to be trusted when recursive references have been left out.
_NOT_MONOTONE = frozenset(
    {"oneOf", "not", "if", "then", "else", "contains", "unevaluatedProperties", "unevaluatedItems"}
)
_REFUSED_KEYWORDS = frozenset(
    {"$anchor", "$dynamicRef", "$dynamicAnchor", "$recursiveRef", "$recursiveAnchor"}
)


def check_schema(schema: Any) -> None:
    """Accepts a JSON Schema for a tool's arguments.

    Needed are `type: object` at the top and references within the schema only (`#` or `#/…`).
    Raises: SchemaRefused.
    """
    _compile(_encoded(schema))


def validate_arguments(schema: JsonObject, arguments: JsonObject) -> None:
    """Returns when `arguments` fit `schema`.

    Raises: InvalidArguments with a text for the model, which names the places; SchemaRefused.
    """
    compiled = _compile(_encoded(schema))
    if compiled.validator.is_valid(arguments):
        return
    problems = list(compiled.problems(arguments))
    text = "; ".join(problems[:MAX_PROBLEMS]) or "check the nested values against the schema"
    more = len(problems) - MAX_PROBLEMS
    raise InvalidArguments(f"The arguments do not fit: {text}{f'; and {more} more' if more > 0 else ''}.")


def _encoded(schema: Any) -> bytes:
    """The schema as bytes, which name its compiled form."""
    if not isinstance(schema, dict) or schema.get("type") != "object":
        raise SchemaRefused('A tool\'s schema must be a JSON object with `type` "object".')
    try:
        encoded = msgspec.json.encode(schema)
    except (TypeError, ValueError, RecursionError):
        raise SchemaRefused("A tool's schema must be a JSON value that is not nested too deeply.") from None
    if len(encoded) > MAX_SCHEMA_BYTES:
        raise SchemaRefused(f"The schema has {len(encoded)} bytes, at most {MAX_SCHEMA_BYTES} are taken.")
    return encoded


class _Compiled:
    """A validator, and what is needed to say what is wrong.

    `is_valid` remembers what it has seen and is fast for every schema that is accepted. Listing the problems
    is not: with recursive references it doubles with each level. So it uses a schema without recursion.
    """

    def __init__(self, schema: JsonObject, recursive_references: list[tuple[str | int, ...]]) -> None:
        self._schema = schema
        self._recursive_references = recursive_references
        self.validator = _validator(schema)

    @cached_property
    def _explainer(self) -> Any:
        if not self._recursive_references:
            return self.validator
        schema = copy.deepcopy(self._schema)
        for path in self._recursive_references:
            node: Any = schema
            for step in path:
                node = node[step]
            del node["$ref"]
        return _validator(schema)

    def problems(self, arguments: JsonObject) -> Iterator[str]:
        for error in self._explainer.iter_errors(arguments):
            if self._recursive_references and not _NOT_MONOTONE.isdisjoint(error.evaluation_path):
                continue
            path = "".join(
                f"[{step}]" if isinstance(step, int) else f".{step}" for step in error.instance_path
            )
            message: str = error.message
            if len(message) > MAX_PROBLEM_CHARS:
                message = message[:MAX_PROBLEM_CHARS] + "…"
            yield f"{path.removeprefix('.')}: {message}" if path else message


@lru_cache(maxsize=MAX_COMPILED)
def _compile(encoded: bytes) -> _Compiled:
    schema: JsonObject = msgspec.json.decode(encoded)
    survey = _Survey(schema)
    survey.expand(schema, (), MAX_REFERENCE_DEPTH)
    return _Compiled(schema, survey.recursive_references)


def _validator(schema: JsonObject) -> Any:
    try:
        return jsonschema_rs.validator_for(
            schema,
            pattern_options=jsonschema_rs.RegexOptions(
                size_limit=_PATTERN_BYTES, dfa_size_limit=_PATTERN_BYTES
            ),
            validate_formats=False,
            offline=True,
        )
    except (jsonschema_rs.ValidationError, jsonschema_rs.ReferencingError, ValueError) as error:
        message = str(error).partition("\n")[0][:MAX_PROBLEM_CHARS]
        raise SchemaRefused(f"This is not a usable JSON Schema: {message}") from None


class _Survey:
    """Walks a schema with its references: how large it is written out, and where it refers to itself."""

    def __init__(self, schema: JsonObject) -> None:
        self._root = schema
        self._sizes: dict[int, int | None] = {}  # by identity of the node; None while it is being walked
        self.recursive_references: list[tuple[str | int, ...]] = []

    def expand(self, node: Any, path: tuple[str | int, ...], depth: int) -> int:
        """The number of places below `node`, references written out.

        Raises: SchemaRefused when it is too large, too deep, or refers to what is not there.
        """
        if not isinstance(node, dict | list):
            return 1
        if depth == 0 or len(path) > MAX_SCHEMA_DEPTH:
            raise SchemaRefused(f"The schema is nested deeper than {MAX_SCHEMA_DEPTH} levels.")
        known = self._sizes.get(id(node), 0)
        if known:
            return known
        self._sizes[id(node)] = None
        size = 1
        for key, child in node.items() if isinstance(node, dict) else enumerate(node):
            size += self.expand(child, (*path, key), depth - 1)
        if isinstance(node, dict):
            size += self._expand_reference(node, path, depth)
        if size > MAX_EXPANDED_NODES:
            raise SchemaRefused(
                f"The schema has more than {MAX_EXPANDED_NODES} places when its references are written out."
            )
        self._sizes[id(node)] = size
        return size

    def _expand_reference(self, node: JsonObject, path: tuple[str | int, ...], depth: int) -> int:
        if refused := _REFUSED_KEYWORDS & node.keys():
            raise SchemaRefused(
                f"`{min(refused)}` is not supported in a tool's schema; use `$ref` and `$defs`."
            )
        if isinstance(node.get("$id"), str) and path:
            raise SchemaRefused("`$id` is not supported below the top of a tool's schema.")
        reference = node.get("$ref")
        if not isinstance(reference, str):
            return 0
        target, target_path = self._resolve(reference)
        if self._sizes.get(id(target), 0) is None:
            self.recursive_references.append(path)
            return 1
        return self.expand(target, target_path, depth - 1)

    def _resolve(self, reference: str) -> tuple[Any, tuple[str | int, ...]]:
        if reference != "#" and not reference.startswith("#/"):
            raise SchemaRefused(
                f"`$ref` {reference[:80]!r} leaves the schema; only `#` and `#/…` are followed."
            )
        node: Any = self._root
        path: list[str | int] = []
        for part in reference.split("/")[1:]:
            key: str | int = unquote(part).replace("~1", "/").replace("~0", "~")
            if isinstance(node, list) and str(key).isdecimal():
                key = int(key)
            try:
                node = node[key]
            except (KeyError, IndexError, TypeError):
                raise SchemaRefused(f"`$ref` {reference[:80]!r} points at nothing in the schema.") from None
            path.append(key)
        return node, tuple(path)
