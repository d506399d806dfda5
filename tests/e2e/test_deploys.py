"""What a deploy does to many at once: open streams, runs in the middle, prompts on their way."""

import asyncio
from collections import Counter
from signal import SIGTERM

import httpx

from tests.support.crowd import Crowd
from tests.support.served_api import prompt
from tests.support.visit import Visit, of_type, said

READERS = 1000
SESSIONS = 10
RUNS = 50
POSTERS = 4
API_LIMIT_S = 5.0
MARGIN_S = 5.0  # for a busy machine
WORDS = 60
PAUSE_S = 0.2  # between prompts: less than a connection is kept at shutdown


async def test_a_thousand_readers_of_an_api_that_is_told_to_end_come_back_elsewhere_without_a_gap(
    visit: Visit,
) -> None:
    crowd = Crowd()
    first, second = visit.fleet.members["api 1"].port, visit.fleet.members["api 2"].port
    sessions = [await visit.session(api="api 2") for _ in range(SESSIONS)]
    try:
        await crowd.join(sessions, visit.key, [lambda: first, lambda: second], count=READERS)
        for session_id in sessions:
            await visit.at("api 2").say(session_id, f"pace: 20\nlong: {WORDS}")
        await crowd.until(lambda: all(reader.last_seq >= 3 for reader in crowd.readers), "runs began")
        visit.fleet.kill("api 1", SIGTERM)
        assert await visit.fleet.ended("api 1", patience_s=API_LIMIT_S + MARGIN_S) == 0
        await crowd.until(lambda: all(reader.closed_runs == 1 for reader in crowd.readers), "runs closed")
        ends = {session_id: len(await visit.check(session_id)) for session_id in sessions}
        await crowd.has_read(ends)
    finally:
        await crowd.leave()
    assert Counter(how for reader in crowd.readers for how in reader.ends) == {"cut": READERS}


async def test_a_worker_that_is_told_to_end_in_the_middle_of_fifty_runs_loses_and_repeats_nothing(
    visit: Visit,
) -> None:
    crowd = Crowd()
    sessions = [await visit.session("charge") for _ in range(RUNS)]
    texts, calls = sessions[: RUNS // 2], sessions[RUNS // 2 :]
    try:
        ports = [lambda: visit.fleet.members["api 1"].port, lambda: visit.fleet.members["api 2"].port]
        await crowd.join(sessions, visit.key, ports, count=RUNS)
        visit.fleet.pause("worker 2")  # so that all is begun by the other one
        for session_id in sessions:
            call = f'call: charge {{"name": "{session_id}"}}\n---\necho'
            script = f"pace: 20\nlong: {WORDS}\n{call}" if session_id in texts else call
            await visit.at("api 1").say(session_id, script)
        for session_id in calls:
            await visit.until_begun(session_id)
        await crowd.until(lambda: all(reader.last_seq >= 3 for reader in crowd.readers), "runs began")
        visit.fleet.resume()
        visit.fleet.kill("worker 1", SIGTERM)
        for session_id in sessions:
            visit.release(session_id)
        assert await visit.fleet.ended("worker 1") == 0
        await crowd.until(lambda: all(reader.closed_runs == 1 for reader in crowd.readers), "runs closed")
        logs = {session_id: await visit.check(session_id) for session_id in sessions}
        await crowd.has_read({session_id: len(events) for session_id, events in logs.items()})
    finally:
        await crowd.leave()
    for session_id, events in logs.items():
        assert visit.begun(session_id) == 1
        assert [result["outcome"] for result in of_type(events, "agent.tool_result")] == ["ok"]
        if session_id in texts:
            assert len(said(events)[0].split()) >= WORDS
        assert said(events)[-1] == f"{session_id} is done."
    assert any(of_type(events, "session.status_rescheduled") for events in logs.values())


async def test_a_rolling_restart_under_load_fails_no_prompt_and_shows_no_gap(visit: Visit) -> None:
    crowd = Crowd()
    sessions = [await visit.session() for _ in range(POSTERS)]
    answered: Counter[str] = Counter()
    failures: list[str] = []
    is_over = asyncio.Event()
    ways = ["api 1", "api 2"]

    async def post(session_id: str, at: int) -> None:
        """One prompt after another; where a connection is refused, over the other api."""
        path, body = f"/v1/sessions/{session_id}/events", {"events": [prompt("say: on we go")]}
        while not is_over.is_set():
            try:
                answer = await visit.at(ways[at % 2]).http.post(path, json=body)
            except httpx.ConnectError:
                at += 1
                continue
            except httpx.TransportError as error:
                failures.append(repr(error))
                continue
            if answer.status_code == 200:
                answered[session_id] += 1
            else:
                failures.append(answer.text)
            at += 1
            await asyncio.sleep(PAUSE_S)

    try:
        ports = [lambda: visit.fleet.members["api 1"].port, lambda: visit.fleet.members["api 2"].port]
        await crowd.join(sessions, visit.key, ports, count=10 * POSTERS)
        posters = [asyncio.create_task(post(session_id, at)) for at, session_id in enumerate(sessions)]
        for successor in (await visit.fleet.replacements()).values():
            assert await visit.fleet.hand_over(successor) == 0
        is_over.set()
        await asyncio.gather(*posters)
        assert failures == []
        await crowd.until(
            lambda: all(reader.closed_runs == answered[reader.session_id] for reader in crowd.readers),
            "all runs closed",
        )
        ends = {
            session_id: len(await visit.check(session_id, runs=answered[session_id]))
            for session_id in sessions
        }
        await crowd.has_read(ends)
    finally:
        is_over.set()
        await crowd.leave()
    assert all(count > 1 for count in answered.values())
