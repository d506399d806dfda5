"""Readers that are slow, leave, or outlive their server, and what they may cost others."""

import asyncio
import logging
from functools import partial

import httpx
import pytest

from app.streaming.hub import TICK_S
from app.streaming.limits import StreamLimits
from providers.ids import new_id
from tests.support.held_sessions import eventually as until
from tests.support.held_sessions import fetch
from tests.support.sse_client import SseEvent, SseStream, open_sse
from tests.support.streaming import (
    Log,
    Replica,
    eventually,
    more,
    new_log,
    open_database,
    replica,
    started,
)


def seqs(events: list[SseEvent]) -> list[int]:
    return [event.json["seq"] for event in events]


async def watched(api: Replica, log: Log, *streams: SseStream) -> None:
    await api.publisher.announce(log.session_id, await log.say("ready"))
    for stream in streams:
        await stream.until(lambda event: "ready" in event.data)


async def nothing_is_left(api: Replica) -> None:
    """Streams, feeds, channels, rings and database connections are all given back."""
    await eventually(
        lambda: (
            (
                api.hub.open_streams,
                api.hub.watched_sessions,
                api.hub.subscribed_channels,
                api.hub.ring_bytes,
            )
            == (0, 0, 0, 0)
        )
    )


async def test_a_reader_that_never_reads_is_dropped_at_a_bound_and_costs_others_nothing(
    database_url: str, redis_url: str
) -> None:
    """L-01."""
    limits = StreamLimits(stall_bytes=2 * 1024 * 1024, stall_s=3600.0)
    async with open_database(database_url) as database, replica(database, redis_url, limits) as api:
        log = await new_log(database)
        path = api.path(log, query="after=0&event_deltas=agent.message")
        event_id = new_id("evt")
        async with open_sse(api.port, path) as fast:
            slow = [await api.connect(path, receive_buffer_bytes=4096) for _ in range(5)]
            await watched(api, log, fast)
            voice = api.publisher.hold(session_id=log.session_id, epoch=0, base_seq=1)
            voice.preview(started(event_id))
            await fast.until("event_start")
            sent = 0
            while api.hub.counters.slow_readers_dropped < len(slow):
                voice.preview(more(event_id, "x" * 50_000))
                await fast.until("event_delta")
                sent += 50_000
                assert sent < 100 * 1024 * 1024, "the slow readers were not dropped"
            await eventually(lambda: api.hub.open_streams == 1)
            assert api.hub.ring_bytes <= limits.ring_bytes
            text = "".join(
                event.json["delta"]["content"]["text"] for event in fast.events if event.type == "event_delta"
            )
            assert len(text) == sent
            (final,) = await log.commit(log.message("final", event_id=event_id))
            voice.event(final)
            await fast.until("agent.message")
            await voice.aclose()
            headers = {"last-event-id": "0"}
            async with open_sse(api.port, api.path(log), headers=headers) as back:
                assert seqs(await back.take(2)) == [1, 2]
            for stream in slow:
                stream.cut()
        await nothing_is_left(api)


async def test_a_reader_that_falls_off_the_ring_reads_on_from_postgres_without_a_gap(
    database_url: str, redis_url: str
) -> None:
    """L-01, for a reader that begins to read in the end."""
    limits = StreamLimits(ring_bytes=20_000, stall_s=3600.0)
    async with open_database(database_url) as database, replica(database, redis_url, limits) as api:
        log = await new_log(database)
        async with (
            open_sse(api.port, api.path(log, query="after=0"), receive_buffer_bytes=4096) as slow,
            open_sse(api.port, api.path(log, query="after=0")) as fast,
        ):
            await watched(api, log, fast)
            for _ in range(300):
                await api.publisher.announce(log.session_id, await log.say("x" * 10_000))
            assert seqs(await fast.take(300)) == list(range(2, 302))
            pages = api.hub.counters.pages_read
            assert seqs(await slow.take(301)) == list(range(1, 302))
            assert api.hub.counters.pages_read > pages
            assert api.hub.counters.slow_readers_dropped == 0


