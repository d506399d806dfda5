"""Tool names as the model APIs accept them.

Tools of other servers may be called `calendar.list` or have 128 characters; one such name makes an API
refuse the whole request.
"""

import hashlib
import re
from collections.abc import Iterable

_LEGAL = re.compile(r"[a-zA-Z0-9_-]{1,64}", re.ASCII)
_ILLEGAL_CHARACTER = re.compile(r"[^a-zA-Z0-9_-]", re.ASCII)
_DIGEST_CHARS = 10
_HEAD_CHARS = 64 - 1 - _DIGEST_CHARS


def wire_name(name: str, *, salt: int = 0) -> str:
    """A legal name for `name`: itself where it is legal, else a readable part and a digest of the whole.

    The same in every process, and on its own: it does not depend on which other tools there are.
    """
    if salt == 0 and _LEGAL.fullmatch(name):
        return name
    head = _ILLEGAL_CHARACTER.sub("_", name)[:_HEAD_CHARS] or "tool"
    text = name if salt == 0 else f"{salt}\x00{name}"
    digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:_DIGEST_CHARS]
    return f"{head}_{digest}"


class ToolNames:
    """The two-way mapping for the tools of one request. No two of them share a wire name."""

    def __init__(self, names: Iterable[str]) -> None:
        self._wire: dict[str, str] = {}
        self._own: dict[str, str] = {}
        # Legal names first, since they must stay as they are; sorted: the order of tools changes nothing.
        for name in sorted(set(names), key=lambda name: (not _LEGAL.fullmatch(name), name)):
            salt = 0
            while (wire := wire_name(name, salt=salt)) in self._own:
                salt += 1
            self._wire[name] = wire
            self._own[wire] = name

    def to_wire(self, name: str) -> str:
        """The legal name of a tool. Also for a name in old history whose tool is gone."""
        return self._wire.get(name) or wire_name(name)

    def from_wire(self, wire: str) -> str:
        """The tool's own name; `wire` itself where no tool has it (models invent tools)."""
        return self._own.get(wire, wire)
