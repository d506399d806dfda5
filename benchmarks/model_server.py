"""A model server on loopback that is far faster than what it measures: Chat Completions, one short answer."""

import asyncio
import time

_CHUNK = (
    b'data: {"id":"c","object":"chat.completion.chunk","created":1,"model":"bench","choices":'
    b'[{"index":0,"delta":{"content":"Hello."},"finish_reason":null}]}\n\n'
)
_END = (
    b'data: {"id":"c","object":"chat.completion.chunk","created":1,"model":"bench","choices":'
    b'[{"index":0,"delta":{},"finish_reason":"stop"}],'
    b'"usage":{"prompt_tokens":5,"completion_tokens":1,"total_tokens":6}}\n\ndata: [DONE]\n\n'
)
_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
_MODELS = (
    b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 41\r\n\r\n"
    b'{"object":"list","data":[{"id":"bench"}]}'
)


class BenchModel:
    """`arrivals` gets the monotonic time, in seconds, at which each request's body was complete.

    A request for the list of models is answered, and does not count.
    """

    def __init__(self) -> None:
        self.arrivals: asyncio.Queue[float] = asyncio.Queue()
        self._server: asyncio.Server | None = None
        self.base_url = ""

    async def __aenter__(self) -> "BenchModel":
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        port = self._server.sockets[0].getsockname()[1]
        self.base_url = f"http://127.0.0.1:{port}/v1"
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._server is not None:
            self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                if head.startswith(b"GET "):
                    writer.write(_MODELS)
                    continue
                await reader.readexactly(_length(head))
                self.arrivals.put_nowait(time.monotonic())
                body = _CHUNK + _END
                writer.write(_HEAD + b"%x\r\n" % len(body) + body + b"\r\n0\r\n\r\n")
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()


def _length(head: bytes) -> int:
    for line in head.split(b"\r\n"):
        name, _, value = line.partition(b":")
        if name.strip().lower() == b"content-length":
            return int(value)
    return 0
