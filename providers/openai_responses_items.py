"""The output items of one response, from their events to ours and to the bytes that are kept."""

import json
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec

from providers.cleaning import clean_json, clean_text
from providers.tool_arguments import read_arguments
from providers.types import (
    JsonObject,
    ProviderEvent,
    TextDelta,
    ThinkingDelta,
    ToolCallDelta,
    ToolCallEnd,
    ToolCallStart,
)

ItemKey = int | str
"""The position of an item in the output, or its id where an event has no position."""


class _ItemEvent(msgspec.Struct):
    item: msgspec.Raw


@dataclass
class _Part:
    """A text part of an item: one block of ours."""

    index: int
    kind: type[TextDelta] | type[ThinkingDelta]
    pieces: list[str] = field(default_factory=list)


@dataclass
class _Call:
    index: int
    id: str
    pieces: list[str] = field(default_factory=list)
    is_cut: bool = False
    has_ended: bool = False


class OutputItems:
    """Reads the events of items. Whatever a server leaves out is made up for by a later, fuller event:
    deltas by the item that is done, items by the final response."""

    def __init__(self, *, agent_name: Callable[[str], str]) -> None:
        self.has_refusal = False
        self._agent_name = agent_name
        self._blocks = 0
        self._parts: dict[tuple[ItemKey, str, int], _Part] = {}
        self._calls: dict[ItemKey, _Call] = {}
        self._native: dict[ItemKey, bytes] = {}
        self._done_ids: set[str] = set()

    @property
    def has_ended_calls(self) -> bool:
        return any(call.has_ended for call in self._calls.values())

    def read(self, kind: str, event: JsonObject, data: bytes) -> Iterator[ProviderEvent]:
        """Our events for one event of an item. `data` are its bytes, for lossless replay."""
        key, text = _key(event), event.get("delta")
        if kind == "response.output_item.added":
            item = event.get("item")
            if isinstance(item, dict) and item.get("type") == "function_call":
                yield from self._start_call(key, item)
        elif kind == "response.output_item.done":
            item = event.get("item")
            if isinstance(item, dict):
                yield from self._finish_item(key, item, _item_bytes(data, item))
        elif kind == "response.function_call_arguments.done":
            yield from self._grow_call(key, event.get("arguments"), is_whole=True)
        elif kind == "response.function_call_arguments.delta":
            yield from self._grow_call(key, text)
        elif kind in _TEXT_DELTAS and isinstance(text, str):
            where, delta_type = _TEXT_DELTAS[kind]
            self.has_refusal = self.has_refusal or kind == "response.refusal.delta"
            number = event.get("summary_index" if where == "summary" else "content_index")
            yield from self._grow_part(
                (key, where, number if isinstance(number, int) else 0), delta_type, text
            )

    def finish(self, output: Any, *, is_cut: bool) -> Iterator[ProviderEvent]:
        """What the final response has beyond the events before it, and the ends of the calls.

        `is_cut`: a call whose arguments are not a whole object gets no end.
        """
        for position, item in enumerate(output if isinstance(output, list) else ()):
            if isinstance(item, dict) and not self._is_done(position, item):
                yield from self._finish_item(position, item, _encoded(item))
        for call in self._calls.values():
            yield from self._end_call(call, is_final=not is_cut)

    def native_body(self) -> bytes | None:
        """The items in the order of the output, as a JSON array; a call that was cut is left out."""
        cut = {key for key, call in self._calls.items() if not call.has_ended}
        ordered = sorted(self._native, key=lambda key: key if isinstance(key, int) else 0)
        kept = [self._native[key] for key in ordered if key not in cut]
        return b"[" + b",".join(kept) + b"]" if kept else None

    def _is_done(self, position: int, item: JsonObject) -> bool:
        return position in self._native or item.get("id") in self._done_ids

    def _next_index(self) -> int:
        self._blocks += 1
        return self._blocks - 1

    def _finish_item(self, key: ItemKey, item: JsonObject, data: bytes) -> Iterator[ProviderEvent]:
        self._native[key] = data
        if isinstance(item_id := item.get("id"), str) and item_id:
            self._done_ids.add(item_id)
        if item.get("type") == "function_call":
            yield from self._start_call(key, item)
            yield from self._grow_call(key, item.get("arguments"), is_whole=True)
            call = self._calls[key]
            call.is_cut = item.get("status") == "incomplete"
            yield from self._end_call(call, is_final=False)
            return
        for where in ("summary", "content"):
            parts = item.get(where)
            for number, part in enumerate(parts if isinstance(parts, list) else ()):
                yield from self._finish_part((key, where, number), part)

    def _finish_part(self, key: tuple[ItemKey, str, int], part: Any) -> Iterator[ProviderEvent]:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in _PART_TEXTS:
            return
        name, delta_type = _PART_TEXTS[kind]
        self.has_refusal = self.has_refusal or kind == "refusal"
        if isinstance(text := part.get(name), str):
            known = self._parts.get(key)
            yield from self._grow_part(key, delta_type, _missing(known.pieces if known else [], text))

    def _grow_part(
        self, key: tuple[ItemKey, str, int], kind: type[TextDelta] | type[ThinkingDelta], text: str
    ) -> Iterator[ProviderEvent]:
        if not text:
            return
        part = self._parts.get(key)
        if part is None:
            part = self._parts[key] = _Part(self._next_index(), kind)
        part.pieces.append(text)
        yield part.kind(index=part.index, text=text)

    def _start_call(self, key: ItemKey, item: JsonObject) -> Iterator[ProviderEvent]:
        name = item.get("name")
        if key in self._calls or not isinstance(name, str) or not name:
            return
        wire_id = item.get("call_id") or item.get("id")
        taken = {call.id for call in self._calls.values()}
        is_usable = isinstance(wire_id, str) and wire_id not in taken
        call_id = str(wire_id) if is_usable else f"call_{uuid.uuid4().hex}"
        call = self._calls[key] = _Call(self._next_index(), call_id)
        yield ToolCallStart(index=call.index, id=call.id, name=self._agent_name(name))

    def _grow_call(self, key: ItemKey, arguments: Any, *, is_whole: bool = False) -> Iterator[ProviderEvent]:
        call = self._calls.get(key)
        if isinstance(arguments, dict):
            arguments = json.dumps(arguments)
        if call is None or call.has_ended or not isinstance(arguments, str) or not arguments:
            return
        missing = _missing(call.pieces, arguments) if is_whole else arguments
        if is_whole:  # what was streamed is a preview, the whole text is the truth
            call.pieces = [arguments]
        else:
            call.pieces.append(arguments)
        if missing:
            yield ToolCallDelta(index=call.index, json=missing)

    def _end_call(self, call: _Call, *, is_final: bool) -> Iterator[ProviderEvent]:
        """Ends a call that is whole. Blank or unreadable arguments may be cut: they wait for `is_final`."""
        if call.has_ended or call.is_cut:
            return
        text = clean_text("".join(call.pieces))
        arguments = read_arguments(text)
        if is_final or (text.strip() and arguments.input_error is None):
            call.has_ended = True
            yield ToolCallEnd(
                index=call.index,
                input=arguments.input,
                input_error=arguments.input_error,
                input_raw=arguments.input_raw,
            )


