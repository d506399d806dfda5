"""A run is cancelled over the api that its worker knows nothing of."""

from typing import Any

from agents.config import ClientTool
from tests.support.fleet import Fleet
from tests.support.served_api import prompt
from tests.support.visit import Visit, of_type, said, visiting

ASK = ClientTool(name="ask", description="Asks the user.", input_schema={"type": "object"})


async def cancel(visit: Visit, session_id: str) -> Any:
    """The run as the answer shows it."""
    path = f"/v1/runs/{await visit.run_id(session_id)}/cancel"
    return await visit.at("api 2").post(path, {"reason": "Enough."})


def assert_cancelled(events: list[Any]) -> None:
    assert events[-1]["stop_reason"] == {"type": "cancelled", "message": "Enough."}
    assert len(of_type(events, "span.model_request_start")) == 1


async def test_a_cancel_while_text_streams_keeps_the_text_so_far(visit: Visit) -> None:
    session_id = await visit.session()
    readers = visit.follow_both(session_id)
    await visit.at("api 1").say(session_id, "pace: 20\nlong: 3000")
    for reader in readers:
        await reader.saw("event_delta", 5)
    await cancel(visit, session_id)
    events = await visit.checked(session_id)
    assert_cancelled(events)
    [message] = of_type(events, "agent.message")
    assert message["incomplete"]
    assert "word4" in said(events)[0]


async def test_a_cancel_while_a_tool_runs_ends_it_and_starts_no_request(visit: Visit) -> None:
    session_id = await visit.session("charge")
    visit.follow_both(session_id)
    await visit.call(session_id, "charge")
    await cancel(visit, session_id)
    events = await visit.checked(session_id)
    assert_cancelled(events)
    assert [result["outcome"] for result in of_type(events, "agent.tool_result")] == ["cancelled"]
    visit.release(session_id)
    again = visit.follow_both(session_id, runs=2)
    await visit.at("api 1").say(session_id, "say: Here I am.")
    for reader in again:
        await reader.closed()
    assert visit.executions(session_id)[1:] == []


async def test_a_cancel_closes_the_run_of_a_tool_that_does_not_heed_it(visit: Visit) -> None:
    session_id = await visit.session("stubborn")
    visit.follow_both(session_id)
    await visit.call(session_id, "stubborn")
    await cancel(visit, session_id)
    events = await visit.checked(session_id)
    assert_cancelled(events)
    assert [result["outcome"] for result in of_type(events, "agent.tool_result")] == ["cancelled"]
    visit.release(session_id)
    await visit.until_done(session_id)
    assert await visit.check(session_id) == events  # what it says in the end comes too late


async def test_a_cancel_of_a_run_that_is_queued_closes_it_in_the_answer(fleet: Fleet) -> None:
    async with visiting(fleet, max_running_runs=1) as visit:
        first, second = await visit.session("charge"), await visit.session("charge")
        visit.follow_both(first)
        visit.follow_both(second)
        await visit.call(first, "charge")
        [prompt] = await visit.at("api 1").say(second, "say: Never.")
        run = await cancel(visit, second)
        assert (run["state"], run["stop_reason"]["type"]) == ("closed", "cancelled")
        events = await visit.checked(second)
        assert [event["prompt_id"] for event in of_type(events, "prompt.withdrawn")] == [prompt["id"]]
        assert not of_type(events, "span.model_request_start")
        visit.release(first)
        assert said(await visit.checked(first)) == [f"{first} is done."]


async def waits_for_a_silent_provider(visit: Visit) -> str:
    session_id = await visit.session()
    await visit.at("api 1").say(session_id, "hang")
    await visit.until_logged(session_id, "span.model_request_start")
    return session_id


async def waits_for_a_retry(visit: Visit) -> str:
    session_id = await visit.session()
    await visit.at("api 1").say(session_id, "retry_after: 25\nfail: provider_overloaded")
    await visit.until_logged(session_id, "session.error")
    return session_id


async def waits_for_the_client(visit: Visit) -> str:
    session_id = await visit.session(ASK)
    await visit.at("api 1").say(session_id, "call: ask {}")
    await visit.until_logged(session_id, "session.status_idle")
    return session_id


async def test_a_cancel_ends_whatever_a_run_waits_for(visit: Visit) -> None:
    for begin in (waits_for_a_silent_provider, waits_for_a_retry, waits_for_the_client):
        session_id = await begin(visit)
        visit.follow_both(session_id)
        await cancel(visit, session_id)
        assert_cancelled(await visit.checked(session_id))


async def test_an_interrupting_prompt_ends_whatever_a_run_waits_for_and_is_next(visit: Visit) -> None:
    for begin in (waits_for_a_silent_provider, waits_for_a_retry, waits_for_the_client):
        session_id = await begin(visit)
        visit.follow_both(session_id, runs=2)
        body = {"events": [prompt("say: Instead.") | {"delivery": "interrupt"}]}
        await visit.at("api 2").post(f"/v1/sessions/{session_id}/events", body)
        events = await visit.checked(session_id, runs=2)
        stops = [event["stop_reason"]["type"] for event in of_type(events, "session.status_idle")]
        assert stops[-2:] == ["cancelled", "end_turn"]
        assert len(of_type(events, "span.model_request_start")) == 2
        assert said(events) == ["Instead."]
