"""Waiting for a run without holding anything: one short query at a time, ever less often."""

import asyncio
import time
from collections.abc import Coroutine
from typing import Any, TypeVar

from app.auth import Principal
from app.errors import ClientGone
from app.http_json import ApiRequest
from app.resources import Resources
from db.ids import to_uuid
from db.runs import Run, RunResult, get_run, prompt_outcome, run_result

Value = TypeVar("Value")

MAX_WAIT_S = 600.0
FIRST_LOOK_S = 0.05
LOOKS_GROW = 1.3
LAST_LOOK_S = 0.5


class _Patience:
    """When to look again: soon at first, since many runs are short, then at most twice a second."""

    def __init__(self, resources: Resources, timeout_s: float) -> None:
        self._hub = resources.hub
        self._deadline = time.monotonic() + timeout_s
        self._pause_s = FIRST_LOOK_S

    async def pause(self) -> bool:
        """Waits until it is time to look again; False when the time is over or the server stops."""
        left_s = self._deadline - time.monotonic()
        if left_s <= 0 or self._hub.is_closing:
            return False
        await asyncio.sleep(min(self._pause_s, left_s))
        self._pause_s = min(self._pause_s * LOOKS_GROW, LAST_LOOK_S)
        return True


async def wait_for_run(
    resources: Resources, principal: Principal, run_id: str, *, timeout_s: float
) -> tuple[Run, RunResult | None]:
    """The run, with its result when it is settled; after `timeout_s` as it stands.

    No database connection is held between two looks. Raises: NotFound.
    """
    patience = _Patience(resources, timeout_s)
    while True:
        async with resources.database.transaction(principal.tenant_id) as tx:
            run = await get_run(tx, run_id)
            principal.check_session(to_uuid(run.session_id))
            if run.is_settled:
                return run, await run_result(tx, run_id)
        if not await patience.pause():
            return run, None


async def wait_for_prompt(
    resources: Resources, principal: Principal, prompt_id: str, *, timeout_s: float
) -> tuple[Run | None, RunResult | None]:
    """The run of a prompt, as `wait_for_run`; None while none has been made, or when it was withdrawn first.

    Raises: NotFound.
    """
    patience = _Patience(resources, timeout_s)
    while True:
        async with resources.database.transaction(principal.tenant_id) as tx:
            outcome = await prompt_outcome(tx, prompt_id)
            run = None if outcome.run_id is None else await get_run(tx, outcome.run_id)
            if run is not None and run.is_settled:
                return run, await run_result(tx, run.id)
        if run is None and outcome.state == "withdrawn":
            return None, None
        if not await patience.pause():
            return run, None


async def while_connected(request: ApiRequest, waiting: Coroutine[Any, Any, Value]) -> Value:
    """What `waiting` returns; given up as soon as the client has left. Raises: ClientGone."""
    work = asyncio.create_task(waiting)
    watch = asyncio.create_task(_left(request))
    try:
        await asyncio.wait({work, watch}, return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            raise ClientGone("The connection closed before there was an answer; the run goes on.")
        return work.result()
    finally:
        work.cancel()
        watch.cancel()
        await asyncio.gather(work, watch, return_exceptions=True)


async def _left(request: ApiRequest) -> None:
    """Returns when the client has left. The body must have been read."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
