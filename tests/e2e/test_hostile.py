"""What breaks servers: processes that die inside a request, and clients that all want the same at once."""

import asyncio
from collections import Counter

import httpx

from agents.config import ClientTool
from tests.support.fleet import eventually
from tests.support.served_api import prompt
from tests.support.visit import Visit, of_type

ASK = ClientTool(name="ask", description="Asks the user.", input_schema={"type": "object"})


async def test_a_request_whose_api_is_killed_before_its_commit_has_one_effect_when_it_is_repeated(
    visit: Visit,
) -> None:
    session_id = await visit.session()
    path, body = f"/v1/sessions/{session_id}/events", {"events": [prompt("say: once")]}
    headers = {"idempotency-key": "killed in the middle"}
    gate = await visit.gate(session_id, "user.message")
    first = asyncio.create_task(visit.at("api 1").http.post(path, json=body, headers=headers))
    await gate.reached()
    visit.fleet.kill("api 1")
    [broken] = await asyncio.gather(first, return_exceptions=True)
    assert isinstance(broken, httpx.TransportError)
    await gate.open()
    answers: list[httpx.Response] = []

    async def is_stored() -> bool:
        answers.append(await visit.at("api 2").http.post(path, json=body, headers=headers))
        return answers[-1].status_code == 200

    await eventually(is_stored, "a repetition that is taken")
    assert {answer.status_code for answer in answers} <= {200, 503}
    again = await visit.at("api 2").post(path, body, headers=headers)
    assert [event["seq"] for event in again["data"]] == [event["seq"] for event in answers[-1].json()["data"]]
    await visit.follow(session_id, "api 2").closed()
    events = await visit.check(session_id)
    assert len(of_type(events, "user.message")) == 1


async def test_of_answers_that_come_at_once_over_two_apis_one_counts(visit: Visit) -> None:
    session_id = await visit.session(ASK)
    reader = visit.follow(session_id, "api 1")
    await visit.at("api 1").say(session_id, "call: ask {}\n---\necho")
    use = (await reader.saw("agent.custom_tool_use")).json["id"]
    await reader.saw("session.status_idle")

    def result(text: str) -> dict[str, object]:
        content = [{"type": "text", "text": text}]
        return {"type": "user.custom_tool_result", "custom_tool_use_id": use, "content": content}

    answers = await asyncio.gather(
        *(
            visit.at(f"api {1 + at % 2}").http.post(
                f"/v1/sessions/{session_id}/events", json={"events": [result(text)]}
            )
            for at in range(5)
            for text in ("red", "blue")
        )
    )
    assert Counter(answer.status_code for answer in answers) == {200: 5, 409: 5}
    events = await visit.checked(session_id)
    [stored] = of_type(events, "user.custom_tool_result")
    assert of_type(events, "agent.message")[-1]["content"] == stored["content"]


async def test_a_storm_of_prompts_and_cancels_leaves_a_log_without_gaps(visit: Visit) -> None:
    """Q-10."""
    session_id = await visit.session()
    reader = visit.follow(session_id, "api 2", runs=20)
    path = f"/v1/sessions/{session_id}/events"

    async def ask(number: int) -> None:
        api = visit.at(f"api {1 + number % 2}")
        await api.say(session_id, "pace: 5\nlong: 10")
        if number % 4 == 0:
            await api.post(path, {"events": [{"type": "user.interrupt", "reason": str(number)}]})

    await asyncio.gather(*(ask(number) for number in range(20)))
    await reader.closed()
    events = await visit.check(session_id, runs=20)
    assert len(of_type(events, "user.message")) == 20
