"""What the model APIs demand of a conversation, as checks over the bodies that our adapters send.

Each function takes the body of a request and returns the broken rules: empty when the API would take it.
Source: the API references of Anthropic Messages, OpenAI Responses and OpenAI Chat Completions, as measured in
the adapters' contract tests (read 2026-11-30).
"""

import json
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec

from providers.anthropic_request import build_body
from providers.openai_chat_endpoint import GENERIC_CHAT, OPENAI_CHAT
from providers.openai_chat_request import chat_body
from providers.openai_responses_request import responses_body
from providers.tool_names import ToolNames
from providers.types import Message, ProviderRequest, TextBlock, ToolSpec

Json = dict[str, Any]

_ID = re.compile(r"[a-zA-Z0-9_-]+", re.ASCII)
NEXT = Message(role="user", blocks=(TextBlock(text="Go on."),))


def refusals(messages: Sequence[Message], tools: Sequence[str]) -> list[str]:
    """Why an API would refuse to go on with this transcript, asked as each adapter asks it."""
    going_on = (*messages, NEXT)
    names = ToolNames(tools)

    def request(model: str) -> ProviderRequest:
        specs = tuple(
            ToolSpec(name=tool, description=tool, input_schema={"type": "object"}) for tool in tools
        )
        return ProviderRequest(model=model, messages=going_on, tools=specs)

    bodies: tuple[tuple[str, Callable[[Json], Iterator[str]], Any], ...] = (
        ("anthropic", anthropic_problems, build_body(request("claude-sonnet-4-6"), names)),
        (
            "responses",
            responses_problems,
            responses_body(request("gpt-5.2"), names, api="openai_responses", reasoning_summary=None),
        ),
        *(
            ("chat", chat_problems, chat_body(request("gpt-5.2"), endpoint, names, "openai_chat"))
            for endpoint in (OPENAI_CHAT, GENERIC_CHAT)
        ),
    )
    return [
        f"{name}: {problem}"
        for name, check, body in bodies
        for problem in check(msgspec.json.decode(msgspec.json.encode(body)))
    ]


# -- Anthropic Messages ---------------------------------------------------------------------------------


def anthropic_problems(body: Json) -> Iterator[str]:
    """Turns alternate and begin with the user; results come first, for exactly the calls before them."""
    expected, asked, seen = "user", list[str](), set[str]()
    for at, message in enumerate(body["messages"]):
        role, content = message["role"], message["content"]
        if role != expected:
            yield f"messages.{at} is {role}"
        expected = "assistant" if role == "user" else "user"
        if not content:
            yield f"messages.{at} is empty"
        yield from (f"messages.{at}: {problem}" for problem in _blocks_of(content, role))
        given = [block["tool_use_id"] for block in content if block["type"] == "tool_result"]
        if sorted(given) != sorted(asked):
            yield f"messages.{at} answers {given}, asked were {asked}"
        kinds = [block["type"] for block in content]
        if kinds[: len(given)] != ["tool_result"] * len(given):
            yield f"messages.{at} has something before its results"
        asked = [block["id"] for block in content if block["type"] == "tool_use"]
        for use_id in asked:
            if use_id in seen or not _ID.fullmatch(use_id):
                yield f"messages.{at} has the tool use id {use_id!r}"
            seen.add(use_id)
    if expected == "user":
        yield "the last message is the assistant's"


def _blocks_of(content: list[Json], role: str) -> Iterator[str]:
    allowed = {"user": {"text", "image", "tool_result"}, "assistant": {"text", "tool_use", "thinking"}}[role]
    for block in content:
        if block["type"] not in allowed:
            yield f"a {block['type']} block of {role}"
        if block["type"] == "text" and not block["text"].strip():
            yield "a blank text"
        if block["type"] == "tool_use" and not isinstance(block["input"], dict):
            yield "a tool use without an object as input"
        if block["type"] == "tool_result":
            yield from (f"in a result: {problem}" for problem in _blocks_of(block["content"], "user"))
            if not block["content"]:
                yield "an empty result"
    if role == "assistant" and content and content[-1]["type"] == "thinking":
        yield "ends in thinking"


# -- OpenAI Responses -----------------------------------------------------------------------------------


def responses_problems(body: Json) -> Iterator[str]:
    """Each call has one output after it and before anybody speaks again; no output lacks its call."""
    open_calls, seen = set[str](), set[str]()
    for at, item in enumerate(body["input"]):
        kind = item.get("type", "message")
        if kind == "function_call":
            call_id = item["call_id"]
            if call_id in seen or not 0 < len(call_id) <= 64:
                yield f"input.{at} has the call id {call_id!r}"
            open_calls.add(call_id)
            seen.add(call_id)
            yield from (f"input.{at}: {problem}" for problem in _arguments(item))
        elif kind == "function_call_output":
            if item["call_id"] not in open_calls:
                yield f"input.{at} is an output of {item['call_id']}, which is not open"
            open_calls.discard(item["call_id"])
        elif kind == "message":
            if open_calls:
                yield f"input.{at} comes while {sorted(open_calls)} lack their outputs"
            if not _says_something(item["content"]):
                yield f"input.{at} is empty"
    if open_calls:
        yield f"no output of {sorted(open_calls)}"


# -- OpenAI Chat Completions ----------------------------------------------------------------------------


def chat_problems(body: Json) -> Iterator[str]:
    """A message with calls is followed by one tool message for each; users do not speak twice in a row."""
    asked, before, seen = list[str](), "", set[str]()
    for at, message in enumerate(body["messages"]):
        role = message["role"]
        if role == "tool":
            if message["tool_call_id"] not in asked:
                yield f"messages.{at} answers {message['tool_call_id']}, which is not open"
            else:
                asked.remove(message["tool_call_id"])
        elif asked:
            yield f"messages.{at} ({role}) comes while {asked} lack their results"
        if role in {"user", "assistant"} and role == before:
            yield f"messages.{at} is {role} again"
        calls = message.get("tool_calls", [])
        if not calls and not _says_something(message.get("content")):
            yield f"messages.{at} ({role}) is empty"
        for call in calls:
            if call["id"] in seen or not 0 < len(call["id"]) <= 40:
                yield f"messages.{at} has the call id {call['id']!r}"
            seen.add(call["id"])
            asked.append(call["id"])
            yield from (f"messages.{at}: {problem}" for problem in _arguments(call["function"]))
        before = role
    if asked:
        yield f"no results of {asked}"


def _arguments(call: Json) -> Iterator[str]:
    try:
        is_object = isinstance(json.loads(call["arguments"]), dict)
    except ValueError:
        is_object = False
    if not is_object or not call["name"]:
        yield f"the call {call['name']!r} with {call['arguments']!r}"


def _says_something(content: Any) -> bool:
    if isinstance(content, str) or content is None:
        return bool((content or "").strip())
    return any(part["type"].endswith("image") or part.get("text", "").strip() for part in content)
