"""The rehearsal model: deterministic answers, thinking and tool calls, with no key and no network.

It plays what the last user message asks for (`docs/rehearsal.md`). Which step it is at follows from the
transcript alone, so any process can carry on a conversation that another one began.
"""

import asyncio
import hashlib
from collections import OrderedDict
from collections.abc import AsyncIterator, Iterator
from typing import NamedTuple

import msgspec

from providers.errors import ContextTooLong, ProviderError, RequestRejected, StreamTruncated
from providers.rehearsal_demo import PACE_S, demo_step, results_text
from providers.rehearsal_notes import answered_before, notes_step
from providers.rehearsal_script import ERROR_CLASSES, Ending, Part, Step, is_script, parse_script
from providers.tool_arguments import read_arguments
from providers.types import (
    Capabilities,
    ImageBlock,
    Message,
    MessageEnd,
    MessageStart,
    NativeBlocks,
    ProviderEvent,
    ProviderRequest,
    Stop,
    TextBlock,
    TextDelta,
    ThinkingBlock,
    ThinkingDelta,
    ToolCallDelta,
    ToolCallEnd,
    ToolCallStart,
    ToolResultBlock,
    ToolUseBlock,
    Usage,
    UsageUpdate,
)

API = "rehearsal"
CHARS_PER_TOKEN = 4
IMAGE_TOKENS = 1_000
MAX_COUNTED_FAILURES = 10_000  # steps whose failed attempts are remembered; the oldest are forgotten first
DELTAS_PER_YIELD = 32  # the event loop gets a turn this often, as it does when a socket is read

_FULL = Capabilities(
    tools=True, images=True, thinking=True, context_window_tokens=200_000, max_output_tokens=32_000
)
_MODELS = {
    "no-tools": msgspec.structs.replace(_FULL, tools=False),
    "small": msgspec.structs.replace(_FULL, context_window_tokens=4_000, max_output_tokens=1_000),
}
_STATUS = {
    "rate_limited": 429,
    "quota_exceeded": 429,
    "provider_overloaded": 529,
    "provider_failed": 500,
    "context_too_long": 400,
    "provider_auth": 401,
    "model_not_found": 404,
    "request_rejected": 400,
}


class Rehearsal:
    """The offline provider. Implements `providers.types.Provider`.

    Every model name is accepted: `fast` answers without pace, `no-tools` cannot call tools, `small` has a
    window of 4,000 tokens; any other behaves as `demo`. The one thing it remembers is how often a step with
    `fail: … times K` has failed, per instance.
    """

    api = API

    def __init__(self) -> None:
        self._failures: OrderedDict[tuple[str | None, str, int], int] = OrderedDict()

    def capabilities(self, model: str) -> Capabilities:
        return _MODELS.get(model, _FULL)

    async def aclose(self) -> None:
        """Nothing is kept open."""

    async def stream(self, request: ProviderRequest) -> AsyncIterator[ProviderEvent]:
        """Plays one step.

        Raises: ProviderError of the category that a `fail` or `truncate` line asks for; RequestRejected for a
        script that cannot be read, or tools on `no-tools`; ContextTooLong beyond the window.
        """
        input_tokens = self._admit(request)
        step = _current_step(request)
        identity = _identity(request)
        if step.ending.kind == "fail" and self._has_failed_enough(request, step.ending.times):
            step = msgspec.structs.replace(step, ending=Ending())
        if step.ending.after_deltas == 0:
            await _stop_short(step)

        yield MessageStart(model=request.model, provider_message_id=f"rehearsal_{identity}")
        yield UsageUpdate(usage=step.usage or Usage(input_tokens=input_tokens, output_tokens=0))
        if step.wait_s > 0:
            await asyncio.sleep(step.wait_s)

        play = _Play(step, request, identity)
        pacer = _Pacer()
        for event, pace_s in play.events():
            await pacer.wait(pace_s)
            yield event
        await _stop_short(step)
        yield UsageUpdate(usage=step.usage or play.usage(input_tokens))
        yield MessageEnd(stop=play.stop, native_stop=play.stop.value, native=_native(step, request))

    def _admit(self, request: ProviderRequest) -> int:
        """The tokens of the request, if it fits."""
        capabilities = self.capabilities(request.model)
        if request.tools and not capabilities.tools:
            raise RequestRejected(f"rehearsal:{request.model} cannot call tools", status=400)
        tokens = count_tokens(request)
        window = capabilities.context_window_tokens
        if window is not None and tokens > window:
            raise ContextTooLong(
                f"rehearsal:{request.model} takes {window} tokens, the request has {tokens}", status=400
            )
        return tokens

    def _has_failed_enough(self, request: ProviderRequest, times: int | None) -> bool:
        """Counts this attempt unless the step has failed `times` times before."""
        if times is None:
            return False
        prompt, index = _prompt_and_index(request.messages)
        # Not the length of the transcript: compaction changes it between two attempts at one step.
        key = (request.cache_key, _digest(prompt), index)
        failed = self._failures.get(key, 0)
        if failed >= times:
            return True
        self._failures[key] = failed + 1
        self._failures.move_to_end(key)
        if len(self._failures) > MAX_COUNTED_FAILURES:
            self._failures.popitem(last=False)
        return False


