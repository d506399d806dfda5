"""The connection under a stream: what ASGI hides and many readers need.

ASGI costs the turn of a task for each write, does not tell what is unsent, and cannot end a socket that does
not drain. uvicorn's own objects can, and its `receive` leads to them.
"""

import asyncio
import contextlib
import socket
import struct

from starlette.types import Receive
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle


class Connection:
    """One connection of uvicorn with one answer on it, of which uvicorn has sent the head, in chunks."""

    __slots__ = ("_cycle", "_transport")

    def __init__(self, receive: Receive) -> None:
        cycle = getattr(receive, "__self__", None)
        if not isinstance(cycle, RequestResponseCycle):
            raise TypeError("Streams need uvicorn with httptools, and nothing between it and `receive`.")
        self._cycle = cycle
        self._transport = cycle.transport

    @property
    def is_disconnected(self) -> bool:
        """The server knows that the client has gone."""
        return self._cycle.disconnected

    @property
    def may_write(self) -> bool:
        """The client takes what it is sent, as far as is known."""
        cycle = self._cycle
        return not (cycle.flow.write_paused or cycle.disconnected or cycle.response_complete)

    def write(self, data: bytes) -> int:
        """Sends a chunk at once, when `may_write`. How many bytes it has on the wire.

        It is the same as `send` would put there, without the turn of a task that an ASGI message costs.
        """
        chunk = b"%x\r\n%b\r\n" % (len(data), data)
        self._transport.write(chunk)
        return len(chunk)

    def wake(self) -> None:
        """Has a `receive` that waits return, with nothing new to tell."""
        self._cycle.message_event.set()

    @property
    def unsent_bytes(self) -> int:
        """Written, and not yet with the kernel."""
        return self._transport.get_write_buffer_size()

    def close(self) -> None:
        """Ends it when everything has been sent."""
        self._transport.close()

    def abort(self) -> None:
        """Ends it now; what is unsent is dropped."""
        self._transport.abort()

    def reset(self) -> None:
        """As `abort`, and the client sees an error rather than an end."""
        raw = self._transport.get_extra_info("socket")
        with contextlib.suppress(OSError, AttributeError):
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._transport.abort()


async def until_disconnected(receive: Receive, *, timeout_s: float) -> None:
    """Returns when the server knows that the client has gone, or after `timeout_s`."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            while (await receive())["type"] != "http.disconnect":
                pass
