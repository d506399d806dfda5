"""The examples of `docs/api.md` are one shell script, and it runs."""

import asyncio
import os
import re
import shutil
from pathlib import Path

import pytest

from tests.support.served_api import ROOT, running_worker, served_api

END_S = 90
PAGE = ROOT / "docs" / "api.md"


@pytest.mark.skipif(shutil.which("curl") is None, reason="the examples use curl")
async def test_examples_of_the_api_page_run_as_they_are_printed(
    database_url: str, redis_url: str, tmp_path: Path
) -> None:
    script = "\n".join(re.findall(r"^```sh\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE))
    async with served_api(database_url, redis_url) as api, running_worker(database_url, redis_url):
        me = await api.caller()
        process = await asyncio.create_subprocess_exec(
            "bash",
            "-euo",
            "pipefail",
            "-c",
            script,
            cwd=tmp_path,
            env={**os.environ, "BASE_URL": api.url, "API_KEY": me.key, "NO_PROXY": "*"},
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        async with asyncio.timeout(END_S):
            printed, _ = await process.communicate()

        assert process.returncode == 0, printed.decode()
        assert b"event: session.status_idle" in printed
        assert b"session_deleted" in printed
