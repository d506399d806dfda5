"""Thousands of readers of streams, as a process of their own that costs little: it counts and keeps nothing.

`python -m benchmarks.readers` takes one command as JSON on each line of its input, and answers each with one.
"""

import asyncio
import itertools
import json
import os
import resource
import socket
import sys
import time
from typing import Any, cast

CONNECTING = 200

SOURCES = 8
"""Addresses 127.0.0.x to come from: each has some 28,000 ports."""


LINE_BYTES = 16 << 20
"""Of a command, which may name thousands of paths."""


class Reader(asyncio.Protocol):
    """Sends one request and counts what comes: bytes, and frames by the blank line that ends each."""

    def __init__(self, request: bytes, totals: "Readers") -> None:
        self._request = request
        self._totals = totals
        self._ends_with_newline = False
        self._head: bytes | None = b""
        self.began: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self.transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)  # uvloop's is none by type
        self.transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        if self._head is not None:
            self._head += data
            head, end, data = self._head.partition(b"\r\n\r\n")
            if not end:
                return
            self._head = None
            self.began.set_result(int(head.split(b" ", 2)[1]))
            if not data:
                return
        frames = data.count(b"\n\n") + (self._ends_with_newline and data[0] == 10)
        self._ends_with_newline = data[-1] == 10
        self._totals.count(len(data), frames)

    def connection_lost(self, error: Exception | None) -> None:
        self._totals.closed += 1
        if not self.began.done():
            self.began.set_exception(error or ConnectionResetError("closed before an answer"))


class Readers:
    """All readers of the process and their sums."""

    def __init__(self) -> None:
        self.bytes = self.frames = self.closed = 0
        self._readers: list[Reader] = []
        self._target: tuple[int, asyncio.Future[float]] | None = None

    def count(self, size_bytes: int, frames: int) -> None:
        self.bytes += size_bytes
        self.frames += frames
        if self._target is not None and self.frames >= self._target[0]:
            self._target[1].set_result(time.monotonic())
            self._target = None

    async def open(
        self,
        *,
        port: int,
        paths: list[str],
        headers: dict[str, str],
        count: int,
        at_once: int = CONNECTING,
    ) -> Any:
        """`count` readers, the paths in turn. All have the head of their answer when this returns.

        `at_once`: how many are waiting for it at a time.
        """
        places = asyncio.Semaphore(at_once)
        statuses: dict[int, int] = {}

        async def one(number: int, path: str) -> None:
            lines = [f"GET {path} HTTP/1.1", "host: bench", *(f"{k}: {v}" for k, v in headers.items())]
            request = "\r\n".join(lines).encode() + b"\r\n\r\n"
            async with places:
                _, reader = await asyncio.get_running_loop().create_connection(
                    lambda: Reader(request, self),
                    "127.0.0.1",
                    port,
                    local_addr=(f"127.0.0.{2 + number % SOURCES}", 0),
                )
                self._readers.append(reader)
                status = await reader.began
                statuses[status] = statuses.get(status, 0) + 1

        pairs = zip(range(count), itertools.cycle(paths), strict=False)
        failed = await asyncio.gather(*(one(*pair) for pair in pairs), return_exceptions=True)
        return {"statuses": statuses, "failed": sum(error is not None for error in failed)}

    async def wait(self, *, frames: int, patience_s: float) -> Any:
        """When the sum of frames reached this number; null if it did not in time."""
        if self.frames >= frames:
            return {"at": time.monotonic()}
        target = asyncio.get_running_loop().create_future()
        self._target = (frames, target)
        try:
            async with asyncio.timeout(patience_s):
                return {"at": await target}
        except TimeoutError:
            self._target = None
            return {"at": None}

    async def totals(self) -> Any:
        return {"bytes": self.bytes, "frames": self.frames, "closed": self.closed}

    async def stall(self, *, count: int) -> Any:
        """The first `count` readers take nothing more."""
        for reader in self._readers[:count]:
            reader.transport.pause_reading()
        return {}

    async def close(self) -> Any:
        """All connections are reset, and the sums begin again."""
        for reader in self._readers:
            raw: socket.socket = reader.transport.get_extra_info("socket")
            if not reader.transport.is_closing():
                raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
                reader.transport.abort()
        await asyncio.sleep(0)
        self._readers.clear()
        self.bytes = self.frames = self.closed = 0
        return {}


class ReadersProcess:
    """The process from outside; its methods are those of `Readers`."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @classmethod
    async def start(cls) -> "ReadersProcess":
        return cls(
            await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "benchmarks.readers",
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
            )
        )

    async def call(self, name: str, **arguments: Any) -> Any:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps({"name": name, **arguments}).encode() + b"\n")
        line = await self._process.stdout.readline()
        if not line:
            raise RuntimeError("the readers have ended")
        return json.loads(line)

    async def aclose(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        await self._process.wait()


def raise_open_files() -> int:
    """How many files this process may open from here on: as many as it is allowed to ask for."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    return most


async def _serve() -> None:
    raise_open_files()
    loop = asyncio.get_running_loop()
    commands = asyncio.StreamReader(limit=LINE_BYTES)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(commands), sys.stdin)
    readers = Readers()
    while line := await commands.readline():
        arguments = json.loads(line)
        answer = await getattr(readers, arguments.pop("name"))(**arguments)
        os.write(sys.stdout.fileno(), json.dumps(answer).encode() + b"\n")


if __name__ == "__main__":
    import uvloop

    uvloop.run(_serve())
