"""Sessions to be worked on: tenants, sessions, prompts, claims and steps, and what must hold after all."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any
from uuid import UUID, uuid4

from msgspec.structs import replace

from agents.config import AgentConfig, ClientTool, ModelChoice
from agents.drafts import Draft
from agents.events import AgentCustomToolUse, AgentMessage, AgentToolUse, StatusIdle, StopReason
from agents.types import CallKind, CloseRun, Snapshot, Step, ToolCall, WaitForClient
from db.admission import Admission, AnswerInput, ConfirmationInput, Input, InterruptInput, PromptInput, admit
from db.agents import create_agent
from db.engine import Database, Transaction
from db.errors import DatabaseBusy
from db.holds import Claim, Hold, claim_next, renew_lease
from db.ids import public, to_uuid
from db.sessions import create_session
from db.snapshots import load_snapshot
from db.steps import Fence, store_step
from providers.ids import new_id
from providers.types import Message, TextBlock, ToolUseBlock

PATIENCE_S = 60.0
ASK = ClientTool(name="ask", description="Asks the user.", input_schema={"type": "object"})


async def eventually(is_true: Callable[[], Awaitable[bool]], *, patience_s: float = PATIENCE_S) -> None:
    """Waits for a state of the database that nothing announces."""
    async with asyncio.timeout(patience_s):
        while not await is_true():  # noqa: ASYNC110 - the state belongs to the code under test
            await asyncio.sleep(0.01)


@asynccontextmanager
async def long_transaction(database: Database) -> AsyncIterator[Transaction]:
    """A transaction that a test may hold open while it waits for others."""
    async with database.transaction() as tx:
        await tx.execute("SET LOCAL idle_in_transaction_session_timeout = 0")
        yield tx


async def is_waiting_for_a_lock(database: Database) -> bool:
    """Whether some transaction waits for another one."""
    rows = await fetch(
        database,
        "SELECT FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'",
    )
    return bool(rows)


async def new_tenant(database: Database, *, max_running_runs: int | None = None) -> UUID:
    tenant_id = uuid4()
    async with database.transaction() as tx:
        await tx.execute(
            "INSERT INTO tenants (id, name, max_running_runs) VALUES ($1, $2, $3)",
            tenant_id,
            str(tenant_id),
            max_running_runs,
        )
    return tenant_id


async def new_sessions(
    database: Database, count: int = 1, *, tenant_id: UUID | None = None, **agent: Any
) -> list[str]:
    """Sessions of one new agent that may ask the client."""
    tenant_id = tenant_id or await new_tenant(database)
    fields: dict[str, Any] = {"name": "test", "model": ModelChoice(id="rehearsal:fast"), "tools": (ASK,)}
    config = AgentConfig(**fields | agent)
    async with database.transaction(tenant_id) as tx:
        agent_id = public("agent", await create_agent(tx, config))
        return [await create_session(tx, agent_id=agent_id, version=None) for _ in range(count)]


async def new_session(database: Database, *, tenant_id: UUID | None = None, **agent: Any) -> str:
    return (await new_sessions(database, tenant_id=tenant_id, **agent))[0]


def prompt(text: str) -> PromptInput:
    return PromptInput(content=(TextBlock(text=text),))


def answer(call_id: str, text: str = "yes") -> AnswerInput:
    return AnswerInput(custom_tool_use_id=call_id, content=(TextBlock(text=text),))


def allow(call_id: str) -> ConfirmationInput:
    return ConfirmationInput(tool_use_id=call_id, result="allow")


def deny(call_id: str, message: str | None = None) -> ConfirmationInput:
    return ConfirmationInput(tool_use_id=call_id, result="deny", deny_message=message)


@dataclass
class Asking:
    """A session whose calls wait for the client: before or after the commit with which its hold leaves it."""

    session: str
    calls: tuple[ToolCall, ...]
    claimed: Claim
    writer: "Writer"

    @property
    def ids(self) -> list[str]:
        return [call.id for call in self.calls]


async def asking(database: Database, *kinds: CallKind) -> Asking:
    """A run whose model has asked for so much of the client, held by a worker."""
    session = await new_session(database)
    await post(database, session, "ask me")
    claimed = await take(database)
    batch = await batch_of(database, claimed)
    writer = Writer(claimed)
    step, calls = writer.ask(*kinds)
    assert await store_commit(database, claimed, replace(step, applied=batch))
    return Asking(session, calls, claimed, writer)


async def waiting(database: Database, *kinds: CallKind, timeout_s: float | None = None) -> Asking:
    """The same after the commit with which the run begins to wait."""
    asked = await asking(database, *kinds)
    wait = asked.writer.wait(asked.calls, timeout_s=timeout_s)
    assert await store_commit(database, asked.claimed, wait, commits=1)
    return asked


async def store_commit(
    database: Database, claimed: Claim, step: Step, *, commits: int = 0, **fence: Any
) -> Any:
    """Stores the step of a hold that has made so many commits before."""
    made = replace(fence_of(claimed, **fence), commit_no=claimed.commit_no + commits)
    async with database.transaction() as tx:
        return await store_step(tx, made, step)


async def post(
    database: Database, session_id: str, *inputs: Input | str, api_key_id: str | None = None
) -> Admission:
    """What one POST admits. Text is a prompt."""
    async with database.transaction() as tx:
        return await admit(
            tx,
            session_id=session_id,
            inputs=[prompt(item) if isinstance(item, str) else item for item in inputs],
            api_key_id=api_key_id,
        )


async def interrupt(database: Database, session_id: str) -> Admission:
    return await post(database, session_id, InterruptInput(reason="enough"))


async def new_worker(database: Database, *, lease_s: float = 60.0) -> str:
    """A worker with a live lease."""
    worker_id = new_id("work")
    async with database.transaction() as tx:
        await renew_lease(tx, worker_id=worker_id, host="test", pid=1, slots=8, lease_s=lease_s)
    return worker_id


async def expire(database: Database, worker_id: str) -> None:
    """The worker's lease has run out."""
    async with database.transaction() as tx:
        await tx.execute(
            "UPDATE workers SET lease_until = clock_timestamp() - interval '1 s' WHERE id = $1",
            to_uuid(worker_id),
        )


