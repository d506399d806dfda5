"""A fleet that outlives the rounds played on it, with everything that can be done to it.

Each member has a way to Postgres of its own, so that its connections alone can be cut.
"""

import asyncio
import contextlib
import os
import signal
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import asyncpg
import msgspec
import redis

from app.embedded import supervisor
from tests.support.chaos.points import ARMED, REQUESTS, SOCKET, ArmedFault
from tests.support.fleet import Fleet, Member, Role, eventually
from tests.support.postgres_proxy import PostgresProxy

LEASE_S = 1.0
SWEEP_S = 1.0
RETURN_S = 0.3  # what was killed is started again after so long
IN_FLIGHT = ("commit.", "claim.")  # points of what is one statement, and no transaction of many
IN_FLIGHT_S = 2.0  # for such a statement
ZOMBIE_S = LEASE_S + 2 * SWEEP_S + 0.5  # stands still until another one has its runs
FALSE_KEY = "sk-of-no-value-0123456789"  # must not be seen anywhere

SETTINGS = {
    "LEASE_S": str(LEASE_S),
    "WORKER_SHUTDOWN_S": "2",
    "API_SHUTDOWN_S": "2",
    "STREAM_HEARTBEAT_S": "1",
    "DEEPSEEK_API_KEY": FALSE_KEY,
}

Strike = Callable[["Stage", Member], Awaitable[str]]
"""Does something to a member that stands at a point; what the point is told."""


