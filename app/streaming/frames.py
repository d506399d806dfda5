"""Server-Sent Events as bytes, and the cursors that their ids are.

Lines end in LF alone, a frame has one `data:` line, `id:` comes last. A durable event has the id `<seq>`, a
preview `<seq>-<n>`. Source: WHATWG HTML, section 9.2 (read 2026-11-30).
"""

import re
from typing import Literal

import msgspec
from msgspec import Struct

from agents.events import escape_line_ends
from agents.log import LoggedEvent
from agents.types import DeltaKind

HEARTBEAT = b": hb\n"
RETRY_MS = 1000
RETRY_LINE = b"retry: %d\n" % RETRY_MS

GapReason = Literal["unreadable", "beyond_end", "expired"]
"""unreadable: not a cursor; beyond_end: no such event yet, so of another log; expired: no longer kept."""

# 19 digits can pass what a bigint holds; 18 cannot.
_CURSOR = re.compile(r"(0|[1-9][0-9]{0,17})(?:-([0-9]{1,18}))?", re.ASCII)


class Cursor(Struct, frozen=True, kw_only=True):
    """The last thing that a reader has: the durable event `seq`, and preview `n` after it (None: none)."""

    seq: int
    n: int | None = None


def parse_cursor(text: str) -> Cursor | None:
    """None when the text is not an id of ours."""
    match = _CURSOR.fullmatch(text.strip())
    if match is None:
        return None
    return Cursor(seq=int(match[1]), n=None if match[2] is None else int(match[2]))


class _StartedEvent(Struct, frozen=True):
    id: str
    type: str


class _EventStart(Struct, frozen=True, tag_field="type", tag="event_start"):
    event: _StartedEvent


class _EventDelta(Struct, frozen=True, tag_field="type", tag="event_delta"):
    event_id: str
    delta: msgspec.Raw


class _Gap(Struct, frozen=True, tag_field="type", tag="session.gap"):
    session_id: str
    reason: GapReason
    first_seq: int


_encoder = msgspec.json.Encoder()


def durable_frame(event: LoggedEvent) -> bytes:
    return b"event: %b\ndata: %b\nid: %d\n\n" % (event.type.encode(), event.json, event.seq)


def start_frame(*, event_id: str, kind: DeltaKind, seq: int, n: int | None) -> bytes:
    """Says that `event_id` has begun. Without `n` the frame leaves the reader's cursor as it is."""
    body = _encoder.encode(_EventStart(_StartedEvent(event_id, kind)))
    return b"event: event_start\ndata: %b\n%b\n" % (body, _preview_id(seq, n))


def delta_frame(*, event_id: str, delta: bytes, seq: int, n: int | None) -> bytes:
    """More of `event_id`. `delta` is JSON of one line, as `encode_delta` makes it."""
    body = _encoder.encode(_EventDelta(event_id, msgspec.Raw(delta)))
    return b"event: event_delta\ndata: %b\n%b\n" % (body, _preview_id(seq, n))


def encode_delta(delta: object) -> bytes:
    """Compact JSON of one line, whatever a reader takes for a line end."""
    return escape_line_ends(_encoder.encode(delta))


def gap_frame(*, session_id: str, reason: GapReason, first_seq: int) -> bytes:
    """Says that a cursor cannot be read and the log follows from `first_seq`. It moves no cursor."""
    body = _encoder.encode(_Gap(session_id, reason, first_seq))
    return b"event: session.gap\ndata: %b\n\n" % body


def position_frame(seq: int) -> bytes:
    """Sets the reader's cursor and shows it nothing."""
    return b"id: %d\n\n" % seq


def with_retry(frame: bytes) -> bytes:
    """The frame as the first of a connection, with how long to wait before coming back."""
    return RETRY_LINE + frame


def _preview_id(seq: int, n: int | None) -> bytes:
    return b"" if n is None else b"id: %d-%d\n" % (seq, n)
