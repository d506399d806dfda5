"""`armillary serve`: everything on one machine, as children of one process.

Start: socket, servers, migrations, key, API and workers, the demo agent. Stop: in the opposite order.
"""

import asyncio
import contextlib
import http.client
import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import msgspec

from app.processes import spawn, stop_process
from app.server import base_url, bind_socket
from app.settings import Settings
from app.signals import STOPPING, SignalInbox

if TYPE_CHECKING:
    from app.embedded.supervisor import Supervisor

READY_S = 90.0
STEADY_S = 30.0  # a child that ran for so long is restarted at once when it dies
MAX_DELAY_S = 10.0
STOP_MARGIN_S = 5.0
DEMO_AGENT = {
    "name": "demo",
    "model": "rehearsal:demo",
    "system": "You are a friendly guide to this server.",
    "tools": [
        {"type": "builtin", "name": "calculate"},
        {"type": "builtin", "name": "current_time"},
        {"type": "builtin", "name": "delay"},
    ],
}


class ServeFailed(Exception):
    """The start did not succeed. The message is one line."""


class Access(msgspec.Struct, frozen=True, kw_only=True):
    """What `<data>/server.json` tells other programs on this machine; readable by its owner only."""

    base_url: str
    api_key: str
    agent_id: str | None = None


@dataclass(kw_only=True)
class Child:
    """One of our processes that is to run for as long as we do."""

    name: str
    argv: list[str]
    pass_fds: tuple[int, ...] = ()
    process: subprocess.Popen[bytes] | None = None
    started_at: float = 0.0  # both on the monotonic clock, seconds
    due_at: float = 0.0
    deaths: int = 0

    def start(self) -> None:
        # SIGKILL: when we are gone so are the servers, and all that a child could do is fail.
        self.process = spawn(self.argv, death_signal=signal.SIGKILL, pass_fds=self.pass_fds)
        self.started_at = time.monotonic()

    def has_ended(self) -> bool:
        return self.process is not None and self.process.poll() is not None

    def keep_running(self, now: float) -> None:
        """Restarts a dead child, later each time that it dies young."""
        if self.process is not None and self.process.poll() is not None:
            code, self.process = self.process.returncode, None
            self.deaths = 1 if now - self.started_at > STEADY_S else self.deaths + 1
            delay_s = 0.0 if self.deaths == 1 else min(MAX_DELAY_S, 0.2 * 2**self.deaths)
            self.due_at = now + delay_s
            say(f"{self.name} ended with code {code}; starting it again in {delay_s:.1f} s")
        if self.process is None and now >= self.due_at:
            self.start()


@dataclass(kw_only=True)
class Family:
    """All children; at the end of the block they are stopped together."""

    stop_s: float
    children: list[Child] = field(default_factory=list)

    def __enter__(self) -> "Family":
        return self

    def __exit__(self, *ignored: object) -> None:
        running = [child.process for child in self.children if child.process is not None]
        for process in running:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + self.stop_s
        for process in running:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
        for process in running:
            stop_process(process)

    def start(self, child: Child) -> None:
        self.children.append(child)
        child.start()


def say(text: str) -> None:
    sys.stderr.write(f"armillary: {text}\n")
    sys.stderr.flush()


def serve(settings: Settings) -> int:
    """Runs until SIGTERM or SIGINT; the exit code.

    Raises: ServeFailed, PortUnavailable, EmbeddedError.
    """
    with contextlib.ExitStack() as stack:
        inbox = stack.enter_context(SignalInbox())
        listener = stack.enter_context(bind_socket(settings.host, settings.port))
        supervisor = _start_servers(settings, stack)
        if supervisor is not None:
            settings = msgspec.structs.replace(
                settings,
                database_url=supervisor.endpoints.database_url,
                redis_url=supervisor.endpoints.redis_url,
            )
        else:
            settings.data_path.mkdir(parents=True, exist_ok=True, mode=0o700)
        access = asyncio.run(_prepare(settings, base_url(listener)))
        family = stack.enter_context(
            Family(stop_s=max(settings.api_shutdown_s, settings.worker_shutdown_s) + STOP_MARGIN_S)
        )
        _start_children(settings, family, listener)
        if not _wait_until_ready(inbox, family, access):
            return 0
        access = _with_demo_agent(access)
        # Only when it answers: whoever finds the file may call at once.
        write_access(settings.data_path, access)
        sys.stdout.write(welcome(access))
        sys.stdout.flush()
        _keep_running(inbox, family, supervisor)
    return 0


def _start_servers(settings: Settings, stack: contextlib.ExitStack) -> "Supervisor | None":
    if not settings.is_embedded:
        return None
    from app.embedded.supervisor import Supervisor

    return stack.enter_context(Supervisor(settings.data_path))


