"""Asks the model for the next message: opens, streams, retries by rule, and stores what came of it."""

import logging
import random
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import cast

from msgspec.structs import replace

from agents.drafts import Draft
from agents.errors import Stopped
from agents.events import CloseType, PromptApplied, StopReason
from agents.exchange import Exchange, add_error, add_prose, add_use, is_cut, keep_partial_text, user_text
from agents.progress import Progress
from agents.stop_watch import StopWatch
from agents.tool_calls import ToolCalls
from agents.toolbox import Toolbox
from agents.transcript import repaired
from agents.types import InboxView, PreviewDelta, PreviewStart, Pricer, ToolCall
from providers.errors import ProviderError, StreamTruncated
from providers.retry import RetryPolicy
from providers.types import (
    Base64Source,
    Block,
    FileSource,
    ImageBlock,
    Message,
    MessageEnd,
    MessageStart,
    Provider,
    ProviderEvent,
    ProviderRequest,
    Stop,
    TextBlock,
    ToolResultBlock,
    ToolUseBlock,
)

MAX_FRUITLESS_TURNS = 3  # in which no call could even be started
MAX_CUT_TURNS = 2  # in a row, with a call that the output limit cut

ImageLoader = Callable[[str], Awaitable[Base64Source | None]]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Target:
    """Where requests go: `vendor:model` as the ledger names them, the adapter, and what it costs."""

    vendor: str
    model: str
    provider: Provider
    price: Pricer


