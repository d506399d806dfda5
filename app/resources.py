"""What one process holds open, opened in order and closed in the reverse order."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

from litestar import Request
from prometheus_client import CollectorRegistry
from redis.asyncio import Redis

from app.key_lookups import KeyLookups
from app.plugins import load_plugins
from app.provider_settings import provider_registry
from app.queue import WakeUps
from app.settings import Settings
from app.streaming.hub import Hub
from app.streaming.limits import StreamLimits
from app.streaming.publisher import Publisher
from db.engine import Database
from db.queue_depth import QueueBounds
from providers.registry import Registry
from tools.registry import ToolRegistry

REDIS_TIMEOUT_S = 2.0
HEARTBEAT_CHECK_S = 1.0  # silence is measured once a second, so a heartbeat may come this much later


@dataclass(frozen=True, kw_only=True)
class Resources:
    """The open connections and registries of an api process."""

    settings: Settings
    database: Database
    keys: KeyLookups
    redis: Redis
    publisher: Publisher
    hub: Hub
    wake_ups: WakeUps
    providers: Registry
    tools: ToolRegistry
    metrics: CollectorRegistry

    @property
    def queue_bounds(self) -> QueueBounds:
        """How much may wait where a tenant has no bound of its own."""
        return QueueBounds(
            queued_runs=self.settings.max_queued_runs, pending_prompts=self.settings.max_pending_prompts
        )


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


def stream_limits(settings: Settings) -> StreamLimits:
    """What an operator can set of the bounds on reading."""
    return StreamLimits(
        stall_bytes=settings.stream_buffer_bytes,
        stall_s=settings.stream_send_timeout_s,
        heartbeat_s=max(settings.stream_heartbeat_s - HEARTBEAT_CHECK_S, 0.1),
    )


@asynccontextmanager
async def open_resources(settings: Settings, metrics: CollectorRegistry) -> AsyncIterator[Resources]:
    """Everything an api process needs; all of it is closed at the end of the block."""
    assert settings.database_url is not None
    assert settings.redis_url is not None
    async with AsyncExitStack() as stack:
        database = Database.open(
            settings.database_url, pooler=settings.database_pooler, pool_size=settings.database_pool_size
        )
        stack.push_async_callback(database.close)
        redis = open_redis(settings)
        stack.push_async_callback(redis.aclose)
        publisher = Publisher.open(settings.redis_url)
        stack.push_async_callback(publisher.aclose)
        hub = Hub(database, settings.redis_url, stream_limits(settings))
        await hub.start()
        stack.push_async_callback(hub.close)
        wake_ups = WakeUps(settings.redis_url)
        stack.push_async_callback(wake_ups.aclose)
        plugins = load_plugins()
        providers = provider_registry(settings, plugins)
        stack.push_async_callback(providers.aclose)
        yield Resources(
            settings=settings,
            database=database,
            keys=KeyLookups(database),
            redis=redis,
            publisher=publisher,
            hub=hub,
            wake_ups=wake_ups,
            providers=providers,
            tools=plugins.tools,
            metrics=metrics,
        )


def current_resources(request: Request[Any, Any, Any]) -> Resources:
    """The resources of this process, for injection into handlers."""
    resources: Resources = request.app.state.resources
    return resources