async def steady_worker(database: Database) -> str:
    """A worker that may call others dead."""
    worker_id = await new_worker(database)
    async with database.transaction() as tx:
        await tx.execute(
            "UPDATE workers SET steady_since = clock_timestamp() - interval '1 h' WHERE id = $1",
            to_uuid(worker_id),
        )
    return worker_id


async def claim(database: Database, worker_id: str) -> Claim | None:
    """One try; None too when all that could be taken is locked."""
    try:
        return await claim_next(database, worker_id=worker_id)
    except DatabaseBusy:
        return None


async def take(database: Database, worker_id: str | None = None) -> Claim:
    """The claim of a run that must be there."""
    claimed = await claim(database, worker_id or await new_worker(database))
    assert claimed is not None
    return claimed


async def snapshot_of(database: Database, hold: Hold) -> Snapshot:
    async with database.transaction() as tx:
        return await load_snapshot(tx, hold)


async def batch_of(database: Database, claimed: Claim) -> tuple[str, ...]:
    return tuple(bound.id for bound in (await snapshot_of(database, claimed.hold)).batch)


def fence_of(claimed: Claim, **fields: Any) -> Fence:
    """The fence of the claim's first commit."""
    return Fence(
        session_id=claimed.hold.session_id,
        run_id=claimed.hold.run_id,
        epoch=claimed.hold.epoch,
        commit_no=claimed.commit_no,
        **fields,
    )


# -- steps as a loop would make them --------------------------------------------------------------------


