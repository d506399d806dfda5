"""Sessions over HTTP: made, read, listed, changed, archived, deleted. Nothing here needs a worker."""

from collections.abc import AsyncIterator
from typing import Any

import pytest

from db.ids import to_uuid
from tests.support.served_api import Caller, ServedApi, prompt, served_api

CLIENT_TOOL = {
    "type": "custom",
    "name": "ask",
    "description": "Asks the user.",
    "input_schema": {"type": "object", "properties": {"q": {"type": "string"}}},
}


@pytest.fixture
async def api(database_url: str, redis_url: str) -> AsyncIterator[ServedApi]:
    async with served_api(database_url, redis_url) as api:
        yield api


async def test_session_shows_its_agent_and_begins_idle_with_nothing_used(api: ServedApi) -> None:
    me = await api.caller()
    agent = await me.agent(system="Be brief.", tools=[CLIENT_TOOL])
    body = {
        "agent": {"type": "agent", "id": agent, "version": 1},
        "title": "Hello",
        "environment_id": "env_anything",
        "end_user_id": "user-7",
        "metadata": {"team": "blue"},
    }

    session = await me.post("/v1/sessions", body, 201)

    assert session["type"] == "session"
    assert session["status"] == "idle"
    assert session["agent"]["id"] == agent
    assert session["agent"]["version"] == 1
    assert session["agent"]["system"] == "Be brief."
    assert session["agent"]["tools"] == [CLIENT_TOOL]
    assert session["environment_id"] == "env_anything"
    assert session["end_user_id"] == "user-7"
    assert session["metadata"] == {"team": "blue"}
    assert session["usage"]["input_tokens"] == session["usage"]["output_tokens"] == 0
    assert session["last_seq"] == 0
    assert (await me.get(f"/v1/sessions/{session['id']}"))["id"] == session["id"]


async def test_session_pins_the_newest_version_of_its_agent_when_it_names_none(api: ServedApi) -> None:
    me = await api.caller()
    agent = await me.agent(system="one")
    before = await me.session(agent)
    await me.post(f"/v1/agents/{agent}", {"system": "two"})
    after = await me.session(agent)

    assert (await me.get(f"/v1/sessions/{before}"))["agent"]["system"] == "one"
    assert (await me.get(f"/v1/sessions/{after}"))["agent"]["system"] == "two"


async def test_overrides_replace_what_they_name_and_leave_the_agent_alone(api: ServedApi) -> None:
    me = await api.caller()
    agent = await me.agent(system="agent's", description="kept", tools=[CLIENT_TOOL])
    changes: dict[str, Any] = {"system": None, "tools": [], "model": "rehearsal:x"}
    overrides = {"type": "agent_with_overrides", "id": agent} | changes

    session = await me.post("/v1/sessions", {"agent": overrides}, 201)

    assert session["agent"]["system"] is None
    assert session["agent"]["tools"] == []
    assert session["agent"]["model"]["id"] == "rehearsal:x"
    assert session["agent"]["description"] == "kept"
    assert (await me.get(f"/v1/agents/{agent}"))["system"] == "agent's"


async def test_initial_events_start_a_run_with_the_session(api: ServedApi) -> None:
    me = await api.caller()
    body = {"agent": await me.agent(), "initial_events": [prompt("one"), prompt("two")]}

    session = await me.post("/v1/sessions", body, 201)

    assert session["status"] == "running"
    assert session["last_seq"] == 2
    runs = (await me.get(f"/v1/sessions/{session['id']}/runs"))["data"]
    assert [run["state"] for run in runs] == ["queued"]
    assert len(runs[0]["prompt_ids"]) == 2


