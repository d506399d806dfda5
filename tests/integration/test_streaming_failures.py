"""Every order of subscribing, reading and publishing, and a Redis that loses, stalls or dies."""

import asyncio
import contextlib
import shutil
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from functools import partial
from itertools import count
from pathlib import Path

import pytest
from msgspec.structs import replace
from redis.asyncio import Redis

from app.streaming import keys
from app.streaming.publisher import Publisher
from app.streaming.signals import Signals
from providers.ids import new_id
from tests.support.sse_client import SseEvent, open_sse
from tests.support.streaming import (
    ACKNOWLEDGED,
    Gate,
    OwnRedis,
    Relay,
    eventually,
    more,
    new_log,
    open_database,
    open_gated,
    replica,
    started,
)

NEVER_POLLS = replace(ACKNOWLEDGED, poll_s=3600.0)


def seqs(events: list[SseEvent]) -> list[int]:
    return [event.json["seq"] for event in events]


@pytest.fixture
def short_folder() -> Iterator[Path]:
    """Paths of sockets must be short."""
    folder = Path(tempfile.mkdtemp(prefix="arm-"))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
async def own_redis(short_folder: Path) -> AsyncIterator[OwnRedis]:
    server = OwnRedis(short_folder)
    await server.start()
    yield server
    server.kill()


@pytest.fixture
async def relay(redis_url: str, short_folder: Path) -> AsyncIterator[Relay]:
    between = Relay(redis_url, short_folder)
    await between.start()
    yield between
    await between.aclose()


# -- interleavings --------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_published", [True, False])
@pytest.mark.parametrize("where", ["before", "after"])
@pytest.mark.parametrize("nth_read", [1, 2])
async def test_an_event_between_any_read_and_what_follows_it_is_received_exactly_once(
    database_url: str, redis_url: str, where: str, nth_read: int, is_published: bool
) -> None:
    """SSE-10.

    The reads of a new stream: where its cursor stands, then (at once) a page and the end of the log.
    """
    limits = NEVER_POLLS if is_published else None
    async with (
        open_database(database_url) as database,
        open_gated(database_url) as gated,
        replica(gated, redis_url, limits) as api,
    ):
        log = await new_log(database)
        await log.say("one")
        gate, reads = Gate(), count(1)

        async def stop_at_nth() -> None:
            if next(reads) == nth_read:
                await gate()

        setattr(gated, where, stop_at_nth)
        opening = asyncio.create_task(api.connect(api.path(log, query="after=0")))
        await gate.reached.wait()
        logged = await log.say("two")
        if is_published:
            await api.publisher.announce(log.session_id, logged)
        gate.opened.set()
        stream = await opening
        assert seqs(await stream.take(2)) == [1, 2]
        await api.publisher.announce(log.session_id, await log.say("three"))
        assert seqs(await stream.take(1)) == [3]
        stream.cut()


async def test_the_last_event_of_a_run_between_reading_and_following_ends_the_stream(
    database_url: str, redis_url: str
) -> None:
    """SSE-10, for the event that closes the run."""
    async with (
        open_database(database_url) as database,
        open_gated(database_url) as gated,
        replica(gated, redis_url) as api,
    ):
        log = await new_log(database)
        run = await log.open_run()
        gate = Gate()
        gated.after = gate
        opening = asyncio.create_task(api.connect(api.path(log, query="until=idle")))
        await gate.reached.wait()
        await log.finish(run)
        gate.opened.set()
        stream = await opening
        assert (seqs(await stream.rest()), stream.ended) == ([1], "clean")
        await stream.close()


async def test_an_event_published_before_the_subscription_is_acknowledged_is_not_lost(
    database_url: str, redis_url: str, relay: Relay
) -> None:
    """SSE-10."""
    async with open_database(database_url) as database, replica(database, relay.url, NEVER_POLLS) as api:
        log = await new_log(database)
        relay.flows.clear()
        async with open_sse(api.port, api.path(log)) as stream, Redis.from_url(redis_url) as redis:
            await stream.until_bytes(b"id: 0\n\n")
            channel = keys.events_channel(log.session_id)
            async with asyncio.timeout(60):
                while (await redis.pubsub_numsub(channel))[0][1] == 0:  # noqa: ASYNC110
                    await asyncio.sleep(0.005)
            await log.say("one")  # its publication is lost
            relay.flows.set()
            assert seqs(await stream.take(1)) == [1]


