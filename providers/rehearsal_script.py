"""The line language of the rehearsal model: from the text of a prompt to the steps that it plays.

`docs/rehearsal.md` is the reference. Parsing is pure; playing is in `providers.rehearsal`.
"""

import math
import re
from collections.abc import Callable, Iterator
from decimal import Decimal, InvalidOperation
from typing import Literal

import msgspec
from msgspec import Struct

from providers.errors import ProviderError, RequestRejected
from providers.types import Usage

MAX_LONG_WORDS = 200_000
MAX_WAIT_S = 3_600.0
MAX_PACE_MS = 60_000.0

_LINE = re.compile(r"([a-z_]+)(?::[ \t]?(.*))?\Z", re.DOTALL)
_AFTER = re.compile(r"after (\d{1,9})(?: deltas?)?\Z")
_FAIL = re.compile(r"([a-z_]+)(?: after (\d{1,9})(?: deltas?)?)?(?: times (\d{1,9}))?\Z")
_CALL = re.compile(r"(\S*)\s*(.*)\Z", re.DOTALL)


ERROR_CLASSES: dict[str, type[ProviderError]] = {kind.code: kind for kind in ProviderError.__subclasses__()}


PartKind = Literal["think", "say", "call", "echo"]


class Part(Struct, frozen=True, kw_only=True):
    """One block of an answer, and how it is streamed.

    `text` is what is said or thought, or the raw arguments of a `call` of `name`. `words` asks for that many
    numbered words instead. `echo` repeats the last tool results. `chunk_chars` None streams word by word.
    """

    kind: PartKind
    text: str = ""
    name: str = ""
    words: int = 0
    pace_s: float = 0.0
    chunk_chars: int | None = None

    def pieces(self, text: str) -> Iterator[str]:
        """`text`, or the numbered words, in the pieces that become deltas. None is empty."""
        if self.chunk_chars is None:
            if self.words:
                return (f"word{n}" if n == self.words else f"word{n} " for n in range(1, self.words + 1))
            return (match.group() for match in re.finditer(r"\s*\S+\s*|\s+", text))
        if self.words:
            text = " ".join(f"word{n}" for n in range(1, self.words + 1))
        return (text[at : at + self.chunk_chars] for at in range(0, len(text), self.chunk_chars))


class Ending(Struct, frozen=True, kw_only=True):
    """How a step ends, and after how many deltas (None: after all of them).

    `error` is the code to fail with, at the first `times` attempts (None: at every one).
    """

    kind: Literal["complete", "fail", "hang", "truncate", "refuse", "max_tokens"] = "complete"
    after_deltas: int | None = None
    error: str = ""
    times: int | None = None


class Step(Struct, frozen=True, kw_only=True):
    """One answer of the model. `usage` None is counted from the texts. `native` is a raw JSON array."""

    parts: tuple[Part, ...] = ()
    wait_s: float = 0.0
    ending: Ending = Ending()
    retry_after_s: float | None = None
    usage: Usage | None = None
    native: str | None = None


def is_script(text: str) -> bool:
    """True when the first line that is neither blank nor a comment is a directive."""
    for line in _lines(text):
        if line.strip() and not line.startswith("#"):
            return _match(line) is not None
    return False


def parse_script(text: str) -> tuple[Step, ...]:
    """The steps of a script, at least one.

    Raises: RequestRejected naming the line that cannot be read, and what may stand there.
    """
    steps: list[Step] = []
    draft = _Draft()
    for number, line, argument in _logical_lines(text):
        if line == "---":
            steps.append(draft.finish())
            draft = _Draft(pace_s=draft.pace_s, chunk_chars=draft.chunk_chars)
            continue
        try:
            DIRECTIVES[line](draft, argument)
        except _BadArgumentError as error:
            raise RequestRejected(f"rehearsal script, line {number}: `{line}` {error}") from None
    steps.append(draft.finish())
    return tuple(steps)


class _BadArgumentError(ValueError):
    """What a directive needs instead of what stands behind it."""


def _lines(text: str) -> list[str]:
    return [line.removesuffix("\r") for line in text.split("\n")]


def _match(line: str) -> tuple[str, str] | None:
    """The directive of a line and its argument, or None."""
    match = _LINE.match(line.rstrip())
    if match is None or match[1] not in DIRECTIVES or (match[2] is None and match[1] not in _BARE):
        return None
    return match[1], match[2] or ""


def _logical_lines(text: str) -> Iterator[tuple[int, str, str]]:
    """Number, directive (or `---`) and argument of each line, indented lines joined to the one above."""
    found: list[tuple[int, str, list[str]]] = []
    for number, line in enumerate(_lines(text), start=1):
        if line.startswith(("  ", "\t")) and found and found[-1][1] != "---":
            found[-1][2].append(line[1:] if line[0] == "\t" else line[2:])
        elif line.rstrip() == "---":
            found.append((number, "---", []))
        elif line.strip() and not line.startswith("#"):
            directive = _match(line)
            if directive is None:
                names = ", ".join(DIRECTIVES)
                raise RequestRejected(
                    f"rehearsal script, line {number}: {line[:80]!r} is no directive. Known: {names}, --- "
                    "(indent a line by two spaces to continue the text above)"
                )
            found.append((number, directive[0], [directive[1]]))
    for number, name, lines in found:
        yield number, name, "\n".join(lines)


