"""What a stream costs that waits: memory of the api process for each, with many readers at once."""

import asyncio
import statistics

from benchmarks.deployment import Deployment, deployment
from benchmarks.processes import api_process
from benchmarks.readers import ReadersProcess
from benchmarks.session_log import new_sessions
from db.engine import Database

ROUNDS = 5
SETTLE_S = 2.0
WATCHED_S = 10.0
CASES = ((5_000, 10), (10_000, 10), (5_000, 5_000), (10_000, 10_000))
"""How many readers on how many sessions."""


async def run() -> str:
    """The table, as Markdown."""
    lines = [
        "| idle readers | sessions | KiB each: min / median / max | CPU of the api while idle, % |",
        "|---|---|---|---|",
    ]
    async with deployment() as server:
        database = Database.open(server.database_url, pool_size=1)
        sessions = await new_sessions(server, database, max(count for _, count in CASES))
        await database.close()
        for readers, count in CASES:
            rows = [await _round(server, sessions[:count], readers) for _ in range(ROUNDS)]
            sizes = [size / 1024 for size, _ in rows]
            span = " / ".join(f"{pick(sizes):.1f}" for pick in (min, statistics.median, max))
            cpu = statistics.median(cpu for _, cpu in rows)
            lines.append(f"| {readers:,} | {count:,} | {span} | {cpu * 100:.1f} |")
    return "\n".join(lines)


async def _round(server: Deployment, sessions: list[str], readers: int) -> tuple[float, float]:
    """Resident bytes for each reader in a fresh process, and the share of a core that it takes then."""
    paths = [f"/v1/sessions/{session}/events/stream?event_deltas=agent.message" for session in sessions]
    headers = {"authorization": f"Bearer {server.api_key}"}
    async with api_process(server, ARMILLARY_API_CONNECTIONS=str(2 * readers)) as api:
        process = await ReadersProcess.start()
        try:
            await process.call("open", port=api.port, paths=paths[:1], headers=headers, count=1)
            await asyncio.sleep(SETTLE_S)
            before = api.resident_bytes()
            opened = await process.call("open", port=api.port, paths=paths, headers=headers, count=readers)
            if opened["statuses"] != {"200": readers}:
                raise RuntimeError(f"not all readers were let in: {opened}")
            await asyncio.sleep(SETTLE_S)
            used = api.resident_bytes() - before
            began_s = api.cpu_s()
            await asyncio.sleep(WATCHED_S)
            return used / readers, (api.cpu_s() - began_s) / WATCHED_S
        finally:
            await process.aclose()
