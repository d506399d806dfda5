"""`/v1/files`: uploaded by form or as the raw body, read back to the byte, nobody else's."""

import asyncio
from collections.abc import AsyncIterator
from uuid import uuid4

import pytest
from anthropic import AsyncAnthropic

from tests.support.served_api import ServedApi, served_api

LIMIT_BYTES = 64 << 10


@pytest.fixture
async def api(database_url: str, redis_url: str) -> AsyncIterator[ServedApi]:
    async with served_api(database_url, redis_url, request_body_limit_bytes=LIMIT_BYTES) as api:
        yield api


async def test_form_upload_is_read_back_to_the_byte(api: ServedApi) -> None:
    me = await api.caller()
    content = bytes(range(256)) * 64
    upload = {"file": ("dir/../pic.png", content, "image/png")}
    file = await me.call("POST", "/v1/files", 201, files=upload)
    assert (file["filename"], file["mime_type"], file["size_bytes"]) == ("pic.png", "image/png", len(content))
    assert await me.get(f"/v1/files/{file['id']}") == file
    answer = await me.http.get(f"/v1/files/{file['id']}/content")
    assert answer.content == content
    assert answer.headers["content-type"] == "image/png"
    assert answer.headers["content-disposition"] == "attachment; filename*=UTF-8''pic.png"
    assert answer.headers["x-content-type-options"] == "nosniff"


async def test_raw_upload_takes_its_name_from_the_query(api: ServedApi) -> None:
    me = await api.caller()
    headers = {"content-type": "application/octet-stream"}
    file = await me.call("POST", "/v1/files?filename=a%20b.txt", 201, content=b"hello", headers=headers)
    assert (file["filename"], file["mime_type"]) == ("a b.txt", "text/plain")
    empty = await me.call("POST", "/v1/files", 201, content=b"", headers=headers)
    assert (empty["filename"], empty["size_bytes"]) == ("unnamed", 0)


async def test_official_client_uploads_downloads_lists_and_deletes(api: ServedApi) -> None:
    me = await api.caller()
    async with AsyncAnthropic(api_key=me.key, base_url=api.url, _strict_response_validation=True) as client:
        file = await client.beta.files.upload(file=("n.txt", b"hello", "text/plain"))
        assert file.filename == "n.txt"
        assert await (await client.beta.files.download(file.id)).read() == b"hello"
        assert [found.id async for found in client.beta.files.list(ids=[file.id])] == [file.id]
        assert (await client.beta.files.delete(file.id)).type == "file_deleted"
    await me.get(f"/v1/files/{file.id}", 404)


async def test_list_is_newest_first_over_pages(api: ServedApi) -> None:
    me = await api.caller()
    made = [(await me.call("POST", "/v1/files", 201, content=b"x"))["id"] for _ in range(3)]
    first = await me.get("/v1/files?limit=2")
    second = await me.get("/v1/files", params={"page": first["next_page"]})
    assert [file["id"] for file in first["data"] + second["data"]] == made[::-1]


@pytest.mark.parametrize(
    ("content", "headers", "status"),
    [
        (b"x" * (LIMIT_BYTES + 1), {}, 413),
        (b"x", {"content-encoding": "gzip"}, 415),
        (b"a=b", {"content-type": "application/x-www-form-urlencoded"}, 415),
        (b"x", {"content-type": "multipart/form-data"}, 400),
        (b"x", {"content-type": "multipart/form-data; boundary=b"}, 400),
        (b"--b--\r\n", {"content-type": "multipart/form-data; boundary=b"}, 422),
        (
            b'--b\r\nContent-Disposition: form-data; name="file"\r\n'
            b"Content-Type: text/plain; charset=none\r\n\r\nx\r\n--b--\r\n",
            {"content-type": "multipart/form-data; boundary=b"},
            400,
        ),
        (b"x", {"content-type": "text/<html>"}, 422),
    ],
)
async def test_upload_that_cannot_be_taken_is_a_client_error(
    api: ServedApi, content: bytes, headers: dict[str, str], status: int
) -> None:
    me = await api.caller()
    answer = await me.http.post("/v1/files", content=content, headers=headers)
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/problem+json"
    assert (await me.get("/v1/files"))["data"] == []


async def test_form_with_other_parts_is_refused(api: ServedApi) -> None:
    me = await api.caller()
    file = ("a.txt", b"x", "text/plain")
    for options in (
        {"files": {"other": file}},
        {"files": [("file", file), ("file", file)]},
        {"files": {"file": file}, "data": {"expires_in_seconds": "3600"}},
        {
            "content": b'--b\r\nContent-Disposition: form-data; name="file"; filename="a\0"\r\n\r\n'
            b"x\r\n--b--\r\n",
            "headers": {"content-type": "multipart/form-data; boundary=b"},
        },
        {"files": {"file": ("n" * 300, b"x", "text/plain")}},
    ):
        answer = await me.http.post("/v1/files", **options)
        assert answer.status_code == 422, answer.text


async def test_another_tenant_sees_and_deletes_nothing(api: ServedApi) -> None:
    me, other = await api.caller(), await api.caller()
    mine = (await me.call("POST", "/v1/files", 201, content=b"secret"))["id"]
    unknown = f"file_{uuid4().hex}"
    for method, path in (
        ("GET", "/v1/files/{}"),
        ("GET", "/v1/files/{}/content"),
        ("DELETE", "/v1/files/{}"),
    ):
        answers = [await other.http.request(method, path.format(file)) for file in (mine, unknown)]
        assert [answer.status_code for answer in answers] == [404, 404]
        assert answers[0].json()["detail"].replace(mine, unknown) == answers[1].json()["detail"]
    assert (await other.get("/v1/files"))["data"] == []
    assert (await other.get("/v1/files", params={"ids[]": mine}))["data"] == []
    assert (await me.http.get(f"/v1/files/{mine}/content")).content == b"secret"


async def test_same_upload_twice_is_one_file_whatever_the_boundary(api: ServedApi) -> None:
    me = await api.caller()
    headers = {"idempotency-key": "upload"}
    upload = {"file": ("a.txt", b"x", "text/plain")}
    answers = await asyncio.gather(
        *(me.call("POST", "/v1/files", 201, files=upload, headers=headers) for _ in range(5))
    )
    assert len({answer["id"] for answer in answers}) == 1
    other = {"file": ("a.txt", b"y", "text/plain")}
    await me.call("POST", "/v1/files", 409, files=other, headers=headers)
