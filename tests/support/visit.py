"""A tenant's view of a fleet: prompts over any api, readers that come back, and what Postgres says."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import asyncpg
import httpx

from agents.config import AgentConfig, AgentTool, BuiltinTool, ModelChoice
from db.agents import create_agent
from db.engine import Database
from db.ids import public, to_uuid
from db.keys import create_key
from db.log import events_after
from db.tenants import create_tenant
from tests.support.fleet import Fleet, eventually
from tests.support.follower import Follower
from tests.support.served_api import Caller
from tests.support.transcript_rules import log_problems, transcript_problems


@dataclass(kw_only=True)
class Visit:
    """A tenant of its own on the fleet, and the database as an operator sees it."""

    fleet: Fleet
    database: Database
    tenant_id: UUID
    key: str
    clients: dict[str, httpx.AsyncClient] = field(default_factory=dict)
    followers: list[Follower] = field(default_factory=list)
    gates: list["asyncpg.Connection[asyncpg.Record]"] = field(default_factory=list)

    def at(self, name: str) -> Caller:
        """The tenant as a caller of this api."""
        url = self.fleet.members[name].url
        if url not in self.clients:
            self.clients[url] = httpx.AsyncClient(
                base_url=url, headers={"authorization": f"Bearer {self.key}"}, timeout=30, trust_env=False
            )
        return Caller(tenant_id=self.tenant_id, key=self.key, http=self.clients[url])

    async def session(self, *tools: str | AgentTool, api: str = "api 1", **limits: Any) -> str:
        """A session of a new agent."""
        return await self.at(api).session(await self.agent(*tools, **limits))

    async def agent(self, *tools: str | AgentTool, **limits: Any) -> str:
        """A new agent, made in Postgres, since no api knows the tests' tools."""
        config = AgentConfig(
            name="tester",
            model=ModelChoice(id="rehearsal:demo"),
            tools=tuple(BuiltinTool(name=tool) if isinstance(tool, str) else tool for tool in tools),
            **{"max_turns": 200} | limits,
        )
        async with self.database.transaction(self.tenant_id) as tx:
            return public("agent", await create_agent(tx, config))

    def follow(self, session_id: str, *ways: str, **options: Any) -> Follower:
        """A reader of the session over these apis."""
        members = [self.fleet.members[way] for way in ways]
        follower = Follower(session_id, self.key, members, **options)
        self.followers.append(follower)
        return follower

    def follow_both(self, session_id: str, **options: Any) -> list[Follower]:
        """Two readers, each of which stays with an api of its own."""
        return [self.follow(session_id, way.name, **options) for way in self.fleet.apis]

    async def call(self, session_id: str, tool: str, then: str = "echo") -> None:
        """Prompts for a call of a tool of the tests, under the session's name; it runs when this returns."""
        script = f'call: {tool} {{"name": "{session_id}"}}\n---\n{then}'
        await self.at("api 2").say(session_id, script)
        await self.until_begun(session_id)

    # -- what the database says ---------------------------------------------------------------------

    async def value(self, statement: str, *values: Any) -> Any:
        async with self.database.transaction() as tx:
            return await tx.fetchval(statement, *values)

    async def holder(self, session_id: str) -> str:
        """The worker that has the session's run, as soon as one has it."""
        found: list[str] = []

        async def has_holder() -> bool:
            pid = await self.value(
                "SELECT pid FROM runs JOIN workers ON workers.id = worker_id"
                " WHERE session_id = $1 AND state = 'running' AND lease_until > clock_timestamp()",
                to_uuid(session_id),
            )
            found[:] = [worker.name for worker in self.fleet.workers if worker.pid == pid]
            return bool(found)

        await eventually(has_holder, "a worker that has the run")
        return found[0]

    async def run_id(self, session_id: str) -> str:
        """The newest run."""
        found = await self.value(
            "SELECT id FROM runs WHERE session_id = $1 ORDER BY queued_at DESC LIMIT 1", to_uuid(session_id)
        )
        return public("run", found)

    async def log(self, session_id: str) -> list[Any]:
        """The whole log, each event with its bytes in `json`."""
        found: list[Any] = []
        async with self.database.transaction() as tx:
            while page := await events_after(tx, session_id, len(found)):
                found += page
        return found

    async def until_logged(self, session_id: str, kind: str) -> None:
        """Returns when the log has an event of this type."""

        async def is_there() -> bool:
            return any(event.type == kind for event in await self.log(session_id))

        await eventually(is_there, f"{kind} in the log")

    async def gate(self, session_id: str, kind: str) -> "Gate":
        """Holds the next commits that contain an event of this type, in their middle, until it is opened."""
        connection = await asyncpg.connect(self.fleet.database_url)
        self.gates.append(connection)
        number = uuid4().int % 2**31
        await connection.execute("SELECT pg_advisory_lock($1)", number)
        await connection.execute("INSERT INTO gates VALUES ($1, $2, $3)", to_uuid(session_id), kind, number)
        return Gate(connection, number)

    # -- the tools of the tests ---------------------------------------------------------------------

    def executions(self, name: str) -> list[list[str]]:
        """What `tests.support.worker_with_tools` has noted under this name: what, key, pid."""
        path = self._tool_file(name, "log")
        return [line.split()[:3] for line in path.read_text().splitlines()] if path.exists() else []

    def begun(self, name: str) -> int:
        return sum(line[0] == "begun" for line in self.executions(name))

    async def until_begun(self, name: str, count: int = 1) -> None:
        async def has_begun() -> bool:
            return self.begun(name) >= count

        await eventually(has_begun, f"execution {count} of {name}")

    async def until_done(self, name: str) -> None:
        async def is_done() -> bool:
            return any(line[0] == "done" for line in self.executions(name))

        await eventually(is_done, f"the end of {name}")

    def release(self, name: str) -> None:
        """Lets the tool end."""
        self._tool_file(name, "release").touch()

    def _tool_file(self, name: str, suffix: str) -> Path:
        return self.fleet.tools / f"{name}.{suffix}"

    # -- what must be true at the end ---------------------------------------------------------------

    async def checked(self, session_id: str, *, runs: int = 1) -> list[Any]:
        """As `check`, when all readers of the session have seen its runs close."""
        for follower in self.followers:
            if follower.session_id == session_id:
                await follower.closed()
        return await self.check(session_id, runs=runs)

    async def check(self, session_id: str, *, runs: int = 1) -> list[Any]:
        """The log, after all rules have been applied to it, to the transcript, the ledger and the readers."""
        logged = await self.log(session_id)
        events = [json.loads(event.json) for event in logged]
        async with self.database.transaction() as tx:
            ledger = await tx.fetch(
                "SELECT * FROM usage_entries WHERE session_id = $1 ORDER BY opened_at", to_uuid(session_id)
            )
            session = await tx.fetchrow("SELECT * FROM sessions WHERE id = $1", to_uuid(session_id))
            messages = await tx.fetch(
                "SELECT role, blocks FROM messages WHERE session_id = $1 ORDER BY position",
                to_uuid(session_id),
            )
            states = await tx.fetch("SELECT state FROM runs WHERE session_id = $1", to_uuid(session_id))
        rows = [{**dict(row), "id": public("evt", row["id"])} for row in ledger]
        assert log_problems(events, ledger=rows) == []
        transcript = [{"role": row["role"], "blocks": json.loads(row["blocks"])} for row in messages]
        assert transcript_problems(transcript) == []
        assert [row["state"] for row in states] == ["closed"] * runs
        closing = [event for event in events if event["type"] == "session.status_idle"]
        assert sum(event["stop_reason"]["type"] != "requires_action" for event in closing) == runs
        assert session is not None
        assert session["last_seq"] == len(events)
        _compare_counters(session, rows)
        for follower in self.followers:
            if follower.session_id == session_id:
                follower.check([(str(event.seq), event.json.decode()) for event in logged])
        return events


