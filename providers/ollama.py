"""The adapter for Ollama's own API. The one that it shares with others knows no context window."""

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Iterator
from typing import Any

import msgspec

from providers.chat_tool_calls import ToolCallAssembler
from providers.cleaning import clean_json
from providers.errors import BadPayload, ModelNotFound, ProviderError, RequestRejected, StreamTruncated
from providers.ollama_models import OllamaModel, guessed_model, told_model
from providers.ollama_request import API, chat_body
from providers.ollama_transport import OllamaTransport
from providers.openai_sse import text_or_none
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
    Usage,
    UsageUpdate,
)

DEFAULT_BASE_URL = "http://127.0.0.1:11434"
DEFAULT_CONTEXT_TOKENS = 16_384  # the server's own 4,096 hold no agent; more costs memory of the machine
KNOWN_FOR_S = 600.0  # a model may be pulled anew under its name
MAX_KNOWN = 1000
MAX_LISTED = 100

_STOPS = {"stop": Stop.END_TURN, "length": Stop.MAX_TOKENS}


class Ollama:
    """`/api/chat` of an Ollama server.

    `context_tokens` is the window that is asked for where a model's file names none. `keep_alive` says how
    long a model stays loaded, in the server's form (`10m`, `-1`). The time-outs are those of the other
    adapters; the first event includes the loading of the model.
    """

    api: str = API

    def __init__(
        self,
        *,
        api_key: str = "",
        base_url: str | None = None,
        first_event_timeout_s: float = 300.0,
        idle_timeout_s: float = 120.0,
        context_tokens: int = DEFAULT_CONTEXT_TOKENS,
        keep_alive: str | None = None,
    ) -> None:
        self._context_tokens = context_tokens
        self._keep_alive = keep_alive
        self._known: dict[str, tuple[float, OllamaModel]] = {}
        self._asking = asyncio.Lock()  # many requests for a model at once ask but once
        self._transport = OllamaTransport(
            api_key=api_key,
            base_url=base_url or DEFAULT_BASE_URL,
            first_event_timeout_s=first_event_timeout_s,
            idle_timeout_s=idle_timeout_s,
        )

    def capabilities(self, model: str) -> Capabilities:
        """What the server said of the model, once it was asked; before that, what the name suggests."""
        known = self._known[model][1] if model in self._known else guessed_model(model)
        return known.capabilities(window_tokens=known.window_tokens(self._context_tokens))

    async def stream(self, request: ProviderRequest) -> AsyncGenerator[ProviderEvent, None]:
        model = await self._model(request.model)
        if request.tools and not model.tools:
            raise RequestRejected(f"the model {request.model} cannot call tools")
        names = ToolNames(spec.name for spec in request.tools)
        body = chat_body(
            request, model, names, context_tokens=self._context_tokens, keep_alive=self._keep_alive
        )
        reading = _Reading(request.model, names)
        async with self._transport.exchange("/api/chat", body) as lines:
            async for line in lines:
                for event in reading.read(line):
                    yield event
                if reading.has_ended:
                    await lines.drain()
                    return
        raise StreamTruncated("the answer ended without a line that is done")

    async def list_models(self) -> tuple[ListedModel, ...]:
        """The models that the server has. Raises: ProviderError."""
        answer = await self._transport.ask("GET", "/api/tags")
        found = answer.get("models")
        entries = [entry for entry in found if isinstance(entry, dict)] if isinstance(found, list) else []
        names = [name for entry in entries if (name := text_or_none(entry.get("model") or entry.get("name")))]
        listed = []
        for name in names[:MAX_LISTED]:
            with contextlib.suppress(ModelNotFound):  # removed in between
                await self._model(name)
                listed.append(ListedModel(model=name, capabilities=self.capabilities(name)))
        return tuple(listed)

    async def _model(self, name: str) -> OllamaModel:
        """What is known of a model, asked of the server at first and then now and again.

        Raises: ModelNotFound, and what says that nobody answers. A server that cannot tell is no failure.
        """
        async with self._asking:
            now = time.monotonic()
            asked_at, known = self._known.get(name, (0.0, None))
            if known is not None and now - asked_at < KNOWN_FOR_S:
                return known
            try:
                told = told_model(name, await self._transport.ask("POST", "/api/show", {"model": name}))
            except ProviderError as error:
                if known is None and not _cannot_tell(error):
                    raise
                told = known or guessed_model(name)
            if len(self._known) >= MAX_KNOWN:
                self._known.clear()
            self._known[name] = (now, told)
            return told

    async def aclose(self) -> None:
        await self._transport.aclose()


