"""The answer that is a stream, in its request's own task."""

import asyncio
import time
from typing import TYPE_CHECKING

from sse_starlette import EventSourceResponse
from starlette.types import Message, Receive, Scope, Send

from app.streaming.connection import Connection, until_disconnected
from app.streaming.feed import Feed
from app.streaming.frames import HEARTBEAT
from app.streaming.reader import Opening, Reader
from db.errors import DatabaseError

if TYPE_CHECKING:
    from app.streaming.hub import Hub

RETRY_READ_S = 0.5
DRAIN_S = 1.0
DRAIN_STEP_S = 0.01

SENT_BESIDE = "armillary.sent_beside"
"""Where a scope says how many bytes went to the client by another way than `send`."""


class EventStream(EventSourceResponse):
    """Returned by a handler annotated `-> EventStream`. More headers may be set in `headers` before that.

    It takes hold of nothing before the server calls it: an answer that is never begun leaves nothing behind.
    While it waits, new events are written by whoever wakes it; its task takes over when there is more to do.
    """

    media_type = "text/event-stream"
    status_code = 200

    def __init__(self, hub: "Hub", opening: Opening) -> None:
        # The base class would hold a lock and an iterator for each stream that `__call__` has no use for.
        self.init_headers({"cache-control": "no-cache", "x-accel-buffering": "no"})
        self._hub = hub
        self._opening = opening
        self._reader = Reader(opening)
        self._is_gone = False
        self._is_waiting = False
        self._needs_beat = False
        self._writing_since: float | None = None
        self._produced_bytes = 0
        self._direct_bytes = 0
        self._connection: Connection
        self._feed: Feed
        self.written_at = time.monotonic()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._connection = Connection(receive)
        self._feed = feed = self._hub.enter(self, self._opening.session_id)
        try:
            await self._send(
                send, {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
            )
            self.raw_headers.clear()  # it may wait for hours
            if scope["method"] == "HEAD":
                await self._send(send, _body(b"", is_last=True))
                return
            await self._write(send, self._opening.first)
            await self._follow(feed, receive, send)
            if not self._is_gone and not self._reader.is_finished(feed):
                await self._break_off(scope)
            if self._is_gone:
                await until_disconnected(receive, timeout_s=DRAIN_S)
        finally:
            self._is_waiting = False
            self._hub.leave(self, feed)
            scope[SENT_BESIDE] = self._direct_bytes

    # -- for the hub ------------------------------------------------------------------------------------

    def wake(self) -> None:
        """There is something new."""
        if not (self._is_waiting and self._connection.may_write):
            self._connection.wake()
            return
        data = self._reader.collect(self._feed, self._hub.limits.chunk_bytes)
        if data:
            self._write_directly(data)
        if self._hub.is_closing or not self._reader.is_up_to_date(self._feed):
            self._connection.wake()

    def beat(self) -> None:
        """Nothing was written for long."""
        if self._is_waiting and self._connection.may_write:
            self._write_directly(HEARTBEAT)
        else:
            self._needs_beat = True
            self._connection.wake()

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
        self._connection.abort()
        self._connection.wake()

    # -- inside -----------------------------------------------------------------------------------------

    async def _follow(self, feed: Feed, receive: Receive, send: Send) -> None:
        """Writes until the reader is gone, everything has been delivered, or the server stops."""
        while not self._is_gone:
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
                self._is_waiting = True
                message = await receive()  # `wake` ends it too
                self._is_waiting = False
                self._is_gone |= message["type"] == "http.disconnect"

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
        self._is_gone |= self._connection.is_disconnected

    def _write_directly(self, data: bytes) -> None:
        self._direct_bytes += self._connection.write(data)
        self.written_at = time.monotonic()

    def _produced(self) -> int:
        ring = self._feed.ring
        return 0 if ring is None else ring.produced_bytes

    async def _break_off(self, scope: Scope) -> None:
        """Flushes, then closes so that no client can take it for the end of the stream.

        A chunked answer lacks its last chunk then. A reset would say the same and make many clients drop what
        they have received but not read; it is only for answers of which the closing is the end.
        """
        connection = self._connection
        for _ in range(int(DRAIN_S / DRAIN_STEP_S)):
            if connection.unsent_bytes == 0 or self._is_gone:
                break
            await asyncio.sleep(DRAIN_STEP_S)
        self._is_gone = True
        if connection.unsent_bytes == 0 and scope["http_version"] != "1.0":
            connection.close()
        else:
            connection.reset()


class NothingFollows(EventStream):
    """The answer 204 of such a handler: a client that reconnects by itself stops."""

    status_code = 204

    def __init__(self) -> None:
        self.init_headers({})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send(_body(b"", is_last=True))


def _body(data: bytes, *, is_last: bool = False) -> Message:
    return {"type": "http.response.body", "body": data, "more_body": not is_last}
