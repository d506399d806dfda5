import json
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from enum import Enum
from typing import Annotated, Any, Literal
from uuid import UUID

import pytest
from msgspec import Meta, Struct

from providers.types import Base64Source, ImageBlock, TextBlock
from tools.errors import InvalidArguments, UnusableResult
from tools.results import json_text, to_result
from tools.schema import tool
from tools.types import ToolContext, ToolResult, text_result

CONTEXT = ToolContext(
    session_id="sess_1",
    run_id="run_1",
    tool_use_id="call_1",
    idempotency_key="key_1",
    progress=lambda _: None,
)


class Place(Struct):
    """A place on a map."""

    name: str
    near: list["Place"] = []


async def test_a_typed_function_becomes_a_tool() -> None:
    @tool(label="Find", idempotent=True, timeout_s=5.0)
    async def find_places(
        query: str, kind: Literal["city", "river"] = "city", limit: Annotated[int, Meta(ge=1, le=50)] = 10
    ) -> str:
        """Finds places by name.

        Looks in the whole world.

        Args:
            query: What to look for,
                in any language.
            kind: The kind of place.

        Anything below the section is not for the model.
        """
        return f"{query} {kind} {limit}"

    assert (find_places.name, find_places.label, find_places.idempotent) == ("find_places", "Find", True)
    assert find_places.description == "Finds places by name.\n\nLooks in the whole world."
    assert find_places.input_schema == {
        "type": "object",
        "properties": {
            "query": {"type": "string", "description": "What to look for, in any language."},
            "kind": {"enum": ["city", "river"], "default": "city", "description": "The kind of place."},
            "limit": {"type": "integer", "minimum": 1, "maximum": 50, "default": 10},
        },
        "required": ["query"],
        "additionalProperties": False,
    }
    assert await find_places.execute({"query": "Elbe", "limit": 3.0}, CONTEXT) == text_result("Elbe city 3")


async def test_no_parameters_make_a_closed_empty_object() -> None:
    @tool()
    async def ping() -> str:
        """Answers."""
        return "pong"

    assert ping.input_schema == {"type": "object", "properties": {}, "additionalProperties": False}
    assert await ping.execute({}, CONTEXT) == text_result("pong")


async def test_the_context_is_injected_and_not_in_the_schema() -> None:
    @tool()
    async def who(context: ToolContext, greeting: str = "Hi") -> str:
        """Tells the session."""
        return f"{greeting} {context.session_id}"

    assert list(who.input_schema["properties"]) == ["greeting"]
    assert await who.execute({}, CONTEXT) == text_result("Hi sess_1")


async def test_structs_and_dates_arrive_as_what_they_are() -> None:
    @tool()
    async def visit(place: Place, day: date) -> str:
        """Plans a visit."""
        return f"{place.near[0].name} {day.year}"

    assert visit.input_schema["properties"]["place"] == {"$ref": "#/$defs/Place"}
    assert "Place" in visit.input_schema["$defs"]
    arguments = {"place": {"name": "a", "near": [{"name": "b"}]}, "day": "2026-11-30"}
    assert await visit.execute(arguments, CONTEXT) == text_result("b 2026")


@pytest.mark.parametrize("arguments", [{"day": "soon"}, {}, {"day": "2026-11-30", "more": 1}])
async def test_arguments_that_do_not_fit_are_for_the_model_to_correct(arguments: dict[str, Any]) -> None:
    @tool()
    async def on(day: date) -> str:
        """Tells the day."""
        return str(day)

    with pytest.raises(InvalidArguments, match="The arguments do not fit"):
        await on.execute(arguments, CONTEXT)


def test_a_function_that_cannot_be_a_tool_is_refused_when_it_is_defined() -> None:
    async def untyped(x) -> None:  # type: ignore[no-untyped-def]
        """Has no type."""

    async def positional(x: int, /) -> None:
        """Cannot be called by name."""

    async def undescribed(x: int) -> None: ...

    async def odd(x: Callable[[], int]) -> None:
        """Has a type that JSON does not have."""

    def blocking() -> None:
        """Is no coroutine."""

    functions: list[Callable[..., Any]] = [untyped, positional, undescribed, odd, blocking]
    for function in functions:
        with pytest.raises(TypeError):
            tool()(function)


class Color(Enum):
    RED = "red"


@dataclass
class Point:
    x: float
    y: Decimal


IMAGE = ImageBlock(source=Base64Source(media_type="image/png", data="iVBORw0KGgo="))


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (float("nan"), '"NaN"'),
        ([float("inf"), float("-inf")], '["Infinity", "-Infinity"]'),
        (12345678901234567890123, "12345678901234567890123"),
        (Decimal("0.10"), '"0.10"'),
        (datetime(2026, 11, 30, tzinfo=UTC), '"2026-11-30T00:00:00Z"'),
        (timedelta(seconds=90), '"PT90S"'),
        (UUID(int=1), '"00000000-0000-0000-0000-000000000001"'),
        (b"\x00\xff", '"AP8="'),
        ({"b", "a", "c"}, '["a", "b", "c"]'),
        (Color.RED, '"red"'),
        (
            {1: "one", None: "none", Color.RED: "r", 1.5: "f"},
            '{"1": "one", "null": "none", "red": "r", "1.5": "f"}',
        ),
        (Point(x=float("nan"), y=Decimal("1.0")), '{"x": "NaN", "y": "1.0"}'),
        ({"block": TextBlock(text="t")}, '{"block": {"type": "text", "text": "t"}}'),
        ({"a\x00": "\ud83d"}, '{"a\ufffd": "\ufffd"}'),
        (True, "true"),
        ([], "[]"),
        ("é", '"é"'),
    ],
)
def test_each_value_has_one_json_form(value: object, text: str) -> None:
    """H-08."""
    assert json_text(value) == text
    assert json.loads(text, parse_constant=pytest.fail) is not None


@pytest.mark.parametrize("value", [object(), {"x": object()}, [10**5_000], lambda: None])
def test_a_value_without_a_json_form_is_an_error_for_the_model(value: object) -> None:
    """H-08."""
    with pytest.raises(UnusableResult):
        json_text(value)


def test_a_value_that_contains_itself_is_an_error_for_the_model() -> None:
    loop: list[object] = []
    loop.append(loop)
    with pytest.raises(UnusableResult):
        json_text(loop)


@pytest.mark.parametrize(
    ("value", "result"),
    [
        ("a\x00b", text_result("a\ufffdb")),
        (None, ToolResult()),
        (TextBlock(text="t"), text_result("t")),
        (IMAGE, ToolResult(content=(IMAGE,))),
        ([TextBlock(text="t"), IMAGE], ToolResult(content=(TextBlock(text="t"), IMAGE))),
        ({"a": [1, None]}, text_result('{"a": [1, null]}')),
        ([], text_result("[]")),
        (False, text_result("false")),
        (
            text_result("x", is_error=True, details={"d": 1}),
            text_result("x", is_error=True, details={"d": 1}),
        ),
    ],
)
def test_each_return_value_is_a_result(value: object, result: ToolResult) -> None:
    assert to_result(value) == result
