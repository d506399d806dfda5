"""Real servers for the tests: one embedded pair per run, a database and a Redis number per xdist worker."""

import asyncio
import contextlib
import fcntl
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

import asyncpg
import pytest
import redis

from app.embedded.errors import NotRunning
from app.embedded.folder import Endpoints, attach, is_supervised
from db.migrate import upgrade

ROOT = Path(__file__).parent.parent
FOLDER = pytest.StashKey[Path]()
CONTROLLER = pytest.StashKey[int]()
START_S = 90.0


def pytest_configure(config: pytest.Config) -> None:
    shared = getattr(config, "workerinput", {})
    config.stash[FOLDER] = Path(shared.get("armillary_folder") or tempfile.mkdtemp(prefix="armillary-tests-"))
    config.stash[CONTROLLER] = shared.get("armillary_controller", os.getpid())


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: object) -> None:
    """Tells an xdist worker where the controller's folder is."""
    config: pytest.Config = node.config  # type: ignore[attr-defined]
    node.workerinput |= {  # type: ignore[attr-defined]
        "armillary_folder": str(config.stash[FOLDER]),
        "armillary_controller": config.stash[CONTROLLER],
    }


def pytest_unconfigure(config: pytest.Config) -> None:
    if hasattr(config, "workerinput") or FOLDER not in config.stash:
        return
    folder = config.stash[FOLDER]
    with contextlib.suppress(NotRunning, ProcessLookupError):
        os.kill(attach(folder).supervisor_pid, signal.SIGTERM)
        _wait_until(lambda: not is_supervised(folder), "the test servers did not stop")
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="session")
def servers(request: pytest.FixtureRequest) -> Endpoints:
    """The Postgres and Redis of this run. They outlive any one worker and stop with the controller."""
    folder = request.config.stash[FOLDER]
    if not is_supervised(folder):
        _start_supervisor(folder, request.config.stash[CONTROLLER])
    return attach(folder)


def _start_supervisor(folder: Path, controller_pid: int) -> None:
    """Returns when somebody supervises `folder`: our process, or that of a worker which was quicker."""
    log = folder / "supervisor.log"
    process_id = os.posix_spawn(
        sys.executable,
        [sys.executable, "-m", "app.embedded", str(folder), "--fast", f"--until-exit-of={controller_pid}"],
        {**os.environ, "PYTHONPATH": str(ROOT)},
        file_actions=[
            (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
            (os.POSIX_SPAWN_OPEN, 1, str(log), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600),
            (os.POSIX_SPAWN_DUP2, 1, 2),
        ],
        setsid=True,
    )

    def is_decided() -> bool:
        if is_supervised(folder):
            return True
        ended, _ = os.waitpid(process_id, os.WNOHANG)
        if ended:
            pytest.fail(f"the test servers did not start: {log.read_text()}")
        return False

    _wait_until(is_decided, "the test servers did not start")


@pytest.fixture(scope="session")
def worker_number(request: pytest.FixtureRequest) -> int:
    """1, 2 … for xdist workers, 0 without xdist."""
    worker = os.environ.get("PYTEST_XDIST_WORKER", "")
    return int(worker.removeprefix("gw")) + 1 if worker else 0


@pytest.fixture(scope="session")
def worker_database_url(request: pytest.FixtureRequest, servers: Endpoints, worker_number: int) -> str:
    """This worker's own migrated database, cloned from a template that the first worker migrates."""
    admin_url = _with_database(servers.database_url, "postgres")
    name = f"worker_{worker_number}"
    with (request.config.stash[FOLDER] / "template.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        asyncio.run(_clone_template(admin_url, name))
    return _with_database(servers.database_url, name)


async def _clone_template(admin_url: str, name: str) -> None:
    connection = await asyncpg.connect(admin_url)
    try:
        if not await connection.fetchval("SELECT true FROM pg_database WHERE datname = 'migrated'"):
            await connection.execute("DROP DATABASE IF EXISTS migrating")
            await connection.execute("CREATE DATABASE migrating")
            await upgrade(_with_database(admin_url, "migrating"))
            await connection.execute("ALTER DATABASE migrating RENAME TO migrated")
        await connection.execute(f"DROP DATABASE IF EXISTS {name}")
        await connection.execute(f"CREATE DATABASE {name} TEMPLATE migrated")
    finally:
        await connection.close()


@pytest.fixture
def database_url(worker_database_url: str) -> str:
    """A migrated database whose tables are empty when the test begins."""
    asyncio.run(_empty_tables(worker_database_url))
    return worker_database_url


async def _empty_tables(url: str) -> None:
    connection = await asyncpg.connect(url)
    try:
        await connection.execute("SET lock_timeout = '20s'")
        names = await connection.fetchval(
            "SELECT string_agg(format('%I', tablename), ', ') FROM pg_tables"
            " WHERE schemaname = 'public' AND tablename <> 'alembic_version'"
        )
        if names:
            await connection.execute(f"TRUNCATE {names} RESTART IDENTITY CASCADE")
    finally:
        await connection.close()


@pytest.fixture
def redis_url(servers: Endpoints, worker_number: int) -> Iterator[str]:
    """This worker's own Redis number, empty when the test begins. Channels are shared between numbers."""
    url = f"{servers.redis_url}?db={worker_number}"
    with redis.Redis.from_url(url) as client:
        client.flushdb()
        yield url


def _with_database(url: str, name: str) -> str:
    return urlunsplit(urlsplit(url)._replace(path=f"/{name}"))


def _wait_until(is_true: Callable[[], bool], complaint: str) -> None:
    deadline = time.monotonic() + START_S
    while not is_true():
        if time.monotonic() > deadline:
            pytest.fail(complaint)
        time.sleep(0.02)
