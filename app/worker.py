"""The worker process: wake-ups in, runs worked on, hand-over on SIGTERM."""

import asyncio
import logging
import signal
from contextlib import AsyncExitStack, aclosing

import uvloop

from agents.hooks import HookChain
from app.ending import end
from app.lease import Lease
from app.plugins import load_plugins
from app.provider_settings import provider_registry
from app.queue import WakeUps, WakeUpWorker
from app.recovery import sweep_for_ever
from app.settings import Settings
from app.streaming.publisher import Publisher
from app.streaming.signals import Signals
from app.supervisor import Supervisor
from app.telemetry import configure_logging
from db.engine import Database
from providers.ids import new_id
from providers.retry import RetryPolicy
from tools.registry import ToolRegistry

_log = logging.getLogger(__name__)


def run_worker(settings: Settings, *, tools: ToolRegistry | None = None) -> int:
    """Works until SIGTERM or SIGINT; the exit code. `tools` None: those of service and plug-ins."""
    configure_logging(level=settings.log_level, form=settings.log_format, secrets=settings.secrets)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_work(settings, tools))
    return 0


async def _work(settings: Settings, tools: ToolRegistry | None) -> None:
    assert settings.database_url is not None
    assert settings.redis_url is not None
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)
    async with AsyncExitStack() as stack:
        database = Database.open(
            settings.database_url,
            pooler=settings.database_pooler,
            pool_size=settings.database_pool_size,
        )
        stack.push_async_callback(database.close)
        publisher = await stack.enter_async_context(aclosing(Publisher.open(settings.redis_url)))
        wake_ups = await stack.enter_async_context(aclosing(WakeUps(settings.redis_url)))
        plugins = load_plugins()
        models = await stack.enter_async_context(aclosing(provider_registry(settings, plugins)))
        # An SDK takes seconds to import: in a thread, and before the first run is taken.
        await asyncio.to_thread(models.preload)
        await models.discover()
        worker_id = new_id("work")
        supervisor = Supervisor(
            worker_id=worker_id,
            slots=settings.worker_slots,
            database=database,
            publisher=publisher,
            wake_ups=wake_ups,
            models=models,
            tools=plugins.tools if tools is None else tools,
            retry=RetryPolicy(),
            hooks=HookChain(plugins.hooks),
        )
        await _serve(
            settings,
            supervisor,
            worker_id=worker_id,
            stopping=stopping,
            database=database,
            publisher=publisher,
            wake_ups=wake_ups,
        )


async def _serve(
    settings: Settings,
    supervisor: Supervisor,
    *,
    worker_id: str,
    stopping: asyncio.Event,
    database: Database,
    publisher: Publisher,
    wake_ups: WakeUps,
) -> None:
    assert settings.database_url is not None
    assert settings.redis_url is not None

    lease = Lease(
        worker_id=worker_id,
        database_url=settings.database_url,
        pooler=settings.database_pooler,
        slots=settings.worker_slots,
        lease_s=settings.lease_s,
        on_renewed=supervisor.renewed,
    )
    supervisor.lease = lease
    queue = WakeUpWorker(settings.redis_url, take=supervisor.take, has_room=supervisor.has_room)
    signals = Signals(settings.redis_url, on_wake=queue.heard, on_cancel=supervisor.cancel)
    sweeps = sweep_for_ever(
        database=database,
        worker_id=worker_id,
        lease=lease,
        supervisor=supervisor,
        publisher=publisher,
        wake_ups=wake_ups,
        idempotency_hours=settings.idempotency_hours,
    )
    lease.start()
    await signals.start()
    tasks = [asyncio.create_task(work) for work in (queue.run_for_ever(), sweeps, lease.wait_until_ended())]
    stop_task = asyncio.create_task(_until(stopping))
    _log.info("working", extra={"worker_id": worker_id, "slots": settings.worker_slots})
    try:
        # A side task never ends by itself: when one does, this process is of no use any more.
        await asyncio.wait([stop_task, *tasks], return_when=asyncio.FIRST_COMPLETED)
        await supervisor.drain(settings.worker_shutdown_s)
    finally:
        failures = await end(stop_task, *tasks)
        await signals.aclose()
        await lease.aclose()
    for failure in failures:
        raise failure


async def _until(event: asyncio.Event) -> None:
    await event.wait()
