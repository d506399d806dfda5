"""Asks the model for the next message: opens, streams, retries by rule, and stores what came of it."""

import logging
import random
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from functools import partial
from typing import Literal, cast

from msgspec.structs import replace

from agents.assembly import Part
from agents.compaction import Compaction
from agents.drafts import Draft
from agents.errors import HandOver, Stopped
from agents.events import CloseType, PromptApplied, StopReason
from agents.exchange import Exchange, add_error, add_prose, add_use, is_cut, keep_partial_text, user_text
from agents.finishing import decision_on, with_message
from agents.hooks import TurnReport
from agents.progress import Progress
from agents.stop_watch import StopWatch
from agents.targets import Target, Targets
from agents.tool_calls import ToolCalls
from agents.toolbox import Toolbox, refusal_code
from agents.transcript import repaired
from agents.types import PendingPrompt, PreviewDelta, PreviewStart, ToolCall
from providers.errors import ContextTooLong, ProviderError, StreamTruncated
from providers.retry import RetryPolicy
from providers.types import (
    Base64Source,
    Block,
    FileSource,
    ImageBlock,
    Message,
    MessageEnd,
    MessageStart,
    ProviderEvent,
    ProviderRequest,
    Stop,
    TextBlock,
    TextDelta,
    ThinkingDelta,
    ToolChoice,
    ToolResultBlock,
    ToolUseBlock,
)

MAX_FRUITLESS_TURNS = 3  # in which no call could even be started
MAX_CUT_TURNS = 2  # in a row, with a call that the output limit cut

ImageLoader = Callable[[str], Awaitable[Base64Source | None]]

_log = logging.getLogger(__name__)


