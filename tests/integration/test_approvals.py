"""Approvals in the database: answers of several clients at once, answers of the wrong kind, cancels."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest

from db.admission import Admission
from db.engine import Database
from db.errors import Conflict, NotFound
from db.runs import get_run
from tests.support.held_sessions import (
    allow,
    answer,
    asking,
    check_invariants,
    deny,
    fetch,
    interrupt,
    post,
    snapshot_of,
    states_of,
    store_commit,
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


async def call_states(database: Database) -> list[tuple[str, str | None]]:
    """State and outcome of each call, in order."""
    rows = await fetch(database, "SELECT state, outcome FROM tool_calls ORDER BY position, index")
    return [(row["state"], row["outcome"]) for row in rows]


async def test_partial_confirmations_say_what_remains_and_the_last_queues_the_run(database: Database) -> None:
    asked = await waiting(database, "server", "client", "server")
    first, second, third = asked.ids

    one = await post(database, asked.session, deny(third, "Not this."))
    assert [event.type for event in one.events] == [
        "user.tool_confirmation",
        "agent.tool_result",
        "session.status_idle",
    ]
    idle = msgspec.json.decode(one.events[-1].body)
    assert idle["stop_reason"] == {"type": "requires_action", "event_ids": [first, second]}
    assert [event.type for event in one.answered] == ["user.tool_confirmation"]
    two = await post(database, asked.session, allow(first), answer(second))
    assert two.wake
    assert await states_of(database, asked.session) == ["queued"]
    assert await call_states(database) == [("pending", None), ("done", "ok"), ("done", "denied")]
    held = await snapshot_of(database, (await take(database)).hold)
    assert [call.input for call in held.inbox.calls] == [call.input for call in asked.calls]


async def test_the_run_says_what_it_waits_for(database: Database) -> None:
    asked = await waiting(database, "server", "client")
    async with database.transaction() as tx:
        tenant = await tx.fetchval("SELECT tenant_id FROM runs")
    async with database.transaction(tenant) as tx:
        run = await get_run(tx, asked.claimed.hold.run_id)
    assert run.is_settled
    assert run.stop_reason is not None
    assert (run.stop_reason.type, list(run.stop_reason.event_ids)) == ("requires_action", asked.ids)


@pytest.mark.parametrize("make", [allow, deny])
async def test_the_same_confirmation_many_times_at_once_is_stored_once(database: Database, make: Any) -> None:
    asked = await waiting(database, "server")
    posts = (post(database, asked.session, make(*asked.ids)) for _ in range(8))
    admissions = await asyncio.gather(*posts)
    assert len({admitted.answered[0].seq for admitted in admissions}) == 1
    assert sum(admitted.wake for admitted in admissions) == 1
    assert (await types_of(database, asked.session)).count("user.tool_confirmation") == 1


async def test_allow_and_deny_at_once_leave_one_winner(database: Database) -> None:
    for _ in range(5):
        asked = await waiting(database, "server")
        (call,) = asked.ids
        results = await asyncio.gather(
            *(post(database, asked.session, item) for item in (allow(call), deny(call), deny(call, "no"))),
            return_exceptions=True,
        )
        refused = [result for result in results if isinstance(result, Conflict)]
        assert sum(isinstance(result, Admission) for result in results) == 1
        assert [conflict.reason for conflict in refused] == ["already_answered"] * 2
        await interrupt(database, asked.session)


async def test_a_confirmation_is_repeated_also_after_the_call_has_run(database: Database) -> None:
    asked = await waiting(database, "server")
    first = await post(database, asked.session, allow(*asked.ids))
    await interrupt(database, asked.session)
    again = await post(database, asked.session, allow(*asked.ids))
    assert again.answered == first.answered
    with pytest.raises(Conflict) as refusal:
        await post(database, asked.session, deny(*asked.ids))
    assert refusal.value.reason == "already_answered"


async def test_answers_of_the_wrong_kind_are_refused_and_say_what_to_send(database: Database) -> None:
    asked = await waiting(database, "server", "client")
    server, client = asked.ids
    for wrong, right in ((allow(client), "custom_tool_result"), (answer(server), "tool_confirmation")):
        with pytest.raises(Conflict, match=right) as refusal:
            await post(database, asked.session, wrong)
        assert refusal.value.reason == "wrong_answer"
    for unknown in ("evt_" + "0" * 32, "run_1"):
        with pytest.raises(NotFound):
            await post(database, asked.session, allow(unknown))
    other = await waiting(database, "server")
    with pytest.raises(NotFound):
        await post(database, other.session, allow(server))


async def test_a_call_that_needs_no_approval_takes_no_confirmation(database: Database) -> None:
    asked = await asking(database, "server")
    draft = asked.writer.draft()
    draft.call(msgspec.structs.replace(asked.calls[0], state="running"))
    await store_commit(database, asked.claimed, draft.build(), commits=1)
    with pytest.raises(Conflict) as refusal:
        await post(database, asked.session, allow(*asked.ids))
    assert refusal.value.reason == "not_waiting"


async def test_a_confirmation_before_the_wait_makes_that_commit_decide_again(database: Database) -> None:
    asked = await asking(database, "server")
    seen = (await snapshot_of(database, asked.claimed.hold)).inbox.inbox_no
    admitted = await post(database, asked.session, allow(*asked.ids))
    assert not admitted.wake

    wait = asked.writer.wait(asked.calls)
    assert await store_commit(database, asked.claimed, wait, commits=1, seen=seen) is None
    assert await states_of(database, asked.session) == ["running"]
    assert await call_states(database) == [("pending", None)]


async def test_cancel_while_waiting_or_after_the_approval_starts_nothing(database: Database) -> None:
    for approve_first in (False, True):
        asked = await waiting(database, "server")
        if approve_first:
            await post(database, asked.session, allow(*asked.ids))
        await interrupt(database, asked.session)
        assert await states_of(database, asked.session) == ["closed"]
        if not approve_first:
            with pytest.raises(Conflict) as refusal:
                await post(database, asked.session, allow(*asked.ids))
            assert refusal.value.reason == "not_waiting"
    assert await call_states(database) == [("done", "cancelled")] * 2


async def test_confirmation_and_cancel_at_once_never_leave_an_open_call(database: Database) -> None:
    for _ in range(5):
        asked = await waiting(database, "server")
        await asyncio.gather(
            post(database, asked.session, allow(*asked.ids)),
            interrupt(database, asked.session),
            return_exceptions=True,
        )
        assert await states_of(database, asked.session) == ["closed"]
    assert {state for state, _ in await call_states(database)} == {"done"}
