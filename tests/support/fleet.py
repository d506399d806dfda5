"""Several api and worker processes on a Postgres and a Redis of their own, all to be killed and restarted."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

import asyncpg
import httpx
import redis

from app.embedded.supervisor import Supervisor
from app.processes import spawn, stop_process
from db.migrate import upgrade

ROOT = Path(__file__).parents[2]
READY_S = 60.0
LOOK_S = 0.03
PATIENCE_S = 60.0
STOP_S = 30.0
LISTENING = "listening on "

Role = Literal["api", "worker"]


async def eventually(
    is_true: Callable[[], Awaitable[Any]], what: str, *, patience_s: float = PATIENCE_S
) -> None:
    """Waits for a state that nothing announces. Raises: TimeoutError, saying `what` did not come about."""
    deadline = time.monotonic() + patience_s
    while not await is_true():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what}: not within {patience_s:.0f} s")
        await asyncio.sleep(LOOK_S)


@dataclass(kw_only=True)
class Member:
    """One process of the fleet under a name that it keeps when it is started again."""

    name: str
    role: Role
    argv: list[str]
    log: Path
    environment: dict[str, str]
    process: subprocess.Popen[bytes] | None = None
    begins_at_bytes: int = 0  # where the log of the running process begins

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    @property
    def is_running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def start(self) -> None:
        self.begins_at_bytes = self.log.stat().st_size if self.log.exists() else 0
        with self.log.open("ab") as output:
            self.process = spawn(
                self.argv,
                death_signal=signal.SIGKILL,
                log=output,
                environment=self.environment,
                cwd=ROOT,
            )

    def lines(self) -> list[str]:
        """What the running process has said, on both outputs."""
        with self.log.open("rb") as file:
            file.seek(self.begins_at_bytes)
            return file.read().decode(errors="replace").splitlines()

    @property
    def url(self) -> str:
        """Where an api listens. Raises: ConnectionRefusedError, while it does not."""
        for line in self.lines():
            if line.startswith(LISTENING):
                return line.removeprefix(LISTENING)
        raise ConnectionRefusedError(f"{self.name} does not listen")

    @property
    def port(self) -> int:
        port = urlsplit(self.url).port
        assert port is not None
        return port


@dataclass(kw_only=True)
class Fleet:
    """Members by name: `api 1`, `api 2` … and `worker 1`, `worker 2` …

    The workers have the tools of `tests.support.worker_with_tools`, which work in `tools`.
    """

    folder: Path
    servers: Supervisor
    members: dict[str, Member] = field(default_factory=dict)

    @property
    def database_url(self) -> str:
        return self.servers.endpoints.database_url

    @property
    def redis_url(self) -> str:
        return self.servers.endpoints.redis_url

    @property
    def tools(self) -> Path:
        return self.folder / "tools"

    @property
    def apis(self) -> list[Member]:
        return [member for member in self.members.values() if member.role == "api"]

    @property
    def workers(self) -> list[Member]:
        return [member for member in self.members.values() if member.role == "worker"]

    def add(self, role: Role, settings: dict[str, str], program: Sequence[str] = ()) -> Member:
        """Starts one more; it is not ready yet. `program`: what to run in place of the usual one."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith("ARMILLARY_")}
        own = {"DATABASE_URL": self.database_url, "REDIS_URL": self.redis_url, "PORT": "0", **settings}
        usual = ["app", "api"]
        if role == "worker":
            usual = ["tests.support.worker_with_tools", str(self.tools)]
        name = f"{role} {sum(member.role == role for member in self.members.values()) + 1}"
        self.members[name] = Member(
            name=name,
            role=role,
            argv=[sys.executable, "-m", *(program or usual)],
            log=self.folder / f"{name.replace(' ', '-')}.log",
            environment=kept | {f"ARMILLARY_{setting}": value for setting, value in own.items()},
        )
        self.members[name].start()
        return self.members[name]

    # -- the servers --------------------------------------------------------------------------------

    def empty_redis(self) -> None:
        with redis.Redis.from_url(self.redis_url) as client:
            client.flushall()

    def kill_redis(self) -> None:
        """Redis is away from now on, until `restore`."""
        with redis.Redis.from_url(self.redis_url) as client:
            pid = client.info("server")["process_id"]
        os.kill(pid, signal.SIGKILL)

    def stop_postgres(self, number: signal.Signals) -> None:
        """SIGINT stops it in good order, SIGQUIT like a crash. It goes away, until `restore`."""
        lines = (data_folder(self.folder) / "postgres" / "postmaster.pid").read_text().splitlines()
        os.kill(int(lines[0]), number)

    async def restore(self, *names: str) -> None:
        """Starts these servers again when they have ended; they are ready when this returns."""
        missing = set(names)

        async def are_back() -> bool:
            missing.difference_update(self.servers.revive())
            return not missing

        await eventually(are_back, f"the end of {names}")

    # -- the members --------------------------------------------------------------------------------

    def kill(self, name: str, number: signal.Signals = signal.SIGKILL) -> None:
        member = self.members[name]
        os.kill(member.pid, number)
        if number == signal.SIGKILL and member.process is not None:
            member.process.wait(STOP_S)

    def pause(self, name: str) -> None:
        """Stands still until `resume`."""
        self.kill(name, signal.SIGSTOP)

    async def ended(self, name: str, *, patience_s: float = STOP_S) -> int:
        """The exit code of a member that was told to end."""
        process = self.members[name].process
        assert process is not None

        async def has_ended() -> bool:
            return process.poll() is not None

        await eventually(has_ended, f"the end of {name}", patience_s=patience_s)
        assert process.returncode is not None
        return process.returncode

    async def replacements(self) -> dict[str, Member]:
        """One more process for each name, all ready, as a deploy has them before it ends the others."""
        successors = {name: replace(member, process=None) for name, member in self.members.items()}
        for successor in successors.values():
            successor.start()
        async with asyncio.timeout(READY_S):
            for successor in successors.values():
                await self._wait(successor, self._readiness(successor))
        return successors

    async def hand_over(self, successor: Member) -> int:
        """Gives the name to this process and tells the old one to end; that one's exit code."""
        old = self.members[successor.name]
        self.members[successor.name] = successor
        assert old.process is not None
        os.kill(old.pid, signal.SIGTERM)
        return await asyncio.to_thread(old.process.wait, STOP_S)

    def start_missing(self) -> None:
        """Starts what has ended; it is not ready yet."""
        for member in self.members.values():
            if not member.is_running:
                member.start()

    def resume(self) -> None:
        """Sets going what stands still."""
        for member in self.members.values():
            if member.is_running:
                os.kill(member.pid, signal.SIGCONT)

    async def ready(self) -> None:
        """Returns when all members work, those that had ended and those that were stopped too."""
        self.resume()
        self.start_missing()
        async with asyncio.timeout(READY_S):
            for member in self.members.values():
                await self._wait(member, self._readiness(member))

    async def steady(self, name: str) -> None:
        """Returns when this worker's lease has lasted for so long that it may call others dead."""
        async with asyncio.timeout(READY_S):
            await self._wait(
                self.members[name], lambda worker: _has_lease(self.database_url, worker, lasting_s=3)
            )

    def _readiness(self, member: Member) -> Callable[[Member], Awaitable[bool]]:
        if member.role == "api":
            return _answers
        return lambda worker: _has_lease(self.database_url, worker, lasting_s=0)

    async def _wait(self, member: Member, is_ready: Callable[[Member], Awaitable[bool]]) -> None:
        while not await is_ready(member):
            assert member.is_running, f"{member.name} ended: {member.lines()[-20:]}"
            await asyncio.sleep(LOOK_S)

    def log_sizes(self) -> dict[str, int]:
        """Bytes logged so far, by member."""
        return {member.name: member.log.stat().st_size for member in self.members.values()}

    def complaints(self, since: dict[str, int]) -> list[str]:
        """What has been logged after `log_sizes` that tells of a fault of ours: errors, and tracebacks."""
        found = []
        for member in self.members.values():
            with member.log.open("rb") as file:
                file.seek(since[member.name])
                lines = file.read().decode(errors="replace").splitlines()
            found += [f"{member.name}: {line}" for line in lines if _is_complaint(line)]
        return found

    def tails(self) -> str:
        """The end of each log, for a test that failed."""
        parts = []
        for member in self.members.values():
            parts.append(f"--- {member.name}, which {'runs' if member.is_running else 'has ended'}")
            parts += member.lines()[-40:]
        return "\n".join(parts)

    def stop(self) -> None:
        self.resume()
        for member in self.members.values():
            if member.is_running:
                os.kill(member.pid, signal.SIGTERM)
        for member in self.members.values():
            if member.process is not None:
                stop_process(member.process, (signal.SIGTERM, STOP_S))


