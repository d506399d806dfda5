"""A model API that plays scripted answers on loopback and remembers what it was asked.

It speaks just enough HTTP/1.1 for the vendor SDKs, and misbehaves on request: any bytes, any chunk
boundaries, a reset or a silence in mid-body.
"""

import asyncio
import contextlib
import json
import socket
import struct
from collections import deque
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Literal, Self

End = Literal["close", "chunked_end", "cut", "reset", "hang"]
UNEXPECTED = 599  # no vendor uses it


@dataclass(kw_only=True)
class Answer:
    """One scripted answer.

    `chunks` are sent as one HTTP chunk each, so the client sees exactly these boundaries. `chunk_gap`, if
    given, is waited for before each chunk but the first and before the end; it is not cleared here.

    `end`: `close` finishes the body and closes; `chunked_end` finishes the body and keeps the connection
    for the next request; `cut` closes in mid-body; `reset` sends a TCP reset in mid-body; `hang` leaves the
    body open until the client goes. `client_gone` is set when the client leaves before the end.
    """

    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    chunks: list[bytes] = field(default_factory=list)
    content_type: str = "text/event-stream"
    end: End = "close"
    chunk_gap: asyncio.Event | None = None
    client_gone: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def head(self) -> bytes:
        lines = [f"HTTP/1.1 {self.status} Scripted", f"content-type: {self.content_type}"]
        lines += ["transfer-encoding: chunked", *(f"{name}: {value}" for name, value in self.headers.items())]
        if self.end != "chunked_end":
            lines.append("connection: close")
        return "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n"


