"""How a client answers what its session waits for: calls, approvals and questions, in every way there is."""

import asyncio
import json

from tests.support.chaos.acts import Desk, Json
from tests.support.follower import Follower
from tests.support.served_api import prompt


async def answer_all(desk: Desk) -> None:
    """Answers whatever the session waits for, as its first reader sees it."""
    reader: Follower = next(
        follower for follower in desk.visit.followers if follower.session_id == desk.session_id
    )
    read = 0
    while True:
        for event in reader.events[read:]:
            read += 1
            if event.type == "agent.tool_use" and event.json["evaluated_permission"] == "ask":
                await _confirm(desk, event.json["id"])
            elif event.type == "agent.custom_tool_use":
                await _answer(desk, event.json)
            elif event.type == "session.status_idle":
                await _reply_late(desk, event.json["stop_reason"].get("event_ids", []))
        if reader.task.done():
            return
        await reader.more(read)


def named_in(text: str) -> str:
    """What the model must be told of an answer with this text."""
    return str(json.loads(text)["answers"][0]) if text.startswith("{") else text


async def _confirm(desk: Desk, use_id: str) -> None:
    """Every third call is not allowed."""
    decision = "deny" if _drawn(use_id) % 3 == 0 else "allow"
    answer = await desk.send({"type": "user.tool_confirmation", "tool_use_id": use_id, "result": decision})
    # It was cancelled meanwhile.
    assert answer.status_code == 200 or answer.json()["code"] == "not_waiting", answer.text


async def _answer(desk: Desk, use: Json) -> None:
    use_id, text = use["id"], f"An answer to {use['id']}."
    way = _drawn(use_id) % 8  # in which a question is answered
    if use["name"] != "ask_user":
        await _give(desk, use_id, text)
    elif way == 0:
        return  # until its time is over
    elif way <= 2:
        await _race(desk, use_id)
    elif way == 3:
        await _reply(desk, use_id)
    elif way <= 5:
        desk.asked_late.add(use_id)
    else:
        await _give(desk, use_id, json.dumps({"answers": [text]}))


async def _reply_late(desk: Desk, open_ids: list[str]) -> None:
    """Replies when the run has begun to wait."""
    for use_id in desk.asked_late.intersection(open_ids):
        desk.asked_late.discard(use_id)
        await _reply(desk, use_id)


async def _reply(desk: Desk, use_id: str) -> None:
    """A plain message: it is the answer to all that is asked, or a prompt when anything else is open.

    A second answer is given in any case, and refused if the message was the first.
    """
    text = f"A message about {use_id}."
    answer = await desk.send(prompt(text))
    assert answer.status_code == 200, answer.text
    (event,) = answer.json()["data"]
    if "answers" not in event:
        desk.acknowledged[event["id"]] = text
    else:
        desk.replies.add(event["id"])
        for answered_id in event["answers"]:
            assert answered_id not in desk.accepted, f"{answered_id} took a second answer"
            desk.accepted[answered_id] = text
    await _give(desk, use_id, json.dumps({"answers": [f"An answer to {use_id}."]}))


async def _race(desk: Desk, use_id: str) -> None:
    """Two different answers at once, of which one at most is accepted."""
    await asyncio.gather(*(_give(desk, use_id, f"Answer {word} to {use_id}.") for word in ("one", "two")))


async def _give(desk: Desk, use_id: str, text: str) -> None:
    content = [{"type": "text", "text": text}]
    result = {"type": "user.custom_tool_result", "custom_tool_use_id": use_id, "content": content}
    answer = await desk.send(result)
    if answer.status_code == 200:
        assert use_id not in desk.accepted, f"{use_id} took a second answer"
        desk.accepted[use_id] = text
        return
    assert answer.json()["code"] in {"not_waiting", "already_answered"}, answer.text


def _drawn(use_id: str) -> int:
    return int(use_id[-4:], 16)
