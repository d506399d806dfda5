"""The answer that is a stream: a request's own task writes, a second one waits for the reader to go away."""

import asyncio
import contextlib
import socket
import struct
import time
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any, cast

from sse_starlette import EventSourceResponse
from starlette.types import Message, Receive, Scope, Send

from app.streaming.feed import Feed
from app.streaming.frames import HEARTBEAT
from app.streaming.reader import Opening, Reader
from db.errors import DatabaseError

if TYPE_CHECKING:
    from app.streaming.hub import Hub

RETRY_READ_S = 0.5
DRAIN_S = 1.0
DRAIN_STEP_S = 0.01


class EventStream(EventSourceResponse):
    """Returned by a handler annotated `-> EventStream`. More headers may be set in `headers` before that.

    It takes hold of nothing before the server calls it: an answer that is never begun leaves nothing behind.
    """

    def __init__(self, hub: "Hub", opening: Opening) -> None:
        super().__init__(_Nothing(), headers={"cache-control": "no-cache"}, sep="\n", ping=0)
        del self.headers["connection"]  # HTTP/2 forbids it, and HTTP/1.1 has it by default
        self._hub = hub
        self._opening = opening
        self._reader = Reader(opening)
        self._wake = asyncio.Event()
        self._is_gone = False
        self._needs_beat = False
        self._transport: asyncio.Transport | None = None
        self._task: asyncio.Task[Any] | None = None
        self._feed: Feed | None = None
        self._writing_since: float | None = None
        self._produced_bytes = 0
        self.written_at = time.monotonic()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._task = asyncio.current_task()
        self._transport = _transport_of(receive)
        self._feed = feed = self._hub.enter(self, self._opening.session_id)
        watcher = asyncio.create_task(self._watch(receive))
        try:
            await self._send(
                send, {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
            )
            if scope["method"] == "HEAD":
                await self._send(send, _body(b"", is_last=True))
                return
            await self._write(send, self._opening.first)
            await self._follow(feed, send)
            if not self._is_gone and not self._reader.is_finished(feed):
                await self._break_off(scope)
            if self._is_gone:
                await asyncio.wait([watcher], timeout=DRAIN_S)  # the server knows it too, then
        finally:
            self._hub.leave(self, feed)
            watcher.cancel()
            await asyncio.gather(watcher, return_exceptions=True)

    # -- for the hub ------------------------------------------------------------------------------------

    def wake(self) -> None:
        """There is something new."""
        self._wake.set()

    def beat(self) -> None:
        """Nothing was written for long."""
        self._needs_beat = True
        self._wake.set()

    def is_stuck(self, now: float) -> bool:
        """One write has waited for too long, or its session has gone too far on meanwhile."""
        if self._writing_since is None:
            return False
        limits = self._hub.limits
        behind_bytes = self._produced() - self._produced_bytes
        return now - self._writing_since > limits.stall_s or behind_bytes > limits.stall_bytes

    def abort(self) -> None:
        """Ends the connection now; what it has buffered is dropped."""
        self._is_gone = True
        if self._transport is not None:
            self._transport.abort()
        elif self._task is not None:
            self._task.cancel()
        self._wake.set()

    # -- inside -----------------------------------------------------------------------------------------

    async def _follow(self, feed: Feed, send: Send) -> None:
        """Writes until the reader is gone, everything has been delivered, or the server stops."""
        while not self._is_gone:
            self._wake.clear()
            data = self._reader.collect(feed, self._hub.limits.chunk_bytes)
            if data:
                await self._write(send, data)
            elif self._reader.is_finished(feed):
                await self._send(send, _body(b"", is_last=True))
                return
            elif self._hub.is_closing:
                return
            elif self._reader.is_behind(feed):
                await self._read_page(feed, send)
            elif self._needs_beat:
                await self._write(send, HEARTBEAT)
            else:
                await self._wake.wait()

    async def _read_page(self, feed: Feed, send: Send) -> None:
        try:
            events = await self._hub.page(self._opening.session_id, self._reader.seq)
        except DatabaseError:
            await asyncio.sleep(RETRY_READ_S)
            if self._needs_beat:
                await self._write(send, HEARTBEAT)
            return
        if not events:
            self.abort()  # the log was deleted: there is nothing to go on with
            return
        # Nothing of a page may be of the types that are asked for; the next one is read then.
        data = self._reader.take_page(events, feed)
        for at in range(0, len(data), self._hub.limits.chunk_bytes):
            await self._write(send, data[at : at + self._hub.limits.chunk_bytes])
        if not data and self._needs_beat:
            await self._write(send, HEARTBEAT)

    async def _write(self, send: Send, data: bytes) -> None:
        self._needs_beat = False
        await self._send(send, _body(data))

    async def _send(self, send: Send, message: Message) -> None:
        self._writing_since = time.monotonic()
        self._produced_bytes = self._produced()
        await send(message)
        self._writing_since = None
        self.written_at = time.monotonic()

    def _produced(self) -> int:
        ring = None if self._feed is None else self._feed.ring
        return 0 if ring is None else ring.produced_bytes

    async def _watch(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._is_gone = True
        self._wake.set()

    async def _break_off(self, scope: Scope) -> None:
        """Flushes, then closes so that no client can take it for the end of the stream.

        A chunked answer lacks its last chunk then. A reset would say the same and make many clients drop what
        they have received but not read; it is only for answers of which the closing is the end.
        """
        transport = self._transport
        if transport is None:
            return  # the server closes an answer that was not completed
        for _ in range(int(DRAIN_S / DRAIN_STEP_S)):
            if transport.get_write_buffer_size() == 0 or self._is_gone:
                break
            await asyncio.sleep(DRAIN_STEP_S)
        if transport.get_write_buffer_size() == 0 and scope["http_version"] != "1.0":
            self._is_gone = True
            transport.close()
            return
        raw = transport.get_extra_info("socket")
        with contextlib.suppress(OSError, AttributeError):
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.abort()


class NothingFollows(EventStream):
    """The answer 204 of such a handler: a client that reconnects by itself stops."""

    def __init__(self) -> None:
        EventSourceResponse.__init__(self, _Nothing(), status_code=204)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send(_body(b"", is_last=True))


class _Nothing:
    """The content that the base class asks for; `__call__` never reads it."""

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self

    async def __anext__(self) -> bytes:
        raise StopAsyncIteration


def _body(data: bytes, *, is_last: bool = False) -> Message:
    return {"type": "http.response.body", "body": data, "more_body": not is_last}


def _transport_of(receive: Receive) -> asyncio.Transport | None:
    """The connection under uvicorn's `receive`, which is the only way to end a socket that does not drain."""
    return cast("asyncio.Transport | None", getattr(getattr(receive, "__self__", None), "transport", None))
