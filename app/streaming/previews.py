"""Which events of a session are being produced, and what readers that come late must be shown of them."""

from itertools import pairwise

import msgspec
from msgspec import Struct

from agents.types import DeltaKind
from app.streaming.batches import Ended, Item, More, Started
from app.streaming.frames import Cursor, delta_frame, encode_delta, start_frame
from app.streaming.merging import DeltaPile
from app.streaming.outgoing import ENDS_PREVIEWS
from app.streaming.ring import Frame
from providers.types import JsonObject

FINISHED_IDS = 1024
"""How many final events since the last request are remembered; one turn has fewer."""

BEFORE_PREVIEWS = frozenset({"span.model_request_start"})
"""Events that come before the previews of their id: those of `model.status` tell how the request goes on."""


class Unfinished(Struct, kw_only=True):
    """An event that has begun. `index` is that of its last delta, `deltas` are (n, JSON) from the first on.

    `deltas` is None when they became too many: then nobody can join any more.
    """

    event_id: str
    kind: DeltaKind
    base_seq: int
    start_n: int
    index: int = 0
    deltas: list[tuple[int, bytes]] | None = msgspec.field(default_factory=list)

    @property
    def last_n(self) -> int:
        return self.deltas[-1][0] if self.deltas else self.start_n

    def index_at(self, n: int) -> int:
        """The index of the last delta up to `n`."""
        return sum(1 for delta_n, _ in self.deltas or () if delta_n <= n)


