"""Clients that send slowly, send too much, send nothing, or are too many."""

import asyncio
import contextlib
import resource
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from typing import Any

import uvicorn

from app.http_connections import RequestLimits, raise_open_files
from app.server import ApiServer, bounded_by

LIMITS = RequestLimits(head_s=0.5, body_s=0.5, body_bytes_per_s=1000.0, connections=16)
REQUEST = b"POST /echo HTTP/1.1\r\nhost: x\r\ncontent-length: 10\r\n\r\n"
PATIENCE_S = 30.0


async def echo(scope: Any, receive: Any, send: Any) -> None:
    """Answers with what it got; a GET of `/stream` is answered without end."""
    body = b""
    while scope["method"] == "POST":
        message = await receive()
        if message["type"] == "http.disconnect":
            return
        body += message["body"]
        if not message["more_body"]:
            break
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send(
        {"type": "http.response.body", "body": b"got " + body, "more_body": scope["path"] == "/stream"}
    )
    if scope["path"] == "/stream":
        while (await receive())["type"] != "http.disconnect":
            pass


@contextlib.asynccontextmanager
async def serving(limits: RequestLimits = LIMITS) -> AsyncIterator[tuple[int, ApiServer]]:
    """The port of a server, and itself, as `armillary api` makes it, with limits that are soon reached."""
    config = uvicorn.Config(
        echo,
        http=bounded_by(limits),
        ws="none",
        lifespan="off",
        log_config=None,
        limit_concurrency=limits.connections,
        timeout_graceful_shutdown=1,
    )
    server = ApiServer(config, begin_closing=lambda: None)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        task = asyncio.create_task(server.serve(sockets=[listener]))
        try:
            yield listener.getsockname()[1], server
        finally:
            server.should_exit = True
            await asyncio.wait_for(task, PATIENCE_S)


@contextlib.asynccontextmanager
async def listening(limits: RequestLimits = LIMITS) -> AsyncIterator[int]:
    async with serving(limits) as (port, _):
        yield port


async def answer_to(port: int, *parts: bytes) -> bytes:
    """All that comes until the server closes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        for part in parts:
            writer.write(part)
            await writer.drain()
        return await asyncio.wait_for(reader.read(), PATIENCE_S)
    finally:
        writer.close()


async def test_a_request_that_is_not_finished_in_time_is_ended() -> None:
    unfinished = (
        b"\r\n",
        b"POST /echo HT",
        b"POST /echo HTTP/1.1\r\nhost: x\r\nx-slow: a",
        REQUEST + b"half",
    )
    async with listening() as port:
        nothing, *answers = await asyncio.gather(*(answer_to(port, sent) for sent in (b"", *unfinished)))
        assert nothing == b""
        assert [answer[:12] for answer in answers] == [b"HTTP/1.1 408"] * len(unfinished)


async def test_the_second_request_of_a_connection_is_bounded_like_the_first() -> None:
    async with listening() as port:
        answer = await answer_to(port, REQUEST + b"0123456789", b"GET /echo HTTP/1.1\r\n")
        assert b"got 0123456789" in answer
        assert b"HTTP/1.1 408" in answer


async def test_a_client_that_dribbles_its_head_gains_no_time() -> None:
    async with listening() as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET / HTTP/1.1\r\n")
        answer = asyncio.create_task(reader.read())
        with contextlib.suppress(ConnectionError):
            async with asyncio.timeout(PATIENCE_S):
                while not answer.done():
                    writer.write(b"x-more: 1\r\n")
                    await writer.drain()
                    await asyncio.wait([answer], timeout=0.05)
        [end] = await asyncio.gather(answer, return_exceptions=True)
        # What it still sends may reset the connection before it has read the answer.
        assert isinstance(end, ConnectionError) or (isinstance(end, bytes) and b"408" in end)
        writer.close()


async def test_a_body_that_comes_steadily_may_take_longer_than_one_that_does_not() -> None:
    async with listening() as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(REQUEST.replace(b"content-length: 10", b"content-length: 12000"))
        for _ in range(12):
            writer.write(b"x" * 1000)
            await writer.drain()
            await asyncio.sleep(0.1)
        assert (await reader.readuntil(b"\r\n")).startswith(b"HTTP/1.1 200")
        writer.close()


async def test_an_open_stream_is_not_bounded_by_the_time_of_requests() -> None:
    async with listening() as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET /stream HTTP/1.1\r\nhost: x\r\n\r\n")
        await reader.readuntil(b"got \r\n")
        assert (await answer_to(port, b"GET / HT")).startswith(b"HTTP/1.1 408")  # so much time has passed
        assert not reader.at_eof()
        writer.close()


async def test_a_head_that_does_not_end_is_refused_at_a_size() -> None:
    async with listening(RequestLimits()) as port:
        head = b"GET / HTTP/1.1\r\nhost: x\r\n" + b"x-big: %b\r\n" % (b"a" * 1000) * 200
        assert (await answer_to(port, head)).startswith(b"HTTP/1.1 431")


async def test_connections_beyond_the_limit_are_told_so_and_then_refused() -> None:
    async with listening(RequestLimits(connections=10)) as port:
        silent = [await asyncio.open_connection("127.0.0.1", port) for _ in range(10)]
        answer = await answer_to(port, b"GET /echo HTTP/1.1\r\nhost: x\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 503")
        silent.append(await asyncio.open_connection("127.0.0.1", port))
        with contextlib.suppress(ConnectionResetError):
            assert await answer_to(port, b"GET /echo HTTP/1.1\r\nhost: x\r\n\r\n") == b""
        for _, writer in silent:
            writer.close()
        for _, writer in silent:
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()


async def test_at_shutdown_a_connection_that_is_kept_has_its_next_request_answered_and_is_closed() -> None:
    async with serving(RequestLimits()) as (port, server):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(REQUEST + b"0123456789")
        await reader.readuntil(b"0123456789\r\n0\r\n\r\n")
        unused, idle = await asyncio.open_connection("127.0.0.1", port)
        server.should_exit = True
        assert await asyncio.wait_for(unused.read(), PATIENCE_S) == b""  # it has begun to end
        writer.write(REQUEST + b"9876543210")
        answer = await asyncio.wait_for(reader.read(), PATIENCE_S)
        assert b"connection: close" in answer
        assert b"got 9876543210" in answer
        writer.close()
        idle.close()


def test_an_api_opens_as_many_files_as_it_is_allowed(tmp_path: Any) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    program = (
        "from app.http_connections import affordable_connections as a; import resource;"
        " print(a(10**9), resource.getrlimit(resource.RLIMIT_NOFILE)[0])"
    )
    shell = f'ulimit -Sn 256 && exec "{sys.executable}" -c "{program}"'
    done = subprocess.run(["sh", "-c", shell], capture_output=True, text=True, check=True)
    connections, soft = map(int, done.stdout.split())
    assert soft == hard
    assert 16 <= connections < hard
    assert "raise the limit of open files" in done.stderr
    assert raise_open_files() == hard