async def test_a_stopped_reader_is_dropped_when_a_write_is_stuck_for_too_long(
    database_url: str, redis_url: str
) -> None:
    """SSE-12, for a reader that stops and stays connected."""
    limits = StreamLimits(stall_s=0.5)
    async with open_database(database_url) as database, replica(database, redis_url, limits) as api:
        log = await new_log(database)
        await log.say(*("x" * 100_000 for _ in range(60)))
        stopped = await api.connect(api.path(log, query="after=0"), receive_buffer_bytes=4096)
        await eventually(lambda: api.hub.counters.slow_readers_dropped == 1)
        await nothing_is_left(api)
        stopped.cut()


async def test_quick_disconnects_leave_nothing_behind(database_url: str, redis_url: str) -> None:
    """SSE-11."""
    async with open_database(database_url) as database, replica(database, redis_url) as api:
        log = await new_log(database)
        for number in range(100):
            reader, writer = await asyncio.open_connection("127.0.0.1", api.port)
            writer.write(f"GET {api.path(log)} HTTP/1.1\r\nhost: x\r\n\r\n".encode())
            await writer.drain()
            if number % 2:
                await reader.readline()
            writer.transport.abort()
        async with open_sse(api.port, api.path(log, query="after=0")) as stream:  # taken up after all of them
            await watched(api, log, stream)
        await nothing_is_left(api)
        await eventually(lambda: database.checked_out == 0)  # a read that has begun is let end


async def test_a_stream_that_is_opened_and_never_answered_holds_nothing(
    database_url: str, redis_url: str
) -> None:
    """SSE-11."""
    async with open_database(database_url) as database, replica(database, redis_url) as api:
        log = await new_log(database)
        for _ in range(20):
            assert await api.hub.open(session_id=log.session_id) is not None
        await nothing_is_left(api)


