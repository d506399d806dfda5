"""Asks the run's model for the notes that become a memory, each request with its ledger entry."""

import random
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from functools import partial
from typing import cast

from agents.drafts import Draft
from agents.errors import HandOver, Stopped
from agents.exchange import Exchange
from agents.progress import Progress
from agents.stop_watch import StopWatch
from agents.summaries import SYSTEM, Record, request_text
from agents.targets import Target, Targets
from providers.errors import BadPayload, ContextTooLong, ProviderError, StreamTruncated
from providers.retry import RetryPolicy
from providers.types import Message, ProviderEvent, ProviderRequest, Stop, TextBlock

REASONING_TOKENS = 2_000  # that a model may spend before it writes

Finish = Callable[[Draft, str], None]
"""Adds to the step that stores the end of a request, whose text it is given."""


class NoteRequests:
    """The requests for notes of one run."""

    def __init__(self, *, progress: Progress, stop: StopWatch, targets: Targets, retry: RetryPolicy) -> None:
        self._progress = progress
        self._stop = stop
        self._targets = targets
        self._retry = retry

    @property
    def _target(self) -> Target:
        return self._targets.current

    async def ask(self, notes: str, part: list[Record], *, most_tokens: int, finish: Finish | None) -> str:
        """The notes of `part` on top of `notes`, about `most_tokens` long. `finish` goes with their step.

        Raises: ProviderError, HoldLost, HandOver; Stopped, with the run closed if a request was under way.
        """
        attempt = 1
        while True:
            try:
                return await self._try(attempt, self._request(notes, part, most_tokens), finish)
            except ProviderError as error:
                delay_s = self._retry.delay_s(error, attempt, random.random)
                if delay_s is None:
                    raise
            await self._stop.guard(self._progress.clock.sleep(delay_s))
            attempt += 1

    async def _try(self, attempt: int, request: ProviderRequest, finish: Finish | None) -> str:
        exchange = await self._open(attempt)
        text = ""

        def write(draft: Draft, *, error_code: str | None = None) -> None:
            exchange.close(draft, self._target.price, error_code=error_code)
            if error_code is None and finish is not None:
                finish(draft, text)

        try:
            await self._stop.guard(self._stream(exchange, request))
            text = _text_of(exchange)
        except Stopped:
            await self._progress.close_stopped(partial(write, error_code=self._stop.cause))
            raise
        except ProviderError as error:
            await self._progress.commit(partial(write, error_code=error.code))
            raise
        await self._progress.commit(write)
        usage = exchange.assembly.usage
        await self._progress.tell("usage", usage, self._target.price(usage)[0])
        return text

    async def _open(self, attempt: int) -> Exchange:
        if not await self._progress.may_start():
            raise HandOver
        target = self._target
        turn = self._progress.turns + 1
        exchange = Exchange(
            turn=turn,
            attempt=attempt,
            vendor=target.vendor,
            model=target.model,
            clock=self._progress.clock,
            purpose="compaction",
        )

        def write(draft: Draft) -> None:
            self._progress.announce(draft)
            exchange.open(draft)

        await self._progress.decide(write, turn=turn)
        return exchange

    def _request(self, notes: str, part: list[Record], most_tokens: int) -> ProviderRequest:
        snapshot = self._progress.snapshot
        cap = self._target.capabilities.max_output_tokens or most_tokens + REASONING_TOKENS
        text = request_text(notes, part, most_tokens=most_tokens, instructions=snapshot.options.instructions)
        return ProviderRequest(
            model=self._target.model,
            system=SYSTEM,
            messages=(Message(role="user", blocks=(TextBlock(text=text),)),),
            think_effort=0.0,
            max_output_tokens=min(cap, most_tokens + REASONING_TOKENS),
            cache_key=snapshot.session_id,
            end_user_id=snapshot.end_user_id,
            purpose="compaction",
        )

    async def _stream(self, exchange: Exchange, request: ProviderRequest) -> None:
        """Raises: ProviderError."""
        await self._progress.until_live()
        exchange.left()
        stream = cast("AsyncGenerator[ProviderEvent, None]", self._target.provider.stream(request))
        async with aclosing(stream) as events:
            async for event in events:
                exchange.assembly.feed(event)
        if exchange.assembly.end is None:
            raise StreamTruncated("the adapter ended without a terminal marker")


def _text_of(exchange: Exchange) -> str:
    """Raises: ContextTooLong, BadPayload."""
    end = exchange.assembly.end
    blocks = [part.block for part in exchange.assembly.parts()]
    text = "".join(block.text for block in blocks if isinstance(block, TextBlock)).strip()
    if text and (end is None or end.stop is not Stop.REFUSAL):
        return text
    if end is not None and end.stop is Stop.CONTEXT_WINDOW:
        raise ContextTooLong("the window is full")
    raise BadPayload("the model wrote no notes")
