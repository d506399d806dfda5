"""`Idempotency-Key`: a request sent twice has the effect of one."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from tests.support.served_api import ServedApi, served_api


@pytest.fixture
async def api(database_url: str, redis_url: str) -> AsyncIterator[ServedApi]:
    async with served_api(database_url, redis_url) as api:
        yield api


async def test_twenty_doubles_at_once_make_one_agent_and_get_the_same_answer(api: ServedApi) -> None:
    me = await api.caller()
    headers = {"idempotency-key": "k"}
    answers = await asyncio.gather(
        *(me.http.post("/v1/agents", json={"name": "a"}, headers=headers) for _ in range(20))
    )
    assert {answer.status_code for answer in answers} == {201}
    assert len({answer.content for answer in answers}) == 1
    assert len((await me.get("/v1/agents"))["data"]) == 1


async def test_twenty_doubles_of_an_update_add_one_version(api: ServedApi) -> None:
    me = await api.caller()
    agent = await me.agent()
    headers = {"idempotency-key": "k"}
    answers = await asyncio.gather(
        *(me.http.post(f"/v1/agents/{agent}", json={"system": "x"}, headers=headers) for _ in range(20))
    )
    assert {answer.json()["version"] for answer in answers} == {2}
    await me.post(f"/v1/agents/{agent}", {"system": "y"})
    late = await me.post(f"/v1/agents/{agent}", {"system": "x"}, headers=headers)
    assert (late["version"], late["system"]) == (2, "x")


async def test_key_used_for_another_request_is_refused(api: ServedApi) -> None:
    me = await api.caller()
    agent = await me.agent()
    headers = {"idempotency-key": "k"}
    await me.post("/v1/agents", {"name": "a"}, 201, headers=headers)
    for path, body in (("/v1/agents", {"name": "b"}), (f"/v1/agents/{agent}", {"name": "a"})):
        answer = await me.http.post(path, json=body, headers=headers)
        assert (answer.status_code, answer.json()["code"]) == (409, "idempotency_mismatch")
        assert answer.headers["x-should-retry"] == "false"


async def test_key_of_one_tenant_means_nothing_to_another(api: ServedApi) -> None:
    headers = {"idempotency-key": "k"}
    ids = {
        (await (await api.caller()).post("/v1/agents", {"name": "a"}, 201, headers=headers))["id"]
        for _ in range(2)
    }
    assert len(ids) == 2


async def test_refused_request_leaves_its_key_free(api: ServedApi) -> None:
    me = await api.caller()
    agent = await me.agent()
    headers = {"idempotency-key": "k"}
    await me.post(f"/v1/agents/{agent}", {"system": "x", "version": 9}, 409, headers=headers)
    await me.post(f"/v1/agents/{agent}", {"system": "x", "version": 1}, headers=headers)


async def test_key_is_free_again_when_its_time_is_over(api: ServedApi) -> None:
    me = await api.caller()
    headers = {"idempotency-key": "k"}
    first = await me.post("/v1/agents", {"name": "a"}, 201, headers=headers)
    async with api.database.transaction() as tx:
        await tx.execute("UPDATE idempotency_keys SET created_at = created_at - interval '25 hours'")
    second = await me.post("/v1/agents", {"name": "b"}, 201, headers=headers)
    assert second["id"] != first["id"]


@pytest.mark.parametrize("key", ["", "x" * 256, "a\tb"])
async def test_key_that_is_not_plain_is_refused(api: ServedApi, key: str) -> None:
    me = await api.caller()
    await me.post("/v1/agents", {"name": "a"}, 400, headers={"idempotency-key": key})


async def test_secret_of_a_new_key_is_shown_once_and_stored_nowhere(api: ServedApi) -> None:
    admin = await api.caller(scopes=("admin",))
    body = {"name": "k", "scopes": ["read"]}
    first = await admin.post("/v1/admin/keys", body, 201, headers={"idempotency-key": "k"})
    again = await admin.post("/v1/admin/keys", body, 201, headers={"idempotency-key": "k"})
    assert first["key"].startswith(first["hint"])
    assert again == first | {"key": None}
    async with api.database.transaction() as tx:
        rows = await tx.fetch(
            "SELECT k::text AS row FROM api_keys k UNION ALL SELECT i::text FROM idempotency_keys i"
        )
    assert not [row for row in rows if first["key"] in row["row"]]
