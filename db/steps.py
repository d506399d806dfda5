"""Stores a `Step`: everything in it by one statement, behind the fence.

The statement is put together from the parts that the step needs; when the fence finds no row nothing is
written at all.
"""

from typing import Any

from msgspec import Struct

from agents.log import LoggedEvent, number, renumbered
from agents.types import CloseRun, RequestClosed, RequeueRun, Step, WaitForClient
from db.engine import Transaction
from db.ids import to_uuid
from db.parts import Parts, add_events, encode_json


class Fence(Struct, frozen=True, kw_only=True):
    """Who writes. The step is stored only while all of this is still true.

    `commit_no` None: the caller holds the session's row lock, so only `epoch` is compared.
    `seen`: the inbox_no that the step was decided on; None when it does not matter.
    `raise_epoch`: puts off the worker that holds the session.
    """

    session_id: str
    run_id: str
    epoch: int
    commit_no: int | None = None
    seen: int | None = None
    raise_epoch: bool = False


async def store_step(tx: Transaction, fence: Fence, step: Step) -> tuple[LoggedEvent, ...] | None:
    """The step's events with their numbers, or None when the fence refused it and nothing was fence."""
    parts = Parts()
    _add_fence(parts, fence, step)
    logged = number(step.events, after_seq=0)
    add_events(parts, step.events, logged)
    _add_memory(parts, step)
    _add_messages(parts, fence, step)
    _add_calls(parts, fence, step)
    _add_prompts(parts, fence, step)
    _add_ledger(parts, fence, step)
    _add_run(parts, fence, step)
    last_seq = await tx.fetchval(parts.statement("SELECT last_seq FROM fence"), *parts.values)
    return None if last_seq is None else renumbered(logged, after_seq=last_seq - len(logged))


async def find_stored(
    tx: Transaction, fence: Fence, step: Step, *, after_seq: int
) -> tuple[LoggedEvent, ...] | None:
    """The step's events when an earlier try of it had succeeded though its answer was lost; else None.

    `after_seq`: the last event that the writer knew of before that try.
    """
    row = await tx.fetchrow("SELECT epoch, commit_no FROM sessions WHERE id = $1", to_uuid(fence.session_id))
    if row is None or fence.commit_no is None or row["commit_no"] != fence.commit_no + 1:
        return None
    rows = await tx.fetch(
        "SELECT seq FROM events WHERE session_id = $1 AND seq > $2 AND id = ANY($3::uuid[]) ORDER BY seq",
        to_uuid(fence.session_id),
        after_seq,
        [to_uuid(event.id) for event in step.events],
    )
    # Ids tell whose commit it was; a step without events is told by the epoch, which it cannot have raised.
    if len(rows) != len(step.events) or (not rows and row["epoch"] != fence.epoch):
        return None
    return number(step.events, after_seq=rows[0]["seq"] - 1) if rows else ()


async def still_holds(tx: Transaction, fence: Fence) -> bool:
    """True when the fence is whole but for the inbox."""
    found = await tx.fetchval(
        "SELECT count(*) FROM sessions WHERE id = $1 AND epoch = $2 AND commit_no = $3",
        to_uuid(fence.session_id),
        fence.epoch,
        fence.commit_no,
    )
    return bool(found)


def leaves_worker(step: Step) -> bool:
    """True when the step takes a running run from its worker other than by closing it."""
    return isinstance(step.ending, WaitForClient | RequeueRun)


_COUNTERS = """
    current_cache_hit_tokens = current_cache_hit_tokens + {},
    current_cache_miss_tokens = current_cache_miss_tokens + {},
    current_output_tokens = current_output_tokens + {}
"""
# A memory ends a segment, with the request that has made it.
_COUNTERS_OF_NEW_SEGMENT = """
    memory_id = {},
    full_cache_hit_tokens = full_cache_hit_tokens + current_cache_hit_tokens + {},
    full_cache_miss_tokens = full_cache_miss_tokens + current_cache_miss_tokens + {},
    full_output_tokens = full_output_tokens + current_output_tokens + {},
    current_cache_hit_tokens = 0, current_cache_miss_tokens = 0, current_output_tokens = 0
"""


def _add_fence(parts: Parts, fence: Fence, step: Step) -> None:
    hit, miss, output, cost, unpriced = _counted(step.closed)
    memory = () if step.memory is None else (to_uuid(step.memory.id),)
    parts.add(
        "fence",
        f"""
        UPDATE sessions SET
            last_seq = last_seq + {{}},
            last_position = last_position + {{}},
            commit_no = commit_no + {{}},
            epoch = epoch + {{}},
            {_COUNTERS if step.memory is None else _COUNTERS_OF_NEW_SEGMENT},
            cost_usd = cost_usd + {{}},
            unpriced_requests = unpriced_requests + {{}},
            updated_at = clock_timestamp()
        WHERE id = {{}} AND epoch = {{}}
            AND ({{}}::bigint IS NULL OR commit_no = {{}}) AND ({{}}::bigint IS NULL OR inbox_no = {{}})
        RETURNING id AS session_id, tenant_id, agent_id, end_user_id, last_seq, epoch
        """,
        len(step.events),
        len(step.messages),
        0 if fence.commit_no is None else 1,
        1 if fence.raise_epoch or leaves_worker(step) else 0,
        *memory,
        hit,
        miss,
        output,
        cost,
        unpriced,
        to_uuid(fence.session_id),
        fence.epoch,
        fence.commit_no,
        fence.commit_no,
        fence.seen,
        fence.seen,
    )


