"""Runs the calls of a turn: some at once, results stored as they come, in the transcript in source order."""

import asyncio
import logging
import math
from dataclasses import dataclass

from msgspec.structs import replace

from agents.closing import ending_of, finish_call, lost_call, record_result
from agents.drafts import Draft
from agents.errors import HandOver, Stopped
from agents.events import Outcome, StatusIdle, StopReason, ToolStart
from agents.finishing import decision_on
from agents.hooks import TurnReport
from agents.progress import Progress
from agents.stop_watch import StopWatch
from agents.toolbox import Toolbox
from agents.types import PreviewDelta, ToolCall, WaitForClient
from providers.cleaning import clean_text
from providers.types import JsonObject
from tools.errors import ToolError, UnusableResult
from tools.results import to_json, to_result
from tools.types import Tool, ToolContext, ToolResult, text_result

MAX_PARALLEL_CALLS = 16  # of one run; more calls wait for a free place
STOP_GRACE_S = 1.0  # for a tool to end after it was cancelled; then it is left behind

Finished = tuple[ToolResult, Outcome]

_log = logging.getLogger(__name__)


@dataclass(kw_only=True)
class _Execution:
    """A call that runs here, until its result is stored. `due_s`, on the event loop's clock: its time-out."""

    name: str
    task: asyncio.Task[ToolResult]
    timeout_s: float
    due_s: float
    finished: Finished | None = None
    is_reviewed: bool = False


class ToolCalls:
    """Brings the calls of the last assistant message to their results.

    The durable state of a call leads: it is `running` in the database before its tool begins, so that a call
    that another hold began is never begun again by accident.
    """

    def __init__(self, *, progress: Progress, toolbox: Toolbox, stop: StopWatch) -> None:
        self._progress = progress
        self._toolbox = toolbox
        self._stop = stop
        self._owned: set[str] = set()
        self._executions: dict[str, _Execution] = {}

    def add(self, draft: Draft, calls: tuple[ToolCall, ...], *, may_start: bool) -> None:
        """Adds new calls to the step that stores their assistant message, and starts those that may start."""
        for call in calls:
            if call.state == "done":
                record_result(draft, call)
            else:
                draft.call(call)
        if may_start:
            self._start_pending(draft)

    async def settle(self) -> None:
        """Returns when every call has its result in the transcript, or the run has been left.

        Raises: HoldLost, HandOver.
        """
        try:
            await self._take_over()
            while self._progress.calls and not self._progress.has_left:
                await self._go_on()
        except Stopped:
            await self._end_running()
            await self._review()
            await decision_on(
                self._progress, TurnReport(text="", calls=self._progress.calls, status="stopped")
            )
            await self._progress.close_stopped(self._write_finished)
        finally:
            for execution in self._executions.values():
                _leave_behind(execution.task)
            self._executions.clear()

    async def _take_over(self) -> None:
        """Deals with calls that an earlier hold began: idempotent ones start over, others are lost."""
        begun = [
            call for call in self._progress.calls if call.state == "running" and call.id not in self._owned
        ]
        if not begun:
            return

        def write(draft: Draft) -> None:
            for call in begun:
                if call.idempotent:
                    draft.call(replace(call, state="pending"))
                else:
                    record_result(draft, lost_call(call))

        await self._progress.commit(write)

    async def _go_on(self) -> None:
        self._begin_owned()
        if self._executions:
            await self._wait_for_one()
            await self._store()
        elif self._startable(self._progress.calls):
            await self._start_more()
        else:
            await self._wait_for_client()

    def _begin_owned(self) -> None:
        due = [
            call
            for call in self._progress.calls
            if call.state == "running" and call.id in self._owned and call.id not in self._executions
        ]
        for call in due:
            tool = self._toolbox.find(call.name)
            timeout_s = math.inf if tool is None or tool.timeout_s is None else tool.timeout_s
            self._executions[call.id] = _Execution(
                name=call.name,
                task=asyncio.create_task(self._execute(tool, call)),
                timeout_s=timeout_s,
                due_s=asyncio.get_running_loop().time() + timeout_s,
            )

    async def _execute(self, tool: Tool | None, call: ToolCall) -> ToolResult:
        if tool is None:
            raise ToolError("This tool is not available any more.")
        context = self._context(call)
        # Last of all: between this and the tool's own code, a worker that stands still goes unnoticed.
        await self._progress.until_live()
        result = to_result(await tool.execute(call.input, context))
        return replace(result, ends_turn=tool.ends_turn and not result.is_error)

    async def _wait_for_one(self) -> None:
        """Returns when a call has finished, or has been ended because its time is over."""
        loop = asyncio.get_running_loop()
        executions = self._executions.values()
        due_s = min(execution.due_s for execution in executions)
        timeout_s = None if due_s == math.inf else max(due_s - loop.time(), 0.0)
        tasks = [execution.task for execution in executions]
        await self._stop.guard(asyncio.wait(tasks, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED))
        self._collect()
        late = [
            execution
            for execution in executions
            if execution.finished is None and execution.due_s <= loop.time()
        ]
        for execution in late:
            # Decided before the tool is told: what it makes of the cancel does not count.
            text = f"Timed out after {execution.timeout_s:g} s. It may have had effects."
            execution.finished = _failure("timed_out", text)
        if late:
            await self._stop.guard(_end([execution.task for execution in late]))

    async def _review(self) -> None:
        """Has hooks look at results before these are stored."""
        hooks, context = self._progress.hooks, self._progress.hook_context
        for call in self._progress.calls:
            execution = self._executions.get(call.id)
            if execution is None or execution.finished is None or execution.is_reviewed:
                continue
            result, outcome = execution.finished
            if hooks.has("after_tool_call"):
                changed = await hooks.change("after_tool_call", context, result, call)
                if changed is not result:
                    result = to_result(changed)
                    outcome = "error" if result.is_error else "ok"
            execution.finished, execution.is_reviewed = (result, outcome), True
            await self._progress.tell("tool_result", finish_call(call, result, outcome))

    async def _store(self) -> None:
        """Stores results, and starts what waits for their places in the same step."""
        await self._stop.guard(self._review())

        def write(draft: Draft) -> None:
            self._write_finished(draft)
            self._start_pending(draft)

        if self._may_go_on() and await self._progress.may_start():
            await self._progress.decide(write)
        else:
            await self._progress.commit(self._write_finished)
        running = {call.id for call in self._progress.calls if call.state == "running"}
        self._executions = {key: value for key, value in self._executions.items() if key in running}

    async def _start_more(self) -> None:
        if not await self._progress.may_start():
            raise HandOver

        def write(draft: Draft) -> None:
            self._progress.announce(draft)
            self._start_pending(draft)

        await self._progress.decide(write)

    async def _wait_for_client(self) -> None:
        """Gives the worker up. When the last answer came in meanwhile, the step is that it is taken over."""

        def write(draft: Draft) -> None:
            waiting = tuple(call.id for call in self._progress.calls if call.state == "open")
            if waiting:
                draft.event(StatusIdle, stop_reason=StopReason(type="requires_action", event_ids=waiting))
                draft.ending = WaitForClient(timeout_s=self._progress.agent.wait_timeout_s)

        await self._progress.decide(write)

    def _may_go_on(self) -> bool:
        """True when there are calls to start, or some that the client may have allowed meanwhile."""
        return any(call.state in {"pending", "open"} for call in self._progress.calls)

    def _startable(self, calls: tuple[ToolCall, ...]) -> list[ToolCall]:
        """Those of `calls` that may start as things are, in source order."""
        if ending_of(calls) is not None:
            return []
        if self._toolbox.must_be_sequential(calls):
            # Nothing overtakes a call that runs, or that waits to be approved.
            due = next((call for call in calls if call.kind == "server" and call.state != "done"), None)
            return [due] if due is not None and due.state == "pending" else []
        free = MAX_PARALLEL_CALLS - sum(call.state == "running" for call in calls)
        return [call for call in calls if call.state == "pending"][: max(free, 0)]

    def _start_pending(self, draft: Draft) -> None:
        for call in self._startable(self._progress.calls_after(draft)):
            tool = self._toolbox.find(call.name)
            self._owned.add(call.id)
            draft.call(
                replace(call, state="running", idempotent=tool is not None and tool.idempotent),
            )
            draft.event(ToolStart, tool_use_id=call.id)

    def _collect(self) -> None:
        """Takes the results of the tools that have ended."""
        for execution in self._executions.values():
            if execution.finished is None and execution.task.done():
                execution.finished = _outcome(execution)

    def _write_finished(self, draft: Draft) -> None:
        for call in self._progress.calls:
            execution = self._executions.get(call.id)
            if call.state == "running" and execution is not None and execution.finished is not None:
                record_result(draft, finish_call(call, *execution.finished))

    async def _end_running(self) -> None:
        """After a stop: what a tool says once it has been cancelled is no result, so that comes first."""
        self._collect()
        running = [execution.task for execution in self._executions.values() if execution.finished is None]
        if running:
            await _end(running)

    def _context(self, call: ToolCall) -> ToolContext:
        snapshot, sink = self._progress.snapshot, self._progress.sink

        def progress(payload: JsonObject) -> None:
            execution = self._executions.get(call.id)
            if execution is None or execution.finished is not None or self._stop.has_stopped():
                return  # the call is over; a tool that was left behind may still talk
            try:
                delta = {"type": "tool_progress", "progress": to_json(payload)}
            except UnusableResult as error:
                _log.warning("tool %s reported what cannot be shown: %s", call.name, error)
                return
            sink.preview(PreviewDelta(event_id=call.id, kind="tool.progress", delta=delta))

        return ToolContext(
            session_id=snapshot.session_id,
            run_id=snapshot.run_id,
            tool_use_id=call.id,
            idempotency_key=call.id,
            progress=progress,
        )


