"""Runs: what became of a prompt, waiting for it, and stopping it."""

from datetime import datetime
from typing import Annotated, Literal

from litestar import get, post
from litestar.di import NamedDependency
from litestar.params import FromPath, JSONBody, QueryParameter
from msgspec import Meta, Struct

from agents.config import RunOverrides
from agents.events import CancelMode, StopReason
from app.auth import SESSION_TOKENS, Principal
from app.http_json import ApiRequest
from app.idempotency import once
from app.pagination import (
    DEFAULT_LIMIT,
    Created,
    Cursor,
    Limit,
    Page,
    PageQuery,
    make_page,
    read_cursor,
)
from app.resources import Resources
from app.routes.admissions import announce
from app.routes.inputs import CANCEL_MODE
from app.routes.override_inputs import Overridable, to_overrides
from app.routes.positions import Direction
from app.routes.settling import MAX_WAIT_S, wait_for_run, while_connected
from db.admission import Admission, cancel_run, continue_session
from db.ids import to_uuid
from db.runs import Run, RunResult, RunState, RunToolResult, RunUsage, get_run, list_runs, run_result
from db.sessions import require_session
from providers.types import JsonObject

WaitSeconds = Annotated[
    float,
    QueryParameter(name="timeout_s", ge=0, le=MAX_WAIT_S, description="How long to wait at most."),
]


class RunResultView(Struct, frozen=True, kw_only=True):
    """What the run has come to: the text of its last assistant message, and its tool results by tool name.

    `data`: what a tool has returned directly, see `direct_return`. `raw_usage`: what the model's API said of
    each request, in its own words.
    """

    text: str
    data: JsonObject | None
    turns: int
    tool_results: dict[str, list[RunToolResult]]
    usage: RunUsage
    raw_usage: list[JsonObject]


class RunView(Struct, frozen=True, kw_only=True):
    """The handling of one prompt, or of several that were posted together.

    `stop_reason` is set when the run is closed. While it waits for the client it says `requires_action`, with
    the ids of the tool uses to answer. `result` is null until one of the two is the case, and in lists.
    """

    id: str
    type: Literal["run"] = "run"
    session_id: str
    state: RunState
    stop_reason: StopReason | None
    prompt_ids: tuple[str, ...]
    overrides: Annotated[RunOverrides, Meta(description="What its prompt changed of the agent for it.")]
    turns: Annotated[int, Meta(description="Requests to the model so far; retries do not count.")]
    after_seq: Annotated[int, Meta(description="Place in the log before the run: `after` for its events.")]
    queue_position: Annotated[
        int | None, Meta(description="1: the run that has waited longest of yours. Null: it is not queued.")
    ]
    cancel_requested_at: datetime | None
    cancel_mode: CancelMode | None
    queued_at: datetime
    started_at: datetime | None
    wait_until: Annotated[
        datetime | None,
        Meta(description="When it is closed unless you answer; null: it does not wait, or for ever."),
    ]
    closed_at: datetime | None
    result: RunResultView | None = None


