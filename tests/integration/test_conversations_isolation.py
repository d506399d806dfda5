"""No tenant sees, guesses or touches what is another's, by any route of the OpenAPI document."""

import json
import re
from collections.abc import AsyncIterator
from typing import Any
from uuid import UUID

import pytest

from app.openapi import document
from providers.ids import Prefix, new_id
from tests.support.served_api import Caller, ServedApi, prompt, served_api

PREFIXES: dict[str, Prefix] = {
    "agent_id": "agent",
    "session_id": "sess",
    "run_id": "run",
    "prompt_id": "evt",
    "file_id": "file",
    "memory_id": "mem",
}
BODIES: dict[str, Any] = {
    "/v1/agents/{agent_id}": {"name": "mine now"},
    "/v1/agents/{agent_id}/prompt": {"prompt": "hello"},
    "/v1/sessions/{session_id}": {"title": "mine now"},
    "/v1/sessions/{session_id}/events": {"events": [prompt("hello")]},
    "/v1/sessions/{session_id}/prompts/{prompt_id}": {"content": [{"type": "text", "text": "mine now"}]},
}
"""Valid bodies of the routes that need one, so that nothing but the id can be at fault."""

TABLES = ("agents", "agent_versions", "sessions", "runs", "prompts", "events", "messages", "files")


def routes_with_ids() -> list[tuple[str, str]]:
    """Method and path of every route that names something of a tenant's in its path."""
    paths = json.loads(document())["paths"]
    return [
        (method.upper(), path)
        for path, operations in sorted(paths.items())
        for method in sorted(operations)
        if method in ("get", "post", "put", "patch", "delete") and "{" in path and "/admin/" not in path
    ]


@pytest.fixture
async def api(database_url: str, redis_url: str) -> AsyncIterator[ServedApi]:
    async with served_api(database_url, redis_url) as api:
        yield api


async def everything_of(api: ServedApi, caller: Caller) -> dict[str, str]:
    """One of each thing that a tenant can have, by the name of its path parameter."""
    agent = await caller.agent()
    session = await caller.session(agent, title="secret title")
    [event] = await caller.say(session, "secret text")
    image = {"file": ("secret.txt", b"secret", "text/plain")}
    file = (await caller.call("POST", "/v1/files", 201, files=image))["id"]
    return {
        "agent_id": agent,
        "session_id": session,
        "run_id": event["run_id"],
        "prompt_id": event["id"],
        "file_id": file,
        "memory_id": await api.new_memory(caller, session),
    }


async def test_ids_of_another_tenant_are_unknown_on_every_route(api: ServedApi) -> None:
    """S-01."""
    thief, owner = await api.caller("thief"), await api.caller("owner")
    theirs = await everything_of(api, owner)
    before = await _contents(api, owner.tenant_id)

    for method, path in routes_with_ids():
        named = set(re.findall(r"{(\w+)}", path))
        assert named <= theirs.keys(), f"{path} names something that this test does not make"
        foreign = await _refusal(thief, method, path, theirs)
        unknown = await _refusal(thief, method, path, {name: new_id(PREFIXES[name]) for name in named})
        assert foreign == unknown, f"{method} {path} tells a foreign id from an unknown one"

    assert await _contents(api, owner.tenant_id) == before
    assert (await _contents(api, thief.tenant_id))["events"] == []


async def test_own_parents_do_not_open_foreign_children(api: ServedApi) -> None:
    thief, owner = await api.caller("thief"), await api.caller("owner")
    theirs, mine = await everything_of(api, owner), await everything_of(api, thief)
    path = f"/v1/sessions/{mine['session_id']}"
    await thief.delete(f"{path}/prompts/{theirs['prompt_id']}", 404)
    await thief.post(f"{path}/prompts/{theirs['prompt_id']}", BODIES[PROMPT_PATH], 404)


