"""What a token costs, and how long the first one takes: one api and one worker beside the reference.

The reference (`benchmarks.reference`) asks the same model server through the openai SDK, passes the answer on
and stores nothing. Rounds alternate between the two; ratios are of one round.
"""

import json
import statistics
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from benchmarks.client import Client
from benchmarks.deployment import Deployment, deployment
from benchmarks.processes import PARTS, Process, cpu_by_part, helper_process
from benchmarks.streams import Streamed, post, stream_all

ROUNDS = 5
SEQUENTIAL = 30  # prompts of a round
AT_ONCE = (20, 100, 300)
TOKENS = 200
PACED_MS = 20
SLOTS = 400
SHORT, FAST, PACED = "bench-1-0", f"bench-{TOKENS}-0", f"bench-{TOKENS}-{PACED_MS}"
SLOW = "bench-30-100"  # a pace that the reference keeps up with, also at 300 runs
MODELS = (SHORT, FAST, PACED, SLOW)

Play = Callable[[str, int], Awaitable[list[Streamed]]]
"""Streams so many answers of a model at once."""


@dataclass(frozen=True, kw_only=True)
class Side:
    """One of the two that are compared. `cpu` tells what its processes have spent so far, by part."""

    play: Play
    cpu: Callable[[], dict[str, float]]


@dataclass(frozen=True, kw_only=True)
class Spent:
    """Of one round: tokens per second, and CPU seconds for 1,000 tokens by part."""

    tokens_per_s: float
    cpu_s: dict[str, float]

    @property
    def total_cpu_s(self) -> float:
        return sum(self.cpu_s.values())


async def run() -> str:
    """The tables, as Markdown."""
    async with helper_process("benchmarks.chat_server") as model:
        base_url = f"http://127.0.0.1:{model.port}/v1"
        settings = {
            "ARMILLARY_OPENAI_CHAT_BASE_URL": base_url,
            "ARMILLARY_OPENAI_CHAT_API_KEY": "bench",
            "ARMILLARY_WORKER_SLOTS": str(SLOTS),
        }
        async with (
            helper_process("benchmarks.reference", base_url) as reference,
            deployment(**settings) as server,
            Client(server.base_url, server.api_key) as client,
        ):
            ours = await _ours(server, client)
            sides = (ours, _reference(reference, "/sdk"), _reference(reference, "/raw"))
            for side in sides:
                await side.play(FAST, 5)
            return "\n\n".join([await _first_tokens(*sides), await _costs(*sides)])


async def _ours(server: Deployment, client: Client) -> Side:
    port = int(server.base_url.rpartition(":")[2])
    key = f"authorization: Bearer {server.api_key}"
    body = json.dumps({"prompt": "hi", "stream": True}).encode()
    requests: dict[str, bytes] = {}
    for model in MODELS:
        agent = (await client.post("/v1/agents", {"name": "bench", "model": f"openai-chat:{model}"}))["id"]
        requests[model] = post(f"/v1/agents/{agent}/prompt", body, key)

    async def play(model: str, count: int) -> list[Streamed]:
        return await stream_all(port, requests[model], count=count, mark=b"content_delta")

    return Side(play=play, cpu=lambda: cpu_by_part(server))


def _reference(process: Process, path: str) -> Side:
    async def play(model: str, count: int) -> list[Streamed]:
        request = post(path, json.dumps({"model": model, "prompt": "hi"}).encode())
        return await stream_all(process.port, request, count=count, mark=b"token ")

    return Side(play=play, cpu=lambda: {"all": process.cpu_s()})


# -- the first token ------------------------------------------------------------------------------------


async def _first_tokens(ours: Side, reference: Side, bare: Side) -> str:
    lines = [
        "Milliseconds from the request to the first token, median of a round: min / median / max over rounds",
        "",
        "| runs at once | Armillary | reference | bare proxy | Armillary / reference |",
        "|---|---|---|---|---|",
    ]
    for count in (1, *AT_ONCE):
        rows = [[await _first_ms(side, count) for side in (ours, reference, bare)] for _ in range(ROUNDS)]
        columns = [[row[at] for row in rows] for at in range(3)]
        ratios = [row[0] / row[1] for row in rows]
        cells = [*(_span(column, 1) for column in columns), _span(ratios, 2)]
        lines.append(f"| {count} | {' | '.join(cells)} |")
    return "\n".join(lines)


async def _first_ms(side: Side, count: int) -> float:
    if count > 1:
        return statistics.median(each.first_s for each in await side.play(SLOW, count)) * 1000
    alone = [(await side.play(SHORT, 1))[0].first_s for _ in range(SEQUENTIAL)]
    return statistics.median(alone) * 1000


# -- throughput and cost --------------------------------------------------------------------------------


async def _costs(ours: Side, reference: Side, bare: Side) -> str:
    lines = [
        f"{TOKENS} tokens an answer: min / median / max over rounds",
        "",
        "| test | measured | Armillary | reference | bare proxy | Armillary / reference |",
        "|---|---|---|---|---|---|",
    ]
    parts: list[str] = []
    for name, count, model in (("50 runs, no pace", 50, FAST), (f"20 runs, {PACED_MS} ms", 20, PACED)):
        rounds = [
            [await _spent(side, model, count) for side in (ours, reference, bare)] for _ in range(ROUNDS)
        ]
        if model == FAST:
            lines.append(_row(name, "tokens per second", rounds, lambda spent: spent.tokens_per_s, 0))
        lines.append(_row(name, "CPU s for 1,000 tokens", rounds, lambda spent: spent.total_cpu_s, 3))
        by_part = {part: statistics.median(row[0].cpu_s[part] for row in rounds) for part in PARTS}
        parts.append(f"{name}: " + ", ".join(f"{part} {cpu_s:.3f}" for part, cpu_s in by_part.items()))
    by_parts = f"CPU s for 1,000 tokens of Armillary by part, medians. {'; '.join(parts)}."
    return "\n".join([*lines, "", by_parts])


async def _spent(side: Side, model: str, count: int) -> Spent:
    before = side.cpu()
    streamed = await side.play(model, count)
    after = side.cpu()
    if any(each.tokens < TOKENS for each in streamed):
        raise RuntimeError("tokens are missing")
    tokens = count * TOKENS
    took_s = max(each.total_s for each in streamed)
    return Spent(
        tokens_per_s=tokens / took_s,
        cpu_s={part: (after[part] - before[part]) / tokens * 1000 for part in after},
    )


def _row(
    test: str, name: str, rounds: list[list[Spent]], value: Callable[[Spent], float], digits: int
) -> str:
    columns = [[value(row[at]) for row in rounds] for at in range(3)]
    ratios = [value(row[0]) / value(row[1]) for row in rounds]
    cells = [*(_span(column, digits) for column in columns), _span(ratios, 2)]
    return f"| {test} | {name} | {' | '.join(cells)} |"


def _span(values: list[float], digits: int) -> str:
    return " / ".join(f"{pick(values):,.{digits}f}" for pick in (min, statistics.median, max))
