"""Readers that are cut and come back, over one api and the other."""

import asyncio
import json
from contextlib import AbstractAsyncContextManager

from tests.support.sse_client import SseEvent, SseStream, open_sse
from tests.support.transcript_rules import DELTAS
from tests.support.visit import Visit

TURNS = 13
SCRIPT = "pace: 1\nchunk: 4\n" + "".join(
    f'say: Now {turn} times 7.\ncall: calculate {{"expression": "{turn} * 7"}}\n---\n'
    for turn in range(TURNS)
)
LIVE_CUTS = (1, 2, 5, 23)
CUTS = range(1, 51)
AT_ONCE = 10


async def test_a_reader_cut_after_any_number_of_events_gets_what_an_undisturbed_one_gets(
    visit: Visit,
) -> None:
    """SSE-07."""
    session_id = await visit.session("calculate")
    ways = [api.name for api in visit.fleet.apis]
    undisturbed = visit.follow_both(session_id)
    live = [visit.follow(session_id, *ways, cut_after=cut) for cut in LIVE_CUTS]
    await visit.at("api 1").say(session_id, SCRIPT)
    events = await visit.checked(session_id)  # compares all readers with the log, byte for byte
    assert len(events) > 60
    assert all(reader.connections >= len(events) / cut for reader, cut in zip(live, LIVE_CUTS, strict=True))
    assert undisturbed[0].connections == 1

    for first in range(CUTS.start, CUTS.stop, AT_ONCE):
        cuts = CUTS[first - CUTS.start :][:AT_ONCE]
        readers = [visit.follow(session_id, *ways, cut_after=cut, kinds=()) for cut in cuts]
        await asyncio.gather(*(reader.closed() for reader in readers))
        assert [reader.durable for reader in readers] == [undisturbed[0].durable] * len(readers)
        assert [reader.connections for reader in readers] == [-(-len(events) // cut) for cut in cuts]


async def test_a_prompt_repeated_over_the_other_api_goes_on_with_the_same_answer(visit: Visit) -> None:
    session_id = await visit.session("calculate")
    agent_id = (await visit.at("api 1").get(f"/v1/sessions/{session_id}"))["agent"]["id"]
    headers = {
        "authorization": f"Bearer {visit.key}",
        "content-type": "application/json",
        "idempotency-key": session_id,
    }

    def post(api: str, **more: str) -> AbstractAsyncContextManager[SseStream]:
        return open_sse(
            visit.fleet.members[api].port,
            f"/v1/agents/{agent_id}/prompt",
            method="POST",
            headers=headers | more,
            body=json.dumps({"prompt": SCRIPT, "session_id": session_id, "stream": True}).encode(),
        )

    async with post("api 1") as first:
        begin = await first.until("agent.tool_result")
    async with post("api 2", **{"last-event-id": first.last_event_id}) as second:
        rest = await second.rest()
    async with post("api 1") as third:
        whole = await third.rest()

    assert (second.ended, third.ended) == ("clean", "clean")
    await visit.check(session_id)  # one prompt, one run
    logged = [(str(event.seq), event.json.decode()) for event in await visit.log(session_id)]
    assert durable([*begin, *rest]) == durable(whole) == logged


def durable(events: list[SseEvent]) -> list[tuple[str, str]]:
    return [(event.id, event.data) for event in events if event.type not in DELTAS]
