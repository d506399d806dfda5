"""What is shipped, and what it is built from."""

import ast
import re
import sys
import tomllib
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
from hatchling.builders.wheel import WheelBuilder
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
NOT_SHIPPED = {"tests", "benchmarks", "examples"}
LOCKS = ("requirements.lock", "requirements-dev.lock")
PINNED = re.compile(r"^([A-Za-z0-9._-]+)==([^ ;\\]+)", re.MULTILINE)


def pins(lock: str) -> dict[str, str]:
    return {canonicalize_name(name): version for name, version in PINNED.findall((ROOT / lock).read_text())}


def declared(*, with_dev: bool) -> list[Requirement]:
    project, groups = PROJECT["project"], PROJECT["dependency-groups"]
    texts = [*project["dependencies"], *project["optional-dependencies"]["embedded"], *groups["build"]]
    if with_dev:
        texts += [entry for entry in groups["dev"] if isinstance(entry, str)]
    return [Requirement(text) for text in texts]


@pytest.mark.parametrize("lock", LOCKS)
def test_a_lock_names_no_address_and_no_path(lock: str) -> None:
    text = (ROOT / lock).read_text()
    assert not re.findall(r"\w+://\S*|^-\S+.*|\S*/\S*\.(?:whl|gz)\b", text, re.MULTILINE)
    assert not re.findall(r"(?:^|\s)/[a-z]\S*", text, re.MULTILINE)


@pytest.mark.parametrize("lock", LOCKS)
def test_every_pin_of_a_lock_has_a_hash(lock: str) -> None:
    entries = re.split(r"\n(?=[A-Za-z0-9])", (ROOT / lock).read_text())
    pinned = [entry for entry in entries if PINNED.match(entry)]
    assert len(pinned) > 30
    assert [entry.split()[0] for entry in pinned if "--hash=sha256:" not in entry] == []


@pytest.mark.parametrize(("lock", "with_dev"), [(LOCKS[0], False), (LOCKS[1], True)])
def test_a_lock_holds_what_the_project_declares(lock: str, with_dev: bool) -> None:
    pinned = pins(lock)
    for requirement in declared(with_dev=with_dev):
        version = pinned.get(canonicalize_name(requirement.name))
        assert version is not None and requirement.specifier.contains(version), requirement


def test_tests_run_on_the_versions_that_are_shipped() -> None:
    development = pins("requirements-dev.lock")
    assert {name: development.get(name) for name in pins("requirements.lock")} == pins("requirements.lock")


@pytest.fixture(scope="module")
def wheel_files(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    folder = tmp_path_factory.mktemp("dist")
    [built] = WheelBuilder(str(ROOT)).build(directory=str(folder), versions=["standard"])
    with zipfile.ZipFile(built) as wheel:
        return set(wheel.namelist())


def test_the_wheel_holds_every_module_of_every_package(wheel_files: set[str]) -> None:
    packages = PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    expected = {
        str(path.relative_to(ROOT)) for package in packages for path in (ROOT / package).rglob("*.py")
    }
    assert {name for name in wheel_files if name.endswith(".py")} == expected
    assert any(name.startswith("migrations/versions/") for name in wheel_files)


def test_the_wheel_holds_the_files_that_packages_read_at_run_time(wheel_files: set[str]) -> None:
    packages = PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    data = {
        str(path.relative_to(ROOT))
        for package in packages
        for path in (ROOT / package).rglob("*")
        if path.is_file() and path.suffix in (".md", ".json", ".mako", ".lua", ".html")
    }
    assert data <= wheel_files


def test_every_folder_with_modules_of_ours_is_shipped() -> None:
    shipped = set(PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"])
    assert shipped == {path.parent.name for path in ROOT.glob("*/__init__.py")} - NOT_SHIPPED


def test_the_command_starts_what_the_wheel_holds(wheel_files: set[str]) -> None:
    module, _, function = PROJECT["project"]["scripts"]["armillary"].partition(":")
    path = f"{module.replace('.', '/')}.py"
    assert path in wheel_files
    assert f"def {function}(" in (ROOT / path).read_text()


def test_every_library_that_we_import_is_declared() -> None:
    packages = PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    names = {
        name
        for package in packages
        for path in (ROOT / package).rglob("*.py")
        for name in imported_libraries(path)
        if name not in packages
    }
    brought_by = metadata.packages_distributions()
    known = {canonicalize_name(requirement.name) for requirement in declared(with_dev=False)}
    undeclared = {
        name: brought_by.get(name)
        for name in names
        if not known & set(map(canonicalize_name, brought_by[name]))
    }
    assert undeclared == {}


def imported_libraries(path: Path) -> set[str]:
    """The top-level names outside the standard library that a module imports anywhere."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            names.add(node.module.partition(".")[0])
    return names - sys.stdlib_module_names
