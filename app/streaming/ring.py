"""The newest frames of one session, encoded once for all readers."""

from msgspec import Struct

from agents.types import DeltaKind


class Frame(Struct, frozen=True, gc=False):
    """A durable event (`kind` None, `seq` its own) or a preview (`seq` of the event delivered before it).

    `index` of a preview: 0 its start, then 1, 2, 3 …. `ends_previews`: nothing that began before goes on.
    """

    data: bytes
    seq: int
    event_id: str
    kind: DeltaKind | None = None
    n: int = 0
    index: int = 0
    ends_previews: bool = False
    type: str = ""  # of a durable event


class Ring:
    """Frames at positions that only grow; the oldest are forgotten.

    `base_seq` is the durable event just before the first frame. Durable frames are dense.
    """

    def __init__(self, after_seq: int) -> None:
        self.base_seq = after_seq
        self.bytes = 0
        self.produced_bytes = 0
        self._frames: list[Frame] = []
        self._offset = 0  # frames at the front of the list that are forgotten
        self._first = 0  # position of the list's front
        self._after: dict[int, int] = {}

    @property
    def start(self) -> int:
        return self._first + self._offset

    @property
    def end(self) -> int:
        return self._first + len(self._frames)

    def append(self, frame: Frame) -> None:
        self._frames.append(frame)
        self.bytes += len(frame.data)
        self.produced_bytes += len(frame.data)
        if frame.kind is None:
            self._after[frame.seq] = self.end

    def evict(self, max_bytes: int) -> int:
        """Forgets the oldest until at most `max_bytes` are left. Returns how many bytes were forgotten."""
        before = self.bytes
        while self.bytes > max_bytes:
            frame = self._frames[self._offset]
            self._offset += 1
            self.bytes -= len(frame.data)
            if frame.kind is None:
                self.base_seq = frame.seq
                del self._after[frame.seq]
        if self._offset > 256 and self._offset * 2 > len(self._frames):
            del self._frames[: self._offset]
            self._first += self._offset
            self._offset = 0
        return before - self.bytes

    def position_after(self, seq: int) -> int | None:
        """Where a reader goes on that has `seq`; None when events that follow it are forgotten."""
        if seq < self.base_seq:
            return None
        if seq == self.base_seq:
            return self.start
        return self._after.get(seq, self.end)

    def has_preview(self, position: int, n: int) -> bool:
        """Preview `n` is among the frames from `position` to the next durable event."""
        for frame in self._frames[position - self._first :]:
            if frame.kind is None:
                return False
            if frame.n == n:
                return True
        return False

    def at(self, position: int) -> Frame:
        return self._frames[position - self._first]
