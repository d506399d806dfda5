"""The memories of a session: made on request, listed, and an earlier one put back into effect."""

from datetime import datetime
from typing import Annotated, Literal

from litestar import get, post
from litestar.di import NamedDependency
from litestar.params import FromPath, JSONBody
from msgspec import Meta, Struct

from app.auth import SESSION_TOKENS, Principal
from app.http_json import ApiRequest
from app.idempotency import once
from app.pagination import DEFAULT_LIMIT, Created, Cursor, Limit, Page, PageQuery, make_page, read_cursor
from app.resources import Resources
from app.routes.admissions import announce
from app.routes.runs import RunView, view_run
from db.admission import Admission
from db.ids import to_uuid
from db.memories import MemoryRecord, compact_session, get_memory, list_memories, restore_memory
from db.runs import get_run
from db.sessions import require_session
from providers.types import JsonObject


class MemoryView(Struct, frozen=True, kw_only=True):
    """A summary of all messages up to `position`. The one in effect is sent to the model in their place."""

    id: str
    type: Literal["memory"] = "memory"
    session_id: str
    position: Annotated[int, Meta(ge=1, description="The last message that it covers.")]
    text: str
    is_in_effect: bool
    created_at: datetime


class CompactSession(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`instructions`: what the memory is to keep or to leave out, in your words."""

    instructions: Annotated[str, Meta(max_length=4_096)] | None = None


@get("/v1/sessions/{session_id:str}/memories", opt=SESSION_TOKENS, tags=["Transcript"])
async def list_session_memories(
    session_id: FromPath[str],
    principal: NamedDependency[Principal],
    resources: NamedDependency[Resources],
    limit: Limit = DEFAULT_LIMIT,
    page: Cursor = None,
) -> Page[MemoryView]:
    """Lists the memories that compaction has made, newest first."""
    async with resources.database.transaction(principal.tenant_id) as tx:
        session = await require_session(tx, session_id)
        query = PageQuery(limit=limit, before=None if page is None else read_cursor(page), created=Created())
        rows = await list_memories(tx, session=session, limit=query.fetch, after=query.before)
    return make_page(rows, query, view_memory, lambda row: (row.created_at, to_uuid(row.id)))


@post("/v1/sessions/{session_id:str}/compact", opt=SESSION_TOKENS, status_code=202, tags=["Transcript"])
async def compact(
    request: ApiRequest,
    session_id: FromPath[str],
    principal: NamedDependency[Principal],
    resources: NamedDependency[Resources],
    data: JSONBody[CompactSession | None] = None,
) -> RunView:
    """Queues a run that replaces older messages by a memory in what the model is sent.

    The run asks the model for nothing else, and closes with `end_turn`; `agent.thread_context_compacted`
    tells what has come of it. Refused while a run is open, and when there is nothing new to fold.
    """
    admission: Admission | None = None
    async with resources.database.transaction(principal.tenant_id) as tx:

        async def make() -> JsonObject:
            nonlocal admission
            admission = await compact_session(
                tx,
                session_id=session_id,
                instructions=None if data is None else data.instructions,
                api_key_id=principal.public_key_id,
                bounds=resources.queue_bounds,
            )
            return {"run_id": admission.run_id}

        made = await once(tx, request, make)
        run = await get_run(tx, made["run_id"])
    await announce(resources, admission)
    return view_run(run)


@post(
    "/v1/sessions/{session_id:str}/memories/{memory_id:str}/restore",
    opt=SESSION_TOKENS,
    status_code=200,
    tags=["Transcript"],
)
async def restore(
    request: ApiRequest,
    session_id: FromPath[str],
    memory_id: FromPath[str],
    principal: NamedDependency[Principal],
    resources: NamedDependency[Resources],
) -> MemoryView:
    """Puts this memory into effect again: the model is sent it, and each message that came after it.

    Refused while a run is open, and when the memory tells of messages that were rolled back since.
    """
    admission: Admission | None = None
    async with resources.database.transaction(principal.tenant_id) as tx:

        async def make() -> JsonObject:
            nonlocal admission
            admission = await restore_memory(tx, session_id=session_id, memory_id=memory_id)
            return {"memory_id": memory_id}

        await once(tx, request, make)
        memory = await get_memory(tx, session_id=session_id, memory_id=memory_id)
    await announce(resources, admission)
    return view_memory(memory)


def view_memory(row: MemoryRecord) -> MemoryView:
    return MemoryView(
        id=row.id,
        session_id=row.session_id,
        position=row.position,
        text=row.text,
        is_in_effect=row.is_in_effect,
        created_at=row.created_at,
    )


ROUTES = [list_session_memories, compact, restore]
