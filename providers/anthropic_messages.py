"""The Anthropic Messages API, through the vendor's SDK."""

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping
from contextlib import aclosing
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from providers.anthropic_models import claude_model
from providers.anthropic_request import API, build_body
from providers.anthropic_stream import AnswerReader
from providers.errors import (
    BadPayload,
    ConnectionLost,
    ProviderError,
    RequestRejected,
    RequestTimedOut,
    StreamTruncated,
)
from providers.http_errors import error_class, log_message, parse_retry_after, transport_error
from providers.tool_names import ToolNames
from providers.types import Capabilities, JsonObject, ProviderEvent, ProviderRequest

if TYPE_CHECKING:
    import anthropic
    import httpx2

DEFAULT_BASE_URL = "https://api.anthropic.com"
CONNECT_TIMEOUT_S = 5.0
WRITE_TIMEOUT_S = 30.0
POOL_TIMEOUT_S = 10.0
DRAIN_TIMEOUT_S = 0.5  # what an answer's end may take to arrive for its connection to be used again
MAX_PAUSES = 6  # of one answer, in which tools of the API's own run
MAX_ERROR_BODY_BYTES = 65_536

# In a stream the status is 200 whatever happened: the type of the error stands for the status.
_STATUS_BY_TYPE: Mapping[str, int] = {
    "invalid_request_error": 400,
    "authentication_error": 401,
    "billing_error": 402,
    "permission_error": 403,
    "not_found_error": 404,
    "request_too_large": 413,
    "rate_limit_error": 429,
    "api_error": 500,
    "timeout_error": 504,
    "overloaded_error": 529,
}