async def _prepare(settings: Settings, url: str) -> Access:
    """Migrates, and makes sure of a tenant and of a key that works."""
    from db.engine import Database
    from db.keys import create_key, find_key
    from db.migrate import upgrade
    from db.tenants import ensure_default_tenant

    assert settings.database_url is not None
    await upgrade(settings.database_url, pooler=settings.database_pooler)
    database = Database.open(settings.database_url, pooler=settings.database_pooler, pool_size=1)
    try:
        async with database.transaction() as tx:
            tenant_id = await ensure_default_tenant(tx)
            kept = read_access(settings.data_path)
            if kept is not None and await find_key(tx, kept.api_key) is not None:
                return msgspec.structs.replace(kept, base_url=url)
            _, key = await create_key(
                tx, tenant_id=tenant_id, name="serve", scopes=("admin", "write", "read")
            )
            return Access(base_url=url, api_key=key)
    finally:
        await database.close()


def read_access(data: Path) -> Access | None:
    """What the last start wrote, if it can be read."""
    try:
        return msgspec.json.decode((data / "server.json").read_bytes(), type=Access)
    except (FileNotFoundError, msgspec.DecodeError):
        return None


def write_access(data: Path, access: Access) -> None:
    draft = data / "server.json.draft"
    draft.unlink(missing_ok=True)
    with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(msgspec.json.format(msgspec.json.encode(access)) + b"\n")
    draft.replace(data / "server.json")


def _start_children(settings: Settings, family: Family, listener: socket.socket) -> None:
    program = [sys.executable, "-m", "app"]
    listener_fd = listener.fileno()
    family.start(
        Child(name="api", argv=[*program, "api", f"--listen-fd={listener_fd}"], pass_fds=(listener_fd,))
    )
    for number in range(1, settings.serve_workers + 1):
        family.start(Child(name=f"worker {number}", argv=[*program, "worker"]))


def _wait_until_ready(inbox: SignalInbox, family: Family, access: Access) -> bool:
    """False when a signal asked us to stop before the API was ready. Raises: ServeFailed."""
    deadline = time.monotonic() + READY_S
    while not _is_ready(access.base_url):
        if inbox.wait(0.05) & STOPPING:
            return False
        for child in family.children:
            if child.has_ended():
                raise ServeFailed(f"{child.name} did not start; its output above says why")
        if time.monotonic() > deadline:
            raise ServeFailed(f"the API was not ready after {READY_S:.0f} s")
    return True


def _is_ready(url: str) -> bool:
    try:
        status, _ = call(url, "GET", "/health/ready")
    except (OSError, http.client.HTTPException):
        return False
    return status == 200


def call(url: str, method: str, path: str, *, key: str = "", body: Any = None) -> tuple[int, bytes]:
    """One request to our own API: status and body. Raises: OSError, HTTPException."""
    parts = urlsplit(url)
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    if body is not None:
        headers["Content-Type"] = "application/json"
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=10)
    with contextlib.closing(connection):
        connection.request(method, path, None if body is None else msgspec.json.encode(body), headers)
        response = connection.getresponse()
        return response.status, response.read()


def _with_demo_agent(access: Access) -> Access:
    """`access` with the id of an agent that answers; the one of the last start if it is still there."""
    if access.agent_id is not None:
        status, found = call(access.base_url, "GET", f"/v1/agents/{access.agent_id}", key=access.api_key)
        if status == 200 and msgspec.json.decode(found).get("archived_at") is None:
            return access
    status, made = call(access.base_url, "POST", "/v1/agents", key=access.api_key, body=DEMO_AGENT)
    if status not in (200, 201):
        raise ServeFailed(f"the demo agent could not be made: {status} {made.decode(errors='replace')[:500]}")
    return msgspec.structs.replace(access, agent_id=msgspec.json.decode(made)["id"])


def welcome(access: Access) -> str:
    """What a newcomer needs: the key, and one line that streams an answer."""
    return (
        f"API key: {access.api_key}\n"
        f"curl -N {access.base_url}/v1/agents/{access.agent_id}/prompt"
        f" -H 'Authorization: Bearer {access.api_key}' -H 'Content-Type: application/json'"
        """ -d '{"prompt": "What is 12 * 34?", "stream": true}'\n"""
    )


def _keep_running(inbox: SignalInbox, family: Family, supervisor: "Supervisor | None") -> None:
    while not inbox.wait(0.5) & STOPPING:
        if supervisor is not None:
            for name in supervisor.revive():
                say(f"{name} had ended and runs again")
        for child in family.children:
            child.keep_running(time.monotonic())
