"""The served OpenAPI document against the server: what it describes is what is answered, whatever is sent."""

import asyncio
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

import httpx
import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, settings
from schemathesis.checks import not_a_server_error
from schemathesis.generation.case import Case
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from app.openapi import document
from db.engine import Database
from db.keys import create_key
from db.tenants import create_tenant
from tests.support.fleet import Fleet

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
]
EXAMPLES = 4
READ_S = 20
LONGEST_WAIT_S = 0.2  # of requests that wait for a run; by themselves they may wait for ten minutes


@dataclass
class Caller:
    """An admin, and one of everything that a path can name. Another tenant is there to be archived."""

    http: httpx.Client
    session: requests.Session  # what schemathesis sends with
    ids: dict[str, str] = field(default_factory=dict)

    def post(self, path: str, body: Any) -> Any:
        answer = self.http.post(path, json=body)
        assert answer.is_success, answer.text
        return answer.json()

    def renew(self) -> None:
        """Makes everything anew, idle, with a run behind it and a prompt that was taken up."""
        agent = self.post("/v1/agents", {"name": "fuzzed", "model": "rehearsal:fast"})["id"]
        said = {"role": "user", "content": [{"type": "text", "text": "Hello."}]}
        state = {"messages": [said], "memories": [{"position": 1, "text": "notes", "is_in_effect": True}]}
        session = self.post("/v1/sessions/import", {"agent": agent, "state": state})["id"]
        memories = self.http.get(f"/v1/sessions/{session}/memories").json()["data"]
        answer = self.post(f"/v1/agents/{agent}/prompt", {"prompt": "Say hello.", "session_id": session})
        tenant = self.post("/v1/admin/tenants", {"name": f"other {uuid4()}"})["id"]
        key = self.post("/v1/admin/keys", {"name": "other", "scopes": ["read"], "tenant_id": tenant})
        self.ids = {
            "agent_id": agent,
            "session_id": answer["session_id"],
            "run_id": answer["run_id"],
            "prompt_id": answer["prompt_id"],
            "memory_id": memories[0]["id"],
            "file_id": self.http.post("/v1/files", content=b"a file").json()["id"],
            "tenant_id": tenant,
            "key_id": key["id"],
        }


@pytest.fixture(scope="module")
def caller(fleet: Fleet) -> Iterator[Caller]:
    asyncio.run(fleet.ready())
    headers = {"authorization": f"Bearer {asyncio.run(_admin_key(fleet.database_url))}"}
    url = fleet.members["api 1"].url
    with (
        httpx.Client(base_url=url, headers=headers, timeout=READ_S, trust_env=False) as http,
        requests.Session() as session,
    ):
        caller = Caller(http, session)
        caller.renew()
        yield caller


async def _admin_key(database_url: str) -> str:
    database = Database.open(database_url, pool_size=1)
    try:
        async with database.transaction() as tx:
            tenant = await create_tenant(tx, name=f"fuzzed {uuid4()}")
            _, key = await create_key(tx, tenant_id=tenant.id, name="fuzzed", scopes=("admin",))
    finally:
        await database.close()
    return key


# Methods that a path does not have are for test_api_requests.
CONFIG = schemathesis.Config.from_dict({"phases": {"coverage": {"unexpected-methods": []}}})
described = schemathesis.openapi.from_dict(json.loads(document()), config=CONFIG)


def test_the_document_is_served(caller: Caller) -> None:
    assert caller.http.get("/openapi.json").content == document()


@described.parametrize()
@settings(
    max_examples=EXAMPLES,
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
def test_every_operation_answers_as_the_document_says(case: Case[Any], caller: Caller) -> None:
    _aim(case, caller)
    case.call_and_validate(
        base_url=str(caller.http.base_url),
        headers={"authorization": caller.http.headers["authorization"]},
        checks=CHECKS,
        session=caller.session,
        timeout=READ_S,
    )
    if case.method == "DELETE" or case.path.endswith(("/archive", "/revoke")):
        caller.renew()


def _aim(case: Case[Any], caller: Caller) -> None:
    """Lets most cases hit something, and none wait or read for ever."""
    for name in case.path_parameters or {}:
        case.path_parameters[name] = caller.ids[name]
    if case.path.endswith("/events/stream"):
        # Without it a stream has no end.
        case.query = {**(case.query or {}), "until": "idle"}
    if case.path.endswith("/wait"):
        case.query = {**(case.query or {}), "timeout_s": LONGEST_WAIT_S}
    if isinstance(case.body, dict):
        if isinstance(case.body.get("agent"), str):
            case.body["agent"] = caller.ids["agent_id"]
        if case.path.endswith("/prompt"):
            case.body["wait_s"] = LONGEST_WAIT_S