class CancelRun(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """When the run is stopped, and why, for the log."""

    mode: Annotated[CancelMode, CANCEL_MODE] = "now"
    reason: Annotated[str, Meta(max_length=1000)] | None = None


@get("/v1/runs/{run_id:str}", opt=SESSION_TOKENS, tags=["Runs"])
async def get_one_run(
    run_id: FromPath[str], principal: NamedDependency[Principal], resources: NamedDependency[Resources]
) -> RunView:
    """Shows a run, with its result when it is closed or waits for the client."""
    run, result = await wait_for_run(resources, principal, run_id, timeout_s=0)
    return view_run(run, result)


@get("/v1/runs/{run_id:str}/wait", opt=SESSION_TOKENS, tags=["Runs"])
async def wait_for_one_run(
    run_id: FromPath[str],
    request: ApiRequest,
    principal: NamedDependency[Principal],
    resources: NamedDependency[Resources],
    timeout_s: WaitSeconds = 60.0,
) -> RunView:
    """Answers when the run is closed or waits for the client, or else as it stands after `timeout_s`."""
    waiting = wait_for_run(resources, principal, run_id, timeout_s=timeout_s)
    run, result = await while_connected(request, waiting)
    return view_run(run, result)


@get("/v1/sessions/{session_id:str}/runs", opt=SESSION_TOKENS, tags=["Runs"])
async def list_session_runs(
    *,
    session_id: FromPath[str],
    principal: NamedDependency[Principal],
    resources: NamedDependency[Resources],
    limit: Limit = DEFAULT_LIMIT,
    page: Cursor = None,
    order: Direction = "desc",
) -> Page[RunView]:
    """Lists the runs of a session, newest first unless `order` says otherwise."""
    query = PageQuery(limit=limit, before=None if page is None else read_cursor(page), created=Created())
    async with resources.database.transaction(principal.tenant_id) as tx:
        session = await require_session(tx, session_id)
        rows = await list_runs(tx, session=session, limit=query.fetch, order=order, after=query.before)
    return make_page(rows, query, view_run, lambda run: (run.queued_at, to_uuid(run.id)))


@post("/v1/runs/{run_id:str}/cancel", opt=SESSION_TOKENS, status_code=200, tags=["Runs"])
async def cancel_one_run(
    run_id: FromPath[str],
    request: ApiRequest,
    principal: NamedDependency[Principal],
    resources: NamedDependency[Resources],
    data: JSONBody[CancelRun | None] = None,
) -> RunView:
    """Stops a run and keeps what it has. A run that is closed stays as it is.

    With `now` a run that no worker has is closed in the answer already, and one that has closes a moment
    later. With `after_turn` the model request in progress and its tool calls are finished first.
    """
    admission: Admission | None = None
    async with resources.database.transaction(principal.tenant_id) as tx:
        principal.check_session(to_uuid((await get_run(tx, run_id)).session_id))

        async def make() -> JsonObject:
            nonlocal admission
            asked = data or CancelRun()
            admission = await cancel_run(tx, run_id=run_id, mode=asked.mode, reason=asked.reason)
            return {"run_id": run_id}

        await once(tx, request, make)
        run = await get_run(tx, run_id)
        result = await run_result(tx, run_id) if run.is_settled else None
    await announce(resources, admission)
    return view_run(run, result)


class ContinueSession(Overridable, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the run is to do differently from its agent."""


@post("/v1/sessions/{session_id:str}/continue", opt=SESSION_TOKENS, status_code=202, tags=["Runs"])
async def continue_one_session(
    request: ApiRequest,
    session_id: FromPath[str],
    principal: NamedDependency[Principal],
    resources: NamedDependency[Resources],
    data: JSONBody[ContinueSession | None] = None,
) -> RunView:
    """Queues a run without a new prompt: the model is asked from where the transcript stands.

    For a run that was cancelled, failed, or reached a limit. Refused while a run is open, and when the
    transcript ends on nothing that the model could answer.
    """
    overrides = to_overrides(data or ContinueSession(), resources)
    admission: Admission | None = None
    async with resources.database.transaction(principal.tenant_id) as tx:

        async def make() -> JsonObject:
            nonlocal admission
            admission = await continue_session(
                tx,
                session_id=session_id,
                overrides=overrides,
                api_key_id=principal.public_key_id,
                bounds=resources.queue_bounds,
            )
            return {"run_id": admission.run_id}

        made = await once(tx, request, make)
        run = await get_run(tx, made["run_id"])
    await announce(resources, admission)
    return view_run(run)


def view_run(run: Run, result: RunResult | None = None) -> RunView:
    return RunView(
        id=run.id,
        session_id=run.session_id,
        state=run.state,
        stop_reason=run.stop_reason,
        prompt_ids=run.prompt_ids,
        overrides=run.options.overrides,
        turns=run.turns,
        after_seq=run.after_seq,
        queue_position=run.queue_position,
        cancel_requested_at=run.cancel_requested_at,
        cancel_mode=run.cancel_mode,
        queued_at=run.queued_at,
        started_at=run.started_at,
        wait_until=run.wait_until,
        closed_at=run.closed_at,
        result=None if result is None else view_result(result),
    )


def view_result(result: RunResult) -> RunResultView:
    return RunResultView(
        text=result.text,
        data=result.data,
        turns=result.turns,
        raw_usage=list(result.raw_usage),
        tool_results={name: list(results) for name, results in result.tool_results.items()},
        usage=result.usage,
    )


ROUTES = [get_one_run, wait_for_one_run, list_session_runs, cancel_one_run, continue_one_session]
