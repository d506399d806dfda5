"""Starts the embedded pair, keeps it running, and stops it. One supervisor per data folder."""

import contextlib
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Self

from app.embedded.binaries import find_binaries
from app.embedded.errors import LockHeld, ServerFailed
from app.embedded.folder import (
    Endpoints,
    attach,
    check_space,
    explain_os_errors,
    make_folder,
    make_socket_folder,
    remove_socket_folder,
    remove_state,
    take_lock,
    take_server_lock,
    write_state,
)
from app.embedded.identity import choose_identity
from app.embedded.servers import Layout, Postgres, Redis, Server, log_path, wait_until_ready

GONE_S = 60.0  # a Postgres whose supervisor was killed finishes its checkpoint first
MAX_REVIVALS = 5  # within REVIVAL_WINDOW_S; more is a fault that restarting does not mend
REVIVAL_WINDOW_S = 60.0


class Supervisor:
    """The servers of one data folder, as direct children of this process.

    Use as a context manager, in the main thread. `revive` restarts what has died; call it on SIGCHLD.
    """

    def __init__(self, data: Path, *, is_durable: bool = True) -> None:
        self._data = data.absolute()
        self._is_durable = is_durable
        self._lock: int | None = None
        self._servers: list[Server] = []
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._revivals: list[float] = []
        self.endpoints: Endpoints

    def __enter__(self) -> Self:
        try:
            with explain_os_errors(self._data):
                self._start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()

    def _start(self) -> None:
        binaries = find_binaries()
        make_folder(self._data)
        self._lock = take_lock(self._data)
        remove_state(self._data)
        database = self._data / "postgres"
        check_space(self._data, is_fresh=not database.exists())
        identity = choose_identity(database, [binaries.postgres, binaries.redis, database])
        layout = Layout(
            data=self._data,
            sockets=make_socket_folder(self._data, identity),
            binaries=binaries,
            identity=identity,
            is_durable=self._is_durable,
        )
        postgres, redis = Postgres(layout=layout), Redis(layout=layout)
        self._servers = [redis, postgres]
        for server in self._servers:
            server.prepare()
            self._launch(server)
        for server in self._servers:
            self._await(server)
        self.endpoints = Endpoints(database_url=postgres.url, redis_url=redis.url, supervisor_pid=os.getpid())
        write_state(self._data, self.endpoints)

    def _launch(self, server: Server) -> None:
        lock = take_server_lock(self._data, server.name, wait_s=GONE_S)
        try:
            self._processes[server.name] = server.start(lock)
        finally:
            os.close(lock)  # the server's processes hold it by their own copies

    def _await(self, server: Server) -> None:
        wait_until_ready(server, self._processes[server.name], log_path(self._data, server.name))

    def revive(self) -> list[str]:
        """Restarts the servers that have ended, on the same data; their names. Returns when they are ready.

        Raises: ServerFailed when that has been needed too often.
        """
        dead = [server for server in self._servers if self._processes[server.name].poll() is not None]
        now = time.monotonic()
        self._revivals = [at for at in self._revivals if now - at < REVIVAL_WINDOW_S] + [now] * len(dead)
        if len(self._revivals) > MAX_REVIVALS:
            raise ServerFailed(
                f"{dead[0].name} ended again and again (see {log_path(self._data, dead[0].name)})"
            )
        for server in dead:
            self._launch(server)
            self._await(server)
        return [server.name for server in dead]

    def stop(self) -> None:
        """Stops both servers in good order and lets go of the lock. Safe to call twice."""
        if self._lock is None:
            return
        remove_state(self._data)
        for server in self._servers:
            if server.name in self._processes:
                server.stop(self._processes.pop(server.name))
        remove_socket_folder(self._data)
        os.close(self._lock)
        self._lock = None


@contextlib.contextmanager
def running_servers(data: Path) -> Iterator[Endpoints]:
    """The servers of `data` for as long as the block runs: those that run, else started for it alone."""
    with contextlib.ExitStack() as stack:
        try:
            endpoints = stack.enter_context(Supervisor(data)).endpoints
        except LockHeld:
            endpoints = attach(data)
        yield endpoints
