"""What holds for every request: keys, errors, bodies, ids."""

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from typing import Any
from urllib.parse import urlsplit
from uuid import uuid4

import httpx
import pytest

from app.telemetry import JsonFormatter
from db.keys import create_key
from tests.support.served_api import Caller, ServedApi, served_api

LIMIT_BYTES = 64 << 10


@pytest.fixture
async def api(database_url: str, redis_url: str) -> AsyncIterator[ServedApi]:
    async with served_api(database_url, redis_url, request_body_limit_bytes=LIMIT_BYTES) as api:
        yield api


def _problem(answer: httpx.Response, status: int, code: str) -> Any:
    """The checked problem document of an answer."""
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/problem+json"
    problem = answer.json()
    assert problem["status"] == status
    assert problem["code"] == code
    assert problem["request_id"] == answer.headers["x-request-id"]
    assert problem["error"]["message"] == problem["detail"]
    return problem


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"authorization": "Bearer"},
        {"authorization": "Bearer arm_unknown"},
        {"authorization": "Basic abc"},
        {"x-api-key": "arm_unknown"},
        {"x-api-key": "x" * 5000},
    ],
)
async def test_request_without_a_known_key_is_refused_before_its_body_is_read(
    api: ServedApi, headers: dict[str, str]
) -> None:
    async with httpx.AsyncClient(base_url=api.url, trust_env=False) as client:
        answer = await client.post(
            "/v1/agents", content=b"{" * 100, headers={"content-type": "application/json"} | headers
        )
    problem = _problem(answer, 401, "not_authenticated")
    assert problem["error"]["type"] == "authentication_error"
    assert answer.headers["www-authenticate"] == "Bearer"


async def test_key_is_taken_from_either_header(api: ServedApi) -> None:
    me = await api.caller()
    async with httpx.AsyncClient(base_url=api.url, trust_env=False) as client:
        for headers in ({"authorization": f"bearer {me.key}"}, {"x-api-key": me.key}):
            assert (await client.get("/v1/agents", headers=headers)).status_code == 200


async def test_key_may_do_no_more_than_its_scopes(api: ServedApi) -> None:
    reader = await api.caller(scopes=("read",))
    writer = await api.caller(scopes=("write",))
    assert (await reader.http.get("/v1/agents")).status_code == 200
    _problem(await reader.http.post("/v1/agents", json={"name": "a"}), 403, "scope_missing")
    assert (await writer.http.get("/v1/agents")).status_code == 200
    for path in ("/v1/admin/keys", "/v1/admin/tenants", "/metrics"):
        _problem(await writer.http.get(path), 403, "scope_missing")


async def test_expired_key_opens_nothing(api: ServedApi) -> None:
    me = await api.caller()
    async with api.database.transaction() as tx:
        _, key = await create_key(
            tx,
            tenant_id=me.tenant_id,
            name="old",
            scopes=("read",),
            expires_at=datetime.now(UTC) - timedelta(seconds=1),
        )
    answer = await me.http.get("/v1/agents", headers={"authorization": f"Bearer {key}"})
    _problem(answer, 401, "not_authenticated")


async def test_key_in_a_url_is_refused_and_no_key_is_ever_logged(
    api: ServedApi, caplog: pytest.LogCaptureFixture
) -> None:
    """S-03."""
    me = await api.caller()
    # Not the client's own lines, nor those of a logger that the server has silenced and pytest listens to.
    for name in ("httpx", "httpcore", "uvicorn.access"):
        caplog.set_level(logging.WARNING, logger=name)
    caplog.set_level(logging.DEBUG)
    caplog.handler.setFormatter(JsonFormatter())
    for name in ("api_key", "token", "x-api-key", "anything"):
        for headers in ({}, {"authorization": "none"}):
            answer = await me.http.get("/v1/agents", params={name: me.key}, headers=headers)
            _problem(answer, 401, "not_authenticated")
            assert me.key not in answer.text
    await me.http.get(f"/v1/agents/{me.key}")
    await me.http.get(f"/{me.key}")
    answer = await me.http.get("/v1/agents", headers={"x-request-id": me.key})
    assert answer.status_code == 200
    assert "/v1/agents" in caplog.text
    assert me.key not in caplog.text


