"""Approvals and questions over real processes, all of which are restarted while the run waits."""

import asyncio
import json

from agents.config import BuiltinTool
from db.ids import to_uuid
from tests.support.fleet import eventually
from tests.support.served_api import prompt
from tests.support.visit import Visit, of_type, said

CAREFUL = BuiltinTool(name="charge", requires_approval=True)


async def test_approvals_and_a_question_are_answered_once_over_restarts_of_everything(visit: Visit) -> None:
    session_id = await visit.session(CAREFUL, "ask_user")
    readers = visit.follow_both(session_id)
    question = json.dumps({"questions": [{"question": "Which colour?"}]})
    script = "\n".join(
        [
            f'call: charge {{"name": "{session_id}"}}',
            f'call: charge {{"name": "{session_id}-denied"}}',
            f"call: ask_user {question}",
            "---",
            "echo",
        ]
    )
    await visit.at("api 1").say(session_id, script)
    idle = (await readers[0].saw("session.status_idle")).json
    allowed, denied, asked = idle["stop_reason"]["event_ids"]
    view = await visit.at("api 2").get(f"/v1/sessions/{session_id}")
    assert (view["status"], view["waits_for"]) == ("idle", [allowed, denied, asked])

    for member in (*visit.fleet.workers, visit.fleet.members["api 1"]):
        visit.fleet.kill(member.name)
    path = f"/v1/sessions/{session_id}/events"
    deny = confirmation(denied, result="deny", deny_message="Once is enough.")
    await visit.at("api 2").post(path, {"events": [deny]})
    visit.fleet.kill("api 2")
    await visit.fleet.ready()

    allow = confirmation(allowed, result="allow")
    callers = [visit.at(name) for name in ("api 1", "api 2")]
    same = await asyncio.gather(*(caller.post(path, {"events": [allow]}) for caller in callers * 3))
    assert len({answer["data"][0]["id"] for answer in same}) == 1
    other = await callers[0].post(path, {"events": [confirmation(allowed, result="deny")]}, 409)
    assert other["code"] == "already_answered"
    waiting = await callers[1].get(f"/v1/runs/{await visit.run_id(session_id)}/wait")
    assert waiting["stop_reason"] == {"type": "requires_action", "event_ids": [asked]}

    [reply] = (await callers[0].post(path, {"events": [prompt("Blue, please.")]}))["data"]
    assert reply["answers"] == [asked]
    await visit.until_begun(session_id)
    visit.release(session_id)
    events = await visit.checked(session_id)
    assert said(events) == [
        f"{session_id} is done.\nDenied by the user: it was not run. They say: Once is enough.\nBlue, please."
    ]
    assert visit.begun(session_id) == 1
    assert visit.begun(f"{session_id}-denied") == 0
    assert len(of_type(events, "user.tool_confirmation")) == 2
    assert not of_type(events, "session.status_rescheduled")


async def test_an_approved_call_whose_worker_dies_is_not_run_again(visit: Visit) -> None:
    session_id = await visit.session(CAREFUL)
    readers = visit.follow_both(session_id)
    await visit.at("api 1").say(session_id, f'call: charge {{"name": "{session_id}"}}\n---\nsay: ok')
    idle = (await readers[0].saw("session.status_idle")).json
    [call] = idle["stop_reason"]["event_ids"]
    allow = confirmation(call, result="allow")
    await visit.at("api 2").post(f"/v1/sessions/{session_id}/events", {"events": [allow]})
    await visit.until_begun(session_id)
    visit.fleet.kill(await visit.holder(session_id))
    events = await visit.checked(session_id)
    assert [result["outcome"] for result in of_type(events, "agent.tool_result")] == ["unknown"]
    assert visit.begun(session_id) == 1


async def test_a_run_that_nobody_answers_in_time_closes_after_a_restart_and_the_next_begins(
    visit: Visit,
) -> None:
    session_id = await visit.session(CAREFUL, wait_timeout_s=1.0)
    readers = visit.follow_both(session_id, runs=2)
    await visit.at("api 1").say(session_id, f'call: charge {{"name": "{session_id}"}}')
    await readers[0].saw("session.status_idle")
    for worker in visit.fleet.workers:
        visit.fleet.kill(worker.name)
    await visit.at("api 2").say(session_id, "say: next")

    async def is_over() -> bool:
        return bool(
            await visit.value(
                "SELECT bool_or(state = 'closed' OR wait_until < clock_timestamp()) FROM runs"
                " WHERE session_id = $1",
                to_uuid(session_id),
            )
        )

    await eventually(is_over, "the end of the wait")
    visit.fleet.start_missing()
    events = await visit.checked(session_id, runs=2)
    reasons = [event["stop_reason"] for event in of_type(events, "session.status_idle")]
    assert [(reason["type"], reason.get("code")) for reason in reasons[1:]] == [
        ("timed_out", "not_answered"),
        ("end_turn", None),
    ]
    assert visit.begun(session_id) == 0


def confirmation(call_id: str, **fields: str) -> dict[str, str]:
    return {"type": "user.tool_confirmation", "tool_use_id": call_id, **fields}
