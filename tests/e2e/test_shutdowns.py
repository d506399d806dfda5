"""Processes that are told to end, or stand still for too long: others carry on where they were."""

import asyncio
from signal import SIGTERM

import pytest

from tests.support.sse_client import connect_sse, open_sse
from tests.support.visit import Visit, of_type, said

API_LIMIT_S = 5.0
MARGIN_S = 20.0  # for a busy machine


async def test_a_worker_that_is_told_to_end_hands_over_and_repeats_no_call(visit: Visit) -> None:
    """Q-04."""
    streaming, short, endless = [await visit.session("charge") for _ in range(3)]
    for session_id in (streaming, short, endless):
        visit.follow_both(session_id)
    visit.fleet.pause("worker 2")  # so that all is done by the other one
    await visit.call(short, "charge")
    await visit.call(endless, "charge")
    await visit.at("api 1").say(
        streaming, f'pace: 20\nlong: 60\ncall: charge {{"name": "{streaming}"}}\n---\necho'
    )
    await visit.followers[0].saw("event_delta", 3)
    visit.fleet.resume()
    visit.fleet.kill("worker 1", SIGTERM)
    visit.release(short)
    # The answer is finished, and its call is started by the other worker.
    await visit.until_begun(streaming)
    visit.release(streaming)
    assert await visit.fleet.ended("worker 1") == 0

    successor = str(visit.fleet.members["worker 2"].pid)
    events = await visit.checked(streaming)
    assert [line[2] for line in visit.executions(streaming)] == [successor, successor]
    assert [use["outcome"] for use in of_type(events, "agent.tool_result")] == ["ok"]
    events = await visit.checked(short)
    assert len(visit.executions(short)) == 2
    assert [use["outcome"] for use in of_type(events, "agent.tool_result")] == ["ok"]
    assert said(events) == [f"{short} is done."]
    events = await visit.checked(endless)
    assert len(visit.executions(endless)) == 1
    assert [use["outcome"] for use in of_type(events, "agent.tool_result")] == ["unknown"]
    for session_id in (streaming, short, endless):
        [moved] = of_type(await visit.check(session_id), "session.status_rescheduled")
        assert moved["reason"] == "handed_over"


async def test_a_worker_that_stood_still_for_too_long_writes_nothing_more(visit: Visit) -> None:
    text, tool, commit = await visit.session(), await visit.session("charge"), await visit.session("charge")
    readers = visit.follow_both(text)
    visit.follow_both(tool)
    visit.follow_both(commit)
    visit.fleet.pause("worker 2")  # so that all is done by the other one
    await visit.call(tool, "charge")
    await visit.call(commit, "charge")
    await visit.at("api 1").say(text, "pace: 20\nlong: 3000")
    for reader in readers:
        await reader.saw("event_delta", 5)
    visit.fleet.resume()
    await visit.fleet.steady("worker 2")
    gate = await visit.gate(commit, "agent.tool_result")
    visit.release(commit)
    await gate.reached()
    visit.fleet.pause("worker 1")
    await gate.open()  # what it was about to store is stored, and it does not hear of that
    visit.release(tool)  # it finds that when it goes on
    for reader in visit.followers:
        await reader.saw("session.status_running", 2)
    # The one that comes back has a text in hand, a call that ends, and the answer to a commit.
    visit.fleet.resume()
    await visit.fleet.ready()
    for reader in readers:
        await reader.saw("event_delta", len(reader.of_type("event_delta")) + 20)
    await visit.at("api 1").post(f"/v1/runs/{await visit.run_id(text)}/cancel")
    events = await visit.checked(text)
    assert len(of_type(events, "agent.message")) == 1
    for session_id, outcome in ((tool, "unknown"), (commit, "ok")):
        events = await visit.checked(session_id)
        assert [use["outcome"] for use in of_type(events, "agent.tool_result")] == [outcome]
        assert visit.begun(session_id) == 1


async def test_an_api_that_is_told_to_end_or_killed_leaves_its_readers_to_others(visit: Visit) -> None:
    """SSE-13."""
    session_id, quiet = await visit.session(), await visit.session()
    ways = ["api 1", "api 2"]
    readers = [visit.follow(session_id, *ways), visit.follow(session_id, "api 2")]
    port = visit.fleet.members["api 1"].port
    quiet_path, headers = f"/v1/sessions/{quiet}/events/stream", {"authorization": f"Bearer {visit.key}"}
    async with open_sse(port, quiet_path, headers=headers) as idle:
        agent_id = (await visit.at("api 1").get(f"/v1/sessions/{session_id}"))["agent"]["id"]
        body = {"prompt": "pace: 20\nlong: 400", "session_id": session_id}
        waiting = asyncio.create_task(visit.at("api 1").post(f"/v1/agents/{agent_id}/prompt", body, 202))
        for reader in readers:
            await reader.saw("event_delta", 10)
        visit.fleet.kill("api 1", SIGTERM)
        assert await visit.fleet.ended("api 1", patience_s=API_LIMIT_S + MARGIN_S) == 0
        assert (await waiting)["status"] == "running"  # answered early, since the api does not wait for runs
        with pytest.raises(EOFError):
            await idle.next()
        assert idle.ended in ("cut", "reset")
    with pytest.raises(ConnectionRefusedError):
        await connect_sse(port, "/health/live")
    for reader in readers:
        await reader.saw("event_delta", 20)
    assert [reader.connections for reader in readers] == [2, 1]
    # The last one dies, and readers wait for the next one.
    visit.fleet.kill("api 2")
    visit.fleet.start_missing()
    await visit.checked(session_id)
    assert readers[0].ends[0] == "cut"
