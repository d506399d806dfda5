"""What hooks decide about a turn that is over."""

from agents.drafts import Draft
from agents.events import StopReason
from agents.hooks import TurnDecision, TurnReport
from agents.progress import Progress, Write, nothing
from providers.cleaning import clean_text
from providers.types import Message, TextBlock


async def decision_on(progress: Progress, report: TurnReport) -> TurnDecision | None:
    """What hooks say about a turn; None for one that has failed or was stopped: it ends the run anyway."""
    if not progress.hooks.has("finish_turn"):
        return None
    decision = await progress.hooks.decide(progress.hook_context, report)
    return decision if report.status == "done" else None


async def finish_turn(progress: Progress) -> None:
    """After the calls of a turn: closes the run, or adds a message, when a hook says so. Raises: HoldLost."""
    decision = await decision_on(progress, TurnReport(text="", calls=progress.finished_calls))
    if decision is None:
        return
    if decision.action == "end":
        await progress.close(StopReason(type="end_turn"))
    elif decision.message.strip():
        await progress.decide(with_message(nothing, decision.message))


def with_message(write: Write, text: str) -> Write:
    """`write`, and then a message to the model as from the user."""

    def write_both(draft: Draft) -> None:
        write(draft)
        draft.message(Message(role="user", blocks=(TextBlock(text=clean_text(text)),)))

    return write_both
