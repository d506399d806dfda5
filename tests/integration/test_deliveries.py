"""What prompts do to busy sessions, against commits of a worker that come at the same moment."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest

from agents.closing import next_run
from agents.drafts import Draft
from agents.events import CancelMode, Delivery, PromptApplied
from agents.types import PendingPrompt, Snapshot, Step
from db.admission import Admission, InterruptInput, PromptInput, cancel_run, edit_prompt, withdraw_prompt
from db.engine import Database
from db.errors import Conflict
from db.holds import Claim
from db.ids import to_uuid
from db.steps import store_step
from db.sweeping import stale_sessions, sweep_session
from providers.types import Message, TextBlock
from tests.support.held_sessions import (
    Writer,
    answer,
    check_invariants,
    eventually,
    expire,
    fence_of,
    fetch,
    is_waiting_for_a_lock,
    log_of,
    new_session,
    new_worker,
    post,
    prompts_of,
    snapshot_of,
    states_of,
    steady_worker,
    take,
    types_of,
)

AFTER_TURN: CancelMode = "after_turn"
NOW: CancelMode = "now"


@pytest.fixture
async def database(database_url: str) -> AsyncIterator[Database]:
    database = Database.open(database_url)
    yield database
    try:
        await check_invariants(database)
    finally:
        await database.close()


def message(text: str, delivery: Delivery | None) -> PromptInput:
    return PromptInput(content=(TextBlock(text=text),), delivery=delivery)


async def send(database: Database, session: str, text: str, delivery: Delivery | None) -> Admission:
    return await post(database, session, message(text, delivery))


async def cancel(database: Database, run_id: str, mode: CancelMode) -> Admission:
    async with database.transaction() as tx:
        return await cancel_run(tx, run_id=run_id, mode=mode, reason=mode)


def texts(prompts: tuple[PendingPrompt, ...]) -> list[str]:
    return [block.text for prompt in prompts for block in prompt.content if isinstance(block, TextBlock)]


async def started(database: Database) -> tuple[str, Claim, Snapshot]:
    """A session whose run has been claimed, with the run's prompt not taken up."""
    session = await new_session(database)
    await post(database, session, "go")
    claimed = await take(database)
    return session, claimed, await snapshot_of(database, claimed.hold)


async def waiting(database: Database) -> tuple[str, str, Claim]:
    """A session that waits for the client, and the open call."""
    session, claimed, snapshot = await started(database)
    writer = Writer(claimed)
    step, calls = writer.ask("client")
    batch = tuple(prompt.id for prompt in snapshot.batch)
    await store(database, claimed, msgspec.structs.replace(step, applied=batch))
    await store(database, claimed, writer.wait(calls), commits=1)
    return session, calls[0].id, claimed


async def store(database: Database, claimed: Claim, step: Step, *, commits: int = 0, **fence: Any) -> Any:
    """Stores the step of a hold that has made so many commits before; None when the fence refused it."""
    async with database.transaction() as tx:
        made = msgspec.structs.replace(fence_of(claimed, **fence), commit_no=claimed.commit_no + commits)
        return await store_step(tx, made, step)


def taking_up(claimed: Claim, *prompt_ids: str) -> Step:
    """The step that opens a turn with these prompts."""
    draft: Draft = Writer(claimed).draft()
    draft.apply_prompts(prompt_ids)
    draft.event(PromptApplied, prompt_ids=prompt_ids)
    for prompt_id in prompt_ids:
        draft.message(Message(role="user", blocks=(TextBlock(text=prompt_id),)))
    return draft.build()


def closing(claimed: Claim, snapshot: Snapshot) -> Step:
    """The step that closes the run as the snapshot shows it."""
    batch = tuple(prompt.id for prompt in snapshot.batch)
    return Writer(claimed).close(batch, next_run(snapshot.inbox.pending, snapshot.inbox.modes))


# -- steer ----------------------------------------------------------------------------------------------


