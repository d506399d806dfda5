"""How a run closes, whoever closes it: its worker, the api on a cancel, the sweeper by force.

One routine, so that promises 2, 9 and 11 do not depend on who was there at the end.
"""

from datetime import datetime

from msgspec import Struct
from msgspec.structs import replace

from agents.config import QueueModes
from agents.drafts import Draft
from agents.events import (
    AgentToolResult,
    CancelMode,
    ErrorDetail,
    ErrorType,
    ModelUsage,
    Outcome,
    PromptWithdrawn,
    RequestEnd,
    RetryStatus,
    RetryType,
    SessionError,
    StatusIdle,
    StatusRescheduled,
    StopReason,
    TokenUsage,
)
from agents.pending import next_batch
from agents.types import (
    CloseRun,
    NextRun,
    PendingPrompt,
    RequestClosed,
    RequeueRun,
    Step,
    ToolCall,
)
from providers.ids import new_id
from providers.types import Message, ToolResultBlock, Usage
from tools.types import ToolResult, text_result

INTERRUPTED = "Interrupted while running. It may have had effects; its result is not known."
NOT_STARTED = "Not started: the run was stopped first."
NOT_APPROVED = "Not started: the run was stopped while the call waited to be approved."
NOT_ANSWERED = "Not answered: the run was stopped while it waited for the client."
SKIPPED = "Skipped: another call of this turn has ended the run. It may have had effects if it had begun."
WORKER_LOST = "The process that ran this call was lost. Whether it had effects is not known."


class OpenWork(Struct, frozen=True, kw_only=True):
    """What of a run is not finished, as it stands in the database.

    `turn` is that of the last request, None before the first. `open_request` is the id of a ledger entry
    without an end. `calls`: those of the last assistant message, when the transcript lacks their results.
    `batch`: the run's own prompts not applied; `pending`: nobody's; `modes`: how many of these go together.
    """

    session_id: str
    run_id: str
    turn: int | None
    next_position: int
    open_request: str | None = None
    calls: tuple[ToolCall, ...] = ()
    batch: tuple[PendingPrompt, ...] = ()
    pending: tuple[PendingPrompt, ...] = ()
    modes: QueueModes = QueueModes()


def draft_of(work: OpenWork, now: datetime) -> Draft:
    """An empty draft for `work`."""
    return Draft(
        session_id=work.session_id,
        run_id=work.run_id,
        now=now,
        next_position=work.next_position,
        turn=work.turn,
    )


def close_step(work: OpenWork, stop_reason: StopReason, now: datetime) -> Step:
    """The step that closes the run of `work`."""
    draft = draft_of(work, now)
    if work.open_request is not None:
        abandon_request(draft, work.open_request)
    close(draft, work, stop_reason)
    return draft.build()


def close(draft: Draft, work: OpenWork, stop_reason: StopReason) -> None:
    """Adds to `draft` all that closes the run, but the end of an open request."""
    _stop_calls(draft, work.calls, skip=stop_reason.type == "direct_return")
    for prompt in work.batch:
        draft.withdraw_prompt(prompt.id)
        draft.event(PromptWithdrawn, prompt_id=prompt.id, reason="run_cancelled")
    draft.event(StatusIdle, stop_reason=stop_reason)
    draft.ending = CloseRun(stop_reason=stop_reason, next_run=next_run(work.pending, work.modes))


def stops_here(mode: CancelMode | None, work: OpenWork) -> bool:
    """True when a cancel of `mode` closes a run that no worker works on, with nothing to be finished first.

    A request that was lost with its worker is not finished: asking again would begin another turn.
    """
    is_between_turns = all(call.state == "done" for call in work.calls)
    return mode == "now" or (mode == "after_turn" and is_between_turns)


def requeue_step(work: OpenWork, now: datetime, *, takeover: bool) -> Step:
    """The step that takes the run from its worker and gives it to the next one that is free."""
    draft = draft_of(work, now)
    if work.open_request is not None:
        abandon_request(draft, work.open_request)
    draft.event(StatusRescheduled, reason="worker_lost" if takeover else "handed_over")
    draft.ending = RequeueRun(takeover=takeover)
    return draft.build()


def next_run(pending: tuple[PendingPrompt, ...], modes: QueueModes) -> NextRun | None:
    """The run that follows; None when nothing is pending."""
    batch = next_batch(pending, modes)
    return NextRun(id=new_id("run"), prompt_ids=tuple(prompt.id for prompt in batch)) if batch else None


