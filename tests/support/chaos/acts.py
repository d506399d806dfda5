"""What clients do in a session of a round: one small class for each kind, so that a plan can be shown.

To add one: a Struct with `perform`, and its place in `random_acts`.
"""

import asyncio
import json
import random
from typing import Any, Literal, Protocol
from uuid import uuid4

import httpx
from msgspec import Struct

from agents.config import ClientTool
from agents.events import Delivery
from tests.support.served_api import prompt
from tests.support.visit import Visit

Json = dict[str, Any]

ASK = ClientTool(name="ask", description="Asks the user.", input_schema={"type": "object"})
TOOLS = ("charge", "pay", "look_up", "refuse", "calculate", "compact_memory", "ask_user", ASK)
TOOL_NAMES = tuple(tool if isinstance(tool, str) else tool.name for tool in TOOLS)
WAIT_TIMEOUT_S = 3.0  # for the client, which leaves some questions without an answer
QUESTIONS: list[Json] = [
    {"question": "Which?", "options": [{"label": "This one."}, {"label": "That one."}]},
    {"question": "And why?"},
]
REPEAT_S = 0.1
GIVE_UP_S = 40.0


class Desk:
    """A client at one session. It repeats what got no answer, over the other api.

    `acknowledged`: each prompt that was taken, by its event's id, with its text. `accepted`: each answer that
    was taken, by its tool use's id, with its text. `replies`: messages that were taken as answers, by id.
    `asked_late`: questions that are answered when their run waits for it.
    """

    def __init__(self, visit: Visit, session_id: str) -> None:
        self.visit = visit
        self.session_id = session_id
        self.acknowledged: dict[str, str] = {}
        self.accepted: dict[str, str] = {}
        self.replies: set[str] = set()
        self.asked_late: set[str] = set()
        self.withdrawn: set[str] = set()
        self.repeated = 0

    async def request(self, method: str, path: str, body: Json | None = None) -> httpx.Response:
        """The answer, which is neither lost nor a 503. Raises: TimeoutError, AssertionError for a 500."""
        headers = {"idempotency-key": str(uuid4())} if method == "POST" else {}
        async with asyncio.timeout(GIVE_UP_S):
            while True:
                for name in ("api 1", "api 2"):
                    try:
                        caller = self.visit.at(name)
                        answer = await caller.http.request(method, path, json=body, headers=headers)
                    except (httpx.TransportError, ConnectionRefusedError):
                        self.repeated += 1
                        continue
                    if answer.status_code != 503:
                        assert answer.status_code < 500, f"{method} {path}: {answer.text}"
                        return answer
                await asyncio.sleep(REPEAT_S)

    async def send(self, *events: Json) -> httpx.Response:
        return await self.request("POST", f"/v1/sessions/{self.session_id}/events", {"events": list(events)})


class Act(Protocol):
    async def perform(self, desk: Desk) -> None: ...


class Say(Struct, frozen=True, kw_only=True, tag="say"):
    """Prompts that are posted together. `delivery`: what they do to a session that is busy."""

    scripts: tuple[str, ...]
    delivery: Delivery = "queue"

    async def perform(self, desk: Desk) -> None:
        texts = [script.replace("SESSION", desk.session_id) for script in self.scripts]
        answer = await desk.send(*({**prompt(text), "delivery": self.delivery} for text in texts))
        if self.delivery == "reject" and answer.status_code == 409:
            assert answer.json()["code"] == "session_busy", answer.text
            return
        assert answer.status_code == 200, answer.text
        for event, text in zip(answer.json()["data"], texts, strict=True):
            assert event["content"][0]["text"] == text
            desk.acknowledged[event["id"]] = text


class Wait(Struct, frozen=True, kw_only=True, tag="wait"):
    for_s: float

    async def perform(self, desk: Desk) -> None:
        await asyncio.sleep(self.for_s)


class Interrupt(Struct, frozen=True, kw_only=True, tag="interrupt"):
    mode: Literal["now", "after_turn"] = "now"

    async def perform(self, desk: Desk) -> None:
        answer = await desk.send({"type": "user.interrupt", "mode": self.mode, "reason": "Enough."})
        assert answer.status_code == 200, answer.text


class Cancel(Struct, frozen=True, kw_only=True, tag="cancel"):
    """Cancels the newest run."""

    async def perform(self, desk: Desk) -> None:
        found = await desk.request("GET", f"/v1/sessions/{desk.session_id}/runs?order=desc&limit=1")
        for run in found.json()["data"]:
            answer = await desk.request("POST", f"/v1/runs/{run['id']}/cancel", {"reason": "Enough."})
            assert answer.status_code == 200, answer.text