async def test_steering_before_the_close_makes_the_closing_commit_decide_again(database: Database) -> None:
    session, claimed, snapshot = await started(database)
    steered = await send(database, session, "left", "steer")

    assert steered.run_id is None
    assert await store(database, claimed, closing(claimed, snapshot), seen=snapshot.inbox.inbox_no) is None
    again = await snapshot_of(database, claimed.hold)
    assert [prompt.delivery for prompt in again.inbox.pending] == ["steer"]
    step = taking_up(claimed, again.batch[0].id, again.inbox.pending[0].id)
    assert await store(database, claimed, step, seen=again.inbox.inbox_no)
    assert {state for state, _ in await prompts_of(database, session)} == {"applied"}
    assert {run for _, run in await prompts_of(database, session)} == {to_uuid(claimed.hold.run_id)}
    after = await snapshot_of(database, claimed.hold)
    last = closing(claimed, after)
    assert await store(database, claimed, last, commits=1, seen=after.inbox.inbox_no)


async def test_steering_that_waits_for_the_closing_commit_starts_a_run(database: Database) -> None:
    session, claimed, snapshot = await started(database)
    async with database.transaction() as tx:
        fence = fence_of(claimed, seen=snapshot.inbox.inbox_no)
        assert await store_step(tx, fence, closing(claimed, snapshot)) is not None
        steering = asyncio.create_task(send(database, session, "left", "steer"))
        await eventually(lambda: is_waiting_for_a_lock(database))
    admitted = await steering
    assert admitted.wake
    assert admitted.run_id is not None
    assert await states_of(database, session) == ["closed", "queued"]


async def test_next_run_begins_with_interrupts_then_steering_then_what_waits(database: Database) -> None:
    session, claimed, _ = await started(database)
    await send(database, session, "later", None)
    await send(database, session, "left", "steer")
    await send(database, session, "no", "interrupt")
    await send(database, session, "stop", "interrupt")
    order = []
    for _ in range(3):
        snapshot = await snapshot_of(database, claimed.hold)
        assert await store(database, claimed, closing(claimed, snapshot), seen=snapshot.inbox.inbox_no)
        claimed = await take(database)
        bound = (await snapshot_of(database, claimed.hold)).batch
        order.append(
            [block.text for prompt in bound for block in prompt.content if isinstance(block, TextBlock)]
        )
    assert order == [["no", "stop"], ["left"], ["later"]]


async def test_edit_that_waits_for_the_take_up_comes_too_late(database: Database) -> None:
    session, claimed, _ = await started(database)
    steered = await send(database, session, "left", "steer")
    prompt_id = steered.answered[0].id
    snapshot = await snapshot_of(database, claimed.hold)

    async def change(*, withdraw: bool) -> None:
        async with database.transaction() as tx:
            if withdraw:
                await withdraw_prompt(tx, session_id=session, prompt_id=prompt_id)
            else:
                content = (TextBlock(text="right"),)
                await edit_prompt(tx, session_id=session, prompt_id=prompt_id, content=content)

    async with database.transaction() as tx:
        step = taking_up(claimed, snapshot.batch[0].id, prompt_id)
        assert await store_step(tx, fence_of(claimed, seen=snapshot.inbox.inbox_no), step) is not None
        changes = [asyncio.create_task(change(withdraw=withdraw)) for withdraw in (False, True)]
        await eventually(lambda: is_waiting_for_a_lock(database))
    for outcome in await asyncio.gather(*changes, return_exceptions=True):
        assert isinstance(outcome, Conflict)
        assert outcome.reason == "prompt_not_pending"
    assert (await types_of(database, session))[-1] == "prompt.applied"


@pytest.mark.parametrize("delivery", ["queue", "steer", "interrupt"])
async def test_edit_before_the_take_up_makes_that_commit_decide_again(
    database: Database, delivery: Delivery
) -> None:
    session, claimed, _ = await started(database)
    sent = await send(database, session, "left", delivery)
    before = await snapshot_of(database, claimed.hold)
    async with database.transaction() as tx:
        content = (TextBlock(text="right"),)
        await edit_prompt(tx, session_id=session, prompt_id=sent.answered[0].id, content=content)

    step = taking_up(claimed, before.batch[0].id)
    assert await store(database, claimed, step, seen=before.inbox.inbox_no) is None
    [pending] = (await snapshot_of(database, claimed.hold)).inbox.pending
    assert pending.content == (TextBlock(text="right"),)
    async with database.transaction() as tx:
        await withdraw_prompt(tx, session_id=session, prompt_id=sent.answered[0].id)
    assert (await snapshot_of(database, claimed.hold)).inbox.pending == ()


# -- interrupt ------------------------------------------------------------------------------------------