@pytest.mark.parametrize("how", ["fin", "rst"])
async def test_a_disconnect_is_noticed_on_a_silent_stream_and_cancels_no_run(
    database_url: str, redis_url: str, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    """SSE-12: it is no error either."""
    async with open_database(database_url) as database, replica(database, redis_url) as api:
        log = await new_log(database)
        await log.open_run()
        stream = await api.connect(api.path(log))
        await eventually(lambda: api.hub.open_streams == 1)
        if how == "fin":
            await stream.close()
        else:
            stream.cut()
        await nothing_is_left(api)
        async with database.transaction() as tx:
            run = await tx.fetchrow("SELECT state, cancel_requested_at FROM runs")
        assert run is not None
        assert (run["state"], run["cancel_requested_at"]) == ("running", None)
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == []


async def test_silent_streams_get_heartbeats_that_dispatch_nothing(database_url: str, redis_url: str) -> None:
    """SSE-04: from a timer of the hub, so nothing that produces events can hold them up."""
    limits = StreamLimits(heartbeat_s=0.0)
    async with open_database(database_url) as database, replica(database, redis_url, limits) as api:
        log = await new_log(database)
        async with open_sse(api.port, api.path(log)) as stream:
            await stream.until_bytes(b": hb\n: hb\n")
            assert (stream.events, stream.last_event_id) == ([], "0")
    assert StreamLimits().heartbeat_s + TICK_S < 15  # what proxies are told to wait for


async def test_open_streams_hold_no_database_connection(database_url: str, redis_url: str) -> None:
    """SSE-15."""
    async with open_database(database_url, pool_size=2) as database, replica(database, redis_url) as api:
        logs = [await new_log(database) for _ in range(25)]
        streams = [await api.connect(api.path(log, query="after=0")) for log in logs]
        for log, stream in zip(logs, streams, strict=True):
            await watched(api, log, stream)
        await eventually(lambda: database.checked_out == 0)

        async def nobody_is_in_a_transaction() -> bool:
            others = await fetch(
                database,
                "SELECT FROM pg_stat_activity WHERE datname = current_database()"
                " AND state LIKE 'idle in transaction%' AND pid <> pg_backend_pid()",
            )
            return not others

        await until(nobody_is_in_a_transaction)  # a poll of the sessions may be going on
        assert api.hub.watched_sessions == 25
        for stream in streams:
            stream.cut()
        await nothing_is_left(api)


async def test_at_shutdown_streams_are_flushed_and_broken_off_and_readers_go_on_elsewhere(
    database_url: str, redis_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    """SSE-13."""
    caplog.set_level(logging.WARNING)
    limits = StreamLimits(flush_s=60.0)
    async with open_database(database_url) as database, replica(database, redis_url) as other:
        async with replica(database, redis_url, limits) as api:
            logs = [await new_log(database) for _ in range(10)]
            streams = [await api.connect(api.path(log, query="after=0")) for log in logs]
            for log, stream in zip(logs, streams, strict=True):
                await watched(api, log, stream)
            ticking = list(zip(logs, streams, strict=True))[:5]
            for log, _ in ticking:
                await api.publisher.announce(log.session_id, await log.say("last"))
                await eventually(partial(_has_seen, api, log))
            await api.hub.close()
            for stream in streams:
                await stream.rest()
                assert stream.ended == "cut"  # not its end
                await stream.close()
            assert all(seqs(stream.events) == [1, 2] for _, stream in ticking)
            assert api.hub.open_streams == 0
        for log, stream in ticking:
            headers = {"last-event-id": stream.last_event_id}
            async with open_sse(other.port, other.path(log), headers=headers) as resumed:
                await other.publisher.announce(log.session_id, await log.say("elsewhere"))
                assert seqs(await resumed.take(1)) == [3]
    errors = [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert errors == []


def _has_seen(api: Replica, log: Log) -> bool:
    return api.hub.delivered_seq(log.session_id) == log.seq


async def test_a_stopped_reader_does_not_hold_up_a_shutdown(
    database_url: str, redis_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    limits = StreamLimits(flush_s=0.3)
    async with open_database(database_url) as database, replica(database, redis_url, limits) as api:
        log = await new_log(database)
        await log.say(*("x" * 100_000 for _ in range(60)))
        stopped = await api.connect(api.path(log, query="after=0"), receive_buffer_bytes=4096)
        await eventually(lambda: api.hub.open_streams == 1)
        await api.hub.close()
        assert api.hub.open_streams == 0
        stopped.cut()
    assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []


async def test_many_readers_of_one_session_share_one_subscription(database_url: str, redis_url: str) -> None:
    """L-02."""
    async with open_database(database_url) as database, replica(database, redis_url) as api:
        log = await new_log(database)
        streams = [await api.connect(api.path(log, query="after=0")) for _ in range(50)]
        await watched(api, log, *streams)
        assert (api.hub.open_streams, api.hub.watched_sessions, api.hub.subscribed_channels) == (50, 1, 1)
        for stream in streams:
            stream.cut()
        await nothing_is_left(api)


async def test_other_requests_are_answered_while_streams_are_open(database_url: str, redis_url: str) -> None:
    async with open_database(database_url, pool_size=1) as database, replica(database, redis_url) as api:
        logs = [await new_log(database) for _ in range(10)]
        streams = [await api.connect(api.path(log)) for log in logs]
        await eventually(lambda: api.hub.open_streams == 10)
        async with httpx.AsyncClient(trust_env=False) as client:
            for _ in range(20):
                answer = await client.get(
                    f"http://127.0.0.1:{api.port}{api.path(logs[0], query='until=idle&after=0')}"
                )
                assert answer.status_code == 204
        for stream in streams:
            stream.cut()
        await nothing_is_left(api)
