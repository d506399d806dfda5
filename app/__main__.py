"""The command line. Each command imports only what it needs, since start-up time counts."""

import argparse
import asyncio
import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence

from app.settings import Settings, SettingsError, load_settings

SCHEMA_CHECK_S = 2.0

Command = Callable[[Settings, argparse.Namespace], int]


class CommandFailed(Exception):
    """A command could not do its work. The message is one line."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; the exit code. What an operator can mend is one line on stderr."""
    arguments = _parser().parse_args(argv)
    command: Command = arguments.command
    try:
        return command(load_settings(), arguments)
    except SettingsError as error:
        for problem in error.problems:
            sys.stderr.write(f"armillary: {problem}\n")
        return 2
    except Exception as error:
        if not _is_for_operator(error):
            raise
        sys.stderr.write(f"armillary: {error}\n")
        return 1


def _is_for_operator(error: Exception) -> bool:
    """True for errors that say what to do. Imports nothing that has not been imported by now."""
    kinds = {
        "app.embedded.errors": "EmbeddedError",
        "app.server": "PortUnavailable",
        "app.serve": "ServeFailed",
        "db.errors": "DatabaseAway",
    }
    known = [getattr(sys.modules[name], kind) for name, kind in kinds.items() if name in sys.modules]
    return isinstance(error, (CommandFailed, *known))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="armillary", description="A self-hosted agent backend.")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    def add(name: str, command: Command, text: str) -> argparse.ArgumentParser:
        added = commands.add_parser(name, help=text, description=text)
        added.set_defaults(command=command)
        return added

    add("serve", _serve, "run everything on this machine, embedded servers included")
    api = add("api", _api, "run one API process")
    api.add_argument("--listen-fd", type=int, help="listen on this inherited socket")
    add("worker", _worker, "run one worker process")
    add("migrate", _migrate, "bring the database to the newest schema")
    keys = add("keys", _no_command, "make API keys")
    create = keys.add_subparsers(title="commands", required=True, metavar="COMMAND").add_parser(
        "create", help="make a key of the default tenant and print it, once"
    )
    create.set_defaults(command=_create_key)
    create.add_argument("--name", default="cli", help="what the key is for")
    create.add_argument(
        "--scope",
        action="append",
        choices=("admin", "write", "read"),
        help="what the key may do; may be given several times (default: write and read)",
    )
    add("openapi", _openapi, "print the OpenAPI document")
    add("settings", _settings, "print the handbook page of all settings")
    add("doctor", _doctor, "check this installation and print what was found")
    return parser


def _no_command(settings: Settings, arguments: argparse.Namespace) -> int:
    raise CommandFailed("no command given")


@contextlib.contextmanager
def reachable(settings: Settings, *, may_start: bool) -> Iterator[Settings]:
    """`settings` with the URLs of the embedded servers, if none are set.

    `may_start`: servers that do not run are started for the time of the block; else that is an error.
    """
    if not settings.is_embedded:
        yield settings
        return
    import msgspec

    from app.embedded import attach, running_servers

    with contextlib.ExitStack() as stack:
        if may_start:
            endpoints = stack.enter_context(running_servers(settings.data_path))
        else:
            endpoints = attach(settings.data_path)
        yield msgspec.structs.replace(
            settings, database_url=endpoints.database_url, redis_url=endpoints.redis_url
        )


def _serve(settings: Settings, arguments: argparse.Namespace) -> int:
    from app.serve import serve

    return serve(settings)


def _api(settings: Settings, arguments: argparse.Namespace) -> int:
    from app.server import run_api

    with reachable(settings, may_start=False) as connected:
        asyncio.run(_need_schema(connected))
        return run_api(connected, listen_fd=arguments.listen_fd)


def _worker(settings: Settings, arguments: argparse.Namespace) -> int:
    from app.worker import run_worker

    with reachable(settings, may_start=False) as connected:
        asyncio.run(_need_schema(connected))
        return run_worker(connected) or 0


async def _need_schema(settings: Settings) -> None:
    """A database that is away at the moment is no reason not to start. Raises: CommandFailed."""
    from db.engine import Database
    from db.errors import DatabaseError
    from db.presence import has_schema

    assert settings.database_url is not None
    database = Database.open(settings.database_url, pooler=settings.database_pooler, pool_size=1)
    try:
        async with asyncio.timeout(SCHEMA_CHECK_S):
            is_there = await has_schema(database)
    except (DatabaseError, TimeoutError):
        return
    finally:
        await database.close()
    if not is_there:
        raise CommandFailed("the database has no tables of ours yet: run `armillary migrate`")


def _migrate(settings: Settings, arguments: argparse.Namespace) -> int:
    from db.migrate import find_versions, upgrade

    with reachable(settings, may_start=True) as connected:
        assert connected.database_url is not None
        asyncio.run(upgrade(connected.database_url, pooler=connected.database_pooler))
        found, newest = asyncio.run(find_versions(connected.database_url, pooler=connected.database_pooler))
    print(f"the schema is at {found}")
    return 0 if found == newest else 1


def _create_key(settings: Settings, arguments: argparse.Namespace) -> int:
    with reachable(settings, may_start=True) as connected:
        print(asyncio.run(_new_key(connected, arguments.name, arguments.scope or ["write", "read"])))
    return 0


async def _new_key(settings: Settings, name: str, scopes: Sequence[str]) -> str:
    from db.engine import Database
    from db.keys import create_key
    from db.migrate import upgrade
    from db.tenants import ensure_default_tenant

    assert settings.database_url is not None
    await upgrade(settings.database_url, pooler=settings.database_pooler)
    database = Database.open(settings.database_url, pooler=settings.database_pooler, pool_size=1)
    try:
        async with database.transaction() as tx:
            tenant_id = await ensure_default_tenant(tx)
            _, plaintext = await create_key(tx, tenant_id=tenant_id, name=name, scopes=scopes)
    finally:
        await database.close()
    return plaintext


def _openapi(settings: Settings, arguments: argparse.Namespace) -> int:
    from app.openapi import document

    sys.stdout.buffer.write(document())
    return 0


def _settings(settings: Settings, arguments: argparse.Namespace) -> int:
    from app.settings_page import settings_page

    print(settings_page(), end="")
    return 0


def _doctor(settings: Settings, arguments: argparse.Namespace) -> int:
    from app.doctor import examine

    findings = asyncio.run(examine(settings))
    for finding in findings:
        print(f"{'ok  ' if finding.is_good else 'FAIL'}  {finding.subject}: {finding.text}")
    return 0 if all(finding.is_good for finding in findings) else 1


if __name__ == "__main__":
    sys.exit(main())
