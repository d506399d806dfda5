"""`armillary migrate` against databases that are not there, and the others against one without tables."""

import os
import subprocess
import sys
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

import pytest

from app.embedded.folder import Endpoints

ROOT = Path(__file__).parents[2]
END_S = 60


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"path": "/no_such_database"}, 'database "no_such_database" does not exist'),
        ({"query": "host=/no/such/folder"}, "No such file or directory"),
    ],
)
def test_a_database_that_cannot_be_reached_is_one_line(
    servers: Endpoints, changed: dict[str, str], said: str
) -> None:
    done = run("migrate", urlunsplit(urlsplit(servers.database_url)._replace(**changed)), servers)
    assert done.returncode == 1
    assert done.stderr.startswith("armillary: The database cannot be reached: ")
    assert said in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("command", ["api", "worker"])
def test_what_needs_tables_says_so_in_one_line(servers: Endpoints, command: str) -> None:
    done = run(command, urlunsplit(urlsplit(servers.database_url)._replace(path="/postgres")), servers)
    assert done.returncode == 1
    assert done.stderr == "armillary: the database has no tables of ours yet: run `armillary migrate`\n"
    assert not done.stdout


def run(command: str, database_url: str, servers: Endpoints) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("ARMILLARY_")}
    return subprocess.run(
        [sys.executable, "-m", "app", command],
        cwd=ROOT,
        env={
            **kept,
            "ARMILLARY_DATABASE_URL": database_url,
            "ARMILLARY_REDIS_URL": servers.redis_url,
            "ARMILLARY_PORT": "0",
        },
        capture_output=True,
        text=True,
        timeout=END_S,
        check=False,
    )