class ModelRequests:
    """The requests of one run."""

    def __init__(
        self,
        *,
        progress: Progress,
        stop: StopWatch,
        target: Target,
        toolbox: Toolbox,
        calls: ToolCalls,
        retry: RetryPolicy,
        load_image: ImageLoader,
    ) -> None:
        self._progress = progress
        self._stop = stop
        self._target = target
        self._toolbox = toolbox
        self._calls = calls
        self._retry = retry
        self._load_image = load_image
        self._fruitless_turns = 0
        self._cut_turns = 0

    async def next_message(self) -> None:
        """One turn's request: stores the answer and starts its calls, or closes the run.

        Raises: HoldLost, Stopped (after the partial text has been kept and the run has been closed).
        """
        if self._toolbox.specs() and not self._target.provider.capabilities(self._target.model).tools:
            text = f"The model {self._target.model} cannot call tools, but the agent has some."
            await self._progress.close(StopReason(type="error", code="model_without_tools", message=text))
            return
        attempt = 1
        while True:
            exchange = await self._open(attempt)
            try:
                await self._stop.guard(self._stream(exchange))
            except ProviderError as error:
                delay_s = self._retry.delay_s(error, attempt, random.random)
                if delay_s is None:
                    await self._give_up(exchange, error)
                    return
                await self._fail(exchange, error)
                await self._stop.guard(self._progress.clock.sleep(delay_s))
                attempt += 1
            except Stopped:
                await self._close_partial(exchange)
                return
            else:
                await self._finish(exchange)
                return

    async def _open(self, attempt: int) -> Exchange:
        """Stores the prompts that are taken up, the span and the ledger entry, before any byte leaves."""
        target = self._target
        turn = self._progress.turns + 1
        exchange = Exchange(
            turn=turn, attempt=attempt, vendor=target.vendor, model=target.model, clock=self._progress.clock
        )

        def write(_: InboxView) -> Draft:
            draft = self._progress.draft(turn=turn)
            self._progress.announce(draft)
            self._apply_batch(draft)
            exchange.open(draft)
            return draft

        await self._progress.decide(write)
        return exchange

    def _apply_batch(self, draft: Draft) -> None:
        batch = self._progress.batch
        if batch:
            prompt_ids = tuple(prompt.id for prompt in batch)
            draft.apply_prompts(prompt_ids)
            draft.event(PromptApplied, prompt_ids=prompt_ids)
            for prompt in batch:
                draft.message(Message(role="user", blocks=prompt.content))

    async def _stream(self, exchange: Exchange) -> None:
        """Raises: ProviderError."""
        provider, sink = self._target.provider, self._progress.sink
        request = await self._request()
        sink.preview(PreviewStart(event_id=exchange.id, kind="model.status"))
        sink.preview(_status(exchange, "requested"))
        exchange.left()
        stream = cast("AsyncGenerator[ProviderEvent, None]", provider.stream(request))
        async with aclosing(stream) as events:
            async for event in events:
                if isinstance(event, MessageStart):
                    sink.preview(_status(exchange, "connected"))
                previews = exchange.assembly.feed(event)
                if previews:
                    exchange.content_arrived()
                for preview in previews:
                    sink.preview(preview)
        if exchange.assembly.end is None:
            raise StreamTruncated("the adapter ended without a terminal marker")

    async def _request(self) -> ProviderRequest:
        agent, snapshot = self._progress.agent, self._progress.snapshot
        messages = [await self._with_images(message) for message in self._progress.messages]
        return ProviderRequest(
            model=self._target.model,
            system=agent.system or "",
            messages=repaired(messages),
            tools=self._toolbox.specs(),
            think_effort=agent.model.effort,
            max_output_tokens=agent.max_output_tokens,
            cache_key=snapshot.session_id,
            end_user_id=snapshot.end_user_id,
            extra_body=agent.extra_body,
        )

    async def _with_images(self, message: Message) -> Message:
        """Uploaded images become inline ones; the model is told of those that are gone."""
        if not any(isinstance(block, ImageBlock | ToolResultBlock) for block in message.blocks):
            return message
        return replace(message, blocks=tuple([await self._inline(block) for block in message.blocks]))

    async def _inline(self, block: Block) -> Block:
        if isinstance(block, ToolResultBlock):
            return replace(block, content=tuple([await self._inline(item) for item in block.content]))
        if not isinstance(block, ImageBlock) or not isinstance(block.source, FileSource):
            return block
        source = await self._load_image(block.source.file_id)
        if source is None:
            return TextBlock(text=f"(The image {block.source.file_id} was deleted.)")
        return ImageBlock(source=source)

    async def _fail(self, exchange: Exchange, error: ProviderError) -> None:
        """Stores a failed attempt; what was previewed of it is void."""
        _log.warning("provider request failed: %s", error.message, extra={"code": error.code})
        draft = self._progress.draft(turn=exchange.turn)
        exchange.close(draft, self._target.price, error_code=error.code)
        add_error(draft, error, retry="retrying")
        await self._progress.commit(draft)

    async def _give_up(self, exchange: Exchange, error: ProviderError) -> None:
        _log.error("provider request failed for good: %s", error.message, extra={"code": error.code})
        kind: CloseType = "retries_exhausted" if error.is_retryable else "error"

        def write(draft: Draft) -> None:
            keep_partial_text(draft, exchange)
            exchange.close(draft, self._target.price, error_code=error.code)
            add_error(draft, error, retry="exhausted" if error.is_retryable else "terminal")

        stop = StopReason(type=kind, code=error.code, message=user_text(error))
        await self._progress.close(stop, write, turn=exchange.turn)

    async def _close_partial(self, exchange: Exchange) -> None:
        def write(draft: Draft) -> None:
            keep_partial_text(draft, exchange)
            exchange.close(draft, self._target.price, error_code=self._stop.cause)

        await self._progress.look()
        reason = self._progress.stop_reason(self._stop.cause)
        await self._progress.close(reason, write, turn=exchange.turn)

    async def _finish(self, exchange: Exchange) -> None:
        """Stores the whole answer, with the starts of its calls or with the close of the run."""
        end = exchange.assembly.end
        assert end is not None
        parts = exchange.assembly.parts()
        uses = tuple(part for part in parts if isinstance(part.block, ToolUseBlock))
        if end.stop is Stop.REFUSAL or not uses:
            await self._finish_last(exchange, end)
            return
        may_start = await self._progress.may_start()

        def write(_: InboxView | None) -> Draft:
            draft = self._progress.draft(turn=exchange.turn)
            add_prose(draft, parts, incomplete=False)
            is_whole = not any(part.is_cut for part in parts)
            stored = draft.message(
                Message(
                    role="assistant",
                    blocks=tuple(part.block for part in parts),
                    native=end.native if is_whole else None,
                )
            )
            calls = tuple(
                self._toolbox.preflight(part, position=stored.position, index=index)
                for index, part in enumerate(uses)
            )
            for part, call in zip(uses, calls, strict=True):
                add_use(draft, part, call)
            exchange.close(draft, self._target.price)
            self._calls.add(draft, calls, may_start=may_start)
            draft.turns = exchange.turn
            return draft

        try:
            await self._progress.decide(write)
        except Stopped:
            # The answer is whole: it is kept, and none of its calls starts.
            may_start = False
            await self._progress.commit(write(None))
            raise
        await self._check_fruit()

    async def _finish_last(self, exchange: Exchange, end: MessageEnd) -> None:
        """An answer that asks for nothing more closes the run, in the same step."""
        parts = tuple(part for part in exchange.assembly.parts() if not isinstance(part.block, ToolUseBlock))
        has_calls = len(parts) < len(exchange.assembly.parts())
        has_text = any(isinstance(part.block, TextBlock) for part in parts)

        def write(draft: Draft) -> None:
            add_prose(draft, parts, incomplete=is_cut(end.stop))
            if has_text:
                draft.message(
                    Message(
                        role="assistant",
                        blocks=tuple(part.block for part in parts),
                        native=None if has_calls else end.native,
                    )
                )
            exchange.close(draft, self._target.price)
            draft.turns = exchange.turn

        await self._progress.close(_last_stop(end, has_text=has_text), write, turn=exchange.turn)

    async def _check_fruit(self) -> None:
        """Closes a run whose model keeps asking for calls that cannot be started."""
        calls = self._progress.last_calls
        codes = {_code(call) for call in calls}
        self._fruitless_turns = 0 if None in codes else self._fruitless_turns + 1
        self._cut_turns = self._cut_turns + 1 if "output_limit" in codes else 0
        code = None
        if self._cut_turns >= MAX_CUT_TURNS:
            code = "output_limit"
        elif self._fruitless_turns >= MAX_FRUITLESS_TURNS:
            code = _code(calls[0])
        if code is not None:
            text = "The model kept asking for tool calls that cannot be made."
            await self._progress.close(StopReason(type="error", code=code, message=text))


def _status(exchange: Exchange, status: str) -> PreviewDelta:
    return PreviewDelta(
        event_id=exchange.id, kind="model.status", delta={"type": "model_status", "status": status}
    )


def _code(call: ToolCall) -> str | None:
    """Why a call could not be started; None when it could."""
    if call.state != "done" or call.result is None or call.result.details is None:
        return None
    return str(call.result.details["code"])


def _last_stop(end: MessageEnd, *, has_text: bool) -> StopReason:
    if end.stop is Stop.REFUSAL:
        return StopReason(type="refusal")
    if end.stop is Stop.CONTEXT_WINDOW and not has_text:
        text = "The conversation is longer than the model can take."
        return StopReason(type="error", code="context_too_long", message=text)
    return StopReason(type="end_turn")
