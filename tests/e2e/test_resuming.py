"""Readers that are cut and come back, over one api and the other."""

import asyncio

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
