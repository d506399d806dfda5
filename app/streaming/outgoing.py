"""What one hold has to say to readers, from the moment it is said to the moment Redis has it."""

import asyncio
import contextlib
import time
from collections.abc import Callable
from typing import Any

import msgspec
from msgspec import Struct

from agents.log import LoggedEvent
from agents.types import DeltaKind, Preview, PreviewStart
from app.streaming.batches import (
    PUBLISHED_BODY_BYTES,
    Batch,
    Committed,
    Ended,
    Item,
    More,
    Started,
    encode_batch,
)
from app.streaming.frames import encode_delta
from app.streaming.merging import DeltaPile
from app.streaming.redis_script import STALE, Publication

PENDING_BYTES = 1024 * 1024
"""What may wait while Redis is slow or away. Beyond it previews are given up; Postgres has the events."""

KEPT_BYTES = 1024 * 1024
"""How much of unfinished events is kept for readers that join late. Beyond it they wait for the final."""

ENTRY_OVERHEAD_BYTES = 128

ENDS_PREVIEWS = frozenset(
    {
        "span.model_request_end",
        "session.status_idle",
        "session.status_rescheduled",
        "session.status_terminated",
    }
)
"""After these events nothing that began before them goes on."""


class _Open(Struct, kw_only=True):
    """An event that is being produced. `index` is that of its last delta that was packed."""

    event_id: str
    kind: DeltaKind
    index: int = 0
    is_given_up: bool = False


class _Waiting(Struct, kw_only=True):
    """A preview that waits for the next flush: its start, deltas, or both."""

    open: _Open
    base_seq: int
    is_start: bool
    pile: DeltaPile = msgspec.field(default_factory=DeltaPile)