async def test_a_connection_cut_between_subscribing_and_its_acknowledgement_is_made_again(
    database_url: str, redis_url: str, relay: Relay
) -> None:
    """L-02."""
    async with open_database(database_url) as database, replica(database, relay.url, NEVER_POLLS) as api:
        log = await new_log(database)
        relay.flows.clear()
        async with open_sse(api.port, api.path(log)) as stream:
            await stream.until_bytes(b"id: 0\n\n")
            await log.say("one")
            relay.cut()
            relay.flows.set()
            assert seqs(await stream.take(1)) == [1]
            assert api.hub.redis_reconnects >= 1


async def test_a_second_reader_that_comes_while_the_first_catches_up_gets_everything(
    database_url: str, redis_url: str
) -> None:
    async with (
        open_database(database_url) as database,
        open_gated(database_url) as gated,
        replica(gated, redis_url, NEVER_POLLS) as api,
    ):
        log = await new_log(database)
        async with open_sse(api.port, api.path(log, query="after=0")) as first:
            await api.publisher.announce(log.session_id, await log.say("one"))
            await first.take(1)
            await log.say("lost")
            gate = Gate()
            gated.before = gate
            await api.publisher.announce(log.session_id, await log.say("three"))  # a jump: it must be filled
            await gate.reached.wait()
            await api.publisher.announce(log.session_id, await log.say("four"))  # parked
            opening = asyncio.create_task(api.connect(api.path(log, query="after=0")))
            gate.opened.set()
            second = await opening
            assert seqs(await first.take(3)) == [2, 3, 4]
            assert seqs(await second.take(4)) == [1, 2, 3, 4]
            second.cut()


async def test_parked_events_beyond_their_bound_are_read_from_postgres(
    database_url: str, redis_url: str
) -> None:
    limits = replace(NEVER_POLLS, parked_bytes=10_000)
    async with (
        open_database(database_url) as database,
        open_gated(database_url) as gated,
        replica(gated, redis_url, limits) as api,
    ):
        log = await new_log(database)
        async with open_sse(api.port, api.path(log, query="after=0")) as stream:
            await api.publisher.announce(log.session_id, await log.say("one"))
            await stream.take(1)
            await log.say("lost")
            gate = Gate()
            gated.before = gate
            for _ in range(20):
                await api.publisher.announce(log.session_id, await log.say("x" * 2000))
            await gate.reached.wait()
            await eventually(lambda: api.hub.counters.parked_overflows > 0)
            gate.opened.set()
            assert seqs(await stream.take(21)) == list(range(2, 23))


# -- Redis ----------------------------------------------------------------------------------------------


async def test_a_lost_publication_is_healed_by_the_next_poll(database_url: str, redis_url: str) -> None:
    async with open_database(database_url) as database, replica(database, redis_url) as api:
        log = await new_log(database)
        async with open_sse(api.port, api.path(log, query="after=0")) as stream:
            await api.publisher.announce(log.session_id, await log.say("one"))
            await stream.take(1)
            await log.say("lost")
            assert seqs(await stream.take(1)) == [2]
        assert api.hub.counters.healed_by_poll >= 1


async def test_streams_go_on_from_postgres_while_redis_is_away_and_live_when_it_is_back(
    database_url: str, own_redis: OwnRedis
) -> None:
    """L-02."""
    async with open_database(database_url) as database, replica(database, own_redis.url) as api:
        log = await new_log(database)
        async with open_sse(api.port, api.path(log, query="after=0")) as stream:
            await api.publisher.announce(log.session_id, await log.say("one"))
            await stream.take(1)
            own_redis.kill()
            await eventually(lambda: not api.hub.is_redis_well)
            await api.publisher.announce(log.session_id, await log.say("two"))
            assert seqs(await stream.take(1)) == [2]
            async with open_sse(api.port, api.path(log, query="after=0")) as other:
                assert seqs(await other.take(2)) == [1, 2]
            await own_redis.start()
            await eventually(lambda: api.hub.is_redis_well)
            await api.publisher.announce(log.session_id, await log.say("three"))
            assert seqs(await stream.take(1)) == [3]


