"""The adapter for the Chat Completions API and the many servers that speak it."""

import contextlib
from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import aclosing
from types import MappingProxyType
from typing import Any

from providers.chat_tool_calls import ToolCallAssembler
from providers.errors import (
    AuthRefused,
    BadPayload,
    ModelNotFound,
    RequestRejected,
    RequestTimedOut,
    StreamTruncated,
)
from providers.openai_chat_endpoint import GENERIC_CHAT, OPENAI_CHAT, ChatEndpoint
from providers.openai_chat_models import (
    chat_capabilities,
    model_names,
    told_capabilities,
    told_facts,
)
from providers.openai_chat_request import chat_body
from providers.openai_chat_returned import ReturnedFields
from providers.openai_sse import text_or_none
from providers.openai_transport import Exchange, OpenAITransport
from providers.openai_usage import chat_usage
from providers.tool_names import ToolNames
from providers.types import (
    Capabilities,
    JsonObject,
    ListedModel,
    MessageEnd,
    MessageStart,
    NativeBlocks,
    ProviderEvent,
    ProviderRequest,
    Stop,
    TextDelta,
    ThinkingDelta,
    UsageUpdate,
)

API = "openai_chat"
AFTER_FINISH_S = 5.0  # usage follows the finish reason at once or not at all; some servers then never close

_STOPS = {
    "stop": Stop.END_TURN,
    "tool_calls": Stop.END_TURN,  # the presence of calls decides, not the reason
    "function_call": Stop.END_TURN,
    "length": Stop.MAX_TOKENS,
    "content_filter": Stop.REFUSAL,
}
_FAILED = ("error", "network_error")


