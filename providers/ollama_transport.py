"""One request to an Ollama server, and its answer as lines of JSON."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from typing import Any, Self

import httpx2
import msgspec

from providers.errors import BadPayload, ProviderError, RequestRejected, RequestTimedOut, StreamTruncated
from providers.http_errors import error_class, log_message, parse_retry_after, transport_error
from providers.openai_sse import MAX_HELD_BYTES, decode_json, quote
from providers.types import JsonObject

CONNECT_TIMEOUT_S = 5.0
WRITE_TIMEOUT_S = 30.0
POOL_TIMEOUT_S = 10.0
ASIDE_TIMEOUT_S = 10.0  # for a question about models, which the server answers from memory
DRAIN_S = 0.1
MAX_ERROR_BODY_BYTES = 65_536


class LineReader:
    """Takes bytes at any boundaries and gives whole lines; blank ones are left out."""

    def __init__(self) -> None:
        self._held = bytearray()

    def feed(self, chunk: bytes) -> list[bytes]:
        """The lines that `chunk` completes.

        Raises: BadPayload, when a line has no end.
        """
        self._held += chunk
        if len(self._held) > MAX_HELD_BYTES:
            raise BadPayload(f"the answer has a line of more than {MAX_HELD_BYTES} bytes")
        if b"\n" not in chunk:
            return []
        *lines, rest = bytes(self._held).split(b"\n")
        self._held = bytearray(rest)
        return [line for line in lines if line.strip()]

    def finish(self) -> list[bytes]:
        """The last line, which may lack its end."""
        line, self._held = bytes(self._held), bytearray()
        return [line] if line.strip() else []


class Lines:
    """An answer that is being read: iterate over it for decoded lines.

    Raises while iterated: RequestTimedOut, StreamTruncated, BadPayload, the error that a line reports.
    """

    def __init__(self, response: httpx2.Response, *, first_wait_s: float, idle_timeout_s: float) -> None:
        self._chunks = response.aiter_bytes()
        self._reader = LineReader()
        self._waiting: list[bytes] = []
        self._is_at_end = False
        self._wait_s = first_wait_s
        self._idle_timeout_s = idle_timeout_s

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> JsonObject:
        while not self._waiting:
            if self._is_at_end:
                raise StopAsyncIteration
            chunk = await self._next_chunk()
            self._is_at_end = chunk is None
            self._waiting = self._reader.finish() if chunk is None else self._reader.feed(chunk)
            self._waiting.reverse()
        return self._decode(self._waiting.pop())

    async def _next_chunk(self) -> bytes | None:
        try:
            async with asyncio.timeout(self._wait_s):
                chunk = await anext(self._chunks, None)
        except TimeoutError as error:
            raise RequestTimedOut(f"nothing came from the API for {self._wait_s:.0f} s") from error
        except (httpx2.HTTPError, httpx2.StreamError) as error:
            raise transport_error(error, is_answering=True) from error
        self._wait_s = self._idle_timeout_s
        return chunk

    async def drain(self) -> None:
        """Reads what little may be left, so that the connection can be used again. Never raises."""
        with contextlib.suppress(ProviderError, TimeoutError):
            async with asyncio.timeout(DRAIN_S):
                while await self._next_chunk() is not None:
                    pass

    def _decode(self, line: bytes) -> JsonObject:
        try:
            value = decode_json(line)
        except BadPayload:
            if self._is_at_end and not self._waiting and line.lstrip().startswith(b"{"):
                raise StreamTruncated("the answer ended in the middle of a line") from None
            raise
        if not isinstance(value, dict):
            raise BadPayload(f"a line of the answer is not an object: {quote(line)}")
        if value.get("error"):
            raise reported(value)
        return value


class OllamaTransport:
    """The connections to one server. `api_key` may be empty: a server of one's own asks for none."""

    def __init__(
        self, *, api_key: str, base_url: str, first_event_timeout_s: float, idle_timeout_s: float
    ) -> None:
        self._first_event_timeout_s = first_event_timeout_s
        self._idle_timeout_s = idle_timeout_s
        self._secrets = (api_key,)
        self._client = httpx2.AsyncClient(
            base_url=base_url.rstrip("/").removesuffix("/v1").removesuffix("/api"),
            headers={"authorization": f"Bearer {api_key}"} if api_key else {},
            timeout=httpx2.Timeout(
                None, connect=CONNECT_TIMEOUT_S, write=WRITE_TIMEOUT_S, pool=POOL_TIMEOUT_S
            ),
            trust_env=False,  # only the settings read the environment
        )

    async def ask(self, method: str, path: str, body: JsonObject | None = None) -> JsonObject:
        """The document that answers a question about models.

        Raises: ProviderError.
        """
        content = None if body is None else _encode(body)
        try:
            async with asyncio.timeout(ASIDE_TIMEOUT_S):
                response = await self._client.request(method, path, content=content)
        except TimeoutError as error:
            raise RequestTimedOut(f"the API did not answer within {ASIDE_TIMEOUT_S:.0f} s") from error
        except (httpx2.HTTPError, httpx2.InvalidURL) as error:
            raise transport_error(error, is_answering=False) from error
        if response.is_error:
            raise self._refused(response, response.content)
        value = decode_json(response.content)
        if not isinstance(value, dict):
            raise BadPayload(f"the answer is not an object: {quote(response.content)}")
        return value

    @contextlib.asynccontextmanager
    async def exchange(self, path: str, body: JsonObject) -> AsyncIterator[Lines]:
        """Sends `body` and gives the answer; leaving the context aborts what has not arrived.

        Raises: ProviderError.
        """
        content = _encode(body)
        clock = asyncio.get_running_loop().time
        deadline = clock() + self._first_event_timeout_s
        response = await self._send(path, content, deadline)
        try:
            if "html" in response.headers.get("content-type", ""):
                raise BadPayload("the answer is a web page: check the base URL")
            yield Lines(
                response,
                first_wait_s=max(deadline - clock(), 0.0),
                idle_timeout_s=self._idle_timeout_s,
            )
        finally:
            await response.aclose()

    async def _send(self, path: str, content: bytes, deadline: float) -> httpx2.Response:
        request = self._client.build_request(
            "POST", path, content=content, headers={"content-type": "application/json"}
        )
        try:
            async with asyncio.timeout_at(deadline):
                response = await self._client.send(request, stream=True)
                if not response.is_error:
                    return response
                try:
                    told = await _beginning(response)
                finally:
                    await response.aclose()
        except TimeoutError as error:
            waited_s = self._first_event_timeout_s
            raise RequestTimedOut(f"the API did not answer within {waited_s:.0f} s") from error
        except (httpx2.HTTPError, httpx2.InvalidURL, httpx2.StreamError) as error:
            raise transport_error(error, is_answering=False) from error
        raise self._refused(response, told)

    def _refused(self, response: httpx2.Response, told: bytes) -> ProviderError:
        try:
            value: Any = msgspec.json.decode(told)
        except (msgspec.DecodeError, UnicodeDecodeError):
            value = told.decode("utf-8", "replace")
        text = _error_text(value) or f"the API answered with status {response.status_code}"
        return _error_kind(response.status_code, text)(
            log_message(text, secrets=self._secrets),
            status=response.status_code,
            retry_after_s=parse_retry_after(response.headers, now=datetime.now(UTC)),
        )

    async def aclose(self) -> None:
        await self._client.aclose()


