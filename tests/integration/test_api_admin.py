"""`/v1/admin`: tenants and keys, for the operator alone."""

import asyncio
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from typing import Any

import httpx
import pytest

from db.ids import public
from db.keys import create_key
from tests.support.served_api import Caller, ServedApi, served_api

PROMPT = {"events": [{"type": "user.message", "content": [{"type": "text", "text": "hello"}]}]}


@pytest.fixture
async def api(database_url: str, redis_url: str) -> AsyncIterator[ServedApi]:
    async with served_api(database_url, redis_url) as api:
        yield api


async def _status(api: ServedApi, key: str, path: str = "/v1/agents") -> int:
    async with httpx.AsyncClient(base_url=api.url, trust_env=False) as client:
        return (await client.get(path, headers={"authorization": f"Bearer {key}"})).status_code


async def _new_key(admin: Caller, **fields: Any) -> Any:
    return await admin.post("/v1/admin/keys", {"name": "k", "scopes": ["read"]} | fields, 201)


async def test_new_key_works_for_its_tenant_until_it_is_revoked(api: ServedApi) -> None:
    admin = await api.caller(scopes=("admin",))
    tenant = await admin.post("/v1/admin/tenants", {"name": "shop"}, 201)
    key = await _new_key(admin, tenant_id=tenant["id"])
    assert key["tenant_id"] == tenant["id"]
    assert await _status(api, key["key"]) == 200
    revoked = await admin.post(f"/v1/admin/keys/{key['id']}/revoke")
    assert revoked["revoked_at"] is not None
    assert await _status(api, key["key"]) == 401
    assert await admin.post(f"/v1/admin/keys/{key['id']}/revoke") == revoked


async def test_text_of_a_key_is_in_no_later_answer(api: ServedApi) -> None:
    admin = await api.caller(scopes=("admin",))
    key = await _new_key(admin)
    for path in (f"/v1/admin/keys/{key['id']}", "/v1/admin/keys"):
        assert key["key"] not in (await admin.http.get(path)).text


async def test_archived_tenant_is_locked_out_at_once(api: ServedApi) -> None:
    admin = await api.caller(scopes=("admin",))
    tenant = await admin.post("/v1/admin/tenants", {"name": "shop"}, 201)
    key = await _new_key(admin, tenant_id=tenant["id"])
    archived = await admin.post(f"/v1/admin/tenants/{tenant['id']}/archive")
    assert archived["archived_at"] is not None
    assert await _status(api, key["key"]) == 401
    listed = [entry["id"] for entry in (await admin.get("/v1/admin/tenants"))["data"]]
    assert tenant["id"] not in listed
    assert await admin.get(f"/v1/admin/tenants/{tenant['id']}") == archived


async def test_tenant_names_are_taken_once(api: ServedApi) -> None:
    admin = await api.caller(scopes=("admin",))
    answers = await asyncio.gather(
        *(admin.http.post("/v1/admin/tenants", json={"name": "shop"}) for _ in range(5))
    )
    assert sorted(answer.status_code for answer in answers) == [201, 409, 409, 409, 409]


async def test_keys_of_one_tenant_are_listed_over_pages(api: ServedApi) -> None:
    admin = await api.caller(scopes=("admin",))
    tenant = await admin.post("/v1/admin/tenants", {"name": "shop"}, 201)
    made = [(await _new_key(admin, tenant_id=tenant["id"]))["id"] for _ in range(3)]
    first = await admin.get("/v1/admin/keys", params={"tenant_id": tenant["id"], "limit": 2})
    query = {"tenant_id": tenant["id"], "page": first["next_page"]}
    second = await admin.get("/v1/admin/keys", params=query)
    assert [key["id"] for key in first["data"] + second["data"]] == made[::-1]


@pytest.mark.parametrize(
    ("fields", "status"),
    [
        ({"scopes": []}, 422),
        ({"scopes": ["root"]}, 422),
        ({"scopes": "read"}, 422),
        ({"name": "a\0"}, 422),
        ({"tenant_id": f"ten_{'0' * 32}"}, 404),
        ({"tenant_id": "shop"}, 404),
        ({"expires_at": "2020-01-01T00:00:00Z"}, 422),
        ({"expires_at": "2090-01-01T00:00:00"}, 422),
        ({"expires_at": "9999-12-31T23:59:59-12:00"}, 422),
        ({"sha256": "x"}, 422),
    ],
)
async def test_key_that_makes_no_sense_is_refused(
    api: ServedApi, fields: dict[str, Any], status: int
) -> None:
    admin = await api.caller(scopes=("admin",))
    await admin.post("/v1/admin/keys", {"name": "k", "scopes": ["read"]} | fields, status)


