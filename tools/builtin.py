"""The tools that come with the service."""

from tools.arithmetic import calculate
from tools.clock import current_time_tool
from tools.delay import delay
from tools.memory import compact_memory
from tools.questions import ask_user
from tools.registry import ToolRegistry


def builtin_registry() -> ToolRegistry:
    """A new registry of all built-in tools, to which more may be added."""
    return ToolRegistry((ask_user, calculate, compact_memory, current_time_tool(), delay))
