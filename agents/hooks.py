"""What an extension may watch and change of a run: subclass `Hooks`, and override what you need.

Hooks are awaited one after the other, in the order in which they were added. One that raises, or takes longer
than `LIMIT_S`, is logged by name and left out of that call; the run goes on. Only `before_tool_call` is
stricter: a call that its hook could not judge is blocked.
"""

import asyncio
import logging
from collections.abc import Coroutine, Sequence
from decimal import Decimal
from typing import Any, Literal

from msgspec import Struct
from msgspec.structs import replace

from agents.events import StopReason
from agents.types import PendingPrompt, ToolCall
from providers.types import JsonObject, Message, ProviderRequest, Usage
from tools.types import ToolResult

LIMIT_S = 10.0  # for one hook, each time
NOT_JUDGED = "It could not be checked whether the call is allowed."

_log = logging.getLogger(__name__)


class HookContext(Struct, frozen=True, kw_only=True):
    """Where a hook is called. `turn`: of the request that is being made or was made last, from 1."""

    session_id: str
    run_id: str
    agent: str
    end_user_id: str | None
    turn: int


class RequestInfo(Struct, frozen=True, kw_only=True):
    """A request that is about to leave. `roles`: how many messages of each; `prompt_tokens`: our estimate."""

    provider: str
    model: str
    turn: int
    attempt: int
    messages: int
    roles: dict[str, int]
    tools: int
    prompt_tokens: int


class ToolVerdict(Struct, frozen=True, kw_only=True):
    """What is to become of a call before it runs.

    `block`: it gets an error that says `reason`. `ask`: it waits until the client has allowed it. `change`:
    it runs with `input`. `end`: as `block`, and the run ends when the calls of the turn are finished.
    """

    action: Literal["block", "ask", "change", "end"]
    reason: str = ""
    input: JsonObject | None = None


class TurnReport(Struct, frozen=True, kw_only=True):
    """A turn that is over. `status`: `failed` and `stopped` turns end the run whatever a hook decides.

    `calls`: those of the turn with their results; none when the model has finished.
    """

    text: str
    calls: tuple[ToolCall, ...] = ()
    status: Literal["done", "failed", "stopped"] = "done"


class TurnDecision(Struct, frozen=True, kw_only=True):
    """`end`: the run closes, steering that waits becomes the next run. `continue`: the model is asked again.

    `message`: what it is told with `continue`, as from the user; needed when the model has finished.
    """

    action: Literal["end", "continue"]
    message: str = ""


class Hooks:
    """Does nothing. A method that is overridden is called; see the module for what a failure does."""

    # -- changes: what is returned takes the place of what was given --------------------------------------

    async def transform_context(self, context: HookContext, messages: Sequence[Message]) -> Sequence[Message]:
        """The messages that are sent. Nothing of it is stored; pairs of calls and results are repaired."""
        return messages

    async def prepare_request(self, context: HookContext, request: ProviderRequest) -> ProviderRequest:
        """The request, last of all. Each attempt is prepared anew; requests for memories are not."""
        return request

    async def before_tool_call(self, context: HookContext, call: ToolCall) -> ToolVerdict | None:
        """What becomes of a call of a tool that runs here; None: it runs. Asked once, with the answer."""
        return None

    async def after_tool_call(self, context: HookContext, call: ToolCall, result: ToolResult) -> ToolResult:
        """The result that is stored. Again for a call that is run again after a crash."""
        return result

    async def finish_turn(self, context: HookContext, turn: TurnReport) -> TurnDecision | None:
        """Whether the run ends or goes on; None: as it would. A crash may skip or repeat it."""
        return None

    # -- observers ----------------------------------------------------------------------------------------

    async def run_start(self, context: HookContext) -> None:
        """A worker begins to work on the run, again after each wait and crash."""

    async def run_end(self, context: HookContext, stop: StopReason) -> None:
        """The run is about to close. Again when something came in at the last moment."""

    async def message_received(self, context: HookContext, prompt: PendingPrompt) -> None:
        """A prompt is taken up."""

    async def before_prompt_build(self, context: HookContext) -> None:
        """A request is about to be put together."""

    async def model_request(self, context: HookContext, request: RequestInfo) -> None:
        """A request is about to leave."""

    async def status(self, context: HookContext, status: str) -> None:
        """The request: `requested`, `connected`."""

    async def content(self, context: HookContext, text: str) -> None:
        """A piece of the answer, as it comes."""

    async def thinking(self, context: HookContext, text: str) -> None:
        """A piece of reasoning, as it comes."""

    async def usage(self, context: HookContext, usage: Usage, cost_usd: Decimal | None) -> None:
        """What a request has cost, failed ones too."""

    async def tool_call(self, context: HookContext, call: ToolCall) -> None:
        """The model has asked for a call, which may begin or wait."""

    async def tool_error(self, context: HookContext, call: ToolCall, raw: str | None) -> None:
        """A call cannot be made: unknown tool, bad arguments. `raw`: the arguments that could not be read."""

    async def tool_result(self, context: HookContext, call: ToolCall) -> None:
        """A call is about to get its result."""

    async def error(self, context: HookContext, code: str, message: str) -> None:
        """A request has failed; it may be tried again."""


