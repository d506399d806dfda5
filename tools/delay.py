"""Waits, so that an agent can pace itself."""

import asyncio
from collections.abc import Callable
from typing import Annotated

from msgspec import Meta

from providers.types import JsonObject
from tools.schema import tool
from tools.types import ToolContext

MAX_DELAY_S = 600


@tool(label="Delay", idempotent=True)
async def delay(
    seconds: Annotated[float, Meta(ge=0, le=MAX_DELAY_S, description="How long to wait.")],
    context: ToolContext,
) -> str:
    """Waits for some seconds, then answers. Use it before looking again at something that takes time."""
    await wait_reporting(seconds, context.progress, every_s=1.0)
    return f"Waited {seconds:g} seconds."


async def wait_reporting(seconds: float, progress: Callable[[JsonObject], None], *, every_s: float) -> None:
    """Waits, and reports `{elapsed_s, total_s}` about each `every_s` until then. A cancel ends it at once."""
    loop = asyncio.get_running_loop()
    start = loop.time()
    while (elapsed := loop.time() - start) < seconds:
        await asyncio.sleep(min(every_s, seconds - elapsed))
        progress({"elapsed_s": round(min(loop.time() - start, seconds), 1), "total_s": seconds})
