"""Scripts of the Anthropic Messages API, and what the adapter makes of them."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from providers.anthropic_messages import AnthropicMessages
from providers.errors import (
    ProviderError,
)
from providers.types import (
    Message,
    MessageEnd,
    Provider,
    ProviderEvent,
    ProviderRequest,
    TextBlock,
    ToolCallEnd,
    ToolSpec,
    UsageUpdate,
)
from tests.support.model_server import Answer, ModelServer, sse

MODEL = "claude-sonnet-4-6"
SCHEMA = {"type": "object", "properties": {}}
REQUEST = ProviderRequest(
    model=MODEL,
    messages=(Message(role="user", blocks=(TextBlock(text="hi"),)),),
    tools=tuple(
        ToolSpec(name=name, description=name, input_schema=SCHEMA) for name in ("ls", "calendar.list")
    ),
)

Frame = dict[str, Any]


def start(**usage: Any) -> Frame:
    message = {"id": "m1", "type": "message", "role": "assistant", "model": "fake", "content": []}
    usage = usage or {"input_tokens": 11, "output_tokens": 1}
    return {"type": "message_start", "message": {**message, "stop_reason": None, "usage": usage}}


def block(index: int, **content: Any) -> Frame:
    return {"type": "content_block_start", "index": index, "content_block": content}


def delta(index: int, kind: str, **fields: Any) -> Frame:
    return {"type": "content_block_delta", "index": index, "delta": {"type": kind, **fields}}


def stop(index: int) -> Frame:
    return {"type": "content_block_stop", "index": index}


def ended(reason: str | None, **usage: Any) -> Frame:
    usage = usage or {"output_tokens": 9}
    return {"type": "message_delta", "delta": {"stop_reason": reason, "stop_sequence": None}, "usage": usage}


DONE: Frame = {"type": "message_stop"}


def text(index: int, *pieces: str) -> list[Frame]:
    deltas = [delta(index, "text_delta", text=piece) for piece in pieces]
    return [block(index, type="text", text=""), *deltas, stop(index)]


def call(index: int, call_id: str, name: str, *pieces: str) -> list[Frame]:
    deltas = [delta(index, "input_json_delta", partial_json=piece) for piece in pieces]
    return [block(index, type="tool_use", id=call_id, name=name, input={}), *deltas, stop(index)]


def api_error(kind: str, message: str = "x", **details: Any) -> Frame:
    return {
        "type": "error",
        "error": {"type": kind, "message": message, "details": details},
        "request_id": "r",
    }


@asynccontextmanager
async def api(**settings: Any) -> AsyncIterator[tuple[ModelServer, AnthropicMessages]]:
    async with ModelServer() as server:
        provider = AnthropicMessages(api_key="key-1234567890", base_url=server.base_url, **settings)
        try:
            yield server, provider
        finally:
            await provider.aclose()


async def collect(provider: Provider, request: ProviderRequest = REQUEST) -> list[ProviderEvent]:
    return [event async for event in provider.stream(request)]


async def play(*frames: str | Frame, request: ProviderRequest = REQUEST) -> list[ProviderEvent]:
    """The adapter's events for one answer of these frames."""
    async with api() as (server, provider):
        server.enqueue(Answer(chunks=[sse(*frames)]))
        return await collect(provider, request)


async def fail(answer: Answer, **settings: Any) -> tuple[ProviderError, list[ProviderEvent]]:
    """The error that an answer ends in, and the events before it."""
    events: list[ProviderEvent] = []
    async with api(**settings) as (server, provider):
        server.enqueue(answer)
        with pytest.raises(ProviderError) as caught:
            async for event in provider.stream(REQUEST):
                events.append(event)
        assert len(server.requests) == 1  # no retries of its own
    return caught.value, events


def end_of(events: list[ProviderEvent]) -> MessageEnd:
    ends = [event for event in events if isinstance(event, MessageEnd)]
    assert ends == events[-1:]
    return ends[0]


def native_of(events: list[ProviderEvent]) -> list[Any]:
    native = end_of(events).native
    assert native is not None
    assert (native.api, native.model) == ("anthropic_messages", MODEL)
    blocks: list[Any] = json.loads(native.body)
    return blocks


def calls_of(events: list[ProviderEvent]) -> list[ToolCallEnd]:
    return [event for event in events if isinstance(event, ToolCallEnd)]


def last_usage(events: list[ProviderEvent]) -> UsageUpdate:
    return [event for event in events if isinstance(event, UsageUpdate)][-1]
