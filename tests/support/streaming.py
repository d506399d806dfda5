"""Hubs and servers of their own for the tests of streaming, a log to write to, and a Redis that fails."""

import asyncio
import socket
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, get_args
from uuid import UUID, uuid4

import uvicorn
from litestar import Litestar, get
from litestar.params import FromPath, FromQuery, HeaderParameter

from agents.events import AgentMessage, Event, StatusIdle, StatusRunning, StopReason
from agents.log import LoggedEvent, number
from agents.types import DeltaKind, PreviewDelta, PreviewStart
from app.embedded.binaries import find_binaries
from app.streaming.hub import Hub
from app.streaming.limits import StreamLimits
from app.streaming.publisher import Publisher
from app.streaming.response import EventStream, NothingFollows
from db.engine import Database, Transaction
from db.ids import public, to_uuid
from providers.ids import new_id
from providers.types import TextBlock
from tests.support.sse_client import SseStream, connect_sse

PATIENCE_S = 60.0  # costs nothing when it comes; a busy machine may stand still for seconds
ALL_KINDS: frozenset[DeltaKind] = frozenset(get_args(DeltaKind))
ACKNOWLEDGED = StreamLimits(acknowledge_s=PATIENCE_S)
"""A reader that has had an event follows live, however long Redis takes; so tests know what is not read."""


async def eventually(is_true: Callable[[], bool], *, patience_s: float = PATIENCE_S) -> None:
    """Waits for a state that nothing announces."""
    async with asyncio.timeout(patience_s):
        while not is_true():  # noqa: ASYNC110 - the state belongs to the code under test
            await asyncio.sleep(0.005)


# -- a log ----------------------------------------------------------------------------------------------


@dataclass
class Log:
    """A session written by hand. Every method commits; publishing is the test's."""

    database: Database
    session_id: str
    tenant_id: UUID
    seq: int = 0

    def message(self, text: str, *, event_id: str | None = None) -> AgentMessage:
        return AgentMessage(content=(TextBlock(text=text),), **self._fields(event_id))

    def running(self) -> StatusRunning:
        return StatusRunning(**self._fields())

    def idle(self) -> StatusIdle:
        return StatusIdle(stop_reason=StopReason(type="end_turn"), **self._fields())

    def event(self, kind: type[Event], **fields: Any) -> Event:
        return kind(**self._fields(), **fields)

    def _fields(self, event_id: str | None = None) -> dict[str, Any]:
        return {
            "id": event_id or new_id("evt"),
            "session_id": self.session_id,
            "created_at": datetime.now(UTC),
        }

    async def commit(
        self, *events: Event, epoch: int | None = None, closes: UUID | None = None, opens: UUID | None = None
    ) -> tuple[LoggedEvent, ...]:
        """The events as they are in the log. `closes` and `opens` are runs, in the same transaction."""
        logged = number(events, after_seq=self.seq)
        async with self.database.transaction() as tx:
            if closes is not None:
                await tx.execute("UPDATE runs SET state = 'closed' WHERE id = $1", closes)
            if opens is not None:
                await self._insert_run(tx, opens, "queued")
            for entry in logged:
                await tx.execute(
                    "INSERT INTO events (session_id, tenant_id, seq, id, type, body)"
                    " VALUES ($1, $2, $3, $4, $5, $6)",
                    to_uuid(self.session_id),
                    self.tenant_id,
                    entry.seq,
                    to_uuid(entry.id),
                    entry.type,
                    entry.body,
                )
            await tx.execute(
                "UPDATE sessions SET last_seq = last_seq + $2, epoch = coalesce($3, epoch) WHERE id = $1",
                to_uuid(self.session_id),
                len(events),
                epoch,
            )
        self.seq += len(events)
        return logged

    async def say(self, *texts: str) -> tuple[LoggedEvent, ...]:
        return await self.commit(*(self.message(text) for text in texts))

    async def open_run(self, state: str = "running") -> UUID:
        run_id = uuid4()
        async with self.database.transaction() as tx:
            await self._insert_run(tx, run_id, state)
        return run_id

    async def _insert_run(self, tx: Transaction, run_id: UUID, state: str) -> None:
        await tx.execute(
            "INSERT INTO runs (id, tenant_id, session_id, state, after_seq) VALUES ($1, $2, $3, $4, $5)",
            run_id,
            self.tenant_id,
            to_uuid(self.session_id),
            state,
            self.seq,
        )

    async def open_call(self, run_id: UUID, *, child_run_id: UUID | None = None) -> None:
        """A tool call that is open: for the client, or for a child run."""
        async with self.database.transaction() as tx:
            await tx.execute(
                "INSERT INTO tool_calls"
                " (id, tenant_id, session_id, run_id, tool_use_id, position, index, kind, name, input, state,"
                " child_run_id) VALUES ($1, $2, $3, $4, 'call', 1, 0, $5, 'ask', '{}', 'open', $6)",
                uuid4(),
                self.tenant_id,
                to_uuid(self.session_id),
                run_id,
                "client" if child_run_id is None else "server",
                child_run_id,
            )

    async def finish(self, run_id: UUID) -> tuple[LoggedEvent, ...]:
        """The commit that closes a run."""
        return await self.commit(self.idle(), closes=run_id)