@dataclass(frozen=True, kw_only=True)
class RecordedRequest:
    """`headers` have lower-case names. `body_json` is None for a body that is empty or not JSON."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes
    body_json: Any


def json_answer(payload: Any, *, status: int = 200, headers: dict[str, str] | None = None) -> Answer:
    """An answer of one JSON document, as APIs send errors."""
    return Answer(
        status=status,
        headers=headers or {},
        chunks=[json.dumps(payload).encode()],
        content_type="application/json",
    )


def sse(*frames: str | dict[str, Any]) -> bytes:
    """The bytes of an event stream: a dict becomes a frame named by its `type`, text is taken as it is."""
    return b"".join(
        frame.encode()
        if isinstance(frame, str)
        else (f"event: {frame['type']}\n" if "type" in frame else "").encode()
        + f"data: {json.dumps(frame, ensure_ascii=False)}\n\n".encode()
        for frame in frames
    )


def split_every(data: bytes, n: int) -> list[bytes]:
    """`data` in pieces of `n` bytes, the last one shorter."""
    return [data[start : start + n] for start in range(0, len(data), n)]


class ModelServer:
    """`async with ModelServer() as server:` listens on 127.0.0.1 at a free port.

    Answers are served in the order of `enqueue`, one per request. A request with no answer left gets 599,
    is added to `unexpected`, and makes the `async with` block fail at its end.
    """

    def __init__(self) -> None:
        self.requests: list[RecordedRequest] = []
        self.unexpected: list[RecordedRequest] = []
        self.base_url = ""
        self.connections_made = 0
        self._answers: deque[Answer] = deque()
        self._connections: dict[asyncio.Task[None], _Connection] = {}
        self._arrived = asyncio.Event()

    def enqueue(self, *answers: Answer) -> None:
        self._answers.extend(answers)

    @property
    def answers_left(self) -> int:
        return len(self._answers)

    async def wait_for_request(self, *, number: int = 1) -> RecordedRequest:
        """The request of that number, counted from one, once it has arrived."""
        while len(self.requests) < number:
            self._arrived.clear()
            await self._arrived.wait()
        return self.requests[number - 1]

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.base_url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.close()
        for connection in self._connections.values():
            connection.abort()  # its task then ends by itself
        results = await asyncio.gather(*self._connections, return_exceptions=True)
        await self._server.wait_closed()
        faults = [result for result in results if isinstance(result, Exception)]
        if error is None and faults:
            raise faults[0]
        if error is None and self.unexpected:
            asked = [f"{request.method} {request.path}" for request in self.unexpected]
            raise AssertionError(f"requests without a scripted answer: {asked}")

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections_made += 1
        connection = _Connection(reader, writer)
        self._connections[asyncio.create_task(self._attend(connection))] = connection

    async def _attend(self, connection: "_Connection") -> None:
        try:
            await self._serve(connection)
        finally:
            await connection.aclose()

    async def _serve(self, connection: "_Connection") -> None:
        while (request := await connection.read_request()) is not None:
            self.requests.append(request)
            self._arrived.set()
            if self._answers:
                answer = self._answers.popleft()
            else:
                self.unexpected.append(request)
                answer = json_answer({"error": {"message": "no scripted answer is left"}}, status=UNEXPECTED)
            if not await connection.play(answer):
                return


class _Connection:
    """One client. A pump reads ahead, so that its going away is noticed in the middle of an answer."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._received = bytearray()
        self._changed = asyncio.Event()
        self._gone = asyncio.Event()
        self._is_aborted = False
        # With no buffer of ours, `drain` returns when the kernel has the bytes: a reset then follows them.
        writer.transport.set_write_buffer_limits(high=0)
        self._pump = asyncio.create_task(self._read_ahead())

    async def _read_ahead(self) -> None:
        with contextlib.suppress(OSError):
            while piece := await self._reader.read(65536):
                self._received += piece
                self._changed.set()
        self._gone.set()
        self._changed.set()

    def abort(self) -> None:
        """Ends the connection from our side, which no answer shall take for the client's going."""
        self._is_aborted = True
        self._writer.transport.abort()

    async def aclose(self) -> None:
        self._pump.cancel()
        await asyncio.gather(self._pump, return_exceptions=True)
        self._writer.close()
        with contextlib.suppress(OSError):
            await self._writer.wait_closed()

    async def _take(self, size: int) -> bytes | None:
        while len(self._received) < size:
            if self._gone.is_set():
                return None
            self._changed.clear()
            await self._changed.wait()
        taken = bytes(self._received[:size])
        del self._received[:size]
        return taken

    async def read_request(self) -> RecordedRequest | None:
        """The next request, or None when the client has closed the connection."""
        while (end := self._received.find(b"\r\n\r\n")) < 0:
            if self._gone.is_set():
                return None
            self._changed.clear()
            await self._changed.wait()
        head = await self._take(end + 4)
        assert head is not None
        first, *lines = head.decode("latin-1").strip().split("\r\n")
        headers = {
            name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)
        }
        method, path, _ = first.split(" ")
        body = await self._take(int(headers.get("content-length", "0")))
        if body is None:
            return None
        try:
            body_json = json.loads(body)
        except ValueError:
            body_json = None
        return RecordedRequest(method=method, path=path, headers=headers, body=body, body_json=body_json)

    async def play(self, answer: Answer) -> bool:
        """Sends `answer`. True if the connection may carry another request."""
        try:
            finished = await self._play(answer)
        except OSError:
            finished = False
        if not finished and not self._is_aborted:
            answer.client_gone.set()
        return finished and answer.end == "chunked_end"

    async def _play(self, answer: Answer) -> bool:
        await self._send(answer.head)
        for number, chunk in enumerate(answer.chunks):
            if number and not await self._wait_for_gap(answer):
                return False
            if chunk:  # an empty HTTP chunk would end the body
                await self._send(b"%x\r\n%b\r\n" % (len(chunk), chunk))
        if not await self._wait_for_gap(answer):
            return False
        if answer.end == "hang":
            await self._gone.wait()
            return False
        if answer.end == "reset":
            sock = self._writer.get_extra_info("socket")
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self._writer.transport.abort()
        elif answer.end in ("close", "chunked_end"):
            await self._send(b"0\r\n\r\n")
        return True

    async def _send(self, data: bytes) -> None:
        if self._gone.is_set():
            raise ConnectionResetError("the client has gone")
        self._writer.write(data)
        await self._writer.drain()

    async def _wait_for_gap(self, answer: Answer) -> bool:
        """False if the client went while we waited."""
        if answer.chunk_gap is None:
            return True
        waits = [asyncio.create_task(event.wait()) for event in (answer.chunk_gap, self._gone)]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
            await asyncio.gather(*waits, return_exceptions=True)
        return not self._gone.is_set()
