"""A reader of a session that comes back whenever it is cut, and what it must have been shown."""

import asyncio
from collections.abc import Callable
from typing import Any

from tests.support.fleet import PATIENCE_S, Member
from tests.support.sse_client import SseEvent, SseStream, connect_sse
from tests.support.transcript_rules import DELTAS, stream_problems

CLOSE_S = 60.0
RECONNECT_S = 0.05
ALL_KINDS = ("agent.message", "agent.thinking", "agent.tool_use", "tool.progress", "model.status")


def closes(event: SseEvent) -> bool:
    """True for the event that closes a run."""
    return event.type == "session.status_idle" and event.json["stop_reason"]["type"] != "requires_action"


class Follower:
    """Reads a session from its beginning until `runs` runs have closed, coming back whenever it is cut.

    `ways` are taken in turn, one per connection. `cut_after`: cuts its own connection after so many events.
    `runs` None: until it has read as far as `stop_at` says.
    """

    def __init__(
        self,
        session_id: str,
        key: str,
        ways: list[Member],
        *,
        runs: int | None = 1,
        cut_after: int | None = None,
        kinds: tuple[str, ...] = ALL_KINDS,
    ) -> None:
        self.events: list[SseEvent] = []
        self.connections = 0
        self.ends: list[str] = []  # how each connection ended
        self.cursor: str | None = None
        self.session_id = session_id
        self._key = key
        self._ways = ways
        self._runs = runs
        self._closed = 0
        self._cut_after = cut_after
        self._kinds = kinds
        self._last_seq: int | None = None
        self._stream: SseStream | None = None
        self._changed = asyncio.Event()
        self._reads = asyncio.Event()
        self._reads.set()
        self.task = asyncio.create_task(self._follow())

    @property
    def durable(self) -> list[tuple[str, str]]:
        """Id and data of each durable event, as they came."""
        return [(event.id, event.data) for event in self.events if event.type not in DELTAS]

    def check(self, log: list[tuple[str, str]]) -> None:
        """Fails unless it was shown this log, once and in order, and previews of nothing else."""
        assert self.task.done()
        assert self.durable == log
        assert "clean" not in self.ends  # it would look like the end of the stream
        if self.connections == 1:
            problems = stream_problems([event.json for event in self.events], may_rejoin=True)
            assert not problems, problems
        _compare_previews(self.events)

    def of_type(self, kind: str) -> list[Any]:
        return [event.json for event in self.events if event.type == kind]

    def text(self) -> str:
        """All text that was previewed."""
        deltas = [event.json["delta"] for event in self.events if event.type == "event_delta"]
        return "".join(delta["content"]["text"] for delta in deltas if delta["type"] == "content_delta")

    async def saw(self, is_wanted: Callable[[SseEvent], bool] | str, count: int = 1) -> SseEvent:
        """The event that is wanted, by a predicate or its type; the `count`th of them."""

        def matches(event: SseEvent) -> bool:
            return event.type == is_wanted if isinstance(is_wanted, str) else is_wanted(event)

        async with asyncio.timeout(PATIENCE_S):
            while True:
                self._changed.clear()
                found = [event for event in self.events if matches(event)]
                if len(found) >= count:
                    return found[count - 1]
                if self.task.done():
                    await self.task
                    raise AssertionError(f"all has been read without {is_wanted}")
                await self._changed.wait()

    def stop_at(self, seq: int) -> None:
        """All has been read when this event has."""
        self._last_seq = seq
        if self._has_all():
            self.cut()

    def cut(self) -> None:
        """Breaks the connection, if there is one."""
        if self._stream is not None:
            self._stream.cut()

    async def stall(self, for_s: float) -> None:
        """Reads nothing for so long."""
        self._reads.clear()
        await asyncio.sleep(for_s)
        self._reads.set()

    async def more(self, count: int) -> None:
        """Returns when it has read more than so many events, or all."""
        while len(self.events) <= count and not self.task.done():
            self._changed.clear()
            await self._changed.wait()

    async def closed(self) -> None:
        """Returns when all has been read."""
        async with asyncio.timeout(CLOSE_S):
            await self.task

    async def _follow(self) -> None:
        try:
            while not self._has_all():
                way = self._ways[self.connections % len(self._ways)]
                self.connections += 1
                try:
                    stream = await self._connect(way)
                except (OSError, EOFError, TimeoutError):
                    await asyncio.sleep(RECONNECT_S)
                    continue
                await self._read(stream)
        finally:
            self._changed.set()

    async def _connect(self, way: Member) -> SseStream:
        query = "&".join(f"event_deltas={kind}" for kind in self._kinds)
        headers = {"authorization": f"Bearer {self._key}"}
        if self.cursor is None:
            query += "&after=0"
        else:
            headers["last-event-id"] = self.cursor
        stream = await connect_sse(
            way.port, f"/v1/sessions/{self.session_id}/events/stream?{query}", headers=headers
        )
        if stream.status == 200:
            return stream
        stream.cut()
        assert stream.status == 503, f"{way.name}: {stream.status}"
        raise ConnectionError(f"{way.name} has no database")

    async def _read(self, stream: SseStream) -> None:
        seen = 0
        self._stream = stream
        try:
            while seen != self._cut_after and not self._has_all():
                await self._reads.wait()
                event = await stream.next(patience_s=PATIENCE_S)
                seen += 1
                self.cursor = event.id or self.cursor
                self.events.append(event)
                self._closed += closes(event)
                self._changed.set()
        except EOFError:
            self.ends.append(str(stream.ended))
        finally:
            stream.cut()

    def _has_all(self) -> bool:
        if self._last_seq is not None:
            return self._seq() >= self._last_seq
        return self._runs is not None and self._closed >= self._runs

    def _seq(self) -> int:
        """The last durable event that was read."""
        return int((self.cursor or "0").partition("-")[0])


def _compare_previews(events: list[SseEvent]) -> None:
    """What was previewed of a message is how it begins, however often the reader was cut."""
    shown: dict[str, str] = {}
    for event in events:
        body = event.json
        if event.type == "event_start":
            shown[body["event"]["id"]] = ""
        elif event.type == "event_delta" and body["delta"]["type"] == "content_delta":
            shown[body["event_id"]] += body["delta"]["content"]["text"]
        elif event.type == "agent.message":
            assert body["content"][0]["text"].startswith(shown.pop(body["id"], ""))
