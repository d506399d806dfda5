"""What it costs an api process to deliver an event to many readers of one session.

Beside it, round by round: a bare ASGI application that sends the same frames to as many readers at the same
pace. Then how the cost grows with the number of readers.
"""

import asyncio
import statistics
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass

from app.streaming.publisher import Publisher
from benchmarks.deployment import Deployment, deployment
from benchmarks.processes import Process, api_process, bare_process
from benchmarks.readers import ReadersProcess
from benchmarks.session_log import SessionLog, new_sessions
from db.engine import Database

ROUNDS = 5
READERS = 1000
EVENTS = 60  # a round
PACE_S = 0.05  # between events: readers are up to date before the next
SIZES = (1, 100, 1000, 5000)
PATIENCE_S = 60.0
TEXT = "Twenty tokens of text are about as long as this sentence, which says nothing else."


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Of one round. `cpu_s` is that of the api alone; `last_s`: from an event to its last reader, median."""

    cpu_s: float
    deliveries: int
    sent_bytes: int
    last_s: float

    @property
    def cpu_us(self) -> float:
        """For one event and one reader."""
        return self.cpu_s / self.deliveries * 1e6


@dataclass(frozen=True, kw_only=True)
class Measured:
    """A process that delivers, and those that read from it."""

    process: Process
    readers: ReadersProcess


Send = Callable[[str], Awaitable[bytes]]
"""Brings one event with this text to the readers; its frame."""


async def run() -> str:
    """The tables, as Markdown."""
    async with deployment() as server, AsyncExitStack() as stack:
        database = Database.open(server.database_url, pool_size=2)
        stack.push_async_callback(database.close)
        publisher = Publisher.open(server.redis_url)
        stack.push_async_callback(publisher.aclose)
        beside = await _beside_bare(server, database, publisher)
        sizes = await _by_size(server, database, publisher)
    return f"{beside}\n\n{sizes}"


async def _beside_bare(server: Deployment, database: Database, publisher: Publisher) -> str:
    lines = [
        f"{READERS} readers of one session, CPU in us for one event and one reader: min / median / max",
        "",
        "| events | api | bare ASGI | api / bare | api: ms to the last reader | bare: the same |",
        "|---|---|---|---|---|---|",
    ]
    async with api_process(server) as api, bare_process() as (bare, pipe), AsyncExitStack() as stack:
        ours, theirs = await ReadersProcess.start(), await ReadersProcess.start()
        stack.push_async_callback(ours.aclose)
        stack.push_async_callback(theirs.aclose)
        mine, other = Measured(process=api, readers=ours), Measured(process=bare, readers=theirs)
        log = await _read(server, mine, database, publisher, READERS)
        await theirs.call("open", port=bare.port, paths=["/"], headers={}, count=READERS)
        for kind, send in (("durable", log.say), ("deltas", _previewing(log))):
            rows = [await _round(mine, other, send, pipe) for _ in range(ROUNDS)]
            ratios = [mine.cpu_us / other.cpu_us for mine, other in rows]
            cells = (
                _span([mine.cpu_us for mine, _ in rows]),
                _span([other.cpu_us for _, other in rows]),
                _span(ratios, digits=2),
                _span([mine.last_s * 1000 for mine, _ in rows]),
                _span([other.last_s * 1000 for _, other in rows]),
            )
            lines.append(f"| {kind} | " + " | ".join(cells) + " |")
            if kind == "deltas":
                await log.finish_message(TEXT)
    return "\n".join(lines)


async def _round(api: Measured, bare: Measured, send: Send, pipe: asyncio.StreamWriter) -> tuple[Cost, Cost]:
    """Both once, with the same bytes. `pipe` is where the bare application takes frames from."""
    mine, frames = await _measure(api, send, READERS)
    again = iter(frames)

    async def copy(text: str) -> bytes:
        frame = next(again)
        pipe.write(len(frame).to_bytes(4) + frame)
        return frame

    other, _ = await _measure(bare, copy, READERS)
    if mine.sent_bytes != other.sent_bytes:
        raise RuntimeError(f"not the same bytes: {mine.sent_bytes} and {other.sent_bytes}")
    return mine, other


def _previewing(log: SessionLog) -> Send:
    """Sends deltas of one message, the first of which begins it."""
    has_begun = False

    async def send(text: str) -> bytes:
        nonlocal has_begun
        if has_begun:
            return log.preview(text)
        has_begun = True
        return log.begin_message()

    return send


async def _by_size(server: Deployment, database: Database, publisher: Publisher) -> str:
    lines = [
        "Durable events, one after another: min / median / max",
        "",
        "| readers | CPU us for one event and one reader | CPU ms for one event | ms to the last reader |",
        "|---|---|---|---|",
    ]
    for size in SIZES:
        async with api_process(server) as process:
            readers = await ReadersProcess.start()
            api = Measured(process=process, readers=readers)
            log = await _read(server, api, database, publisher, size)
            costs = []
            for _ in range(ROUNDS):
                costs.append((await _measure(api, log.say, size))[0])
            await readers.aclose()
        each = _span([cost.cpu_us for cost in costs])
        event = _span([cost.cpu_s / EVENTS * 1000 for cost in costs], digits=2)
        lines.append(f"| {size:,} | {each} | {event} | {_span([cost.last_s * 1000 for cost in costs])} |")
    return "\n".join(lines)


async def _read(
    server: Deployment, api: Measured, database: Database, publisher: Publisher, count: int
) -> SessionLog:
    """The log of a new session, with so many readers that are up to date."""
    headers = {"authorization": f"Bearer {server.api_key}"}
    (session_id,) = await new_sessions(server, database, 1)
    path = f"/v1/sessions/{session_id}/events/stream?event_deltas=agent.message"
    opened = await api.readers.call("open", port=api.process.port, paths=[path], headers=headers, count=count)
    if opened["statuses"] != {"200": count}:
        raise RuntimeError(f"not all readers were let in: {opened}")
    log = SessionLog(database, publisher, session_id)
    await log.say("Ready.")
    await api.readers.call("wait", frames=2 * count, patience_s=PATIENCE_S)  # where they are, and that
    return log


async def _measure(measured: Measured, send: Send, count: int) -> tuple[Cost, list[bytes]]:
    """One round, and its frames. Each is sent at its time, when all readers have the one before."""
    readers = measured.readers
    before = await readers.call("totals")
    began_cpu_s = measured.process.cpu_s()
    spent: list[float] = []
    frames: list[bytes] = []
    for number in range(1, EVENTS + 1):
        due = asyncio.create_task(asyncio.sleep(PACE_S))
        began = time.monotonic()
        frames.append(await send(f"{number} {TEXT}"))
        wanted = before["frames"] + number * count
        reached = (await readers.call("wait", frames=wanted, patience_s=PATIENCE_S))["at"]
        if reached is None:
            raise RuntimeError("an event did not reach all readers")
        spent.append(reached - began)
        await due
    cpu_s = measured.process.cpu_s() - began_cpu_s
    sent_bytes = (await readers.call("totals"))["bytes"] - before["bytes"]
    cost = Cost(
        cpu_s=cpu_s, deliveries=EVENTS * count, last_s=statistics.median(spent), sent_bytes=sent_bytes
    )
    return cost, frames


def _span(values: list[float], *, digits: int = 1) -> str:
    least, middle, most = min(values), statistics.median(values), max(values)
    return f"{least:.{digits}f} / {middle:.{digits}f} / {most:.{digits}f}"
