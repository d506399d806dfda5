"""What a tool tells the model when a call cannot be answered.

ToolError                the model can correct it: its text becomes the call's result
├── InvalidArguments     the arguments do not fit the schema
└── UnknownTool          no tool of that name is offered to this agent
"""

from typing import ClassVar


class ToolError(Exception):
    """Raised by a tool to answer a call with an error text that the model sees and can act on."""

    code: ClassVar[str] = "tool_error"


class InvalidArguments(ToolError):
    code = "invalid_arguments"


class UnknownTool(ToolError):
    code = "tool_not_found"