def _counted(closed: RequestClosed | None) -> tuple[int, int, int, Any, int]:
    """What a closed request adds to the session: cache hit, cache miss, output, cost, unpriced requests."""
    if closed is None:
        return 0, 0, 0, 0, 0
    usage = closed.usage
    hit = usage.cache_read_tokens or 0
    miss = max((usage.input_tokens or 0) - hit, 0)
    unpriced = 1 if closed.cost_usd is None else 0
    return hit, miss, usage.output_tokens or 0, closed.cost_usd or 0, unpriced


def _add_memory(parts: Parts, step: Step) -> None:
    if step.memory is None:
        return
    memory = step.memory
    parts.add(
        "new_memory",
        """
        INSERT INTO memories (id, tenant_id, session_id, position, seen_position, text, usage_entry_id)
        SELECT {}, fence.tenant_id, fence.session_id, {}, {}, {}, {} FROM fence
        """,
        to_uuid(memory.id),
        memory.position,
        memory.seen_position,
        memory.text,
        None if step.closed is None else to_uuid(step.closed.id),
    )


def _add_messages(parts: Parts, fence: Fence, step: Step) -> None:
    if not step.messages:
        return
    natives = [stored.message.native for stored in step.messages]
    parts.add(
        "new_messages",
        """
        INSERT INTO messages
            (session_id, tenant_id, seq, run_id, position, id, role, blocks, native_api, native_model,
            native_body)
        SELECT fence.session_id, fence.tenant_id, fence.last_seq, {}, new.*
        FROM fence, unnest(
            {}::bigint[], {}::uuid[], {}::text[], {}::json[], {}::text[], {}::text[], {}::bytea[]) AS new
        """,
        to_uuid(fence.run_id),
        [stored.position for stored in step.messages],
        [to_uuid(stored.id) for stored in step.messages],
        [stored.message.role for stored in step.messages],
        [encode_json(stored.message.blocks) for stored in step.messages],
        [None if native is None else native.api for native in natives],
        [None if native is None else native.model for native in natives],
        [None if native is None else native.body for native in natives],
    )


def _add_calls(parts: Parts, fence: Fence, step: Step) -> None:
    if not step.calls:
        return
    calls = step.calls
    parts.add(
        "changed_calls",
        """
        INSERT INTO tool_calls (session_id, tenant_id, run_id, id, tool_use_id, position, index, kind, name,
            input, state, idempotent, outcome, result, started_at, finished_at)
        SELECT fence.session_id, fence.tenant_id, {}, new.*,
            CASE WHEN new.state = 'running' THEN clock_timestamp() END,
            CASE WHEN new.state = 'done' THEN clock_timestamp() END
        FROM fence, unnest({}::uuid[], {}::text[], {}::bigint[], {}::int[], {}::text[], {}::text[],
            {}::json[], {}::text[], {}::bool[], {}::text[], {}::json[])
            AS new (id, tool_use_id, position, index, kind, name, input, state, idempotent, outcome, result)
        ON CONFLICT (id) DO UPDATE SET
            state = excluded.state, idempotent = excluded.idempotent, outcome = excluded.outcome,
            result = excluded.result, finished_at = excluded.finished_at,
            started_at = coalesce(tool_calls.started_at, excluded.started_at)
        WHERE tool_calls.state <> 'done'
        """,
        to_uuid(fence.run_id),
        [to_uuid(call.id) for call in calls],
        [call.tool_use_id for call in calls],
        [call.position for call in calls],
        [call.index for call in calls],
        [call.kind for call in calls],
        [call.name for call in calls],
        [encode_json(call.input) for call in calls],
        [call.state for call in calls],
        [call.idempotent for call in calls],
        [call.outcome for call in calls],
        [None if call.result is None else encode_json(call.result) for call in calls],
    )


def _add_prompts(parts: Parts, fence: Fence, step: Step) -> None:
    for state, prompt_ids in (("applied", step.applied), ("withdrawn", step.withdrawn)):
        if prompt_ids:
            # Steering is bound to a run by being taken up.
            parts.add(
                f"{state}_prompts",
                """
                UPDATE prompts SET state = {}, run_id = {}, updated_at = clock_timestamp()
                FROM fence WHERE id = ANY({}::uuid[])
                """,
                state,
                to_uuid(fence.run_id),
                [to_uuid(prompt_id) for prompt_id in prompt_ids],
            )