async def test_interrupt_that_waits_for_the_wait_closes_it_and_is_next(database: Database) -> None:
    session, claimed, snapshot = await started(database)
    await send(database, session, "later", "queue")
    writer = Writer(claimed)
    step, calls = writer.ask("client")
    step = msgspec.structs.replace(step, applied=tuple(prompt.id for prompt in snapshot.batch))
    await store(database, claimed, step)
    async with database.transaction() as tx:
        fence = msgspec.structs.replace(fence_of(claimed), commit_no=claimed.commit_no + 1)
        assert await store_step(tx, fence, writer.wait(calls)) is not None
        interrupting = asyncio.create_task(send(database, session, "no", "interrupt"))
        await eventually(lambda: is_waiting_for_a_lock(database))
    admitted = await interrupting

    assert admitted.wake
    assert await states_of(database, session) == ["closed", "queued"]
    assert [run is None for _, run in await prompts_of(database, session)] == [False, True, False]
    assert admitted.run_id is not None
    assert (await types_of(database, session))[-3:] == [
        "user.message",
        "agent.tool_result",
        "session.status_idle",
    ]
    with pytest.raises(Conflict, match="closed without one"):
        await post(database, session, answer(calls[0].id))


async def test_interrupt_before_the_wait_makes_that_commit_decide_again(database: Database) -> None:
    session, claimed, snapshot = await started(database)
    writer = Writer(claimed)
    step, calls = writer.ask("client")
    step = msgspec.structs.replace(step, applied=tuple(prompt.id for prompt in snapshot.batch))
    await store(database, claimed, step)
    admitted = await send(database, session, "no", "interrupt")

    assert admitted.signal_cancel
    seen = snapshot.inbox.inbox_no
    assert await store(database, claimed, writer.wait(calls), commits=1, seen=seen) is None
    view = (await snapshot_of(database, claimed.hold)).inbox
    assert view.cancel is not None
    assert (view.cancel.mode, len(view.pending)) == ("now", 1)


async def test_two_interrupts_at_once_stop_the_run_once_and_are_next_together(database: Database) -> None:
    session, claimed, _ = await started(database)
    await asyncio.gather(*(send(database, session, text, "interrupt") for text in ("no", "stop")))
    snapshot = await snapshot_of(database, claimed.hold)
    assert await store(database, claimed, closing(claimed, snapshot), seen=snapshot.inbox.inbox_no)
    assert await states_of(database, session) == ["closed", "queued"]
    assert len((await snapshot_of(database, (await take(database)).hold)).batch) == 2


async def test_two_interrupts_at_once_of_a_waiting_session_leave_one_run(database: Database) -> None:
    """The second finds the run of the first queued, and takes its place."""
    session, _, _ = await waiting(database)
    await asyncio.gather(*(send(database, session, text, "interrupt") for text in ("no", "stop")))
    assert await states_of(database, session) == ["closed", "closed", "queued"]
    assert [state for state, _ in await prompts_of(database, session)] == ["applied", "withdrawn", "pending"]


async def test_prompts_of_one_interrupting_post_stay_together(database: Database) -> None:
    for make in (waiting, started):
        session = (await make(database))[0]
        admitted = await post(database, session, message("no", "interrupt"), message("stop", "interrupt"))
        if make is waiting:
            assert admitted.run_id is not None
            assert len({run for _, run in (await prompts_of(database, session))[1:]}) == 1
        else:
            assert [run for _, run in (await prompts_of(database, session))[1:]] == [None, None]


async def test_interrupt_of_a_queued_run_takes_its_place_in_the_same_transaction(database: Database) -> None:
    session = await new_session(database)
    await post(database, session, "go")
    await post(database, session, "later")
    admitted = await send(database, session, "no", "interrupt")
    assert admitted.wake
    assert await states_of(database, session) == ["closed", "queued"]
    assert [state for state, _ in await prompts_of(database, session)] == ["withdrawn", "pending", "pending"]
    bound = [run is not None for _, run in await prompts_of(database, session)]
    assert bound == [True, False, True]


# -- reject ---------------------------------------------------------------------------------------------


async def test_rejected_prompt_stores_nothing_of_its_post(database: Database) -> None:
    session, _, _ = await started(database)
    before = await log_of(database, session)
    with pytest.raises(Conflict) as refused:
        await post(database, session, InterruptInput(), message("go", "reject"), message("on", "reject"))
    assert refused.value.reason == "session_busy"
    assert await log_of(database, session) == before
    rows = await fetch(database, "SELECT cancel_requested_at FROM runs")
    assert [row["cancel_requested_at"] for row in rows] == [None]


