"""The arq queue: a job is only a wake-up, so losing all of them loses nothing.

Which run is next is asked of Postgres when a worker is woken. A message on the wake channel names the job;
of the workers that hear it the one that removes the job from the queue serves it. What nobody heard, or had
room for, stays in the queue for arq.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any, cast
from uuid import uuid4

import msgspec
from arq.connections import ArqRedis
from arq.constants import in_progress_key_prefix, job_key_prefix
from arq.jobs import serialize_job
from arq.utils import timestamp_ms
from arq.worker import Worker, func
from redis.asyncio import BlockingConnectionPool
from redis.exceptions import RedisError

from app.streaming import keys

QUEUE_NAME = "armillary:queue"
JOB_NAME = "take_run"
ANSWER_S = 0.5  # how long an answer of Redis is waited for
PAUSE_S = 1.0  # after a failure nothing is queued for so long; sweepers find the runs
JOB_TIMEOUT_S = 60
MAX_JOBS = 8  # wake-ups handled at once; each takes milliseconds
READ_LIMIT = 2000  # above what any fleet has in flight, or arq would not see the jobs behind
CONNECTIONS = 16

_log = logging.getLogger(__name__)
_encode = msgspec.json.Encoder(enc_hook=str).encode  # arq serialises errors too, also those that nobody keeps


def connect_queue(redis_url: str) -> ArqRedis:
    """arq's client. It connects when first used, and speaks JSON."""
    pool = BlockingConnectionPool.from_url(
        redis_url,
        max_connections=CONNECTIONS,
        timeout=ANSWER_S,
        socket_timeout=ANSWER_S * 5,
        socket_connect_timeout=ANSWER_S,
    )
    return ArqRedis(
        pool,
        job_serializer=_encode,
        job_deserializer=msgspec.json.decode,
        default_queue_name=QUEUE_NAME,
    )


class WakeUps:
    """Wakes one worker for each run that was queued. Best effort and bounded in time."""

    def __init__(self, redis_url: str) -> None:
        self._redis = connect_queue(redis_url)
        self._paused_until_s = 0.0

    async def wake(self) -> None:
        """Call it after the commit that queued a run. Never fails; a lost call costs a second at most."""
        if time.monotonic() < self._paused_until_s:
            return
        try:
            async with asyncio.timeout(ANSWER_S):
                await self._enqueue()
        except (RedisError, OSError, TimeoutError) as error:
            self._paused_until_s = time.monotonic() + PAUSE_S
            _log.warning("Redis did not take a wake-up: %s", error)

    async def _enqueue(self) -> None:
        """What arq's `enqueue_job` does, and the message, in one round trip: an id of ours is always new."""
        now_ms = timestamp_ms()
        job_id = uuid4().hex
        job = serialize_job(JOB_NAME, (), {}, None, now_ms, serializer=self._redis.job_serializer)
        async with self._redis.pipeline(transaction=True) as pipe:
            pipe.psetex(job_key_prefix + job_id, self._redis.expires_extra_ms, job)
            pipe.zadd(QUEUE_NAME, {job_id: now_ms})
            pipe.publish(keys.WAKE_CHANNEL, job_id)
            await pipe.execute()

    async def aclose(self) -> None:
        await self._redis.aclose(close_connection_pool=True)  # a pool that is passed in is left open else


