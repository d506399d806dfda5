"""A reader of Server-Sent Events that takes the standard literally and keeps every byte.

It works on a raw socket, so that a test can stop reading, cut the connection anywhere, and see how it ended.
Source: WHATWG HTML, section 9.2.5 and 9.2.6 (read 2026-11-30).
"""

import asyncio
import json
import socket
import struct
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

BOM = "\ufeff"
PATIENCE_S = 60.0


@dataclass(frozen=True, kw_only=True)
class SseEvent:
    """A dispatched event. `id` is the reader's last event id at that moment."""

    type: str
    data: str
    id: str

    @property
    def json(self) -> Any:
        return json.loads(self.data)


class SseParser:
    """Bytes in, in chunks of any size; events out. `last_event_id` is what a browser would send back."""

    def __init__(self) -> None:
        self.last_event_id = ""
        self.retry_ms: int | None = None
        self.comments: list[str] = []
        self._rest = bytearray()
        self._is_first_line = True
        self._after_cr = False
        self._data: list[str] = []
        self._type = ""
        self._id = ""

    def feed(self, chunk: bytes) -> list[SseEvent]:
        """The events that this chunk completes. Raises: UnicodeDecodeError when a line is not UTF-8."""
        events = []
        for byte in chunk:
            if byte == 0x0A and self._after_cr:  # the second half of CRLF
                self._after_cr = False
                continue
            self._after_cr = byte == 0x0D
            if byte in (0x0A, 0x0D):
                line, self._rest = self._rest, bytearray()
                event = self._take(line.decode())
                if event is not None:
                    events.append(event)
            else:
                self._rest.append(byte)
        return events

    def _take(self, line: str) -> SseEvent | None:
        if self._is_first_line:
            line = line.removeprefix(BOM)
            self._is_first_line = False
        if not line:
            return self._dispatch()
        name, _, value = line.partition(":")
        value = value.removeprefix(" ")
        match name:
            case "":
                self.comments.append(value)
            case "data":
                self._data.append(value)
            case "event":
                self._type = value
            case "id" if "\0" not in value:
                self._id = value
            case "retry" if value.isascii() and value.isdigit():
                self.retry_ms = int(value)
        return None

    def _dispatch(self) -> SseEvent | None:
        self.last_event_id = self._id
        data, self._data = self._data, []
        kind, self._type = self._type, ""
        if not data:
            return None
        return SseEvent(type=kind or "message", data="\n".join(data), id=self.last_event_id)


def parse(body: bytes) -> list[SseEvent]:
    """The events of a whole body; an unfinished last one is dropped, as the standard says."""
    return SseParser().feed(body)


