"""The processes that are measured, and what the kernel says of them."""

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.deployment import Deployment

TICKS_PER_S = os.sysconf("SC_CLK_TCK")
LISTENING = b"listening on "


@dataclass(frozen=True, kw_only=True)
class Process:
    """One that listens on loopback."""

    pid: int
    port: int

    def cpu_s(self) -> float:
        """Spent so far, by all its threads, in user and in kernel mode."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / TICKS_PER_S

    def resident_bytes(self) -> int:
        for line in Path(f"/proc/{self.pid}/status").read_text().splitlines():
            if line.startswith("VmRSS:"):
                return int(line.split()[1]) * 1024
        raise RuntimeError("the kernel does not say")


@asynccontextmanager
async def api_process(server: Deployment, **environment: str) -> AsyncIterator[Process]:
    """One more `armillary api` on these servers, which nobody else asks anything."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("ARMILLARY_")}
    own = {
        "ARMILLARY_DATABASE_URL": server.database_url,
        "ARMILLARY_REDIS_URL": server.redis_url,
        "ARMILLARY_PORT": "0",
        **environment,
    }
    async with _started("-m", "app", "api", environment=inherited | own) as (process, line):
        yield Process(pid=process.pid, port=int(line.rpartition(b":")[2]))


PARTS = ("api", "worker", "postgres", "redis")


def cpu_by_part(server: Deployment) -> dict[str, float]:
    """Seconds that each part of `armillary serve` has spent so far, the ended children of each included."""
    spent = dict.fromkeys(PARTS, 0.0)
    for pid in _descendants(server.pid):
        try:
            command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ")
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except FileNotFoundError:  # it has ended
            continue
        part = next((name for name in PARTS if name.encode() in command), None)
        if part is not None:
            spent[part] += sum(int(field) for field in fields[11:15]) / TICKS_PER_S
    return spent


def _descendants(pid: int) -> list[int]:
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except (FileNotFoundError, ProcessLookupError):
                continue
            children.setdefault(int(fields[1]), []).append(int(entry.name))
    found: list[int] = []
    waiting = [pid]
    while waiting:
        below = children.get(waiting.pop(), [])
        found += below
        waiting += below
    return found


@asynccontextmanager
async def helper_process(*argv: str) -> AsyncIterator[Process]:
    """A module of ours that prints its port."""
    async with _started("-m", *argv, environment=dict(os.environ)) as (process, line):
        yield Process(pid=process.pid, port=int(line))


@asynccontextmanager
async def bare_process() -> AsyncIterator[tuple[Process, asyncio.StreamWriter]]:
    """`benchmarks.bare_stream`, and where it takes frames from."""
    async with _started("-m", "benchmarks.bare_stream", environment=dict(os.environ)) as (process, line):
        assert process.stdin is not None
        yield Process(pid=process.pid, port=int(line)), process.stdin


@asynccontextmanager
async def _started(
    *argv: str, environment: dict[str, str]
) -> AsyncIterator[tuple[asyncio.subprocess.Process, bytes]]:
    """A Python process and its first line; it has ended when the block does."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *argv,
        env=environment,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    assert process.stdout is not None
    try:
        line = await process.stdout.readline()
        if not line:
            raise RuntimeError(f"{argv} ended before it listened")
        log = asyncio.create_task(process.stdout.read())
        yield process, line.strip()
        log.cancel()
    finally:
        if process.returncode is None:
            process.kill()  # nobody waits for its streams
        await process.wait()
