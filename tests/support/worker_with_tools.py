"""`armillary worker` with tools that leave traces: `python -m tests.support.worker_with_tools FOLDER`.

Each tool notes every execution in `FOLDER/<name>.log` and then waits for `FOLDER/<name>.release`, where
`name` is its argument, or for a given time. Files outlive the processes that are killed, so they tell what
has really happened.
"""

import asyncio
import os
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from app.settings import load_settings
from app.worker import run_worker
from tools.builtin import builtin_registry
from tools.errors import ToolError
from tools.schema import tool
from tools.types import Tool, ToolContext

LOOK_S = 0.01


def traced_tools(folder: Path) -> tuple[Tool, ...]:
    """`charge` must not be repeated, `look_up` may be, `refuse` fails, `stubborn` does not heed a cancel.

    `pay` is a `charge` that needs an approval. With `for_s` they wait for so long, and not for their release.
    """

    def note(name: str, what: str, context: ToolContext) -> None:
        # The machine's time, also in a process whose own clock a test has set wrong.
        now_s = time.clock_gettime(time.CLOCK_REALTIME)
        line = f"{what} {context.idempotency_key} {os.getpid()} {now_s}\n"
        with (folder / f"{name}.log").open("a") as file:
            file.write(line)

    async def work(
        name: str, context: ToolContext, wait: Callable[[Path], Awaitable[None]], for_s: float | None = None
    ) -> str:
        note(name, "begun", context)
        if for_s is None:
            await wait(folder / f"{name}.release")
        else:
            await asyncio.sleep(for_s)
        note(name, "done", context)
        return f"{name} is done."

    @tool()
    async def charge(name: str, context: ToolContext, for_s: float | None = None) -> str:
        """Does something that must not be done twice."""
        return await work(name, context, _exists, for_s)

    @tool(requires_approval=True)
    async def pay(name: str, context: ToolContext, for_s: float | None = None) -> str:
        """Does something that has to be allowed first, and must not be done twice."""
        return await work(name, context, _exists, for_s)

    @tool(idempotent=True)
    async def look_up(name: str, context: ToolContext, for_s: float | None = None) -> str:
        """Does something that may be done again."""
        return await work(name, context, _exists, for_s)

    @tool()
    async def refuse(name: str, context: ToolContext, for_s: float | None = None) -> str:
        """Does something, and fails."""
        await work(name, context, _exists, for_s)
        raise ToolError("It is refused.")

    @tool()
    async def stubborn(name: str, context: ToolContext) -> str:
        """Goes on when it is cancelled."""
        return await work(name, context, _exists_in_spite_of_cancels)

    return charge, pay, look_up, refuse, stubborn


async def _exists(path: Path) -> None:
    while not path.exists():  # noqa: ASYNC110, ASYNC240 - another process makes it
        await asyncio.sleep(LOOK_S)


async def _exists_in_spite_of_cancels(path: Path) -> None:
    waiting = asyncio.ensure_future(_exists(path))
    while not waiting.done():
        try:
            await asyncio.shield(waiting)
        except asyncio.CancelledError:
            continue


def main() -> int:
    registry = builtin_registry()
    for traced in traced_tools(Path(sys.argv[1])):
        registry.register(traced)
    return run_worker(load_settings(), tools=registry)


if __name__ == "__main__":
    sys.exit(main())
