"""Previews: who gets them, in which order, and when they are void."""

from typing import Any

import pytest
from anthropic.lib.sessions import accumulate_managed_agents_event
from anthropic.types.beta.sessions import (
    BetaManagedAgentsAgentMessageEvent,
    BetaManagedAgentsStreamSessionEvents,
)
from pydantic import TypeAdapter
from redis.asyncio import Redis

from agents.events import ModelUsage, RequestEnd, StatusRescheduled, TokenUsage
from agents.types import PreviewDelta
from app.streaming import keys
from app.streaming.outgoing import KEPT_BYTES, SessionPublisher
from providers.ids import new_id
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

DELTAS = "event_deltas=agent.message"


def texts(events: list[SseEvent]) -> str:
    """What a reader that only appends has put together."""
    return "".join(event.json["delta"]["content"]["text"] for event in events if event.type == "event_delta")


def kinds(events: list[SseEvent]) -> list[str]:
    return [event.type for event in events]


async def say(voice: SessionPublisher, stream: SseStream, event_id: str, *parts: str) -> None:
    """Sends deltas one by one, each seen by `stream` before the next, so that none are merged."""
    for part in parts:
        voice.preview(more(event_id, part))
        await stream.until("event_delta")
        assert texts(stream.events[-1:]) == part


async def watched(api: Replica, stream: SseStream, log: Log) -> None:
    """Returns when the stream follows live."""
    await api.publisher.announce(log.session_id, await log.say("ready"))
    await stream.until(lambda event: "ready" in event.data)


def request_end(log: Log, *, is_error: bool) -> Any:
    return log.event(
        RequestEnd,
        model_request_start_id=new_id("evt"),
        model_usage=ModelUsage(
            input_tokens=0, output_tokens=0, cache_read_input_tokens=0, cache_creation_input_tokens=0
        ),
        usage=TokenUsage(),
        is_error=is_error,
    )


async def test_a_message_is_shown_while_it_is_made_and_then_its_final_event(
    database_url: str, redis_url: str
) -> None:
    async with open_database(database_url) as database, replica(database, redis_url) as api:
        log = await new_log(database)
        async with open_sse(api.port, api.path(log, query=DELTAS)) as stream:
            await watched(api, stream, log)
            event_id = new_id("evt")
            voice = api.publisher.hold(session_id=log.session_id, epoch=0, base_seq=log.seq)
            voice.preview(started(event_id))
            await stream.until("event_start")
            await say(voice, stream, event_id, "Hel", "lo\n", "\u2028 world")
            (final,) = await log.commit(log.message("Hello\n\u2028 world", event_id=event_id))
            voice.event(final)
            await stream.until("agent.message")
            await voice.aclose()
        previews = stream.events[1:-1]
        assert texts(previews) == "Hello\n\u2028 world"
        assert [event.id for event in previews] == ["1-1", "1-2", "1-3", "1-4"]
        assert stream.events[-1].id == "2"


async def test_the_accumulator_of_the_hosted_api_puts_the_same_message_together(
    database_url: str, redis_url: str
) -> None:
    async with open_database(database_url) as database, replica(database, redis_url) as api:
        log = await new_log(database)
        async with open_sse(api.port, api.path(log, query=DELTAS)) as stream:
            await watched(api, stream, log)
            event_id = new_id("evt")
            voice = api.publisher.hold(session_id=log.session_id, epoch=0, base_seq=log.seq)
            voice.preview(started(event_id))
            await stream.until("event_start")
            await say(voice, stream, event_id, "one ", "two ", "three")
            await voice.aclose()
        adapter: TypeAdapter[Any] = TypeAdapter(BetaManagedAgentsStreamSessionEvents)
        snapshot: BetaManagedAgentsAgentMessageEvent | None = None
        for event in stream.events[1:]:
            snapshot = accumulate_managed_agents_event(snapshot, adapter.validate_python(event.json))
        assert snapshot is not None
        assert snapshot.id == event_id
        assert [block.to_dict() for block in snapshot.content] == [{"type": "text", "text": "one two three"}]


