"""What of a session is being produced at this moment, for a client that asks once instead of reading on."""

from collections.abc import Iterable

from msgspec import Struct

from agents.types import DeltaKind
from app.streaming.batches import Batch, Started, decode_batch
from app.streaming.limits import StreamLimits
from app.streaming.previews import Previews
from db.live import LiveState
from providers.types import JsonObject


class Unfinished(Struct, frozen=True, kw_only=True):
    """An event that has begun, with its deltas put together: as few as say the same."""

    id: str
    type: DeltaKind
    deltas: list[JsonObject]


class Live(Struct, frozen=True, kw_only=True):
    """`cursor`: the id from which a stream goes on after all of this."""

    cursor: str
    unfinished: list[Unfinished]


def kept_batches(entries: Iterable[bytes]) -> list[Batch]:
    """The batches that Redis keeps of a session, those that can be read."""
    return [batch for entry in entries if (batch := decode_batch(entry)) is not None]


def first_base(batches: list[Batch]) -> int | None:
    """The last event before the oldest of these previews; None when there are none."""
    bases = [item.base_seq for batch in batches for item in batch.items if isinstance(item, Started)]
    return min(bases, default=None)


def live(state: LiveState, batches: list[Batch], limits: StreamLimits) -> Live:
    """What is unfinished of `batches`, which were read before `state`."""
    previews = Previews(joinable_bytes=limits.joinable_bytes)
    previews.raise_epoch(state.epoch)
    for event in state.events:
        previews.settle(event_id=event.id, event_type=event.type, seq=event.seq)
    for batch in batches:
        for item in batch.items:
            previews.accept(item, epoch=-1 if batch.epoch is None else batch.epoch, seq=state.seq)
    n, begun = previews.unfinished()
    return Live(
        cursor=str(state.seq) if n is None else f"{state.seq}-{n}",
        unfinished=[Unfinished(id=event_id, type=kind, deltas=deltas) for event_id, kind, deltas in begun],
    )
