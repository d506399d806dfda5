from functools import reduce
from typing import Any

import pytest

from providers.types import JsonObject
from tools.errors import InvalidArguments, SchemaRefused, UnknownTool
from tools.registry import ToolRegistry
from tools.types import Tool, ToolContext, ToolResult, text_result
from tools.validation import MAX_SCHEMA_BYTES, check_schema, validate_arguments


async def nothing(arguments: JsonObject, context: ToolContext) -> ToolResult:
    return text_result("")


def named(name: str, **schema: Any) -> Tool:
    return Tool(
        name=name, description="Does nothing.", input_schema={"type": "object", **schema}, execute=nothing
    )


def nested(depth: int, leaf: Any) -> Any:
    return reduce(lambda inner, _: {"a": inner}, range(depth), leaf)


def test_names_and_specs_are_sorted_whatever_the_order_of_registration() -> None:
    one = ToolRegistry([named("b"), named("a")])
    two = ToolRegistry([named("a"), named("b")])
    assert one.names() == ("a", "b")
    assert one.specs() == two.specs()
    assert "a" in one
    assert len(one) == 2


def test_an_unknown_name_is_answered_with_those_that_exist() -> None:
    with pytest.raises(UnknownTool, match=r"no tool called 'serch_web'. Available: fetch, search_web\."):
        ToolRegistry([named("search_web"), named("fetch")]).get("serch_web")
    with pytest.raises(UnknownTool, match="Available: none"):
        ToolRegistry().get("")


def test_names_are_matched_exactly() -> None:
    with pytest.raises(UnknownTool):
        ToolRegistry([named("search")]).get("Search")


def test_a_selection_tells_only_of_its_own_tools() -> None:
    chosen = ToolRegistry([named("a"), named("b"), named("secret")]).select(["b", "a", "b"])
    assert chosen.names() == ("a", "b")
    with pytest.raises(UnknownTool) as caught:
        chosen.get("secret")
    assert "Available: a, b." in str(caught.value)
    assert chosen.find("secret") is None


def test_a_name_is_registered_once() -> None:
    registry = ToolRegistry([named("a")])
    with pytest.raises(ValueError, match="registered already"):
        registry.register(named("a"))


@pytest.mark.parametrize("name", ["", "a b", "é", "x" * 65, "a.b", "a\n"])
def test_a_name_that_an_api_would_refuse_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="1 to 64"):
        ToolRegistry([named(name)])


def test_a_tool_with_a_bad_schema_is_refused_by_name() -> None:
    with pytest.raises(SchemaRefused, match="'broken'"):
        ToolRegistry([named("broken", properties={"x": {"type": "nonsense"}})])


def test_prepare_gives_the_tool_for_arguments_that_fit() -> None:
    tool = named("a", properties={"n": {"type": "integer"}}, required=["n"])
    registry = ToolRegistry([tool])
    assert registry.prepare("a", {"n": 3}) is tool
    assert registry.prepare("a", {"n": 12345678901234567890123}) is tool
    with pytest.raises(InvalidArguments):
        registry.prepare("a", {})


def test_the_problems_name_their_places() -> None:
    schema: JsonObject = {
        "type": "object",
        "properties": {"items": {"type": "array", "items": {"properties": {"n": {"minimum": 3}}}}},
        "required": ["name"],
        "additionalProperties": False,
    }
    with pytest.raises(InvalidArguments) as caught:
        validate_arguments(schema, {"items": [{"n": 5}, {"n": 1}], "extra": 0})
    text = str(caught.value)
    assert "items[1].n: 1 is less than the minimum of 3" in text
    assert '"name" is a required property' in text
    assert "'extra' was unexpected" in text


