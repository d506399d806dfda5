"""`armillary serve` as an operator runs it: real processes, stopped, killed and started again."""

import contextlib
import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from app.embedded import is_supervised

ROOT = Path(__file__).parents[2]
END_S = 60
FIRST_ANSWER_S = 60


class Serving:
    """A running `armillary serve`, after it has printed its two lines."""

    def __init__(self, process: subprocess.Popen[str], data: Path) -> None:
        assert process.stdout is not None
        self.process = process
        self.key_line = process.stdout.readline().rstrip("\n")
        self.curl_line = process.stdout.readline().rstrip("\n")
        assert self.curl_line, "serve ended before it was ready"
        self.access = json.loads((data / "server.json").read_text())

    def client(self) -> httpx.Client:
        headers = {"Authorization": f"Bearer {self.access['api_key']}"}
        return httpx.Client(base_url=self.access["base_url"], headers=headers, timeout=FIRST_ANSWER_S)

    def child_pids(self, command: str) -> list[int]:
        """The processes of ours that run `armillary <command>`."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        return [
            int(pid) for pid in children if f"app\0{command}\0" in Path(f"/proc/{pid}/cmdline").read_text()
        ]


def environment(data: Path, **more: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("ARMILLARY_")}
    return {**kept, "ARMILLARY_DATA_DIR": str(data), "ARMILLARY_PORT": "0", **more}


@contextlib.contextmanager
def serving(data: Path) -> Iterator[Serving]:
    process = subprocess.Popen(
        [sys.executable, "-m", "app", "serve"],
        cwd=ROOT,
        env=environment(data),
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield Serving(process, data)
    finally:
        with process:
            if process.poll() is None:
                process.terminate()
                process.wait(END_S)


def test_the_printed_line_streams_an_answer(tmp_path: Path) -> None:
    with serving(tmp_path / "data") as server:
        argv = shlex.split(server.curl_line)
        assert argv[:2] == ["curl", "-N"]
        if shutil.which("curl"):
            answer = subprocess.run(
                [*argv, "--silent", "--show-error", "--fail"],
                capture_output=True,
                text=True,
                timeout=FIRST_ANSWER_S,
                check=True,
            ).stdout
        else:
            answer = send_like_curl(argv)
    assert "event: agent.message\n" in answer
    assert '"end_turn"' in answer


def send_like_curl(argv: list[str]) -> str:
    """What curl would print, on a machine without it."""
    headers = dict(argv[at + 1].split(": ", 1) for at, word in enumerate(argv) if word == "-H")
    body = argv[argv.index("-d") + 1]
    return httpx.post(argv[2], headers=headers, content=body, timeout=FIRST_ANSWER_S).text


def test_a_stop_is_clean_and_the_next_start_keeps_key_and_agent(tmp_path: Path) -> None:
    data = tmp_path / "data"
    with serving(data) as first:
        assert first.key_line == f"API key: {first.access['api_key']}"
        assert (data / "server.json").stat().st_mode & 0o777 == 0o600
        pids = first.child_pids("api") + first.child_pids("worker")
        assert len(pids) == 2
        first.process.send_signal(signal.SIGINT)
        assert first.process.wait(END_S) == 0
        assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
        assert not is_supervised(data)
    with serving(data) as second, second.client() as client:
        assert second.access["api_key"] == first.access["api_key"]
        assert second.access["agent_id"] == first.access["agent_id"]
        assert client.get(f"/v1/agents/{second.access['agent_id']}").json()["name"] == "demo"


def test_an_api_that_is_killed_comes_back_on_the_same_port(tmp_path: Path) -> None:
    with serving(tmp_path / "data") as server, server.client() as client:
        [killed] = server.child_pids("api")
        os.kill(killed, signal.SIGKILL)
        # The parent keeps the listening socket, so a connection waits for the next API. One that the dead
        # process had already taken is reset.
        while True:
            with contextlib.suppress(httpx.TransportError):
                assert client.get("/v1/agents").status_code == 200
                break
        [running] = server.child_pids("api")
        assert running != killed


def test_everything_ends_with_a_killed_parent_and_starts_again(tmp_path: Path) -> None:
    data = tmp_path / "data"
    with serving(data) as first:
        first.process.kill()
    with serving(data) as second, second.client() as client:
        assert second.access["api_key"] == first.access["api_key"]
        assert client.get("/health/ready").status_code == 200


@pytest.mark.parametrize(
    ("variable", "value", "said"),
    [
        ("ARMILLARY_LEASE_S", "never", "ARMILLARY_LEASE_S: 'never' is not usable"),
        ("ARMILLARY_PORT", "", "is taken"),
    ],
)
def test_what_the_operator_can_mend_is_one_line(tmp_path: Path, variable: str, value: str, said: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        done = subprocess.run(
            [sys.executable, "-m", "app", "serve"],
            cwd=ROOT,
            env=environment(tmp_path / "data", **{variable: value or str(taken.getsockname()[1])}),
            capture_output=True,
            text=True,
            timeout=END_S,
            check=False,
        )
    assert done.returncode != 0
    assert len(done.stderr.splitlines()) == 1
    assert said in done.stderr
    assert not (tmp_path / "data").exists()
