"""What the client's answer makes of a call that is open. Storing it is up to the caller."""

from msgspec.structs import replace

from agents.closing import finish_call
from agents.events import UserContent
from agents.types import ToolCall
from tools.questions import read_answers
from tools.types import ToolResult, text_result

DENIED = "Denied by the user: it was not run."


def answered(call: ToolCall, content: tuple[UserContent, ...], *, is_error: bool) -> ToolCall:
    """A call of the client's tool, or a question, with what the client sent. Raises: AnswerRefused."""
    if call.kind == "question" and not is_error:
        content = read_answers(call.input, content)
    return _finished(call, content, is_error=is_error)


def replied(call: ToolCall, content: tuple[UserContent, ...]) -> ToolCall:
    """A question that a plain message of the client answers."""
    return _finished(call, content, is_error=False)


def _finished(call: ToolCall, content: tuple[UserContent, ...], *, is_error: bool) -> ToolCall:
    result = ToolResult(content=content, is_error=is_error)
    return finish_call(call, result, "error" if is_error else "ok")


def allowed(call: ToolCall) -> ToolCall:
    """A call that may run, with the arguments that it was shown with."""
    return replace(call, state="pending")


def denied(call: ToolCall, message: str | None) -> ToolCall:
    """A call that will not run. The model reads that, and the user's `message`."""
    text = f"{DENIED} They say: {message}" if message else DENIED
    return finish_call(call, text_result(text, is_error=True, details={"code": "denied"}), "denied")
