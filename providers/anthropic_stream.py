"""The events of the Anthropic Messages API read into ours. Does no I/O."""

import json
from collections.abc import Iterator
from typing import Any
from uuid import uuid4

from providers.anthropic_request import API
from providers.errors import BadPayload, StreamTruncated
from providers.tool_arguments import parse_arguments
from providers.tool_names import ToolNames
from providers.types import (
    JsonObject,
    MessageEnd,
    MessageStart,
    NativeBlocks,
    ProviderEvent,
    Stop,
    TextDelta,
    ThinkingDelta,
    ToolCallDelta,
    ToolCallEnd,
    ToolCallStart,
    Usage,
    UsageUpdate,
)

_STOPS = {
    "end_turn": Stop.END_TURN,
    "tool_use": Stop.TOOL_USE,
    "max_tokens": Stop.MAX_TOKENS,
    "stop_sequence": Stop.STOP_SEQUENCE,
    "pause_turn": Stop.PAUSE,
    "refusal": Stop.REFUSAL,
    "model_context_window_exceeded": Stop.CONTEXT_WINDOW,
}
# The last block may have been cut in the middle, although the API says that it stopped.
_CUTTING = frozenset({Stop.MAX_TOKENS, Stop.CONTEXT_WINDOW, Stop.REFUSAL})


class AnswerReader:
    """Assembles one answer: feed it each decoded event, in order.

    The API may pause an answer while tools of its own run: after `is_paused` it is asked again with `content`
    and `go_on`, and what follows belongs to the same answer. `pauses` says how often at most.

    Blocks, deltas and events of unknown types are let through: the API may add some at any time. Blocks are
    numbered in the order of their arrival, whatever index the server gives them.
    """

    def __init__(self, *, model: str, names: ToolNames, pauses: int = 0) -> None:
        self._model = model
        self._names = names
        self._pauses_left = pauses
        self._is_announced = False
        self._spent: list[JsonObject] = []
        self._usage: JsonObject = {}
        self._native_stop: str | None = None
        self._blocks: list[_Block] = []
        self._open: dict[int | None, _Block] = {}
        self._held: list[_Block] = []
        self._ids: set[str] = set()
        self._has_calls = False
        self.has_started = False
        self.is_complete = False
        self.is_paused = False

    @property
    def content(self) -> list[JsonObject]:
        """The vendor's blocks so far."""
        return [block.content for block in self._blocks]

    def go_on(self) -> None:
        """The next event begins the answer to the request that was sent again."""
        self._spent.append(self._usage)
        self._usage = {}
        self._native_stop = None
        self._pauses_left -= 1
        self.has_started = self.is_paused = False

    def feed(self, kind: str, event: JsonObject) -> Iterator[ProviderEvent]:
        """What `event` adds. `MessageEnd` is the last there is.

        Raises: BadPayload, StreamTruncated.
        """
        if kind == "message_start":
            yield from self._start(_object(event.get("message")))
            return
        if not self.has_started and kind in _NEEDS_START:
            raise BadPayload(f"the answer begins with {kind}, not with message_start")
        wire_index = _count(event.get("index"))
        match kind:
            case "content_block_start":
                yield from self._start_block(wire_index, _object(event.get("content_block")))
            case "content_block_delta":
                yield from self._delta(wire_index, _object(event.get("delta")))
            case "content_block_stop":
                yield from self._stop_block(wire_index)
            case "message_delta":
                delta = _object(event.get("delta"))
                self._native_stop = _string(delta.get("stop_reason")) or self._native_stop
                yield self._count(event.get("usage"))
            case "message_stop":
                yield from self._finish()
            case _:
                pass

    def _start(self, message: JsonObject) -> Iterator[ProviderEvent]:
        if self.has_started:
            raise BadPayload("a second answer begins inside the first")
        self.has_started = True
        if not self._is_announced:
            self._is_announced = True
            yield MessageStart(
                model=_string(message.get("model")), provider_message_id=_string(message.get("id"))
            )
        yield self._count(message.get("usage"))

    def _count(self, usage: object) -> UsageUpdate:
        # Cumulative totals: what is missing or null leaves the earlier value standing.
        self._usage |= {key: value for key, value in _object(usage).items() if value is not None}
        total = self._usage
        for spent in self._spent:
            total = _added(spent, total)
        return UsageUpdate(usage=read_usage(total))

    # -- blocks -----------------------------------------------------------------------------------------

    def _start_block(self, wire_index: int | None, content: JsonObject) -> Iterator[ProviderEvent]:
        yield from self._release_held()
        block = _Block(index=len(self._blocks), content=dict(content))
        self._blocks.append(block)
        self._open[wire_index] = block
        if block.kind == "tool_use":
            call_id = _string(content.get("id"))
            if not call_id or call_id in self._ids:
                call_id = f"toolu_{uuid4().hex}"
            self._ids.add(call_id)
            block.content["id"] = call_id
            name = self._names.from_wire(_string(content.get("name")) or "")
            yield ToolCallStart(index=block.index, id=call_id, name=name)
        elif block.kind in ("text", "thinking"):
            yield from block.append(_string(content.get(block.kind)) or "")

    def _delta(self, wire_index: int | None, delta: JsonObject) -> Iterator[ProviderEvent]:
        kind = delta.get("type")
        block = self._open.get(wire_index)
        if block is None:
            if kind not in ("text_delta", "thinking_delta"):
                return  # a piece of a call or signature that never began is worth nothing
            block = _Block(index=len(self._blocks), content={"type": str(kind).removesuffix("_delta")})
            self._blocks.append(block)
            self._open[wire_index] = block
        match kind:
            case "text_delta":
                yield from block.append(_string(delta.get("text")) or "")
            case "thinking_delta":
                yield from block.append(_string(delta.get("thinking")) or "")
            case "signature_delta":
                block.content["signature"] = delta.get("signature")
            case "input_json_delta":
                yield from block.append(_string(delta.get("partial_json")) or "")
            case "citations_delta":
                block.citations.append(delta.get("citation"))
            case _:
                pass

    def _stop_block(self, wire_index: int | None) -> Iterator[ProviderEvent]:
        block = self._open.pop(wire_index, None)
        if block is None:
            return
        block.close()
        if block.kind != "tool_use":
            return
        # Text that parses as an object is whole. Anything else may be a cut call: it waits for the proof
        # that the model went on, or for a stop reason that does not cut.
        if block.is_whole:
            yield self._end_call(block)
        else:
            self._held.append(block)

    def _release_held(self) -> Iterator[ProviderEvent]:
        held, self._held = self._held, []
        for block in held:
            yield self._end_call(block)

    def _end_call(self, block: "_Block") -> ToolCallEnd:
        self._has_calls = True
        return ToolCallEnd(
            index=block.index,
            input=block.content["input"],
            input_error=block.input_error,
            input_raw=block.pieces_text if block.input_error else None,
        )

    # -- the end ----------------------------------------------------------------------------------------

    def _finish(self) -> Iterator[ProviderEvent]:
        if self._native_stop is None:
            raise StreamTruncated("the answer ended without a stop reason")
        stop = _STOPS.get(self._native_stop, Stop.UNKNOWN)
        for wire_index in list(self._open):
            yield from self._stop_block(wire_index)
        if stop not in _CUTTING:
            yield from self._release_held()
        if stop is Stop.PAUSE and self._pauses_left and not self._has_calls:
            self.is_paused = True
            return
        if stop in (Stop.END_TURN, Stop.PAUSE) and self._has_calls:
            stop = Stop.TOOL_USE
        elif stop is Stop.TOOL_USE and not self._has_calls:
            stop = Stop.END_TURN
        self.is_complete = True
        native = NativeBlocks(api=API, model=self._model, body=_encode(self.content))
        yield MessageEnd(stop=stop, native_stop=self._native_stop, native=native)