def abandon_request(draft: Draft, request_id: str) -> None:
    """Closes a ledger entry whose worker is gone: what the provider counted is not known."""
    draft.closed = RequestClosed(id=request_id, usage=Usage(), error_code="abandoned", abandoned=True)
    draft.event(
        RequestEnd,
        model_request_start_id=request_id,
        model_usage=model_usage(Usage()),
        usage=TokenUsage(),
        is_error=True,
        error_code="abandoned",
    )


def add_session_error(
    draft: Draft,
    *,
    code: str,
    message: str,
    error_type: ErrorType = "unknown_error",
    retry: RetryType = "terminal",
) -> None:
    """Tells readers of a failure. `message` is for users."""
    detail = ErrorDetail(type=error_type, code=code, message=message, retry_status=RetryStatus(type=retry))
    draft.event(SessionError, error=detail)


def model_usage(usage: Usage) -> ModelUsage:
    """Our usage in the terms of hosted agent APIs, where unknown counts read as 0."""
    cached = (usage.cache_read_tokens or 0) + (usage.cache_write_tokens or 0)
    return ModelUsage(
        input_tokens=max((usage.input_tokens or 0) - cached, 0),
        output_tokens=usage.output_tokens or 0,
        cache_read_input_tokens=usage.cache_read_tokens or 0,
        cache_creation_input_tokens=usage.cache_write_tokens or 0,
    )


def finish_call(call: ToolCall, result: ToolResult, outcome: Outcome) -> ToolCall:
    """`call` with its result."""
    return replace(call, state="done", outcome=outcome, result=result)


def lost_call(call: ToolCall) -> ToolCall:
    """A call whose worker died in the middle of it, with a result that says so."""
    result = text_result(WORKER_LOST, is_error=True, details={"code": "worker_lost"})
    return finish_call(call, result, "unknown")


_STOPPED = {
    "pending": ("not_started", NOT_STARTED),
    "running": ("interrupted", INTERRUPTED),
    "open": ("not_answered", NOT_ANSWERED),
}


def stopped_call(call: ToolCall) -> ToolCall:
    """A call that a stop ended, with a result that says how far it came."""
    code, text = _STOPPED[call.state]
    if call.state == "open" and call.kind == "server":
        code, text = "not_started", NOT_APPROVED
    return finish_call(call, text_result(text, is_error=True, details={"code": code}), "cancelled")


def skipped_call(call: ToolCall) -> ToolCall:
    """A call that is not finished because another one of its turn has closed the run."""
    result = text_result(SKIPPED, is_error=True, details={"code": "skipped"})
    return finish_call(call, result, "skipped")


def record_result(draft: Draft, call: ToolCall) -> None:
    """Stores the result of `call` and tells readers. The transcript gets it with `append_results`."""
    assert call.result is not None
    assert call.outcome is not None
    draft.call(call)
    draft.event(
        AgentToolResult,
        tool_use_id=call.id,
        content=call.result.content,
        is_error=call.result.is_error,
        outcome=call.outcome,
        details=call.result.details,
    )


def ending_of(calls: tuple[ToolCall, ...]) -> StopReason | None:
    """How the run ends by what its tools have returned; None: it goes on.

    A direct return ends it at once, all else when the last call of the turn is finished.
    """
    results = [call.result for call in calls if call.state == "done" and call.outcome == "ok" and call.result]
    data = next((result.data for result in results if result.data is not None), None)
    if data is not None:
        return StopReason(type="direct_return", result=data)
    if not calls or any(call.state != "done" for call in calls):
        return None
    ends_turn = any(call.result is not None and call.result.ends_turn for call in calls)
    all_hint = len(results) == len(calls) and all(result.terminate for result in results)
    return StopReason(type="end_turn") if ends_turn or all_hint else None


def append_results(draft: Draft, calls: tuple[ToolCall, ...]) -> None:
    """Puts the results of `calls`, all done, into the transcript: one message, in source order."""
    ordered = sorted(calls, key=lambda call: call.index)
    draft.message(Message(role="tool", blocks=tuple(_result_block(call) for call in ordered)))


def _stop_calls(draft: Draft, calls: tuple[ToolCall, ...], *, skip: bool) -> None:
    if not calls:
        return
    ended = skipped_call if skip else stopped_call
    done = [call if call.state == "done" else ended(call) for call in calls]
    for before, after in zip(calls, done, strict=True):
        if before is not after:
            record_result(draft, after)
    append_results(draft, tuple(done))


def _result_block(call: ToolCall) -> ToolResultBlock:
    assert call.result is not None
    return ToolResultBlock(
        tool_use_id=call.tool_use_id, content=call.result.content, is_error=call.result.is_error
    )
