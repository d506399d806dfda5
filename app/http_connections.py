"""Connections of clients that send slowly, send nothing, or are far too many.

uvicorn waits without end for the rest of a request, and its parser takes a head of any size.
"""

import asyncio
import contextlib
import logging
import resource
import socket
import sys
import time
from typing import Any

from msgspec import Struct
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

log = logging.getLogger("armillary.api")

OTHER_FILES = 200
"""Kept for what is no client's connection: the database's, Redis's, logs, uploads."""

DEAD_PEER_S = 60
"""A peer that acknowledges nothing for so long is gone. The kernel would try for a quarter of an hour."""


LEAVING_S = 1.0
"""How long a connection that is kept stays open at shutdown for a client that does not know."""


class RequestLimits(Struct, frozen=True, kw_only=True):
    """What a request may cost before it is complete."""

    head_s: float = 20.0
    """From its first byte, or from the connection, to the end of its head."""

    head_bytes: int = 64 * 1024

    body_s: float = 20.0
    """For the body, and more as long as it comes at `body_bytes_per_s` on average."""

    body_bytes_per_s: float = 4096.0

    connections: int = 10_000
    """Beyond it requests are answered 503, and with a tenth more nothing is."""


class BoundedConnection(HttpToolsProtocol):
    """uvicorn's connection, with an end to its patience. `check` is to be called about once a second."""

    def __init__(self, *arguments: Any, limits: RequestLimits, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._limits = limits
        self._unfinished_since: float | None = None  # a request, or what should become one
        self._is_in_body = False
        self._received_bytes = 0
        self._has_spoken = False
        self._is_leaving = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)  # type: ignore[arg-type]
        self._unfinished_since = time.monotonic()
        if len(self.connections) > self._limits.connections * 1.1:
            self.transport.abort()

    def data_received(self, data: bytes) -> None:
        self._has_spoken = True
        is_free = self.cycle is None or self.cycle.response_complete
        if self._unfinished_since is None and is_free:  # uvicorn ends its own wait for the next request here
            self._begin()
        self._received_bytes += len(data)
        super().data_received(data)
        is_in_head = self._unfinished_since is not None and not self._is_in_body
        if is_in_head and self._received_bytes > self._limits.head_bytes:
            self._refuse(b"431 Request Header Fields Too Large")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._begin()

    def on_headers_complete(self) -> None:
        super().on_headers_complete()
        self._begin()
        self._is_in_body = True
        if self._is_leaving:
            self.cycle.keep_alive = False

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._unfinished_since = None
        self._is_in_body = False

    def shutdown(self) -> None:
        """Ends the connection after its next answer, or soon.

        At once, as uvicorn does, would lose the requests that are on their way on connections which clients
        keep; in this way they are answered and told to use another connection.
        """
        self._is_leaving = True
        is_free = self.cycle is None or self.cycle.response_complete
        if is_free and self._has_spoken:
            self.loop.call_later(LEAVING_S, super().shutdown)
        else:
            super().shutdown()

    def check(self, now: float) -> None:
        """Ends the connection when its request has been unfinished for too long."""
        if self._unfinished_since is None or self.transport.is_closing():
            return
        if self.flow.read_paused:  # it is we who do not read on
            self._unfinished_since = now
            return
        limits = self._limits
        allowed_s = limits.head_s
        if self._is_in_body:
            allowed_s = limits.body_s + self._received_bytes / limits.body_bytes_per_s
        if now - self._unfinished_since > allowed_s:
            self._refuse(b"408 Request Timeout")

    def _begin(self) -> None:
        self._unfinished_since = time.monotonic()
        self._is_in_body = False
        self._received_bytes = 0

    def _refuse(self, status: bytes) -> None:
        """Says why, unless an answer is under way or nothing was asked, and closes."""
        is_answering = self.cycle is not None and not self.cycle.response_complete
        if is_answering and (self.cycle.response_started or not self._is_in_body):
            self.transport.abort()
            return
        if self._has_spoken:
            self.transport.write(b"HTTP/1.1 %b\r\nconnection: close\r\ncontent-length: 0\r\n\r\n" % status)
        self.transport.close()


def raise_open_files() -> int:
    """Lets this process open as many files as it may ask for; how many that are.

    The soft limit is often 1,024, for programs that use `select`.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    for wanted in (hard, 1 << 16, 10_240):  # some systems have no hard limit, and refuse to have none
        if wanted == resource.RLIM_INFINITY or 0 <= wanted <= soft:
            continue
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            return wanted
    return soft


def affordable_connections(wanted: int) -> int:
    """`wanted`, or as many as open files allow; that is logged."""
    affordable = max(16, int((raise_open_files() - OTHER_FILES) / 1.1))
    if affordable < wanted:
        log.warning(
            "at most %d connections are taken instead of %d: raise the limit of open files (ulimit -n)",
            affordable,
            wanted,
        )
    return min(wanted, affordable)


def notice_dead_peers(listener: socket.socket) -> None:
    """Has the kernel end connections whose peer has vanished; what `listener` accepts inherits it."""
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if sys.platform == "linux":
        for option, value in (
            (socket.TCP_USER_TIMEOUT, DEAD_PEER_S * 1000),
            (socket.TCP_KEEPIDLE, DEAD_PEER_S),
            (socket.TCP_KEEPINTVL, DEAD_PEER_S // 4),
        ):
            with contextlib.suppress(OSError):  # a Unix socket has no such options
                listener.setsockopt(socket.IPPROTO_TCP, option, value)
