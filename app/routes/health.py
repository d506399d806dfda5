"""Is the process alive, can it serve, and what has it counted."""

import asyncio
import logging
from typing import Literal

from litestar import Response, get
from litestar.di import NamedDependency
from msgspec import Struct
from prometheus_client import generate_latest
from redis.exceptions import RedisError

from app.auth import PUBLIC, scope
from app.resources import Resources
from db.errors import DatabaseError

log = logging.getLogger("armillary.health")

CHECK_S = 2.0
METRICS_MEDIA_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Live(Struct, frozen=True, kw_only=True):
    """The process answers."""

    status: Literal["ok"] = "ok"


class Ready(Struct, frozen=True, kw_only=True):
    """`degraded`: Redis is away, so work starts and streams move later, but nothing is lost."""

    status: Literal["ok", "degraded", "unavailable"]
    postgres: Literal["ok", "away"]
    redis: Literal["ok", "away"]


@get("/health/live", opt=PUBLIC, tags=["Operations"])
async def live() -> Live:
    """Tells that the process is alive."""
    return Live()


@get("/health/ready", opt=PUBLIC, tags=["Operations"])
async def ready(resources: NamedDependency[Resources]) -> Response[Ready]:
    """Tells whether requests can be served: Postgres is needed, Redis only speeds things up."""
    postgres, redis = await asyncio.gather(_postgres_answers(resources), _redis_answers(resources))
    status: Literal["ok", "degraded", "unavailable"] = "ok" if redis else "degraded"
    report = Ready(
        status=status if postgres else "unavailable",
        postgres="ok" if postgres else "away",
        redis="ok" if redis else "away",
    )
    return Response(report, status_code=200 if postgres else 503)


@get("/metrics", opt=scope("admin"), tags=["Operations"], media_type=METRICS_MEDIA_TYPE)
async def metrics(resources: NamedDependency[Resources]) -> bytes:
    """Counters of this process in the text format of Prometheus."""
    return generate_latest(resources.metrics)


async def _postgres_answers(resources: Resources) -> bool:
    try:
        async with asyncio.timeout(CHECK_S):
            await resources.database.ping()
    except (DatabaseError, TimeoutError) as error:
        log.warning("Postgres does not answer: %s", error)
        return False
    return True


async def _redis_answers(resources: Resources) -> bool:
    try:
        async with asyncio.timeout(CHECK_S):
            await resources.redis.ping()
    except (RedisError, OSError, TimeoutError) as error:
        log.warning("Redis does not answer: %s", error)
        return False
    return True


ROUTES = [live, ready, metrics]
