"""The way from a commit to Redis. Redis only speeds things up: when it is away nobody waits for it."""

import asyncio
import logging
import time
from collections.abc import Sequence
from typing import Any

from redis.asyncio import BlockingConnectionPool, Redis
from redis.exceptions import NoScriptError, RedisError

from agents.log import LoggedEvent
from app.ending import end
from app.streaming import keys
from app.streaming.batches import PUBLISHED_BODY_BYTES, Batch, Committed, encode_batch
from app.streaming.outgoing import SessionPublisher
from app.streaming.redis_script import PUBLISH, PUBLISH_SHA, Publication

log = logging.getLogger("armillary.streaming")

ANSWER_S = 0.5
"""How long an answer of Redis is waited for."""

PAUSE_S = 1.0
"""After a failure nothing is announced for this long, so that requests to the api stay fast."""

CONNECTIONS = 8
FLUSHED_TOGETHER = 64
RETRY_FIRST_S = 0.05
RETRY_MOST_S = 1.0


class Publisher:
    """One per process. Shared by all holds of a worker, or by all requests of an api."""

    def __init__(self, redis: Redis) -> None:
        self._redis: Any = redis  # its commands have no types
        self._paused_until = 0.0
        self._wanting: dict[SessionPublisher, None] = {}
        self._wanted = asyncio.Event()
        self._flusher: asyncio.Task[None] | None = None

    @classmethod
    def open(cls, redis_url: str) -> "Publisher":
        """Connects when first used."""
        return cls(connect(redis_url))

    def hold(self, *, session_id: str, epoch: int, base_seq: int = 0) -> SessionPublisher:
        """The voice of one hold. `base_seq`: the session's last event that the worker knows of.

        Close it when the hold ends.
        """
        if self._flusher is None:
            self._flusher = asyncio.create_task(self._flush_for_ever())
        return SessionPublisher(session_id, epoch, base_seq=base_seq, wants_flush=self._want_flush)

    async def announce(
        self, session_id: str, events: Sequence[LoggedEvent], *, epoch: int | None = None
    ) -> None:
        """Shows committed events to readers, without a hold. Never fails; takes `ANSWER_S` at most.

        With `epoch`, which its transaction has raised, the hold before is put off and its previews are void.
        """
        batch = Batch(epoch, time.time_ns() // 1_000_000, tuple(map(_committed, events)))
        publication = Publication(session_id=session_id, epoch=epoch, payload=encode_batch(batch))
        await self._try("EVALSHA", PUBLISH_SHA, *publication.arguments(), otherwise=("EVAL", PUBLISH))

    async def signal_cancel(self, session_id: str) -> None:
        """Tells the worker that holds the session to look for a cancel. Never fails, may be lost."""
        await self._try("PUBLISH", keys.CANCEL_CHANNEL, session_id)

    async def aclose(self) -> None:
        """Closes all connections; what holds have not flushed is dropped."""
        if self._flusher is not None:
            for failure in await end(self._flusher):
                raise failure
            self._flusher = None
        await self._redis.aclose()

    # -- one command of the api -------------------------------------------------------------------------

    async def _try(self, *command: Any, otherwise: tuple[str, str] | None = None) -> None:
        """`otherwise` replaces the first two words when Redis does not know the script."""
        if time.monotonic() < self._paused_until:
            return
        try:
            async with asyncio.timeout(ANSWER_S):
                try:
                    await self._redis.execute_command(*command)
                except NoScriptError:
                    assert otherwise is not None
                    await self._redis.execute_command(*otherwise, *command[2:])
        except (RedisError, OSError, TimeoutError) as error:
            self._paused_until = time.monotonic() + PAUSE_S
            log.warning("Redis did not take an announcement: %s", error)

    # -- the flushes of the holds -----------------------------------------------------------------------

    def _want_flush(self, session: SessionPublisher) -> None:
        self._wanting[session] = None
        self._wanted.set()

    async def _flush_for_ever(self) -> None:
        """One round trip at a time for all holds; what is said meanwhile goes with the next."""
        pause_s = RETRY_FIRST_S
        while True:
            await self._wanted.wait()
            sessions = list(self._wanting)[:FLUSHED_TOGETHER]
            for session in sessions:
                del self._wanting[session]
            if not self._wanting:
                self._wanted.clear()
            try:
                await self._flush(sessions)
                pause_s = RETRY_FIRST_S
            except (RedisError, OSError, TimeoutError) as error:
                log.warning("Redis did not take previews, trying again: %s", error)
                for session in sessions:
                    self._want_flush(session)
                await asyncio.sleep(pause_s)
                pause_s = min(pause_s * 2, RETRY_MOST_S)

    async def _flush(self, sessions: Sequence[SessionPublisher]) -> None:
        """Raises: RedisError, OSError; then what was taken is taken again, with the same numbers."""
        taken = [(session, session.take()) for session in sessions]
        sent = [(session, publication) for session, publication in taken if publication is not None]
        for session, publication in taken:
            if publication is None:
                session.confirm(0)
        results = await self._call_script([publication for _, publication in sent])
        failure: Exception | None = None
        for (session, _), result in zip(sent, results, strict=True):
            if isinstance(result, Exception):
                failure = result
            else:
                session.confirm(result)
        if failure is not None:
            raise failure

    async def _call_script(self, publications: Sequence[Publication]) -> list[int | Exception]:
        results = await self._pipeline("EVALSHA", PUBLISH_SHA, publications)
        unknown = [at for at, result in enumerate(results) if isinstance(result, NoScriptError)]
        if unknown:
            again = await self._pipeline("EVAL", PUBLISH, [publications[at] for at in unknown])
            for at, result in zip(unknown, again, strict=True):
                results[at] = result
        return results

    async def _pipeline(
        self, command: str, script: str, publications: Sequence[Publication]
    ) -> list[int | Exception]:
        if not publications:
            return []
        async with self._redis.pipeline(transaction=False) as pipe:
            for publication in publications:
                pipe.execute_command(command, script, *publication.arguments())
            return list(await pipe.execute(raise_on_error=False))


def connect(redis_url: str) -> Redis:
    """A small pool; every command has its bound."""
    pool = BlockingConnectionPool.from_url(
        redis_url,
        max_connections=CONNECTIONS,
        timeout=ANSWER_S,
        socket_timeout=ANSWER_S,
        socket_connect_timeout=ANSWER_S,
        protocol=2,
    )
    return Redis.from_pool(pool)


def _committed(event: LoggedEvent) -> Committed:
    body = event.body if len(event.body) <= PUBLISHED_BODY_BYTES else b""
    return Committed(event.seq, event.id, event.type, body)
