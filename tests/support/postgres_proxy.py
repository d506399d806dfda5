"""Stands between our code and Postgres, to lose answers, hold them back, or be away."""

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator, Coroutine
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlencode, urlsplit, urlunsplit

SOCKET = ".s.PGSQL.5432"
LOSE_COMMIT = "SELECT 'lose the answer to COMMIT'"
LOSE_STATEMENT = "SELECT 'lose the answer to what is executed next'"
COMMIT = b"Q\x00\x00\x00\x0bCOMMIT\x00"  # asyncpg sends it as a simple query of its own
# A step that is stored by one statement commits by being executed: prepared under a name, then bound by it.
PREPARED_STEP = re.compile(rb"P....(\w+)\x00WITH fence AS", re.DOTALL)
BOUND = re.compile(rb"B....\x00(\w+)\x00", re.DOTALL)


class PostgresProxy:
    """A proxy on a Unix socket of its own.

    `lose_commits`: of so many transactions to come the server gets the COMMIT, or the step that is one by
    itself, and the client no answer, but the end of its connection. So does a connection on which a client
    has executed `LOSE_COMMIT` or `LOSE_STATEMENT`. `delivered`: set when the server has answered such a one.
    """

    def __init__(self, database_url: str, folder: Path) -> None:
        parts = urlsplit(database_url)
        query = {name: values[0] for name, values in parse_qs(parts.query).items()}
        self._target = str(Path(query["host"]) / SOCKET)
        self._folder = folder
        self.url = urlunsplit(parts._replace(query=urlencode(query | {"host": str(folder)})))
        self.lose_commits = 0
        self.delivered = asyncio.Event()
        self._is_away = False
        self._flows = asyncio.Event()
        self._flows.set()
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        self._server = await asyncio.start_unix_server(self._accept, str(self._folder / SOCKET))

    async def aclose(self) -> None:
        self.thaw()
        if self._server is not None:
            self._server.close()
        self.cut()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def freeze(self) -> None:
        """From now on nothing passes, and nobody is told."""
        self._flows.clear()

    def thaw(self) -> None:
        self._flows.set()

    def go_away(self) -> None:
        """Ends all connections and refuses others."""
        self._is_away = True
        self.cut()

    def come_back(self) -> None:
        self._is_away = False

    def cut(self) -> None:
        """Ends all connections that are open."""
        for writer in self._writers:
            writer.transport.abort()
        self._writers.clear()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._is_away:
            writer.transport.abort()
            return
        try:
            server_reader, server_writer = await asyncio.open_unix_connection(self._target)
        except OSError:
            writer.transport.abort()
            return
        self._writers |= {writer, server_writer}
        is_lost = asyncio.Event()
        self._keep(self._forward(reader, server_writer, is_lost))
        self._keep(self._answer(server_reader, writer, server_writer, is_lost))

    def _keep(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _forward(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, is_lost: asyncio.Event
    ) -> None:
        steps: set[bytes] = set()
        meant = ""  # what a client has asked to lose
        with contextlib.suppress(OSError):
            while data := await reader.read(65536):
                await self._flows.wait()
                steps.update(PREPARED_STEP.findall(data))
                commits = COMMIT in data or not steps.isdisjoint(BOUND.findall(data))
                if self.lose_commits and commits:
                    self.lose_commits -= 1
                    is_lost.set()
                if (meant == LOSE_COMMIT and COMMIT in data) or (
                    meant == LOSE_STATEMENT and data[:1] == b"B"
                ):
                    is_lost.set()
                for asked in (LOSE_COMMIT, LOSE_STATEMENT):
                    meant = asked if asked.encode() in data else meant
                writer.write(data)
                await writer.drain()
        writer.close()

    async def _answer(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        server_writer: asyncio.StreamWriter,
        is_lost: asyncio.Event,
    ) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(65536):
                await self._flows.wait()
                if is_lost.is_set():
                    self.delivered.set()
                    writer.transport.abort()
                    server_writer.transport.abort()
                    return
                writer.write(data)
                await writer.drain()
        writer.close()


@contextlib.asynccontextmanager
async def postgres_proxy(database_url: str, folder: Path) -> AsyncIterator[PostgresProxy]:
    proxy = PostgresProxy(database_url, folder)
    await proxy.start()
    try:
        yield proxy
    finally:
        await proxy.aclose()
