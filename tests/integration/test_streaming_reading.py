"""Cursors, replay and the ends of streams, over real servers."""

import asyncio
from uuid import UUID, uuid4

import pytest

from agents.events import SessionUpdated
from app.streaming.frames import RETRY_MS
from app.streaming.publisher import Publisher
from db.errors import NotFound
from db.log import PAGE_EVENTS, events_after, heads, list_events
from providers.ids import new_id
from tests.support.sse_client import SseEvent, open_sse
from tests.support.streaming import Log, eventually, new_log, open_database, replica


def seqs(events: list[SseEvent]) -> list[int]:
    return [event.json["seq"] for event in events]


async def test_replay_equals_live_byte_for_byte(database_url: str, redis_url: str) -> None:
    async with open_database(database_url) as database, replica(database, redis_url) as api:
        log = await new_log(database)
        path = api.path(log, query="after=0")
        async with open_sse(api.port, path) as live:
            await eventually(lambda: api.hub.open_streams == 1)
            for text in ("one", "two\u2028\r\n", "drei 🙂", "4" * 300_000):
                await api.publisher.announce(log.session_id, await log.say(text))
            await live.take(4)
        async with open_sse(api.port, path) as replay:
            await replay.take(4)
        assert _frames(live.body) == _frames(replay.body)
        assert seqs(live.events) == [1, 2, 3, 4]


def _frames(body: bytes) -> list[bytes]:
    """The frames of a stream, without heartbeats and the `retry` of the first."""
    lines = [line for line in body.split(b"\n") if line != b": hb" and not line.startswith(b"retry:")]
    return b"\n".join(lines).split(b"\n\n")


async def test_a_reader_without_cursor_gets_its_position_and_only_what_comes_after(
    database_url: str, redis_url: str
) -> None:
    async with open_database(database_url) as database, replica(database, redis_url) as api:
        log = await new_log(database)
        await log.say("before", "before")
        async with open_sse(api.port, api.path(log)) as stream:
            await stream.until_bytes(b"id: 2\n\n")
            assert stream.body == b"retry: %d\nid: 2\n\n" % RETRY_MS
            await api.publisher.announce(log.session_id, await log.say("after"))
            assert seqs(await stream.take(1)) == [3]


async def test_the_head_of_a_stream_keeps_proxies_from_holding_it_back(
    database_url: str, redis_url: str
) -> None:
    """SSE-05: also while no worker has taken up the run."""
    async with open_database(database_url) as database, replica(database, redis_url) as api:
        log = await new_log(database)
        await log.open_run(state="queued")
        async with open_sse(api.port, api.path(log)) as stream:
            await stream.until_bytes(b"id: 0\n\n")
            assert stream.headers["content-type"] == "text/event-stream; charset=utf-8"
            assert stream.headers["cache-control"] == "no-cache"
            assert stream.headers["x-accel-buffering"] == "no"
            assert "content-length" not in stream.headers
            assert "connection" not in stream.headers


async def test_a_reader_cut_after_any_frame_resumes_exactly_on_another_replica(
    database_url: str, redis_url: str
) -> None:
    """SSE-07."""
    async with (
        open_database(database_url) as database,
        replica(database, redis_url) as first,
        replica(database, redis_url) as second,
    ):
        log = await new_log(database)
        writer = asyncio.create_task(_write_slowly(log, first.publisher, 50))
        for k in range(1, 51):
            async with open_sse(first.port, first.path(log, query="after=0")) as stream:
                read = await stream.take(k)
            headers = {"last-event-id": read[-1].id}
            async with open_sse(second.port, second.path(log), headers=headers) as rest:
                read += await rest.take(50 - k)
            assert seqs(read) == list(range(1, 51)), k
        await writer


async def _write_slowly(log: Log, publisher: Publisher, count: int) -> None:
    for number in range(count):
        logged = await log.say(f"text {number}")
        if number % 3:
            await publisher.announce(log.session_id, logged)


