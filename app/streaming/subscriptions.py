"""One pub/sub connection of a process, which comes back by itself."""

import asyncio
import contextlib
import logging
from collections import defaultdict, deque
from collections.abc import Callable
from typing import Any

from redis.asyncio.connection import ConnectionPool
from redis.exceptions import RedisError

from app.ending import end

log = logging.getLogger("armillary.streaming")

RETRY_FIRST_S = 0.05
RETRY_MOST_S = 2.0
SILENCE_S = 5.0
"""After this long without a word Redis is asked for one; after as long again the connection is dead."""


class Subscriptions:
    """Channels of one connection.

    `on_message` gets channel and payload, in the order of the server. `on_subscribed` gets a channel each
    time that Redis has acknowledged it: the first time, and again after each loss of the connection. What was
    published between a loss and that acknowledgement is lost. Both are called in the event loop and must
    not block.
    """

    def __init__(
        self,
        redis_url: str,
        *,
        on_message: Callable[[str, bytes], None],
        on_subscribed: Callable[[str], None],
    ) -> None:
        self._pool: Any = ConnectionPool.from_url(
            redis_url, socket_connect_timeout=2.0, socket_timeout=SILENCE_S, protocol=2
        )
        self._on_message = on_message
        self._on_subscribed = on_subscribed
        self._channels: set[str] = set()
        self._connection: Any = None  # of redis-py, without types
        self._task: asyncio.Task[None] | None = None
        self._commands: deque[tuple[str, str]] = deque()
        self._has_commands = asyncio.Event()
        self._unanswered: defaultdict[str, int] = defaultdict(int)
        self.reconnects = 0

    def start(self) -> None:
        self._task = asyncio.create_task(self._stay_connected())

    async def aclose(self) -> None:
        if self._task is not None:
            await end(self._task)
            self._task = None

    @property
    def is_connected(self) -> bool:
        return self._connection is not None

    @property
    def count(self) -> int:
        """How many channels are wanted."""
        return len(self._channels)

    def add(self, channel: str) -> None:
        """Asks for a channel; `on_subscribed` tells when messages will come."""
        self._channels.add(channel)
        self._command("SUBSCRIBE", channel)

    def remove(self, channel: str) -> None:
        self._channels.discard(channel)
        self._command("UNSUBSCRIBE", channel)

    def _command(self, name: str, channel: str) -> None:
        if self._connection is not None:
            self._commands.append((name, channel))
            self._has_commands.set()

    # -- the connection ---------------------------------------------------------------------------------

    async def _stay_connected(self) -> None:
        pause_s = RETRY_FIRST_S
        while True:
            connection: Any = self._pool.make_connection()
            try:
                await connection.connect()
                pause_s = RETRY_FIRST_S
                await self._serve(connection)
            except (RedisError, OSError, TimeoutError) as error:
                log.warning("the connection to Redis is lost: %s", error)
            finally:
                self._connection = None
                with contextlib.suppress(RedisError, OSError):
                    await connection.disconnect(nowait=True)
            self.reconnects += 1
            await asyncio.sleep(pause_s)
            pause_s = min(pause_s * 2, RETRY_MOST_S)

    async def _serve(self, connection: Any) -> None:
        """Returns never. Raises: RedisError, OSError."""
        self._commands.clear()
        self._unanswered.clear()
        self._connection = connection
        for channel in sorted(self._channels):
            self._command("SUBSCRIBE", channel)
        writer = asyncio.create_task(self._write(connection))
        try:
            await self._read(connection)
        finally:
            await end(writer)

    async def _write(self, connection: Any) -> None:
        """Sends what is asked for, many channels in one command. Ends when the connection does."""
        while True:
            await self._has_commands.wait()
            self._has_commands.clear()
            while self._commands:
                name = self._commands[0][0]
                channels = []
                while self._commands and self._commands[0][0] == name:
                    channels.append(self._commands.popleft()[1])
                if name == "SUBSCRIBE":
                    for channel in channels:
                        self._unanswered[channel] += 1
                await connection.send_command(name, *channels, check_health=False)

    async def _read(self, connection: Any) -> None:
        is_asked = False
        while True:
            answer = await connection.read_response(timeout=SILENCE_S)
            if answer is not None:
                is_asked = False
                self._take(answer)
            elif is_asked:
                raise TimeoutError("Redis is silent")
            else:
                is_asked = True
                await connection.send_command("PING", check_health=False)

    def _take(self, answer: object) -> None:
        if not isinstance(answer, list) or len(answer) != 3:
            return
        kind, channel, payload = answer
        if kind == b"message":
            self._on_message(channel.decode(), payload)
        elif kind == b"subscribe":
            name = channel.decode()
            self._unanswered[name] -= 1
            if self._unanswered[name] <= 0:
                del self._unanswered[name]
                if name in self._channels:
                    self._on_subscribed(name)
