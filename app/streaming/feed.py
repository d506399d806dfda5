"""One watched session in one process: what was published and read of it, in order, once for all readers."""

import asyncio
import logging
import time
from collections.abc import Callable
from itertools import islice
from typing import Protocol

from msgspec import Struct

from agents.log import LoggedEvent
from app.streaming.batches import Batch, Committed, Item, More, Started, decode_batch
from app.streaming.frames import durable_frame
from app.streaming.limits import StreamLimits
from app.streaming.outgoing import ENDS_PREVIEWS
from app.streaming.previews import Previews
from app.streaming.ring import Frame, Ring
from db.errors import DatabaseError
from db.log import Head

log = logging.getLogger("armillary.streaming")

RETRY_S = 0.5

SLICE = 256
"""Readers that are written to in one go: about 5 ms."""


class Counters(Struct, kw_only=True):
    """What happened in this process so far. `lag_ms`: how old the newest message of Redis was on arrival."""

    streams_opened: int = 0
    slow_readers_dropped: int = 0
    fills: int = 0
    healed_by_poll: int = 0
    parked_overflows: int = 0
    pages_read: int = 0
    unreadable_messages: int = 0
    lag_ms: int = 0


class Idle(Struct, frozen=True, kw_only=True):
    """The log ended at `seq` and nothing was going on, as seen by the poll of that number."""

    seq: int
    poll: int


class Source(Protocol):
    """Where a feed reads from. All are bounded in time."""

    async def head(self, session_id: str) -> Head | None:
        """None: there is no such session. Raises: DatabaseError."""
        ...

    async def page(self, session_id: str, after_seq: int) -> list[LoggedEvent]:
        """Raises: DatabaseError."""
        ...

    async def kept_previews(self, session_id: str) -> list[bytes]:
        """Batches of unfinished events, oldest first; empty when Redis is away."""
        ...

    async def acknowledged(self, session_id: str) -> None:
        """Returns when messages of the session come in, or when it is not worth waiting for."""
        ...

    def settle_soon(self, session_id: str) -> None:
        """Asks for a poll of this session."""
        ...