async def test_the_header_wins_over_the_query(database_url: str, redis_url: str) -> None:
    """SSE-07."""
    async with open_database(database_url) as database, replica(database, redis_url) as api:
        log = await new_log(database)
        await log.say(*"abcde")
        headers = {"last-event-id": "3"}
        async with open_sse(api.port, api.path(log, query="after=1"), headers=headers) as stream:
            assert seqs(await stream.take(2)) == [4, 5]


@pytest.mark.parametrize(
    ("cursor", "reason"), [("garbage", "unreadable"), ("99", "beyond_end"), ("-5", "unreadable")]
)
async def test_a_cursor_that_cannot_be_read_gives_a_gap_and_then_the_log(
    database_url: str, redis_url: str, cursor: str, reason: str
) -> None:
    async with open_database(database_url) as database, replica(database, redis_url) as api:
        log = await new_log(database)
        await log.say("one", "two")
        async with open_sse(api.port, api.path(log), headers={"last-event-id": cursor}) as stream:
            gap, *events = await stream.take(3)
        assert (gap.type, gap.id, gap.json["reason"]) == ("session.gap", "", reason)
        assert seqs(events) == [1, 2]
        assert stream.parser.retry_ms == RETRY_MS


async def test_a_cursor_before_what_is_kept_gives_a_gap_and_the_log_from_there(
    database_url: str, redis_url: str
) -> None:
    async with open_database(database_url) as database, replica(database, redis_url) as api:
        log = await new_log(database)
        await log.say(*"abcde")
        async with database.transaction() as tx:
            await tx.execute("DELETE FROM events WHERE seq <= 3")
        async with open_sse(api.port, api.path(log, query="after=2")) as stream:
            gap, *events = await stream.take(3)
        assert (gap.json["reason"], gap.json["first_seq"], seqs(events)) == ("expired", 4, [4, 5])
        async with open_sse(api.port, api.path(log, query="after=3")) as stream:
            assert seqs(await stream.take(2)) == [4, 5]


async def test_retry_stands_only_in_the_first_frame(database_url: str, redis_url: str) -> None:
    async with open_database(database_url) as database, replica(database, redis_url) as api:
        log = await new_log(database)
        await log.say("one", "two", "three")
        async with open_sse(api.port, api.path(log, query="after=0")) as stream:
            await stream.take(3)
        assert stream.body.startswith(b": hb\nretry: %d\nevent: " % RETRY_MS)
        assert stream.body.count(b"retry:") == 1


# -- until=idle -----------------------------------------------------------------------------------------


async def test_a_finished_run_is_replayed_once_and_the_stream_ends(database_url: str, redis_url: str) -> None:
    """SSE-09."""
    async with open_database(database_url) as database, replica(database, redis_url) as api:
        log = await new_log(database)
        await log.say("of an earlier run")
        run = await log.open_run()
        await log.say("one", "two")
        await log.finish(run)
        async with open_sse(api.port, api.path(log, query="until=idle")) as stream:
            events = await stream.rest()
        assert (seqs(events), stream.ended) == ([2, 3, 4], "clean")
        assert stream.body.startswith(b"retry: %d\nid: 1\n\n" % RETRY_MS)


async def test_a_reader_of_some_types_gets_those_alone_in_replay_and_live(
    database_url: str, redis_url: str
) -> None:
    async with open_database(database_url) as database, replica(database, redis_url) as api:
        log = await new_log(database)
        run = await log.open_run()
        await log.commit(log.running(), log.message("one"), log.running())
        path = api.path(log, query="after=0&until=idle&types=agent.message&types=session.status_idle")
        async with open_sse(api.port, path) as stream:
            await stream.take(1)
            await api.publisher.announce(
                log.session_id, await log.commit(log.running(), log.message("two"), log.running())
            )
            await stream.take(1)
            await api.publisher.announce(log.session_id, await log.finish(run))
            await stream.rest()
        assert [(event.json["seq"], event.type) for event in stream.events] == [
            (2, "agent.message"),
            (5, "agent.message"),
            (7, "session.status_idle"),
        ]


