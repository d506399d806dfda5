"""What a token costs at least in Python: ASGI applications that pass a model's answer on, and store nothing.

`python -m benchmarks.reference BASE_URL` prints its port. `POST /sdk` asks through the openai SDK and sends
each chunk as an event, as a small program would; it is what the benchmarks call the reference. `POST /raw`
passes the bytes on as they come. The body is `{"model": …, "prompt": …}`. uvicorn is set as for our api.
"""

import asyncio
import json
import socket
import sys
from typing import Any
from urllib.parse import urlsplit

import uvicorn
from openai import AsyncOpenAI

from benchmarks.readers import raise_open_files

HEADERS = [(b"content-type", b"text/event-stream"), (b"cache-control", b"no-cache")]


class Reference:
    def __init__(self, base_url: str) -> None:
        parts = urlsplit(base_url)
        self._host, self._port, self._path = parts.hostname, parts.port, parts.path
        self._client = AsyncOpenAI(base_url=base_url, api_key="bench", max_retries=0)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        body = b""
        while True:
            message = await receive()
            body += message.get("body", b"")
            if not message.get("more_body"):
                break
        asked = json.loads(body)
        await send({"type": "http.response.start", "status": 200, "headers": HEADERS})
        answer = self._sdk(asked, send) if scope["path"] == "/sdk" else self._raw(asked, send)
        await answer
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _sdk(self, asked: Any, send: Any) -> None:
        stream = await self._client.chat.completions.create(
            model=asked["model"], messages=[{"role": "user", "content": asked["prompt"]}], stream=True
        )
        async for chunk in stream:
            data = b"data: " + chunk.model_dump_json(exclude_unset=True).encode() + b"\n\n"
            await send({"type": "http.response.body", "body": data, "more_body": True})

    async def _raw(self, asked: Any, send: Any) -> None:
        messages = [{"role": "user", "content": asked["prompt"]}]
        body = json.dumps({"model": asked["model"], "messages": messages, "stream": True}).encode()
        reader, writer = await asyncio.open_connection(self._host, self._port)
        head = (
            f"POST {self._path}/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
        )
        writer.write(head.encode() + body)
        await reader.readuntil(b"\r\n\r\n")
        while size := int(await reader.readline(), 16):
            data = await reader.readexactly(size + 2)
            await send({"type": "http.response.body", "body": data[:-2], "more_body": True})
        writer.close()


async def _serve(base_url: str) -> None:
    raise_open_files()
    config = uvicorn.Config(
        Reference(base_url),
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
    print(listener.getsockname()[1], flush=True)
    await uvicorn.Server(config).serve(sockets=[listener])


if __name__ == "__main__":
    import uvloop

    uvloop.run(_serve(sys.argv[1]))