class SessionPublisher:
    """The voice of one hold.

    Nothing here blocks or fails. What waits is bounded, and deltas of one event that wait are merged, so a
    slow Redis costs the run nothing. When a newer epoch has published, it falls silent for good.
    """

    def __init__(
        self, session_id: str, epoch: int, *, base_seq: int, wants_flush: Callable[["SessionPublisher"], None]
    ) -> None:
        self.session_id = session_id
        self.is_stale = False
        self._epoch = epoch
        self._base_seq = base_seq
        self._wants_flush = wants_flush
        self._n = 0
        self._waiting: list[LoggedEvent | _Waiting] = []
        self._waiting_bytes = 0
        self._newest: dict[str, _Waiting] = {}  # the entry that more of an event is merged into
        self._unfinished: dict[str, _Open] = {}
        self._kept_bytes: int | None = 0  # None: too much, nothing is kept until all previews have ended
        self._in_flight: Publication | None = None
        self._is_idle = asyncio.Event()
        self._is_idle.set()

    def event(self, event: LoggedEvent) -> None:
        """Publishes an event whose transaction has committed."""
        if self.is_stale:
            return
        self._base_seq = max(self._base_seq, event.seq)
        self._newest.clear()
        if event.type in ENDS_PREVIEWS:
            self._unfinished.clear()
        else:
            self._unfinished.pop(event.id, None)
        self._waiting.append(event)
        self._waiting_bytes += min(len(event.body), PUBLISHED_BODY_BYTES) + ENTRY_OVERHEAD_BYTES
        self._hold_bound()
        self._want_flush()

    def preview(self, preview: Preview, base_seq: int | None = None) -> None:
        """Shows what is being produced. `base_seq`: what was committed before it; None: all that was told."""
        if self.is_stale:
            return
        is_start = preview.event_id not in self._unfinished
        if is_start:
            self._unfinished[preview.event_id] = _Open(event_id=preview.event_id, kind=preview.kind)
        opened = self._unfinished[preview.event_id]
        if opened.is_given_up:
            return
        entry = self._newest.get(preview.event_id)
        if entry is None:
            base = self._base_seq if base_seq is None else base_seq
            entry = _Waiting(open=opened, base_seq=base, is_start=is_start)
            self._newest[preview.event_id] = entry
            self._waiting.append(entry)
            self._waiting_bytes += ENTRY_OVERHEAD_BYTES
        if not isinstance(preview, PreviewStart):
            self._waiting_bytes += entry.pile.add(preview.delta)
        self._hold_bound()
        self._want_flush()

    async def aclose(self, *, timeout_s: float = 2.0) -> None:
        """Waits until Redis has everything, or for as long as is worth it."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self.flushed()
        self._fall_silent()

    async def flushed(self) -> None:
        """Returns when Redis has everything that was said, or nothing more will be sent."""
        await self._is_idle.wait()

    # -- for the flusher --------------------------------------------------------------------------------

    def take(self) -> Publication | None:
        """What is to be sent: what was taken and not confirmed, else all that waits."""
        if self._in_flight is None and self._waiting:
            self._in_flight = self._pack()
        return self._in_flight

    def confirm(self, result: int) -> None:
        """Redis has answered for what was taken."""
        self._in_flight = None
        if result == STALE:
            self._fall_silent()
        elif self._waiting:
            self._wants_flush(self)
        else:
            self._is_idle.set()

    # -- inside -----------------------------------------------------------------------------------------

    def _want_flush(self) -> None:
        self._is_idle.clear()
        if self._in_flight is None:
            self._wants_flush(self)

    def _fall_silent(self) -> None:
        self.is_stale = True
        self._waiting.clear()
        self._newest.clear()
        self._unfinished.clear()
        self._in_flight = None
        self._is_idle.set()

    def _hold_bound(self) -> None:
        """Gives previews up first, then the oldest events, which readers then find in Postgres."""
        if self._waiting_bytes <= PENDING_BYTES:
            return
        for entry in self._waiting:
            if isinstance(entry, _Waiting):
                entry.open.is_given_up = True
        self._newest.clear()
        events = [entry for entry in self._waiting if isinstance(entry, LoggedEvent)]
        sizes = [min(len(event.body), PUBLISHED_BODY_BYTES) + ENTRY_OVERHEAD_BYTES for event in events]
        while sum(sizes) > PENDING_BYTES // 2 and len(events) > 1:
            del events[0], sizes[0]
        self._waiting = [*events]
        self._waiting_bytes = sum(sizes)

    def _pack(self) -> Publication:
        items: list[Item] = []
        kept: list[Item] = []
        for entry in self._waiting:
            if isinstance(entry, LoggedEvent):
                body = entry.body if len(entry.body) <= PUBLISHED_BODY_BYTES else b""
                items.append(Committed(entry.seq, entry.id, entry.type, body))
                kept.append(Ended(entry.id))
            else:
                previews = self._number(entry)
                items += previews
                kept += previews
        self._waiting = []
        self._waiting_bytes = 0
        self._newest.clear()
        return self._publication(tuple(items), tuple(kept))

    def _number(self, entry: _Waiting) -> list[Started | More]:
        numbered: list[Started | More] = []
        opened = entry.open
        if entry.is_start:
            self._n += 1
            numbered.append(Started(self._n, entry.base_seq, opened.event_id, opened.kind))
        for delta in entry.pile.build():
            self._n += 1
            opened.index += 1
            text = encode_delta(delta)
            numbered.append(More(self._n, entry.base_seq, opened.event_id, opened.index, text))
        return numbered

    def _publication(self, items: tuple[Item, ...], kept: tuple[Item, ...]) -> Publication:
        sent_ms = time.time_ns() // 1_000_000
        fields: dict[str, Any] = {"previews": "leave"}
        if not self._unfinished:
            fields = {"previews": "clear"}
            self._kept_bytes = 0
        elif self._kept_bytes is not None:
            entry = encode_batch(Batch(self._epoch, sent_ms, kept))
            self._kept_bytes += len(entry) + ENTRY_OVERHEAD_BYTES
            fields = {"previews": "keep", "entry": entry}
            if self._kept_bytes > KEPT_BYTES:
                self._kept_bytes = None
                fields = {"previews": "clear"}
        payload = encode_batch(Batch(self._epoch, sent_ms, items))
        return Publication(session_id=self.session_id, epoch=self._epoch, payload=payload, **fields)