async def test_deltas_go_only_to_connections_that_name_their_kind(database_url: str, redis_url: str) -> None:
    async with open_database(database_url) as database, replica(database, redis_url) as api:
        log = await new_log(database)
        async with (
            open_sse(api.port, api.path(log, query="after=0")) as none,
            open_sse(api.port, api.path(log, query=f"after=0&{DELTAS}")) as messages,
            open_sse(api.port, api.path(log, query="after=0&event_deltas=agent.thinking")) as thinking,
        ):
            for stream in (none, messages, thinking):
                await stream.until_bytes(b": hb\n")
            await eventually(lambda: api.hub.open_streams == 3)
            voice = api.publisher.hold(session_id=log.session_id, epoch=0)
            await watched(api, messages, log)
            for stream in (none, thinking):
                await stream.take(1)
            thought_id, event_id = new_id("evt"), new_id("evt")
            voice.preview(started(thought_id, "agent.thinking"))
            voice.preview(
                PreviewDelta(
                    event_id=thought_id,
                    kind="agent.thinking",
                    delta={"type": "thinking_delta", "thinking": "h"},
                )
            )
            voice.preview(started(event_id))
            voice.preview(more(event_id, "text"))
            for stream in (messages, thinking):
                await stream.until("event_delta")
            (final,) = await log.commit(log.message("text", event_id=event_id))
            voice.event(final)
            for stream in (none, messages, thinking):
                await stream.until(lambda event: event.id == "2")
            await voice.aclose()
        assert kinds(none.events) == ["agent.message"] * 2
        assert kinds(messages.events) == ["agent.message", "event_start", "event_delta", "agent.message"]
        assert kinds(thinking.events) == ["agent.message", "event_start", "event_delta", "agent.message"]
        assert thinking.events[1].json["event"] == {"id": thought_id, "type": "agent.thinking"}


@pytest.mark.parametrize("is_known_to_the_hub", [True, False])
async def test_a_reader_that_joins_in_the_middle_gets_the_text_so_far_and_then_follows(
    database_url: str, redis_url: str, is_known_to_the_hub: bool
) -> None:
    async with (
        open_database(database_url) as database,
        replica(database, redis_url) as api,
        replica(database, redis_url) as other,
    ):
        log = await new_log(database)
        event_id = new_id("evt")
        voice = api.publisher.hold(session_id=log.session_id, epoch=0)
        async with open_sse(api.port, api.path(log, query=DELTAS)) as early:
            await watched(api, early, log)
            voice.preview(started(event_id), base_seq=1)
            await early.until("event_start")
            await say(voice, early, event_id, "one ", "two ")
            joined = api if is_known_to_the_hub else other
            async with open_sse(joined.port, joined.path(log, query=DELTAS)) as late:
                assert kinds(await late.take(2)) == ["event_start", "event_delta"]
                await say(voice, late, event_id, "three")
                assert texts(late.events) == "one two three"
                assert late.events[1].id == "1-3"
        await voice.aclose()


async def test_a_reader_cut_after_any_preview_resumes_without_repeating_a_byte(
    database_url: str, redis_url: str
) -> None:
    """SSE-07, for previews."""
    async with (
        open_database(database_url) as database,
        replica(database, redis_url) as api,
        replica(database, redis_url) as other,
    ):
        log = await new_log(database)
        event_id = new_id("evt")
        voice = api.publisher.hold(session_id=log.session_id, epoch=0)
        parts = [f"{number} " for number in range(10)]
        async with open_sse(api.port, api.path(log, query=DELTAS)) as stream:
            await watched(api, stream, log)
            voice.preview(started(event_id), base_seq=1)
            await stream.until("event_start")
            await say(voice, stream, event_id, *parts)
            previews = stream.events[1:]
            for k, last in enumerate(previews, start=1):
                for resumed in (api, other):
                    headers = {"last-event-id": last.id}
                    path = resumed.path(log, query=DELTAS)
                    async with open_sse(resumed.port, path, headers=headers) as rest:
                        await rest.until_bytes(b": hb\n")
                        if k < len(previews):
                            await rest.until(lambda event: event.id == previews[-1].id)
                        assert "event_start" not in kinds(rest.events), last.id
                        assert texts(previews[:k]) + texts(rest.events) == "".join(parts)
        await voice.aclose()


