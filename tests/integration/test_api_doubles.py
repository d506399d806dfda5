"""Every POST of the API, sent twice at once over two apis and once more later, has the effect of one."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from db.ids import public, to_uuid
from providers.ids import new_id
from tests.support.served_api import Caller, ServedApi, prompt, served_api

DOCUMENT = json.loads((Path(__file__).parents[2] / "openapi" / "openapi.json").read_text())
POSTS = [path for path, operations in DOCUMENT["paths"].items() if "post" in operations]
TABLES = ("tenants", "api_keys", "agents", "agent_versions", "sessions", "prompts", "runs", "events", "files")
SAID = {"events": [prompt("hello")]}


@dataclass(frozen=True, kw_only=True)
class Request:
    """A POST; `other` is a body that makes it another request, None where there is no body to change.

    `makes`: what one of it adds, by table; requests that only change rows add nothing.
    """

    path: str
    body: Any = None
    other: Any = None
    makes: dict[str, int]


Prepare = Callable[[ServedApi, Caller], Awaitable[Request]]


async def new_tenant(api: ServedApi, me: Caller) -> Request:
    return Request(
        path="/v1/admin/tenants", body={"name": "one"}, other={"name": "other"}, makes={"tenants": 1}
    )


async def bounds_of_a_tenant(api: ServedApi, me: Caller) -> Request:
    path = f"/v1/admin/tenants/{public('ten', me.tenant_id)}"
    return Request(path=path, body={"max_running_runs": 1}, other={"max_running_runs": 2}, makes={})


async def archive_of_a_tenant(api: ServedApi, me: Caller) -> Request:
    tenant = await me.post("/v1/admin/tenants", {"name": "short-lived"}, 201)
    return Request(path=f"/v1/admin/tenants/{tenant['id']}/archive", makes={})


async def new_key(api: ServedApi, me: Caller) -> Request:
    body = {"name": "k", "scopes": ["read"]}
    return Request(path="/v1/admin/keys", body=body, other=body | {"name": "l"}, makes={"api_keys": 1})


async def _key(me: Caller) -> str:
    return str((await me.post("/v1/admin/keys", {"name": "k", "scopes": ["read"]}, 201))["id"])


async def bound_of_a_key(api: ServedApi, me: Caller) -> Request:
    path = f"/v1/admin/keys/{await _key(me)}"
    return Request(path=path, body={"max_running_runs": 1}, other={"max_running_runs": 2}, makes={})


async def revocation_of_a_key(api: ServedApi, me: Caller) -> Request:
    return Request(path=f"/v1/admin/keys/{await _key(me)}/revoke", makes={})


async def new_agent(api: ServedApi, me: Caller) -> Request:
    makes = {"agents": 1, "agent_versions": 1}
    return Request(path="/v1/agents", body={"name": "a"}, other={"name": "b"}, makes=makes)


async def new_version(api: ServedApi, me: Caller) -> Request:
    path = f"/v1/agents/{await me.agent()}"
    return Request(path=path, body={"system": "x"}, other={"system": "y"}, makes={"agent_versions": 1})


async def archive_of_an_agent(api: ServedApi, me: Caller) -> Request:
    return Request(path=f"/v1/agents/{await me.agent()}/archive", makes={})


async def prompt_of_an_agent(api: ServedApi, me: Caller) -> Request:
    body = {"prompt": "hello", "wait_s": 0}
    makes = {"sessions": 1, "prompts": 1, "runs": 1, "events": 1}
    path = f"/v1/agents/{await me.agent()}/prompt"
    return Request(path=path, body=body, other=body | {"prompt": "bye"}, makes=makes)


async def new_session(api: ServedApi, me: Caller) -> Request:
    body = {"agent": await me.agent(), "initial_events": SAID["events"]}
    makes = {"sessions": 1, "prompts": 1, "runs": 1, "events": 1}
    return Request(path="/v1/sessions", body=body, other=body | {"title": "t"}, makes=makes)


async def title_of_a_session(api: ServedApi, me: Caller) -> Request:
    path = f"/v1/sessions/{await me.session()}"
    return Request(path=path, body={"title": "one"}, other={"title": "two"}, makes={"events": 1})


async def archive_of_a_session(api: ServedApi, me: Caller) -> Request:
    return Request(path=f"/v1/sessions/{await me.session()}/archive", makes={"events": 1})


async def events_of_a_session(api: ServedApi, me: Caller) -> Request:
    path = f"/v1/sessions/{await me.session()}/events"
    makes = {"prompts": 1, "runs": 1, "events": 1}
    return Request(path=path, body=SAID, other={"events": [prompt("bye")]}, makes=makes)


async def edit_of_a_prompt(api: ServedApi, me: Caller) -> Request:
    session = await me.session()
    (stored,) = await me.say(session, "hello")
    path = f"/v1/sessions/{session}/prompts/{stored['id']}"
    bodies = [{"content": prompt(text)["content"]} for text in ("one", "two")]
    return Request(path=path, body=bodies[0], other=bodies[1], makes={"events": 1})


async def cancel_of_a_run(api: ServedApi, me: Caller) -> Request:
    session = await me.session()
    await me.say(session, "hello")
    (run,) = (await me.get(f"/v1/sessions/{session}/runs"))["data"]
    # The prompt is withdrawn, and the session is idle.
    path = f"/v1/runs/{run['id']}/cancel"
    return Request(path=path, body={"reason": "a"}, other={"reason": "b"}, makes={"events": 2})


async def compaction_of_a_session(api: ServedApi, me: Caller) -> Request:
    session = await me.session()
    await closed_run(api, me, session)
    path = f"/v1/sessions/{session}/compact"
    return Request(path=path, body={}, other={"instructions": "short"}, makes={"runs": 1})


async def continuation_of_a_session(api: ServedApi, me: Caller) -> Request:
    session = await me.session()
    await closed_run(api, me, session)
    path = f"/v1/sessions/{session}/continue"
    return Request(path=path, body={}, other={"max_turns": 2}, makes={"runs": 1})


async def fork_of_a_session(api: ServedApi, me: Caller) -> Request:
    path = f"/v1/sessions/{await me.session()}/fork"
    return Request(path=path, body={}, other={"title": "two"}, makes={"sessions": 1, "events": 1})


async def import_of_a_session(api: ServedApi, me: Caller) -> Request:
    body: dict[str, Any] = {"agent": await me.agent(), "state": {"messages": []}}
    other = {**body, "state": {"messages": [], "title": "two"}}
    return Request(path="/v1/sessions/import", body=body, other=other, makes={"sessions": 1, "events": 1})


async def restoring_of_a_memory(api: ServedApi, me: Caller) -> Request:
    session = await me.session()
    memory = await api.new_memory(me, session)
    return Request(path=f"/v1/sessions/{session}/memories/{memory}/restore", makes={"events": 1})


async def closed_run(api: ServedApi, me: Caller, session: str) -> None:
    """A run that has left a message."""
    await me.say(session, "hello")
    run = (await me.get(f"/v1/sessions/{session}/runs"))["data"][0]
    await me.post(f"/v1/runs/{run['id']}/cancel")
    async with api.database.transaction() as tx:
        await tx.execute(
            """
            INSERT INTO messages (session_id, tenant_id, run_id, position, id, role, blocks)
            SELECT $1, $2, $3, coalesce(max(position), 0) + 1, $4, 'user', '[]'
            FROM messages WHERE session_id = $1
            """,
            to_uuid(session),
            me.tenant_id,
            to_uuid(run["id"]),
            to_uuid(new_id("msg")),
        )


async def rollback_of_a_session(api: ServedApi, me: Caller) -> Request:
    session = await me.session()
    for _ in range(2):  # a second rollback would find something to take back
        await closed_run(api, me, session)
    return Request(path=f"/v1/sessions/{session}/rollback", makes={"events": 1})


PREPARE: dict[str, Prepare] = {
    "/v1/admin/tenants": new_tenant,
    "/v1/admin/tenants/{tenant_id}": bounds_of_a_tenant,
    "/v1/admin/tenants/{tenant_id}/archive": archive_of_a_tenant,
    "/v1/admin/keys": new_key,
    "/v1/admin/keys/{key_id}": bound_of_a_key,
    "/v1/admin/keys/{key_id}/revoke": revocation_of_a_key,
    "/v1/agents": new_agent,
    "/v1/agents/{agent_id}": new_version,
    "/v1/agents/{agent_id}/archive": archive_of_an_agent,
    "/v1/agents/{agent_id}/prompt": prompt_of_an_agent,
    "/v1/runs/{run_id}/cancel": cancel_of_a_run,
    "/v1/sessions": new_session,
    "/v1/sessions/{session_id}": title_of_a_session,
    "/v1/sessions/{session_id}/archive": archive_of_a_session,
    "/v1/sessions/{session_id}/compact": compaction_of_a_session,
    "/v1/sessions/{session_id}/continue": continuation_of_a_session,
    "/v1/sessions/{session_id}/events": events_of_a_session,
    "/v1/sessions/{session_id}/memories/{memory_id}/restore": restoring_of_a_memory,
    "/v1/sessions/{session_id}/fork": fork_of_a_session,
    "/v1/sessions/import": import_of_a_session,
    "/v1/sessions/{session_id}/prompts/{prompt_id}": edit_of_a_prompt,
    "/v1/sessions/{session_id}/rollback": rollback_of_a_session,
}
UPLOAD = "/v1/files"  # its body is no JSON: a test of its own


@pytest.fixture
async def apis(database_url: str, redis_url: str) -> AsyncIterator[tuple[ServedApi, ServedApi]]:
    async with served_api(database_url, redis_url) as one, served_api(database_url, redis_url) as two:
        yield one, two


def test_every_post_is_among_these() -> None:
    assert sorted({*PREPARE, UPLOAD}) == sorted(POSTS)


@pytest.mark.parametrize("path", PREPARE)
async def test_doubles_have_the_effect_of_one(apis: tuple[ServedApi, ServedApi], path: str) -> None:
    """Q-11."""
    one, two = apis
    me = await one.caller(scopes=("write", "admin"))
    request = await PREPARE[path](one, me)
    headers = {"idempotency-key": "k", "authorization": f"Bearer {me.key}"}
    before = await rows_of(one)
    doubles = [api.url + request.path for api in (one, two) * 3]

    answers = await asyncio.gather(*(send(url, request.body, headers) for url in doubles))
    assert {answer.status_code // 100 for answer in answers} == {2}, [answer.text for answer in answers]
    assert len({shown(answer) for answer in answers}) == 1
    after = await rows_of(one)
    made = {table: after[table] - before[table] for table in TABLES if after[table] != before[table]}
    assert made == request.makes

    late = await send(doubles[1], request.body, headers)
    assert shown(late) == shown(answers[0])
    assert await rows_of(one) == after
    if request.other is not None:
        refused = await send(doubles[0], request.other, headers)
        assert (refused.status_code, refused.json()["code"]) == (409, "idempotency_mismatch")
        assert await rows_of(one) == after


async def test_doubles_of_an_upload_are_one_file(apis: tuple[ServedApi, ServedApi]) -> None:
    me = await apis[0].caller()
    headers = {"idempotency-key": "k", "authorization": f"Bearer {me.key}", "content-type": "text/plain"}
    async with httpx.AsyncClient(trust_env=False, timeout=30) as http:

        async def upload(api: ServedApi, content: bytes) -> httpx.Response:
            return await http.post(f"{api.url}{UPLOAD}?filename=a.txt", content=content, headers=headers)

        answers = await asyncio.gather(*(upload(api, b"hello") for api in apis * 3))
        assert len({answer.content for answer in answers}) == 1
        assert (await upload(apis[0], b"bye")).json()["code"] == "idempotency_mismatch"
    assert (await rows_of(apis[0]))["files"] == 1


async def send(url: str, body: Any, headers: dict[str, str]) -> httpx.Response:
    """A connection for each, so that they are on their way together."""
    async with httpx.AsyncClient(trust_env=False, timeout=30) as http:
        return await http.post(url, json=body, headers=headers)


def shown(answer: httpx.Response) -> str:
    """The answer but for what is shown once only, and what passes with time."""
    fields = answer.json()
    for name in ("key", "stats"):
        fields.pop(name, None)
    return json.dumps(fields, sort_keys=True)


async def rows_of(api: ServedApi) -> dict[str, int]:
    async with api.database.transaction() as tx:
        return {table: await tx.fetchval(f"SELECT count(*) FROM {table}") for table in TABLES}
