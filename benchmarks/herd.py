"""All readers of an api come back at the same moment, as after its restart, while prompts are posted to it.

Beside it the same prompts with no reader. Then some readers stop taking anything, and the session goes on.
"""

import asyncio
import statistics
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass

import httpx

from app.streaming.publisher import Publisher
from benchmarks.deployment import Deployment, deployment
from benchmarks.processes import Process, api_process
from benchmarks.readers import ReadersProcess
from benchmarks.session_log import SessionLog, new_sessions
from db.engine import Database

ROUNDS = 5
READERS = 2000
SESSIONS = 50
MISSED = 20  # events that each reader lacks
POST_EVERY_S = 0.05
QUIET_S = 3.0
PATIENCE_S = 120.0
STALLED = 200
STALL_READERS = 1000
STALL_EVENTS = 300
STALL_TEXT = "x" * 20_000


@dataclass(kw_only=True)
class Posts:
    """What came of prompts: seconds of those that were taken, and how many were not."""

    spent: list[float]
    failed: int = 0


async def run() -> str:
    """The tables, as Markdown."""
    async with deployment() as server, AsyncExitStack() as stack:
        database = Database.open(server.database_url, pool_size=2)
        stack.push_async_callback(database.close)
        publisher = Publisher.open(server.redis_url)
        stack.push_async_callback(publisher.aclose)
        herd = await _herd(server, database, publisher)
        stalled = await _stalled(server, database, publisher)
    return f"{herd}\n\n{stalled}"


async def _herd(server: Deployment, database: Database, publisher: Publisher) -> str:
    sessions = await new_sessions(server, database, SESSIONS + 1)
    for session_id in sessions[:SESSIONS]:
        log = SessionLog(database, publisher, session_id)
        for number in range(MISSED + 1):
            await log.commit(f"{number}")
    lines = [
        f"{READERS:,} readers of {SESSIONS} sessions at once, each lacking {MISSED} events",
        "",
        "| round | s until all have all | POST alone, ms: median / max | meanwhile | failed | pages |",
        "|---|---|---|---|---|---|",
    ]
    for number in range(1, ROUNDS + 1):
        async with api_process(server) as api:
            alone = await _posts(server, api, sessions[-1], asyncio.create_task(asyncio.sleep(QUIET_S)))
            returning = asyncio.create_task(_return(server, api, sessions[:SESSIONS]))
            posts = await _posts(server, api, sessions[-1], returning)
            pages = await _metric(server, api, "armillary_pages_read_total")
            cells = (
                f"{await returning:.1f}",
                _times(alone),
                _times(posts),
                str(posts.failed),
                f"{pages:.0f}",
            )
            lines.append(f"| {number} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


async def _return(server: Deployment, api: Process, sessions: list[str]) -> float:
    """How long it takes from the first connection until all readers have all events."""
    paths = [f"/v1/sessions/{session_id}/events/stream" for session_id in sessions]
    headers = {"authorization": f"Bearer {server.api_key}", "last-event-id": "1"}
    readers = await ReadersProcess.start()
    try:
        await readers.call("totals")  # it runs
        began = time.monotonic()
        opened = await readers.call(
            "open", port=api.port, paths=paths, headers=headers, count=READERS, at_once=READERS
        )
        if opened["statuses"] != {"200": READERS}:
            raise RuntimeError(f"not all readers were let in: {opened}")
        reached = await readers.call("wait", frames=READERS * MISSED, patience_s=PATIENCE_S)
        return float(reached["at"] - began)
    finally:
        await readers.aclose()


async def _posts(server: Deployment, api: Process, session_id: str, until: "asyncio.Task[object]") -> Posts:
    """Prompts one after another, as long as the task goes on."""
    posts = Posts(spent=[])
    message = {"type": "user.message", "content": [{"type": "text", "text": "say: yes"}]}
    headers = {"authorization": f"Bearer {server.api_key}"}
    async with httpx.AsyncClient(headers=headers, timeout=PATIENCE_S, trust_env=False) as client:
        while not until.done():
            began = time.monotonic()
            answer = await client.post(
                f"http://127.0.0.1:{api.port}/v1/sessions/{session_id}/events", json={"events": [message]}
            )
            if answer.status_code == 200:
                posts.spent.append(time.monotonic() - began)
            else:
                posts.failed += 1
            await asyncio.sleep(POST_EVERY_S)
    return posts


async def _stalled(server: Deployment, database: Database, publisher: Publisher) -> str:
    """Memory of the api while some readers take nothing of a session that produces megabytes."""
    produced_mib = STALL_EVENTS * len(STALL_TEXT) >> 20
    lines = [
        f"{STALLED} of {STALL_READERS:,} readers stop reading while {produced_mib} MiB are produced",
        "",
        "| round | dropped | MiB before | MiB at most | MiB at the end |",
        "|---|---|---|---|---|",
    ]
    headers = {"authorization": f"Bearer {server.api_key}"}
    for number in range(1, ROUNDS + 1):
        (session_id,) = await new_sessions(server, database, 1)
        async with api_process(server) as api:
            readers = await ReadersProcess.start()
            log = SessionLog(database, publisher, session_id)
            path = f"/v1/sessions/{session_id}/events/stream"
            await readers.call("open", port=api.port, paths=[path], headers=headers, count=STALL_READERS)
            await readers.call("stall", count=STALLED)
            before = most = api.resident_bytes()
            awake = STALL_READERS - STALLED
            for event in range(1, STALL_EVENTS + 1):
                await log.say(STALL_TEXT)
                await readers.call("wait", frames=awake * event, patience_s=PATIENCE_S)
                most = max(most, api.resident_bytes())
            dropped = await _metric(server, api, "armillary_slow_readers_dropped_total")
            sizes = " | ".join(f"{size / 2**20:.0f}" for size in (before, most, api.resident_bytes()))
            lines.append(f"| {number} | {dropped:.0f} | {sizes} |")
            await readers.aclose()
    return "\n".join(lines)


async def _metric(server: Deployment, api: Process, name: str) -> float:
    headers = {"authorization": f"Bearer {server.api_key}"}
    async with httpx.AsyncClient(headers=headers, trust_env=False) as client:
        text = (await client.get(f"http://127.0.0.1:{api.port}/metrics")).text
    return sum(float(line.split()[1]) for line in text.splitlines() if line.startswith(f"{name} "))


def _times(posts: Posts) -> str:
    if not posts.spent:
        return "none"
    return f"{statistics.median(posts.spent) * 1000:.0f} / {max(posts.spent) * 1000:.0f}"
