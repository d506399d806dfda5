"""The tools that an agent may use, by name."""

import re
from collections.abc import Iterable, Iterator

from providers.types import JsonObject, ToolSpec
from tools.errors import SchemaRefused, UnknownTool
from tools.types import Tool
from tools.validation import check_schema, validate_arguments

MAX_NAMES_TOLD = 50  # in the text that answers an unknown name
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")  # what every model API accepts


class ToolRegistry:
    """Tools by name. Iteration, `names` and `specs` are sorted: requests need a byte-stable prefix."""

    def __init__(self, tools: Iterable[Tool] = ()) -> None:
        self._tools: dict[str, Tool] = {}
        for tool in tools:
            self.register(tool)

    def register(self, tool: Tool) -> None:
        """Adds a tool.

        Raises: ValueError for a name that is taken or that no API accepts; SchemaRefused naming the tool.
        """
        if not _NAME.fullmatch(tool.name):
            raise ValueError(f"tool name {tool.name!r} must be 1 to 64 letters, digits, `_` or `-`")
        if tool.name in self._tools:
            raise ValueError(f"a tool called {tool.name!r} is registered already")
        try:
            check_schema(tool.input_schema)
        except SchemaRefused as error:
            raise SchemaRefused(f"Tool {tool.name!r}: {error}") from None
        self._tools[tool.name] = tool

    def get(self, name: str) -> Tool:
        """The tool of exactly this name.

        Raises: UnknownTool with a text for the model that lists the names that exist here.
        """
        tool = self._tools.get(name)
        if tool is None:
            names = self.names()
            told = ", ".join(names[:MAX_NAMES_TOLD]) + (", …" if len(names) > MAX_NAMES_TOLD else "")
            raise UnknownTool(f"There is no tool called {name[:80]!r}. Available: {told or 'none'}.")
        return tool

    def find(self, name: str) -> Tool | None:
        return self._tools.get(name)

    def prepare(self, name: str, arguments: JsonObject) -> Tool:
        """The tool, when it exists and the arguments fit its schema.

        Raises: UnknownTool, InvalidArguments; their texts are for the model.
        """
        tool = self.get(name)
        validate_arguments(tool.input_schema, arguments)
        return tool

    def select(self, names: Iterable[str]) -> "ToolRegistry":
        """A registry of these tools only; the agent that gets it learns of no others.

        Raises: UnknownTool.
        """
        return ToolRegistry(self.get(name) for name in dict.fromkeys(names))

    def names(self) -> tuple[str, ...]:
        return tuple(sorted(self._tools))

    def specs(self) -> tuple[ToolSpec, ...]:
        """The tools as a model sees them."""
        return tuple(
            ToolSpec(
                name=tool.name,
                description=tool.description,
                input_schema=tool.input_schema,
                strict=tool.strict,
            )
            for tool in self
        )

    def __iter__(self) -> Iterator[Tool]:
        return (self._tools[name] for name in self.names())

    def __len__(self) -> int:
        return len(self._tools)

    def __contains__(self, name: object) -> bool:
        return name in self._tools