@pytest.mark.parametrize(
    ("change", "code", "field"),
    [
        ({"resources": [{"type": "file", "file_id": "x"}]}, "not_available", "resources"),
        ({"vault_ids": ["vlt_1"]}, "not_available", "vault_ids"),
        ({"budget": {"max_list_cost": 1}}, "not_available", "budget"),
        ({"messages": [{"role": "user"}]}, "not_available", "messages"),
        ({"initial_events": [{"type": "user.interrupt"}]}, "invalid_field", "initial_events[0].type"),
        ({"initial_events": [{"type": "user.define_outcome"}]}, "not_available", "initial_events[0].type"),
        ({"metadata": {"a": 1}}, "invalid_field", "metadata[...]"),
        ({"titel": "x"}, "invalid_field", "titel"),
        ({"title": "a\x00b"}, "invalid_field", "title"),
    ],
)
async def test_what_a_session_cannot_have_is_refused_by_name(
    api: ServedApi, change: dict[str, Any], code: str, field: str
) -> None:
    me = await api.caller()
    problem = await me.post("/v1/sessions", {"agent": await me.agent()} | change, 422)
    assert (problem["code"], problem["field"]) == (code, field)
    assert (await me.get("/v1/sessions"))["data"] == []


async def test_empty_lists_that_official_clients_send_are_accepted(api: ServedApi) -> None:
    me = await api.caller()
    body = {"agent": await me.agent(), "resources": [], "vault_ids": [], "environment_id": "env"}
    assert (await me.post("/v1/sessions", body, 201))["vault_ids"] == []


async def test_archived_agents_and_unknown_versions_make_no_session(api: ServedApi) -> None:
    me = await api.caller()
    agent = await me.agent()
    await me.post("/v1/sessions", {"agent": {"type": "agent", "id": agent, "version": 9}}, 404)
    await me.post(f"/v1/agents/{agent}/archive")
    assert (await me.post("/v1/sessions", {"agent": agent}, 409))["code"] == "agent_archived"


async def test_update_patches_metadata_and_logs_only_what_changed(api: ServedApi) -> None:
    me = await api.caller()
    session = await me.session(title="old", metadata={"a": "1", "b": "2"})

    changed = await me.post(f"/v1/sessions/{session}", {"title": "new", "metadata": {"a": None, "c": "3"}})
    await me.post(f"/v1/sessions/{session}", {"title": "new"})

    assert changed["title"] == "new"
    assert changed["metadata"] == {"b": "2", "c": "3"}
    events = (await me.get(f"/v1/sessions/{session}/events"))["data"]
    assert [event["type"] for event in events] == ["session.updated"]
    assert events[0]["changes"] == {"title": "new", "metadata": {"b": "2", "c": "3"}}


async def test_update_refuses_what_it_cannot_change_yet(api: ServedApi) -> None:
    me = await api.caller()
    session = await me.session()
    problem = await me.post(f"/v1/sessions/{session}", {"agent": {"tools": [CLIENT_TOOL]}}, 422)
    assert (problem["code"], problem["field"]) == ("not_available", "agent")


async def test_archived_session_is_terminated_once_and_takes_nothing_more(api: ServedApi) -> None:
    me = await api.caller()
    session = await me.session()

    await me.post(f"/v1/sessions/{session}/archive")
    again = await me.post(f"/v1/sessions/{session}/archive")

    assert again["status"] == "terminated"
    events = (await me.get(f"/v1/sessions/{session}/events"))["data"]
    assert [event["type"] for event in events] == ["session.status_terminated"]
    problem = await me.post(f"/v1/sessions/{session}/events", {"events": [prompt("more")]}, 409)
    assert problem["code"] == "session_archived"
    assert (await me.post(f"/v1/sessions/{session}", {"title": "x"}, 409))["code"] == "session_archived"


async def test_open_run_keeps_its_session_from_being_archived_or_deleted(api: ServedApi) -> None:
    me = await api.caller()
    session = await me.session()
    event = (await me.say(session, "hello"))[0]

    assert (await me.post(f"/v1/sessions/{session}/archive", None, 409))["code"] == "run_open"
    assert (await me.delete(f"/v1/sessions/{session}", 409))["code"] == "run_open"
    await me.post(f"/v1/runs/{event['run_id']}/cancel")
    assert await me.delete(f"/v1/sessions/{session}") == {"id": session, "type": "session_deleted"}

    for path in ("", "/events", "/messages", "/prompts", "/runs", "/usage", "/memories"):
        await me.get(f"/v1/sessions/{session}{path}", 404)
    await me.get(f"/v1/runs/{event['run_id']}", 404)


