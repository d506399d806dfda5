"""A load generator that costs little: POSTs whose answers are streams, many at once, over raw sockets."""

import asyncio
import time
from dataclasses import dataclass
from typing import cast

PATIENCE_S = 300.0
TOKEN = b"token "


@dataclass(frozen=True, kw_only=True)
class Streamed:
    """Seconds from the moment at which the request was written to the first token, and to the end.

    `tokens`: how often one was read; a stream may say it again in its final event.
    """

    tokens: int
    first_s: float
    total_s: float


class _Stream(asyncio.Protocol):
    def __init__(self, mark: bytes) -> None:
        self._mark = mark
        self._head = b""
        self.first_s: float | None = None
        self.tokens = 0
        self.done: asyncio.Future[float] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        now_s = time.monotonic()
        if not self._head:
            self._head = data[:64]
            if b" 200 " not in data[:20] and not self.done.done():
                self.done.set_exception(RuntimeError(data[:600].decode(errors="replace")))
        self.tokens += data.count(TOKEN)
        if self.first_s is None and self._mark in data:
            self.first_s = now_s
        if data.endswith(b"0\r\n\r\n") and not self.done.done():
            self.done.set_result(now_s)

    def connection_lost(self, error: Exception | None) -> None:
        if not self.done.done():
            self.done.set_exception(error or ConnectionError("the stream was broken off"))


async def stream_all(port: int, request: bytes, *, count: int, mark: bytes) -> list[Streamed]:
    """Sends `request` over so many connections at once. `mark` stands in the first token's frame."""
    loop = asyncio.get_running_loop()
    connected = await asyncio.gather(
        *(loop.create_connection(lambda: _Stream(mark), "127.0.0.1", port) for _ in range(count))
    )
    streams = [protocol for _, protocol in connected]
    began: list[float] = []
    for stream in streams:
        stream.transport.write(request)
        began.append(time.monotonic())
    async with asyncio.timeout(PATIENCE_S):
        ended = await asyncio.gather(*(stream.done for stream in streams))
    for stream in streams:
        stream.transport.close()
    return [
        Streamed(tokens=stream.tokens, first_s=(stream.first_s or end_s) - began_s, total_s=end_s - began_s)
        for stream, began_s, end_s in zip(streams, began, ended, strict=True)
    ]


def post(path: str, body: bytes, *fields: str) -> bytes:
    """An HTTP/1.1 request."""
    lines = [f"POST {path} HTTP/1.1", "host: 127.0.0.1", "content-type: application/json", *fields]
    return "\r\n".join([*lines, f"content-length: {len(body)}", "", ""]).encode() + body