class AnthropicMessages:
    """The `Provider` of the Messages API and of servers that speak it.

    `first_event_timeout_s` is counted from the sending of the request, `idle_timeout_s` between two events.
    The first instance of a process imports the SDK, which takes seconds: make it in a thread.
    """

    api = API

    def __init__(
        self,
        *,
        api_key: str,
        base_url: str | None = None,
        first_event_timeout_s: float = 120.0,
        idle_timeout_s: float = 120.0,
    ) -> None:
        import anthropic
        import httpx2

        self._api_key = api_key
        self._first_event_timeout_s = first_event_timeout_s
        self._idle_timeout_s = idle_timeout_s
        # A base URL and no telemetry, explicitly: the SDK would look for both in the environment.
        self._client = anthropic.AsyncAnthropic(
            api_key=api_key,
            base_url=base_url or DEFAULT_BASE_URL,
            max_retries=0,
            open_telemetry=False,
            timeout=httpx2.Timeout(
                connect=CONNECT_TIMEOUT_S,
                read=max(first_event_timeout_s, idle_timeout_s),
                write=WRITE_TIMEOUT_S,
                pool=POOL_TIMEOUT_S,
            ),
        )
        self._transport_errors = (httpx2.HTTPError, httpx2.InvalidURL, httpx2.StreamError)
        self._sdk = anthropic

    def capabilities(self, model: str) -> Capabilities:
        """From a table of the vendor's models; an unknown one counts as able to use tools and see."""
        return claude_model(model).capabilities

    async def stream(self, request: ProviderRequest) -> AsyncIterator[ProviderEvent]:
        names = ToolNames(tool.name for tool in request.tools)
        body = build_body(request, names)
        reader = AnswerReader(model=request.model, names=names, pauses=MAX_PAUSES)
        asked = body["messages"]
        while True:
            async with aclosing(self._read(body, request.extra_body, reader)) as events:
                async for event in events:
                    yield event
            if reader.is_complete:
                return
            # Paused: the same request goes again, with what there is of the answer as its last message.
            content = [block for block in reader.content if not _is_blank(block)]
            body["messages"] = [*asked, {"role": "assistant", "content": content}] if content else asked
            reader.go_on()

    async def _read(
        self, body: JsonObject, extra_body: JsonObject, reader: AnswerReader
    ) -> AsyncGenerator[ProviderEvent, None]:
        """The events of one response, until the answer is complete or paused."""
        deadline = asyncio.get_running_loop().time() + self._first_event_timeout_s
        response = await self._send(body, extra_body, deadline)
        try:
            await self._refuse_other_content(response, deadline)
            frames = self._sdk.AsyncStream.raw_events(response)
            while not reader.is_complete and not reader.is_paused:
                frame = await self._next_frame(frames, response, deadline if not reader.has_started else None)
                if frame is None:
                    raise self._ended_early(reader, response)
                for event in reader.feed(*self._decode(frame.event, frame.data, response)):
                    yield event
            await self._drain(frames)
        finally:
            await response.aclose()

    async def aclose(self) -> None:
        await self._client.close()

    # -- one exchange -----------------------------------------------------------------------------------

    async def _send(self, body: JsonObject, extra_body: JsonObject, deadline: float) -> "httpx2.Response":
        with self._vendor_errors(is_answering=False):
            try:
                async with asyncio.timeout_at(deadline):
                    stream = await self._client.messages.create(
                        **body, stream=True, extra_body=extra_body or None
                    )
            except ValueError as error:  # text that is not Unicode, a key that is no header
                raise RequestRejected(f"the request cannot be encoded ({type(error).__name__})") from error
        return stream.response

    async def _next_frame(
        self,
        frames: "AsyncIterator[anthropic._streaming.ServerSentEvent]",
        response: "httpx2.Response",
        deadline: float | None,
    ) -> "anthropic._streaming.ServerSentEvent | None":
        """The next frame with data; None at the end of the body."""
        with self._vendor_errors(is_answering=True):
            while True:
                limit = asyncio.timeout_at(deadline) if deadline else asyncio.timeout(self._idle_timeout_s)
                async with limit:
                    frame = await anext(frames, None)
                if frame is None or frame.data:
                    return frame

    def _decode(self, name: str | None, data: str, response: "httpx2.Response") -> tuple[str, JsonObject]:
        """The kind of an event and the event. The frame's name counts only where the event has no type."""
        try:
            event = json.loads(data)
        except (ValueError, RecursionError) as error:
            raise BadPayload("an event of the answer is not JSON") from error
        if not isinstance(event, dict):
            raise BadPayload("an event of the answer is not an object")
        kind = event.get("type") or name
        if kind == "error" or (not event.get("type") and event.get("error")):
            raise self._api_error(event, status=None, headers=response.headers)
        return str(kind), event

    async def _refuse_other_content(self, response: "httpx2.Response", deadline: float) -> None:
        """Raises for a success that is no event stream: a proxy's page, an error with the wrong status."""
        content_type = response.headers.get("content-type", "text/event-stream")
        if content_type.partition(";")[0].strip().lower() == "text/event-stream":
            return
        body = b""
        with self._vendor_errors(is_answering=True):
            async with asyncio.timeout_at(deadline):
                async for piece in response.aiter_bytes():
                    body += piece
                    if len(body) > MAX_ERROR_BODY_BYTES:
                        break
        with contextlib.suppress(ValueError, RecursionError):
            payload = json.loads(body)
            if isinstance(payload, dict) and payload.get("error"):
                raise self._api_error(payload, status=None, headers=response.headers)
        raise BadPayload(
            f"the API answered with {log_message(content_type)} instead of an event stream",
            status=response.status_code,
        )

    async def _drain(self, frames: AsyncIterator[Any]) -> None:
        """Reads the end of the body, so that the connection can serve the next request."""
        with contextlib.suppress(TimeoutError, UnicodeError, *self._transport_errors):
            async with asyncio.timeout(DRAIN_TIMEOUT_S):
                async for _ in frames:
                    pass

    # -- errors -----------------------------------------------------------------------------------------

    def _ended_early(self, reader: AnswerReader, response: "httpx2.Response") -> ProviderError:
        if not reader.has_started and response.num_bytes_downloaded:
            return BadPayload("the answer holds no event that we know")
        return StreamTruncated("the answer ended without message_stop")

    @contextlib.contextmanager
    def _vendor_errors(self, *, is_answering: bool) -> Iterator[None]:
        try:
            yield
        except TimeoutError as error:
            raise RequestTimedOut("the API sent no event for too long") from error
        except UnicodeDecodeError as error:
            if error.reason == "unexpected end of data":
                raise StreamTruncated("the answer ended inside a character") from error
            raise BadPayload("the answer is not UTF-8") from error
        except self._transport_errors as error:
            raise transport_error(error, is_answering=is_answering) from error
        except self._sdk.APIStatusError as error:
            payload = error.body if isinstance(error.body, dict) else {"error": str(error.body)}
            raise self._api_error(
                payload, status=error.status_code, headers=error.response.headers
            ) from error
        except self._sdk.APIConnectionError as error:
            if error.__cause__ is None:
                raise ConnectionLost("no connection to the API could be made") from error
            raise transport_error(error.__cause__, is_answering=is_answering) from error
        except self._sdk.AnthropicError as error:
            raise BadPayload(f"the answer cannot be read ({type(error).__name__})") from error

    def _api_error(
        self, payload: JsonObject, *, status: int | None, headers: Mapping[str, str]
    ) -> ProviderError:
        """The error that the API describes in `payload`. `status` None: only its type can tell."""
        error = payload.get("error") or payload
        fields = error if isinstance(error, dict) else {"message": str(error)}
        details = fields.get("details")
        codes = [fields.get("type"), details.get("error_code") if isinstance(details, dict) else None]
        known = [code for code in codes if isinstance(code, str)]
        text = str(fields.get("message") or "the API gave no reason")
        if status is None:
            status = next((_STATUS_BY_TYPE[code] for code in known if code in _STATUS_BY_TYPE), None)
            reported = None
        else:
            reported = status
        return error_class(status, codes=known, message=text)(
            log_message(text, secrets=[self._api_key]),
            status=reported,
            vendor_code=known[-1] if known else None,
            retry_after_s=parse_retry_after(headers, now=datetime.now(UTC)),
            request_id=headers.get("request-id"),
        )


def _is_blank(block: JsonObject) -> bool:
    """A text without a character, which the API sends and refuses to take back."""
    return block.get("type") == "text" and not str(block.get("text") or "").strip()
