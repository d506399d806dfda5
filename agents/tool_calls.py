"""Runs the calls of a turn: some at once, results stored as they come, in the transcript in source order."""

import asyncio
import logging

from msgspec.structs import replace

from agents.closing import append_results, finish_call, lost_call, record_result
from agents.drafts import Draft
from agents.errors import HandOver, Stopped
from agents.events import Outcome, StatusIdle, StopReason, ToolStart
from agents.progress import Progress
from agents.stop_watch import StopWatch
from agents.toolbox import Toolbox
from agents.types import InboxView, PreviewDelta, ToolCall, WaitForClient
from providers.cleaning import clean_text
from providers.types import JsonObject
from tools.errors import ToolError
from tools.results import to_result
from tools.types import ToolContext, ToolResult, text_result

MAX_PARALLEL_CALLS = 16  # of one run; more calls wait for a free place
STOP_GRACE_S = 1.0  # for a tool to end after it was cancelled; then it is left behind

Finished = tuple[ToolResult, Outcome]
Execution = asyncio.Task[Finished]

_log = logging.getLogger(__name__)


class ToolCalls:
    """Brings the calls of the last assistant message to their results.

    The durable state of a call leads: it is `running` in the database before its tool begins, so that a call
    that another hold began is never begun again by accident.
    """

    def __init__(self, *, progress: Progress, toolbox: Toolbox, stop: StopWatch) -> None:
        self._progress = progress
        self._toolbox = toolbox
        self._stop = stop
        self._tasks: dict[Execution, str] = {}
        self._owned: set[str] = set()

    def add(self, draft: Draft, calls: tuple[ToolCall, ...], *, may_start: bool) -> None:
        """Adds new calls to the step that stores their assistant message, and starts those that may start."""
        for call in calls:
            if call.state == "done":
                record_result(draft, call)
            else:
                draft.call(call)
        if may_start:
            calls = self._start_pending(draft, calls)
        self._append_when_done(draft, calls)

    async def settle(self) -> None:
        """Returns when every call has its result in the transcript, or the run waits for the client.

        Raises: HoldLost, HandOver, Stopped (then the finished results are stored, the others are not).
        """
        try:
            await self._resume()
            while self._progress.calls and not self._progress.has_left:
                await self._go_on()
        except Stopped:
            await self._keep_finished()
            raise
        finally:
            for task in self._tasks:
                _leave_behind(task)

    async def _resume(self) -> None:
        """Deals with calls that an earlier hold began: idempotent ones start over, others are lost."""
        calls = list(self._progress.calls)
        begun = [call for call in calls if call.state == "running" and call.id not in self._owned]
        if not begun:
            return
        draft = self._progress.draft()
        for call in begun:
            again = replace(call, state="pending") if call.idempotent else lost_call(call)
            calls[calls.index(call)] = again
            if call.idempotent:
                draft.call(again)
            else:
                record_result(draft, again)
        self._append_when_done(draft, tuple(calls))
        await self._progress.commit(draft)

    async def _go_on(self) -> None:
        self._begin_owned()
        if self._tasks:
            done = await self._wait_for_one()
            await self._store(done)
        elif any(call.state == "pending" for call in self._progress.calls):
            await self._start_more()
        else:
            await self._wait_for_client()

    def _begin_owned(self) -> None:
        for call in self._progress.calls:
            if call.state == "running" and call.id in self._owned and call.id not in self._tasks.values():
                task = asyncio.create_task(self._execute(call))
                self._tasks[task] = call.id

    async def _wait_for_one(self) -> dict[str, Finished]:
        done = await self._stop.guard(_first(set(self._tasks)))
        return {self._tasks.pop(task): task.result() for task in done}

    async def _store(self, done: dict[str, Finished]) -> None:
        """Stores results, and starts what waits for their places in the same step."""
        may_start = self._has_pending() and await self._progress.may_start()

        def write(_: InboxView | None) -> Draft:
            draft = self._progress.draft()
            calls = tuple(
                record_result(draft, finish_call(call, *done[call.id])) if call.id in done else call
                for call in self._progress.calls
            )
            if may_start:
                calls = self._start_pending(draft, calls)
            self._append_when_done(draft, calls)
            return draft

        if not may_start:
            await self._progress.commit(write(None))
            return
        try:
            await self._progress.decide(write)
        except Stopped:
            may_start = False
            await self._progress.commit(write(None))
            raise

    async def _start_more(self) -> None:
        if not await self._progress.may_start():
            raise HandOver

        def write(_: InboxView) -> Draft:
            draft = self._progress.draft()
            self._progress.announce(draft)
            self._start_pending(draft, self._progress.calls)
            return draft

        await self._progress.decide(write)

    async def _wait_for_client(self) -> None:
        """Gives the worker up; when the last answer came in meanwhile, goes on instead."""

        def write(_: InboxView) -> Draft:
            draft = self._progress.draft()
            waiting = tuple(call.id for call in self._progress.calls if call.state == "open")
            if waiting:
                draft.event(StatusIdle, stop_reason=StopReason(type="requires_action", event_ids=waiting))
                draft.ending = WaitForClient()
            else:
                self._append_when_done(draft, self._progress.calls)
            return draft

        await self._progress.decide(write)

    def _has_pending(self) -> bool:
        return any(call.state == "pending" for call in self._progress.calls)

    def _start_pending(self, draft: Draft, calls: tuple[ToolCall, ...]) -> tuple[ToolCall, ...]:
        limit = 1 if self._toolbox.must_be_sequential(calls) else MAX_PARALLEL_CALLS
        free = limit - sum(call.state == "running" for call in calls)
        started: list[ToolCall] = []
        for call in calls:
            if call.state != "pending" or free <= 0:
                started.append(call)
                continue
            free -= 1
            tool = self._toolbox.find(call.name)
            running = replace(call, state="running", idempotent=tool is not None and tool.idempotent)
            self._owned.add(call.id)
            draft.call(running)
            draft.event(ToolStart, tool_use_id=call.id)
            started.append(running)
        return tuple(started)

    def _append_when_done(self, draft: Draft, calls: tuple[ToolCall, ...]) -> None:
        if all(call.state == "done" for call in calls):
            append_results(draft, calls)

    async def _keep_finished(self) -> None:
        """After a stop: cancels what runs, and stores the results that are there all the same."""
        if not self._tasks:
            return
        for task in self._tasks:
            task.cancel()
        done, _ = await asyncio.wait(self._tasks, timeout=STOP_GRACE_S)
        finished = {
            self._tasks[task]: task.result()
            for task in done
            if not task.cancelled() and task.result()[1] != "cancelled"
        }
        if finished:
            draft = self._progress.draft()
            for call in self._progress.calls:
                if call.id in finished:
                    record_result(draft, finish_call(call, *finished[call.id]))
            await self._progress.commit(draft)

    async def _execute(self, call: ToolCall) -> Finished:
        """Runs one call. Whatever goes wrong in the tool becomes a result that the model sees."""
        tool = self._toolbox.find(call.name)
        if tool is None:
            return text_result("This tool is not available any more.", is_error=True), "error"
        try:
            async with asyncio.timeout(tool.timeout_s) as limit:
                result = to_result(await tool.execute(call.input, self._context(call)))
        except asyncio.CancelledError:
            if self._stop.has_stopped or _is_being_cancelled():
                raise
            return _failure("interrupted", "The tool cancelled itself. It may have had effects.")
        except ToolError as error:
            return _failure(error.code, clean_text(str(error)) or type(error).__name__)
        except Exception as error:  # noqa: BLE001 - one tool must not take the run down
            if isinstance(error, TimeoutError) and limit.expired():
                return _failure("timed_out", f"Timed out after {tool.timeout_s} s. It may have had effects.")
            _log.exception("tool %s failed", call.name, extra={"tool_use_id": call.id})
            return _failure("tool_failed", f"The tool failed: {type(error).__name__}.")
        return result, "error" if result.is_error else "ok"

    def _context(self, call: ToolCall) -> ToolContext:
        snapshot, sink = self._progress.snapshot, self._progress.sink

        def progress(payload: JsonObject) -> None:
            sink.preview(PreviewDelta(event_id=call.id, kind="tool.progress", delta=payload))

        return ToolContext(
            session_id=snapshot.session_id,
            run_id=snapshot.run_id,
            tool_use_id=call.id,
            idempotency_key=call.id,
            progress=progress,
        )


async def _first(tasks: set[Execution]) -> set[Execution]:
    done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    return done


_left_behind: set[Execution] = set()  # a task that nobody refers to may vanish in the middle


def _leave_behind(task: Execution) -> None:
    """Cancels a task without waiting for it: a tool may take its time, or not heed it at all."""
    task.cancel()
    _left_behind.add(task)
    task.add_done_callback(_left_behind.discard)


def _is_being_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _failure(code: str, text: str) -> Finished:
    return text_result(text, is_error=True, details={"code": code}), "error"