@dataclass
class Writer:
    """Makes the steps of one hold."""

    claimed: Claim
    position: int = 1

    def draft(self) -> Draft:
        hold = self.claimed.hold
        return Draft(
            session_id=hold.session_id,
            run_id=hold.run_id,
            now=self.claimed.now,
            next_position=self.position,
        )

    def say(self, text: str = "hello") -> Step:
        """A message and its event."""
        draft = self.draft()
        draft.event(AgentMessage, content=(TextBlock(text=text),))
        draft.message(Message(role="assistant", blocks=(TextBlock(text=text),)))
        self.position += 1
        return draft.build()

    def close(self, batch: tuple[str, ...] = (), next_run: Any = None) -> Step:
        draft = self.draft()
        draft.apply_prompts(batch)
        draft.event(StatusIdle, stop_reason=StopReason(type="end_turn"))
        draft.ending = CloseRun(stop_reason=StopReason(type="end_turn"), next_run=next_run)
        return draft.build()

    def ask(self, *kinds: CallKind) -> tuple[Step, tuple[ToolCall, ...]]:
        """An assistant message whose calls all wait for the client, one of each kind that is given."""
        draft = self.draft()
        names = [f"call_{index}" for index in range(len(kinds))]
        stored = draft.message(
            Message(
                role="assistant",
                blocks=tuple(ToolUseBlock(id=name, name="ask", input={}) for name in names),
            )
        )
        self.position += 1
        calls = []
        for index, (name, kind) in enumerate(zip(names, kinds, strict=True)):
            call = ToolCall(
                id=new_id("evt"),
                tool_use_id=name,
                position=stored.position,
                index=index,
                name="ask",
                input={},
                state="open",
                kind=kind,
            )
            if kind == "server":
                draft.event(AgentToolUse, event_id=call.id, name="ask", input={}, evaluated_permission="ask")
            else:
                draft.event(AgentCustomToolUse, event_id=call.id, name="ask", input={})
            draft.call(call)
            calls.append(call)
        return draft.build(), tuple(calls)

    def wait(self, calls: tuple[ToolCall, ...], *, timeout_s: float | None = None) -> Step:
        draft = self.draft()
        waiting = tuple(call.id for call in calls)
        draft.event(StatusIdle, stop_reason=StopReason(type="requires_action", event_ids=waiting))
        draft.ending = WaitForClient(timeout_s=timeout_s)
        return draft.build()


# -- what stands in the database ------------------------------------------------------------------------


async def log_of(database: Database, session_id: str) -> list[tuple[int, str]]:
    """Number and type of each event."""
    async with database.transaction() as tx:
        rows = await tx.fetch(
            "SELECT seq, type FROM events WHERE session_id = $1 ORDER BY seq", to_uuid(session_id)
        )
    return [(row["seq"], row["type"]) for row in rows]


async def types_of(database: Database, session_id: str) -> list[str]:
    return [kind for _, kind in await log_of(database, session_id)]


async def states_of(database: Database, session_id: str) -> list[str]:
    """The states of the session's runs, oldest first."""
    async with database.transaction() as tx:
        rows = await tx.fetch(
            "SELECT state FROM runs WHERE session_id = $1 ORDER BY after_seq", to_uuid(session_id)
        )
    return [row["state"] for row in rows]


async def prompts_of(database: Database, session_id: str) -> list[tuple[str, UUID | None]]:
    """State and run of each prompt, in order."""
    async with database.transaction() as tx:
        rows = await tx.fetch(
            "SELECT state, run_id FROM prompts WHERE session_id = $1 ORDER BY seq", to_uuid(session_id)
        )
    return [(row["state"], row["run_id"]) for row in rows]


async def fetch(database: Database, statement: str, *values: Any) -> list[Any]:
    async with database.transaction() as tx:
        return list(await tx.fetch(statement, *values))


async def check_invariants(database: Database) -> None:
    """Fails unless every session in the database is one that our rules can have led to."""
    async with database.transaction() as tx:
        for name, statement in _FAULTS.items():
            faults = await tx.fetch(statement)
            assert not faults, f"{name}: {faults[:3]}"
        await _check_transcripts(tx)