class HookChain:
    """Hooks in their order, as the loop calls them."""

    def __init__(self, hooks: Sequence[Hooks] = (), *, limit_s: float = LIMIT_S) -> None:
        self._limit_s = limit_s
        names = [name for name in vars(Hooks) if not name.startswith("_")]
        self._by_name = {
            name: [hook for hook in hooks if getattr(type(hook), name) is not getattr(Hooks, name)]
            for name in names
        }

    def has(self, name: str) -> bool:
        """True when some hook overrides the method: what nobody watches costs nothing."""
        return bool(self._by_name[name])

    async def tell(self, name: str, context: HookContext, *values: Any) -> None:
        """Calls the observers of this name."""
        for hook in self._by_name[name]:
            await self._call(hook, name, context, *values)

    async def change(self, name: str, context: HookContext, value: Any, *before: Any) -> Any:
        """`value` as the hooks of this name leave it; `before` stands before it in their arguments."""
        for hook in self._by_name[name]:
            changed = await self._call(hook, name, context, *before, value)
            value = value if changed is None else changed
        return value

    async def judge(self, context: HookContext, call: ToolCall) -> ToolVerdict | None:
        """What becomes of a call: the first verdict other than a change; changes go on to the next hook."""
        verdict = None
        for hook in self._by_name["before_tool_call"]:
            try:
                judging = hook.before_tool_call(context, call)
                found: ToolVerdict | None = await _bounded(judging, self._limit_s)
            except Exception:  # noqa: BLE001 - a stranger's code
                _log.exception("hook %s failed in before_tool_call", _name(hook))
                return ToolVerdict(action="block", reason=NOT_JUDGED)
            if found is not None and found.action != "change":
                return found
            if found is not None and found.input is not None:
                verdict = found
                call = replace(call, input=found.input)
        return verdict

    async def decide(self, context: HookContext, turn: TurnReport) -> TurnDecision | None:
        """The first decision. All are asked."""
        decision = None
        for hook in self._by_name["finish_turn"]:
            found = await self._call(hook, "finish_turn", context, turn)
            decision = decision or found
        return decision

    async def _call(self, hook: Hooks, name: str, *values: Any) -> Any:
        """What the hook returns; None when it fails."""
        try:
            return await _bounded(getattr(hook, name)(*values), self._limit_s)
        except Exception:  # noqa: BLE001 - a stranger's code
            _log.exception("hook %s failed in %s", _name(hook), name)
            return None


NO_HOOKS = HookChain()


async def _bounded(work: Coroutine[Any, Any, Any], limit_s: float) -> Any:
    """What `work` returns. It cannot cancel who waits for it, and is left behind when it takes too long."""
    task = asyncio.create_task(work)
    try:
        await asyncio.wait({task}, timeout=limit_s)
    finally:
        if not task.done():
            _left_behind.add(task)
            task.add_done_callback(_left_behind.discard)
            task.cancel()
    if not task.done():
        raise TimeoutError(f"no answer within {limit_s:g} s")
    if task.cancelled():
        raise RuntimeError("it cancelled itself")
    return task.result()


_left_behind: set[asyncio.Task[Any]] = set()  # a task that nobody refers to may vanish in the middle


def _name(hook: Hooks) -> str:
    return f"{type(hook).__module__}.{type(hook).__qualname__}"
