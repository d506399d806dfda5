"""Many sessions at once, over both apis and both workers, one of which is killed at any moment."""

import asyncio
import logging
import random

from tests.support.follower import closes
from tests.support.visit import Visit, of_type, said

SESSIONS = 20
TURNS = 4
EVENTS = 9 * TURNS  # and a few more
SCRIPT = (
    "pace: 5\n"
    + "".join(
        f'long: 20\ncall: calculate {{"expression": "{turn} + 1"}}\ncall: delay {{"seconds": 0.2}}\n---\n'
        for turn in range(TURNS)
    )
    + "echo"
)

log = logging.getLogger(__name__)


async def test_all_runs_close_once_when_a_worker_is_killed_at_any_moment(visit: Visit) -> None:
    for worker in visit.fleet.workers:
        await visit.fleet.steady(worker.name)
    sessions = [await visit.session("calculate", "delay") for _ in range(SESSIONS)]
    apis = [visit.fleet.apis[number % 2].name for number in range(SESSIONS)]
    for session_id, api in zip(sessions, apis, strict=True):
        visit.follow(session_id, api)
    await asyncio.gather(
        *(visit.at(api).say(session_id, SCRIPT) for session_id, api in zip(sessions, apis[::-1], strict=True))
    )
    watched = visit.followers[-1]
    after = random.randrange(1, EVENTS // 2)
    log.info("a worker is killed after event %d of the last session", after)
    await watched.saw(lambda event: bool(event.id) and int(event.id.split("-")[0]) >= after)
    visit.fleet.kill(await visit.holder(watched.session_id))
    moved = 0
    for session_id in sessions:
        events = await visit.checked(session_id)
        assert said(events)[-1].splitlines() == [f"{TURNS}", "Waited 0.2 seconds."]
        assert [result["outcome"] for result in of_type(events, "agent.tool_result")] == ["ok"] * 2 * TURNS
        moved += bool(of_type(events, "session.status_rescheduled"))
    assert moved > 0
    assert all(sum(closes(event) for event in reader.events) == 1 for reader in visit.followers)
