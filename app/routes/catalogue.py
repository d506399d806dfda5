"""`/v1/models`, `/v1/tools`, `/v1/skills`: what can be put into an agent."""

import asyncio
from datetime import UTC, datetime
from typing import Annotated, Literal

import msgspec
from litestar import get
from litestar.di import NamedDependency
from msgspec import Meta, Struct

from app.auth import Principal
from app.pagination import Page
from app.resources import Resources
from providers.pricing import ModelPrice
from providers.types import Capabilities, JsonObject


class ToolView(Struct, frozen=True, kw_only=True):
    """A tool of this server. An agent has it as `{"type": "builtin", "name": …}`."""

    type: Literal["builtin"] = "builtin"
    name: str
    label: Annotated[str, Meta(description="For user interfaces.")]
    description: str
    input_schema: Annotated[JsonObject, Meta(description="JSON Schema of the arguments.")]
    execution: Literal["parallel", "sequential"]
    idempotent: Annotated[bool, Meta(description="Runs again when its worker died in the middle of a call.")]
    requires_approval: Annotated[
        bool, Meta(description="Calls wait for a `user.tool_confirmation`, unless an agent says otherwise.")
    ]
    asks_user: Annotated[bool, Meta(description="Its calls wait until you have answered them for the user.")]


class ModelInfo(Struct, frozen=True, kw_only=True):
    """A model that is known by name; other names of its vendor work too.

    `id` is what an agent's `model` takes. `is_configured`: what it needs is set on this server. `prices` are
    US dollars per million tokens; null: not known.
    """

    id: str
    type: Literal["model"] = "model"
    display_name: str
    vendor: str
    api: str
    is_configured: bool
    capabilities: Capabilities
    prices: ModelPrice | None
    price_source: Annotated[
        str | None, Meta(description="`override`, `rehearsal`, or the price list with its version.")
    ]


class SkillView(Struct, frozen=True, kw_only=True):
    """Instructions bundled with tools."""

    name: str
    description: str


@get("/v1/models", tags=["Catalogue"])
async def list_models(
    principal: NamedDependency[Principal], resources: NamedDependency[Resources]
) -> Page[ModelInfo]:
    """Lists the models that are known by name, and those that servers at addresses of your own have."""
    await resources.providers.discover()
    entries = await asyncio.to_thread(resources.providers.models, datetime.now(UTC))  # loads the price list
    return Page(data=[ModelInfo(**msgspec.structs.asdict(entry)) for entry in entries])


@get("/v1/tools", tags=["Catalogue"])
async def list_tools(
    principal: NamedDependency[Principal], resources: NamedDependency[Resources]
) -> Page[ToolView]:
    """Lists the tools of this server by name."""
    tools = [resources.tools.get(name) for name in resources.tools.names()]
    return Page(
        data=[
            ToolView(
                name=tool.name,
                label=tool.label or tool.name,
                description=tool.description,
                input_schema=tool.input_schema,
                execution=tool.execution,
                idempotent=tool.idempotent,
                requires_approval=tool.requires_approval,
                asks_user=tool.asks_user,
            )
            for tool in tools
        ]
    )


@get("/v1/skills", tags=["Catalogue"])
async def list_skills(principal: NamedDependency[Principal]) -> Page[SkillView]:
    """Lists the skills of this server by name. This version brings none."""
    return Page(data=[])


ROUTES = [list_models, list_tools, list_skills]
