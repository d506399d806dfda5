"""Runs that wait for the client for too long: closed once by database time, or answered, not both."""

import asyncio
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from uuid import UUID

import msgspec
import pytest

from db.engine import Database
from db.errors import Conflict
from db.ids import to_uuid
from db.sweeping import Swept, end_wait, overdue_waits
from tests.support.held_sessions import (
    Asking,
    allow,
    answer,
    check_invariants,
    eventually,
    fetch,
    is_waiting_for_a_lock,
    post,
    prompts_of,
    snapshot_of,
    states_of,
    store_commit,
    take,
    types_of,
    waiting,
)

LONG_S = 3600.0


@pytest.fixture
async def database(database_url: str) -> AsyncIterator[Database]:
    database = Database.open(database_url)
    yield database
    try:
        await check_invariants(database)
    finally:
        await database.close()


async def overdue(database: Database) -> list[UUID]:
    async with database.transaction() as tx:
        return await overdue_waits(tx)


async def sweep(database: Database, session: str) -> Swept | None:
    async with database.transaction() as tx:
        return await end_wait(tx, to_uuid(session))


async def pass_time(database: Database, session: str) -> None:
    """The run has waited for as long as it may."""
    await fetch(
        database,
        "UPDATE runs SET wait_until = clock_timestamp() WHERE session_id = $1 AND state = 'waiting'",
        to_uuid(session),
    )


async def too_late(database: Database) -> Asking:
    """A run that waits for a result and an approval, and has waited for as long as it may."""
    asked = await waiting(database, "client", "server", timeout_s=LONG_S)
    await pass_time(database, asked.session)
    return asked


async def test_a_run_that_waited_for_too_long_closes_with_its_calls_unanswered(database: Database) -> None:
    asked = await too_late(database)
    await post(database, asked.session, "and then?")
    assert await overdue(database) == [to_uuid(asked.session)]

    swept = await sweep(database, asked.session)

    assert swept is not None
    assert swept.is_queued
    kinds = [event.type for event in swept.events]
    assert kinds == ["agent.tool_result", "agent.tool_result", "session.status_idle"]
    results = [msgspec.json.decode(event.body) for event in swept.events[:2]]
    assert [result["details"]["code"] for result in results] == ["not_answered", "not_started"]
    assert {result["outcome"] for result in results} == {"cancelled"}
    idle = msgspec.json.decode(swept.events[-1].body)
    assert (idle["stop_reason"]["type"], idle["stop_reason"]["code"]) == ("timed_out", "not_answered")
    assert await states_of(database, asked.session) == ["closed", "queued"]
    assert (await prompts_of(database, asked.session))[-1][1] is not None
    held = await snapshot_of(database, (await take(database)).hold)
    assert [stored.message.role for stored in held.messages] == ["assistant", "tool"]
    assert await sweep(database, asked.session) is None


async def test_a_run_waits_until_its_time_and_without_a_limit_for_ever(database: Database) -> None:
    limited = await waiting(database, "client", timeout_s=LONG_S)
    unlimited = await waiting(database, "client")
    rows = await fetch(database, "SELECT wait_until FROM runs ORDER BY wait_until NULLS LAST")
    left_s = (rows[0]["wait_until"] - datetime.now(UTC)).total_seconds()
    assert LONG_S - 120 < left_s < LONG_S + 120
    assert rows[1]["wait_until"] is None
    assert await overdue(database) == []
    for asked in (limited, unlimited):
        assert await sweep(database, asked.session) is None
        assert await states_of(database, asked.session) == ["waiting"]


async def test_an_answer_that_came_first_wins_though_the_time_is_over(database: Database) -> None:
    asked = await too_late(database)
    assert await overdue(database) == [to_uuid(asked.session)]
    client, server = asked.ids
    await post(database, asked.session, answer(client), allow(server))
    assert await sweep(database, asked.session) is None
    assert await states_of(database, asked.session) == ["queued"]


async def test_an_answer_that_comes_after_the_time_out_is_refused(database: Database) -> None:
    asked = await too_late(database)
    await sweep(database, asked.session)
    for item in (answer(asked.ids[0]), allow(asked.ids[1])):
        with pytest.raises(Conflict) as refusal:
            await post(database, asked.session, item)
        assert refusal.value.reason == "not_waiting"


async def test_a_run_that_waits_again_has_its_whole_time_again(database: Database) -> None:
    asked = await too_late(database)
    client, server = asked.ids
    seen = await overdue(database)
    await post(database, asked.session, answer(client), allow(server))
    claimed = await take(database)
    asked.writer.claimed = claimed
    again = asked.writer.wait(asked.calls[1:], timeout_s=LONG_S)
    assert await store_commit(database, claimed, again)
    assert seen == [to_uuid(asked.session)]
    assert await sweep(database, asked.session) is None
    assert await states_of(database, asked.session) == ["waiting"]
    await post(database, asked.session, "go on")


@pytest.mark.parametrize("first", ["answer", "time-out"])
async def test_answer_and_time_out_at_once_have_one_winner_in_both_orders(
    database: Database, first: str
) -> None:
    asked = await too_late(database)
    client, server = asked.ids
    await post(database, asked.session, allow(server))
    async with database.transaction() as tx:  # whoever is first has the session's lock
        if first == "time-out":
            assert await end_wait(tx, to_uuid(asked.session)) is not None
            answering = asyncio.create_task(post(database, asked.session, answer(client)))
            await eventually(lambda: is_waiting_for_a_lock(database))
        else:
            await tx.execute("SELECT FROM sessions WHERE id = $1 FOR NO KEY UPDATE", to_uuid(asked.session))
            assert await sweep(database, asked.session) is None, "it skips what is locked"
    if first == "time-out":
        with pytest.raises(Conflict):
            await answering
        assert await states_of(database, asked.session) == ["closed"]
    else:
        await post(database, asked.session, answer(client))
        assert await sweep(database, asked.session) is None
        assert await states_of(database, asked.session) == ["queued"]
    assert (await types_of(database, asked.session)).count("user.custom_tool_result") == (first == "answer")


async def test_many_sweepers_and_answers_at_once_close_or_answer_each_run_once(database: Database) -> None:
    asked = [await too_late(database) for _ in range(6)]
    await asyncio.gather(
        *(sweep(database, one.session) for one in asked for _ in range(3)),
        *(post(database, one.session, answer(one.ids[0])) for one in asked),
        *(post(database, one.session, allow(one.ids[1])) for one in asked),
        return_exceptions=True,
    )
    for one in asked:
        await sweep(database, one.session)
        assert (await states_of(database, one.session))[0] in {"queued", "closed"}


async def test_one_sweeper_looks_at_a_time(database: Database) -> None:
    asked = await too_late(database)
    async with database.transaction() as tx:
        assert await overdue_waits(tx) == [to_uuid(asked.session)]
        assert await overdue(database) == []
