"""The API process: our app on uvicorn, on a socket that may come from the parent."""

import contextlib
import errno
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import Any, cast

import uvicorn

from app.http_connections import (
    BoundedConnection,
    RequestLimits,
    affordable_connections,
    notice_dead_peers,
)
from app.settings import Settings

BIND_S = 1.0  # a process that was just killed gives its port back when the kernel has cleaned up
BACKLOG = 4096  # connections that may wait for us; the kernel may allow fewer
KEEP_ALIVE_S = 65  # longer than the idle time-out of common load balancers, so that they close first
TICKS_PER_S = 10  # of uvicorn's main loop


class PortUnavailable(Exception):
    """The address cannot be listened on. The message is one line that says what to do."""


def bind_socket(host: str, port: int) -> socket.socket:
    """A listening socket; port 0 takes a free one.

    Raises: PortUnavailable.
    """
    deadline = time.monotonic() + BIND_S
    while True:
        try:
            family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            return socket.create_server(address[:2], family=family, backlog=BACKLOG)
        except socket.gaierror as error:
            raise PortUnavailable(f"{host} is not an address of this machine: set ARMILLARY_HOST") from error
        except OSError as error:
            if error.errno == errno.EADDRINUSE and time.monotonic() < deadline:
                time.sleep(0.05)
                continue
            # `error.strerror` would name the address a second time.
            why = os.strerror(error.errno or 0)
            reason = "is taken" if error.errno == errno.EADDRINUSE else f"cannot be used ({why})"
            raise PortUnavailable(
                f"port {port} on {host} {reason}: set ARMILLARY_PORT to another, or to 0 for a free one"
            ) from error


def base_url(listener: socket.socket) -> str:
    """Where a client on this machine reaches `listener`."""
    host, port = listener.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class ApiServer(uvicorn.Server):
    """Ends with its own exit code at a signal: uvicorn's would die by the signal, without clean-up.

    `begin_closing` is called when it begins to end. uvicorn waits for open connections before it tells the
    application, and streams do not end by themselves.
    """

    def __init__(self, config: uvicorn.Config, *, begin_closing: Callable[[], None]) -> None:
        super().__init__(config)
        self._begin_closing = begin_closing

    async def on_tick(self, counter: int) -> bool:
        if counter % TICKS_PER_S == 0:
            now = time.monotonic()
            for connection in list(self.server_state.connections):
                cast("BoundedConnection", connection).check(now)
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._begin_closing()
        await super().shutdown(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.should_exit and sig == signal.SIGINT:
            self.force_exit = True
        self.should_exit = True


def bounded_by(limits: RequestLimits) -> Any:
    """What uvicorn makes connections with."""
    return partial(BoundedConnection, limits=limits)


def run_api(settings: Settings, *, listen_fd: int | None = None) -> int:
    """Serves until SIGTERM or SIGINT; the exit code. `listen_fd` is a listening socket of the parent.

    Raises: PortUnavailable.
    """
    from app.main import create_app
    from app.telemetry import configure_logging

    configure_logging(level=settings.log_level, form=settings.log_format, secrets=settings.secrets)
    if listen_fd is None:
        listener = bind_socket(settings.host, settings.port)
        sys.stdout.write(f"listening on {base_url(listener)}\n")
        sys.stdout.flush()
    else:
        listener = socket.socket(fileno=listen_fd)
    notice_dead_peers(listener)
    app = create_app(settings)
    connections = affordable_connections(settings.api_connections)
    config = uvicorn.Config(
        app,
        loop="uvloop",
        http=bounded_by(RequestLimits(connections=connections)),
        limit_concurrency=connections,
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=max(1, round(settings.api_shutdown_s)),
    )
    server = ApiServer(config, begin_closing=app.begin_closing)
    with contextlib.closing(listener):
        server.run(sockets=[listener])
    return 0 if server.started else 1