class _Draft:
    """A step being read. Pace and chunk hold from their line on, into the steps that follow."""

    def __init__(self, *, pace_s: float = 0.0, chunk_chars: int | None = None) -> None:
        self.pace_s = pace_s
        self.chunk_chars = chunk_chars
        self.parts: list[Part] = []
        self.wait_s = 0.0
        self.ending = Ending()
        self.retry_after_s: float | None = None
        self.usage: Usage | None = None
        self.native: str | None = None

    def add(self, kind: PartKind, text: str = "", *, name: str = "", words: int = 0) -> None:
        self.parts.append(
            Part(
                kind=kind, text=text, name=name, words=words, pace_s=self.pace_s, chunk_chars=self.chunk_chars
            )
        )

    def finish(self) -> Step:
        return Step(
            parts=tuple(self.parts),
            wait_s=self.wait_s,
            ending=self.ending,
            retry_after_s=self.retry_after_s,
            usage=self.usage,
            native=self.native,
        )


# -- directives -----------------------------------------------------------------------------------------


def _think(draft: _Draft, argument: str) -> None:
    draft.add("think", argument)


def _say(draft: _Draft, argument: str) -> None:
    draft.add("say", argument)


def _call(draft: _Draft, argument: str) -> None:
    match = _CALL.match(argument)
    if match is None or not match[1]:
        raise _BadArgumentError("needs the name of a tool, then its arguments as JSON")
    draft.add("call", match[2], name=match[1])


def _echo(draft: _Draft, argument: str) -> None:
    _refuse_argument(argument)
    draft.add("echo")


def _long(draft: _Draft, argument: str) -> None:
    draft.add("say", words=int(_number(argument, most=MAX_LONG_WORDS, whole=True)))


def _pace(draft: _Draft, argument: str) -> None:
    draft.pace_s = _number(argument, most=MAX_PACE_MS) / 1_000


def _chunk(draft: _Draft, argument: str) -> None:
    draft.chunk_chars = int(_number(argument, least=1, most=1_000_000, whole=True))


def _wait(draft: _Draft, argument: str) -> None:
    draft.wait_s = _number(argument, most=MAX_WAIT_S)


def _retry_after(draft: _Draft, argument: str) -> None:
    draft.retry_after_s = _number(argument, most=1e9)


def _fail(draft: _Draft, argument: str) -> None:
    match = _FAIL.match(argument.strip())
    if match is None or match[1] not in ERROR_CLASSES:
        codes = ", ".join(ERROR_CLASSES)
        raise _BadArgumentError(f"needs `code [after N deltas] [times K]` with a code of: {codes}")
    draft.ending = Ending(
        kind="fail",
        error=match[1],
        after_deltas=int(match[2] or 0),
        times=int(match[3]) if match[3] else None,
    )


def _ends(kind: Literal["hang", "truncate", "refuse", "max_tokens"]) -> Callable[[_Draft, str], None]:
    def directive(draft: _Draft, argument: str) -> None:
        after = 0 if kind == "hang" else None
        if argument.strip():
            match = _AFTER.match(argument.strip())
            if match is None:
                raise _BadArgumentError("takes nothing, or `after N deltas`")
            after = int(match[1])
        draft.ending = Ending(kind=kind, after_deltas=after)

    return directive


_USAGE_FIELDS = {
    "in": "input_tokens",
    "out": "output_tokens",
    "cache_read": "cache_read_tokens",
    "cache_write": "cache_write_tokens",
    "reasoning": "reasoning_tokens",
}


def _usage(draft: _Draft, argument: str) -> None:
    """Counts that are not named are unknown; `usage: none` says nothing at all."""
    fields: dict[str, int | Decimal] = {}
    for pair in [] if argument.strip() == "none" else argument.split():
        key, _, value = pair.partition("=")
        try:
            if key == "cost":
                fields["cost_usd"] = Decimal(value)
            else:
                fields[_USAGE_FIELDS[key]] = int(value)
        except (KeyError, ValueError, InvalidOperation):
            known = ", ".join((*_USAGE_FIELDS, "cost"))
            raise _BadArgumentError(f"needs `none` or pairs like in=120 out=30; known: {known}") from None
    draft.usage = msgspec.convert(fields, Usage)


def _native(draft: _Draft, argument: str) -> None:
    try:
        msgspec.json.decode(argument, type=list)
    except (msgspec.MsgspecError, RecursionError):
        raise _BadArgumentError("needs a JSON array") from None
    draft.native = argument


def _refuse_argument(argument: str) -> None:
    if argument.strip():
        raise _BadArgumentError("takes nothing behind it")


def _number(text: str, *, least: float = 0, most: float, whole: bool = False) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not least <= value <= most or (whole and value != int(value)):
        kind = "a whole number" if whole else "a number"
        raise _BadArgumentError(f"needs {kind} from {least:g} to {most:g}")
    return value


DIRECTIVES: dict[str, Callable[[_Draft, str], None]] = {
    "think": _think,
    "say": _say,
    "call": _call,
    "echo": _echo,
    "long": _long,
    "pace": _pace,
    "chunk": _chunk,
    "wait": _wait,
    "fail": _fail,
    "retry_after": _retry_after,
    "hang": _ends("hang"),
    "truncate": _ends("truncate"),
    "refuse": _ends("refuse"),
    "max_tokens": _ends("max_tokens"),
    "usage": _usage,
    "native": _native,
}
_BARE = frozenset({"echo", "hang", "truncate", "refuse", "max_tokens"})