class Previews:
    """Decides which previews may be shown: of the newest epoch, whole, and of events that are not over."""

    def __init__(self, *, joinable_bytes: int) -> None:
        self.epoch = 0
        self._joinable_bytes = joinable_bytes
        self._bytes = 0
        self._last_n = 0
        self._void_seq = 0  # what began before this event is over
        self._finished: dict[str, None] = {}
        self._unfinished: dict[str, Unfinished] = {}

    def raise_epoch(self, epoch: int) -> None:
        """Previews of older epochs are void. A lower number changes nothing."""
        if epoch > self.epoch:
            self.epoch = epoch
            self._last_n = 0
            self._forget_unfinished()

    def settle(self, *, event_id: str, event_type: str, seq: int) -> None:
        """A durable event is in the log."""
        if event_type in ENDS_PREVIEWS:
            if seq > self._void_seq:
                self._void_seq = seq
                self._finished.clear()
            for unfinished in list(self._unfinished.values()):
                if unfinished.base_seq < seq:
                    self._drop(unfinished.event_id)
        elif event_type not in BEFORE_PREVIEWS:
            self._finish(event_id)

    def accept(self, item: Item, *, epoch: int, seq: int) -> Frame | None:
        """The frame of a preview after the durable event `seq`; None when readers must not see it."""
        if isinstance(item, Ended):
            self._finish(item.event_id)
            return None
        if not isinstance(item, Started | More) or epoch != self.epoch or item.n <= self._last_n:
            return None
        self._last_n = item.n
        if item.base_seq < self._void_seq or item.event_id in self._finished:
            return None
        if isinstance(item, Started):
            return self._start(item, seq)
        return self._extend(item, seq)

    def indexes_at(self, cursor: Cursor) -> dict[str, int]:
        """What a reader with this cursor has of unfinished events; empty when its `n` is not known here."""
        if cursor.n is None:
            return {}
        n = cursor.n
        begun = [unfinished for unfinished in self._unfinished.values() if unfinished.start_n <= n]
        is_known = any(
            unfinished.base_seq <= cursor.seq
            and (unfinished.start_n == n or any(delta_n == n for delta_n, _ in unfinished.deltas or ()))
            for unfinished in begun
        )
        if not is_known:
            return {}
        return {
            unfinished.event_id: unfinished.index_at(n)
            for unfinished in begun
            if unfinished.deltas is not None
        }

    def join(self, had: dict[str, int], kinds: frozenset[DeltaKind], *, seq: int) -> list[bytes]:
        """Frames that bring a reader up to date, whose last durable event is `seq`. `had` is updated.

        Only the last frame carries an id when events were produced side by side, since an id says that a
        reader has everything before it.
        """
        missing = [
            unfinished
            for unfinished in self._unfinished.values()
            if unfinished.deltas is not None
            and unfinished.kind in kinds
            and had.get(unfinished.event_id) != unfinished.index
        ]
        missing.sort(key=lambda unfinished: unfinished.start_n)
        in_turn = all(first.last_n < second.start_n for first, second in pairwise(missing))
        frames: list[tuple[Unfinished, bytes | None, int]] = []
        for unfinished in missing:
            had[unfinished.event_id] = unfinished.index
            frames.append((unfinished, None, unfinished.start_n))
            frames += [(unfinished, encode_delta(delta), unfinished.last_n) for delta in _merged(unfinished)]
        newest_n = max((unfinished.last_n for unfinished in missing), default=0)
        encoded = []
        for at, (unfinished, delta, n) in enumerate(frames, start=1):
            is_last_of_event = at == len(frames) or frames[at][0] is not unfinished
            if at == len(frames):
                shown_n: int | None = newest_n
            else:
                shown_n = n if in_turn and (delta is None or is_last_of_event) else None
            encoded.append(_frame(unfinished, delta, seq=seq, n=shown_n))
        return encoded

    def unfinished(self) -> tuple[int | None, list[tuple[str, DeltaKind, list[JsonObject]]]]:
        """The newest `n`, None when nothing is unfinished; and id, kind and merged deltas of what is."""
        begun = [each for each in self._unfinished.values() if each.deltas is not None]
        begun.sort(key=lambda each: each.start_n)
        newest_n = max((each.last_n for each in begun), default=None)
        return newest_n, [(each.event_id, each.kind, _merged(each)) for each in begun]

    # -- inside -----------------------------------------------------------------------------------------

    def _start(self, item: Started, seq: int) -> Frame:
        self._unfinished[item.event_id] = Unfinished(
            event_id=item.event_id, kind=item.kind, base_seq=item.base_seq, start_n=item.n
        )
        data = start_frame(event_id=item.event_id, kind=item.kind, seq=seq, n=item.n)
        return Frame(data, seq, item.event_id, item.kind, item.n, 0)

    def _extend(self, item: More, seq: int) -> Frame | None:
        unfinished = self._unfinished.get(item.event_id)
        if unfinished is None:
            return None
        if item.index != unfinished.index + 1:
            self._drop(item.event_id)
            return None
        unfinished.index = item.index
        if unfinished.deltas is not None:
            self._bytes += len(item.delta)
            unfinished.deltas.append((item.n, item.delta))
            if self._bytes > self._joinable_bytes:
                self._bytes -= sum(len(delta) for _, delta in unfinished.deltas)
                unfinished.deltas = None
        data = delta_frame(event_id=item.event_id, delta=item.delta, seq=seq, n=item.n)
        return Frame(data, seq, item.event_id, unfinished.kind, item.n, item.index)

    def _finish(self, event_id: str) -> None:
        self._drop(event_id)
        self._finished[event_id] = None
        if len(self._finished) > FINISHED_IDS:
            del self._finished[next(iter(self._finished))]

    def _drop(self, event_id: str) -> None:
        unfinished = self._unfinished.pop(event_id, None)
        if unfinished is not None:
            self._bytes -= sum(len(delta) for _, delta in unfinished.deltas or ())

    def _forget_unfinished(self) -> None:
        self._unfinished.clear()
        self._bytes = 0


def _merged(unfinished: Unfinished) -> list[JsonObject]:
    return DeltaPile(msgspec.json.decode(delta) for _, delta in unfinished.deltas or ()).build()


def _frame(unfinished: Unfinished, delta: bytes | None, *, seq: int, n: int | None) -> bytes:
    if delta is None:
        return start_frame(event_id=unfinished.event_id, kind=unfinished.kind, seq=seq, n=n)
    return delta_frame(event_id=unfinished.event_id, delta=delta, seq=seq, n=n)