async def test_each_request_has_one_log_line_that_names_the_caller(
    api: ServedApi, caplog: pytest.LogCaptureFixture
) -> None:
    me = await api.caller()
    caplog.set_level(logging.INFO, logger="armillary.access")
    answer = await me.http.get("/v1/agents?limit=3", headers={"x-request-id": "mine-1"})
    lines = [json.loads(JsonFormatter().format(record)) for record in caplog.records]
    mine = [line for line in lines if line.get("request_id") == "mine-1"]
    assert answer.headers["x-request-id"] == "mine-1"
    assert len(mine) == 1
    assert mine[0]["path"] == "/v1/agents"
    assert mine[0]["status"] == 200
    assert mine[0]["tenant_id"] == f"ten_{me.tenant_id.hex}"


@pytest.mark.parametrize("given", ["a b", "x" * 200, "<script>"])
async def test_request_id_that_is_not_plain_is_replaced(api: ServedApi, given: str) -> None:
    me = await api.caller()
    answer = await me.http.get("/v1/agents", headers={"x-request-id": given})
    assert answer.headers["x-request-id"].startswith("req_")


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/nothing", 404, "not_found"),
        ("GET", "/v1/nothing", 404, "not_found"),
        ("PUT", "/v1/agents", 405, "method_not_allowed"),
        ("GET", "/v1/agents?limit=0", 400, "invalid_request"),
        ("GET", "/v1/agents?limit=1001", 400, "invalid_request"),
        ("GET", "/v1/agents?limit=many", 400, "invalid_request"),
        ("GET", "/v1/agents?page=abc", 400, "invalid_request"),
        ("GET", "/v1/agents?page=%00", 400, "invalid_request"),
        ("GET", "/v1/agents?created_at[gt]=yesterday", 400, "invalid_request"),
        ("GET", "/v1/agents?created_at[gt]=9999-12-31T23:59:59-12:00", 400, "invalid_request"),
        ("GET", "/v1/sessions?created_at[lte]=0001-01-01T00:00:00%2B12:00", 400, "invalid_request"),
        ("GET", "/v1/sessions?end_user_id=%00", 400, "invalid_request"),
        ("GET", f"/v1/sessions/sess_{'0' * 32}/events?types[]=a%00b", 400, "invalid_request"),
        ("POST", "/v1/files?filename=a%00.txt", 400, "invalid_request"),
        ("GET", f"/v1/sessions/sess_{'0' * 32}/events?%00", 400, "invalid_request"),
        ("GET", "/v1/agents/%00", 404, "not_found"),
        ("GET", "/v1/agents/%ff", 404, "not_found"),
        ("GET", "/v1/agents/agent_1", 404, "not_found"),
        ("GET", f"/v1/agents/sess_{'0' * 32}", 404, "not_found"),
        ("GET", f"/v1/agents/AGENT_{'0' * 32}", 404, "not_found"),
        ("GET", f"/v1/agents/agent_{'0' * 32}?version=0", 400, "invalid_request"),
        ("GET", f"/v1/agents/agent_{'0' * 32}?version=99999999999", 400, "invalid_request"),
        ("DELETE", f"/v1/files/agent_{'0' * 32}", 404, "not_found"),
    ],
)
async def test_bad_request_is_answered_with_a_problem_document(
    api: ServedApi, method: str, path: str, status: int, code: str
) -> None:
    me = await api.caller()
    _problem(await me.http.request(method, path), status, code)


@pytest.mark.parametrize(
    "media_type", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ""]
)
async def test_body_of_another_media_type_is_refused(api: ServedApi, media_type: str) -> None:
    me = await api.caller()
    answer = await me.http.post("/v1/agents", content=b'{"name":"a"}', headers={"content-type": media_type})
    _problem(answer, 415, "unsupported_media_type")


async def test_encoded_body_is_refused(api: ServedApi) -> None:
    """S-11: no body is unpacked."""
    me = await api.caller()
    headers = {"content-type": "application/json", "content-encoding": "gzip"}
    _problem(await me.http.post("/v1/agents", content=b"{}", headers=headers), 415, "unsupported_media_type")


async def test_missing_body_is_told(api: ServedApi) -> None:
    me = await api.caller()
    problem = _problem(await me.http.post("/v1/agents"), 400, "invalid_request")
    assert "body" in problem["detail"]


