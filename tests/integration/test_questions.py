"""Questions in the database: answered one by one, or all of them by a plain message."""

import asyncio
from collections.abc import AsyncIterator

import msgspec
import pytest

from agents.events import Delivery
from db.admission import PromptInput
from db.engine import Database
from db.errors import Conflict
from db.ids import to_uuid
from db.runs import prompt_outcome
from providers.types import TextBlock
from tests.support.held_sessions import (
    allow,
    answer,
    asking,
    check_invariants,
    fetch,
    interrupt,
    post,
    prompts_of,
    snapshot_of,
    states_of,
    take,
    types_of,
    waiting,
)


@pytest.fixture
async def database(database_url: str) -> AsyncIterator[Database]:
    database = Database.open(database_url)
    yield database
    try:
        await check_invariants(database)
    finally:
        await database.close()


def message(text: str, delivery: Delivery | None = None) -> PromptInput:
    return PromptInput(content=(TextBlock(text=text),), delivery=delivery)


async def test_a_plain_message_answers_all_open_questions_and_is_no_prompt(database: Database) -> None:
    asked = await waiting(database, "question", "question")
    admitted = await post(database, asked.session, message("the blue one"))

    assert admitted.wake
    assert admitted.run_id == asked.claimed.hold.run_id
    assert [event.type for event in admitted.events] == [
        "user.message",
        "user.custom_tool_result",
        "user.custom_tool_result",
    ]
    (stored,) = admitted.answered
    event = msgspec.json.decode(stored.body)
    assert event["answers"] == asked.ids
    assert event["processed_at"] is not None
    assert event["run_id"] == asked.claimed.hold.run_id
    assert await states_of(database, asked.session) == ["queued"]
    run = to_uuid(asked.claimed.hold.run_id)
    assert await prompts_of(database, asked.session) == [("applied", run)] * 2
    tenant = (await fetch(database, "SELECT tenant_id FROM runs"))[0]["tenant_id"]
    async with database.transaction(tenant) as tx:
        assert (await prompt_outcome(tx, stored.id)).run_id == asked.claimed.hold.run_id
    held = await snapshot_of(database, (await take(database)).hold)
    assert held.batch == ()
    assert held.inbox.pending == ()
    texts = [call.result.content[0] for call in held.inbox.calls if call.result is not None]
    assert texts == [TextBlock(text="the blue one")] * 2


async def test_a_reply_is_an_answer_like_another(database: Database) -> None:
    asked = await waiting(database, "question")
    await post(database, asked.session, message("yes"))
    again = await post(database, asked.session, answer(asked.ids[0], "yes"))
    assert [event.type for event in again.answered] == ["user.custom_tool_result"]
    assert again.events == []
    with pytest.raises(Conflict) as refusal:
        await post(database, asked.session, answer(asked.ids[0], "no"))
    assert refusal.value.reason == "already_answered"


@pytest.mark.parametrize("delivery", ["queue", "steer"])
async def test_a_message_that_names_a_delivery_is_a_prompt(database: Database, delivery: Delivery) -> None:
    asked = await waiting(database, "question")
    admitted = await post(database, asked.session, message("later", delivery))
    assert "answers" not in msgspec.json.decode(admitted.answered[0].body)
    assert await states_of(database, asked.session) == ["waiting"]
    assert (await prompts_of(database, asked.session))[-1] == ("pending", None)
    await interrupt(database, asked.session)


@pytest.mark.parametrize("kind", ["client", "server"])
async def test_a_message_is_a_prompt_while_anything_else_is_open(database: Database, kind: str) -> None:
    asked = await waiting(database, "question", "server" if kind == "server" else "client")
    question, other = asked.ids
    await post(database, asked.session, message("a prompt"))
    assert await states_of(database, asked.session) == ["waiting"]
    await post(database, asked.session, allow(other) if kind == "server" else answer(other))
    admitted = await post(database, asked.session, message("an answer"))
    assert msgspec.json.decode(admitted.answered[0].body)["answers"] == [question]
    assert await states_of(database, asked.session) == ["queued"]
    assert [state for state, _ in await prompts_of(database, asked.session)] == [
        "applied",
        "pending",
        "applied",
    ]


async def test_a_message_before_the_run_waits_is_a_prompt(database: Database) -> None:
    asked = await asking(database, "question")
    admitted = await post(database, asked.session, message("early"))
    assert "answers" not in msgspec.json.decode(admitted.answered[0].body)
    assert (await prompts_of(database, asked.session))[-1] == ("pending", None)


async def test_what_is_sent_with_a_reply_is_a_prompt_for_the_next_run(database: Database) -> None:
    asked = await waiting(database, "question")
    await post(database, asked.session, message("yes"), message("and then this"))
    assert [state for state, _ in await prompts_of(database, asked.session)] == [
        "applied",
        "applied",
        "pending",
    ]
    assert await states_of(database, asked.session) == ["queued"]


async def test_of_many_messages_at_once_one_answers_and_the_others_wait_their_turn(
    database: Database,
) -> None:
    asked = await waiting(database, "question", "question")
    admissions = await asyncio.gather(
        *(post(database, asked.session, message(f"answer {n}")) for n in range(6))
    )
    answers = [msgspec.json.decode(admitted.answered[0].body).get("answers") for admitted in admissions]
    assert sorted(answers, key=bool) == [None] * 5 + [asked.ids]
    assert (await types_of(database, asked.session)).count("user.custom_tool_result") == 2
    states = [state for state, _ in await prompts_of(database, asked.session)]
    assert (states.count("applied"), states.count("pending")) == (2, 5)