class Withdraw(Struct, frozen=True, kw_only=True, tag="withdraw"):
    """Takes the last prompt back, if it still can be."""

    async def perform(self, desk: Desk) -> None:
        if not desk.acknowledged:
            return
        prompt_id = list(desk.acknowledged)[-1]
        answer = await desk.request("DELETE", f"/v1/sessions/{desk.session_id}/prompts/{prompt_id}")
        # A repetition of what has been done finds it gone.
        assert answer.status_code in {200, 409}, answer.text


class RollBack(Struct, frozen=True, kw_only=True, tag="roll_back"):
    """Takes the last run back, if none is open."""

    async def perform(self, desk: Desk) -> None:
        answer = await desk.request("POST", f"/v1/sessions/{desk.session_id}/rollback")
        if answer.status_code != 200:
            assert answer.json()["code"] in {"session_busy", "nothing_to_roll_back"}, answer.text


class Compact(Struct, frozen=True, kw_only=True, tag="compact"):
    """Has a memory made, if no run is open."""

    async def perform(self, desk: Desk) -> None:
        answer = await desk.request("POST", f"/v1/sessions/{desk.session_id}/compact", {})
        if answer.status_code != 202:
            assert answer.json()["code"] in {"session_busy", "nothing_to_compact"}, answer.text


# -- at random ------------------------------------------------------------------------------------------


def random_script(rng: random.Random, mark: str) -> str:
    """One prompt; `mark` makes its text unlike all others."""
    lines = [f"pace: {rng.choice((1, 4, 10))}", f"# {mark}"]
    for _ in range(rng.choice((0, 1, 1, 2))):
        lines += [*_spoken(rng), *_called(rng), *_ended(rng), "---"]
    return "\n".join([*lines, rng.choice(("echo", "say: All is done.", "think: So.\nsay: That was it."))])


def _spoken(rng: random.Random) -> list[str]:
    return rng.choice(
        (
            [],
            ["think: Let me see what there is to do."],
            [f"long: {rng.randint(5, 40)}"],
            ["think: A thought of some words.", f"long: {rng.randint(5, 20)}"],
        )
    )


def _called(rng: random.Random) -> list[str]:
    def arguments(most_s: float) -> str:
        return json.dumps({"name": "SESSION", "for_s": round(rng.uniform(0, most_s), 2)})

    calls = (
        f"call: charge {arguments(0.3)}",
        f"call: look_up {arguments(0.3)}",
        f"call: pay {arguments(0.2)}",
        f"call: refuse {arguments(0.1)}",
        'call: calculate {"expression": "6 * 7"}',
        'call: ask {"question": "Which?"}',
        f"call: ask_user {json.dumps({'questions': QUESTIONS[: rng.randint(1, 2)]})}",
        "call: compact_memory {}",
        'call: calculate {"expression": ',
        "call: nothing_of_that_name {}",
    )
    return rng.choices(calls, weights=(5, 5, 2, 1, 3, 2, 3, 1, 1, 1), k=rng.choice((0, 1, 1, 2, 3)))


def _ended(rng: random.Random) -> list[str]:
    return rng.choice(
        (
            *([],) * 20,
            ["fail: provider_overloaded after 3 times 1", "retry_after: 0.05"],
            ["fail: stream_truncated after 2 times 1", "retry_after: 0.05"],
            ["fail: request_rejected after 2"],
        )
    )


DELIVERIES: tuple[Delivery, ...] = ("queue", "steer", "interrupt", "reject")
AFTERWARDS: tuple[tuple[Act, ...], ...] = (
    (),
    (Interrupt(),),
    (Interrupt(mode="after_turn"),),
    (Cancel(),),
    (Withdraw(),),
    (Wait(for_s=0.5), RollBack()),
    (Wait(for_s=0.5), Compact()),
)


def random_acts(rng: random.Random, mark: str) -> tuple[Act, ...]:
    acts: list[Act] = []
    for turn in range(rng.choice((1, 2, 2, 3))):
        scripts = tuple(random_script(rng, f"{mark}.{turn}.{at}") for at in range(rng.choice((1, 1, 1, 2))))
        acts.append(Say(scripts=scripts, delivery=rng.choices(DELIVERIES, weights=(6, 3, 1, 1))[0]))
        acts.append(Wait(for_s=round(rng.choice((0.0, 0.0, rng.uniform(0, 0.5))), 3)))
        acts += rng.choices(AFTERWARDS, weights=(8, 1, 1, 1, 1, 1, 1))[0]
    return tuple(acts)