_TEXT_DELTAS: dict[str, tuple[str, type[TextDelta] | type[ThinkingDelta]]] = {
    "response.output_text.delta": ("content", TextDelta),
    "response.refusal.delta": ("content", TextDelta),
    "response.reasoning_text.delta": ("content", ThinkingDelta),
    "response.reasoning_summary_text.delta": ("summary", ThinkingDelta),
}
_PART_TEXTS: dict[Any, tuple[str, type[TextDelta] | type[ThinkingDelta]]] = {
    "output_text": ("text", TextDelta),
    "refusal": ("refusal", TextDelta),
    "reasoning_text": ("text", ThinkingDelta),
    "summary_text": ("text", ThinkingDelta),
}


def _key(event: JsonObject) -> ItemKey:
    position = event.get("output_index")
    if isinstance(position, int):
        return position
    item = event.get("item")
    return str(event.get("item_id") or (item.get("id") if isinstance(item, dict) else ""))


def _missing(pieces: list[str], whole: str) -> str:
    """What of `whole` was not streamed; nothing if something else was."""
    streamed = "".join(pieces)
    return whole[len(streamed) :] if whole.startswith(streamed) else ""


def _item_bytes(data: bytes, item: JsonObject) -> bytes:
    """The item as it came. Only halves of surrogate pairs, which no request can carry, are replaced."""
    try:
        raw = bytes(msgspec.json.decode(data, type=_ItemEvent).item)
        msgspec.json.decode(raw)
    except msgspec.DecodeError:
        return _encoded(item)
    return raw


def _encoded(item: JsonObject) -> bytes:
    try:
        return msgspec.json.encode(item)
    except UnicodeEncodeError:
        return msgspec.json.encode(clean_json(item))