class Stage:
    """Two apis and two workers with fault points. `struck` counts what was done, as `what @ where`."""

    def __init__(self, fleet: Fleet, folder: Path) -> None:
        self.fleet = fleet
        self.folder = folder
        self.struck: Counter[str] = Counter()
        self.proxies: dict[str, PostgresProxy] = {}
        self._armed: dict[int, tuple[ArmedFault, Strike]] = {}
        self._last_id = 0
        self._paused: dict[str, int] = {}  # member and the process that stands still
        self._tasks: set[asyncio.Task[None]] = set()

    async def add(self, role: Role, name: str, *options: str) -> None:
        """Starts one more member. `options` go to its program."""
        proxy_folder = self.folder / name.replace(" ", "-")
        proxy_folder.mkdir()
        proxy = PostgresProxy(self.fleet.database_url, proxy_folder)
        await proxy.start()
        self.proxies[name] = proxy
        program = ["tests.support.chaos.member", role, str(self.folder), name, *options]
        member = self.fleet.add(role, {**SETTINGS, "DATABASE_URL": proxy.url}, program)
        assert member.name == name

    # -- points -------------------------------------------------------------------------------------

    def arm(self, point: str, strike: Strike, *, nth: int = 1, member: str | None = None) -> None:
        """The next process that passes the point for the `nth` time is struck; one process, once."""
        self._last_id += 1
        fault = ArmedFault(id=self._last_id, point=point, nth=nth, member=member)
        self._armed[fault.id] = fault, strike
        self._write_armed()

    def disarm(self) -> list[str]:
        """Takes back what has not fired; the points of that."""
        left = [fault.point for fault, _ in self._armed.values()]
        self._armed.clear()
        self._write_armed()
        return left

    def _write_armed(self) -> None:
        draft = self.folder / f"{ARMED}.draft"
        draft.write_bytes(msgspec.json.encode([fault for fault, _ in self._armed.values()]))
        draft.replace(self.folder / ARMED)

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """A member asks what happens at the point where it stands."""
        with contextlib.suppress(OSError):
            fault_id, _, name = (await reader.readline()).decode().strip().partition(" ")
            verdict = "go"
            found = self._armed.pop(int(fault_id), None)
            if found is not None:
                self._write_armed()
                fault, strike = found
                self.struck[f"{strike.__name__} @ {fault.point}"] += 1
                verdict = await self._strike(fault.point, strike, self.fleet.members[name])
            writer.write(f"{verdict}\n".encode())
            await writer.drain()
        writer.close()

    async def _strike(self, point: str, strike: Strike, member: Member) -> str:
        if not point.startswith(IN_FLIGHT) or not point.endswith(".inside"):
            return await strike(self, member)
        # When the statement has left, and what it did is in the database.
        delivered = self.proxies[member.name].delivered
        delivered.clear()
        self.keep(self._strike_when(delivered, strike, member))
        return "lose"

    async def _strike_when(self, delivered: asyncio.Event, strike: Strike, member: Member) -> None:
        with contextlib.suppress(TimeoutError):  # its connection was cut before
            async with asyncio.timeout(IN_FLIGHT_S):
                await delivered.wait()
                await strike(self, member)

    # -- what can be done to a member ---------------------------------------------------------------

    def kill(self, member: Member, number: signal.Signals = signal.SIGKILL) -> None:
        """Ends it; it is started again a moment later."""
        if member.is_running:
            self.fleet.kill(member.name, number)
            self.keep(self._restart(member))

    async def _restart(self, member: Member) -> None:
        process = member.process
        assert process is not None

        async def has_ended() -> bool:
            if self._paused.get(member.name) == process.pid:
                return False  # it ends when it goes on
            return process.poll() is not None

        await eventually(has_ended, f"the end of {member.name}")
        await asyncio.sleep(RETURN_S)
        if member.process is process:
            member.start()

    def pause(self, member: Member, for_s: float) -> None:
        """Stands still for so long."""
        if member.is_running and member.name not in self._paused:
            self._paused[member.name] = member.pid
            os.kill(member.pid, signal.SIGSTOP)
            self.keep(self._resume(member, member.pid, for_s))

    async def _resume(self, member: Member, pid: int, for_s: float) -> None:
        await asyncio.sleep(for_s)
        del self._paused[member.name]
        if member.is_running and member.pid == pid:
            os.kill(pid, signal.SIGCONT)

    def cut(self, member: Member) -> None:
        """Ends its connections to Postgres."""
        self.proxies[member.name].cut()

    # -- what can be done to the servers ------------------------------------------------------------

    def flush_redis(self) -> None:
        with contextlib.suppress(redis.RedisError):
            self.fleet.empty_redis()

    async def restart_redis(self, away_s: float) -> None:
        self.fleet.kill_redis()
        await asyncio.sleep(away_s)
        await self.fleet.restore("redis")

    async def restart_postgres(self, number: signal.Signals, away_s: float) -> None:
        self.fleet.stop_postgres(number)
        await asyncio.sleep(away_s)
        await self.fleet.restore("postgres")

    async def ask_postgres(self, statement: str) -> object:
        connection = await asyncpg.connect(self.fleet.database_url)
        try:
            return await connection.fetchval(statement)
        finally:
            await connection.close()

    # -- between rounds -----------------------------------------------------------------------------

    def keep(self, work: Awaitable[None]) -> None:
        """Work of which the end is waited for by `calm`."""
        task = asyncio.ensure_future(work)
        self._tasks.add(task)

    async def calm(self) -> None:
        """Returns when all is there again. Raises: what went wrong on the way."""
        while self._tasks:
            done = list(self._tasks)
            await asyncio.gather(*done)
            self._tasks.difference_update(done)

    async def aclose(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for proxy in self.proxies.values():
            await proxy.aclose()

    def requests(self) -> Counter[str]:
        """How many requests have left to the model, by session."""
        path = self.folder / REQUESTS
        lines = path.read_text().splitlines() if path.exists() else []
        return Counter(line.split()[0] for line in lines)


@asynccontextmanager
async def on_stage(
    fleet: Fleet, *, workers: Sequence[tuple[str, ...]] = (("--clock-shift=3600",), ())
) -> AsyncIterator[Stage]:
    """Adds two apis to a fleet without members, and a worker for each of these lists of options."""
    supervisor.MAX_REVIVALS = 1_000_000  # here it is not a fault when servers end again and again
    # A path to a socket may have 107 bytes at most.
    with tempfile.TemporaryDirectory(prefix="chaos-") as folder:
        stage = Stage(fleet, Path(folder))
        (stage.folder / "tools").symlink_to(fleet.tools)
        stage.disarm()
        server = await asyncio.start_unix_server(stage.answer, str(stage.folder / SOCKET))
        try:
            for number in (1, 2):
                await stage.add("api", f"api {number}")
            for number, options in enumerate(workers, start=1):
                await stage.add("worker", f"worker {number}", *options)
            yield stage
        finally:
            # Not in good order: that would take its time, and is tested elsewhere.
            for member in fleet.members.values():
                if member.is_running:
                    fleet.kill(member.name)
            await stage.aclose()
            server.close()
