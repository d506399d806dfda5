"""An event as the log holds it: encoded, and numbered when its transaction has committed."""

from collections.abc import Sequence

from msgspec import Struct
from msgspec.structs import replace

from agents.events import Event, encode_event, event_type


class LoggedEvent(Struct, frozen=True, kw_only=True):
    """`body` is one line of compact JSON without `seq`; `id` and `type` are in it too."""

    seq: int
    id: str
    type: str
    body: bytes

    @property
    def json(self) -> bytes:
        """The event as clients read it: `seq` first, then the stored bytes."""
        return b'{"seq":%d,' % self.seq + self.body[1:]


def number(events: tuple[Event, ...], *, after_seq: int) -> tuple[LoggedEvent, ...]:
    """`events` with the numbers that follow `after_seq`, in order."""
    return tuple(
        LoggedEvent(seq=after_seq + offset, id=event.id, type=event_type(event), body=encode_event(event))
        for offset, event in enumerate(events, start=1)
    )


def renumbered(events: Sequence[LoggedEvent], *, after_seq: int) -> tuple[LoggedEvent, ...]:
    """The same events where their numbers were not known when they were encoded."""
    return tuple(replace(event, seq=after_seq + offset) for offset, event in enumerate(events, start=1))