@pytest.mark.parametrize("loss", ["flush", "restart"])
async def test_a_message_goes_on_when_redis_is_emptied_in_the_middle_of_it(
    database_url: str, own_redis: OwnRedis, loss: str
) -> None:
    async with open_database(database_url) as database, replica(database, own_redis.url) as api:
        log = await new_log(database)
        event_id, next_id = new_id("evt"), new_id("evt")
        path = api.path(log, query="after=0&event_deltas=agent.message")
        async with open_sse(api.port, path) as stream:
            await api.publisher.announce(log.session_id, await log.say("ready"))
            await stream.take(1)
            voice = api.publisher.hold(session_id=log.session_id, epoch=0, base_seq=1)
            voice.preview(started(event_id))
            voice.preview(more(event_id, "before "))
            await stream.take(2)
            if loss == "flush":
                async with Redis.from_url(own_redis.url) as redis:
                    await redis.flushall()
                    await redis.script_flush()
            else:
                own_redis.kill()
                await eventually(lambda: not api.hub.is_redis_well)
                await own_redis.start()
                await eventually(lambda: api.hub.is_redis_well)
            voice.preview(more(event_id, "after"))
            await voice.flushed()
            (final,) = await log.commit(log.message("before after", event_id=event_id))
            voice.event(final)
            events = await stream.until("agent.message")
            assert events[-1].json["content"][0]["text"] == "before after"
            voice.preview(started(next_id))
            voice.preview(more(next_id, "next"))
            await stream.until("event_delta")
            await voice.aclose()
        for event in stream.events:  # no delta stands without its start
            if event.type == "event_delta":
                assert event.json["event_id"] in {event_id, next_id}
        assert [event.id for event in stream.events if event.type == "event_start"] == ["1-1", "2-4"]


async def test_previews_survive_a_redis_that_stalls(database_url: str, redis_url: str, relay: Relay) -> None:
    async with open_database(database_url) as database, replica(database, relay.url) as api:
        log = await new_log(database)
        event_id = new_id("evt")
        path = api.path(log, query="after=0&event_deltas=agent.message")
        async with open_sse(api.port, path) as stream:
            await api.publisher.announce(log.session_id, await log.say("ready"))
            await stream.take(1)
            voice = api.publisher.hold(session_id=log.session_id, epoch=0, base_seq=1)
            voice.preview(started(event_id))
            await stream.until("event_start")
            relay.flows.clear()
            for number in range(100):
                voice.preview(more(event_id, f"{number} "))
            relay.flows.set()
            text = ""
            while text != "".join(f"{number} " for number in range(100)):
                text += (await stream.until("event_delta"))[-1].json["delta"]["content"]["text"]
            await voice.aclose()


async def test_subscriptions_come_back_however_often_their_connection_is_killed(
    database_url: str, redis_url: str, relay: Relay
) -> None:
    """L-02."""
    async with open_database(database_url) as database, replica(database, relay.url, NEVER_POLLS) as api:
        log = await new_log(database)
        async with open_sse(api.port, api.path(log, query="after=0")) as stream:
            for number in range(1, 11):
                await eventually(lambda: api.hub.is_redis_well)
                await log.say("lost")  # nothing tells of it but what is read after the next subscription
                relay.cut()
                assert seqs(await stream.take(1)) == [number]


async def test_announcing_never_fails_while_redis_is_away(database_url: str, short_folder: Path) -> None:
    async with (
        open_database(database_url) as database,
        replica(database, f"unix://{short_folder / 'none.sock'}", is_redis_there=False) as api,
    ):
        log = await new_log(database)
        async with open_sse(api.port, api.path(log, query="after=0")) as stream:
            await api.publisher.announce(log.session_id, await log.say("one"), epoch=1)
            await api.publisher.signal_cancel(log.session_id)
            assert seqs(await stream.take(1)) == [1]


async def test_a_worker_hears_wake_ups_and_cancels_again_after_its_connection_was_lost(
    redis_url: str, relay: Relay
) -> None:
    publisher = Publisher.open(redis_url)
    async with contextlib.aclosing(publisher), Redis.from_url(redis_url) as redis:
        woken, cancelled = asyncio.Event(), asyncio.Event()
        sessions: list[str] = []

        def on_cancel(session_id: str) -> None:
            sessions.append(session_id)
            cancelled.set()

        signals = Signals(relay.url, on_wake=lambda _: woken.set(), on_cancel=on_cancel)
        await signals.start()
        for number in range(2):
            await asyncio.wait_for(woken.wait(), 60)  # once subscribed: something may have been missed
            await eventually(lambda: signals.is_connected)
            woken.clear()
            await _until(woken, partial(redis.publish, keys.WAKE_CHANNEL, b""))
            cancelled.clear()
            await _until(cancelled, partial(publisher.signal_cancel, f"sess_{number}"))
            woken.clear()
            relay.cut()
        await signals.aclose()
        assert {"sess_0", "sess_1"} <= set(sessions)


async def _until(happened: asyncio.Event, act: Callable[[], Awaitable[object]]) -> None:
    """Acts until it is heard: one channel may be acknowledged before the other."""
    async with asyncio.timeout(60):
        while not happened.is_set():
            await act()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(happened.wait(), 0.2)
