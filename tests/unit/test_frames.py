import json
from datetime import UTC, datetime
from typing import Any

import pytest

from agents.events import AgentMessage, decode_event
from agents.log import number
from app.streaming.frames import (
    HEARTBEAT,
    Cursor,
    delta_frame,
    durable_frame,
    encode_delta,
    gap_frame,
    parse_cursor,
    position_frame,
    start_frame,
    with_retry,
)
from providers.types import TextBlock
from tests.support.sse_client import SseEvent, SseParser, parse

NASTY_TEXTS = [
    "a\u2028b\u2029c\x85d\x0be\x0cf\x1cg\x7fh",
    "a\rb",
    "a\r\nb",
    "a\nb",
    'ok\revent: done\rdata: {"fake":1}\r\r',
    "\r\r",
    "\n\nevent: run.completed\ndata: {}\n\n",
    "ends with cr\r",
    "\ufeffbom first, then 修复 🙂 é",
    "".join(map(chr, range(32))),
]


def _delta(text: str) -> dict[str, Any]:
    return {"type": "content_delta", "index": 0, "content": {"type": "text", "text": text}}


def _message_frame(text: str, seq: int = 7) -> bytes:
    event = AgentMessage(
        id="evt_1",
        session_id="sess_1",
        created_at=datetime(2026, 1, 1, tzinfo=UTC),
        content=(TextBlock(text=text),),
    )
    return durable_frame(number((event,), after_seq=seq - 1)[0])


def _text_of(event: SseEvent) -> str:
    text: str = event.json["content"][0]["text"]
    return text


@pytest.mark.parametrize("text", NASTY_TEXTS)
def test_a_durable_frame_gives_a_spec_reader_one_event_with_the_text_unchanged(text: str) -> None:
    """SSE-01, SSE-02."""
    (event,) = parse(_message_frame(text))
    assert (event.type, event.id, _text_of(event)) == ("agent.message", "7", text)


@pytest.mark.parametrize("text", NASTY_TEXTS)
def test_a_delta_frame_gives_a_spec_reader_one_event_with_the_text_unchanged(text: str) -> None:
    """SSE-01, SSE-02: text cannot become a field of the stream."""
    frame = delta_frame(event_id="evt_1", delta=encode_delta(_delta(text)), seq=7, n=3)
    (event,) = parse(frame)
    assert (event.type, event.id) == ("event_delta", "7-3")
    assert event.json == {"type": "event_delta", "event_id": "evt_1", "delta": _delta(text)}


@pytest.mark.parametrize("text", NASTY_TEXTS)
def test_no_frame_holds_a_character_that_a_naive_reader_splits_lines_at(text: str) -> None:
    """SSE-01."""
    delta = delta_frame(event_id="evt_1", delta=encode_delta(_delta(text)), seq=7, n=3)
    for frame in (_message_frame(text), delta):
        lines = frame.decode().splitlines()
        assert [line.split(":")[0] for line in lines] == ["event", "data", "id", ""]
        assert json.loads(lines[1].removeprefix("data: "))


@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_text_survives_every_way_of_cutting_the_bytes(size: int) -> None:
    """SSE-16, for our own frames."""
    frame = _message_frame("修复 🙂 é")
    parser = SseParser()
    events = [event for at in range(0, len(frame), size) for event in parser.feed(frame[at : at + size])]
    assert [_text_of(event) for event in events] == ["修复 🙂 é"]


def test_seq_is_the_first_field_and_the_rest_is_what_was_stored() -> None:
    (event,) = parse(_message_frame("hello", seq=41))
    assert event.data.startswith('{"seq":41,')
    decoded = decode_event(event.data.encode())
    assert (decoded.seq, decoded.id) == (41, "evt_1")


def test_the_frames_of_a_preview_are_what_accumulators_of_hosted_agent_apis_read() -> None:
    start = start_frame(event_id="evt_1", kind="agent.message", seq=7, n=1)
    assert start == (
        b"event: event_start\n"
        b'data: {"type":"event_start","event":{"id":"evt_1","type":"agent.message"}}\n'
        b"id: 7-1\n\n"
    )


def test_the_first_frame_of_a_reader_without_cursor_sets_its_position_and_shows_nothing() -> None:
    parser = SseParser()
    assert parser.feed(with_retry(position_frame(12))) == []
    assert (parser.last_event_id, parser.retry_ms) == ("12", 1000)


def test_a_gap_frame_moves_no_cursor_and_has_no_seq() -> None:
    parser = SseParser()
    parser.feed(position_frame(12))
    (event,) = parser.feed(gap_frame(session_id="sess_1", reason="beyond_end", first_seq=1))
    assert event.id == "12"
    assert event.json == {
        "type": "session.gap",
        "session_id": "sess_1",
        "reason": "beyond_end",
        "first_seq": 1,
    }


def test_a_heartbeat_dispatches_nothing_and_moves_no_cursor() -> None:
    """SSE-04."""
    parser = SseParser()
    frames = position_frame(3) + HEARTBEAT + _message_frame("after it", seq=4)
    (event,) = parser.feed(frames)
    assert (event.id, parser.comments) == ("4", ["hb"])


@pytest.mark.parametrize(
    ("text", "cursor"),
    [
        ("0", Cursor(seq=0)),
        ("57", Cursor(seq=57)),
        (" 57 ", Cursor(seq=57)),
        ("57-12", Cursor(seq=57, n=12)),
        ("999999999999999999", Cursor(seq=10**18 - 1)),
    ],
)
def test_an_id_of_ours_is_read_as_a_cursor(text: str, cursor: Cursor) -> None:
    assert parse_cursor(text) == cursor


@pytest.mark.parametrize(
    "text",
    ["", "-1", "057", "1.5", "1e3", "57-", "-3", "57-1-2", "evt_1", "٣", "1" * 19, "1 2", "null", "57\x00"],
)
def test_anything_else_is_not_a_cursor(text: str) -> None:
    assert parse_cursor(text) is None
