"""What fan-out costs at least on this server: a bare ASGI application that sends given frames to all readers.

`python -m benchmarks.bare_stream`: prints its port, then takes frames from its input, each behind its length
in four bytes. It runs under uvicorn with the settings of our api, without framework, log, cursor or bound.
"""

import asyncio
import socket
import sys
from typing import Any

import uvicorn

from benchmarks.readers import raise_open_files

HEADERS = [(b"content-type", b"text/event-stream"), (b"cache-control", b"no-cache")]


class BareStream:
    """Each reader gets all frames from its first moment on; those that wait together are one chunk."""

    def __init__(self) -> None:
        self._frames: list[bytes] = []
        self._readers: set[asyncio.Event] = set()

    def push(self, frame: bytes) -> None:
        self._frames.append(frame)
        for reader in self._readers:
            reader.set()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        has_more = asyncio.Event()
        self._readers.add(has_more)
        position = len(self._frames)
        try:
            await send({"type": "http.response.start", "status": 200, "headers": HEADERS})
            while True:
                await has_more.wait()
                has_more.clear()
                data = b"".join(self._frames[position:])
                position = len(self._frames)
                await send({"type": "http.response.body", "body": data, "more_body": True})
        finally:
            self._readers.discard(has_more)


async def _serve() -> None:
    raise_open_files()
    app = BareStream()
    config = uvicorn.Config(
        app,
        loop="uvloop",
        http="httptools",
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
    )
    listener = socket.create_server(("127.0.0.1", 0), backlog=4096)
    serving = asyncio.create_task(uvicorn.Server(config).serve(sockets=[listener]))
    print(listener.getsockname()[1], flush=True)
    frames = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(frames), sys.stdin)
    while True:
        try:
            size = int.from_bytes(await frames.readexactly(4))
        except asyncio.IncompleteReadError:
            break
        app.push(await frames.readexactly(size))
    serving.cancel()


if __name__ == "__main__":
    import uvloop

    uvloop.run(_serve())
