"""A schema for answers as each model API wants it."""

import json
from typing import Any

import pytest

from providers.anthropic_request import build_body
from providers.openai_chat_endpoint import OPENAI_CHAT
from providers.openai_chat_request import chat_body
from providers.openai_responses_request import responses_body
from providers.output_schema import closed, named_schema
from providers.tool_names import ToolNames
from providers.types import Message, ProviderRequest, TextBlock

CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
CLOSED = {"additionalProperties": False} | CITY


def asking(model: str, **fields: Any) -> ProviderRequest:
    hello = Message(role="user", blocks=(TextBlock(text="hi"),))
    return ProviderRequest(model=model, messages=(hello,), output_schema=CITY, **fields)


def test_every_object_is_closed_unless_it_says_otherwise() -> None:
    free = {"type": "object", "properties": {}, "additionalProperties": {"type": "string"}}
    schema = {
        "type": "object",
        "properties": {"default": CITY, "free": free, "list": {"type": "array", "items": CITY}},
        "$defs": {"enum": CITY},
        "default": CITY,
    }
    before = json.dumps(schema)
    found = closed(schema)
    assert found["additionalProperties"] is False
    assert found["properties"]["default"] == found["properties"]["list"]["items"] == CLOSED
    assert found["properties"]["free"] == free
    assert found["$defs"]["enum"] == CLOSED
    assert found["default"] == CITY
    assert json.dumps(schema) == before


@pytest.mark.parametrize(
    ("schema", "is_strict"),
    [
        (CITY, True),
        (CITY | {"required": []}, False),
        ({"type": "object", "properties": {"a": CITY | {"required": []}}, "required": ["a"]}, False),
        ({"anyOf": [CITY, {"type": "object", "properties": {"b": {}}}]}, False),
    ],
)
def test_strictness_is_asked_for_where_the_format_allows_it(schema: dict[str, Any], is_strict: bool) -> None:
    assert named_schema(schema)["strict"] is is_strict


def test_messages_take_it_beside_the_effort() -> None:
    body = build_body(asking("claude-opus-5-5", think_effort=0.5), ToolNames(()))
    schema = {"type": "json_schema", "schema": CLOSED}
    assert body["output_config"] == {"effort": "medium", "format": schema}
    assert "output_config" not in build_body(asking("some-other-model"), ToolNames(()))


def test_responses_take_it_as_a_text_format() -> None:
    body = responses_body(
        asking("gpt-6.1-sol"), ToolNames(()), api="openai_responses", reasoning_summary=None
    )
    named = {"name": "answer", "schema": CLOSED, "strict": True}
    assert body["text"] == {"format": {"type": "json_schema"} | named}


def test_chat_completions_take_it_as_a_response_format() -> None:
    body = chat_body(asking("gpt-4.1"), OPENAI_CHAT, ToolNames(()), "openai_chat")
    named = {"name": "answer", "schema": CLOSED, "strict": True}
    assert body["response_format"] == {"type": "json_schema", "json_schema": named}