async def test_deleting_a_session_keeps_its_ledger(api: ServedApi) -> None:
    me = await api.caller()
    session = await me.session()
    async with api.database.transaction() as tx:
        await tx.execute(
            """
            INSERT INTO usage_entries (id, tenant_id, agent_id, session_id, run_id, turn, epoch, purpose,
                provider, model, state)
            SELECT gen_random_uuid(), tenant_id, agent_id, id, gen_random_uuid(), 1, 1, 'main',
                'rehearsal', 'demo', 'closed' FROM sessions WHERE id = $1
            """,
            to_uuid(session),
        )
    await me.delete(f"/v1/sessions/{session}")
    async with api.database.transaction() as tx:
        kept = await tx.fetchval("SELECT count(*) FROM usage_entries WHERE session_id = $1", to_uuid(session))
    assert kept == 1


async def test_pages_of_sessions_neither_repeat_nor_skip_when_others_come_in_between(api: ServedApi) -> None:
    me = await api.caller()
    agent = await me.agent()
    made = [await me.session(agent) for _ in range(5)]

    first = await me.get("/v1/sessions", params={"limit": 2})
    await me.session(agent)
    rest = await _all_pages(me, "/v1/sessions", limit=2, page=first["next_page"])

    assert [row["id"] for row in [*first["data"], *rest]] == made[::-1]
    ascending = await _all_pages(me, "/v1/sessions", limit=2, order="asc")
    assert [row["id"] for row in ascending][:5] == made


async def test_list_filters_by_agent_status_user_time_and_archive(api: ServedApi) -> None:
    me = await api.caller()
    one, other = await me.agent(), await me.agent()
    idle = await me.session(one, end_user_id="ann")
    busy = await me.session(other)
    await me.say(busy, "hello")
    archived = await me.session(one)
    await me.post(f"/v1/sessions/{archived}/archive")

    async def ids(**query: Any) -> set[str]:
        return {row["id"] for row in (await me.get("/v1/sessions", params=query))["data"]}

    assert await ids() == {idle, busy}
    assert await ids(include_archived=True) == {idle, busy, archived}
    assert await ids(agent_id=one) == {idle}
    assert await ids(agent_id=one, agent_version=2) == set()
    assert await ids(end_user_id="ann") == {idle}
    assert await ids(**{"statuses[]": ["running", "rescheduling"]}) == {busy}
    assert await ids(statuses=["idle", "terminated"]) == {idle, archived}
    made_at = (await me.get(f"/v1/sessions/{busy}"))["created_at"]
    assert await ids(**{"created_at[gte]": made_at}) == {busy}
    assert await ids(**{"created_at[lt]": made_at}) == {idle}


@pytest.mark.parametrize(
    "query",
    ["page=garbage", "limit=0", "limit=1001", "order=up", "statuses=busy", "created_at[gt]=yesterday"],
)
async def test_parameters_that_cannot_be_read_are_refused_by_name(api: ServedApi, query: str) -> None:
    me = await api.caller()
    problem = await me.get(f"/v1/sessions?{query}", 400)
    assert problem["code"] == "invalid_request"
    assert problem["field"] == query.partition("=")[0]


async def test_repeated_creation_with_one_key_makes_one_session(api: ServedApi) -> None:
    me = await api.caller()
    body = {"agent": await me.agent(), "initial_events": [prompt("once")]}
    key = {"Idempotency-Key": "create-1"}

    first = await me.post("/v1/sessions", body, 201, headers=key)
    second = await me.post("/v1/sessions", body, 201, headers=key)
    other = await me.post("/v1/sessions", body | {"title": "other"}, 409, headers=key)

    assert second["id"] == first["id"]
    assert second["last_seq"] == 1
    assert other["code"] == "idempotency_mismatch"
    assert len((await me.get("/v1/sessions"))["data"]) == 1


async def _all_pages(me: Caller, path: str, **query: Any) -> list[Any]:
    rows: list[Any] = []
    while True:
        page = await me.get(path, params={name: value for name, value in query.items() if value is not None})
        rows += page["data"]
        if page["next_page"] is None:
            return rows
        query["page"] = page["next_page"]