async def test_an_unknown_preview_number_reads_as_its_durable_event(
    database_url: str, redis_url: str
) -> None:
    async with open_database(database_url) as database, replica(database, redis_url) as api:
        log = await new_log(database)
        event_id = new_id("evt")
        voice = api.publisher.hold(session_id=log.session_id, epoch=0)
        async with open_sse(api.port, api.path(log, query=DELTAS)) as stream:
            await watched(api, stream, log)
            voice.preview(started(event_id), base_seq=1)
            await say(voice, stream, event_id, "one ", "two ")
            headers = {"last-event-id": "1-999999"}
            async with open_sse(api.port, api.path(log, query=DELTAS), headers=headers) as again:
                await again.until(lambda event: event.id == stream.last_event_id)
                assert texts(again.events) == "one two "
        await voice.aclose()


async def test_previews_of_a_request_that_failed_are_void_before_new_ones_start(
    database_url: str, redis_url: str
) -> None:
    async with open_database(database_url) as database, replica(database, redis_url) as api:
        log = await new_log(database)
        first_id, second_id = new_id("evt"), new_id("evt")
        voice = api.publisher.hold(session_id=log.session_id, epoch=0)
        async with open_sse(api.port, api.path(log, query=DELTAS)) as stream:
            await watched(api, stream, log)
            voice.preview(started(first_id), base_seq=1)
            await say(voice, stream, first_id, "half of ")
            (end,) = await log.commit(request_end(log, is_error=True))
            voice.event(end)
            await stream.until("span.model_request_end")
            voice.preview(started(second_id))
            await say(voice, stream, second_id, "whole")
            async with open_sse(api.port, api.path(log, query=DELTAS)) as late:
                await late.until("event_delta")
        await voice.aclose()
        assert [event.json["event_id"] for event in late.events if event.type == "event_delta"] == [second_id]


async def test_a_new_epoch_voids_previews_and_the_old_worker_can_publish_nothing(
    database_url: str, redis_url: str
) -> None:
    async with open_database(database_url) as database, replica(database, redis_url) as api:
        log = await new_log(database)
        old_id, new_event_id = new_id("evt"), new_id("evt")
        old = api.publisher.hold(session_id=log.session_id, epoch=1, base_seq=1)
        async with open_sse(api.port, api.path(log, query=DELTAS)) as stream:
            await watched(api, stream, log)
            old.preview(started(old_id))
            await say(old, stream, old_id, "from the old hold")
            rescheduled = await log.commit(log.event(StatusRescheduled), epoch=2)
            await api.publisher.announce(log.session_id, rescheduled, epoch=2)
            await stream.until("session.status_rescheduled")
            old.preview(more(old_id, "zombie"))
            await eventually(lambda: old.is_stale)
            old.preview(started(new_id("evt")))
            new = api.publisher.hold(session_id=log.session_id, epoch=3, base_seq=log.seq)
            new.preview(started(new_event_id))
            await say(new, stream, new_event_id, "from the new hold")
            await new.aclose()
        assert texts(stream.events) == "from the old holdfrom the new hold"
        assert b"zombie" not in stream.body