async def test_ids_of_another_tenant_in_bodies_are_unknown(api: ServedApi) -> None:
    """S-01."""
    thief, owner = await api.caller("thief"), await api.caller("owner")
    theirs, mine = await everything_of(api, owner), await everything_of(api, thief)
    events = f"/v1/sessions/{mine['session_id']}/events"
    image = {"type": "image", "source": {"type": "file", "file_id": theirs["file_id"]}}
    pictured = {"type": "user.message", "content": [image]}
    answer = {"type": "user.custom_tool_result", "custom_tool_use_id": theirs["prompt_id"]}

    await thief.post("/v1/sessions", {"agent": theirs["agent_id"]}, 404)
    await thief.post("/v1/sessions", {"agent": {"type": "agent", "id": theirs["agent_id"]}}, 404)
    overrides = {"type": "agent_with_overrides", "id": theirs["agent_id"], "system": "x"}
    await thief.post("/v1/sessions", {"agent": overrides}, 404)
    await thief.post("/v1/sessions", {"agent": mine["agent_id"], "initial_events": [pictured]}, 404)
    await thief.post(events, {"events": [pictured]}, 404)
    await thief.post(events, {"events": [answer]}, 404)
    short = f"/v1/agents/{mine['agent_id']}/prompt"
    await thief.post(short, {"prompt": "x", "session_id": theirs["session_id"]}, 404)
    await thief.post(short, {"prompt": [image]}, 404)


async def test_own_files_may_be_shown_to_the_model(api: ServedApi) -> None:
    me = await api.caller()
    mine = await everything_of(api, me)
    image = {"type": "image", "source": {"type": "file", "file_id": mine["file_id"]}}
    body = {"events": [{"type": "user.message", "content": [image]}]}
    [event] = (await me.post(f"/v1/sessions/{mine['session_id']}/events", body))["data"]
    assert event["content"] == [image]


async def test_lists_and_filters_only_narrow_what_is_ones_own(api: ServedApi) -> None:
    """S-01."""
    thief, owner = await api.caller("thief"), await api.caller("owner")
    theirs = await everything_of(api, owner)
    for path in ("/v1/agents", "/v1/sessions", "/v1/files"):
        assert (await thief.get(path))["data"] == []
    assert (await thief.get("/v1/sessions", params={"agent_id": theirs["agent_id"]}))["data"] == []
    page = (await owner.get("/v1/sessions", params={"limit": 1}))["next_page"]
    assert page is None


async def test_idempotency_keys_of_two_tenants_do_not_meet(api: ServedApi) -> None:
    one, other = await api.caller("one"), await api.caller("other")
    key = {"Idempotency-Key": "the-same"}
    mine = await one.post("/v1/agents", {"name": "a", "model": "rehearsal:demo"}, 201, headers=key)
    theirs = await other.post("/v1/agents", {"name": "a", "model": "rehearsal:demo"}, 201, headers=key)
    assert mine["id"] != theirs["id"]


async def test_key_that_may_only_read_changes_nothing(api: ServedApi) -> None:
    reader = await api.caller(scopes=("read",))
    for method, path in routes_with_ids():
        names = {name: new_id(PREFIXES[name]) for name in re.findall(r"{(\w+)}", path)}
        answer = await reader.http.request(method, path.format(**names), json=BODIES.get(path))
        assert answer.status_code == (404 if method == "GET" else 403), f"{method} {path}"


async def test_ids_of_another_kind_or_shape_are_unknown_not_broken(api: ServedApi) -> None:
    me = await api.caller()
    mine = await everything_of(api, me)
    swapped = {name: mine["run_id" if name == "session_id" else "session_id"] for name in mine}
    wrong = [
        swapped,
        dict.fromkeys(mine, "x"),
        dict.fromkeys(mine, "sess_" + "G" * 32),
        dict.fromkeys(mine, "0" * 5000),
        dict.fromkeys(mine, "%00"),
    ]
    for method, path in routes_with_ids():
        for names in wrong:
            answer = await me.http.request(method, path.format(**names), json=BODIES.get(path))
            assert answer.status_code == 404, f"{method} {path} {answer.text[:300]}"


PROMPT_PATH = "/v1/sessions/{session_id}/prompts/{prompt_id}"


async def _refusal(caller: Caller, method: str, path: str, ids: dict[str, str]) -> Any:
    """The answer, which must be 404, without what differs from request to request."""
    body = BODIES.get(path)
    answer = await caller.http.request(method, path.format(**ids), json=body)
    assert answer.status_code == 404, f"{method} {path}: {answer.status_code} {answer.text}"
    text = answer.text
    for public_id in ids.values():
        text = text.replace(public_id, "ID")
    problem = json.loads(text)
    del problem["request_id"]
    return problem


async def _contents(api: ServedApi, tenant_id: UUID) -> dict[str, list[str]]:
    """All rows of a tenant as text."""
    found = {}
    async with api.database.transaction() as tx:
        for table in TABLES:
            rows = await tx.fetch(
                f"SELECT t::text AS row FROM {table} t WHERE tenant_id = $1 ORDER BY 1",
                tenant_id,
            )
            found[table] = [row["row"] for row in rows]
    return found