def _outcome(execution: _Execution) -> Finished:
    """What a tool that has ended has come to. Whatever went wrong in it is a result that the model sees."""
    if execution.task.cancelled():
        return _failure("interrupted", "The tool cancelled itself. It may have had effects.")
    error = execution.task.exception()
    if error is None:
        result = execution.task.result()
        return result, "error" if result.is_error else "ok"
    if isinstance(error, ToolError):
        return _failure(error.code, clean_text(str(error)) or type(error).__name__)
    _log.error("tool %s failed", execution.name, exc_info=error)
    return _failure("tool_failed", f"The tool failed: {type(error).__name__}.")


async def _end(tasks: list[asyncio.Task[ToolResult]]) -> None:
    """Cancels tools, and leaves those behind that do not end in time."""
    for task in tasks:
        _leave_behind(task)
    await asyncio.wait(tasks, timeout=STOP_GRACE_S)


_left_behind: set[asyncio.Task[ToolResult]] = set()  # a task that nobody refers to may vanish in the middle


def _leave_behind(task: asyncio.Task[ToolResult]) -> None:
    """Cancels a task without waiting for it: a tool may take its time, or not heed it at all."""
    if task.done():
        return
    task.cancel()
    _left_behind.add(task)
    task.add_done_callback(_forget)


def _forget(task: asyncio.Task[ToolResult]) -> None:
    _left_behind.discard(task)
    if not task.cancelled() and task.exception() is not None:
        _log.warning("a tool failed after it was cancelled", exc_info=task.exception())


def _failure(code: str, text: str) -> Finished:
    return text_result(text, is_error=True, details={"code": code}), "error"
