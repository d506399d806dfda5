"""What a tool tells the model when a call cannot be answered, and what is wrong with a tool itself.

ToolError                the model can correct it: its text becomes the call's result
├── InvalidArguments     the arguments do not fit the schema
├── UnknownTool          no tool of that name is offered to this agent
└── UnusableResult       the tool returned something that has no JSON form
AnswerRefused            the client can correct it: its answer does not fit what was asked
SchemaRefused            whoever defines the tool can correct it: its schema cannot be used
"""

from typing import ClassVar


class ToolError(Exception):
    """Raised by a tool to answer a call with an error text that the model sees and can act on."""

    code: ClassVar[str] = "tool_error"


class InvalidArguments(ToolError):
    code = "invalid_arguments"


class UnknownTool(ToolError):
    code = "tool_not_found"


class UnusableResult(ToolError):
    code = "unusable_result"


class AnswerRefused(Exception):
    """A client's answer to questions that cannot be one. The message says why."""

    code: ClassVar[str] = "invalid_answer"


class SchemaRefused(Exception):
    """A JSON Schema that is wrong, too large, or could make validation slow. The message says why."""

    code: ClassVar[str] = "invalid_schema"
