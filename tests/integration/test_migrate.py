"""`armillary migrate` against databases that are not there."""

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
    kept = {name: value for name, value in os.environ.items() if not name.startswith("ARMILLARY_")}
    done = subprocess.run(
        [sys.executable, "-m", "app", "migrate"],
        cwd=ROOT,
        env={
            **kept,
            "ARMILLARY_DATABASE_URL": urlunsplit(urlsplit(servers.database_url)._replace(**changed)),
            "ARMILLARY_REDIS_URL": servers.redis_url,
        },
        capture_output=True,
        text=True,
        timeout=END_S,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr.startswith("armillary: The database cannot be reached: ")
    assert said in done.stderr
    assert len(done.stderr.splitlines()) == 1
