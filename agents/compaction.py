"""Keeps a conversation within its model's window: replaces older messages by a memory in what is sent.

Stored messages are never touched. A memory is written by the run's own model, from records of what it stands
for; when that is too much for one request, in parts. Everything here is bounded, and a memory that would not
make the conversation shorter is thrown away.
"""

import logging
from functools import cached_property

from agents.context import IMAGE_TOKENS, json_tokens, text_tokens
from agents.drafts import Draft
from agents.errors import Stopped
from agents.events import CompactionTrigger, RetryType, StopReason, ThreadContextCompacted
from agents.exchange import add_error, user_text
from agents.note_requests import NoteRequests
from agents.progress import Progress
from agents.stop_watch import StopWatch
from agents.summaries import dropped, newest, records_of, request_tokens, take
from agents.targets import Target, Targets
from agents.toolbox import Toolbox
from agents.types import Memory, StoredMessage
from providers.errors import ContextTooLong, ProviderError
from providers.ids import new_id
from providers.retry import RetryPolicy
from providers.types import TextBlock

TOOL = "compact_memory"  # the tool by which a model may ask for it

KEPT_SHARE = 0.4  # of the room for messages: what stays word for word
FOLDED_SHARE = 0.25  # of that room: below it a compaction at the threshold is not worth its request
MEMORY_SHARE = 6  # a memory has at most one in so many tokens of the room
MIN_MEMORY_TOKENS, MAX_MEMORY_TOKENS = 200, 4_000
UNKNOWN_WINDOW_TOKENS = 32_000  # what a request for a summary is taken to have, when the model does not say
MIN_PART_TOKENS = 250
MIN_FOLDED_TOKENS = 500  # with fewer, it is not the messages that make a request too long
MAX_HALVINGS = 5
MAX_PARTS = 24
MAX_OVERFLOWS = 2  # in a row: the first keeps the newest messages, the second nothing but the memory
MAX_SCALE = 4.0

_log = logging.getLogger(__name__)