class WakeUpWorker(Worker):
    """arq's worker, kicked by pub/sub and not hurt by a Redis that goes away.

    `take` is called once for each wake-up; `has_room` says whether this process can take a run at all.
    """

    def __init__(
        self, redis_url: str, *, take: Callable[[], Awaitable[None]], has_room: Callable[[], bool]
    ) -> None:
        async def take_run(_: dict[Any, Any]) -> None:
            await take()

        # It has two lines to say on each wake-up, and warns of those that another worker was quicker at.
        logging.getLogger("arq.worker").setLevel(logging.ERROR)
        super().__init__(
            functions=[func(cast("Any", take_run), name=JOB_NAME, max_tries=1, keep_result=0)],
            queue_name=QUEUE_NAME,
            redis_pool=connect_queue(redis_url),
            handle_signals=False,
            max_jobs=MAX_JOBS,
            job_timeout=JOB_TIMEOUT_S,
            keep_result=0,
            queue_read_limit=READ_LIMIT,
            retry_jobs=False,
            job_serializer=_encode,
            job_deserializer=msgspec.json.decode,
            log_results=False,
        )
        self._has_room = has_room
        self._take = take
        self._kicked = asyncio.Event()
        self._polling = asyncio.Lock()
        self._group: asyncio.TaskGroup | None = None  # while wake-ups are served
        self._serving = 0

    def heard(self, job_id: str) -> None:
        """A job was queued. Empty: some may have been. Nothing waits for the next poll."""
        if not job_id or self._group is None or self._serving >= MAX_JOBS:
            self._kicked.set()
        elif self._has_room():
            self._serving += 1
            self._group.create_task(self._serve(job_id))

    async def run_for_ever(self) -> None:
        """Serves wake-ups until it is cancelled, through any outage of Redis."""
        try:
            async with asyncio.TaskGroup() as group:
                self._group = group
                group.create_task(self._poll_when_kicked())
                group.create_task(self._poll_for_ever())
        finally:
            self._group = None
            # Jobs are not cancelled: one that claims a run must come to know whether it has it.
            await asyncio.gather(*self.tasks.values(), return_exceptions=True)
            await self.pool.aclose(close_connection_pool=True)

    async def _serve(self, job_id: str) -> None:
        """Takes a run if the job was still there: one worker of all that have heard of it."""
        try:
            async with self.pool.pipeline(transaction=False) as pipe:
                pipe.zrem(QUEUE_NAME, job_id)
                pipe.delete(job_key_prefix + job_id)
                is_ours, _ = await pipe.execute()
            if is_ours:
                await self._take()
        except (RedisError, OSError, TimeoutError) as error:
            _log.warning("a wake-up was lost: %s", error)  # sweepers find its run
        finally:
            self._serving -= 1

    async def _poll_for_ever(self) -> None:
        while True:
            try:
                await self.main()
            except (RedisError, OSError, TimeoutError) as error:
                _log.warning("the queue is away: %s", error)
            await asyncio.sleep(PAUSE_S)

    async def _poll_when_kicked(self) -> None:
        while True:
            await self._kicked.wait()
            self._kicked.clear()
            await self._poll_iteration()

    async def _poll_iteration(self) -> None:
        async with self._polling:
            self.allow_pick_jobs = self._has_room()
            try:
                await super()._poll_iteration()
            except (RedisError, OSError, TimeoutError) as error:
                _log.warning("the queue is away: %s", error)
                await asyncio.sleep(PAUSE_S)
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise asyncio.CancelledError  # redis-py has lost it, see `app.ending`

    async def start_jobs(self, job_ids: list[bytes]) -> None:
        """Marks each job as begun and starts it, in one round trip where arq takes five.

        A job that another worker ended in between is found gone by `run_job`: a wake-up less, and no loss.
        """
        for job_id in (name.decode() for name in job_ids):
            if job_id in self.tasks:
                continue
            if self.job_counter >= self.max_jobs:
                return
            mark = in_progress_key_prefix + job_id
            if await self.pool.set(mark, b"1", nx=True, px=int(self.in_progress_timeout_s * 1000)):
                await self.sem.acquire()  # at once: it has one place more than there may be jobs
                self.job_counter += 1
                self.tasks[job_id] = self.loop.create_task(self._run_marked(job_id))

    async def _run_marked(self, job_id: str) -> None:
        try:
            await self.run_job(job_id, timestamp_ms())
        finally:
            self._release_sem_dec_counter_on_complete()

    def _release_sem_dec_counter_on_complete(self) -> None:
        super()._release_sem_dec_counter_on_complete()
        self._kicked.set()
