"""A session whose log a benchmark writes, as a worker would: commit, then publish."""

from datetime import UTC, datetime

import httpx

from agents.events import AgentMessage
from agents.log import LoggedEvent, number
from agents.types import PreviewDelta, PreviewStart
from app.streaming.frames import delta_frame, durable_frame, encode_delta, start_frame
from app.streaming.publisher import Publisher
from benchmarks.deployment import Deployment
from db.engine import Database
from db.ids import public, to_uuid
from providers.ids import new_id
from providers.types import TextBlock


class SessionLog:
    """`seq` is its last event."""

    def __init__(self, database: Database, publisher: Publisher, session_id: str) -> None:
        self.session_id = session_id
        self.seq = 0
        self._database = database
        self._voice = publisher.hold(session_id=session_id, epoch=0)
        self._n = 0
        self._event_id = ""

    async def commit(self, text: str, *, event_id: str | None = None) -> LoggedEvent:
        """One more message in Postgres; nobody has heard of it yet."""
        message = AgentMessage(
            id=event_id or new_id("evt"),
            session_id=self.session_id,
            created_at=datetime.now(UTC),
            content=(TextBlock(text=text),),
        )
        (event,) = number((message,), after_seq=self.seq)
        async with self._database.transaction() as tx:
            await tx.execute(
                "INSERT INTO events (session_id, tenant_id, seq, id, type, body)"
                " SELECT id, tenant_id, $2, $3, $4, $5 FROM sessions WHERE id = $1",
                to_uuid(self.session_id),
                event.seq,
                to_uuid(event.id),
                event.type,
                event.body,
            )
            await tx.execute(
                "UPDATE sessions SET last_seq = $2 WHERE id = $1", to_uuid(self.session_id), event.seq
            )
        self.seq = event.seq
        return event

    async def say(self, text: str) -> bytes:
        """The frame of one more message, which readers get."""
        event = await self.commit(text)
        self._voice.event(event)
        return durable_frame(event)

    def begin_message(self) -> bytes:
        """The frame that says that a message is being produced; `preview` adds to it."""
        self._n += 1
        self._event_id = new_id("evt")
        self._voice.preview(PreviewStart(event_id=self._event_id, kind="agent.message"))
        return start_frame(event_id=self._event_id, kind="agent.message", seq=self.seq, n=self._n)

    def preview(self, text: str) -> bytes:
        self._n += 1
        delta = {"type": "content_delta", "index": 0, "content": {"type": "text", "text": text}}
        self._voice.preview(PreviewDelta(event_id=self._event_id, kind="agent.message", delta=delta))
        return delta_frame(event_id=self._event_id, delta=encode_delta(delta), seq=self.seq, n=self._n)

    async def finish_message(self, text: str) -> bytes:
        event = await self.commit(text, event_id=self._event_id)
        self._voice.event(event)
        return durable_frame(event)


async def new_sessions(server: Deployment, database: Database, count: int) -> list[str]:
    """Ids of empty sessions of one agent. All but the first are copies, which are quick to make."""
    headers = {"authorization": f"Bearer {server.api_key}"}
    async with httpx.AsyncClient(base_url=server.base_url, headers=headers) as client:
        agent = await client.post("/v1/agents", json={"name": "bench", "model": "rehearsal:demo"})
        first = await client.post("/v1/sessions", json={"agent": agent.raise_for_status().json()["id"]})
    session_id = str(first.raise_for_status().json()["id"])
    async with database.transaction() as tx:
        copies = await tx.fetch(
            "INSERT INTO sessions (id, tenant_id, agent_id, agent_version)"
            " SELECT gen_random_uuid(), tenant_id, agent_id, agent_version FROM sessions,"
            " generate_series(2, $2::int) WHERE id = $1 RETURNING id",
            to_uuid(session_id),
            count,
        )
    return [session_id, *(public("sess", row["id"]) for row in copies)]
