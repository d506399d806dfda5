"""No route of the document shows or changes what another tenant has."""

import json
import re
from collections.abc import AsyncIterator, Iterator
from typing import Any
from uuid import uuid4

import pytest

from app.openapi import document
from tests.support.served_api import Caller, ServedApi, served_api

_PREFIXES = {
    "agent_id": "agent",
    "session_id": "sess",
    "run_id": "run",
    "file_id": "file",
    "prompt_id": "evt",
    "memory_id": "mem",
}


@pytest.fixture
async def api(database_url: str, redis_url: str) -> AsyncIterator[ServedApi]:
    async with served_api(database_url, redis_url) as api:
        yield api


def _routes() -> Iterator[tuple[str, str, Any]]:
    """Method, path and operation of each route that names something in its path."""
    for path, operations in json.loads(document())["paths"].items():
        if "{" in path and not path.startswith("/v1/admin"):
            for method, operation in operations.items():
                yield method.upper(), path, operation


async def _own(api: ServedApi, caller: Caller) -> dict[str, str]:
    """One of everything."""
    agent = await caller.agent(system="secret")
    session = await caller.session(agent)
    prompt = (await caller.say(session, "secret"))[0]["id"]
    run = (await caller.get(f"/v1/sessions/{session}/runs"))["data"][0]["id"]
    file = (await caller.call("POST", "/v1/files", 201, content=b"secret"))["id"]
    return {
        "agent_id": agent,
        "session_id": session,
        "run_id": run,
        "file_id": file,
        "prompt_id": prompt,
        "memory_id": await api.new_memory(caller, session),
    }


def _body(path: str) -> Any:
    """A body that the route would take from the owner."""
    prompt = {"type": "user.message", "content": [{"type": "text", "text": "mine"}]}
    if path.endswith("/events"):
        return {"events": [prompt]}
    if path.endswith("/prompt"):
        return {"prompt": "mine"}
    if "/prompts/" in path:
        return {"content": prompt["content"]}
    return {}


async def _everything(caller: Caller, own: dict[str, str]) -> list[str]:
    """What the owner sees, as text."""
    session = own["session_id"]
    paths = (
        f"/v1/agents/{own['agent_id']}/versions",
        f"/v1/sessions/{session}/events",
        f"/v1/sessions/{session}/prompts",
        f"/v1/runs/{own['run_id']}",
        f"/v1/files/{own['file_id']}/content",
        "/v1/sessions?include_archived=true",
    )
    answers = [(await caller.http.get(path)).text for path in paths]
    return [
        re.sub(r'"(active_seconds|duration_seconds|active_s|duration_s)":[0-9.e-]+', "", text)
        for text in answers
    ]


async def test_ids_of_another_tenant_are_like_ids_that_do_not_exist(api: ServedApi) -> None:
    """S-01: for every route of the OpenAPI document."""
    owner, stranger = await api.caller(), await api.caller()
    own = await _own(api, owner)
    unknown = {name: f"{_PREFIXES[name]}_{uuid4().hex}" for name in own}
    before = await _everything(owner, own)
    tried = 0
    for method, path, operation in _routes():
        names = re.findall(r"{(\w+)}", path)
        assert set(names) <= set(own), f"tell this test what {path} names"
        answers = []
        for ids in (own, unknown):
            options = {"json": _body(path)} if "requestBody" in operation else {}
            answers.append(await stranger.http.request(method, path.format(**ids), **options))
        assert [answer.status_code for answer in answers] == [404, 404], f"{method} {path}: {answers[0].text}"
        texts = [answer.json()["detail"] for answer in answers]
        for name in names:
            texts[0] = texts[0].replace(own[name], unknown[name])
        assert texts[0] == texts[1]
        tried += 1
    assert tried > 20
    assert await _everything(owner, own) == before
