"""The two servers: how each is laid out, started, asked whether it is ready, and stopped."""

import shutil
import signal
import socket
import struct
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol
from urllib.parse import quote

from app.embedded.binaries import POSTGRES_MAJOR, Binaries
from app.embedded.errors import DiskFull, EmbeddedError, ServerFailed, WrongDataVersion
from app.embedded.identity import Identity
from app.processes import Become, run_to_end, spawn, stop_process

READY_S = 60.0  # crash recovery of a large log takes a while
MAX_LOG_BYTES = 8 << 20
_PROTOCOL_3 = 196608

# Servers get nothing of our environment: it may hold keys, and LC_* or PG* would change how they behave.
SERVER_ENVIRONMENT = {"PATH": "/usr/bin:/bin", "LC_ALL": "C", "TZ": "UTC", "HOME": "/"}


@dataclass(frozen=True, kw_only=True)
class Layout:
    """What both servers share. `is_durable` False gives up safety from power loss, for tests."""

    data: Path
    sockets: Path
    binaries: Binaries
    identity: Identity | None
    is_durable: bool

    @property
    def become(self) -> Become | None:
        return None if self.identity is None else self.identity.become


class Server(Protocol):
    """One embedded server. Nothing here is called from two threads."""

    @property
    def name(self) -> str: ...

    def prepare(self) -> None:
        """Lays out its folder, if it is not there. Raises: EmbeddedError."""
        ...

    def start(self, lock: int) -> subprocess.Popen[bytes]:
        """A running process that inherits the descriptor `lock`; not ready yet."""
        ...

    def is_ready(self) -> bool:
        """Whether it answers on its socket."""
        ...

    def stop(self, process: subprocess.Popen[bytes]) -> None:
        """Ends it in good order, and by force if that takes too long."""
        ...


@dataclass(frozen=True, kw_only=True)
class Postgres:
    layout: Layout
    name: str = field(default="postgres", init=False)

    @property
    def url(self) -> str:
        return f"postgresql://postgres@/armillary?host={quote(str(self.layout.sockets))}"

    def prepare(self) -> None:
        data = self.layout.data / self.name
        if data.exists():
            found = (data / "PG_VERSION").read_text().strip()
            if found != POSTGRES_MAJOR:
                raise WrongDataVersion(
                    f"{data} was written by Postgres {found}, this is Postgres {POSTGRES_MAJOR}: "
                    "dump and restore it, or choose another ARMILLARY_DATA_DIR"
                )
            return
        # Built beside its place and renamed, so that a half-made one is never taken for data.
        draft = self.layout.data / "postgres.draft"
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir(mode=0o700)
        if self.layout.identity is not None:
            self.layout.identity.own(draft, 0o700)
        self._run(
            str(self.layout.binaries.initdb),
            f"--pgdata={draft}",
            "--username=postgres",
            "--auth=trust",
            "--encoding=UTF8",
            "--locale-provider=builtin",
            "--locale=C.UTF-8",
            "--no-instructions",
            *(() if self.layout.is_durable else ("--no-sync",)),
        )
        self._run(
            str(self.layout.binaries.postgres),
            "--single",
            "-D",
            str(draft),
            "postgres",
            stdin=b"CREATE DATABASE armillary;\n",
        )
        draft.rename(data)

    def _run(self, *argv: str, stdin: bytes = b"") -> None:
        done = run_to_end(
            argv, become=self.layout.become, environment=SERVER_ENVIRONMENT, stdin=stdin, cwd=Path("/")
        )
        if done.returncode != 0:
            raise failure(f"{Path(argv[0]).name} failed", done.stdout.decode(errors="replace"))

    def start(self, lock: int) -> subprocess.Popen[bytes]:
        data = self.layout.data / self.name
        # The lock proves that no process of an earlier start is alive; the pid in the file may be anybody's.
        (data / "postmaster.pid").unlink(missing_ok=True)
        options = {
            "listen_addresses": "",
            "unix_socket_directories": str(self.layout.sockets),
            "max_connections": "200",
            "shared_buffers": "64MB",
            "timezone": "UTC",
            "log_timezone": "UTC",
        }
        if not self.layout.is_durable:
            options |= {"fsync": "off", "full_page_writes": "off"}
        argv = [str(self.layout.binaries.postgres), "-D", str(data)]
        for name, value in options.items():
            argv += ["-c", f"{name}={value}"]
        return _spawn(self.layout, self.name, argv, lock=lock, death_signal=signal.SIGINT)

    def is_ready(self) -> bool:
        body = struct.pack("!I", _PROTOCOL_3) + b"user\0postgres\0database\0armillary\0\0"
        packet = struct.pack("!I", len(body) + 4) + body
        return _ask(self.layout.sockets / ".s.PGSQL.5432", packet, b"R")  # R: authenticated

    def stop(self, process: subprocess.Popen[bytes]) -> None:
        stop_process(process, (signal.SIGINT, 15.0), (signal.SIGQUIT, 5.0))


