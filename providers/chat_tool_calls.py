"""Puts tool calls together from the fragments of a Chat Completions stream.

The many servers of this format disagree about everything but the name and the arguments: indexes are
missing or always 0, ids are missing, empty, repeated or come late, names are repeated in each fragment,
arguments come as text, as objects or not at all. What belongs to one call is decided here, at one place.
"""

import json
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from providers.cleaning import clean_text
from providers.errors import BadPayload
from providers.tool_arguments import read_arguments
from providers.types import JsonObject, ToolCallDelta, ToolCallEnd, ToolCallStart

_FORMAT_KEYS = frozenset({"index", "id", "type", "function"})


@dataclass
class _Call:
    block_index: int
    wire_id: str = ""
    id: str = ""
    name: str = ""
    pieces: list[str] = field(default_factory=list)
    extra: JsonObject = field(default_factory=dict)

    @property
    def arguments(self) -> str:
        return "".join(self.pieces)

    @property
    def has_arguments(self) -> bool:
        return any(piece.strip() for piece in self.pieces)


class ToolCallAssembler:
    """The calls of one message, in the order of their first fragments.

    `next_index` gives the index of the next block of the message. `agent_name` turns the name on the wire
    into the tool's name as the agent knows it.
    """

    def __init__(self, *, next_index: Callable[[], int], agent_name: Callable[[str], str]) -> None:
        self._next_index = next_index
        self._agent_name = agent_name
        self._calls: list[_Call] = []
        self._by_index: dict[int, _Call] = {}

    @property
    def has_calls(self) -> bool:
        return bool(self._calls)

    def feed(self, fragments: Any) -> list[ToolCallStart | ToolCallDelta]:
        """The events of one chunk's `tool_calls`. What is not a list of objects is ignored."""
        events: list[ToolCallStart | ToolCallDelta] = []
        for fragment in fragments if isinstance(fragments, list) else ():
            if isinstance(fragment, dict):
                events += self._feed_one(fragment)
        return events

    def _feed_one(self, fragment: JsonObject) -> list[ToolCallStart | ToolCallDelta]:
        function = fragment.get("function")
        if not isinstance(function, dict):
            function = {}
        wire_id, name = _text(fragment.get("id")), _text(function.get("name"))
        arguments = _argument_text(function.get("arguments"))
        call = self._call_of(_index(fragment.get("index")), wire_id, name, arguments)
        call.wire_id = call.wire_id or wire_id
        call.extra |= {key: value for key, value in fragment.items() if key not in _FORMAT_KEYS and value}
        events: list[ToolCallStart | ToolCallDelta] = []
        if name and not call.name:
            call.name = name
            call.id = self._fresh_id(call.wire_id)
            events.append(ToolCallStart(index=call.block_index, id=call.id, name=self._agent_name(call.name)))
            if call.has_arguments:  # they came before the name
                events.append(ToolCallDelta(index=call.block_index, json=call.arguments))
        if arguments:
            call.pieces.append(arguments)
            if call.name:
                events.append(ToolCallDelta(index=call.block_index, json=arguments))
        return events

    def _call_of(self, index: int | None, wire_id: str, name: str, arguments: str) -> _Call:
        """The call that a fragment continues, or a new one."""
        if index is not None:
            call = self._by_index.get(index)
        else:
            by_id = (call for call in self._calls if wire_id and call.wire_id == wire_id)
            call = next(by_id, self._calls[-1] if self._calls else None)
        if call is None or _begins_another(call, wire_id, name, arguments):
            call = _Call(self._next_index())
            self._calls.append(call)
        if index is not None:
            self._by_index[index] = call
        return call

    def _fresh_id(self, wire_id: str) -> str:
        taken = {call.id for call in self._calls}
        return wire_id if wire_id and wire_id not in taken else f"call_{uuid.uuid4().hex}"

    def finish(self, *, is_cut: bool) -> list[ToolCallEnd]:
        """The ends of all calls, in order.

        `is_cut`: the output limit ended the message. A call whose arguments are not a whole object then gets
        no end, so it cannot run. Otherwise unreadable arguments give an end with an `input_error`.

        Raises: BadPayload, when a call never got a name.
        """
        ends = []
        for call in self._calls:
            if not call.name and not is_cut:
                raise BadPayload("the answer holds a tool call without a name")
            arguments = read_arguments(clean_text(call.arguments))
            is_whole = call.has_arguments and arguments.input_error is None
            if call.name and (is_whole or not is_cut):
                ends.append(
                    ToolCallEnd(
                        index=call.block_index,
                        input=arguments.input,
                        input_error=arguments.input_error,
                        input_raw=arguments.input_raw,
                    )
                )
        return ends

    def has_unreadable_call(self) -> bool:
        """Whether the arguments of some call are not a whole JSON object."""
        return any(read_arguments(clean_text(call.arguments)).input_error for call in self._calls)

    def extras(self) -> dict[str, JsonObject]:
        """By call id, what came with a call beyond the format: signatures that must be sent back."""
        return {call.id: call.extra for call in self._calls if call.id and call.extra}


def _begins_another(call: _Call, wire_id: str, name: str, arguments: str) -> bool:
    """Whether a fragment that points at `call` is in truth the first of another call.

    A repeated id or a repeated name means the same call, unless whole arguments begin again; some servers
    change the id within a call, so a bare other id counts only when the arguments are complete.
    """
    if wire_id and wire_id == call.wire_id:
        return False
    has_other_id = bool(wire_id and call.wire_id)
    if name and call.name and (has_other_id or name != call.name):
        return True
    if has_other_id and not name:
        return _is_whole(call)
    return bool(name and call.name) and arguments.lstrip().startswith("{") and _is_whole(call)


def _is_whole(call: _Call) -> bool:
    """Whether the arguments so far are one whole object. The last character is looked at first: parsing
    at each fragment would be quadratic."""
    last = next((piece.rstrip() for piece in reversed(call.pieces) if piece.strip()), "")
    return last.endswith("}") and read_arguments(clean_text(call.arguments)).input_error is None


def _index(value: Any) -> int | None:
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    return int(value) if isinstance(value, str) and value.isdecimal() else None


def _text(value: Any) -> str:
    return value.strip() if isinstance(value, str) else ""


def _argument_text(value: Any) -> str:
    if isinstance(value, str):
        return value
    return "" if value is None else json.dumps(value, ensure_ascii=False)
