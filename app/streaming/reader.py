"""One reader's place in the log: in the ring of its session, or behind it in Postgres."""

from collections.abc import Sequence

from msgspec import Struct

from agents.log import LoggedEvent
from agents.types import DeltaKind
from app.streaming.feed import Feed, Idle
from app.streaming.frames import Cursor, durable_frame, with_retry
from app.streaming.ring import Frame, Ring


class Opening(Struct, frozen=True, kw_only=True):
    """Where a reader starts, and what Postgres said when it came.

    `first` is sent at once; `needs_retry`: the first frame after it is the connection's first. `idle`:
    nothing was going on at that moment. `poll`: the last poll that had begun by then. `types`: the only
    durable events that are shown; None: all.
    """

    session_id: str
    cursor: Cursor
    first: bytes
    needs_retry: bool
    last_seq: int
    poll: int
    idle: Idle | None
    until_idle: bool
    kinds: frozenset[DeltaKind]
    types: frozenset[str] | None = None


class Reader:
    """Turns a cursor into bytes.

    It gets every durable event after its cursor once and in order, and a preview only if it has had the start
    of that event and every delta before.
    """

    def __init__(self, opening: Opening) -> None:
        self.seq = opening.cursor.seq
        self._opening = opening
        self._kinds = opening.kinds
        self._resume: Cursor | None = opening.cursor if opening.cursor.n is not None else None
        self._position: int | None = None  # None: not in the ring
        self._had: dict[str, int] = {}
        self._wants_join = bool(opening.kinds)
        self._needs_retry = opening.needs_retry

    def is_behind(self, feed: Feed) -> bool:
        """Events are to be read from Postgres first."""
        if feed.ring is None or not feed.is_ready:
            return self.seq < self._opening.last_seq
        if self._position is not None and self._position < feed.ring.start:
            self._leave_ring()
        return self._position is None and feed.ring.position_after(self.seq) is None

    def is_finished(self, feed: Feed) -> bool:
        """Everything has been delivered and nothing more will come."""
        return feed.is_gone or (self._opening.until_idle and self.seq == self._last_seq(feed))

    def is_up_to_date(self, feed: Feed) -> bool:
        """It has all that there is, and more may come."""
        ring = feed.ring
        return ring is not None and self._position == ring.end and not self.is_finished(feed)

    def take_page(self, events: Sequence[LoggedEvent], feed: Feed) -> bytes:
        """The frames of events read from Postgres."""
        frames = []
        last_seq = self._last_seq(feed) if self._opening.until_idle else None
        for event in events:
            if event.seq > self.seq:
                if self._shows(event.type):
                    frames.append(durable_frame(event))
                self.seq = event.seq
                self._resume = None
                if event.seq == last_seq:
                    break
        return self._joined(frames)

    def collect(self, feed: Feed, max_bytes: int) -> bytes:
        """What the ring has for this reader, about `max_bytes` of it; empty when it has everything."""
        ring = feed.ring
        if ring is None or not feed.is_ready or self.is_behind(feed) or self.is_finished(feed):
            return b""
        if self._position is None:
            self._position = self._enter_ring(feed, ring)
        frames: list[bytes] = []
        size = 0
        last_seq = self._last_seq(feed) if self._opening.until_idle else None
        while self._position < ring.end and size < max_bytes:
            frame = ring.at(self._position)
            self._position += 1
            if not self._take(frame):
                continue
            if frame.kind is not None or self._shows(frame.type):
                frames.append(frame.data)
                size += len(frame.data)
            if frame.kind is None and frame.seq == last_seq:
                break
        if self._wants_join and self._position == ring.end and self.seq == feed.seq:
            self._wants_join = False
            frames += feed.previews.join(self._had, self._kinds, seq=self.seq)
        return self._joined(frames)

    # -- inside -----------------------------------------------------------------------------------------

    def _shows(self, event_type: str) -> bool:
        return self._opening.types is None or event_type in self._opening.types

    def _enter_ring(self, feed: Feed, ring: Ring) -> int:
        position = ring.position_after(self.seq)
        assert position is not None, "the reader is not behind"
        if self._resume is not None:
            self._had = feed.previews.indexes_at(self._resume)
            if not self._had and not ring.has_preview(position, self._resume.n or 0):
                self._resume = None
        if self._resume is None and self.seq >= feed.seq:
            return ring.end  # it gets what is unfinished in one piece
        return position

    def _leave_ring(self) -> None:
        self._position = None
        self._resume = None
        self._had.clear()
        self._wants_join = bool(self._kinds)

    def _take(self, frame: Frame) -> bool:
        """True when the reader is to get it."""
        if frame.kind is not None:
            return frame.kind in self._kinds and self._take_preview(frame)
        if frame.seq <= self.seq:
            return False
        self.seq = frame.seq
        self._resume = None
        if frame.ends_previews:
            self._had.clear()
        else:
            self._had.pop(frame.event_id, None)
        return True

    def _take_preview(self, frame: Frame) -> bool:
        is_next = frame.index == 0 or self._had.get(frame.event_id) == frame.index - 1
        if self._resume is not None and self._resume.n is not None and frame.n <= self._resume.n:
            if is_next and self._had.get(frame.event_id, -1) < frame.index:
                self._had[frame.event_id] = frame.index
            return False
        if self._had.get(frame.event_id, -1) >= frame.index:
            return False
        if not is_next or frame.seq != self.seq:
            self._had.pop(frame.event_id, None)
            self._wants_join = True
            return False
        self._had[frame.event_id] = frame.index
        return True

    def _last_seq(self, feed: Feed) -> int | None:
        """Where the log ends for a reader that leaves when nothing goes on; None: not known, or not idle."""
        if feed.idle is not None and feed.idle.poll > self._opening.poll:
            return feed.idle.seq
        return None if self._opening.idle is None else self._opening.idle.seq

    def _joined(self, frames: list[bytes]) -> bytes:
        if frames and self._needs_retry:
            frames[0] = with_retry(frames[0])
            self._needs_retry = False
        return b"".join(frames)
