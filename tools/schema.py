"""Makes a tool from a typed coroutine function: its definition gives name, description and JSON Schema."""

import inspect
import re
from collections.abc import Awaitable, Callable
from typing import Any, get_type_hints

import msgspec

from providers.types import JsonObject
from tools.errors import InvalidArguments
from tools.results import to_result
from tools.types import Execution, Tool, ToolContext, ToolFunction, ToolResult
from tools.validation import check_schema

_ARGS_HEADING = re.compile(r"^\s*(?:Args|Arguments|Parameters):\s*$", re.MULTILINE)
_ARG_LINE = re.compile(r"^\s*(\w+)(?:\s*\([^)]*\))?:\s*(.*)$")


def tool(
    *,
    name: str | None = None,
    description: str | None = None,
    label: str = "",
    strict: bool = False,
    execution: Execution = "parallel",
    idempotent: bool = False,
    requires_approval: bool = False,
    asks_user: bool = False,
    ends_turn: bool = False,
    timeout_s: float | None = None,
    tags: frozenset[str] = frozenset(),
) -> Callable[[Callable[..., Awaitable[Any]]], Tool]:
    """Decorates `async def f(...)` and makes it a `Tool`.

    - The description is the docstring up to an `Args:` section; lines `name: text` of that section, or a
      `msgspec.Meta(description=...)` on the parameter, describe the parameters.
    - Each parameter needs a type that msgspec knows. Unknown arguments are refused; without parameters the
      schema is a closed empty object. A parameter of type `ToolContext` is given the context of the call.
    - The function returns what `tools.results` lists. It raises `ToolError` to tell the model what is wrong.

    Raises: TypeError for a function that cannot be a tool, SchemaRefused for a schema that is too large.
    """

    def decorate(function: Callable[..., Awaitable[Any]]) -> Tool:
        if not inspect.iscoroutinefunction(function):
            raise TypeError(f"{function.__qualname__} must be an async function to be a tool")
        text, described = _read_docstring(inspect.getdoc(function) or "")
        arguments, context_name = _arguments_of(function)
        schema = _schema_of(arguments, described)
        check_schema(schema)
        if not (description or text):
            raise TypeError(f"{function.__qualname__} needs a docstring: it tells the model when to call it")
        return Tool(
            name=name or function.__name__,
            description=description or text,
            input_schema=schema,
            execute=_executor(function, arguments, context_name),
            label=label,
            strict=strict,
            execution=execution,
            idempotent=idempotent,
            requires_approval=requires_approval,
            asks_user=asks_user,
            ends_turn=ends_turn,
            timeout_s=timeout_s,
            tags=tags,
        )

    return decorate


def _arguments_of(function: Callable[..., Any]) -> tuple[type[msgspec.Struct], str | None]:
    """A Struct of the parameters, and the name of the one that takes the context."""
    hints = get_type_hints(function, include_extras=True)
    fields: list[Any] = []
    context_name: str | None = None
    for parameter in inspect.signature(function).parameters.values():
        where = f"parameter `{parameter.name}` of {function.__qualname__}"
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise TypeError(f"{where} cannot be passed by name")
        if parameter.name not in hints:
            raise TypeError(f"{where} has no type")
        hint = hints[parameter.name]
        if hint is ToolContext:
            context_name = parameter.name
        elif parameter.default is parameter.empty:
            fields.append((parameter.name, hint))
        else:
            fields.append((parameter.name, hint, parameter.default))
    struct = msgspec.defstruct("Arguments", fields, kw_only=True, forbid_unknown_fields=True)
    return struct, context_name


def _schema_of(arguments: type[msgspec.Struct], described: dict[str, str]) -> JsonObject:
    """The JSON Schema of the Struct, its own object at the top."""
    schema = msgspec.json.schema(arguments)
    definitions: dict[str, JsonObject] = schema["$defs"]
    top = definitions.pop(schema["$ref"].removeprefix("#/$defs/"))
    del top["title"]
    if not top["required"]:
        del top["required"]
    for name, text in described.items():
        if name in top["properties"]:
            top["properties"][name].setdefault("description", text)
    if definitions:
        top["$defs"] = definitions
    return top


def _executor(
    function: Callable[..., Awaitable[Any]], struct: type[msgspec.Struct], context_name: str | None
) -> ToolFunction:
    async def execute(arguments: JsonObject, context: ToolContext) -> ToolResult:
        try:
            # Lax, so that 3.0 is an integer, as it is in JSON Schema, which has been checked before.
            values = msgspec.convert(arguments, struct, strict=False)
        except msgspec.ValidationError as error:
            raise InvalidArguments(f"The arguments do not fit: {error}.") from None
        passed = {name: getattr(values, name) for name in struct.__struct_fields__}
        if context_name is not None:
            passed[context_name] = context
        return to_result(await function(**passed))

    return execute


def _read_docstring(docstring: str) -> tuple[str, dict[str, str]]:
    """The description, and the text of each parameter in an `Args:` section."""
    heading = _ARGS_HEADING.search(docstring)
    if heading is None:
        return docstring.strip(), {}
    described: dict[str, str] = {}
    current = ""
    for line in docstring[heading.end() :].strip("\n").splitlines():
        if not line.strip():
            break
        if match := _ARG_LINE.match(line):
            current = match[1]
            described[current] = match[2].strip()
        elif current:
            described[current] += " " + line.strip()
    return docstring[: heading.start()].strip(), described
