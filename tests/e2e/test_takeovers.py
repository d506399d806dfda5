"""A worker is killed while it works on runs: another one carries on, and readers notice little."""

import logging
import time
from collections.abc import Awaitable, Callable

from agents.config import ClientTool
from tests.support.sse_client import SseEvent
from tests.support.visit import Visit, of_type, said

TAKEOVER_BOUND_S = 15.0  # a lease and a sweep are 4 s; the rest is for a busy machine
ASK = ClientTool(name="ask", description="Asks the user.", input_schema={"type": "object"})

log = logging.getLogger(__name__)

Verify = Callable[[], Awaitable[None]]


async def test_a_prompt_sent_to_one_api_is_watched_on_another_with_deltas(visit: Visit) -> None:
    session_id = await visit.session()
    readers = visit.follow_both(session_id)
    await visit.at("api 1").say(session_id, "pace: 5\nthink: Let me see.\nlong: 40")
    events = await visit.checked(session_id)
    [message] = of_type(events, "agent.message")
    for reader in readers:
        assert reader.text() == message["content"][0]["text"]
        assert len(reader.of_type("event_delta")) > 5


async def test_another_worker_carries_on_whatever_a_killed_one_was_doing(visit: Visit) -> None:
    """Q-01."""
    visit.fleet.pause("worker 2")  # so that all is done by the other one
    doing = [
        await begin(visit)
        for begin in (text_streams, call_runs, idempotent_call_runs, result_is_stored, result_is_not_stored)
    ]
    visit.fleet.resume()
    await visit.fleet.steady("worker 2")
    visit.fleet.kill("worker 1")
    for verify in doing:
        await verify()


async def text_streams(visit: Visit) -> Verify:
    session_id = await visit.session()
    readers = visit.follow_both(session_id)
    await visit.at("api 1").say(session_id, "pace: 40\nlong: 400")
    for reader in readers:
        await reader.saw("event_delta", 5)

    async def verify() -> None:
        began_s = time.monotonic()
        for reader in readers:
            await reader.saw("session.status_running", 2)
        took_s = time.monotonic() - began_s
        log.info("the run went on after %.2f s", took_s)
        assert took_s < TAKEOVER_BOUND_S
        assert await visit.holder(session_id) == "worker 2"
        for reader in readers:
            await reader.saw(is_first_word, 2)
        await visit.at("api 2").post(f"/v1/runs/{await visit.run_id(session_id)}/cancel")
        events = await visit.checked(session_id)
        kinds = [event["type"] for event in events]
        assert kinds.count("agent.message") == 1
        assert kinds.count("span.model_request_start") == 2

    return verify


async def call_runs(visit: Visit) -> Verify:
    session_id = await visit.session("charge")
    visit.follow_both(session_id)
    await visit.call(session_id, "charge")

    async def verify() -> None:
        events = await visit.checked(session_id)
        [result] = of_type(events, "agent.tool_result")
        assert (result["outcome"], result["is_error"]) == ("unknown", True)
        assert visit.begun(session_id) == 1

    return verify


async def idempotent_call_runs(visit: Visit) -> Verify:
    session_id = await visit.session("look_up")
    visit.follow_both(session_id)
    await visit.call(session_id, "look_up")

    async def verify() -> None:
        await visit.until_begun(session_id, 2)
        visit.release(session_id)
        events = await visit.checked(session_id)
        [result] = of_type(events, "agent.tool_result")
        assert result["outcome"] == "ok"
        begun = [line for line in visit.executions(session_id) if line[0] == "begun"]
        assert len({key for _, key, _ in begun}) == 1
        assert len({pid for _, _, pid in begun}) == 2

    return verify


async def result_is_stored(visit: Visit) -> Verify:
    """The next request is not."""
    session_id = await visit.session("charge")
    readers = visit.follow_both(session_id)
    await visit.call(session_id, "charge")
    gate = await visit.gate(session_id, "span.model_request_start")
    visit.release(session_id)
    for reader in readers:
        await reader.saw("agent.tool_result")
    await gate.reached()

    async def verify() -> None:
        await gate.open()
        events = await visit.checked(session_id)
        [result] = of_type(events, "agent.tool_result")
        assert result["outcome"] == "ok"
        assert visit.begun(session_id) == 1
        assert said(events) == [f"{session_id} is done."]

    return verify


async def result_is_not_stored(visit: Visit) -> Verify:
    """The tool has ended, but its worker dies in the middle of the commit that says so."""
    session_id = await visit.session("charge")
    readers = visit.follow_both(session_id)
    await visit.call(session_id, "charge")
    gate = await visit.gate(session_id, "agent.tool_result")
    visit.release(session_id)
    await gate.reached()

    async def verify() -> None:
        # The server gives the commit up when it has waited for as long as a transaction may.
        for reader in readers:
            await reader.saw("session.status_rescheduled")
        await gate.open()
        events = await visit.checked(session_id)
        [result] = of_type(events, "agent.tool_result")
        assert result["outcome"] == "unknown"
        assert [line[0] for line in visit.executions(session_id)] == ["begun", "done"]

    return verify


async def test_a_run_that_waits_for_the_client_outlives_all_workers(visit: Visit) -> None:
    session_id = await visit.session(ASK)
    readers = visit.follow_both(session_id)
    await visit.at("api 1").say(session_id, 'call: ask {"question": "Which?"}\n---\necho')
    use = (await readers[0].saw("agent.custom_tool_use")).json
    waiting = (await readers[1].saw("session.status_idle")).json
    assert waiting["stop_reason"] == {"type": "requires_action", "event_ids": [use["id"]]}
    for worker in visit.fleet.workers:
        visit.fleet.kill(worker.name)
    answer = {
        "type": "user.custom_tool_result",
        "custom_tool_use_id": use["id"],
        "content": [{"type": "text", "text": "The blue one."}],
    }
    path = f"/v1/sessions/{session_id}/events"
    await visit.at("api 2").post(path, {"events": [answer]})
    visit.fleet.start_missing()
    await visit.checked(session_id)
    # The same answer again is taken for a repetition, by the other api too.
    await visit.at("api 1").post(path, {"events": [answer]})
    events = await visit.check(session_id)
    assert len(of_type(events, "user.custom_tool_result")) == 1
    assert not of_type(events, "session.status_rescheduled")
    assert said(events) == ["The blue one."]


def is_first_word(event: SseEvent) -> bool:
    """True for the delta with which the text begins."""
    content = event.json["delta"].get("content") if event.type == "event_delta" else None
    return content is not None and content["text"].startswith("word1 ")
