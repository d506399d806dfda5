"""The adapter for the OpenAI Responses API."""

from collections.abc import AsyncGenerator, Callable, Iterator
from typing import Any

from providers.errors import BadPayload, ProviderError, StreamTruncated
from providers.openai_models import model_family
from providers.openai_responses_items import OutputItems
from providers.openai_responses_request import responses_body
from providers.openai_sse import Frame, text_or_none
from providers.openai_transport import Exchange, OpenAITransport
from providers.openai_usage import responses_usage
from providers.tool_names import ToolNames
from providers.types import (
    Capabilities,
    JsonObject,
    MessageEnd,
    MessageStart,
    NativeBlocks,
    ProviderEvent,
    ProviderRequest,
    Stop,
    UsageUpdate,
)

API = "openai_responses"

_INCOMPLETE = {"max_output_tokens": Stop.MAX_TOKENS, "content_filter": Stop.REFUSAL}
_STARTS = ("response.created", "response.queued", "response.in_progress")


class OpenAIResponses:
    """Responses without server-side state: each request carries the whole transcript, nothing is stored.

    `reasoning_summary`: the kind of readable reasoning that is asked for; None for accounts that may not.
    `first_event_timeout_s` bounds the wait for the first byte of the answer, `idle_timeout_s` each later one.
    """

    api: str = API

    def __init__(
        self,
        *,
        api_key: str,
        base_url: str | None = None,
        first_event_timeout_s: float = 120.0,
        idle_timeout_s: float = 120.0,
        reasoning_summary: str | None = "auto",
    ) -> None:
        self._reasoning_summary = reasoning_summary
        self._transport = OpenAITransport(
            api_key=api_key,
            base_url=base_url,
            first_event_timeout_s=first_event_timeout_s,
            idle_timeout_s=idle_timeout_s,
        )

    def capabilities(self, model: str) -> Capabilities:
        return model_family(model).capabilities

    async def stream(self, request: ProviderRequest) -> AsyncGenerator[ProviderEvent, None]:
        names = ToolNames(spec.name for spec in request.tools)
        body = responses_body(request, names, api=self.api, reasoning_summary=self._reasoning_summary)
        async with self._transport.exchange("/responses", body) as exchange:
            reading = _Reading(request.model, names, exchange.reported)
            async for frame in exchange:
                if frame.is_done:
                    break
                for event in reading.read(exchange.decode(frame), frame):
                    if isinstance(event, MessageEnd):
                        await exchange.drain()
                    yield event
                if reading.has_ended:
                    return
            if exchange.has_frames:
                raise StreamTruncated("the answer ended without a terminal event")
            for event in reading.read_whole(exchange):
                yield event

    async def aclose(self) -> None:
        await self._transport.aclose()


class _Reading:
    """What has been read of one answer."""

    def __init__(self, model: str, names: ToolNames, reported: Callable[[Any], ProviderError]) -> None:
        self.has_ended = False
        self._model = model
        self._reported = reported
        self._has_started = False
        self._items = OutputItems(agent_name=names.from_wire)

    def read(self, event: Any, frame: Frame) -> Iterator[ProviderEvent]:
        """Our events for one of the API's. Unknown types, also of items, are passed over.

        Raises: the error that the event reports.
        """
        if not isinstance(event, dict):
            return
        kind = event.get("type") or frame.event
        response = _object(event.get("response"))
        if kind in _STARTS:
            yield from self._start(response)
        elif kind == "error":
            raise self._reported(event)
        elif kind in ("response.completed", "response.incomplete"):
            yield from self._end(kind, response)
        elif kind in ("response.failed", "response.cancelled"):
            yield from self._usage(response)
            raise self._reported(response.get("error") or {"code": "server_error", "message": kind})
        else:
            yield from self._items.read(kind, event, frame.data)

    def read_whole(self, exchange: Exchange) -> Iterator[ProviderEvent]:
        """The events of an answer that came as one document.

        Raises: StreamTruncated, when nothing came; BadPayload; the error that the document reports.
        """
        response = exchange.whole_answer()
        kind = f"response.{response.get('status')}"
        yield from self.read({"type": kind, "response": response}, Frame(kind, b""))
        if not self.has_ended:
            raise BadPayload("the answer is neither a stream nor a finished response")

    def _start(self, response: JsonObject) -> Iterator[ProviderEvent]:
        if not self._has_started:
            self._has_started = True
            yield MessageStart(
                model=text_or_none(response.get("model")),
                provider_message_id=text_or_none(response.get("id")),
            )

    def _usage(self, response: JsonObject) -> Iterator[ProviderEvent]:
        if usage := _object(response.get("usage")):
            yield UsageUpdate(usage=responses_usage(usage))

    def _end(self, kind: str, response: JsonObject) -> Iterator[ProviderEvent]:
        yield from self._start(response)
        reason = _object(response.get("incomplete_details")).get("reason")
        is_cut = kind == "response.incomplete"
        yield from self._items.finish(response.get("output"), is_cut=is_cut)
        yield from self._usage(response)
        if is_cut:
            stop = _INCOMPLETE.get(reason or "", Stop.UNKNOWN)
        elif self._items.has_ended_calls:
            stop = Stop.TOOL_USE
        else:
            stop = Stop.REFUSAL if self._items.has_refusal else Stop.END_TURN
        self.has_ended = True
        body = self._items.native_body()
        native = None if body is None else NativeBlocks(api=API, model=self._model, body=body)
        yield MessageEnd(stop=stop, native_stop=reason or response.get("status"), native=native)


def _object(value: Any) -> JsonObject:
    return value if isinstance(value, dict) else {}
