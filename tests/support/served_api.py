"""The API on a loopback port of this process, and callers with keys of tenants of their own."""

import asyncio
import os
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import httpx
import uvicorn

from app.main import create_app
from app.settings import Settings
from db.engine import Database
from db.ids import to_uuid
from db.keys import create_key
from db.tenants import create_tenant
from providers.ids import new_id

ROOT = Path(__file__).parents[2]
START_S = 30.0
STOP_S = 30


@dataclass(frozen=True, kw_only=True)
class Caller:
    """A client with a key of its own tenant."""

    tenant_id: UUID
    key: str
    http: httpx.AsyncClient

    async def get(self, path: str, status: int = 200, **options: Any) -> Any:
        return await self.call("GET", path, status, **options)

    async def post(self, path: str, body: Any = None, status: int = 200, **options: Any) -> Any:
        return await self.call("POST", path, status, json=body, **options)

    async def delete(self, path: str, status: int = 200, **options: Any) -> Any:
        return await self.call("DELETE", path, status, **options)

    async def call(self, method: str, path: str, status: int, **options: Any) -> Any:
        """The JSON of an answer with this status."""
        answer = await self.http.request(method, path, **options)
        assert answer.status_code == status, f"{method} {path}: {answer.status_code} {answer.text}"
        return answer.json()

    async def agent(self, **fields: Any) -> str:
        """The id of a new agent."""
        body = {"name": "test", "model": "rehearsal:demo"} | fields
        return str((await self.post("/v1/agents", body, 201))["id"])

    async def session(self, agent_id: str | None = None, **fields: Any) -> str:
        """The id of a new session."""
        body = {"agent": agent_id or await self.agent()} | fields
        return str((await self.post("/v1/sessions", body, 201))["id"])

    async def say(self, session_id: str, *texts: str, **options: Any) -> Any:
        """The stored events of prompts that are posted together."""
        body = {"events": [prompt(text) for text in texts]}
        return (await self.post(f"/v1/sessions/{session_id}/events", body, **options))["data"]


@dataclass(frozen=True, kw_only=True)
class ServedApi:
    """`database` sees all tenants."""

    url: str
    database: Database
    clients: list[httpx.AsyncClient]

    async def new_memory(self, owner: Caller, session_id: str) -> str:
        """The id of a memory of the session, as a worker makes it."""
        memory_id = new_id("mem")
        async with self.database.transaction() as tx:
            await tx.execute(
                """
                INSERT INTO memories (id, tenant_id, session_id, position, seen_position, text)
                VALUES ($1, $2, $3, 1, 1, 'secret notes')
                """,
                to_uuid(memory_id),
                owner.tenant_id,
                to_uuid(session_id),
            )
        return memory_id

    async def caller(self, name: str = "tenant", scopes: tuple[str, ...] = ("write",)) -> Caller:
        """A caller of a new tenant."""
        async with self.database.transaction() as tx:
            tenant = await create_tenant(tx, name=f"{name} {uuid4()}")
            _, key = await create_key(tx, tenant_id=tenant.id, name=name, scopes=scopes)
        http = httpx.AsyncClient(
            base_url=self.url, headers={"authorization": f"Bearer {key}"}, timeout=30, trust_env=False
        )
        self.clients.append(http)
        return Caller(tenant_id=tenant.id, key=key, http=http)


def prompt(text: str) -> dict[str, Any]:
    """A `user.message` as clients send it."""
    return {"type": "user.message", "content": [{"type": "text", "text": text}]}


@asynccontextmanager
async def served_api(database_url: str, redis_url: str, **settings: Any) -> AsyncIterator[ServedApi]:
    """Serves on a free port until the block ends."""
    app = create_app(Settings(database_url=database_url, redis_url=redis_url, **settings))
    config = uvicorn.Config(
        app,
        lifespan="on",
        ws="none",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        timeout_graceful_shutdown=5,
    )
    server = uvicorn.Server(config)
    database = Database.open(database_url, pool_size=2)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        api = ServedApi(url=f"http://127.0.0.1:{listener.getsockname()[1]}", database=database, clients=[])
        try:
            await _started(server, serving)
            yield api
        finally:
            for client in api.clients:
                await client.aclose()
            server.should_exit = True
            await serving
            await database.close()


async def _started(server: uvicorn.Server, serving: asyncio.Task[None]) -> None:
    async with asyncio.timeout(START_S):
        while not server.started:
            if serving.done():
                await serving
                raise AssertionError("the server ended before it had started")
            await asyncio.sleep(0.01)


@asynccontextmanager
async def running_worker(database_url: str, redis_url: str) -> AsyncIterator[None]:
    """A worker process on these servers until the block ends."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("ARMILLARY_")}
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "app",
        "worker",
        cwd=ROOT,
        env={**kept, "ARMILLARY_DATABASE_URL": database_url, "ARMILLARY_REDIS_URL": redis_url},
    )
    try:
        yield
    finally:
        if process.returncode is None:
            process.terminate()
        async with asyncio.timeout(STOP_S):
            await process.wait()
