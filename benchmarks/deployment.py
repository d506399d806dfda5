"""A whole Armillary of its own for a benchmark: embedded servers, api and worker, in a temporary folder."""

import asyncio
import json
import os
import signal
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

START_S = 120.0
STOP_S = 30.0


@dataclass(frozen=True, kw_only=True)
class Deployment:
    """Where it listens, the key that opens it, and the addresses of its servers."""

    base_url: str
    api_key: str
    database_url: str
    redis_url: str
    pid: int


@asynccontextmanager
async def deployment(**environment: str) -> AsyncIterator[Deployment]:
    """A fresh `armillary serve` on a free port; stopped at the end of the block."""
    with tempfile.TemporaryDirectory(prefix="armillary-bench-") as folder:
        data = Path(folder) / "data"
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("ARMILLARY_")}
        variables = {"ARMILLARY_DATA_DIR": str(data), "ARMILLARY_PORT": "0", **environment}
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "app",
            "serve",
            env={**inherited, **variables},
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
        )
        try:
            yield await _started(data, process)
        finally:
            if process.returncode is None:
                process.send_signal(signal.SIGTERM)
            await asyncio.wait_for(process.wait(), STOP_S)


async def _started(data: Path, process: asyncio.subprocess.Process) -> Deployment:
    async with asyncio.timeout(START_S):
        while not (data / "server.json").exists():
            if process.returncode is not None:
                raise RuntimeError(f"the server ended with code {process.returncode}")
            await asyncio.sleep(0.05)
    access = json.loads((data / "server.json").read_text())
    servers = json.loads((data / "state.json").read_text())
    return Deployment(
        base_url=access["base_url"],
        api_key=access["api_key"],
        database_url=servers["database_url"],
        redis_url=servers["redis_url"],
        pid=process.pid,
    )
