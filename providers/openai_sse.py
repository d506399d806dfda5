"""Server-Sent Events as the OpenAI-shaped APIs send them: from bytes to frames of JSON.

Read here and not by the SDK, whose iterator dies of an empty `data:`, hides `[DONE]`, answers an HTML page
with silence, and builds an object graph for each token.
"""

import json
from typing import Any, NamedTuple

import msgspec

from providers.errors import BadPayload

MAX_HELD_BYTES = 64 * 1024 * 1024  # an unfinished line or a whole JSON answer; images come inline
DONE = b"[DONE]"
_BOM = b"\xef\xbb\xbf"


class Frame(NamedTuple):
    """One event: its `event:` name (empty if it has none) and its `data:` lines joined by a line feed."""

    event: str
    data: bytes

    @property
    def is_done(self) -> bool:
        return self.data.startswith(DONE)


class SseReader:
    """Takes bytes at any boundaries and gives complete frames. Bytes are never decoded here.

    Comments and frames without data are skipped. Lines that are no SSE field are kept in `stray`: they are
    what there is when a server answers with a page or a document in place of a stream.
    """

    def __init__(self) -> None:
        self.stray = bytearray()
        self.has_frames = False
        self._held = bytearray()
        self._is_first_line = True
        self._event = ""
        self._data: list[bytes] = []

    def feed(self, chunk: bytes) -> list[Frame]:
        """The frames that `chunk` completes.

        Raises: BadPayload, when a line or the stray text has no end.
        """
        self._held += chunk
        if len(self._held) + len(self.stray) > MAX_HELD_BYTES:
            raise BadPayload(f"the answer has a line of more than {MAX_HELD_BYTES} bytes")
        if b"\n" not in chunk and b"\r" not in chunk:
            return []
        lines = bytes(self._held).splitlines(keepends=True)
        self._held.clear()
        if not lines[-1].endswith(b"\n"):  # a carriage return may be half of a line end
            self._held += lines.pop()
        return [frame for line in lines if (frame := self._read_line(line.rstrip(b"\r\n"))) is not None]

    def finish(self) -> list[Frame]:
        """What the end of the stream completes: a last frame without its blank line, if its JSON is whole."""
        frames = []
        if self._held:
            line, self._held = bytes(self._held), bytearray()
            if (frame := self._read_line(line.rstrip(b"\r\n"))) is not None:
                frames.append(frame)
        if (frame := self._dispatch()) is not None and (frame.is_done or is_json(frame.data)):
            frames.append(frame)
        return frames

    def _read_line(self, line: bytes) -> Frame | None:
        if self._is_first_line:
            line = line.removeprefix(_BOM)
            self._is_first_line = False
        if not line:
            return self._dispatch()
        name, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if name == b"data":
            self._data.append(value)
        elif name == b"event":
            self._event = value.decode("utf-8", "replace")
        elif name not in (b"", b"id", b"retry"):
            self.stray += line + b"\n"
        return None

    def _dispatch(self) -> Frame | None:
        event, self._event = self._event, ""
        data, self._data = b"\n".join(self._data), []
        if not data.strip():  # a keep-alive with a name or an id
            return None
        self.has_frames = True
        return Frame(event, data)


def decode_json(data: bytes) -> Any:
    """The value in `data`. Lone halves of surrogate pairs come through as they are escaped.

    Raises: BadPayload.
    """
    try:
        return msgspec.json.decode(data)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        pass
    try:
        return json.loads(data)  # slower; accepts the lone surrogates that models emit piece by piece
    except (ValueError, RecursionError) as error:
        raise BadPayload(f"the answer holds text that is not JSON: {quote(data)}") from error


def is_json(data: bytes) -> bool:
    """Whether `data` is one whole JSON value."""
    try:
        decode_json(data)
    except BadPayload:
        return False
    return True


def quote(data: bytes) -> str:
    """The beginning of `data`, for an error message."""
    text = data[:200].decode("utf-8", "replace").strip()
    return repr(text + ("…" if len(data) > 200 else ""))


def text_or_none(value: Any) -> str | None:
    """`value` if it is text that says something: servers send ids and names that are empty or null."""
    return value if isinstance(value, str) and value else None
