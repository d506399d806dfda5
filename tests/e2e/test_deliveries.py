"""Prompts that reach a session while the worker that is to take them up is killed."""

from typing import Any

from tests.support.served_api import prompt
from tests.support.visit import Visit, of_type, said


async def send(visit: Visit, session_id: str, text: str, delivery: str) -> Any:
    """The stored event of a prompt that is sent over the other api."""
    body = {"events": [prompt(text) | {"delivery": delivery}]}
    return (await visit.at("api 2").post(f"/v1/sessions/{session_id}/events", body))["data"][0]


async def test_steering_is_taken_up_by_the_worker_that_follows_a_killed_one(visit: Visit) -> None:
    """The prompt is admitted while a tool runs; its worker dies before the next request could take it up."""
    session_id = await visit.session("look_up")
    visit.follow_both(session_id, runs=2)
    await visit.call(session_id, "look_up")
    steered = await send(visit, session_id, "say: Steered.", "steer")
    queued = await send(visit, session_id, "say: Later.", "queue")
    visit.fleet.kill(await visit.holder(session_id))
    await visit.until_begun(session_id, 2)
    visit.release(session_id)
    events = await visit.checked(session_id, runs=2)
    [first, second] = dict.fromkeys(event["run_id"] for event in of_type(events, "prompt.applied"))
    taken = {
        key: event["run_id"] for event in of_type(events, "prompt.applied") for key in event["prompt_ids"]
    }
    assert (taken[steered["id"]], taken[queued["id"]]) == (first, second)
    assert said(events) == ["Steered.", "Later."]


async def test_an_interrupting_prompt_outlives_the_worker_that_was_to_heed_it(visit: Visit) -> None:
    """The worker stands still when it is interrupted, and is killed: the sweep closes its run."""
    session_id = await visit.session()
    readers = visit.follow_both(session_id, runs=2)
    await visit.at("api 1").say(session_id, "pace: 40\nlong: 400")
    for reader in readers:
        await reader.saw("event_delta", 5)
    worker = await visit.holder(session_id)
    visit.fleet.pause(worker)
    await send(visit, session_id, "say: Instead.", "interrupt")
    visit.fleet.kill(worker)
    events = await visit.checked(session_id, runs=2)
    stops = [event["stop_reason"]["type"] for event in of_type(events, "session.status_idle")]
    assert stops == ["cancelled", "end_turn"]
    assert said(events)[-1] == "Instead."
