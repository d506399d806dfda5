"""The short way: a session, a prompt and its answer in one call."""

from functools import partial
from typing import Annotated, Any, Literal

from litestar import Response, post
from litestar.di import NamedDependency
from litestar.params import FromPath, JSONBody
from msgspec import Meta, Struct

from agents.events import Delivery, StopReason
from agents.types import DeltaKind
from app.auth import Principal
from app.errors import InvalidField
from app.http_json import ApiRequest
from app.idempotency import once
from app.resources import Resources
from app.routes.admissions import announce
from app.routes.agents import Metadata
from app.routes.events import NOTHING_LEFT, RUN_HEADER, SESSION_HEADER
from app.routes.inputs import (
    DELIVERY,
    Content,
    TextParam,
    model_of_agent,
    model_of_session,
    require_image_files,
    require_sight,
    to_prompt,
    to_prompt_input,
)
from app.routes.override_inputs import Overridable, to_overrides
from app.routes.runs import RunResultView, view_result
from app.routes.sessions import EndUserId, Title
from app.routes.settling import MAX_WAIT_S, wait_for_prompt, while_connected
from app.streaming.frames import Cursor
from app.streaming.response import EventStream, NothingFollows
from db import sessions
from db.admission import Admission, admit
from db.engine import Transaction
from db.runs import Run, RunResult, RunState, RunToolResult, RunUsage, get_run, prompt_outcome
from providers.types import JsonObject

ALL_DELTAS: tuple[DeltaKind, ...] = (
    "agent.message",
    "agent.thinking",
    "agent.tool_use",
    "tool.progress",
    "model.status",
)