@dataclass(frozen=True, kw_only=True)
class Redis:
    layout: Layout
    name: str = field(default="redis", init=False)

    @property
    def _socket(self) -> Path:
        return self.layout.sockets / "redis.sock"

    @property
    def url(self) -> str:
        return f"unix://{quote(str(self._socket))}"

    def prepare(self) -> None:
        data = self.layout.data / self.name
        data.mkdir(mode=0o700, exist_ok=True)
        if self.layout.identity is not None:
            self.layout.identity.own(data, 0o700)

    def start(self, lock: int) -> subprocess.Popen[bytes]:
        options = {
            "dir": str(self.layout.data / self.name),
            "unixsocket": str(self._socket),
            "unixsocketperm": "700",
            "port": "0",
            "appendonly": "yes",
            "appendfsync": "everysec" if self.layout.is_durable else "no",
            "save": "",
            "maxmemory-policy": "noeviction",
            "databases": "64",
            "daemonize": "no",
        }
        argv = [str(self.layout.binaries.redis)]
        for name, value in options.items():
            argv += [f"--{name}", value]
        return _spawn(self.layout, self.name, argv, lock=lock, death_signal=signal.SIGTERM)

    def is_ready(self) -> bool:
        return _ask(self._socket, b"PING\r\n", b"+")

    def stop(self, process: subprocess.Popen[bytes]) -> None:
        stop_process(process, (signal.SIGTERM, 10.0))


def wait_until_ready(server: Server, process: subprocess.Popen[bytes], log: Path) -> None:
    """Returns when the server answers.

    Raises: ServerFailed, DiskFull.
    """
    deadline = time.monotonic() + READY_S
    while not server.is_ready():
        if process.poll() is not None:
            raise failure(f"{server.name} ended with code {process.returncode}", _tail(log), log)
        if time.monotonic() > deadline:
            raise failure(f"{server.name} was not ready after {READY_S:.0f} s", _tail(log), log)
        time.sleep(0.01)


def failure(what: str, output: str, log: Path | None = None) -> EmbeddedError:
    """The error that the end of a server's output stands for."""
    if "No space left on device" in output:
        return DiskFull(f"{what}: no space left on the disk")
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    telling = [line for line in lines if "FATAL" in line or "error:" in line.lower()] or lines
    last = telling[-1] if telling else "it said nothing"
    return ServerFailed(f"{what}: {last}" + (f" (see {log})" if log else ""))


def log_path(data: Path, server: str) -> Path:
    return data / f"{server}.log"


def _spawn(
    layout: Layout, name: str, argv: list[str], *, lock: int, death_signal: signal.Signals
) -> subprocess.Popen[bytes]:
    log = log_path(layout.data, name)
    if log.exists() and log.stat().st_size > MAX_LOG_BYTES:
        log.replace(log.with_suffix(".log.old"))
    with log.open("ab") as output:
        return spawn(
            argv,
            death_signal=death_signal,
            log=output,
            become=layout.become,
            environment=SERVER_ENVIRONMENT,
            pass_fds=(lock,),
            cwd=Path("/"),
        )


def _ask(path: Path, question: bytes, wanted: bytes) -> bool:
    """True when the server at the socket answers `question` with the byte `wanted`."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(5)
        try:
            connection.connect(str(path))
            connection.sendall(question)
            return connection.recv(1) == wanted
        except OSError:
            return False


def _tail(log: Path) -> str:
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - 4096))
            return file.read().decode(errors="replace")
    except OSError:
        return ""