def _add_ledger(parts: Parts, fence: Fence, step: Step) -> None:
    if step.opened is not None:
        opened = step.opened
        parts.add(
            "opened_entry",
            """
            INSERT INTO usage_entries (id, tenant_id, api_key_id, agent_id, session_id, run_id, end_user_id,
                turn, epoch, purpose, provider, model, state)
            SELECT {}, fence.tenant_id, runs.api_key_id, fence.agent_id, fence.session_id, runs.id,
                fence.end_user_id, {}, fence.epoch, {}, {}, {}, 'open'
            FROM fence, runs WHERE runs.id = {}
            """,
            to_uuid(opened.id),
            opened.turn,
            opened.purpose,
            opened.provider,
            opened.model,
            to_uuid(fence.run_id),
        )
    if step.closed is not None:
        closed, usage = step.closed, step.closed.usage
        parts.add(
            "closed_entry",
            """
            UPDATE usage_entries SET state = {}, input_tokens = {}, cache_read_tokens = {},
                cache_write_tokens = {}, output_tokens = {}, reasoning_tokens = {}, cost_usd = {},
                price_source = {}, estimated = {},
                stop = {}, native_stop = {}, error_code = {}, latency_ms = {}, first_token_ms = {}, raw = {},
                closed_at = clock_timestamp()
            FROM fence WHERE id = {} AND state = 'open'
            """,
            "abandoned" if closed.abandoned else "closed",
            usage.input_tokens,
            usage.cache_read_tokens,
            usage.cache_write_tokens,
            usage.output_tokens,
            usage.reasoning_tokens,
            closed.cost_usd,
            closed.price_source,
            closed.estimated,
            closed.stop,
            closed.native_stop,
            closed.error_code,
            closed.latency_ms,
            closed.first_token_ms,
            encode_json(usage.raw) if usage.raw else None,
            to_uuid(closed.id),
        )


def _add_run(parts: Parts, fence: Fence, step: Step) -> None:
    if isinstance(step.ending, CloseRun):
        _add_close(parts, fence, step, step.ending)
        return
    state = "running"
    if isinstance(step.ending, WaitForClient):
        state = "waiting"
    elif isinstance(step.ending, RequeueRun):
        state = "queued"
    progressed = _has_progressed(step)
    takeover = isinstance(step.ending, RequeueRun) and step.ending.takeover
    parts.add(
        "changed_run",
        """
        UPDATE runs SET state = {}, turns = coalesce({}, turns),
            worker_id = CASE WHEN {} THEN worker_id END,
            deadline_at = CASE WHEN {} THEN NULL ELSE deadline_at END,
            wait_until = clock_timestamp() + make_interval(secs => {}),
            takeovers = takeovers + {},
            takeovers_since_progress = CASE WHEN {} THEN 0 ELSE takeovers_since_progress + {} END
        FROM fence WHERE id = {}
        """,
        state,
        step.turns,
        state == "running",
        state == "waiting",
        step.ending.timeout_s if isinstance(step.ending, WaitForClient) else None,
        int(takeover),
        progressed,
        int(takeover),
        to_uuid(fence.run_id),
    )


def _has_progressed(step: Step) -> bool:
    """True for an answer, a memory or a result of a tool: the run is past what its worker was lost at."""
    if step.memory is not None:
        return True
    has_answer = any(stored.message.role == "assistant" for stored in step.messages)
    return has_answer or any(call.state == "done" and call.outcome != "unknown" for call in step.calls)


def _add_close(parts: Parts, fence: Fence, step: Step, ending: CloseRun) -> None:
    parts.add(
        "closed_run",
        """
        UPDATE runs SET state = 'closed', turns = coalesce({}, turns), worker_id = NULL, wait_until = NULL,
            stop_reason = {}, closed_at = clock_timestamp()
        FROM fence WHERE id = {} RETURNING runs.id
        """,
        step.turns,
        encode_json(ending.stop_reason),
        to_uuid(fence.run_id),
    )
    if ending.next_run is None:
        return
    next_id = to_uuid(ending.next_run.id)
    prompt_ids = [to_uuid(prompt_id) for prompt_id in ending.next_run.prompt_ids]
    # Reads from `closed_run`, so that it runs after it: a session has one open run at most.
    parts.add(
        "next_run",
        """
        INSERT INTO runs (id, tenant_id, session_id, state, api_key_id, options, after_seq)
        SELECT {}, fence.tenant_id, fence.session_id, 'queued', prompts.api_key_id,
            CASE WHEN prompts.options IS NOT NULL THEN json_build_object('overrides', prompts.options) END,
            fence.last_seq
        FROM fence, closed_run, prompts WHERE prompts.id = {}
        RETURNING id
        """,
        next_id,
        prompt_ids[0],
    )
    parts.add(
        "bound_prompts",
        "UPDATE prompts SET run_id = next_run.id FROM next_run WHERE prompts.id = ANY({}::uuid[])",
        prompt_ids,
    )