class Gate:
    """A closed gate; see `Visit.gate`."""

    def __init__(self, connection: "asyncpg.Connection[asyncpg.Record]", number: int) -> None:
        self._connection = connection
        self._number = number

    async def reached(self) -> None:
        """Returns when a commit waits."""

        async def is_waiting() -> bool:
            return bool(
                await self._connection.fetchval(
                    "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted"
                    " AND objid = $1::bigint::oid",
                    self._number,
                )
            )

        await eventually(is_waiting, "a commit at the gate")

    async def open(self) -> None:
        await self._connection.execute("DELETE FROM gates WHERE number = $1", self._number)
        await self._connection.execute("SELECT pg_advisory_unlock($1)", self._number)


@asynccontextmanager
async def visiting(
    fleet: Fleet, *, max_running_runs: int | None = None, tolerated: tuple[str, ...] = ()
) -> AsyncIterator[Visit]:
    """A new tenant with a key. All members are ready when the block begins.

    Fails at its end when a member has logged an error, other than with a text that is `tolerated`.
    """
    await fleet.ready()
    database = Database.open(fleet.database_url, pool_size=4)
    async with database.transaction() as tx:
        tenant = await create_tenant(tx, name=f"visit {uuid4()}", max_running_runs=max_running_runs)
        _, key = await create_key(tx, tenant_id=tenant.id, name="visit", scopes=("write",))
    visit = Visit(fleet=fleet, database=database, tenant_id=tenant.id, key=key)
    sizes = fleet.log_sizes()
    try:
        yield visit
        complaints = fleet.complaints(sizes)
        complaints = [line for line in complaints if not any(text in line for text in tolerated)]
        assert not complaints, "\n".join(complaints)
    finally:
        for follower in visit.followers:
            follower.task.cancel()
        await asyncio.gather(*(follower.task for follower in visit.followers), return_exceptions=True)
        for client in visit.clients.values():
            await client.aclose()
        for gate in visit.gates:
            gate.terminate()
        await database.close()


def of_type(events: list[Any], kind: str) -> list[Any]:
    """The events of this type."""
    return [event for event in events if event["type"] == kind]


def said(events: list[Any]) -> list[str]:
    """The texts of the messages."""
    return [event["content"][0]["text"] for event in of_type(events, "agent.message")]


def _compare_counters(session: Any, ledger: list[dict[str, Any]]) -> None:
    """The session's counters are the sums of its ledger."""
    hit = sum(row["cache_read_tokens"] or 0 for row in ledger)
    total = sum(row["input_tokens"] or 0 for row in ledger)
    assert session["current_cache_hit_tokens"] + session["full_cache_hit_tokens"] == hit
    assert session["current_cache_miss_tokens"] + session["full_cache_miss_tokens"] == total - hit
    output = sum(row["output_tokens"] or 0 for row in ledger)
    assert session["current_output_tokens"] + session["full_output_tokens"] == output
    assert session["cost_usd"] == sum(row["cost_usd"] or 0 for row in ledger)
    over = [row for row in ledger if row["state"] != "open"]
    assert session["unpriced_requests"] == sum(row["cost_usd"] is None for row in over)
