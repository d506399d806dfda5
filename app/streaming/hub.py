"""All readers of one process: one connection to Redis, a feed per watched session, few reads of Postgres."""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from uuid import UUID

from redis.exceptions import RedisError

from agents.log import LoggedEvent
from agents.types import DeltaKind
from app.ending import end
from app.streaming import keys
from app.streaming.feed import SLICE, Counters, Feed, Idle
from app.streaming.frames import (
    HEARTBEAT,
    Cursor,
    GapReason,
    gap_frame,
    parse_cursor,
    position_frame,
    with_retry,
)
from app.streaming.limits import StreamLimits
from app.streaming.publisher import connect
from app.streaming.reader import Opening
from app.streaming.response import EventStream
from app.streaming.ring import Ring
from app.streaming.subscriptions import Subscriptions
from db.engine import Database, Transaction
from db.errors import DatabaseAway, DatabaseError
from db.log import Head, LogExtent, events_after, get_extent, heads

log = logging.getLogger("armillary.streaming")

TICK_S = 1.0


class Hub:
    """Opens streams and keeps them fed. It holds no database connection while nothing is read.

    `counters` is what happened; `open_streams`, `watched_sessions` and `is_redis_well` are how things stand.
    """

    def __init__(self, database: Database, redis_url: str, limits: StreamLimits | None = None) -> None:
        self.limits = limits or StreamLimits()
        self.counters = Counters()
        self._closing = asyncio.Event()
        self._database = database
        self._redis: Any = connect(redis_url)  # its commands have no types
        self._subscriptions = Subscriptions(
            redis_url, on_message=self._receive, on_subscribed=self._on_subscribed
        )
        self._reads = asyncio.Semaphore(self.limits.database_reads)
        self._feeds: dict[str, Feed] = {}
        self._sessions: dict[str, str] = {}  # by channel
        self._unsubscribed: dict[str, asyncio.Event] = {}  # by session, until Redis has acknowledged
        self._streams: set[EventStream] = set()
        self._has_left = asyncio.Event()
        self._ring_bytes = 0
        self._poll = 0
        self._to_settle: set[str] = set()
        self._poll_soon = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._ending: set[asyncio.Task[Any]] = set()
        self._pages: dict[tuple[str, int], asyncio.Task[list[LoggedEvent]]] = {}  # that have not begun

    async def start(self) -> None:
        """Returns at once; Redis may be away."""
        self._subscriptions.start()
        self._tasks = [
            asyncio.create_task(self._poll_for_ever()),
            asyncio.create_task(self._tick_for_ever()),
        ]

    def begin_closing(self) -> None:
        """Has all streams flushed and broken off, those too that begin later. Safe to call twice."""
        self._closing.set()
        for stream in self._streams:
            stream.wake()

    async def close(self) -> None:
        """Returns when no stream is left; readers come back elsewhere. Safe to call twice."""
        self.begin_closing()
        try:
            async with asyncio.timeout(self.limits.flush_s):
                await self._until_all_left()
        except TimeoutError:
            for stream in list(self._streams):
                stream.abort()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(1.0):
                    await self._until_all_left()
        self._poll_soon.set()
        tasks, self._tasks = {*self._tasks, *self._ending}, []
        if tasks:  # reads that are going on are let end, so that their connections stay good
            _, late = await asyncio.wait(tasks, timeout=self.limits.end_s)
            await end(*late)
            await asyncio.gather(*tasks, return_exceptions=True)
        await self._subscriptions.aclose()
        await self._redis.aclose()

    async def _until_all_left(self) -> None:
        while self._streams:
            self._has_left.clear()
            await self._has_left.wait()

    @property
    def is_closing(self) -> bool:
        return self._closing.is_set()

    @property
    def open_streams(self) -> int:
        return len(self._streams)

    @property
    def watched_sessions(self) -> int:
        return len(self._feeds)

    def delivered_seq(self, session_id: str) -> int | None:
        """The last event that readers of this session were given; None when nobody watches it."""
        feed = self._feeds.get(session_id)
        return None if feed is None else feed.seq

    @property
    def subscribed_channels(self) -> int:
        return self._subscriptions.count

    @property
    def ring_bytes(self) -> int:
        """Held by all rings together."""
        return self._ring_bytes

    @property
    def is_redis_well(self) -> bool:
        return self._subscriptions.is_connected

    @property
    def redis_reconnects(self) -> int:
        return self._subscriptions.reconnects

    # -- opening ----------------------------------------------------------------------------------------

    async def open(
        self,
        *,
        session_id: str,
        tenant_id: UUID | None = None,
        after: Cursor | str | None = None,
        last_event_id: str | None = None,
        until_idle: bool = False,
        deltas: frozenset[DeltaKind] = frozenset(),
        types: frozenset[str] | None = None,
    ) -> EventStream | None:
        """A stream to be returned by a handler; None: nothing will come, answer 204.

        `last_event_id` is the header and wins over `after`; either may be any text. Neither: from this moment
        on, or with `until_idle` from the newest run's first event. `types`: the only durable events to show.
        Nothing is held until the answer begins.
        Raises: NotFound (with `tenant_id` also for another tenant's session), DatabaseBusy, DatabaseAway.
        """
        poll = self._poll
        async with self._read(tenant_id) as tx:
            extent = await get_extent(tx, session_id)
        given = last_event_id or after
        if given is None or given == "":
            start = _start_without_cursor(extent, until_idle=until_idle)
            cursor, first = Cursor(seq=start), with_retry(position_frame(start))
        else:
            judged = _judge(given, extent)
            if isinstance(judged, Cursor):
                if until_idle and not extent.is_busy and judged.seq == extent.last_seq:
                    return None
                cursor, first = judged, HEARTBEAT
            else:
                cursor = Cursor(seq=extent.first_seq - 1)
                gap = gap_frame(session_id=session_id, reason=judged, first_seq=extent.first_seq)
                first = with_retry(gap)
        opening = Opening(
            session_id=session_id,
            cursor=cursor,
            first=first,
            needs_retry=first is HEARTBEAT,
            last_seq=extent.last_seq,
            poll=poll,
            idle=None if extent.is_busy else Idle(seq=extent.last_seq, poll=poll),
            until_idle=until_idle,
            kinds=deltas,
            types=types,
        )
        return EventStream(self, opening)

    def enter(self, stream: EventStream, session_id: str) -> Feed:
        """A stream begins. It must `leave`."""
        self.counters.streams_opened += 1
        self._streams.add(stream)
        feed = self._feeds.get(session_id)
        if feed is None:
            feed = self._watch(session_id)
        feed.readers[stream] = stream.wake
        return feed

    def leave(self, stream: EventStream, feed: Feed) -> None:
        self._streams.discard(stream)
        self._has_left.set()
        del feed.readers[stream]
        if not feed.readers:
            self._unwatch(feed)

    def _watch(self, session_id: str) -> Feed:
        feed = Feed(
            session_id,
            source=self,
            limits=self.limits,
            counters=self.counters,
            on_append=self._hold_ring_bounds,
        )
        channel = keys.events_channel(session_id)
        self._feeds[session_id] = feed
        self._sessions[channel] = session_id
        self._unsubscribed[session_id] = asyncio.Event()
        self._subscriptions.add(channel)
        feed.synchronize(with_previews=True)
        return feed

    def _unwatch(self, feed: Feed) -> None:
        channel = keys.events_channel(feed.session_id)
        self._subscriptions.remove(channel)
        del self._feeds[feed.session_id], self._sessions[channel]
        self._unsubscribed.pop(feed.session_id, None)
        if feed.ring is not None:
            self._ring_bytes -= feed.ring.bytes
        task = feed.close()
        if task is not None:
            self._ending.add(task)
            task.add_done_callback(self._ending.discard)

    def _hold_ring_bounds(self, ring: Ring, appended_bytes: int) -> None:
        self._ring_bytes += appended_bytes
        is_full = self._ring_bytes > self.limits.rings_bytes
        self._ring_bytes -= ring.evict(self.limits.ring_least_bytes if is_full else self.limits.ring_bytes)

    # -- Redis ------------------------------------------------------------------------------------------

    def _receive(self, channel: str, payload: bytes) -> None:
        session_id = self._sessions.get(channel)
        if session_id is not None:
            self._feeds[session_id].receive(payload)

    def _on_subscribed(self, channel: str) -> None:
        session_id = self._sessions.get(channel)
        if session_id is not None:
            if (waiting := self._unsubscribed.pop(session_id, None)) is not None:
                waiting.set()
            self._feeds[session_id].synchronize(with_previews=True)

    # -- what feeds and readers read (feed.Source) ------------------------------------------------------

    async def head(self, session_id: str) -> Head | None:
        async with self._read() as tx:
            return (await heads(tx, [session_id])).get(session_id)

    async def page(self, session_id: str, after_seq: int) -> list[LoggedEvent]:
        """Those that wait for the same page share it; a read that has begun is too old to be shared."""
        place = (session_id, after_seq)
        page = self._pages.get(place)
        if page is None:
            page = self._pages[place] = asyncio.create_task(self._read_page(place))
            self._ending.add(page)
            page.add_done_callback(self._ending.discard)
        return await asyncio.shield(page)

    async def _read_page(self, place: tuple[str, int]) -> list[LoggedEvent]:
        try:
            async with self._read() as tx:
                del self._pages[place]
                self.counters.pages_read += 1
                return await events_after(tx, *place)
        finally:
            if self._pages.get(place) is asyncio.current_task():
                del self._pages[place]

    async def kept_previews(self, session_id: str) -> list[bytes]:
        try:
            entries: list[bytes] = await self._redis.lrange(keys.previews_key(session_id), 0, -1)
        except (RedisError, OSError, TimeoutError):
            return []
        return entries

    async def acknowledged(self, session_id: str) -> None:
        waiting = self._unsubscribed.get(session_id)
        if waiting is None or not self._subscriptions.is_connected:
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.limits.acknowledge_s):
                await waiting.wait()

    def settle_soon(self, session_id: str) -> None:
        self._to_settle.add(session_id)
        self._poll_soon.set()

    @asynccontextmanager
    async def _read(self, tenant_id: UUID | None = None) -> AsyncIterator[Transaction]:
        """Raises: DatabaseBusy, DatabaseAway, the latter also when it takes too long."""
        try:
            async with (
                self._reads,
                asyncio.timeout(self.limits.database_read_s),
                self._database.transaction(tenant_id) as tx,
            ):
                yield tx
        except TimeoutError as error:
            raise DatabaseAway("The database did not answer in time.") from error

    # -- time -------------------------------------------------------------------------------------------

    async def _poll_for_ever(self) -> None:
        """Compares all watched sessions at each interval, and those that may be idle at once."""
        polled_at = time.monotonic()
        while not self.is_closing:
            limits = self.limits
            interval_s = limits.poll_s if self._subscriptions.is_connected else limits.unwell_poll_s
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(interval_s, limits.unwell_poll_s)):
                    await self._poll_soon.wait()
            self._poll_soon.clear()
            asked, self._to_settle = self._to_settle & self._feeds.keys(), set()
            if time.monotonic() - polled_at >= interval_s:
                polled_at = time.monotonic()
                asked = set(self._feeds)
            if asked:
                await self._compare(asked)

    async def _compare(self, session_ids: set[str]) -> None:
        self._poll += 1
        poll = self._poll
        try:
            async with self._read() as tx:
                found = await heads(tx, sorted(session_ids))
        except DatabaseError as error:
            log.warning("watched sessions could not be compared: %s", error)
            return
        for session_id in session_ids:
            feed = self._feeds.get(session_id)
            if feed is not None:
                feed.observe(found.get(session_id), poll=poll)

    async def _tick_for_ever(self) -> None:
        """Heartbeats for those that are silent, the end for those that are stuck."""
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(TICK_S):
                    await self._closing.wait()
                    return
            now = time.monotonic()
            for number, stream in enumerate(list(self._streams), start=1):
                if stream.is_stuck(now):
                    self.counters.slow_readers_dropped += 1
                    stream.abort()
                elif now - stream.written_at >= self.limits.heartbeat_s:
                    stream.beat()
                if number % SLICE == 0:
                    await asyncio.sleep(0)


def _start_without_cursor(extent: LogExtent, *, until_idle: bool) -> int:
    if until_idle and extent.run_after_seq is not None:
        return max(extent.run_after_seq, extent.first_seq - 1)
    return extent.last_seq


def _judge(given: Cursor | str, extent: LogExtent) -> Cursor | GapReason:
    cursor = parse_cursor(given) if isinstance(given, str) else given
    if cursor is None:
        return "unreadable"
    if cursor.seq > extent.last_seq:
        return "beyond_end"
    if cursor.seq < extent.first_seq - 1:
        return "expired"
    return cursor