async def test_of_ten_prompts_that_would_be_rejected_one_starts_a_run(database: Database) -> None:
    """Q-10, for those that are not to wait."""
    session = await new_session(database)
    posts = (post(database, session, message(f"{n}", "reject"), message("on", "reject")) for n in range(10))
    outcomes = await asyncio.gather(*posts, return_exceptions=True)
    assert sum(isinstance(outcome, Admission) for outcome in outcomes) == 1
    assert {outcome.reason for outcome in outcomes if isinstance(outcome, Conflict)} == {"session_busy"}
    assert await types_of(database, session) == ["user.message"] * 2


@pytest.mark.parametrize("delivery", ["queue", "steer", "interrupt", "reject", None])
async def test_any_prompt_starts_a_run_of_a_free_session(
    database: Database, delivery: Delivery | None
) -> None:
    session = await new_session(database)
    admitted = await send(database, session, "go", delivery)
    assert admitted.wake
    assert await states_of(database, session) == ["queued"]
    claimed = await take(database)
    assert len((await snapshot_of(database, claimed.hold)).batch) == 1


async def test_prompts_to_a_waiting_session_stay_pending_until_it_is_answered(database: Database) -> None:
    session, call_id, _ = await waiting(database)
    await send(database, session, "later", "queue")
    await send(database, session, "left", "steer")
    assert await states_of(database, session) == ["waiting"]
    await post(database, session, answer(call_id))
    claimed = await take(database)
    assert [p.delivery for p in (await snapshot_of(database, claimed.hold)).inbox.pending] == [
        "queue",
        "steer",
    ]


# -- stopping after the turn ----------------------------------------------------------------------------


async def test_stop_after_the_turn_is_a_flag_that_a_stop_now_outdoes(database: Database) -> None:
    _, claimed, _ = await started(database)
    modes = []
    for mode in (AFTER_TURN, NOW, AFTER_TURN):
        await cancel(database, claimed.hold.run_id, mode)
        view = (await snapshot_of(database, claimed.hold)).inbox
        assert view.cancel is not None
        modes.append((view.cancel.mode, view.cancel.reason))
    assert modes == [("after_turn", "after_turn"), ("now", "now"), ("now", "now")]


async def test_stop_after_the_turn_waits_for_the_client_and_a_stop_now_does_not(database: Database) -> None:
    session, call_id, claimed = await waiting(database)
    await cancel(database, claimed.hold.run_id, "after_turn")
    assert await states_of(database, session) == ["waiting"]
    await post(database, session, answer(call_id))
    assert await states_of(database, session) == ["queued"]
    await cancel(database, claimed.hold.run_id, "now")
    assert await states_of(database, session) == ["closed"]


async def test_stop_after_the_turn_closes_a_queued_run_at_once(database: Database) -> None:
    session = await new_session(database)
    admitted = await post(database, session, "go")
    assert admitted.run_id is not None
    await cancel(database, admitted.run_id, "after_turn")
    assert await states_of(database, session) == ["closed"]


async def test_turn_that_is_lost_with_its_worker_is_not_begun_again_after_a_stop(database: Database) -> None:
    session = await new_session(database)
    await post(database, session, "go")
    worker = await new_worker(database)
    claimed = await take(database, worker)
    await cancel(database, claimed.hold.run_id, "after_turn")
    await expire(database, worker)
    async with database.transaction() as tx:
        swept = await sweep_session(tx, to_uuid(session))
    assert swept is not None
    assert not swept.is_queued
    assert await states_of(database, session) == ["closed"]


async def test_stop_after_the_turn_is_not_forced_however_long_the_turn_takes(database: Database) -> None:
    session, claimed, _ = await started(database)
    sweeper = await steady_worker(database)
    for mode, found in (AFTER_TURN, []), (NOW, [to_uuid(session)]):
        await cancel(database, claimed.hold.run_id, mode)
        await fetch(database, "UPDATE runs SET cancel_requested_at = clock_timestamp() - interval '1 h'")
        async with database.transaction() as tx:
            assert await stale_sessions(tx, worker_id=sweeper) == found
            assert (await sweep_session(tx, to_uuid(session)) is not None) == bool(found)