_FAULTS = {
    "events are not dense": """
        SELECT s.id, s.last_seq, e.n, e.least, e.most FROM sessions s, LATERAL (
            SELECT count(*) AS n, coalesce(min(seq), 1) AS least, coalesce(max(seq), 0) AS most
            FROM events WHERE session_id = s.id
        ) e WHERE e.n <> s.last_seq OR e.least <> 1 OR e.most <> s.last_seq""",
    "an event is there twice": "SELECT id FROM events GROUP BY id HAVING count(*) > 1",
    "messages are not dense": """
        SELECT s.id, s.last_position, m.n FROM sessions s, LATERAL (
            SELECT count(*) AS n, coalesce(max(position), 0) AS most FROM messages WHERE session_id = s.id
        ) m WHERE m.n <> s.last_position OR m.most <> s.last_position""",
    "a session has two open runs": """
        SELECT session_id FROM runs WHERE state <> 'closed' GROUP BY session_id HAVING count(*) > 1""",
    "a run's state and its worker disagree": """
        SELECT id, state, worker_id FROM runs WHERE (state = 'running') <> (worker_id IS NOT NULL)""",
    "a closed run has no reason, or an open one has": """
        SELECT id, state FROM runs WHERE (state = 'closed') <> (stop_reason IS NOT NULL)""",
    "a run did not close with exactly one event": """
        SELECT r.id, r.state FROM runs r WHERE (r.state = 'closed')::int <> (
            SELECT count(*) FROM events e WHERE e.run_id = r.id AND e.type = 'session.status_idle'
                AND convert_from(e.body, 'UTF8')::json -> 'stop_reason' ->> 'type' <> 'requires_action')""",
    "a run that does not wait is to be closed for waiting": """
        SELECT id, state FROM runs WHERE state <> 'waiting' AND wait_until IS NOT NULL""",
    "a prompt waits though no run is open": """
        SELECT p.id FROM prompts p WHERE state = 'pending' AND NOT EXISTS (
            SELECT FROM runs r WHERE r.session_id = p.session_id AND r.state <> 'closed')""",
    "a prompt is pending in a closed run": """
        SELECT p.id FROM prompts p JOIN runs r ON r.id = p.run_id
        WHERE p.state = 'pending' AND r.state = 'closed'""",
    "a batch was split between runs": """
        SELECT batch_id FROM prompts WHERE run_id IS NOT NULL AND state <> 'withdrawn'
        GROUP BY batch_id HAVING count(DISTINCT run_id) > 1""",
    "a ledger entry is open though nobody works on its run": """
        SELECT u.id FROM usage_entries u JOIN runs r ON r.id = u.run_id
        WHERE u.state = 'open' AND r.state <> 'running'""",
    "a request has no span": """
        SELECT u.id FROM usage_entries u WHERE NOT EXISTS (
            SELECT FROM events e WHERE e.session_id = u.session_id AND e.id = u.id)""",
    "counters are not sums of the ledger": """
        SELECT s.id FROM sessions s, LATERAL (
            SELECT coalesce(sum(coalesce(cache_read_tokens, 0)), 0) AS hit,
                coalesce(sum(greatest(coalesce(input_tokens, 0) - coalesce(cache_read_tokens, 0), 0)), 0)
                    AS miss,
                coalesce(sum(coalesce(output_tokens, 0)), 0) AS output,
                coalesce(sum(cost_usd), 0) AS cost, count(*) FILTER (WHERE cost_usd IS NULL) AS unpriced
            FROM usage_entries u WHERE u.session_id = s.id AND u.state <> 'open'
        ) u WHERE (u.hit, u.miss, u.output, u.cost, u.unpriced) <> (s.current_cache_hit_tokens,
            s.current_cache_miss_tokens, s.current_output_tokens, s.cost_usd, s.unpriced_requests)""",
    "a finished call has no result, or an open one has": """
        SELECT id FROM tool_calls WHERE (state = 'done') <> (result IS NOT NULL)""",
}


async def _check_transcripts(tx: Transaction) -> None:
    """Each call of an earlier message has its result in the message that follows."""
    rows = await tx.fetch(
        """
        SELECT c.id FROM tool_calls c JOIN sessions s ON s.id = c.session_id
        WHERE s.last_position > c.position AND NOT EXISTS (
            SELECT FROM messages m WHERE m.session_id = c.session_id AND m.position = c.position + 1
                AND m.role = 'tool' AND m.blocks::text LIKE '%' || c.tool_use_id || '%')
        """
    )
    assert not rows, f"calls without results in the transcript: {rows[:3]}"
