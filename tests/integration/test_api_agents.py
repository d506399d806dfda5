"""`/v1/agents`: made, read, changed by versions, listed, archived; and nobody else's."""

from collections.abc import AsyncIterator
from typing import Any
from uuid import uuid4

import pytest
from anthropic import AsyncAnthropic

from tests.support.served_api import ServedApi, served_api

SEARCH = {
    "type": "custom",
    "name": "search",
    "description": "Searches the shop.",
    "input_schema": {"type": "object", "properties": {"q": {"type": "string"}}},
}


@pytest.fixture
async def api(database_url: str, redis_url: str) -> AsyncIterator[ServedApi]:
    async with served_api(database_url, redis_url) as api:
        yield api


async def test_agent_is_read_back_as_it_was_made(api: ServedApi) -> None:
    me = await api.caller()
    given: dict[str, Any] = {
        "name": "Clerk",
        "model": {"id": "rehearsal:demo", "effort": 0.6, "speed": "standard"},
        "description": "Answers questions.",
        "system": "Be kind.",
        "tools": [{"type": "builtin", "name": "calculate"}, SEARCH],
        "metadata": {"team": "shop"},
        "max_turns": 7,
        "time_limit_s": 30.5,
        "wait_timeout_s": 86_400.0,
        "max_output_tokens": 500,
        "tool_execution": "sequential",
        "extra_body": {"top_k": 3},
    }
    made = await me.post("/v1/agents", given, 201)
    assert await me.get(f"/v1/agents/{made['id']}") == made
    assert made["version"] == 1
    assert made["type"] == "agent"
    assert made["model"] == {
        "id": "rehearsal:demo",
        "effort": {"type": "medium"},
        "think_effort": 0.6,
        "speed": "standard",
    }
    assert made["execution_identity"] == {"type": "service_account"}
    assert (made["skills"], made["mcp_servers"], made["multiagent"]) == ([], [], None)
    for name in set(given) - {"model"}:
        assert made[name] == given[name]


@pytest.mark.parametrize(
    ("effort", "number"),
    [("off", 0.0), ("max", 1.0), ({"type": "high"}, 0.75), (0.3, 0.3), (1, 1.0), (None, None)],
)
async def test_effort_is_taken_as_a_number_or_a_name(
    api: ServedApi, effort: Any, number: float | None
) -> None:
    me = await api.caller()
    made = await me.post(
        "/v1/agents", {"name": "a", "model": {"id": "rehearsal:demo", "effort": effort}}, 201
    )
    assert made["model"]["think_effort"] == number


async def test_update_adds_a_version_and_older_ones_stay_readable(api: ServedApi) -> None:
    me = await api.caller()
    agent = await me.agent(system="one", metadata={"a": "1", "b": "2"}, tools=[SEARCH], max_turns=5)
    path = f"/v1/agents/{agent}"
    updated = await me.post(path, {"metadata": {"a": None, "c": "3"}, "system": None, "version": 1})
    assert updated["version"] == 2
    assert updated["metadata"] == {"b": "2", "c": "3"}
    assert updated["system"] is None
    assert updated["tools"] == [SEARCH]
    cleared = await me.post(path, {"tools": None, "metadata": None, "max_turns": None})
    assert (cleared["version"], cleared["tools"], cleared["metadata"]) == (3, [], {})
    assert cleared["max_turns"] == 20
    assert (await me.get(f"{path}?version=1"))["system"] == "one"
    assert (await me.get(path))["version"] == 3
    await me.get(f"{path}?version=4", 404)


async def test_update_that_changes_nothing_adds_no_version(api: ServedApi) -> None:
    me = await api.caller()
    agent = await me.agent(system="same")
    assert (await me.post(f"/v1/agents/{agent}", {"system": "same"}))["version"] == 1


async def test_update_of_another_version_is_refused_and_not_worth_a_retry(api: ServedApi) -> None:
    me = await api.caller()
    agent = await me.agent()
    await me.post(f"/v1/agents/{agent}", {"system": "two"})
    answer = await me.http.post(f"/v1/agents/{agent}", json={"system": "three", "version": 1})
    assert (answer.status_code, answer.json()["code"]) == (409, "version_mismatch")
    assert answer.headers["x-should-retry"] == "false"
    assert (await me.get(f"/v1/agents/{agent}"))["system"] == "two"