async def test_a_stale_worker_is_refused_by_the_hub_alone_when_redis_has_forgotten_the_epoch(
    database_url: str, redis_url: str
) -> None:
    async with open_database(database_url) as database, replica(database, redis_url) as api:
        log = await new_log(database)
        async with database.transaction() as tx:
            await tx.execute("UPDATE sessions SET epoch = 5")
        async with open_sse(api.port, api.path(log, query=DELTAS)) as stream:
            await watched(api, stream, log)
            zombie = api.publisher.hold(session_id=log.session_id, epoch=4, base_seq=1)
            zombie.preview(started(new_id("evt")))
            zombie.preview(more(new_id("evt"), "zombie"))
            await zombie.aclose()
            live_id = new_id("evt")
            live = api.publisher.hold(session_id=log.session_id, epoch=5, base_seq=1)
            live.preview(started(live_id))
            await say(live, stream, live_id, "live")
            await live.aclose()
        assert b"zombie" not in stream.body


async def test_a_preview_of_a_finished_event_that_comes_late_is_not_shown(
    database_url: str, redis_url: str
) -> None:
    async with open_database(database_url) as database, replica(database, redis_url) as api:
        log = await new_log(database)
        event_id = new_id("evt")
        async with open_sse(api.port, api.path(log, query=f"after=0&{DELTAS}")) as stream:
            await watched(api, stream, log)
            await log.commit(log.message("final", event_id=event_id))
            await stream.until(lambda event: "final" in event.data)  # the poll was quicker than the worker
            voice = api.publisher.hold(session_id=log.session_id, epoch=0, base_seq=1)
            voice.preview(started(event_id))
            voice.preview(more(event_id, "late"))
            await voice.aclose()
            await api.publisher.announce(log.session_id, await log.say("next"))
            await stream.until(lambda event: "next" in event.data)
        assert kinds(stream.events) == ["agent.message"] * 3


async def test_a_worker_that_died_before_it_could_say_that_a_message_is_final_leaves_no_ghost(
    database_url: str, redis_url: str
) -> None:
    async with open_database(database_url) as database, replica(database, redis_url) as api:
        log = await new_log(database)
        event_id = new_id("evt")
        voice = api.publisher.hold(session_id=log.session_id, epoch=0)
        voice.preview(started(event_id))
        voice.preview(more(event_id, "ghost"))
        await voice.aclose()
        await log.commit(log.message("final", event_id=event_id))
        async with open_sse(api.port, api.path(log, query=DELTAS)) as stream:
            await watched(api, stream, log)
        assert b"ghost" not in stream.body


async def test_what_is_kept_for_late_readers_goes_when_nothing_is_unfinished(
    database_url: str, redis_url: str
) -> None:
    async with open_database(database_url) as database, replica(database, redis_url) as api:
        log = await new_log(database)
        key = keys.previews_key(log.session_id)
        event_id, long_id = new_id("evt"), new_id("evt")
        async with Redis.from_url(redis_url) as redis:
            voice = api.publisher.hold(session_id=log.session_id, epoch=0)
            voice.preview(started(event_id))
            await voice.flushed()
            assert 0 < await redis.pttl(key) <= keys.PREVIEWS_LIFETIME_MS
            (final,) = await log.commit(log.message("final", event_id=event_id))
            voice.event(final)
            voice.preview(started(long_id))
            for _ in range(40):
                voice.preview(more(long_id, "x" * (KEPT_BYTES // 30)))
                await voice.flushed()
            assert not await redis.exists(key)
            await voice.aclose()


async def test_deltas_that_wait_are_merged_and_a_slow_redis_costs_a_bounded_number_of_bytes(
    database_url: str, redis_url: str
) -> None:
    async with open_database(database_url) as database, replica(database, redis_url) as api:
        log = await new_log(database)
        event_id = new_id("evt")
        voice = api.publisher.hold(session_id=log.session_id, epoch=0)
        async with open_sse(api.port, api.path(log, query=DELTAS)) as stream:
            await watched(api, stream, log)
            voice.preview(started(event_id), base_seq=1)
            for number in range(5000):  # nothing is flushed before the loop gives way
                voice.preview(more(event_id, f"{number} "), base_seq=1)
            await stream.until("event_delta")
            assert texts(stream.events) == "".join(f"{number} " for number in range(5000))
            assert kinds(stream.events).count("event_delta") == 1
        await voice.aclose()
