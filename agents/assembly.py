"""Puts an assistant message together from provider events, and says what readers may preview of it."""

from dataclasses import dataclass, field
from typing import Literal

from agents.types import Preview, PreviewDelta, PreviewStart
from providers.cleaning import TextCleaner, UncleanJson, clean_json, clean_text
from providers.ids import new_id
from providers.types import (
    Block,
    JsonObject,
    MessageEnd,
    MessageStart,
    ProviderEvent,
    TextBlock,
    TextDelta,
    ThinkingBlock,
    ThinkingDelta,
    ToolCallDelta,
    ToolCallEnd,
    ToolCallStart,
    ToolUseBlock,
    Usage,
    UsageUpdate,
)

CHARACTERS_PER_TOKEN = 4  # a rough mean over languages and models, for what a provider did not count
CUT_CALL = "The call was cut by the output limit. Send a smaller one."


ProseKind = Literal["agent.message", "agent.thinking"]


@dataclass
class _Prose:
    """Text or thinking at one index. The event id is the one that its previews use."""

    kind: ProseKind
    event_id: str = field(default_factory=lambda: new_id("evt"))
    pieces: list[str] = field(default_factory=list)
    cleaner: TextCleaner = field(default_factory=TextCleaner)
    is_shown: bool = False

    @property
    def text(self) -> str:
        return "".join(self.pieces)


@dataclass
class _Call:
    id: str
    name: str
    event_id: str = field(default_factory=lambda: new_id("evt"))
    cleaner: TextCleaner = field(default_factory=TextCleaner)
    json_length: int = 0
    block: ToolUseBlock | None = None


@dataclass(frozen=True)
class Part:
    """A finished block and the id of its event. `is_cut`: a call whose arguments never were complete."""

    event_id: str
    block: Block
    is_cut: bool = False


class Assembly:
    """One answer of a provider while it arrives. Nothing in it outlives the request."""

    def __init__(self) -> None:
        self._blocks: dict[int, _Prose | _Call] = {}
        self.usage = Usage()
        self.end: MessageEnd | None = None
        self.has_content = False

    def feed(self, event: ProviderEvent) -> tuple[Preview, ...]:
        """Takes in one event and returns what readers may be shown of it."""
        match event:
            case TextDelta(index=index, text=text):
                return self._prose(index, "agent.message", text)
            case ThinkingDelta(index=index, text=text):
                return self._prose(index, "agent.thinking", text)
            case ToolCallStart():
                return self._call_start(event)
            case ToolCallDelta():
                return self._call_delta(event)
            case ToolCallEnd():
                return self._call_end(event)
            case UsageUpdate(usage=usage):
                self.usage = usage
            case MessageEnd():
                self.end = event
            case MessageStart():
                pass
        return ()

    def parts(self) -> tuple[Part, ...]:
        """The blocks in order, blank ones left out."""
        parts: list[Part] = []
        for _, block in sorted(self._blocks.items()):
            if isinstance(block, _Prose):
                block.pieces.append(block.cleaner.finish())
                text = block.text
                if text.strip():
                    made = (
                        TextBlock(text=text)
                        if block.kind == "agent.message"
                        else ThinkingBlock(thinking=text)
                    )
                    parts.append(Part(block.event_id, made))
            elif block.block is not None:
                parts.append(Part(block.event_id, block.block))
            else:
                cut = ToolUseBlock(id=block.id, name=block.name, input_error=CUT_CALL)
                parts.append(Part(block.event_id, cut, is_cut=True))
        return tuple(parts)

    def estimated_output_tokens(self) -> int:
        """About how many tokens have arrived, at least 1 once there was any content."""
        characters = sum(
            block.json_length if isinstance(block, _Call) else sum(map(len, block.pieces))
            for block in self._blocks.values()
        )
        return max(-(-characters // CHARACTERS_PER_TOKEN), int(self.has_content))

    def _prose(self, index: int, kind: ProseKind, text: str) -> tuple[Preview, ...]:
        block = self._blocks.get(index)
        if not isinstance(block, _Prose):
            block = self._blocks[index] = _Prose(kind)
        clean = block.cleaner.feed(text)
        if not clean:
            return ()
        block.pieces.append(clean)
        self.has_content = True
        if block.is_shown:
            return (_prose_delta(block, clean),)
        if not clean.strip() and not block.text.strip():
            return ()  # a blank block gets no event, so it gets no preview either
        block.is_shown = True
        start = PreviewStart(event_id=block.event_id, kind=block.kind)
        return start, _prose_delta(block, block.text)

    def _call_start(self, event: ToolCallStart) -> tuple[Preview, ...]:
        call = _Call(id=clean_text(event.id), name=clean_text(event.name))
        self._blocks[event.index] = call
        self.has_content = True
        start = PreviewStart(event_id=call.event_id, kind="agent.tool_use")
        return start, _call_delta(call, {"type": "tool_use_start", "name": call.name})

    def _call_delta(self, event: ToolCallDelta) -> tuple[Preview, ...]:
        call = self._blocks.get(event.index)
        if not isinstance(call, _Call):
            return ()
        clean = call.cleaner.feed(event.json)
        call.json_length += len(clean)
        return (_call_delta(call, {"type": "input_json_delta", "partial_json": clean}),) if clean else ()

    def _call_end(self, event: ToolCallEnd) -> tuple[Preview, ...]:
        call = self._blocks.get(event.index)
        if not isinstance(call, _Call):
            return ()
        arguments, error = event.input, event.input_error
        try:
            arguments = clean_json(arguments)
        except UncleanJson as unclean:
            arguments, error = {}, str(unclean)
        raw = None if event.input_raw is None else clean_text(event.input_raw)
        call.block = ToolUseBlock(
            id=call.id, name=call.name, input=arguments, input_error=error, input_raw=raw
        )
        return (_call_delta(call, {"type": "tool_use_ready", "name": call.name, "input": arguments}),)


def _prose_delta(block: _Prose, text: str) -> PreviewDelta:
    if block.kind == "agent.message":
        delta: JsonObject = {"type": "content_delta", "index": 0, "content": {"type": "text", "text": text}}
    else:
        delta = {"type": "thinking_delta", "thinking": text}
    return PreviewDelta(event_id=block.event_id, kind=block.kind, delta=delta)


def _call_delta(call: _Call, delta: JsonObject) -> PreviewDelta:
    return PreviewDelta(event_id=call.event_id, kind="agent.tool_use", delta=delta)