class Compaction:
    """The compactions of one run."""

    def __init__(
        self, *, progress: Progress, stop: StopWatch, targets: Targets, toolbox: Toolbox, retry: RetryPolicy
    ) -> None:
        self._progress = progress
        self._context = progress.context
        self._targets = targets
        self._toolbox = toolbox
        self._requests = NoteRequests(progress=progress, stop=stop, targets=targets, retry=retry)
        self._scale = 1.0  # tokens as the provider counts them, by our estimate
        self._overflows = 0
        self._has_overflowed = False
        self._has_served_client = False
        self._refused_at = 0  # the model's wish in this message could not be met
        self._has_given_up = False

    # -- when -------------------------------------------------------------------------------------------

    @property
    def trigger(self) -> CompactionTrigger | None:
        """Why a memory is to be made before anything else; None: it is not."""
        if self._progress.snapshot.options.compact:
            return None if self._has_served_client else "client"
        if not self._progress.expects_answer:
            return None
        if self._has_overflowed:
            return "context_too_long"
        if self._is_asked_for():
            return "tool"
        return "threshold" if self._is_worth_it() else None

    def may_help(self) -> bool:
        """Takes note that the provider found the request too long. False: there is nothing left to do."""
        if self._overflows >= MAX_OVERFLOWS or self._context.tokens < MIN_FOLDED_TOKENS:
            return False
        self._overflows += 1
        self._has_overflowed = True
        return True

    def measured(self, input_tokens: int | None) -> None:
        """Takes note of how many tokens the last request had, which has been answered."""
        self._overflows = 0
        estimate = self._fixed_tokens + self._context.tokens
        if input_tokens:
            self._scale = min(max(input_tokens / max(estimate, 1), 1.0), MAX_SCALE)

    def largest_part(self) -> str:
        """A sentence for users on what takes most of the room."""
        last = self._context.kept[-1:]
        parts = {
            "the system prompt": text_tokens(self._progress.agent.system or ""),
            "the tools": json_tokens(self._toolbox.specs()),
            "the last message": self._context.tokens_of(last),
        }
        name = max(parts, key=lambda part: parts[part])
        return f"Most of the room is taken by {name}, about {parts[name]} tokens."

    def _is_asked_for(self) -> bool:
        kept = self._context.kept
        if len(kept) < 2 or kept[-1].message.role != "tool" or kept[-1].position <= self._refused_at:
            return False
        memory = self._context.memory
        if memory is not None and kept[-1].position <= memory.seen_position:
            return False
        return any(use.name == TOOL for use in kept[-2].message.tool_uses)

    def _is_worth_it(self) -> bool:
        limit = self._limit
        if limit is None or self._has_given_up:
            return False
        arrivals = sum(
            text_tokens(block.text) if isinstance(block, TextBlock) else IMAGE_TOKENS
            for prompt in self._progress.arrivals
            for block in prompt.content
        )
        if (self._fixed_tokens + self._context.tokens + arrivals) * self._scale <= limit:
            return False
        folded = self._folded("threshold")
        return self._context.tokens_of(folded) * self._scale >= self._room(limit) * FOLDED_SHARE

    @property
    def _target(self) -> Target:
        return self._targets.current

    @property
    def _limit(self) -> int | None:
        """The most tokens that a request should have. None: not known."""
        asked = self._progress.agent.compact_at_tokens
        if asked is not None:
            return asked
        window = self._target.capabilities.context_window_tokens
        return None if window is None else int(window * self._target.capabilities.safe_usage_ratio)

    def _room(self, limit: int) -> int:
        """What of `limit` is left for messages."""
        return max(limit - int(self._fixed_tokens * self._scale), limit // 4)

    @cached_property
    def _fixed_tokens(self) -> int:
        """What each request has besides messages."""
        agent = self._progress.agent
        schema = 0 if agent.output_schema is None else json_tokens(agent.output_schema)
        return text_tokens(agent.system or "") + json_tokens(self._toolbox.specs()) + schema

    # -- what -------------------------------------------------------------------------------------------

    def _folded(self, trigger: CompactionTrigger) -> list[StoredMessage]:
        """The messages that are to be replaced: never a call without its result."""
        kept = self._context.kept
        most = self._kept_tokens(trigger)
        starts = [index for index, stored in enumerate(kept) if stored.message.role != "tool"]
        if not starts:
            return []
        cut = len(kept)
        for start in reversed(starts):
            if self._context.tokens_of(kept[start:]) > most:
                break
            cut = start
        if cut == len(kept) and self._context.tokens_of(kept[starts[-1] :]) <= 2 * most:
            cut = starts[-1]  # the newest is kept, unless it alone is far too much
        return kept[:cut]

    def _kept_tokens(self, trigger: CompactionTrigger) -> int:
        """How much stays word for word, by our estimate."""
        if trigger == "context_too_long" and self._overflows == MAX_OVERFLOWS:
            return 0
        limit = self._limit
        shares = [] if limit is None else [self._room(limit) / self._scale * KEPT_SHARE]
        if trigger != "threshold":
            shares.append(self._context.tokens * KEPT_SHARE)  # our estimate was wrong, or somebody asked
        return int(min(shares))

    @property
    def _memory_tokens(self) -> int:
        limit = self._limit
        room = self._context.tokens if limit is None else self._room(limit)
        return min(max(room // MEMORY_SHARE, MIN_MEMORY_TOKENS), MAX_MEMORY_TOKENS)

    # -- how --------------------------------------------------------------------------------------------

    async def run(self, trigger: CompactionTrigger) -> None:
        """Makes a memory, or leaves things as they are; closes the run when it cannot go on.

        Raises: HoldLost, HandOver.
        """
        try:
            await self._run(trigger)
        except Stopped:
            if not self._progress.has_left:
                await self._progress.close_stopped()

    async def _run(self, trigger: CompactionTrigger) -> None:
        folded = self._folded(trigger)
        try:
            is_done = bool(folded) and await self._summarise(folded, trigger)
        except ProviderError as error:
            _log.warning("no memory could be made: %s", error.message, extra={"code": error.code})
            if trigger == "client":
                await self._close_failed(error)
                return
            is_done = False
        if trigger == "context_too_long":
            self._has_overflowed = False
            if not is_done and not await self._drop(folded):
                text = f"The conversation is longer than the model can take. {self.largest_part()}"
                await self._progress.fail("context_too_long", text)
        elif trigger == "client":
            self._has_served_client = True
        elif trigger == "tool":
            self._refused_at = self._context.kept[-1].position if self._context.kept else 0
        elif not is_done:
            self._has_given_up = True

    async def _close_failed(self, error: ProviderError) -> None:
        stop = StopReason(type="error", code=error.code, message=user_text(error))
        retry: RetryType = "exhausted" if error.is_retryable else "terminal"
        await self._progress.close(stop, lambda draft: add_error(draft, error, retry=retry))

    async def _drop(self, folded: list[StoredMessage]) -> bool:
        """Leaves `folded` out without a summary. False: that would not make anything shorter."""
        if not folded:
            return False
        notes = "" if self._context.memory is None else self._context.memory.text
        memory = self._memory(folded, dropped(notes, records_of(folded), self._memory_tokens))
        if not self._shortens(memory, folded):
            return False
        await self._progress.decide(lambda draft: self._add(draft, memory, folded, "context_too_long"))
        return True

    async def _summarise(self, folded: list[StoredMessage], trigger: CompactionTrigger) -> bool:
        """True when the memory of `folded` is in effect.

        Raises: ProviderError, Stopped, HoldLost, HandOver.
        """
        notes = "" if self._context.memory is None else self._context.memory.text
        part_tokens = self._part_tokens(notes)
        left = newest(records_of(folded), part_tokens * MAX_PARTS // 2)
        halvings = requests = 0
        is_done = False

        def finish(draft: Draft, text: str) -> None:
            nonlocal is_done
            memory = self._memory(folded, text)
            is_done = self._shortens(memory, folded)
            if is_done:
                self._add(draft, memory, folded, trigger)

        while left:
            part, rest = take(left, part_tokens)
            requests += 1
            try:
                notes = await self._requests.ask(
                    notes, part, most_tokens=self._memory_tokens, finish=finish if not rest else None
                )
            except ContextTooLong:
                halvings += 1
                part_tokens //= 2
                if halvings > MAX_HALVINGS or part_tokens < MIN_PART_TOKENS or requests >= 2 * MAX_PARTS:
                    raise
                continue
            left = rest
        return is_done

    def _part_tokens(self, notes: str) -> int:
        window = self._target.capabilities.context_window_tokens or UNKNOWN_WINDOW_TOKENS
        room = int(window * self._target.capabilities.safe_usage_ratio / self._scale)
        return max(room - request_tokens(notes, most_tokens=self._memory_tokens), MIN_PART_TOKENS)

    def _memory(self, folded: list[StoredMessage], text: str) -> Memory:
        return Memory(
            id=new_id("mem"),
            position=folded[-1].position,
            seen_position=self._progress.next_position - 1,
            text=text,
        )

    def _tokens_after(self, memory: Memory, folded: list[StoredMessage]) -> int:
        kept = self._context.kept[len(folded) :]
        task = self._context.task_after(folded)
        return self._context.tokens_of(kept) + self._context.head_tokens(memory, kept, task=task)

    def _shortens(self, memory: Memory, folded: list[StoredMessage]) -> bool:
        return self._tokens_after(memory, folded) < self._context.tokens

    def _add(
        self, draft: Draft, memory: Memory, folded: list[StoredMessage], trigger: CompactionTrigger
    ) -> None:
        draft.memory = memory
        draft.event(
            ThreadContextCompacted,
            memory_id=memory.id,
            memory=memory.text,
            position=memory.position,
            trigger=trigger,
            tokens_before=self._fixed_tokens + self._context.tokens,
            tokens_after=self._fixed_tokens + self._tokens_after(memory, folded),
        )
