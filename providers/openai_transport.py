"""One request to an OpenAI-shaped API through the vendor's SDK, and its answer as frames of JSON.

The SDK sends and authenticates; what it would retry, parse or swallow is left to us.
"""

import asyncio
import contextlib
import importlib
from collections.abc import AsyncIterator, Iterator, Mapping
from datetime import UTC, datetime
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Self

import msgspec

from providers.errors import BadPayload, ProviderError, RequestRejected, RequestTimedOut, StreamTruncated
from providers.http_errors import transport_error
from providers.openai_errors import http_error, request_id_in, stream_error
from providers.openai_sse import Frame, SseReader, decode_json, quote
from providers.types import JsonObject

if TYPE_CHECKING:
    import httpx2
    from openai import AsyncOpenAI

OPENAI_BASE_URL = "https://api.openai.com/v1"
CONNECT_TIMEOUT_S = 5.0
WRITE_TIMEOUT_S = 30.0
POOL_TIMEOUT_S = 10.0
ASIDE_TIMEOUT_S = 10.0  # for a question about models
DRAIN_S = 0.1  # for the few bytes behind the last frame; a connection that has them is used again
NO_KEY = "none"  # local servers need no key, but an empty bearer token is an illegal header


class Exchange:
    """An answer that is being read: iterate over it for frames. Ends at the end of the body.

    Raises while iterated: RequestTimedOut, StreamTruncated, BadPayload.
    """

    def __init__(
        self,
        response: "httpx2.Response",
        *,
        first_wait_s: float,
        idle_timeout_s: float,
        secrets: tuple[str, ...],
    ) -> None:
        self._response = response
        self._chunks = response.aiter_bytes()
        self._reader = SseReader()
        self._frames: list[Frame] = []
        self._is_at_end = False
        self._is_ending = False
        self._wait_s = first_wait_s
        self._idle_timeout_s = idle_timeout_s
        self._secrets = secrets
        self.headers: Mapping[str, str] = response.headers
        self.request_id = request_id_in(self.headers)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Frame:
        while not self._frames:
            if self._is_at_end:
                raise StopAsyncIteration
            chunk = await self._next_chunk()
            if chunk is None:
                self._is_at_end = True
                self._frames = self._reader.finish()
            else:
                self._frames = self._reader.feed(chunk)
            self._frames.reverse()
        return self._frames.pop()

    async def _next_chunk(self) -> bytes | None:
        import httpx2

        try:
            async with asyncio.timeout(self._wait_s):
                chunk = await anext(self._chunks)
        except StopAsyncIteration:
            return None
        except TimeoutError as error:
            raise RequestTimedOut(
                f"nothing came from the API for {self._wait_s:.0f} s", request_id=self.request_id
            ) from error
        except (httpx2.HTTPError, httpx2.StreamError) as error:
            raise transport_error(error, is_answering=True) from error
        if not self._is_ending:
            self._wait_s = self._idle_timeout_s
        return chunk

    def expect_end(self, *, within_s: float) -> None:
        """From here on no wait for bytes is longer than `within_s`."""
        self._is_ending = True
        self._wait_s = min(within_s, self._wait_s)

    async def drain(self) -> None:
        """Reads what little may be left, so that the connection can be used again. Never raises."""
        with contextlib.suppress(ProviderError, TimeoutError):
            async with asyncio.timeout(DRAIN_S):
                while await self._next_chunk() is not None:
                    pass

    def decode(self, frame: Frame) -> Any:
        """The value of a frame.

        Raises: BadPayload; the error that the frame reports.
        """
        value = decode_json(frame.data)
        reported = value.get("error") if isinstance(value, dict) else None
        if reported:
            raise self.reported(reported)
        if frame.event == "error":
            raise self.reported(value)
        return value

    def reported(self, error: Any) -> ProviderError:
        """The error for an error object of the API."""
        return stream_error(error, request_id=self.request_id, secrets=self._secrets)

    def whole_answer(self) -> JsonObject:
        """The JSON document that came in place of a stream, to be called at the end when there was no frame.

        Raises: StreamTruncated, when nothing came; BadPayload; the error that the document reports.
        """
        body = bytes(self._reader.stray).strip()
        if not body:
            raise StreamTruncated("the answer ended before it began", request_id=self.request_id)
        value = self.decode(Frame("", body))
        if not isinstance(value, dict):
            raise BadPayload(f"the answer is not a stream: {quote(body)}", request_id=self.request_id)
        return value

    @property
    def has_frames(self) -> bool:
        return self._reader.has_frames

    async def aclose(self) -> None:
        await self._response.aclose()