async def new_log(database: Database) -> Log:
    """An empty session of a new tenant."""
    tenant_id, agent_id, session_id = uuid4(), uuid4(), uuid4()
    async with database.transaction() as tx:
        await tx.execute("INSERT INTO tenants (id, name) VALUES ($1, $2)", tenant_id, str(tenant_id))
        await tx.execute(
            "INSERT INTO agents (id, tenant_id, version) VALUES ($1, $2, 1)", agent_id, tenant_id
        )
        await tx.execute(
            "INSERT INTO agent_versions (agent_id, version, tenant_id, config) VALUES ($1, 1, $2, '{}')",
            agent_id,
            tenant_id,
        )
        await tx.execute(
            "INSERT INTO sessions (id, tenant_id, agent_id, agent_version) VALUES ($1, $2, $3, 1)",
            session_id,
            tenant_id,
            agent_id,
        )
    return Log(database=database, session_id=public("sess", session_id), tenant_id=tenant_id)


def started(event_id: str, kind: DeltaKind = "agent.message") -> PreviewStart:
    return PreviewStart(event_id=event_id, kind=kind)


def more(event_id: str, text: str) -> PreviewDelta:
    delta = {"type": "content_delta", "index": 0, "content": {"type": "text", "text": text}}
    return PreviewDelta(event_id=event_id, kind="agent.message", delta=delta)


# -- servers --------------------------------------------------------------------------------------------


@asynccontextmanager
async def serving(app: Any) -> AsyncIterator[tuple[int, uvicorn.Server]]:
    """The app under uvicorn on a loopback port of this process."""
    config = uvicorn.Config(app, host="127.0.0.1", port=0, log_config=None, access_log=False, lifespan="off")
    server = uvicorn.Server(config)
    task = asyncio.create_task(server.serve())
    try:
        await eventually(lambda: server.started or task.done())
        yield server.servers[0].sockets[0].getsockname()[1], server
    finally:
        server.should_exit = True
        await asyncio.wait_for(task, PATIENCE_S)


@dataclass
class Replica:
    """One api process: a hub, a server that streams from it, and a publisher."""

    hub: Hub
    port: int
    server: uvicorn.Server
    publisher: Publisher
    clients: AsyncExitStack

    async def connect(self, path: str, **options: Any) -> SseStream:
        """`connect_sse` to this process. Cut, if it is still open, when the test ends in whatever way."""
        stream = await connect_sse(self.port, path, **options)
        self.clients.callback(stream.cut)
        return stream

    def path(self, log: Log, *, query: str = "") -> str:
        return f"/{log.session_id}" + (f"?{query}" if query else "")


def streaming_app(hub: Hub) -> Litestar:
    @get("/{session_id:str}")
    async def stream(
        *,
        session_id: FromPath[str],
        after: FromQuery[str | None] = None,
        until: FromQuery[str | None] = None,
        event_deltas: FromQuery[list[str] | None] = None,
        types: FromQuery[list[str] | None] = None,
        last_event_id: Annotated[str | None, HeaderParameter(name="last-event-id")] = None,
    ) -> EventStream:
        opened = await hub.open(
            session_id=session_id,
            after=after,
            last_event_id=last_event_id,
            until_idle=until == "idle",
            deltas=ALL_KINDS & frozenset(event_deltas or ()),
            types=frozenset(types) if types else None,
        )
        return NothingFollows() if opened is None else opened

    return Litestar([stream], openapi_config=None, logging_config=None)


