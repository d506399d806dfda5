"""A model server in a process of its own: Chat Completions, tokens and pace as the model's name says.

`python -m benchmarks.chat_server` prints its port. `bench-200-20` answers 200 tokens, 20 ms apart; 0: all of
them as fast as they are taken. Each token is an event of its own, as vendors send them.
"""

import asyncio
import re
from typing import cast

_MODEL = re.compile(rb'"model": ?"bench-(\d+)-(\d+)"')
_CHUNK = (
    b'data: {"id":"c","object":"chat.completion.chunk","created":1,"model":"bench","choices":'
    b'[{"index":0,"delta":{"content":"token "},"finish_reason":null}]}\n\n'
)
_END = (
    b'data: {"id":"c","object":"chat.completion.chunk","created":1,"model":"bench","choices":'
    b'[{"index":0,"delta":{},"finish_reason":"stop"}],'
    b'"usage":{"prompt_tokens":5,"completion_tokens":200,"total_tokens":205}}\n\ndata: [DONE]\n\n'
)
_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
_MODELS = (
    b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 41\r\n\r\n"
    b'{"object":"list","data":[{"id":"bench"}]}'
)
BURST = 10  # tokens of one write without a pace: a fast vendor's packets hold about so many


def _part(body: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(body), body)


class _Connection(asyncio.Protocol):
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._received = b""
        self._answer: asyncio.Task[None] | None = None

    def connection_lost(self, _: Exception | None) -> None:
        if self._answer is not None:
            self._answer.cancel()

    def data_received(self, data: bytes) -> None:
        self._received += data
        head, separator, body = self._received.partition(b"\r\n\r\n")
        if not separator:
            return
        if head.startswith(b"GET "):
            self._received = body
            self._transport.write(_MODELS)
            return
        length = re.search(rb"content-length: ?(\d+)", head, re.IGNORECASE)
        size = int(length[1]) if length else 0
        if len(body) < size:
            return
        self._received = body[size:]
        model = _MODEL.search(body)
        assert model is not None, body[:200]
        self._answer = asyncio.create_task(self._send(int(model[1]), int(model[2]) / 1000))

    async def _send(self, tokens: int, pace_s: float) -> None:
        self._transport.write(_HEAD)
        if pace_s:
            loop = asyncio.get_running_loop()
            due_s = loop.time()
            for _ in range(tokens):
                self._transport.write(_part(_CHUNK))
                due_s += pace_s
                await asyncio.sleep(due_s - loop.time())
        else:
            for sent in range(0, tokens, BURST):
                self._transport.write(_part(_CHUNK * min(BURST, tokens - sent)))
                await asyncio.sleep(0)
        self._transport.write(_part(_END) + b"0\r\n\r\n")


async def _serve() -> None:
    loop = asyncio.get_running_loop()
    server = await loop.create_server(_Connection, "127.0.0.1", 0, backlog=4096)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    import uvloop

    from benchmarks.readers import raise_open_files

    raise_open_files()
    uvloop.run(_serve())