async def test_versions_are_listed_newest_first_over_pages(api: ServedApi) -> None:
    me = await api.caller()
    agent = await me.agent()
    for number in range(4):
        await me.post(f"/v1/agents/{agent}", {"system": str(number)})
    seen, page = [], ""
    while True:
        found = await me.get(f"/v1/agents/{agent}/versions?limit=2{page}")
        seen += [version["version"] for version in found["data"]]
        if found["next_page"] is None:
            break
        page = f"&page={found['next_page']}"
    assert seen == [5, 4, 3, 2, 1]


async def test_list_has_each_agent_once_over_pages_and_hides_archived_ones(api: ServedApi) -> None:
    me = await api.caller()
    agents = [await me.agent(name=str(number)) for number in range(5)]
    archived = await me.post(f"/v1/agents/{agents[2]}/archive")
    assert archived["archived_at"] is not None
    first = await me.get("/v1/agents?limit=3")
    second = await me.get("/v1/agents", params={"limit": 3, "page": first["next_page"]})
    assert [agent["id"] for agent in first["data"] + second["data"]] == [
        agent for agent in reversed(agents) if agent != agents[2]
    ]
    assert second["next_page"] is None
    everything = await me.get("/v1/agents?include_archived=true")
    assert len(everything["data"]) == 5
    moment = everything["data"][1]["created_at"]
    later = await me.get("/v1/agents", params={"created_at[gte]": moment})
    assert [agent["id"] for agent in later["data"]] == [agents[4], agents[3]]
    earlier = await me.get("/v1/agents", params={"created_at[lt]": moment})
    assert [agent["id"] for agent in earlier["data"]] == [agents[1], agents[0]]


async def test_archived_agent_cannot_be_changed(api: ServedApi) -> None:
    me = await api.caller()
    agent = await me.agent()
    first = await me.post(f"/v1/agents/{agent}/archive")
    assert await me.post(f"/v1/agents/{agent}/archive") == first
    answer = await me.http.post(f"/v1/agents/{agent}", json={"system": "x"})
    assert (answer.status_code, answer.json()["code"]) == (409, "agent_archived")


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"model": "nobody:model"}, "model", "vendor:model"),
    ({"model": "no-such-model"}, "model", "vendor:model"),
    ({"model": {"id": "anthropic:claude-opus-5"}}, "model", "ARMILLARY_ANTHROPIC_API_KEY"),
    ({"model": {"id": "rehearsal:demo", "effort": 2}}, "model.effort", "1"),
    ({"model": {"id": "rehearsal:demo", "effort": "huge"}}, "model.effort", "huge"),
    ({"tools": [{"type": "builtin", "name": "teleport"}]}, "tools[0].name", "calculate"),
    ({"tools": [SEARCH, SEARCH]}, "tools[1].name", "two tools"),
    ({"tools": [{**SEARCH, "input_schema": {"type": "string"}}]}, "tools[0].input_schema", "object"),
    ({"tools": [{**SEARCH, "input_schema": {"type": "object", "required": 3}}]}, "tools[0].input_schema", ""),
    ({"tools": [{**SEARCH, "name": "has space"}]}, "tools[0].name", ""),
    ({"tools": [{"type": "other"}]}, "tools[0].type", "other"),
    ({"tools": [{"type": "agent_toolset_20260401"}]}, "tools[0]", "calculate"),
    ({"tools": [{"type": "mcp_toolset", "mcp_server_name": "x"}]}, "tools[0]", "MCP"),
    ({"mcp_servers": [{"type": "url", "name": "x", "url": "https://x"}]}, "mcp_servers", "not support"),
    ({"skills": [{"type": "custom", "skill_id": "x"}]}, "skills", "not support"),
    ({"multiagent": {"type": "coordinator"}}, "multiagent", "not support"),
    ({"execution_identity": {"type": "aws_role"}}, "execution_identity", "not support"),
    ({"max_turns": 0}, "max_turns", "1"),
    ({"max_turns": "3"}, "max_turns", "int"),
    ({"time_limit_s": -1}, "time_limit_s", "0"),
    ({"wait_timeout_s": 0}, "wait_timeout_s", "0"),
    ({"metadata": {"k": 1}}, "metadata[...]", "str"),
    ({"metadata": {str(number): "" for number in range(65)}}, "metadata", "64"),
    ({"name": "a\0b"}, "name", "NUL"),
    ({"temperature": 1}, "temperature", "no such field"),
]