@asynccontextmanager
async def replica(
    database: Database,
    redis_url: str,
    limits: StreamLimits | None = None,
    *,
    is_redis_there: bool = True,
) -> AsyncIterator[Replica]:
    """Closed in the order of a shutdown: streams first, then the server."""
    async with AsyncExitStack() as stack:
        publisher = Publisher.open(redis_url)
        stack.push_async_callback(publisher.aclose)
        hub = Hub(database, redis_url, limits or ACKNOWLEDGED)
        await hub.start()
        if is_redis_there:
            await eventually(lambda: hub.is_redis_well)
        port, server = await stack.enter_async_context(serving(streaming_app(hub)))
        stack.push_async_callback(hub.close)
        clients = await stack.enter_async_context(AsyncExitStack())
        yield Replica(hub=hub, port=port, server=server, publisher=publisher, clients=clients)


@asynccontextmanager
async def open_database(url: str, **options: Any) -> AsyncIterator[Database]:
    database = Database.open(url, **options)
    try:
        yield database
    finally:
        await database.close()


class GatedDatabase(Database):
    """Stops at the gates that a test sets: `before` a transaction begins, `after` it has ended."""

    before: Callable[[], Awaitable[None]] | None = None
    after: Callable[[], Awaitable[None]] | None = None

    @asynccontextmanager
    async def transaction(self, tenant_id: UUID | None = None) -> AsyncIterator[Transaction]:
        if self.before is not None:
            await self.before()
        async with Database.transaction(self, tenant_id) as tx:
            yield tx
        if self.after is not None:
            await self.after()


@asynccontextmanager
async def open_gated(url: str) -> AsyncIterator[GatedDatabase]:
    database = GatedDatabase.open(url)
    assert isinstance(database, GatedDatabase)
    try:
        yield database
    finally:
        await database.close()


@dataclass
class Gate:
    """Lets a test stop the code under test at one point, once or more."""

    reached: asyncio.Event = field(default_factory=asyncio.Event)
    opened: asyncio.Event = field(default_factory=asyncio.Event)

    async def __call__(self) -> None:
        self.reached.set()
        await self.opened.wait()


# -- a Redis that fails ---------------------------------------------------------------------------------


class OwnRedis:
    """A Redis of one test, which may be killed and started again, empty."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"unix://{self._folder / 'r.sock'}"

    async def start(self) -> None:
        argv = [str(find_binaries().redis), "--port", "0", "--unixsocket", str(self._folder / "r.sock")]
        argv += ["--dir", str(self._folder), "--save", "", "--appendonly", "no", "--daemonize", "no"]
        self._process = _spawn(argv)
        await eventually(self._answers)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
            (self._folder / "r.sock").unlink(missing_ok=True)

    def _answers(self) -> bool:
        with socket.socket(socket.AF_UNIX) as client:
            return client.connect_ex(str(self._folder / "r.sock")) == 0


def _spawn(argv: list[str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


class Relay:
    """Stands between a hub and Redis, to hold back or cut what Redis answers."""

    def __init__(self, redis_url: str, folder: Path) -> None:
        self._target = redis_url.removeprefix("unix://").partition("?")[0]
        self._query = redis_url.partition("?")[2]
        self._path = folder / "relay.sock"
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._writers: list[asyncio.StreamWriter] = []
        self.flows = asyncio.Event()
        self.flows.set()
        self.is_refusing = False

    @property
    def url(self) -> str:
        return f"unix://{self._path}?{self._query}"

    async def start(self) -> None:
        self._server = await asyncio.start_unix_server(self._accept, str(self._path))

    async def aclose(self) -> None:
        self.cut()
        if self._server is not None:
            self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def cut(self) -> None:
        """Ends all connections."""
        writers, self._writers = self._writers, []
        for writer in writers:
            writer.transport.abort()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.is_refusing:
            writer.transport.abort()
            return
        server_reader, server_writer = await asyncio.open_unix_connection(self._target)
        self._writers += [writer, server_writer]
        for source, target, is_answer in ((reader, server_writer, False), (server_reader, writer, True)):
            task = asyncio.create_task(self._copy(source, target, is_answer=is_answer))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _copy(
        self, source: asyncio.StreamReader, target: asyncio.StreamWriter, *, is_answer: bool
    ) -> None:
        try:
            while data := await source.read(65536):
                if is_answer:
                    await self.flows.wait()
                target.write(data)
                await target.drain()
        except OSError:
            pass
        finally:
            target.close()
