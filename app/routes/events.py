"""The event log of a session: what clients put into it, and how they read it."""

from functools import partial
from typing import Annotated, Any, Literal, cast

import msgspec
from litestar import get, post
from litestar.di import NamedDependency
from litestar.params import FromPath, HeaderParameter, JSONBody, QueryParameter
from msgspec import Meta, Struct

from agents.events import (
    AnyEvent,
    SystemMessage,
    UserCustomToolResult,
    UserInterrupt,
    UserMessage,
    UserToolConfirmation,
)
from agents.log import LoggedEvent
from agents.types import DeltaKind
from app.auth import SESSION_TOKENS, Principal
from app.errors import InvalidRequest
from app.http_json import ApiRequest
from app.idempotency import once
from app.pagination import After, Before, Cursor, From, Limit, Page, Until, aware, both_forms
from app.resources import Resources
from app.routes.admissions import announce
from app.routes.inputs import (
    MAX_EVENTS,
    EventParam,
    model_of_session,
    require_image_files,
    require_sight,
    to_inputs,
)
from app.routes.positions import Direction, position_page, read_position
from app.streaming.frames import parse_cursor
from app.streaming.response import EventStream, NothingFollows
from db.admission import Admission, admit
from db.ids import parse_id
from db.log import list_events
from db.sessions import require_session
from db.transcript import get_events
from providers.types import JsonObject

DEFAULT_EVENTS = 100
SESSION_HEADER = "armillary-session-id"
RUN_HEADER = "armillary-run-id"
NOTHING_LEFT = {204: "The reader has everything, and nothing more comes by itself."}
SentEvent = UserMessage | SystemMessage | UserInterrupt | UserCustomToolResult | UserToolConfirmation

AfterEvent = Annotated[
    str | None,
    QueryParameter(name="after", description="Only what follows this `seq`, or this `id` of a stream."),
]
UntilIdle = Annotated[
    Literal["idle"] | None,
    QueryParameter(
        name="until",
        description="`idle`: end when nothing more comes by itself. Without `after` begin at the newest run.",
    ),
]
Deltas = Annotated[
    list[DeltaKind] | None,
    QueryParameter(name="event_deltas", description="Kinds of events to preview while they are produced."),
]
DeltasInBrackets = Annotated[
    list[DeltaKind] | None, QueryParameter(name="event_deltas[]", description="As `event_deltas`.")
]
LastEventId = Annotated[
    str | None, HeaderParameter(name="Last-Event-ID", description="The last `id` that the reader has.")
]
Types = Annotated[list[str] | None, QueryParameter(name="types", description="Only events of these types.")]
TypesInBrackets = Annotated[list[str] | None, QueryParameter(name="types[]", description="As `types`.")]


Beta = Annotated[
    str | None,
    HeaderParameter(
        name="anthropic-beta",
        description="Sent by clients of the hosted agent API: they get only the events that they know.",
    ),
]

# A strict client of the hosted API takes no event that it does not know, and no deltas of thinking.
HOSTED_DELTAS: frozenset[DeltaKind] = frozenset({"agent.message"})
HOSTED_TYPES = (
    "user.message",
    "user.interrupt",
    "user.custom_tool_result",
    "user.tool_confirmation",
    "agent.thinking",
    "agent.message",
    "agent.tool_use",
    "agent.tool_result",
    "agent.custom_tool_use",
    "session.status_running",
    "session.status_idle",
    "session.status_rescheduled",
    "session.status_terminated",
    "session.updated",
    "session.error",
    "span.model_request_start",
    "span.model_request_end",
)


