"""What travels on a session's channel: events and previews, in the order in which their worker made them."""

import msgspec
from msgspec import Struct

from agents.types import DeltaKind

PUBLISHED_BODY_BYTES = 256 * 1024
"""Larger bodies stay in Postgres: Redis cuts subscribers off that have megabytes waiting for them."""


class Committed(Struct, frozen=True, array_like=True, tag_field="item", tag="c"):
    """A durable event. An empty body: it is to be read from Postgres."""

    seq: int
    id: str
    type: str
    body: bytes


class Started(Struct, frozen=True, array_like=True, tag_field="item", tag="s"):
    """An event has begun. `n` counts all previews of an epoch; `base_seq`: what the worker had committed."""

    n: int
    base_seq: int
    event_id: str
    kind: DeltaKind


class More(Struct, frozen=True, array_like=True, tag_field="item", tag="m"):
    """More of an event: its `index`-th delta, 1, 2, 3 …, as encoded JSON of one line."""

    n: int
    base_seq: int
    event_id: str
    index: int
    delta: bytes


class Ended(Struct, frozen=True, array_like=True, tag_field="item", tag="e"):
    """The final event is in the log. Kept instead of `Committed` for readers that join late."""

    event_id: str


Item = Committed | Started | More | Ended


class Batch(Struct, frozen=True, array_like=True):
    """`epoch` is None when the api speaks, which holds no session. `sent_ms` is the sender's wall clock."""

    epoch: int | None
    sent_ms: int
    items: tuple[Item, ...]


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Batch)


def encode_batch(batch: Batch) -> bytes:
    return _encoder.encode(batch)


def decode_batch(payload: bytes) -> Batch | None:
    """None when it is not a batch as this release knows it."""
    try:
        return _decoder.decode(payload)
    except msgspec.DecodeError:
        return None
