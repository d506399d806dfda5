"""What comes in for a session: prompts, interrupts, answers, edits; also many at once."""

import asyncio
from collections.abc import AsyncIterator

import msgspec
import pytest

from agents.closing import next_run
from agents.config import QueueModes
from db.admission import Admission, InterruptInput, cancel_run, edit_prompt, withdraw_prompt
from db.engine import Database
from db.errors import Conflict, NotFound
from db.ids import public, to_uuid
from db.steps import store_step
from providers.types import TextBlock
from tests.support.held_sessions import (
    Writer,
    answer,
    asking,
    check_invariants,
    claim,
    eventually,
    fence_of,
    fetch,
    interrupt,
    is_waiting_for_a_lock,
    log_of,
    long_transaction,
    new_session,
    new_sessions,
    new_worker,
    post,
    prompts_of,
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


async def cancel(database: Database, run_id: str, reason: str | None = None) -> Admission:
    async with database.transaction() as tx:
        return await cancel_run(tx, run_id=run_id, reason=reason)


# -- prompts --------------------------------------------------------------------------------------------


async def test_fifty_prompts_at_once_become_one_run_and_a_dense_log(database: Database) -> None:
    """Q-10."""
    session = await new_session(database)
    admissions = await asyncio.gather(*(post(database, session, f"prompt {n}") for n in range(50)))

    assert [seq for seq, _ in await log_of(database, session)] == list(range(1, 51))
    assert sorted(admitted.events[0].seq for admitted in admissions) == list(range(1, 51))
    assert await states_of(database, session) == ["queued"]
    assert sum(admitted.wake for admitted in admissions) == 1
    assert sum(admitted.run_id is not None for admitted in admissions) == 1
    prompts = await prompts_of(database, session)
    assert prompts[0][1] is not None
    assert {run_id for _, run_id in prompts[1:]} == {None}


async def test_prompts_for_many_sessions_at_once_are_a_run_each(database: Database) -> None:
    sessions = await new_sessions(database, 25)
    await asyncio.gather(*(post(database, session, "one") for session in sessions * 2))
    for session in sessions:
        assert await states_of(database, session) == ["queued"]
        assert [seq for seq, _ in await log_of(database, session)] == [1, 2]


async def test_prompts_of_one_post_are_one_batch_in_order(database: Database) -> None:
    session = await new_session(database)
    posts = [tuple(f"{n}.{part}" for part in range(3)) for n in range(10)]
    admissions = await asyncio.gather(*(post(database, session, *texts) for texts in posts))

    for admitted in admissions:
        seqs = [event.seq for event in admitted.events]
        assert seqs == list(range(seqs[0], seqs[0] + 3))
        assert len({msgspec.json.decode(event.body)["batch_id"] for event in admitted.events}) == 1
    claimed = await take(database)
    first = min(admissions, key=lambda admitted: admitted.events[0].seq)
    batch = (await snapshot_of(database, claimed.hold)).batch
    assert [bound.id for bound in batch] == [event.id for event in first.events]


async def test_closing_commit_makes_the_next_run_of_the_oldest_batch(database: Database) -> None:
    session = await new_session(database)
    await post(database, session, "one")
    await post(database, session, "two", "three")
    await post(database, session, "four")
    claimed = await take(database)
    snapshot = await snapshot_of(database, claimed.hold)
    following = next_run(snapshot.inbox.pending, QueueModes())

    batch = tuple(bound.id for bound in snapshot.batch)
    step = Writer(claimed).close(batch, following)
    assert await store_commit(database, claimed, step, seen=snapshot.inbox.inbox_no)

    assert await states_of(database, session) == ["closed", "queued"]
    after = await take(database)
    assert [bound.content[0].text for bound in (await snapshot_of(database, after.hold)).batch
            if isinstance(bound.content[0], TextBlock)] == ["two", "three"]  # fmt: skip


async def test_prompt_that_waits_while_the_run_closes_makes_a_run_of_its_own(database: Database) -> None:
    session = await new_session(database)
    await post(database, session, "one")
    claimed = await take(database)
    batch = tuple(bound.id for bound in (await snapshot_of(database, claimed.hold)).batch)
    async with long_transaction(database) as tx:
        assert await store_step(tx, fence_of(claimed), Writer(claimed).close(batch)) is not None
        posting = asyncio.create_task(post(database, session, "two"))
        await eventually(lambda: is_waiting_for_a_lock(database))
    admission = await posting
    # What it saw when it began to wait was a running run; bound to none, it would never be run.
    assert admission.wake
    assert await states_of(database, session) == ["closed", "queued"]


async def test_nothing_is_admitted_to_sessions_that_are_archived_unknown_or_of_others(
    database: Database,
) -> None:
    session = await new_session(database)
    with pytest.raises(NotFound):
        await post(database, "sess_" + "0" * 32, "hello")
    with pytest.raises(NotFound):
        await post(database, "nonsense", "hello")
    await fetch(database, "UPDATE sessions SET archived_at = clock_timestamp() WHERE id = $1",
                to_uuid(session))  # fmt: skip
    with pytest.raises(Conflict, match="archived"):
        await post(database, session, "hello")


async def test_post_that_fails_in_the_middle_admits_nothing(database: Database) -> None:
    session = await new_session(database)
    with pytest.raises(NotFound):
        await post(database, session, "hello", answer("evt_" + "0" * 32))
    assert await log_of(database, session) == []
    assert await states_of(database, session) == []


# -- cancels --------------------------------------------------------------------------------------------


async def test_run_cancelled_before_it_began_withdraws_its_batch_and_spares_other_prompts(
    database: Database,
) -> None:
    session = await new_session(database)
    first = await post(database, session, "one", "two")
    await post(database, session, "three")
    assert first.run_id is not None

    admitted = await cancel(database, first.run_id, "not needed")

    assert admitted.wake
    assert not admitted.signal_cancel
    assert await states_of(database, session) == ["closed", "queued"]
    states = [state for state, _ in await prompts_of(database, session)]
    assert states == ["withdrawn", "withdrawn", "pending"]
    assert await types_of(database, session) == [
        *["user.message"] * 3,
        *["prompt.withdrawn"] * 2,
        "session.status_idle",
    ]


async def test_cancel_of_a_running_run_is_a_flag_and_of_a_closed_one_nothing(database: Database) -> None:
    """Q-06."""
    session = await new_session(database)
    first = await post(database, session, "one")
    assert first.run_id is not None
    claimed = await take(database)

    admitted = await cancel(database, first.run_id, "stop")
    again = await cancel(database, first.run_id, "stop again")

    assert admitted.signal_cancel
    assert again.signal_cancel
    assert not admitted.events
    view = (await snapshot_of(database, claimed.hold)).inbox
    assert view.cancel is not None
    assert view.cancel.reason == "stop"
    batch = tuple(bound.id for bound in (await snapshot_of(database, claimed.hold)).batch)
    await store_commit(database, claimed, Writer(claimed).close(batch))
    before = await log_of(database, session)
    late = await cancel(database, first.run_id)
    assert (late.events, late.wake, late.signal_cancel) == ([], False, False)
    assert await log_of(database, session) == before


async def test_cancel_of_an_unknown_run_is_refused(database: Database) -> None:
    """Q-06."""
    for run_id in ("run_" + "0" * 32, "sess_" + "0" * 32, ""):
        with pytest.raises(NotFound):
            await cancel(database, run_id)


async def test_twenty_cancels_at_once_close_a_run_once(database: Database) -> None:
    session = await new_session(database)
    first = await post(database, session, "one")
    assert first.run_id is not None
    await asyncio.gather(*(cancel(database, first.run_id) for _ in range(20)))
    assert (await types_of(database, session)).count("session.status_idle") == 1


async def test_interrupt_and_message_in_one_post_replace_what_is_queued(database: Database) -> None:
    session = await new_session(database)
    await post(database, session, "one")
    admitted = await post(database, session, InterruptInput(reason="instead"), "two")

    assert await states_of(database, session) == ["closed", "queued"]
    assert [state for state, _ in await prompts_of(database, session)] == ["withdrawn", "pending"]
    runs = await fetch(database, "SELECT id FROM runs WHERE state = 'queued'")
    assert admitted.run_id == public("run", runs[0]["id"])
    assert len(admitted.answered) == 2


async def test_interrupt_and_message_in_one_post_follow_the_run_that_goes_on(database: Database) -> None:
    session = await new_session(database)
    await post(database, session, "one")
    claimed = await take(database)
    admitted = await post(database, session, InterruptInput(), "two")

    assert admitted.signal_cancel
    assert admitted.run_id is None
    snapshot = await snapshot_of(database, claimed.hold)
    assert snapshot.inbox.cancel is not None
    assert len(snapshot.inbox.pending) == 1


async def test_interrupt_of_an_idle_session_is_only_an_event(database: Database) -> None:
    session = await new_session(database)
    admitted = await interrupt(database, session)
    assert await types_of(database, session) == ["user.interrupt"]
    assert not admitted.wake


async def test_message_interrupt_message_in_one_post_runs_the_last(database: Database) -> None:
    session = await new_session(database)
    await post(database, session, "one", InterruptInput(), "two")
    assert await states_of(database, session) == ["closed", "queued"]


# -- answers --------------------------------------------------------------------------------------------


async def open_call(database: Database) -> tuple[str, list[str]]:
    """A session that waits for the client, and the id of its call."""
    asked = await waiting(database, "client")
    return asked.session, asked.ids


async def test_last_answer_queues_the_run_and_partial_ones_say_what_remains(database: Database) -> None:
    asked = await waiting(database, "client", "client", "client")
    session, (first, second, third) = asked.session, asked.ids

    one = await post(database, session, answer(second))
    assert not one.wake
    idle = msgspec.json.decode(one.events[-1].body)
    assert idle["stop_reason"] == {"type": "requires_action", "event_ids": [first, third]}
    two = await post(database, session, answer(first), answer(third))
    assert two.wake
    assert await states_of(database, session) == ["queued"]
    held = await snapshot_of(database, (await take(database)).hold)
    assert [call.outcome for call in held.inbox.calls] == ["ok"] * 3


async def test_same_answer_twice_is_the_earlier_event(database: Database) -> None:
    session, (call,) = await open_call(database)
    first = await post(database, session, answer(call))
    again = await post(database, session, answer(call))
    assert again.answered == first.answered
    assert again.events == []
    assert not again.wake


async def test_other_answer_to_what_is_answered_is_a_conflict(database: Database) -> None:
    session, (call,) = await open_call(database)
    await post(database, session, answer(call, "yes"))
    with pytest.raises(Conflict) as refusal:
        await post(database, session, answer(call, "no"))
    assert refusal.value.reason == "already_answered"


async def test_same_answer_ten_times_at_once_is_stored_once(database: Database) -> None:
    session, (call,) = await open_call(database)
    admissions = await asyncio.gather(*(post(database, session, answer(call)) for _ in range(10)))
    assert len({admitted.answered[0].seq for admitted in admissions}) == 1
    assert sum(admitted.wake for admitted in admissions) == 1
    assert (await types_of(database, session)).count("user.custom_tool_result") == 1


async def test_different_answers_at_once_leave_one_winner(database: Database) -> None:
    session, (call,) = await open_call(database)
    results = await asyncio.gather(
        *(post(database, session, answer(call, str(n))) for n in range(8)), return_exceptions=True
    )
    assert sum(isinstance(result, Admission) for result in results) == 1
    assert all(isinstance(result, Admission | Conflict) for result in results)


async def test_answer_after_a_cancel_is_refused(database: Database) -> None:
    session, (call,) = await open_call(database)
    await interrupt(database, session)
    with pytest.raises(Conflict) as refusal:
        await post(database, session, answer(call))
    assert refusal.value.reason == "not_waiting"
    assert await states_of(database, session) == ["closed"]
    rows = await fetch(database, "SELECT outcome FROM tool_calls")
    assert [row["outcome"] for row in rows] == ["cancelled"]


async def test_answer_and_cancel_at_once_never_leave_an_open_call(database: Database) -> None:
    for _ in range(5):
        session, (call,) = await open_call(database)
        await asyncio.gather(
            post(database, session, answer(call)), interrupt(database, session), return_exceptions=True
        )
        assert (await states_of(database, session)) == ["closed"]


async def test_answer_before_the_wait_commit_makes_that_commit_decide_again(database: Database) -> None:
    asked = await asking(database, "client")
    session, claimed = asked.session, asked.claimed
    seen = (await snapshot_of(database, claimed.hold)).inbox.inbox_no
    admitted = await post(database, session, answer(*asked.ids))
    assert not admitted.wake

    assert await store_commit(database, claimed, asked.writer.wait(asked.calls), commits=1, seen=seen) is None
    assert await states_of(database, session) == ["running"]
    view = (await snapshot_of(database, claimed.hold)).inbox
    assert [done.state for done in view.calls] == ["done"]


async def test_step_that_does_not_know_of_an_answer_cannot_take_it_back(database: Database) -> None:
    asked = await asking(database, "client")
    await post(database, asked.session, answer(*asked.ids))
    draft = asked.writer.draft()
    draft.call(asked.calls[0])
    assert await store_commit(database, asked.claimed, draft.build(), commits=1) is not None
    rows = await fetch(database, "SELECT state, outcome FROM tool_calls")
    assert [tuple(row) for row in rows] == [("done", "ok")]


async def test_answer_to_what_nobody_asked_is_not_found(database: Database) -> None:
    session, (call,) = await open_call(database)
    other = await new_session(database)
    for target, call_id in ((other, call), (session, "evt_" + "0" * 32), (session, "run_1")):
        with pytest.raises(NotFound):
            await post(database, target, answer(call_id))


async def test_prompt_to_a_waiting_session_waits_its_turn(database: Database) -> None:
    session, _ = await open_call(database)
    admitted = await post(database, session, "meanwhile")
    assert admitted.run_id is None
    assert not admitted.wake
    cancelled = await interrupt(database, session)
    assert cancelled.wake
    assert await states_of(database, session) == ["closed", "queued"]


# -- edits ----------------------------------------------------------------------------------------------


async def edit(database: Database, session: str, prompt_id: str, text: str) -> Admission:
    async with database.transaction() as tx:
        return await edit_prompt(tx, session_id=session, prompt_id=prompt_id, content=(TextBlock(text=text),))


async def withdraw(database: Database, session: str, prompt_id: str) -> Admission:
    async with database.transaction() as tx:
        return await withdraw_prompt(tx, session_id=session, prompt_id=prompt_id)


@pytest.mark.parametrize("change", ["edit", "withdraw"])
async def test_change_to_a_prompt_and_claim_of_its_run_at_once_have_one_winner(
    database: Database, change: str
) -> None:
    worker = await new_worker(database)
    for _ in range(10):
        session = await new_session(database)
        prompt_id = (await post(database, session, "before")).events[0].id
        changing = (
            edit(database, session, prompt_id, "after")
            if change == "edit"
            else withdraw(database, session, prompt_id)
        )
        claimed, changed = await asyncio.gather(claim(database, worker), changing, return_exceptions=True)
        if isinstance(claimed, BaseException) or claimed is None:
            assert isinstance(changed, Admission)  # the claim found the session locked
            claimed = await claim(database, worker)
        if change == "withdraw" and isinstance(changed, Admission):
            assert claimed is None
            assert await states_of(database, session) == ["closed"]
            continue
        assert claimed is not None
        batch = (await snapshot_of(database, claimed.hold)).batch
        text = "after" if isinstance(changed, Admission) else "before"
        assert [bound.content for bound in batch] == [(TextBlock(text=text),)]
        if not isinstance(changed, Admission):
            assert isinstance(changed, Conflict)
        await store_commit(database, claimed, Writer(claimed).close((prompt_id,)))


async def test_prompt_withdrawn_from_a_batch_leaves_the_others(database: Database) -> None:
    session = await new_session(database)
    first, second = (await post(database, session, "one", "two")).events
    await withdraw(database, session, first.id)
    assert await states_of(database, session) == ["queued"]
    with pytest.raises(Conflict):
        await withdraw(database, session, first.id)
    await withdraw(database, session, second.id)
    assert await states_of(database, session) == ["closed"]


async def test_withdrawal_of_a_waiting_prompt_makes_the_closing_commit_decide_again(
    database: Database,
) -> None:
    session = await new_session(database)
    await post(database, session, "one")
    second = (await post(database, session, "two")).events[0]
    claimed = await take(database)
    snapshot = await snapshot_of(database, claimed.hold)
    await withdraw(database, session, second.id)

    batch = tuple(bound.id for bound in snapshot.batch)
    step = Writer(claimed).close(batch, next_run(snapshot.inbox.pending, QueueModes()))
    assert await store_commit(database, claimed, step, seen=snapshot.inbox.inbox_no) is None
    view = (await snapshot_of(database, claimed.hold)).inbox
    assert view.pending == ()
    assert await store_commit(database, claimed, Writer(claimed).close(batch), seen=view.inbox_no)
    assert await states_of(database, session) == ["closed"]
