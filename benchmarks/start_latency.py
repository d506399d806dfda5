"""How long a prompt takes from the client's POST to the provider's request arriving at the model server.

From the moment at which the client has written the whole request on an open connection, so that it is the
service that is measured and not a client library. Beside it, in the same run: a bare `SELECT 1` and a Redis
PING, each on its own connection.
"""

import asyncio
import statistics
import time

import asyncpg
from redis.asyncio import Redis

from benchmarks.client import Client
from benchmarks.deployment import Deployment, deployment
from benchmarks.model_server import BenchModel

ROUNDS = 5
PROMPTS = 40  # a round
WARM_UP = 20
GAP_S = 0.02  # between prompts: the machine is idle when one is posted


async def run() -> str:
    """The table, as Markdown."""
    async with (
        BenchModel() as model,
        deployment(
            ARMILLARY_OPENAI_CHAT_BASE_URL=model.base_url, ARMILLARY_OPENAI_CHAT_API_KEY="bench"
        ) as server,
        Client(server.base_url, server.api_key) as client,
    ):
        agent = await _agent(client)
        await _prompts(client, agent, model, WARM_UP)
        rows = [await _round(client, agent, model, server) for _ in range(ROUNDS)]
    return _table(rows)


async def _round(
    client: Client, agent: str, model: BenchModel, server: Deployment
) -> tuple[float, float, float]:
    """Medians of one round in seconds: prompt, SELECT 1, PING."""
    connection = await asyncpg.connect(server.database_url)
    redis: Redis = Redis.from_url(server.redis_url)
    try:
        prompts = await _prompts(client, agent, model, PROMPTS)
        selects = [await _timed(connection.fetchval("SELECT 1")) for _ in range(PROMPTS)]
        pings = [await _timed(redis.ping()) for _ in range(PROMPTS)]
    finally:
        await connection.close()
        await redis.aclose()
    return statistics.median(prompts), statistics.median(selects), statistics.median(pings)


async def _agent(client: Client) -> str:
    answer = await client.post("/v1/agents", {"name": "bench", "model": "openai-chat:bench"})
    return str(answer["id"])


async def _prompts(client: Client, agent: str, model: BenchModel, count: int) -> list[float]:
    spent: list[float] = []
    for _ in range(count):
        session = (await client.post("/v1/sessions", {"agent": agent}))["id"]
        message = {"type": "user.message", "content": [{"type": "text", "text": "hi"}]}
        await asyncio.sleep(GAP_S)
        began_s = client.send(f"/v1/sessions/{session}/events", {"events": [message]})
        async with asyncio.timeout(10):
            spent.append(await model.arrivals.get() - began_s)
        await client.answer()
    return spent


async def _timed(work: object) -> float:
    began_s = time.monotonic()
    await work  # type: ignore[misc]
    return time.monotonic() - began_s


def _table(rows: list[tuple[float, float, float]]) -> str:
    lines = [
        "| measured | min ms | median ms | max ms | median / (SELECT 1 + PING) |",
        "|---|---|---|---|---|",
    ]
    names = ("POST of a prompt to request at the provider", "SELECT 1", "Redis PING")
    reference = statistics.median(select + ping for _, select, ping in rows)
    for index, name in enumerate(names):
        values = [row[index] * 1000 for row in rows]
        ratio = statistics.median(values) / 1000 / reference
        least, middle, most = min(values), statistics.median(values), max(values)
        lines.append(f"| {name} | {least:.2f} | {middle:.2f} | {most:.2f} | {ratio:.1f} |")
    return "\n".join(lines)