@dataclass
class SseStream:
    """An open response. `body` holds all bytes read so far, without the framing of HTTP.

    `ended`: `clean` when the response came to its end, `cut` when the connection closed before it, `reset`
    when it was reset; None while it is open.
    """

    status: int
    headers: dict[str, str]
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    parser: SseParser = field(default_factory=SseParser)
    body: bytes = b""
    events: list[SseEvent] = field(default_factory=list)
    ended: str | None = None
    _unread: list[SseEvent] = field(default_factory=list)

    @property
    def last_event_id(self) -> str:
        return self.parser.last_event_id

    async def next(self, *, patience_s: float = PATIENCE_S) -> SseEvent:
        """The next event. Raises: EOFError when the stream is over, TimeoutError."""
        async with asyncio.timeout(patience_s):
            while not self._unread:
                if not await self._read_chunk():
                    raise EOFError(f"the stream is over ({self.ended})")
            return self._unread.pop(0)

    async def until(
        self, is_wanted: Callable[[SseEvent], bool] | str, *, patience_s: float = PATIENCE_S
    ) -> list[SseEvent]:
        """All events up to and with the first that is wanted, by a predicate or its type."""
        taken = []
        async with asyncio.timeout(patience_s):
            while True:
                event = await self.next(patience_s=patience_s)
                taken.append(event)
                if event.type == is_wanted if isinstance(is_wanted, str) else is_wanted(event):
                    return taken

    async def take(self, count: int, *, patience_s: float = PATIENCE_S) -> list[SseEvent]:
        return [await self.next(patience_s=patience_s) for _ in range(count)]

    async def rest(self, *, patience_s: float = PATIENCE_S) -> list[SseEvent]:
        """All events to the end of the stream."""
        async with asyncio.timeout(patience_s):
            while await self._read_chunk():
                pass
        taken, self._unread = self._unread, []
        return taken

    async def until_bytes(self, wanted: bytes, *, patience_s: float = PATIENCE_S) -> None:
        """Reads until the body holds `wanted`."""
        async with asyncio.timeout(patience_s):
            while wanted not in self.body:
                if not await self._read_chunk():
                    raise EOFError(f"the stream is over ({self.ended})")

    def cut(self) -> None:
        """Closes the connection as a process that was killed does (RST)."""
        if self.writer.transport.is_closing():
            return
        raw: socket.socket = self.writer.get_extra_info("socket")
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.writer.transport.abort()

    async def close(self) -> None:
        """Closes the connection as a browser does (FIN)."""
        self.writer.close()
        with suppress(OSError):
            await self.writer.wait_closed()

    async def _read_chunk(self) -> bool:
        """False at the end of the response."""
        if self.ended is not None:
            return False
        try:
            chunk = await self._read_body()
        except asyncio.IncompleteReadError:
            self.ended = "cut"
            return False
        except ConnectionError:
            self.ended = "reset"
            return False
        if not chunk:
            self.ended = "clean"
            return False
        self.body += chunk
        fresh = self.parser.feed(chunk)
        self.events += fresh
        self._unread += fresh
        return True

    async def _read_body(self) -> bytes:
        if self.headers.get("transfer-encoding", "").lower() != "chunked":
            if self.status == 204:
                return b""
            length = self.headers.get("content-length")
            if length is not None and len(self.body) >= int(length):
                return b""
            return await self.reader.read(65536)
        size = int((await self.reader.readuntil(b"\r\n")).strip(), 16)
        data = await self.reader.readexactly(size)
        await self.reader.readexactly(2)
        return data


async def connect_sse(
    port: int,
    path: str,
    *,
    host: str = "127.0.0.1",
    method: str = "GET",
    headers: Mapping[str, str] | None = None,
    body: bytes = b"",
    receive_buffer_bytes: int | None = None,
) -> SseStream:
    """Sends a request and reads the head of the response.

    `receive_buffer_bytes` makes the kernel's buffer small, so that a test which stops reading is soon felt.
    """
    raw = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        raw.setblocking(False)
        if receive_buffer_bytes is not None:
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer_bytes)
        await asyncio.get_running_loop().sock_connect(raw, (host, port))
        reader, writer = await asyncio.open_connection(sock=raw, limit=receive_buffer_bytes or 64 * 1024)
    except BaseException:
        raw.close()
        raise
    lines = [f"{method} {path} HTTP/1.1", f"host: {host}:{port}", "accept: text/event-stream"]
    lines += [f"{name}: {value}" for name, value in (headers or {}).items()]
    if body:
        lines.append(f"content-length: {len(body)}")
    writer.write("\r\n".join(lines).encode() + b"\r\n\r\n" + body)
    try:
        async with asyncio.timeout(PATIENCE_S):
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    except BaseException:
        writer.transport.abort()
        raise
    received = {name.lower(): value for name, _, value in (line.partition(": ") for line in head[1:]) if name}
    return SseStream(status=int(head[0].split(" ")[1]), headers=received, reader=reader, writer=writer)


@asynccontextmanager
async def open_sse(port: int, path: str, **options: Any) -> AsyncIterator[SseStream]:
    """`connect_sse` for the length of a block. The connection is reset at its end if it is still open."""
    stream = await connect_sse(port, path, **options)
    try:
        yield stream
    finally:
        if stream.ended is None:
            stream.cut()
        else:
            await stream.close()