class EventsSend(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What goes into the log, in this order and all or nothing."""

    events: Annotated[tuple[EventParam, ...], Meta(min_length=1, max_length=MAX_EVENTS)]


class EventsSent(Struct, frozen=True, kw_only=True):
    """The events as they are stored."""

    data: list[SentEvent]


@post("/v1/sessions/{session_id:str}/events", opt=SESSION_TOKENS, status_code=200, tags=["Events"])
async def send_events(
    request: ApiRequest,
    session_id: FromPath[str],
    data: JSONBody[EventsSend],
    principal: NamedDependency[Principal],
    resources: NamedDependency[Resources],
) -> EventsSent:
    """Stores events of the client: prompts, interrupts, approvals, results of tools that it runs.

    Answered when they are stored, and with that certain to be handled. A prompt starts a run when the session
    is free, and does what its `delivery` says when it is not.
    """
    inputs = to_inputs(data.events, resources)
    await require_sight(resources, inputs, partial(model_of_session, resources, principal, session_id))
    admission: Admission | None = None
    async with resources.database.transaction(principal.tenant_id) as tx:

        async def make() -> JsonObject:
            nonlocal admission
            await require_image_files(tx, inputs)
            admission = await admit(
                tx,
                session_id=session_id,
                inputs=inputs,
                api_key_id=principal.public_key_id,
                bounds=resources.queue_bounds,
            )
            return {"session_id": session_id, "seqs": [event.seq for event in admission.answered]}

        made = await once(tx, request, make)
        if admission is None:  # this request came again
            stored = await get_events(tx, session=parse_id("sess", session_id), seqs=made["seqs"])
        else:
            stored = admission.answered
    await announce(resources, admission)
    return EventsSent(data=cast("list[SentEvent]", [as_stored(event) for event in stored]))


@get("/v1/sessions/{session_id:str}/events", opt=SESSION_TOKENS, tags=["Events"])
async def list_session_events(
    *,
    session_id: FromPath[str],
    principal: NamedDependency[Principal],
    resources: NamedDependency[Resources],
    after: AfterEvent = None,
    types: Types = None,
    types_in_brackets: TypesInBrackets = None,
    created_after: After = None,
    created_from: From = None,
    created_before: Before = None,
    created_until: Until = None,
    limit: Limit = DEFAULT_EVENTS,
    page: Cursor = None,
    order: Direction = "asc",
    beta: Beta = None,
) -> Page[AnyEvent]:
    """Lists the log, oldest first unless `order` says otherwise: the same bytes that a stream delivers."""
    after_seq, position = read_after(after), read_position(page)
    async with resources.database.transaction(principal.tenant_id) as tx:
        await require_session(tx, session_id)
        rows = await list_events(
            tx,
            session_id,
            after_seq=position if position is not None and order == "asc" else after_seq,
            before_seq=position if order == "desc" else None,
            types=_wanted_types(both_forms(types, types_in_brackets), beta),
            created_gt=aware(created_after),
            created_gte=aware(created_from),
            created_lt=aware(created_before),
            created_lte=aware(created_until),
            order=order,
            limit=limit + 1,
        )
    return position_page(rows, limit=limit, view=as_stored, place=lambda row: row.seq)


@get(
    "/v1/sessions/{session_id:str}/events/stream",
    opt={**SESSION_TOKENS, "event_stream": True, "other_answers": NOTHING_LEFT},
    tags=["Events"],
)
async def stream_session_events(
    *,
    session_id: FromPath[str],
    principal: NamedDependency[Principal],
    resources: NamedDependency[Resources],
    after: AfterEvent = None,
    until: UntilIdle = None,
    event_deltas: Deltas = None,
    event_deltas_in_brackets: DeltasInBrackets = None,
    types: Types = None,
    types_in_brackets: TypesInBrackets = None,
    last_event_id: LastEventId = None,
    beta: Beta = None,
) -> EventStream:
    """Streams the log as Server-Sent Events: first what `after` lacks, then live, without gap or repetition.

    Without `after` it begins at this moment. A reader that comes back with `Last-Event-ID` goes on where it
    was; the header wins over `after`. Previews come only for the kinds that are asked for. With nothing left
    to come the answer is 204.
    """
    parse_id("sess", session_id)
    deltas = frozenset((*(event_deltas or ()), *(event_deltas_in_brackets or ())))
    wanted = _wanted_types(both_forms(types, types_in_brackets), beta)
    stream = await resources.hub.open(
        session_id=session_id,
        tenant_id=principal.tenant_id,
        after=after,
        last_event_id=last_event_id,
        until_idle=until == "idle",
        deltas=deltas if beta is None else deltas & HOSTED_DELTAS,
        types=frozenset(wanted) if wanted else None,
    )
    if stream is None:
        return NothingFollows()
    stream.headers[SESSION_HEADER] = session_id
    return stream


def _wanted_types(asked: list[str], beta: str | None) -> list[str]:
    """The types to show; empty: all. A client of the hosted API that names none gets those that it knows."""
    return asked or (list(HOSTED_TYPES) if beta is not None else [])


def read_after(text: str | None) -> int | None:
    """The number of the event that a cursor names; None without one. Raises: InvalidRequest."""
    if text is None:
        return None
    cursor = parse_cursor(text)
    if cursor is None:
        raise InvalidRequest(
            "`after` is neither the `seq` of an event nor an `id` of a stream.", field="after"
        )
    return cursor.seq


def as_stored(event: LoggedEvent) -> AnyEvent:
    """The event's own bytes where an event is expected, so that they are sent as they were stored."""
    return cast("AnyEvent", msgspec.Raw(event.json))


ROUTES: list[Any] = [send_events, list_session_events, stream_session_events]