class OpenAITransport:
    """The connections to one base URL with one key. Built without I/O; the SDK is imported at first use.

    `headers` go with every request. `is_proxy`: refusals without a reason are told apart from others.
    """

    def __init__(
        self,
        *,
        api_key: str,
        base_url: str | None,
        first_event_timeout_s: float,
        idle_timeout_s: float,
        headers: Mapping[str, str] = MappingProxyType({}),
        is_proxy: bool = False,
    ) -> None:
        self._api_key = api_key
        self._base_url = base_url or OPENAI_BASE_URL
        self._first_event_timeout_s = first_event_timeout_s
        self._idle_timeout_s = idle_timeout_s
        self._secrets = (api_key,)
        self._headers = dict(headers)
        self._is_proxy = is_proxy
        self._client: AsyncOpenAI | None = None

    async def _connected(self) -> "AsyncOpenAI":
        if self._client is None:
            # 1 s at first, which would stall the loop.
            await asyncio.to_thread(importlib.import_module, "openai")
        if self._client is None:  # another request may have made it meanwhile
            import httpx2
            from openai import AsyncOpenAI

            self._client = AsyncOpenAI(
                api_key=self._api_key or NO_KEY,
                base_url=self._base_url,
                default_headers=self._headers,
                max_retries=0,
                timeout=httpx2.Timeout(
                    None, connect=CONNECT_TIMEOUT_S, write=WRITE_TIMEOUT_S, pool=POOL_TIMEOUT_S
                ),
            )
            # The SDK takes these from the environment, which only the settings may read.
            self._client.organization = self._client.project = None
        return self._client

    @contextlib.asynccontextmanager
    async def exchange(self, path: str, body: JsonObject) -> AsyncIterator[Exchange]:
        """Sends `body` and gives the answer; leaving the context aborts what has not arrived.

        Raises: ProviderError.
        """
        content = _encode(body)
        client = await self._connected()
        clock = asyncio.get_running_loop().time
        deadline = clock() + self._first_event_timeout_s
        response = await self._send(client, path, content, deadline)
        exchange = Exchange(
            response,
            first_wait_s=max(deadline - clock(), 0.0),
            idle_timeout_s=self._idle_timeout_s,
            secrets=self._secrets,
        )
        try:
            if "html" in response.headers.get("content-type", ""):
                raise BadPayload(
                    "the answer is a web page: check the base URL", request_id=exchange.request_id
                )
            yield exchange
        finally:
            await exchange.aclose()

    async def ask(self, path: str) -> JsonObject:
        """The document at `path`.

        Raises: ProviderError.
        """
        client = await self._connected()
        import httpx2

        deadline = asyncio.get_running_loop().time() + ASIDE_TIMEOUT_S
        with self._vendor_errors(ASIDE_TIMEOUT_S):
            async with asyncio.timeout_at(deadline):
                response = await client.get(path, cast_to=httpx2.Response)
        value = decode_json(response.content)
        if not isinstance(value, dict):
            raise BadPayload(f"the answer is not an object: {quote(response.content)}")
        return value

    async def _send(
        self, client: "AsyncOpenAI", path: str, content: bytes, deadline: float
    ) -> "httpx2.Response":
        from openai import AsyncStream

        with self._vendor_errors(self._first_event_timeout_s):
            async with asyncio.timeout_at(deadline):
                stream = await client.post(
                    path,
                    cast_to=object,
                    content=content,
                    options={"headers": {"Content-Type": "application/json", "Accept": "text/event-stream"}},
                    stream=True,
                    stream_cls=AsyncStream[object],
                )
        return stream.response

    @contextlib.contextmanager
    def _vendor_errors(self, waited_s: float) -> Iterator[None]:
        import httpx2
        from openai import APIConnectionError, APIStatusError, OpenAIError

        try:
            yield
        except TimeoutError as error:
            raise RequestTimedOut(f"the API did not answer within {waited_s:.0f} s") from error
        except APIStatusError as error:
            answer = error.response
            raise http_error(
                answer.status_code,
                answer.headers,
                answer.content,
                now=datetime.now(UTC),
                secrets=self._secrets,
                is_proxy=self._is_proxy,
            ) from error
        except APIConnectionError as error:
            raise transport_error(error.__cause__ or error, is_answering=False) from error
        except (httpx2.HTTPError, httpx2.InvalidURL) as error:
            raise transport_error(error, is_answering=False) from error
        except (OpenAIError, UnicodeEncodeError) as error:
            raise RequestRejected(f"the request cannot be sent ({type(error).__name__})") from error

    async def aclose(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            await client.close()


def _encode(body: JsonObject) -> bytes:
    try:
        return msgspec.json.encode(body)
    except (UnicodeEncodeError, TypeError, msgspec.MsgspecError) as error:
        raise RequestRejected(f"the request cannot be written as JSON ({error})") from error
