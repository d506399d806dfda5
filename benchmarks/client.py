"""A client that costs next to nothing: JSON over one HTTP/1.1 connection that stays open."""

import asyncio
import json
import time
from types import TracebackType
from typing import Any, Self
from urllib.parse import urlsplit

ANSWER_S = 10.0


class Client:
    """One request at a time."""

    def __init__(self, base_url: str, api_key: str) -> None:
        parts = urlsplit(base_url)
        assert parts.hostname is not None
        self._host, self._port = parts.hostname, parts.port or 80
        self._fields = f"host: {parts.netloc}\r\nauthorization: Bearer {api_key}\r\n"

    async def __aenter__(self) -> Self:
        self._reader, self._writer = await asyncio.open_connection(self._host, self._port)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._writer.close()

    async def post(self, path: str, body: Any) -> Any:
        """The answer's JSON. Raises: RuntimeError, when it is no 2xx."""
        self.send(path, body)
        return await self.answer()

    def send(self, path: str, body: Any) -> float:
        """Writes a POST; the monotonic time, in seconds, at which that was done."""
        content = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\n{self._fields}content-type: application/json\r\n"
        self._writer.write(f"{head}content-length: {len(content)}\r\n\r\n".encode() + content)
        return time.monotonic()

    async def answer(self) -> Any:
        """The JSON of the answer to what was sent. Raises: RuntimeError, when it is no 2xx."""
        async with asyncio.timeout(ANSWER_S):
            head = (await self._reader.readuntil(b"\r\n\r\n")).decode("latin-1")
            status, *fields = head.split("\r\n")
            values = dict(field.lower().split(": ", 1) for field in fields if field)
            body = await self._reader.readexactly(int(values["content-length"]))
        if not status.split()[1].startswith("2"):
            raise RuntimeError(f"{status}: {body.decode()}")
        return json.loads(body)
