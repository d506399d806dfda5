"""What one process holds open, opened in order and closed in the reverse order."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from litestar import Request
from prometheus_client import CollectorRegistry
from redis.asyncio import Redis

from app.settings import Settings
from db.engine import Database

REDIS_TIMEOUT_S = 2.0


@dataclass(frozen=True, kw_only=True)
class Resources:
    """The open connections and registries of an api process."""

    settings: Settings
    database: Database
    redis: Redis
    metrics: CollectorRegistry


def open_redis(settings: Settings) -> Redis:
    """A pool that connects when first used, so that the process starts while Redis is away."""
    assert settings.redis_url is not None
    client: Redis = Redis.from_url(
        settings.redis_url,
        max_connections=settings.redis_pool_size,
        socket_connect_timeout=REDIS_TIMEOUT_S,
        socket_timeout=REDIS_TIMEOUT_S,
        health_check_interval=30,
    )
    return client


@asynccontextmanager
async def open_resources(settings: Settings, metrics: CollectorRegistry) -> AsyncIterator[Resources]:
    """Everything an api process needs; all of it is closed at the end of the block."""
    assert settings.database_url is not None
    database = Database.open(
        settings.database_url, pooler=settings.database_pooler, pool_size=settings.database_pool_size
    )
    try:
        redis = open_redis(settings)
        try:
            yield Resources(settings=settings, database=database, redis=redis, metrics=metrics)
        finally:
            await redis.aclose()
    finally:
        await database.close()


def current_resources(request: Request[Any, Any, Any]) -> Resources:
    """The resources of this process, for injection into handlers."""
    resources: Resources = request.app.state.resources
    return resources
