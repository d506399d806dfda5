"""What the client's answer makes of a call that is open. Storing it is up to the caller."""

from msgspec.structs import replace

from agents.closing import finish_call
from agents.events import UserContent
from agents.types import ToolCall
from tools.types import ToolResult, text_result

DENIED = "Denied by the user: it was not run."


def answered(call: ToolCall, content: tuple[UserContent, ...], *, is_error: bool) -> ToolCall:
    """A call of the client's tool, with the result that the client sent."""
    result = ToolResult(content=content, is_error=is_error)
    return finish_call(call, result, "error" if is_error else "ok")


def allowed(call: ToolCall) -> ToolCall:
    """A call that may run, with the arguments that it was shown with."""
    return replace(call, state="pending")


def denied(call: ToolCall, message: str | None) -> ToolCall:
    """A call that will not run. The model reads that, and the user's `message`."""
    text = f"{DENIED} They say: {message}" if message else DENIED
    return finish_call(call, text_result(text, is_error=True, details={"code": "denied"}), "denied")