async def test_bounds_of_a_tenant_and_of_a_key_are_changed_and_taken_away(api: ServedApi) -> None:
    admin = await api.caller(scopes=("admin",))
    tenant = await admin.post("/v1/admin/tenants", {"name": "bounded", "max_running_runs": 3}, 201)
    assert (tenant["max_running_runs"], tenant["max_queued_runs"]) == (3, None)
    path = f"/v1/admin/tenants/{tenant['id']}"
    changed = await admin.post(path, {"max_queued_runs": 5})
    assert (changed["max_running_runs"], changed["max_queued_runs"]) == (3, 5)
    changed = await admin.post(path, {"max_running_runs": None})
    assert (changed["max_running_runs"], changed["max_queued_runs"]) == (None, 5)
    assert await admin.get(path) == changed

    key = await _new_key(admin, max_running_runs=2)
    assert key["max_running_runs"] == 2
    path = f"/v1/admin/keys/{key['id']}"
    assert (await admin.post(path, {"max_running_runs": None}))["max_running_runs"] is None
    await admin.post(path, {"max_running_runs": 0}, 422)
    await admin.post(f"/v1/admin/keys/key_{'0' * 32}", {"max_running_runs": 1}, 404)


async def test_prompt_beyond_the_depth_of_the_queue_is_told_to_come_back(api: ServedApi) -> None:
    admin, me = await api.caller(scopes=("admin",)), await api.caller()
    await admin.post(f"/v1/admin/tenants/{public('ten', me.tenant_id)}", {"max_queued_runs": 2})
    sessions = [await me.session() for _ in range(3)]
    for session in sessions[:2]:
        await me.post(f"/v1/sessions/{session}/events", PROMPT)
    for place, session in enumerate(sessions[:2], start=1):
        (run,) = (await me.get(f"/v1/sessions/{session}/runs"))["data"]
        assert (await me.get(f"/v1/runs/{run['id']}"))["queue_position"] == place
    answer = await me.http.post(f"/v1/sessions/{sessions[2]}/events", json=PROMPT)
    problem = answer.json()
    assert (answer.status_code, problem["code"], problem["queue_depth"]) == (429, "queue_full", 2)
    assert problem["error"]["type"] == "rate_limit_error"
    assert 1 <= int(answer.headers["retry-after"]) <= 60
    assert (await me.get(f"/v1/sessions/{sessions[2]}/events"))["data"] == []  # nothing was stored
    # What waits in a session has a bound of its own, and other tenants are not concerned.
    await me.post(f"/v1/sessions/{sessions[0]}/events", PROMPT)
    other = await api.caller()
    await other.post(f"/v1/sessions/{await other.session()}/events", PROMPT)


async def test_prompts_that_wait_in_one_session_are_bounded(database_url: str, redis_url: str) -> None:
    async with served_api(database_url, redis_url, max_pending_prompts=3) as api:
        me = await api.caller()
        session = await me.session()
        for _ in range(3):
            await me.post(f"/v1/sessions/{session}/events", PROMPT)
        answer = await me.http.post(f"/v1/sessions/{session}/events", json=PROMPT)
        assert (answer.status_code, answer.json()["code"]) == (429, "queue_full")
        (pending, *_) = (await me.get(f"/v1/sessions/{session}/prompts?states=pending&order=desc"))["data"]
        assert (await me.http.delete(f"/v1/sessions/{session}/prompts/{pending['id']}")).status_code == 200
        await me.post(f"/v1/sessions/{session}/events", PROMPT)


async def test_expiry_is_kept(api: ServedApi) -> None:
    admin = await api.caller(scopes=("admin",))
    moment = datetime.now(UTC) + timedelta(days=1)
    key = await _new_key(admin, expires_at=moment.isoformat())
    assert datetime.fromisoformat(key["expires_at"]) == moment
    assert await _status(api, key["key"]) == 200


async def test_token_of_a_session_opens_that_session_and_nothing_else(api: ServedApi) -> None:
    """S-03: what a browser may put into a URL."""
    me = await api.caller()
    mine, other = await me.session(), await me.session()
    async with api.database.transaction() as tx:
        session = await tx.fetchrow(
            "SELECT id, tenant_id FROM sessions WHERE id = $1::text::uuid", mine[-32:]
        )
        assert session is not None
        _, token = await create_key(
            tx, tenant_id=me.tenant_id, name="browser", scopes=("read",), session_id=session["id"]
        )
    assert await _status(api, token, f"/v1/sessions/{mine}") == 200
    assert await _status(api, token, f"/v1/sessions/{other}") == 404
    for path in ("/v1/agents", "/v1/files", "/v1/sessions", "/v1/admin/keys"):
        assert await _status(api, token, path) == 403
    async with httpx.AsyncClient(base_url=api.url, trust_env=False) as browser:
        assert (await browser.get(f"/v1/sessions/{mine}", params={"token": token})).status_code == 200
        cookies = {"cookie": f"armillary_token={token}"}
        assert (await browser.get(f"/v1/sessions/{mine}", headers=cookies)).status_code == 200
        assert (await browser.get(f"/v1/sessions/{mine}", params={"token": me.key})).status_code == 401
        cookies = {"cookie": f"armillary_token={me.key}"}
        assert (await browser.get(f"/v1/sessions/{mine}", headers=cookies)).status_code == 401


async def test_catalogue_lists_models_tools_and_skills(api: ServedApi) -> None:
    me = await api.caller(scopes=("read",))
    models = {model["id"]: model for model in (await me.get("/v1/models"))["data"]}
    assert models["rehearsal:demo"]["is_configured"] is True
    assert "calculate" in [tool["name"] for tool in (await me.get("/v1/tools"))["data"]]
    assert (await me.get("/v1/skills"))["data"] == []