_NEEDS_START = frozenset(
    {"content_block_start", "content_block_delta", "content_block_stop", "message_delta", "message_stop"}
)


class _Block:
    """One content block. `content` is the vendor's form of it and complete after `close`."""

    def __init__(self, *, index: int, content: JsonObject) -> None:
        self.index = index
        self.content = content
        self.kind = _string(content.get("type")) or ""
        self.input_error: str | None = None
        self.citations: list[Any] = []
        self._pieces: list[str] = []

    @property
    def pieces_text(self) -> str:
        return "".join(self._pieces)

    @property
    def is_whole(self) -> bool:
        """True if the arguments need no proof that they are complete."""
        return self.input_error is None and bool(self.pieces_text.strip() or self.content["input"])

    def append(self, piece: str) -> Iterator[ProviderEvent]:
        if not piece:
            return
        self._pieces.append(piece)
        if self.kind == "text":
            yield TextDelta(index=self.index, text=piece)
        elif self.kind == "thinking":
            yield ThinkingDelta(index=self.index, text=piece)
        elif self.kind == "tool_use":
            yield ToolCallDelta(index=self.index, json=piece)

    def close(self) -> None:
        if self.kind in ("text", "thinking"):
            self.content[self.kind] = self.pieces_text
            if self.citations:
                self.content["citations"] = self.citations
        elif self.kind == "tool_use" or self._pieces:
            # Without any piece the input came whole at the start, or there is none.
            whole = _object(self.content.get("input"))
            raw = self.pieces_text if self._pieces else json.dumps(whole)
            self.content["input"], self.input_error = parse_arguments(raw)


def read_usage(raw: JsonObject) -> Usage:
    """The vendor counts cached input apart; our `input_tokens` is all of it."""
    uncached = _count(raw.get("input_tokens"))
    cache_read = _count(raw.get("cache_read_input_tokens"))
    cache_write = _count(raw.get("cache_creation_input_tokens"))
    return Usage(
        input_tokens=None if uncached is None else uncached + (cache_read or 0) + (cache_write or 0),
        cache_read_tokens=cache_read,
        cache_write_tokens=cache_write,
        cache_write_1h_tokens=_count(_object(raw.get("cache_creation")).get("ephemeral_1h_input_tokens")),
        output_tokens=_count(raw.get("output_tokens")),
        reasoning_tokens=_count(_object(raw.get("output_tokens_details")).get("thinking_tokens")),
        raw=dict(raw),
    )


def _added(one: JsonObject, other: JsonObject) -> JsonObject:
    """The counts of both, and of what is no count the later value."""
    total = one | other
    for name in one.keys() & other.keys():
        first, second = one[name], other[name]
        if isinstance(first, dict) and isinstance(second, dict):
            total[name] = _added(first, second)
        elif _count(first) is not None and _count(second) is not None:
            total[name] = first + second
    return total


def _count(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


def _object(value: object) -> JsonObject:
    return value if isinstance(value, dict) else {}


def _string(value: object) -> str | None:
    return value if isinstance(value, str) else None


def _encode(blocks: list[Any]) -> bytes:
    try:
        return json.dumps(blocks, ensure_ascii=False, separators=(",", ":")).encode()
    except UnicodeEncodeError:  # halves of a surrogate pair that came in two pieces: escapes join them again
        return json.dumps(blocks, separators=(",", ":")).encode()