def reported(line: JsonObject) -> ProviderError:
    """The error of a line of an answer. Its status is 200; some servers add what it would have been."""
    text = _error_text(line) or "the API reported an error without a message"
    status = line.get("status_code")
    return _error_kind(status if isinstance(status, int) and status >= 400 else None, text)(log_message(text))


def _error_kind(status: int | None, text: str) -> type[ProviderError]:
    """The API has no codes: only sentences say what a status means."""
    lowered = text.lower()
    code = "context_length_exceeded" if "exceeds the context length" in lowered else None
    if "server busy" in lowered or "server overloaded" in lowered:
        code = "server_is_overloaded"
    return error_class(status, codes=(code,), message=text)


def _error_text(value: Any) -> str:
    if isinstance(value, dict):
        value = value.get("error")
    if isinstance(value, dict):
        value = value.get("message")
    return value if isinstance(value, str) else ""


async def _beginning(response: httpx2.Response) -> bytes:
    body = b""
    async for piece in response.aiter_bytes():
        body += piece
        if len(body) > MAX_ERROR_BODY_BYTES:
            break
    return body


def _encode(body: JsonObject) -> bytes:
    try:
        return msgspec.json.encode(body)
    except (UnicodeEncodeError, TypeError, msgspec.MsgspecError) as error:
        raise RequestRejected(f"the request cannot be written as JSON ({error})") from error
