"""The official client of the hosted API, pointed at us, with every answer checked against its own types.

Events of our own, such as `prompt.applied`, are none of its types: it gets the log without them.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from anthropic import AsyncAnthropic, ConflictError, NotFoundError
from anthropic.types.beta.sessions import BetaManagedAgentsStreamSessionEvents
from pydantic import TypeAdapter

from tests.support.served_api import Caller, ServedApi, running_worker, served_api

ANSWER_S = 60
CLIENT_TOOL: Any = {
    "type": "custom",
    "name": "ask_user",
    "description": "Asks the user a question.",
    "input_schema": {"type": "object", "properties": {"question": {"type": "string"}}},
}


@pytest.fixture
async def api(database_url: str, redis_url: str) -> AsyncIterator[ServedApi]:
    async with served_api(database_url, redis_url) as api, running_worker(database_url, redis_url):
        yield api


PREVIEWS = ("event_start", "event_delta")
AnyKnownEvent: Any = TypeAdapter(BetaManagedAgentsStreamSessionEvents)


@asynccontextmanager
async def client_of(api: ServedApi, caller: Caller) -> AsyncIterator[Any]:
    async with AsyncAnthropic(
        api_key=caller.key,
        base_url=api.url,
        _strict_response_validation=True,
        timeout=ANSWER_S,
        max_retries=0,
    ) as client:
        yield client


async def test_agent_session_prompt_and_stream_work_through_the_official_client(api: ServedApi) -> None:
    me = await api.caller()
    async with client_of(api, me) as client:
        agent = await client.beta.agents.create(
            name="Helper", model="rehearsal:demo", system="Be brief.", tools=[CLIENT_TOOL]
        )
        assert agent.version == 1
        session = await client.beta.sessions.create(
            agent=agent.id, environment_id="env_none", title="Hello", metadata={"team": "blue"}
        )
        assert (session.status, session.agent.id, session.environment_id) == ("idle", agent.id, "env_none")

        stream = await client.beta.sessions.events.stream(session.id, event_deltas=["agent.message"])
        async with stream:
            sent = await client.beta.sessions.events.send(
                session.id,
                events=[{"type": "user.message", "content": [{"type": "text", "text": "Say hello"}]}],
            )
            assert sent.data[0].type == "user.message"
            seen, text = await _until_idle(stream)

        assert seen[0] == "user.message"
        assert {"session.status_running", "span.model_request_end", "event_delta"} <= set(seen)
        events = client.beta.sessions.events
        final = [event async for event in events.list(session.id, types=["agent.message"])]
        assert "".join(block.text for event in final for block in event.content) == text
        listed = [event.type async for event in events.list(session.id, limit=2)]
        assert listed == [kind for kind in seen if kind not in PREVIEWS]

        session = await client.beta.sessions.retrieve(session.id)
        assert session.status == "idle"
        assert session.usage.output_tokens > 0
        assert session.metadata == {"team": "blue"}


async def test_sessions_are_listed_changed_archived_and_deleted_by_the_official_client(
    api: ServedApi,
) -> None:
    async with client_of(api, await api.caller()) as client:
        agent = await client.beta.agents.create(name="Helper", model="rehearsal:demo")
        made = [
            (await client.beta.sessions.create(agent=agent.id, environment_id="env")).id for _ in range(3)
        ]
        pinned: Any = {"type": "agent", "id": agent.id, "version": 1}
        made.append((await client.beta.sessions.create(agent=pinned, environment_id="env")).id)
        override: Any = {"type": "agent_with_overrides", "id": agent.id, "system": "Other."}
        changed = await client.beta.sessions.create(agent=override, environment_id="env")
        assert changed.agent.system == "Other."
        made.append(changed.id)

        listed = [
            session.id
            async for session in client.beta.sessions.list(
                agent_id=agent.id, limit=2, statuses=["idle", "running"]
            )
        ]
        assert listed == made[::-1]
        updated = await client.beta.sessions.update(made[0], title="New", metadata={"a": "b"})
        assert (updated.title, updated.metadata) == ("New", {"a": "b"})
        assert (await client.beta.sessions.archive(made[0])).status == "terminated"
        assert (await client.beta.sessions.delete(made[1])).type == "session_deleted"
        with pytest.raises(NotFoundError):
            await client.beta.sessions.retrieve(made[1])
        with pytest.raises(ConflictError):
            await client.beta.sessions.events.send(
                made[0], events=[{"type": "user.message", "content": [{"type": "text", "text": "x"}]}]
            )


async def _until_idle(stream: Any) -> tuple[list[str], str]:
    """The types of all events up to the end of the run, and the text that came as previews."""
    seen: list[str] = []
    text = ""
    async with asyncio.timeout(ANSWER_S):
        async for event in stream:
            seen.append(event.type)
            AnyKnownEvent.validate_python(event.to_dict(mode="json"))
            if event.type == "event_delta" and event.delta.type == "content_delta":
                text += event.delta.content.text
            if event.type == "session.status_idle":
                return seen, text
    raise AssertionError(f"the stream ended before the run did: {seen}")
