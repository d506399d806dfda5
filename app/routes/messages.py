"""The transcript of a session."""

from datetime import datetime
from typing import Annotated, Literal

from litestar import get
from litestar.di import NamedDependency
from litestar.params import FromPath, QueryParameter
from msgspec import Meta, Struct

from app.auth import SESSION_TOKENS, Principal
from app.pagination import DEFAULT_LIMIT, Cursor, Limit, Page
from app.resources import Resources
from app.routes.positions import Direction, position_page, read_position
from db.sessions import require_session
from db.transcript import TranscriptMessage, list_messages
from providers.types import Block, Role

IncludeRolledBack = Annotated[
    bool,
    QueryParameter(name="include_rolled_back", description="Also what a rollback has taken from the model."),
]


class MessageView(Struct, frozen=True, kw_only=True):
    """A transcript entry. A `tool` message holds all results for the assistant message before it."""

    id: str
    type: Literal["message"] = "message"
    session_id: str
    run_id: str | None
    position: Annotated[int, Meta(ge=1, description="1, 2, 3 … within the session.")]
    role: Role
    content: tuple[Block, ...]
    created_at: datetime
    rolled_back_at: Annotated[datetime | None, Meta(description="Since when the model no longer sees it.")]


@get("/v1/sessions/{session_id:str}/messages", opt=SESSION_TOKENS, tags=["Transcript"])
async def list_session_messages(
    *,
    session_id: FromPath[str],
    principal: NamedDependency[Principal],
    resources: NamedDependency[Resources],
    limit: Limit = DEFAULT_LIMIT,
    page: Cursor = None,
    order: Direction = "asc",
    include_rolled_back: IncludeRolledBack = False,
) -> Page[MessageView]:
    """Lists the transcript as the model sees it, oldest first unless `order` says otherwise."""
    async with resources.database.transaction(principal.tenant_id) as tx:
        session = await require_session(tx, session_id)
        rows = await list_messages(
            tx,
            session=session,
            limit=limit + 1,
            order=order,
            after=read_position(page),
            include_rolled_back=include_rolled_back,
        )
    return position_page(rows, limit=limit, view=view_message, place=lambda row: row.position)


def view_message(row: TranscriptMessage) -> MessageView:
    return MessageView(
        id=row.id,
        session_id=row.session_id,
        run_id=row.run_id,
        position=row.position,
        role=row.role,
        content=row.blocks,
        created_at=row.created_at,
        rolled_back_at=row.rolled_back_at,
    )


ROUTES = [list_session_messages]