@pytest.mark.parametrize(("fields", "field", "hint"), REFUSED)
async def test_agent_that_could_not_run_is_refused_with_what_to_write(
    api: ServedApi, fields: dict[str, Any], field: str, hint: str
) -> None:
    me = await api.caller()
    for path, body in (("/v1/agents", {"name": "a"} | fields), (f"/v1/agents/{await me.agent()}", fields)):
        answer = await me.http.post(path, json=body)
        assert answer.status_code == 422, answer.text
        assert answer.json().get("field") == field
        assert hint in answer.json()["detail"]


async def test_fallback_models_and_a_schema_are_kept_with_the_agent(api: ServedApi) -> None:
    me = await api.caller()
    agent = await me.agent(fallback_models=["rehearsal:small"])
    assert (await me.get(f"/v1/agents/{agent}"))["fallback_models"] == ["rehearsal:small"]
    for fields, field in (
        ({"fallback_models": ["rehearsal:demo", "acme:x"]}, "fallback_models[1]"),
        ({"output_schema": {"type": "array"}}, "output_schema"),
        ({"output_schema": {"type": "object"}}, "output_schema"),  # the rehearsal model takes none
    ):
        answer = await me.http.post(f"/v1/agents/{agent}", json=fields)
        assert (answer.status_code, answer.json().get("field")) == (422, field), answer.text
    cleared = await me.http.post(f"/v1/agents/{agent}", json={"fallback_models": None, "output_schema": None})
    assert (cleared.json()["fallback_models"], cleared.json()["output_schema"]) == ([], None)


async def test_empty_parts_that_do_not_work_yet_are_accepted(api: ServedApi) -> None:
    me = await api.caller()
    identity = {"type": "service_account"}
    await me.agent(skills=[], mcp_servers=[], multiagent=None, execution_identity=identity, tools=None)
    await me.agent(skills=None, mcp_servers=None, execution_identity=None, metadata=None)


async def test_name_and_model_cannot_be_cleared(api: ServedApi) -> None:
    me = await api.caller()
    agent = await me.agent()
    for body in ({"name": None}, {"name": ""}, {"model": None}):
        assert (await me.http.post(f"/v1/agents/{agent}", json=body)).status_code == 422


async def test_another_tenant_sees_and_changes_nothing(api: ServedApi) -> None:
    me, other = await api.caller(), await api.caller()
    mine = await me.agent(system="secret")
    before = await me.get(f"/v1/agents/{mine}")
    unknown = f"agent_{uuid4().hex}"
    for method, path in (
        ("GET", "/v1/agents/{}"),
        ("GET", "/v1/agents/{}?version=1"),
        ("GET", "/v1/agents/{}/versions"),
        ("POST", "/v1/agents/{}"),
        ("POST", "/v1/agents/{}/archive"),
    ):
        answers = [
            await other.http.request(method, path.format(agent), json={} if method == "POST" else None)
            for agent in (mine, unknown)
        ]
        assert [answer.status_code for answer in answers] == [404, 404]
        assert answers[0].json()["detail"].replace(mine, unknown) == answers[1].json()["detail"]
    assert (await other.get("/v1/agents?include_archived=true"))["data"] == []
    assert await me.get(f"/v1/agents/{mine}") == before


async def test_official_client_makes_reads_changes_and_lists_agents(api: ServedApi) -> None:
    me = await api.caller()
    async with AsyncAnthropic(api_key=me.key, base_url=api.url, _strict_response_validation=True) as client:
        made = await client.beta.agents.create(
            name="a",
            model={"id": "rehearsal:demo", "effort": "high"},
            system="s",
            tools=[SEARCH],  # type: ignore[list-item]
        )
        assert made.model.effort is not None
        assert made.model.effort.type == "high"
        updated = await client.beta.agents.update(made.id, version=made.version, metadata={"k": "v"})
        assert updated.metadata == {"k": "v"}
        assert (await client.beta.agents.retrieve(made.id, version=1)).metadata == {}
        assert [agent.id async for agent in client.beta.agents.list(limit=1)] == [made.id]
        versions = [agent.version async for agent in client.beta.agents.versions.list(made.id, limit=1)]
        assert versions == [2, 1]
        assert (await client.beta.agents.archive(made.id)).archived_at is not None