async def test_a_reader_of_some_types_gets_past_pages_that_have_none_of_them(
    database_url: str, redis_url: str
) -> None:
    async with open_database(database_url) as database, replica(database, redis_url) as api:
        log = await new_log(database)
        run = await log.open_run()
        for _ in range(6):
            await log.commit(*[log.running() for _ in range(PAGE_EVENTS // 5)])
        await log.finish(run)
        path = api.path(log, query="after=0&until=idle&types=session.status_idle")
        async with open_sse(api.port, path) as stream:
            assert [event.type for event in await stream.rest()] == ["session.status_idle"]
            assert stream.ended == "clean"


async def test_a_cursor_in_the_middle_gets_the_tail_and_one_at_the_end_gets_204(
    database_url: str, redis_url: str
) -> None:
    """SSE-09."""
    async with open_database(database_url) as database, replica(database, redis_url) as api:
        log = await new_log(database)
        run = await log.open_run()
        await log.say("one", "two")
        await log.finish(run)
        path = api.path(log, query="until=idle")
        async with open_sse(api.port, path, headers={"last-event-id": "1"}) as stream:
            assert seqs(await stream.rest()) == [2, 3]
        for cursor in ("3", "3-17"):
            async with open_sse(api.port, path, headers={"last-event-id": cursor}) as stream:
                assert (stream.status, await stream.rest()) == (204, [])


async def test_a_cursor_at_the_end_of_a_run_that_goes_on_is_answered_with_a_stream(
    database_url: str, redis_url: str
) -> None:
    async with open_database(database_url) as database, replica(database, redis_url) as api:
        log = await new_log(database)
        run = await log.open_run(state="queued")
        await log.say("one")
        path = api.path(log, query="until=idle")
        async with open_sse(api.port, path, headers={"last-event-id": "1"}) as stream:
            assert stream.status == 200
            await api.publisher.announce(log.session_id, await log.finish(run))
            assert (seqs(await stream.rest()), stream.ended) == ([2], "clean")


async def test_until_idle_goes_on_through_the_next_run(database_url: str, redis_url: str) -> None:
    async with open_database(database_url) as database, replica(database, redis_url) as api:
        log = await new_log(database)
        first = await log.open_run()
        async with open_sse(api.port, api.path(log, query="until=idle")) as stream:
            await eventually(lambda: api.hub.open_streams == 1)
            second = uuid4()
            closing = await log.commit(log.idle(), closes=first, opens=second)
            await api.publisher.announce(log.session_id, closing)
            assert seqs(await stream.take(1)) == [1]
            await api.publisher.announce(log.session_id, await log.finish(second))
            assert (seqs(await stream.rest()), stream.ended) == ([2], "clean")


@pytest.mark.parametrize(("child_run_id", "ends"), [(None, True), (uuid4(), False)], ids=["client", "child"])
async def test_waiting_for_the_client_is_idle_and_waiting_for_a_child_is_not(
    database_url: str, redis_url: str, child_run_id: UUID | None, ends: bool
) -> None:
    async with open_database(database_url) as database, replica(database, redis_url) as api:
        log = await new_log(database)
        run = await log.open_run(state="waiting")
        await log.open_call(run, child_run_id=child_run_id)
        await log.say("one")
        async with open_sse(api.port, api.path(log, query="until=idle")) as stream:
            if not ends:
                assert seqs(await stream.take(1)) == [1]
                await api.publisher.announce(log.session_id, await log.finish(run))
            await stream.rest()
        assert stream.ended == "clean"
        assert seqs(stream.events) == ([1] if ends else [1, 2])


async def test_an_event_right_after_idle_is_still_delivered(database_url: str, redis_url: str) -> None:
    async with open_database(database_url) as database, replica(database, redis_url) as api:
        log = await new_log(database)
        run = await log.open_run()
        async with open_sse(api.port, api.path(log, query="until=idle")) as stream:
            await eventually(lambda: api.hub.open_streams == 1)
            await log.commit(log.idle(), log.event(SessionUpdated, changes={"title": "x"}), closes=run)
            assert seqs(await stream.rest()) == [1, 2]


async def test_until_idle_without_any_run_ends_at_once(database_url: str, redis_url: str) -> None:
    async with open_database(database_url) as database, replica(database, redis_url) as api:
        log = await new_log(database)
        async with open_sse(api.port, api.path(log, query="until=idle")) as stream:
            assert (await stream.rest(), stream.ended) == ([], "clean")


async def test_a_plain_stream_of_an_idle_session_stays_open_for_what_comes(
    database_url: str, redis_url: str
) -> None:
    async with open_database(database_url) as database, replica(database, redis_url) as api:
        log = await new_log(database)
        run = await log.open_run()
        await log.finish(run)
        async with open_sse(api.port, api.path(log), headers={"last-event-id": "1"}) as stream:
            assert stream.status == 200
            await eventually(lambda: api.hub.open_streams == 1)
            await api.publisher.announce(log.session_id, await log.say("later"))
            assert seqs(await stream.take(1)) == [2]


# -- tenants --------------------------------------------------------------------------------------------


async def test_another_tenants_session_is_not_found(database_url: str, redis_url: str) -> None:
    async with open_database(database_url) as database, replica(database, redis_url) as api:
        mine, theirs = await new_log(database), await new_log(database)
        with pytest.raises(NotFound):
            await api.hub.open(session_id=theirs.session_id, tenant_id=mine.tenant_id)
        with pytest.raises(NotFound):
            await api.hub.open(session_id=new_id("sess"), tenant_id=mine.tenant_id)
        assert await api.hub.open(session_id=mine.session_id, tenant_id=mine.tenant_id) is not None


async def test_a_stream_ends_when_its_session_is_deleted(database_url: str, redis_url: str) -> None:
    async with open_database(database_url) as database, replica(database, redis_url) as api:
        log = await new_log(database)
        stream = await api.connect(api.path(log))
        await eventually(lambda: api.hub.open_streams == 1)
        async with database.transaction() as tx:
            await tx.execute("DELETE FROM sessions")
        assert await stream.rest() == []
        await stream.close()
        await eventually(lambda: api.hub.open_streams == 0)


# -- queries --------------------------------------------------------------------------------------------


async def test_pages_of_the_log_are_bounded_by_bytes_and_never_empty_before_its_end(
    database_url: str,
) -> None:
    async with open_database(database_url) as database:
        log = await new_log(database)
        await log.say("x" * 5000, "y" * 5000, "z")
        async with database.transaction() as tx:
            page = await events_after(tx, log.session_id, 0, max_bytes=6000)
            assert [event.seq for event in page] == [1, 2]
            page = await events_after(tx, log.session_id, 0, max_bytes=1)
            assert [event.seq for event in page] == [1]
            assert await events_after(tx, log.session_id, 3) == []


async def test_the_log_is_listed_in_either_order_by_type_and_position(database_url: str) -> None:
    async with open_database(database_url) as database:
        log = await new_log(database)
        await log.commit(log.message("a"), log.idle(), log.message("b"), log.idle())
        async with database.transaction() as tx:
            listed = await list_events(tx, log.session_id, types=["agent.message"], order="desc")
            assert [event.seq for event in listed] == [3, 1]
            listed = await list_events(tx, log.session_id, after_seq=1, before_seq=4)
            assert [event.seq for event in listed] == [2, 3]
            found = await heads(tx, [log.session_id, new_id("sess")])
        assert list(found) == [log.session_id]
        assert (found[log.session_id].last_seq, found[log.session_id].is_busy) == (4, False)


async def test_readers_that_wait_for_the_same_page_share_it_and_get_nothing_older_than_their_question(
    database_url: str, redis_url: str
) -> None:
    async with open_database(database_url) as database, replica(database, redis_url) as api:
        log = await new_log(database)
        await log.say("one", "two")
        pages = await asyncio.gather(*(api.hub.page(log.session_id, 1) for _ in range(500)))
        assert api.hub.counters.pages_read == 1
        assert all([event.seq for event in page] == [2] for page in pages)
        begun = [asyncio.create_task(api.hub.page(log.session_id, 2)) for _ in range(3)]
        await asyncio.sleep(0)
        await log.say("three")
        [event] = await api.hub.page(log.session_id, 2)
        assert event.seq == 3
        await asyncio.gather(*begun)