def test_the_list_of_problems_is_bounded() -> None:
    schema: JsonObject = {"type": "object", "additionalProperties": {"const": 1}}
    with pytest.raises(InvalidArguments) as caught:
        validate_arguments(schema, {f"key{n}": "x" * 10_000 for n in range(100)})
    assert "and 95 more" in str(caught.value)
    assert len(str(caught.value)) < 3_000


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ([], "JSON object"),
        ({}, "type"),
        ({"type": "array"}, "type"),
        ({"type": "object", "properties": []}, "usable"),
        ({"type": "object", "properties": {"a": {"type": "text"}}}, "usable"),
        ({"type": "object", "default": object()}, "JSON value"),
        ({"type": "object", "title": "x" * MAX_SCHEMA_BYTES}, "bytes"),
        ({"type": "object", "properties": nested(100, {})}, "deeper"),
        ({"type": "object", "properties": nested(20_000, {})}, "deep"),
        ({"type": "object", "properties": {"a": {"$ref": "http://127.0.0.1:9/x.json"}}}, "leaves the schema"),
        ({"type": "object", "properties": {"a": {"$ref": "file:///etc/hostname"}}}, "leaves the schema"),
        ({"type": "object", "properties": {"a": {"$ref": "#/$defs/none"}}}, "points at nothing"),
        ({"type": "object", "properties": {"a": {"$dynamicRef": "#b"}}}, "not supported"),
        ({"type": "object", "properties": {"a": {"$id": "http://x/", "$ref": "#/a"}}}, "not supported"),
        ({"type": "object", "properties": {"a": {"pattern": "(?=a)b"}}}, "usable"),
        ({"type": "object", "properties": {"a": {"pattern": r"(a)\1"}}}, "usable"),
        ({"type": "object", "properties": {"a": {"pattern": "(a{1000}){1000}"}}}, "usable"),
    ],
)
def test_a_schema_that_cannot_be_used_is_refused_with_the_reason(schema: Any, reason: str) -> None:
    with pytest.raises(SchemaRefused, match=reason):
        check_schema(schema)


def test_a_schema_whose_references_multiply_is_refused() -> None:
    doubling = {f"d{n}": {"allOf": [{"$ref": f"#/$defs/d{n + 1}"}] * 2} for n in range(30)}
    schema = {"type": "object", "$ref": "#/$defs/d0", "$defs": {**doubling, "d30": {"type": "object"}}}
    with pytest.raises(SchemaRefused, match="references are written out"):
        check_schema(schema)


def test_a_long_chain_of_references_is_refused() -> None:
    chain = {f"d{n}": {"$ref": f"#/$defs/d{n + 1}"} for n in range(1_000)}
    with pytest.raises(SchemaRefused, match="deeper"):
        check_schema({"type": "object", "$ref": "#/$defs/d0", "$defs": {**chain, "d1000": {}}})


@pytest.mark.parametrize(
    "pattern", ["^(a+)+$", "^(a|a)*$", "(.*)*x", "(x+x+)+y", "(?=(a+))*b", "a{1,1000}{1,1000}b"]
)
def test_a_pattern_is_matched_in_linear_time_or_refused(pattern: str) -> None:
    """S-13."""
    schema: JsonObject = {"type": "object", "properties": {"a": {"pattern": pattern}}}
    with pytest.raises((SchemaRefused, InvalidArguments)):
        check_schema(schema)
        validate_arguments(schema, {"a": "a" * 50_000 + "!"})


@pytest.mark.parametrize("combine", ["allOf", "anyOf", "oneOf"])
def test_recursive_schemas_are_checked_without_doubling_per_level(combine: str) -> None:
    schema: JsonObject = {"type": "object", "properties": {"a": {combine: [{"$ref": "#"}, {"$ref": "#"}]}}}
    with pytest.raises(InvalidArguments, match="nested values"):
        validate_arguments(schema, nested(60, 3))


def test_a_recursive_schema_explains_what_is_wrong_before_it_recurs() -> None:
    schema: JsonObject = {
        "type": "object",
        "properties": {"tree": {"$ref": "#/$defs/tree"}},
        "$defs": {
            "tree": {
                "type": "object",
                "properties": {"name": {"type": "string"}, "left": {"$ref": "#/$defs/tree"}},
                "required": ["name"],
            }
        },
    }
    validate_arguments(schema, {"tree": {"name": "a", "left": {"name": "b"}}})
    with pytest.raises(InvalidArguments, match='tree: "name" is a required property'):
        validate_arguments(schema, {"tree": {"left": {"name": "b"}}})
    with pytest.raises(InvalidArguments, match="nested values"):
        validate_arguments(schema, {"tree": {"name": "a", "left": {"name": 1}}})


def test_references_with_escapes_and_array_places_are_followed() -> None:
    schema: JsonObject = {
        "type": "object",
        "properties": {"x": {"$ref": "#/$defs/a~1b%20c"}, "y": {"$ref": "#/$defs/list/prefixItems/1"}},
        "$defs": {"a/b c": {"type": "string"}, "list": {"prefixItems": [{}, {"type": "integer"}]}},
    }
    validate_arguments(schema, {"x": "s", "y": 1})
    with pytest.raises(InvalidArguments):
        validate_arguments(schema, {"x": 1, "y": 1})
    with pytest.raises(InvalidArguments):
        validate_arguments(schema, {"x": "s", "y": "1"})