async def _chunks(size: int) -> AsyncIterator[bytes]:
    yield b'{"name":"'
    for _ in range(size // 1024):
        yield b"x" * 1024
    yield b'"}'


async def test_body_over_the_limit_is_refused_with_and_without_a_length(api: ServedApi) -> None:
    me = await api.caller()
    headers = {"content-type": "application/json"}
    sent = await me.http.post("/v1/agents", content=b" " * (LIMIT_BYTES + 1), headers=headers)
    _problem(sent, 413, "body_too_large")
    chunked = await me.http.post("/v1/agents", content=_chunks(2 * LIMIT_BYTES), headers=headers)
    _problem(chunked, 413, "body_too_large")


HOSTILE = [
    b"[" * 20_000 + b"]" * 20_000,
    b'{"name":"a","metadata":' + b'{"x":' * 900 + b"1" + b"}" * 900 + b"}",
    b'{"name":"a","metadata":{"' + b"k" * 20_000 + b'":"v"}}',
    b'{"name":"\xff"}',
    b'{"name":1e999}',
    b'{"name":"a\\u0000b"}',
    b'{"name":"a","metadata":{"a\\u0000b":"v"}}',
    b'{"name":"a","metadata":{"k":"a\\u0000b"}}',
    b'{"name":"' + b"n" * 20_000 + b'"}',
    b'{"name":""}',
    b"[]",
    b'"text"',
    b"null",
]


@pytest.mark.parametrize("body", HOSTILE)
@pytest.mark.parametrize("path", ["/v1/agents", f"/v1/agents/agent_{'0' * 32}"])
async def test_hostile_body_is_a_client_error(api: ServedApi, path: str, body: bytes) -> None:
    """S-14, and H-05 for names and metadata."""
    me = await api.caller()
    answer = await me.http.post(path, content=body, headers={"content-type": "application/json"})
    assert 400 <= answer.status_code < 500, answer.text
    assert answer.headers["content-type"] == "application/problem+json"
    assert (await me.http.get("/health/live")).status_code == 200


async def test_nul_in_a_system_prompt_is_replaced(api: ServedApi) -> None:
    """H-05."""
    me = await api.caller()
    agent = await me.post("/v1/agents", {"name": "a", "system": "a\0b"}, 201)
    assert agent["system"] == "a\N{REPLACEMENT CHARACTER}b"
    assert (await me.get(f"/v1/agents/{agent['id']}"))["system"] == "a\N{REPLACEMENT CHARACTER}b"


async def test_client_that_leaves_in_the_middle_of_its_body_does_no_harm(
    api: ServedApi, caplog: pytest.LogCaptureFixture
) -> None:
    me = await api.caller()
    caplog.set_level(logging.INFO)
    address = urlsplit(api.url)
    _, writer = await asyncio.open_connection(address.hostname, address.port)
    head = f"POST /v1/agents HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {me.key}\r\n"
    writer.write(f"{head}Content-Type: application/json\r\nContent-Length: 100\r\n\r\n{{".encode())
    await writer.drain()
    await asyncio.sleep(0)
    writer.close()
    with contextlib.suppress(ConnectionError):
        await writer.wait_closed()
    assert (await me.http.get("/v1/agents")).status_code == 200
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


async def test_readiness_names_what_is_away(database_url: str) -> None:
    async with served_api(database_url, f"unix:///tmp/{uuid4()}.sock") as api:
        me = await api.caller()
        answer = await me.http.get("/health/ready")
        assert answer.status_code == 200
        assert answer.json() == {"status": "degraded", "postgres": "ok", "redis": "away"}
        assert (await me.http.post("/v1/agents", json={"name": "a"})).status_code == 201


async def test_metrics_count_requests_by_route_and_name_no_tenant(api: ServedApi) -> None:
    me = await api.caller(scopes=("admin",))
    await _read_many(me)
    text = (await me.http.get("/metrics")).text
    assert (
        'armillary_http_requests_total{method="GET",route="/v1/agents/{agent_id}",status="404"} 3.0' in text
    )
    assert "armillary_open_streams 0.0" in text
    assert "armillary_streams_opened_total 0.0" in text
    assert me.tenant_id.hex not in text


async def _read_many(me: Caller) -> None:
    for _ in range(3):
        await me.http.get(f"/v1/agents/agent_{uuid4().hex}")


async def test_docs_and_document_need_no_key(api: ServedApi) -> None:
    async with httpx.AsyncClient(base_url=api.url, trust_env=False) as client:
        assert (await client.get("/openapi.json")).json()["openapi"].startswith("3.1")
        page = await client.get("/docs")
    assert page.headers["content-type"].startswith("text/html")
    assert "/v1/agents" in page.text
