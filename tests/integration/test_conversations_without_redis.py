"""Redis away: everything that is acknowledged is stored, and what is stored can be read."""

from pathlib import Path

from tests.support.served_api import served_api


async def test_prompts_are_taken_and_read_back_while_redis_is_away(database_url: str, tmp_path: Path) -> None:
    """Q-09: a prompt that is sent again is the same one."""
    async with served_api(database_url, f"unix://{tmp_path}/nobody-listens.sock") as api:
        me = await api.caller()
        agent = await me.agent()
        session = await me.session(agent)

        key = {"idempotency-key": "once"}
        events = [(await me.say(session, "0", headers=key))[0] for _ in range(2)]
        assert events[0] == events.pop()
        events += [(await me.say(session, f"{number}"))[0] for number in range(1, 3)]
        made = await me.post(f"/v1/agents/{agent}/prompt", {"prompt": "hello", "wait_s": 0}, 202)
        await me.post(f"/v1/runs/{made['run_id']}/cancel")
        stream = await me.http.get(f"/v1/sessions/{made['session_id']}/events/stream?until=idle")

        assert [event["seq"] for event in events] == [1, 2, 3]
        assert (await me.get(f"/v1/runs/{events[0]['run_id']}"))["state"] == "queued"
        assert "event: session.status_idle" in stream.text


async def test_streams_see_new_events_while_redis_is_away(database_url: str, tmp_path: Path) -> None:
    async with served_api(database_url, f"unix://{tmp_path}/nobody-listens.sock") as api:
        me = await api.caller()
        session = await me.session()
        async with me.http.stream("GET", f"/v1/sessions/{session}/events/stream") as stream:
            lines = stream.aiter_lines()
            await anext(lines)  # the stream has begun: what follows comes live
            await me.say(session, "hello")
            async for line in lines:
                if line.startswith("event: "):
                    assert line == "event: user.message"
                    return
    raise AssertionError("the stream ended without the event")