class Feed:
    """Delivers durable events densely, whatever Redis loses, and previews only where they belong.

    `seq` is the last durable event that was delivered. While events are read from Postgres, what comes in is
    parked. `ring` is None until the end of the log is known, `is_ready` also when unfinished events are.
    """

    def __init__(
        self,
        session_id: str,
        *,
        source: Source,
        limits: StreamLimits,
        counters: Counters,
        on_append: Callable[[Ring, int], None],
    ) -> None:
        self.session_id = session_id
        self.seq = 0
        self.ring: Ring | None = None
        self.idle: Idle | None = None
        self.is_ready = False
        self.is_gone = False
        self.readers: dict[object, Callable[[], None]] = {}
        self.previews = Previews(joinable_bytes=limits.joinable_bytes)
        self._source = source
        self._limits = limits
        self._counters = counters
        self._on_append = on_append
        self._parked: list[tuple[Batch, int]] = []
        self._parked_bytes = 0
        self._wants_previews = False
        self._wants_sync = False
        self._refused_at: int | None = None
        self._is_closed = False
        self._to_wake: dict[object, None] = {}
        self._sync_task: asyncio.Task[None] | None = None

    def close(self) -> asyncio.Task[None] | None:
        """Stops after the read that is going on, which is not torn off. The task returned is about to end."""
        self._is_closed = True
        return self._sync_task

    # -- what comes in ----------------------------------------------------------------------------------

    def receive(self, payload: bytes) -> None:
        """A message of the session's channel."""
        batch = decode_batch(payload)
        if batch is None:
            self._counters.unreadable_messages += 1
            return
        self._counters.lag_ms = max(0, time.time_ns() // 1_000_000 - batch.sent_ms)
        if self._sync_task is not None:
            self._park(batch, len(payload))
            return
        self._process(batch)
        self._wake()

    def observe(self, head: Head | None, *, poll: int) -> None:
        """What a poll of Postgres has found."""
        if head is None:
            self.is_gone = True
            self._wake()
            return
        if self.ring is None:
            return
        self.previews.raise_epoch(head.epoch)
        self.idle = None if head.is_busy else Idle(seq=head.last_seq, poll=poll)
        if head.last_seq > self.seq and self._sync_task is None:
            self._counters.healed_by_poll += 1
            self.synchronize(with_previews=False)
        self._wake()

    def synchronize(self, *, with_previews: bool) -> None:
        """Reads from Postgres, and what was kept of unfinished events, before anything later is delivered."""
        self._wants_sync = True
        self._wants_previews |= with_previews
        if self._sync_task is None:
            self._sync_task = asyncio.create_task(self._synchronize())
            self._sync_task.add_done_callback(self._end_sync)

    # -- reading ----------------------------------------------------------------------------------------

    async def _synchronize(self) -> None:
        """One at a time. Ends with everything delivered that was parked."""
        if self.ring is None:
            await self._source.acknowledged(self.session_id)
        while self._wants_sync and not self._is_closed:
            self._wants_sync = False
            with_previews, self._wants_previews = self._wants_previews, False
            try:
                await self._catch_up(with_previews=with_previews or self.ring is None)
            except DatabaseError as error:
                log.warning("events of %s could not be read: %s", self.session_id, error)
                if self.ring is None:
                    self._wants_sync = True
                await asyncio.sleep(RETRY_S)
            if not self._wants_sync:
                self._deliver_parked()

    def _end_sync(self, task: asyncio.Task[None]) -> None:
        """Readers go on whatever happened; after a failure of ours the next poll tries again."""
        self._sync_task = None
        if task.cancelled():
            return
        if (error := task.exception()) is not None:
            log.error("events of %s could not be read", self.session_id, exc_info=error)
            self._parked, self._parked_bytes = [], 0
        elif self._wants_sync and not self._is_closed:
            self.synchronize(with_previews=False)
        self._wake()

    async def _catch_up(self, *, with_previews: bool) -> None:
        """Raises: DatabaseError; what was delivered until then stays."""
        head = await self._source.head(self.session_id)
        if head is None:
            self.is_gone = True
            return
        if self.ring is None:
            self.ring = Ring(head.last_seq)
            self.seq = head.last_seq
        self.previews.raise_epoch(head.epoch)
        self._counters.fills += 1
        while self.seq < head.last_seq and not self._is_closed:
            events = await self._source.page(self.session_id, self.seq)
            if not events:
                return
            for event in events:
                if event.seq > self.seq:
                    self._append(event)
            self._wake()
        if with_previews:
            await self._recall_previews()

    async def _recall_previews(self) -> None:
        """Puts unfinished events together from what Redis has kept.

        What ended since they began is looked up in Postgres: the worker may have died before it could say so.
        """
        batches = [decode_batch(entry) for entry in await self._source.kept_previews(self.session_id)]
        known = [batch for batch in batches if batch is not None]
        bases = [
            item.base_seq
            for batch in known
            if batch.epoch == self.previews.epoch
            for item in batch.items
            if isinstance(item, Started | More)
        ]
        position = min(bases, default=self.seq)
        while position < self.seq:
            events = await self._source.page(self.session_id, position)
            if not events:
                break
            for event in events:
                self.previews.settle(event_id=event.id, event_type=event.type, seq=event.seq)
            position = events[-1].seq
        # Before what was parked: it is older.
        self._parked[:0] = [(batch, 0) for batch in known]

    # -- in order ---------------------------------------------------------------------------------------

    def _park(self, batch: Batch, size_bytes: int) -> None:
        self._parked.append((batch, size_bytes))
        self._parked_bytes += size_bytes
        if self._parked_bytes > self._limits.parked_bytes:
            self._counters.parked_overflows += 1
            self._parked = []
            self._parked_bytes = 0
            self._wants_sync = True

    def _deliver_parked(self) -> None:
        self.is_ready = self.ring is not None
        parked, self._parked, self._parked_bytes = self._parked, [], 0
        for at, (batch, _) in enumerate(parked):
            if not self._process(batch):
                self._parked += parked[at + 1 :]
                self._parked_bytes = sum(size for _, size in self._parked)
                return

    def _process(self, batch: Batch) -> bool:
        """False when the rest of it was parked, since events before it must be read first."""
        if batch.epoch is not None:
            self.previews.raise_epoch(batch.epoch)
        for at, item in enumerate(batch.items):
            if self._lacks_events_before(item):
                if self._refused_at == self.seq:
                    continue  # Postgres did not have them either; the poll finds them when they are there
                self._refused_at = self.seq
                rest = Batch(batch.epoch, batch.sent_ms, batch.items[at:])
                self._parked.append((rest, 0))
                self.synchronize(with_previews=False)
                return False
            self._deliver(item, epoch=-1 if batch.epoch is None else batch.epoch)
        return True

    def _lacks_events_before(self, item: Item) -> bool:
        if isinstance(item, Committed):
            return item.seq > self.seq + 1 or (item.seq == self.seq + 1 and not item.body)
        return isinstance(item, Started | More) and item.base_seq > self.seq

    def _deliver(self, item: Item, *, epoch: int) -> None:
        if isinstance(item, Committed):
            if item.seq == self.seq + 1:
                self._append(LoggedEvent(seq=item.seq, id=item.id, type=item.type, body=item.body))
            else:
                self.previews.settle(event_id=item.id, event_type=item.type, seq=item.seq)
            return
        frame = self.previews.accept(item, epoch=epoch, seq=self.seq)
        if frame is not None:
            self._push(frame)

    def _append(self, event: LoggedEvent) -> None:
        self.seq = event.seq
        if self.idle is not None and self.idle.seq < event.seq:
            self.idle = None
        self.previews.settle(event_id=event.id, event_type=event.type, seq=event.seq)
        ends = event.type in ENDS_PREVIEWS
        self._push(Frame(durable_frame(event), event.seq, event.id, ends_previews=ends, type=event.type))
        if event.type == "session.status_idle":
            self._source.settle_soon(self.session_id)

    def _push(self, frame: Frame) -> None:
        assert self.ring is not None, "nothing is delivered before the end of the log is known"
        self.ring.append(frame)
        self._on_append(self.ring, len(frame.data))

    def _wake(self) -> None:
        """Has all readers take what they lack, a slice of them before anything else has its turn."""
        is_under_way = bool(self._to_wake)
        self._to_wake |= dict.fromkeys(self.readers)  # those that have waited stay in front
        if not is_under_way:
            self._wake_slice()

    def _wake_slice(self) -> None:
        woken = list(islice(self._to_wake, SLICE))
        for reader in woken:
            del self._to_wake[reader]
        if self._to_wake:
            asyncio.get_running_loop().call_soon(self._wake_slice)
        for reader in woken:
            wake = self.readers.get(reader)  # it may have left
            if wake is not None:
                wake()