class AgentPrompt(Overridable, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A prompt for an agent, in a new session or in `session_id`.

    `stream`: answer with Server-Sent Events of the run; `event_deltas` names the previews in it, all kinds
    when left out. Else the answer waits for the run up to `wait_s` seconds. `title`, `end_user_id` and
    `metadata` belong to a new session. What it changes of the agent holds for its run alone.
    """

    prompt: Annotated[str, Meta(min_length=1)] | Content
    session_id: str | None = None
    delivery: Annotated[Delivery | None, DELIVERY] = None
    stream: bool = False
    event_deltas: Annotated[tuple[DeltaKind, ...], Meta(max_length=16)] | None = None
    wait_s: Annotated[float, Meta(ge=0, le=MAX_WAIT_S)] = 60.0
    title: Title | None = None
    end_user_id: EndUserId | None = None
    metadata: Metadata | None = None


class PromptAnswer(Struct, frozen=True, kw_only=True):
    """What became of the prompt.

    `status` is that of its run, or `pending` while it waits behind another run, or `withdrawn`. With 200 the
    run is closed or waits for the client (`stop_reason.type` is `requires_action`), and there are `text`,
    `data` of a direct return, `tool_results` by tool name and `usage`. With 202 it goes on:
    `GET /v1/runs/{run_id}/wait` or a stream tells its end.
    """

    type: Literal["prompt_answer"] = "prompt_answer"
    session_id: str
    run_id: str | None
    prompt_id: str
    status: RunState | Literal["pending", "withdrawn"]
    stop_reason: StopReason | None = None
    text: str | None = None
    data: JsonObject | None = None
    tool_results: dict[str, list[RunToolResult]] | None = None
    usage: RunUsage | None = None


class StreamAnswer(Response[Any]):
    """A stream where a handler's other answer is JSON."""

    def __init__(self, stream: EventStream) -> None:
        super().__init__(None)
        self._stream = stream

    def to_asgi_response(self, *_: Any, **__: Any) -> Any:
        return self._stream


@post(
    "/v1/agents/{agent_id:str}/prompt",
    opt={"event_stream": True, "other_answers": {202: "The run goes on."} | NOTHING_LEFT},
    status_code=200,
    tags=["Agents"],
)
async def prompt_agent(
    *,
    agent_id: FromPath[str],
    request: ApiRequest,
    data: JSONBody[AgentPrompt],
    principal: NamedDependency[Principal],
    resources: NamedDependency[Resources],
) -> Response[PromptAnswer]:
    """Gives an agent a prompt, and answers with what came of it: as a stream, or when the run is settled.

    A client that disconnects cancels nothing. The same `Idempotency-Key` again gives the answer of the same
    run: a stream begins once more at the run's first event, or goes on behind `Last-Event-ID`.
    """
    made = await _admit(agent_id, request, data, principal, resources)
    if data.stream:
        kinds = ALL_DELTAS if data.event_deltas is None else data.event_deltas
        return StreamAnswer(await _open_stream(request, resources, principal, made, frozenset(kinds)))
    waiting = wait_for_prompt(resources, principal, made["prompt_id"], timeout_s=data.wait_s)
    run, result = await while_connected(request, waiting)
    if run is None:
        return await _without_run(resources, principal, made)
    answer = _answer(made, run, result)
    return Response(answer, status_code=202 if result is None else 200, headers=_headers(made, run.id))


async def _admit(
    agent_id: str, request: ApiRequest, data: AgentPrompt, principal: Principal, resources: Resources
) -> JsonObject:
    """Ids of the session and the prompt, and the prompt's place in the log."""
    content = (TextParam(text=data.prompt),) if isinstance(data.prompt, str) else data.prompt
    prompt = to_prompt(content, field="prompt")
    inputs = (to_prompt_input(prompt, data.delivery, to_overrides(data, resources)),)
    if data.session_id is None:
        find_model = partial(model_of_agent, resources, principal, agent_id)
    else:
        find_model = partial(model_of_session, resources, principal, data.session_id)
        _refuse_session_fields(data)
    await require_sight(resources, inputs, find_model)
    admission: Admission | None = None
    async with resources.database.transaction(principal.tenant_id) as tx:

        async def make() -> JsonObject:
            nonlocal admission
            session_id = await _session_for(tx, agent_id, data)
            await require_image_files(tx, inputs)
            admission = await admit(
                tx,
                session_id=session_id,
                inputs=inputs,
                api_key_id=principal.public_key_id,
                bounds=resources.queue_bounds,
            )
            stored = admission.answered[0]
            return {"session_id": session_id, "prompt_id": stored.id, "seq": stored.seq}

        made = await once(tx, request, make)
    await announce(resources, admission)
    return made


async def _session_for(tx: Transaction, agent_id: str, data: AgentPrompt) -> str:
    """The given session of this agent, or a new one. Raises: NotFound, InvalidField, Conflict."""
    if data.session_id is None:
        return await sessions.create_session(
            tx,
            agent_id=agent_id,
            version=None,
            title=data.title,
            end_user_id=data.end_user_id,
            metadata=data.metadata,
        )
    session = await sessions.get_session(tx, data.session_id)
    if session.agent_id != agent_id:
        raise InvalidField("session_id: this session belongs to another agent.", field="session_id")
    return session.id


def _refuse_session_fields(data: AgentPrompt) -> None:
    for name in ("title", "end_user_id", "metadata"):
        if getattr(data, name) is not None:
            raise InvalidField(f"{name}: can only be set for a new session.", field=name)


async def _open_stream(
    request: ApiRequest,
    resources: Resources,
    principal: Principal,
    made: JsonObject,
    kinds: frozenset[DeltaKind],
) -> EventStream:
    """The stream of the prompt's run, or of the log from the prompt on while it has no run."""
    async with resources.database.transaction(principal.tenant_id) as tx:
        outcome = await prompt_outcome(tx, made["prompt_id"])
        run = None if outcome.run_id is None else await get_run(tx, outcome.run_id)
    stream = await resources.hub.open(
        session_id=made["session_id"],
        tenant_id=principal.tenant_id,
        after=Cursor(seq=made["seq"] - 1 if run is None else run.after_seq),
        last_event_id=request.headers.get("last-event-id"),
        until_idle=True,
        deltas=kinds,
    )
    if stream is None:
        return NothingFollows()
    for name, value in _headers(made, None if run is None else run.id).items():
        stream.headers[name] = value
    return stream


async def _without_run(
    resources: Resources, principal: Principal, made: JsonObject
) -> Response[PromptAnswer]:
    """The answer for a prompt that was withdrawn, or still waits behind another run."""
    async with resources.database.transaction(principal.tenant_id) as tx:
        outcome = await prompt_outcome(tx, made["prompt_id"])
    is_withdrawn = outcome.state == "withdrawn"
    answer = PromptAnswer(
        session_id=made["session_id"],
        run_id=outcome.run_id,
        prompt_id=made["prompt_id"],
        status="withdrawn" if is_withdrawn else "pending",
    )
    headers = _headers(made, outcome.run_id)
    return Response(answer, status_code=200 if is_withdrawn else 202, headers=headers)


def _answer(made: JsonObject, run: Run, result: RunResult | None) -> PromptAnswer:
    view: RunResultView | None = None if result is None else view_result(result)
    return PromptAnswer(
        session_id=run.session_id,
        run_id=run.id,
        prompt_id=made["prompt_id"],
        status=run.state,
        stop_reason=run.stop_reason,
        text=None if view is None else view.text,
        data=None if view is None else view.data,
        tool_results=None if view is None else view.tool_results,
        usage=None if view is None else view.usage,
    )


def _headers(made: JsonObject, run_id: str | None) -> dict[str, str]:
    headers = {SESSION_HEADER: str(made["session_id"])}
    return headers if run_id is None else headers | {RUN_HEADER: run_id}


ROUTES = [prompt_agent]
