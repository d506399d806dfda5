"""Redis and Postgres go away in the middle of runs: nothing is lost, and nothing is done twice."""

from signal import SIGINT, SIGQUIT

from tests.support.visit import Visit, of_type, said

ANSWERS = """\
pace: 20
say: One word after the other, slowly enough to be interrupted in the middle of it.
call: calculate {"expression": "6 * 7"}
---
long: 60
call: calculate {"expression": "6 * 8"}
---
echo
"""


async def test_readers_and_runs_outlive_a_redis_that_is_emptied_and_killed(visit: Visit) -> None:
    session_id = await visit.session("calculate")
    readers = visit.follow_both(session_id)
    await visit.at("api 1").say(session_id, ANSWERS)
    for reader in readers:
        await reader.saw("event_delta", 3)
    visit.fleet.empty_redis()
    for reader in readers:
        await reader.saw("agent.tool_result")
        await reader.saw("span.model_request_start", 2)
    visit.fleet.kill_redis()
    await visit.fleet.restore("redis")
    events = await visit.checked(session_id)
    assert said(events)[-1] == "48"
    assert len(of_type(events, "span.model_request_start")) == 3
    assert not of_type(events, "session.status_rescheduled")


async def test_a_prompt_is_taken_run_and_read_while_redis_is_away(visit: Visit) -> None:
    """Q-09, L-02."""
    session_id = await visit.session("calculate")
    readers = visit.follow_both(session_id)
    visit.fleet.kill_redis()
    try:
        await visit.at("api 1").say(session_id, ANSWERS)
        events = await visit.checked(session_id)
    finally:
        await visit.fleet.restore("redis")
    assert said(events)[-1] == "48"
    # With Redis back, previews come again, on the connections that have stayed.
    again = visit.follow_both(session_id, runs=2)
    await visit.at("api 2").say(session_id, "pace: 20\nlong: 3000")
    for reader in again:
        await reader.saw("event_delta", 10)
    await visit.at("api 1").post(f"/v1/runs/{await visit.run_id(session_id)}/cancel")
    for reader in again:
        await reader.closed()
    assert all(reader.connections == 1 for reader in (*readers, *again))


async def test_runs_outlive_a_postgres_that_is_restarted_and_one_that_crashes(visit: Visit) -> None:
    text, tool = await visit.session("calculate"), await visit.session("charge")
    readers = [*visit.follow_both(text), *visit.follow_both(tool)]
    await visit.at("api 1").say(text, ANSWERS)
    await visit.call(tool, "charge", then="long: 60")
    await readers[0].saw("event_delta", 3)
    visit.fleet.stop_postgres(SIGINT)
    visit.release(tool)  # it ends while its result cannot be stored
    await visit.fleet.restore("postgres")
    for reader in readers:
        await reader.saw("span.model_request_start", 2)
    visit.fleet.stop_postgres(SIGQUIT)
    await visit.fleet.restore("postgres")
    events = await visit.checked(text)
    assert said(events)[-1] == "48"
    events = await visit.checked(tool)
    assert [result["outcome"] for result in of_type(events, "agent.tool_result")] == ["ok"]
    assert [line[0] for line in visit.executions(tool)] == ["begun", "done"]