class OpenAIChat:
    """Chat Completions. `endpoint` says how the server differs; None: OpenAI's own, or a cautious default
    where a `base_url` is given. `headers` go with every request.

    `requires_finish_reason` None: as the endpoint says. `first_event_timeout_s` bounds the wait for the first
    byte of the answer, `idle_timeout_s` each later one.
    """

    api: str = API

    def __init__(
        self,
        *,
        api_key: str,
        base_url: str | None = None,
        first_event_timeout_s: float = 120.0,
        idle_timeout_s: float = 120.0,
        requires_finish_reason: bool | None = None,
        endpoint: ChatEndpoint | None = None,
        headers: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self._endpoint = endpoint or (OPENAI_CHAT if base_url is None else GENERIC_CHAT)
        self._requires_finish_reason = (
            self._endpoint.requires_finish_reason
            if requires_finish_reason is None
            else requires_finish_reason
        )
        self._told: dict[str, Capabilities] = {}
        self._transport = OpenAITransport(
            api_key=api_key,
            base_url=base_url,
            first_event_timeout_s=first_event_timeout_s,
            idle_timeout_s=idle_timeout_s,
            headers=headers,
            is_proxy=self._endpoint.is_proxy,
        )

    def capabilities(self, model: str) -> Capabilities:
        """From what the server has told of its models, else from the tables."""
        return self._told.get(model) or chat_capabilities(model, self._endpoint)

    async def list_models(self) -> tuple[ListedModel, ...]:
        """The models that the server names, with what it tells of them. Raises: ProviderError."""
        told = {}
        if (path := self._endpoint.model_facts_path) is not None:
            with contextlib.suppress(
                AuthRefused, ModelNotFound, RequestRejected
            ):  # it may be for admins only
                facts = told_facts(await self._transport.ask(path))
                told = {name: told_capabilities(self._table(name), fields) for name, fields in facts.items()}
        names = told or model_names(await self._transport.ask("/models"))
        self._told = told
        return tuple(ListedModel(model=name, capabilities=self.capabilities(name)) for name in names)

    def _table(self, model: str) -> Capabilities:
        return chat_capabilities(model, self._endpoint)

    async def stream(self, request: ProviderRequest) -> AsyncGenerator[ProviderEvent, None]:
        names = ToolNames(spec.name for spec in request.tools)
        body = chat_body(request, self._endpoint, names, self.api)
        async with self._transport.exchange("/chat/completions", body) as exchange:
            reading = _Reading(request.model, self._endpoint, names, exchange.headers)
            async with aclosing(self._read(exchange, reading)) as events:
                async for event in events:
                    yield event
            if not exchange.has_frames:
                for event in reading.read_whole(exchange, exchange.whole_answer()):
                    yield event
            for event in reading.end(requires_finish_reason=self._requires_finish_reason):
                yield event

    async def _read(self, exchange: Exchange, reading: "_Reading") -> AsyncGenerator[ProviderEvent, None]:
        while True:
            try:
                frame = await anext(exchange, None)
            except (StreamTruncated, RequestTimedOut):
                if reading.finish_reason is None:
                    raise
                return  # the answer is whole; only its usage may be missing
            if frame is None:
                return
            if frame.is_done:
                reading.is_done = True
                await exchange.drain()
                return
            for event in reading.read(exchange, exchange.decode(frame)):
                yield event
            if reading.finish_reason is not None:
                exchange.expect_end(within_s=AFTER_FINISH_S)

    async def aclose(self) -> None:
        await self._transport.aclose()


class _Reading:
    """What has been read of one answer."""

    def __init__(
        self, model: str, endpoint: ChatEndpoint, names: ToolNames, headers: Mapping[str, str]
    ) -> None:
        self.finish_reason: str | None = None
        self.is_done = False
        self._model = model
        self._endpoint = endpoint
        self._is_document = False
        self._has_started = False
        self._is_refusal = False
        self._blocks = 0
        self._open: tuple[type[TextDelta] | type[ThinkingDelta], int] | None = None
        self._calls = ToolCallAssembler(next_index=self._next_index, agent_name=names.from_wire)
        self._returned = ReturnedFields(endpoint.returned_fields)
        cost = headers.get(endpoint.cost_header) if endpoint.cost_header else None
        self._usage: JsonObject = {} if cost is None else {"cost": cost}

    def _next_index(self) -> int:
        self._open = None
        self._blocks += 1
        return self._blocks - 1

    def read(self, exchange: Exchange, chunk: Any) -> Iterator[ProviderEvent]:
        """The events of one chunk. Raises: BadPayload; the error that the chunk reports."""
        if not isinstance(chunk, dict):
            raise BadPayload(f"a chunk is not an object but {type(chunk).__name__}")
        yield from self._start(chunk)
        choice = _first_choice(chunk)
        reason = choice.get("finish_reason")
        if reason in _FAILED or choice.get("native_finish_reason") in _FAILED:
            raise exchange.reported(
                choice.get("error") or {"code": "server_error", "message": "the answer ended in an error"}
            )
        delta = choice.get("delta") or choice.get("message")
        if isinstance(delta, dict):
            yield from self._read_delta(delta)
        if isinstance(reason, str) and reason:
            self.finish_reason = reason
        yield from self._read_usage(chunk.get("usage"))

    def _start(self, chunk: JsonObject) -> Iterator[ProviderEvent]:
        if not self._has_started and ("choices" in chunk or "usage" in chunk):
            self._has_started = True
            yield MessageStart(
                model=text_or_none(chunk.get("model")), provider_message_id=text_or_none(chunk.get("id"))
            )

    def _read_delta(self, delta: JsonObject) -> Iterator[ProviderEvent]:
        self._returned.feed(delta)
        for name in self._endpoint.reasoning_fields:
            if isinstance(text := delta.get(name), str) and text:
                yield self._delta(ThinkingDelta, text)
                break
        for kind, text in _content(delta.get("content")):
            yield self._delta(kind, text)
        if isinstance(refusal := delta.get("refusal"), str) and refusal:
            self._is_refusal = True
            yield self._delta(TextDelta, refusal)
        yield from self._calls.feed(delta.get("tool_calls"))
        if isinstance(function := delta.get("function_call"), dict):  # the form before tools
            yield from self._calls.feed([{"index": 0, "function": function}])

    def _delta(self, kind: type[TextDelta] | type[ThinkingDelta], text: str) -> ProviderEvent:
        if self._open is None or self._open[0] is not kind:
            self._open = (kind, self._next_index())
        return kind(index=self._open[1], text=text)

    def _read_usage(self, raw: Any) -> Iterator[ProviderEvent]:
        """Counts are totals so far: a later one replaces an earlier one, a missing one does not."""
        if not isinstance(raw, dict):
            return
        merged = self._usage | {key: value for key, value in raw.items() if value is not None}
        if merged != self._usage:
            self._usage = merged
            yield UsageUpdate(usage=chat_usage(merged, cost=self._endpoint.cost))

    def read_whole(self, exchange: Exchange, answer: JsonObject) -> Iterator[ProviderEvent]:
        """The events of an answer that came as one document. It is complete, whatever its reason."""
        choice = _first_choice(answer)
        message = choice.get("message")
        if not isinstance(message, dict):
            raise BadPayload("the answer is neither a stream nor a chat completion")
        calls = message.get("tool_calls")
        for position, call in enumerate(calls if isinstance(calls, list) else ()):
            if isinstance(call, dict):
                call["index"] = position
        self._is_document = True
        yield from self.read(exchange, answer)

    def end(self, *, requires_finish_reason: bool) -> Iterator[ProviderEvent]:
        """The ends of the calls and of the message.

        Raises: StreamTruncated, without evidence that the answer is whole.
        """
        reason = self.finish_reason
        is_terminated = self._is_document or (self.is_done and not requires_finish_reason)
        is_proven = reason is not None or (is_terminated and not self._calls.has_unreadable_call())
        if not self._has_started or not is_proven:
            raise StreamTruncated("the answer ended without a finish reason")
        stop = _STOPS.get(reason or "", Stop.UNKNOWN)
        ends = self._calls.finish(is_cut=stop in (Stop.MAX_TOKENS, Stop.REFUSAL))
        yield from ends
        if self._is_refusal and stop is Stop.END_TURN:
            stop = Stop.REFUSAL
        if ends and stop in (Stop.END_TURN, Stop.UNKNOWN):
            stop = Stop.TOOL_USE
        body = self._returned.native_body(self._calls.extras())
        native = None if body is None else NativeBlocks(api=API, model=self._model, body=body)
        yield MessageEnd(stop=stop, native_stop=reason, native=native)


def _first_choice(chunk: JsonObject) -> JsonObject:
    """The only choice, or an empty object: chunks of usage or of a prompt filter have none."""
    choices = chunk.get("choices")
    return choices[0] if isinstance(choices, list) and choices and isinstance(choices[0], dict) else {}


def _content(content: Any) -> Iterator[tuple[type[TextDelta] | type[ThinkingDelta], str]]:
    """The pieces of a `content` that is text, or a list of text and thinking parts."""
    if isinstance(content, str):
        if content:
            yield TextDelta, content
        return
    for part in content if isinstance(content, list) else ():
        if not isinstance(part, dict):
            continue
        if isinstance(text := part.get("text"), str) and text:
            yield TextDelta, text
        thinking = part.get("thinking")
        for inner in thinking if isinstance(thinking, list) else ():
            if isinstance(inner, dict) and isinstance(text := inner.get("text"), str) and text:
                yield ThinkingDelta, text