class ModelRequests:
    """The requests of one run."""

    def __init__(
        self,
        *,
        progress: Progress,
        stop: StopWatch,
        targets: Targets,
        toolbox: Toolbox,
        calls: ToolCalls,
        compaction: Compaction,
        retry: RetryPolicy,
        load_image: ImageLoader,
    ) -> None:
        self._progress = progress
        self._stop = stop
        self._targets = targets
        self._toolbox = toolbox
        self._calls = calls
        self._compaction = compaction
        self._retry = retry
        self._load_image = load_image
        self._fruitless_turns = 0
        self._cut_turns = 0

    async def next_message(self) -> None:
        """One turn's request: stores the answer and starts its calls, or closes the run.

        Neither is done when the provider finds the request too long and a memory may help.

        Raises: HoldLost, HandOver; Stopped while nothing of an answer is there.
        """
        if await self._lacks_what_is_needed():
            return
        attempt = tries = 1  # of the turn, and of the model
        while True:
            exchange = await self._open(attempt)
            if exchange is None:
                return
            try:
                await self._stop.guard(self._stream(exchange))
            except Stopped:
                await self._close_partial(exchange)
                return
            except ContextTooLong as error:
                if self._compaction.may_help():
                    await self._fail(exchange, error)
                else:
                    await self._give_up(exchange, error)
                return
            except ProviderError as error:
                delay_s = self._retry.delay_s(error, tries, random.random)
                if delay_s is None and not self._targets.may_fall_back(error):
                    await self._give_up(exchange, error)
                    return
                await self._fail(exchange, error)
                if delay_s is None:
                    self._targets.fall_back()
                    delay_s, tries = 0.0, 0
            else:
                await self._finish(exchange)
                return
            await self._stop.guard(self._progress.clock.sleep(delay_s))
            attempt, tries = attempt + 1, tries + 1

    @property
    def _target(self) -> Target:
        return self._targets.current

    async def _lacks_what_is_needed(self) -> bool:
        """Closes the run when its model cannot do what the agent is made for, before any request."""
        target = self._target
        if self._toolbox.specs() and not target.capabilities.tools:
            text = f"The model {target.model} cannot call tools, but the agent has some."
            await self._progress.fail("model_without_tools", text)
        elif self._progress.agent.output_schema is not None and not target.capabilities.output_schema:
            text = f"The model {target.model} cannot be held to a schema, but the agent has one."
            await self._progress.fail("model_without_output_schema", text)
        elif (name := self._progress.agent.tool_choice.name) is not None and not self._toolbox.offers(name):
            text = f"The tool {name!r} must be called by `tool_choice`, but is not among the tools."
            await self._progress.fail("tool_not_offered", text)
        else:
            return False
        return True

    async def _open(self, attempt: int) -> Exchange | None:
        """Stores the prompts that are taken up, the span and the ledger entry, before any byte leaves.

        None: there is nothing to answer any more.
        """
        if not await self._progress.may_start():
            raise HandOver
        target = self._target
        turn = self._progress.turns + 1
        exchange = Exchange(
            turn=turn, attempt=attempt, vendor=target.vendor, model=target.model, clock=self._progress.clock
        )

        taken: list[PendingPrompt] = []

        def write(draft: Draft) -> None:
            self._progress.announce(draft)
            taken[:] = self._progress.arrivals
            self._take_up(draft, taken)
            exchange.open(draft)

        if attempt == 1:
            if not await self._progress.begin_turn(write, turn=turn):
                return None
        else:
            await self._progress.decide(write)  # a retry belongs to the turn that is in progress
        for prompt in taken:
            await self._progress.tell("message_received", prompt)
        return exchange

    def _take_up(self, draft: Draft, prompts: Sequence[PendingPrompt]) -> None:
        if prompts:
            prompt_ids = tuple(prompt.id for prompt in prompts)
            draft.apply_prompts(prompt_ids)
            draft.event(PromptApplied, prompt_ids=prompt_ids)
            for prompt in prompts:
                draft.message(Message(role=prompt.role, blocks=prompt.content))

    async def _stream(self, exchange: Exchange) -> None:
        """Raises: ProviderError."""
        provider, sink, tell = self._target.provider, self._progress.sink, self._progress.tell
        watches_text = any(self._progress.hooks.has(name) for name in ("content", "thinking"))
        request = await self._prepared(exchange)
        await self._progress.until_live()
        sink.preview(PreviewStart(event_id=exchange.id, kind="model.status"))
        sink.preview(_status(exchange, "requested"))
        await tell("status", "requested")
        exchange.left()
        stream = cast("AsyncGenerator[ProviderEvent, None]", provider.stream(request))
        async with aclosing(stream) as events:
            async for event in events:
                if isinstance(event, MessageStart):
                    sink.preview(_status(exchange, "connected"))
                    await tell("status", "connected")
                previews = exchange.assembly.feed(event)
                if previews:
                    exchange.content_arrived()
                for preview in previews:
                    sink.preview(preview)
                if watches_text and isinstance(event, TextDelta | ThinkingDelta):
                    await tell("content" if isinstance(event, TextDelta) else "thinking", event.text)
        end = exchange.assembly.end
        if end is None:
            raise StreamTruncated("the adapter ended without a terminal marker")
        if end.stop is Stop.CONTEXT_WINDOW and not exchange.assembly.has_content:
            raise ContextTooLong("the window is full")

    async def _prepared(self, exchange: Exchange) -> ProviderRequest:
        """The request as hooks leave it."""
        progress, hooks = self._progress, self._progress.hooks
        await progress.tell("before_prompt_build")
        shown: Sequence[Message] = progress.context.shown()
        if hooks.has("transform_context"):
            shown = await hooks.change("transform_context", progress.hook_context, shown)
        request = await self._request(shown)
        if hooks.has("prepare_request"):
            request = await hooks.change("prepare_request", progress.hook_context, request)
        if hooks.has("model_request"):
            await progress.tell("model_request", exchange.info(request, progress.context.tokens))
        return request

    async def _request(self, shown: Sequence[Message]) -> ProviderRequest:
        agent, snapshot = self._progress.agent, self._progress.snapshot
        messages = [await self._with_images(message) for message in shown]
        return ProviderRequest(
            model=self._target.model,
            system=agent.system or "",
            messages=repaired(messages),
            tools=self._toolbox.specs(),
            think_effort=agent.model.effort,
            max_output_tokens=agent.max_output_tokens,
            cache_key=snapshot.session_id,
            end_user_id=snapshot.end_user_id,
            tool_choice=self._tool_choice,
            output_schema=agent.output_schema,
            extra_body=agent.extra_body if self._targets.takes_extra_body else {},
        )

    @property
    def _tool_choice(self) -> ToolChoice:
        """What forces a call holds for the run's first request: else the run could not end."""
        choice = self._progress.agent.tool_choice
        is_forced = choice.type in {"any", "tool"} and self._progress.turns > 0
        return replace(choice, type="auto", name=None) if is_forced else choice

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
        await self._tell_failed(exchange, error)

        def write(draft: Draft) -> None:
            exchange.close(draft, self._target.price, error_code=error.code)
            add_error(draft, error, retry="retrying")

        await self._progress.commit(write)

    async def _give_up(self, exchange: Exchange, error: ProviderError) -> None:
        _log.error("provider request failed for good: %s", error.message, extra={"code": error.code})
        await self._tell_failed(exchange, error)
        await self._tell_over(exchange, "failed")
        kind: CloseType = "retries_exhausted" if error.is_retryable else "error"

        def write(draft: Draft) -> None:
            keep_partial_text(draft, exchange)
            exchange.close(draft, self._target.price, error_code=error.code)
            add_error(draft, error, retry="exhausted" if error.is_retryable else "terminal")

        text = user_text(error)
        if isinstance(error, ContextTooLong):
            text = f"{text} {self._compaction.largest_part()}"
        stop = StopReason(type=kind, code=error.code, message=text)
        await self._progress.close(stop, write)

    async def _tell_failed(self, exchange: Exchange, error: ProviderError) -> None:
        await self._tell_usage(exchange)
        await self._progress.tell("error", error.code, user_text(error))

    async def _tell_usage(self, exchange: Exchange) -> None:
        if self._progress.hooks.has("usage"):
            usage = exchange.assembly.usage
            await self._progress.tell("usage", usage, self._target.price(usage)[0])

    async def _tell_over(self, exchange: Exchange, status: Literal["failed", "stopped"]) -> None:
        await decision_on(self._progress, TurnReport(text=exchange.text, status=status))

    async def _close_partial(self, exchange: Exchange) -> None:
        await self._tell_usage(exchange)
        await self._tell_over(exchange, "stopped")

        def write(draft: Draft) -> None:
            keep_partial_text(draft, exchange)
            exchange.close(draft, self._target.price, error_code=self._stop.cause)

        await self._progress.close_stopped(write)

    async def _finish(self, exchange: Exchange) -> None:
        """Stores the whole answer, with the starts of its calls or with the close of the run."""
        end = exchange.assembly.end
        assert end is not None
        self._compaction.measured(exchange.assembly.usage.input_tokens)
        await self._tell_usage(exchange)
        parts = exchange.assembly.parts()
        uses = tuple(part for part in parts if isinstance(part.block, ToolUseBlock))
        if end.stop is Stop.REFUSAL or not uses:
            await self._finish_last(exchange, end)
            return
        position = self._progress.next_position
        asked = [
            self._toolbox.preflight(part, position=position, index=index) for index, part in enumerate(uses)
        ]
        calls = tuple([await self._judged(part, call) for part, call in zip(uses, asked, strict=True)])

        def write(draft: Draft, *, may_start: bool = False) -> None:
            add_prose(draft, parts, incomplete=False)
            is_whole = not any(part.is_cut for part in parts)
            blocks = tuple(part.block for part in parts)
            draft.message(Message(role="assistant", blocks=blocks, native=end.native if is_whole else None))
            for part, call in zip(uses, calls, strict=True):
                add_use(draft, part, call)
            exchange.close(draft, self._target.price)
            draft.turns = exchange.turn
            self._calls.add(draft, calls, may_start=may_start)

        code = self._leads_nowhere(calls)
        if code is not None:
            text = "The model kept asking for tool calls that cannot be made."
            await self._progress.fail(code, text, write)
            return
        may_start = await self._progress.may_start()
        try:
            await self._progress.decide(partial(write, may_start=may_start))
        except Stopped:
            # The answer is whole: it is kept, and none of its calls starts.
            await self._progress.close_stopped(write)

    async def _judged(self, part: Part, call: ToolCall) -> ToolCall:
        """The call as hooks leave it."""
        hooks, context = self._progress.hooks, self._progress.hook_context
        if call.state != "done" and call.kind == "server" and hooks.has("before_tool_call"):
            call = self._toolbox.judged(call, await hooks.judge(context, call))
        await self._progress.tell("tool_call", call)
        if call.state == "done" and hooks.has("tool_error"):
            assert isinstance(part.block, ToolUseBlock)
            await self._progress.tell("tool_error", call, part.block.input_raw)
        return call

    async def _finish_last(self, exchange: Exchange, end: MessageEnd) -> None:
        """An answer that asks for nothing more closes the run, in the same step."""
        all_parts = exchange.assembly.parts()
        parts = tuple(part for part in all_parts if not isinstance(part.block, ToolUseBlock))
        has_text = any(isinstance(part.block, TextBlock) for part in parts)
        is_refused = end.stop is Stop.REFUSAL

        def write(draft: Draft) -> None:
            add_prose(draft, parts, incomplete=is_cut(end.stop))
            if has_text:
                blocks = tuple(part.block for part in parts)
                native = end.native if parts == all_parts else None
                draft.message(Message(role="assistant", blocks=blocks, native=native))
            # Calls of a refused answer were previewed and never come: the code makes them void.
            exchange.close(draft, self._target.price, error_code="refusal" if is_refused else None)
            draft.turns = exchange.turn

        if is_refused:
            await self._tell_over(exchange, "failed")
            await self._progress.close(StopReason(type="refusal"), write)
            return
        decision = await decision_on(self._progress, TurnReport(text=exchange.text))
        if decision is None:
            await self._progress.end_turn(write)
        elif decision.action == "continue" and has_text and decision.message.strip():
            await self._progress.decide(with_message(write, decision.message))
        else:
            await self._progress.close(StopReason(type="end_turn"), write)

    def _leads_nowhere(self, calls: tuple[ToolCall, ...]) -> str | None:
        """Why it is no use to go on: the model keeps asking for calls that cannot be made. None: go on.

        Counted by each hold for itself: `max_turns` bounds a run over all its holds.
        """
        codes = [refusal_code(call) for call in calls]
        self._fruitless_turns = 0 if None in codes else self._fruitless_turns + 1
        self._cut_turns = self._cut_turns + 1 if "output_limit" in codes else 0
        if self._cut_turns >= MAX_CUT_TURNS:
            return "output_limit"
        return codes[0] if self._fruitless_turns >= MAX_FRUITLESS_TURNS else None


def _status(exchange: Exchange, status: str) -> PreviewDelta:
    return PreviewDelta(
        event_id=exchange.id, kind="model.status", delta={"type": "model_status", "status": status}
    )