def _cannot_tell(error: ProviderError) -> bool:
    """Whether the server does not know the question, rather than the model."""
    if isinstance(error, ModelNotFound):
        return "model" not in error.message.lower()
    return isinstance(error, RequestRejected | BadPayload)


class _Reading:
    """What has been read of one answer."""

    def __init__(self, model: str, names: ToolNames) -> None:
        self.has_ended = False
        self._model = model
        self._has_started = False
        self._blocks = 0
        self._open: tuple[type[TextDelta] | type[ThinkingDelta], int] | None = None
        self._thinking: list[str] = []
        self._calls_seen = 0
        self._calls = ToolCallAssembler(next_index=self._next_index, agent_name=names.from_wire)

    def _next_index(self) -> int:
        self._open = None
        self._blocks += 1
        return self._blocks - 1

    def read(self, line: JsonObject) -> Iterator[ProviderEvent]:
        """The events of one line. Raises: BadPayload."""
        message = line.get("message")
        if not self._has_started:
            if not isinstance(message, dict) and "done" not in line:
                raise BadPayload("the answer is not one of a chat")
            self._has_started = True
            yield MessageStart(model=text_or_none(line.get("model")))
        if isinstance(message, dict):
            yield from self._read_message(message)
        if line.get("done") is True:
            yield from self._end(line)

    def _read_message(self, message: JsonObject) -> Iterator[ProviderEvent]:
        if isinstance(thinking := message.get("thinking"), str) and thinking:
            self._thinking.append(thinking)
            yield self._delta(ThinkingDelta, thinking)
        if isinstance(text := message.get("content"), str) and text:
            yield self._delta(TextDelta, text)
        calls = message.get("tool_calls")
        for call in calls if isinstance(calls, list) else ():
            if isinstance(call, dict):
                # Each comes whole. The server's own index has been 0 for all of them.
                yield from self._calls.feed([{**call, "index": self._calls_seen}])
                self._calls_seen += 1

    def _delta(self, kind: type[TextDelta] | type[ThinkingDelta], text: str) -> ProviderEvent:
        if self._open is None or self._open[0] is not kind:
            self._open = (kind, self._next_index())
        return kind(index=self._open[1], text=text)

    def _end(self, line: JsonObject) -> Iterator[ProviderEvent]:
        reason = text_or_none(line.get("done_reason"))
        stop = _STOPS.get(reason or "stop", Stop.UNKNOWN)
        ends = self._calls.finish(is_cut=stop is Stop.MAX_TOKENS)
        yield from ends
        if ends and stop in (Stop.END_TURN, Stop.UNKNOWN):
            stop = Stop.TOOL_USE
        yield UsageUpdate(usage=_usage(line))
        self.has_ended = True
        yield MessageEnd(stop=stop, native_stop=reason, native=self._native())

    def _native(self) -> NativeBlocks | None:
        """The thinking, as the model wants it back while its tools are at work."""
        if not self._thinking:
            return None
        kept = [{"role": "assistant", "thinking": "".join(self._thinking)}]
        return NativeBlocks(api=API, model=self._model, body=msgspec.json.encode(clean_json(kept)))


def _usage(line: JsonObject) -> Usage:
    """The last line's counts. A missing one is not known: the server leaves it out when it used its cache."""
    raw = {key: value for key, value in line.items() if key.endswith(("_count", "_duration"))}
    return Usage(
        input_tokens=_count(line.get("prompt_eval_count")),
        output_tokens=_count(line.get("eval_count")),
        raw=raw,
    )


def _count(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None
