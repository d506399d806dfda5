"""Prompts of a session: what waits to be taken up can be edited and taken back."""

from datetime import datetime
from functools import partial
from typing import Annotated, Literal

from litestar import delete, get, post
from litestar.di import NamedDependency
from litestar.params import FromPath, JSONBody, QueryParameter
from msgspec import Struct

from agents.events import PromptDelivery, UserContent
from app.auth import SESSION_TOKENS, Principal
from app.http_json import ApiRequest
from app.idempotency import once
from app.pagination import DEFAULT_LIMIT, Cursor, Limit, Page
from app.resources import Resources
from app.routes.admissions import announce
from app.routes.inputs import Content, model_of_session, require_image_files, require_sight, to_prompt
from app.routes.positions import Direction, position_page, read_position
from db.admission import Admission, PromptInput, edit_prompt, withdraw_prompt
from db.runs import PromptState
from db.sessions import require_session
from db.transcript import Prompt, get_prompt, list_prompts
from providers.types import JsonObject

States = Annotated[
    list[PromptState] | None, QueryParameter(name="states", description="Only prompts in these states.")
]
StatesInBrackets = Annotated[
    list[PromptState] | None, QueryParameter(name="states[]", description="As `states`.")
]


class PromptView(Struct, frozen=True, kw_only=True):
    """User input. `id` is that of its `user.message` event; prompts of one request share `batch_id`.

    `run_id` is null until a run has been made for it, or has taken it up.
    """

    id: str
    type: Literal["prompt"] = "prompt"
    session_id: str
    batch_id: str
    run_id: str | None
    seq: int
    state: PromptState
    delivery: PromptDelivery
    content: tuple[UserContent, ...]
    created_at: datetime
    updated_at: datetime


class EditPrompt(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The prompt's whole new content."""

    content: Content


@get("/v1/sessions/{session_id:str}/prompts", opt=SESSION_TOKENS, tags=["Prompts"])
async def list_session_prompts(
    *,
    session_id: FromPath[str],
    principal: NamedDependency[Principal],
    resources: NamedDependency[Resources],
    states: States = None,
    states_in_brackets: StatesInBrackets = None,
    limit: Limit = DEFAULT_LIMIT,
    page: Cursor = None,
    order: Direction = "asc",
) -> Page[PromptView]:
    """Lists the session's prompts in the order of their arrival.

    With `states=pending` those that wait, in the order in which they will be taken up: first the prompts of
    the run that is queued, then `interrupt`, then `steer`, then all others.
    """
    wanted = (*(states or ()), *(states_in_brackets or ()))
    async with resources.database.transaction(principal.tenant_id) as tx:
        session = await require_session(tx, session_id)
        rows = await list_prompts(
            tx, session=session, limit=limit + 1, states=wanted, order=order, after=read_position(page)
        )
    return position_page(rows, limit=limit, view=view_prompt, place=lambda row: row.place)


@post(
    "/v1/sessions/{session_id:str}/prompts/{prompt_id:str}",
    opt=SESSION_TOKENS,
    status_code=200,
    tags=["Prompts"],
)
async def edit_session_prompt(
    *,
    session_id: FromPath[str],
    prompt_id: FromPath[str],
    data: JSONBody[EditPrompt],
    request: ApiRequest,
    principal: NamedDependency[Principal],
    resources: NamedDependency[Resources],
) -> PromptView:
    """Replaces the content of a prompt that no run has taken up."""
    content = to_prompt(data.content, field="content")
    inputs = (PromptInput(content=content),)
    await require_sight(resources, inputs, partial(model_of_session, resources, principal, session_id))
    admission: Admission | None = None
    async with resources.database.transaction(principal.tenant_id) as tx:

        async def make() -> JsonObject:
            nonlocal admission
            await require_image_files(tx, inputs)
            admission = await edit_prompt(tx, session_id=session_id, prompt_id=prompt_id, content=content)
            return {"prompt_id": prompt_id}

        made = await once(tx, request, make)
        session = await require_session(tx, session_id)
        prompt = await get_prompt(tx, session=session, prompt_id=made["prompt_id"])
    await announce(resources, admission)
    return view_prompt(prompt)


@delete(
    "/v1/sessions/{session_id:str}/prompts/{prompt_id:str}",
    opt=SESSION_TOKENS,
    status_code=200,
    tags=["Prompts"],
)
async def withdraw_session_prompt(
    session_id: FromPath[str],
    prompt_id: FromPath[str],
    principal: NamedDependency[Principal],
    resources: NamedDependency[Resources],
) -> PromptView:
    """Takes back a prompt that no run has taken up. A run that has no other prompt ends with it."""
    async with resources.database.transaction(principal.tenant_id) as tx:
        admission = await withdraw_prompt(tx, session_id=session_id, prompt_id=prompt_id)
        session = await require_session(tx, session_id)
        prompt = await get_prompt(tx, session=session, prompt_id=prompt_id)
    await announce(resources, admission)
    return view_prompt(prompt)


def view_prompt(prompt: Prompt) -> PromptView:
    return PromptView(
        id=prompt.id,
        session_id=prompt.session_id,
        batch_id=prompt.batch_id,
        run_id=prompt.run_id,
        seq=prompt.seq,
        state=prompt.state,
        delivery=prompt.delivery,
        content=prompt.content,
        created_at=prompt.created_at,
        updated_at=prompt.updated_at,
    )


ROUTES = [list_session_prompts, edit_session_prompt, withdraw_session_prompt]