def count_tokens(request: ProviderRequest) -> int:
    """About one token per four characters of all that is sent, and 1,000 per image."""
    chars = len(request.system) + sum(len(msgspec.json.encode(tool)) for tool in request.tools)
    images = 0
    for message in request.messages:
        for block in message.blocks:
            chars += _block_chars(block)
            images += isinstance(block, ImageBlock)
            if isinstance(block, ToolResultBlock):
                images += sum(isinstance(item, ImageBlock) for item in block.content)
    return _tokens(chars) + images * IMAGE_TOKENS


def _block_chars(block: object) -> int:
    match block:
        case TextBlock(text=text) | ThinkingBlock(thinking=text):
            return len(text)
        case ToolUseBlock():
            return len(block.name) + len(msgspec.json.encode(block.input))
        case ToolResultBlock():
            return sum(len(item.text) for item in block.content if isinstance(item, TextBlock))
        case _:
            return 0


def _tokens(chars: int) -> int:
    return -(-chars // CHARS_PER_TOKEN)


def _current_step(request: ProviderRequest) -> Step:
    """The step that the transcript has come to; beyond the last one, tool results are repeated."""
    if request.purpose == "compaction":
        return notes_step(request)
    prompt, index = _prompt_and_index(request.messages)
    text = "" if prompt is None else _prompt_text(prompt)
    if not is_script(text):
        pace_s = 0.0 if request.model == "fast" else PACE_S
        return demo_step(prompt, request, index=index, pace_s=pace_s)
    steps = parse_script(text)
    if index < len(steps):
        return steps[index]
    return Step(parts=(Part(kind="echo") if results_text(request) else Part(kind="say", text="Done."),))


def _prompt_and_index(messages: tuple[Message, ...]) -> tuple[Message | None, int]:
    """The last user message, and how many assistant messages follow it, those that notes tell of included."""
    index = 0
    for at in range(len(messages) - 1, -1, -1):
        if messages[at].role == "user":
            return messages[at], index + answered_before(messages[at - 1] if at else None)
        index += messages[at].role == "assistant"
    return None, index


def _prompt_text(prompt: Message) -> str:
    return "\n".join(block.text for block in prompt.blocks if isinstance(block, TextBlock))


def _identity(request: ProviderRequest) -> str:
    """Names this step of this session: the same for every attempt at it, on every replica."""
    return _digest(request.cache_key, len(request.messages), request.messages[-1:])


def _digest(*values: object) -> str:
    return hashlib.blake2b(msgspec.json.encode(values), digest_size=8).hexdigest()


async def _stop_short(step: Step) -> None:
    """Ends the stream the hard way, if the step asks for that. Returns for all other endings."""
    if step.ending.kind == "hang":
        await asyncio.Event().wait()  # for ever: only a cancel or a time-out ends it
    if step.ending.kind == "truncate":
        raise StreamTruncated("the rehearsal ended without its terminal marker")
    if step.ending.kind == "fail":
        raise _failure(step)


def _failure(step: Step) -> ProviderError:
    code = step.ending.error
    status = None if step.ending.after_deltas else _STATUS.get(code)
    return ERROR_CLASSES[code](
        f"rehearsed failure: {code}", status=status, vendor_code=code, retry_after_s=step.retry_after_s
    )


def _native(step: Step, request: ProviderRequest) -> NativeBlocks | None:
    if step.native is None:
        return None
    return NativeBlocks(api=API, model=request.model, body=step.native.encode())


class _Pacer:
    """Spreads deltas evenly: one that comes late does not delay those after it."""

    def __init__(self) -> None:
        self._due: float | None = None
        self._count = 0

    async def wait(self, pace_s: float) -> None:
        self._count += 1
        if pace_s > 0:
            now = asyncio.get_running_loop().time()
            self._due = (now if self._due is None else self._due) + pace_s
            if self._due > now:
                await asyncio.sleep(self._due - now)
                return
        if self._count % DELTAS_PER_YIELD == 0:
            await asyncio.sleep(0)


class _Paced(NamedTuple):
    event: ProviderEvent
    pace_s: float


class _Play:
    """The events of one step, and what has been sent of it so far."""

    def __init__(self, step: Step, request: ProviderRequest, identity: str) -> None:
        self._step = step
        self._request = request
        self._identity = identity
        self._deltas = 0
        self._chars = 0
        self._thinking_chars = 0
        self._calls = 0
        self._is_cut = False

    def events(self) -> Iterator[_Paced]:
        """Everything between the start of the message and its end, cut where the step or the request says."""
        last = len(self._step.parts) - 1
        for index, part in enumerate(self._step.parts):
            if part.kind == "call":
                leave_open = index == last and self._step.ending.kind == "max_tokens"
                yield from self._call(index, part, leave_open=leave_open)
            else:
                yield from self._prose(index, part)
            if self._is_cut:
                return

    def _prose(self, index: int, part: Part) -> Iterator[_Paced]:
        text = results_text(self._request) if part.kind == "echo" else part.text
        for piece in part.pieces(text):
            if not self._may_send(piece):
                return
            if part.kind == "think":
                self._thinking_chars += len(piece)
                yield _Paced(ThinkingDelta(index=index, text=piece), part.pace_s)
            else:
                yield _Paced(TextDelta(index=index, text=piece), part.pace_s)

    def _call(self, index: int, part: Part, *, leave_open: bool) -> Iterator[_Paced]:
        if not self._may_send(""):
            return
        call_id = f"call_{self._identity}_{index}"
        yield _Paced(ToolCallStart(index=index, id=call_id, name=part.name), 0.0)
        for piece in part.pieces(part.text):
            if not self._may_send(piece):
                return
            yield _Paced(ToolCallDelta(index=index, json=piece), part.pace_s)
        if leave_open or not self._may_send(""):
            return
        self._calls += 1
        arguments = read_arguments(part.text)
        yield _Paced(ToolCallEnd(index=index, **arguments._asdict()), 0.0)

    def _may_send(self, piece: str) -> bool:
        """Counts the delta that is about to be sent, unless a limit is reached."""
        after, most = self._step.ending.after_deltas, self._request.max_output_tokens
        out_of_deltas = after is not None and self._deltas >= after
        out_of_tokens = most is not None and self._chars + len(piece) > most * CHARS_PER_TOKEN
        if out_of_deltas or out_of_tokens:
            self._is_cut = True
            return False
        self._deltas += bool(piece)
        self._chars += len(piece)
        return True

    @property
    def stop(self) -> Stop:
        """Why the message ends, once all events have been taken."""
        if self._step.ending.kind == "refuse":
            return Stop.REFUSAL
        if self._is_cut or self._step.ending.kind == "max_tokens":
            return Stop.MAX_TOKENS
        return Stop.TOOL_USE if self._calls else Stop.END_TURN

    def usage(self, input_tokens: int) -> Usage:
        return Usage(
            input_tokens=input_tokens,
            cache_read_tokens=0,
            cache_write_tokens=0,
            output_tokens=_tokens(self._chars),
            reasoning_tokens=_tokens(self._thinking_chars),
        )