def data_folder(folder: Path) -> Path:
    return folder / "servers"


@contextmanager
def running_fleet(
    folder: Path, *, apis: int = 2, workers: int = 2, settings: dict[str, str] | None = None
) -> Iterator[Fleet]:
    """A fleet and its servers; all processes have ended when the block does.

    `settings`: names without `ARMILLARY_`. The members are not ready yet.
    """
    with Supervisor(data_folder(folder), is_durable=False) as servers:
        fleet = Fleet(folder=folder, servers=servers)
        fleet.tools.mkdir(parents=True)
        asyncio.run(_make_schema(fleet.database_url))
        try:
            for _ in range(apis):
                fleet.add("api", settings or {})
            for _ in range(workers):
                fleet.add("worker", settings or {})
            yield fleet
        finally:
            fleet.stop()


GATES = """
CREATE TABLE gates (session_id uuid, type text, number bigint);
CREATE FUNCTION wait_at_gate() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    PERFORM pg_advisory_xact_lock_shared(number) FROM gates
    WHERE session_id = NEW.session_id AND type = NEW.type;
    RETURN NEW;
END $$;
CREATE TRIGGER wait_at_gate BEFORE INSERT ON events FOR EACH ROW EXECUTE FUNCTION wait_at_gate();
GRANT SELECT ON gates TO PUBLIC;
"""
"""Lets a test hold a commit in its middle: see `Visit.gate`."""


async def _make_schema(url: str) -> None:
    await upgrade(url)
    connection = await asyncpg.connect(url)
    try:
        await connection.execute(GATES)
    finally:
        await connection.close()


async def _answers(api: Member) -> bool:
    async with httpx.AsyncClient(trust_env=False) as client:
        try:
            answer = await client.get(f"{api.url}/health/ready")
        except (httpx.TransportError, ConnectionRefusedError):
            return False
    return answer.status_code == 200


async def _has_lease(database_url: str, worker: Member, *, lasting_s: int) -> bool:
    connection = await asyncpg.connect(database_url)
    try:
        found = await connection.fetchval(
            "SELECT count(*) FROM workers WHERE pid = $1 AND lease_until > clock_timestamp()"
            " AND steady_since <= clock_timestamp() - make_interval(secs => $2)",
            worker.pid,
            lasting_s,
        )
    finally:
        await connection.close()
    return bool(found)


def _is_complaint(line: str) -> bool:
    if line.startswith(LISTENING):
        return False
    try:
        entry = json.loads(line)
    except ValueError:
        return True
    return bool(entry["level"] in {"error", "critical"})
