"""Every example in the README, the handbook and `examples/` is run or checked against a real server.

A fenced `bash` or `python` block is run; one that cannot be has `<!-- not run: reason -->` above it. A `text`
block that follows is its output, in which `…` stands for anything, alone on a line for any number of lines. A
`json` block is read by the type that the product has for it.
"""

import asyncio
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args
from urllib.parse import urlsplit, urlunsplit

import asyncpg
import httpx
import msgspec
import pytest

from agents.events import AnyEvent, decode_event, encode_event
from app.embedded.folder import Endpoints
from app.errors import Problem
from app.routes.agents import AgentCreate
from app.settings import FALLBACKS, PREFIX, load_settings
from app.streaming.frames import delta_frame, encode_delta, gap_frame, start_frame
from providers.types import TextBlock
from tools.questions import read_answers

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
EVENTS_PAGE = ROOT / "docs" / "events.md"
BLOCK_END_S = 60
STOP_S = 60
REDIS_NUMBERS = 16
MOST_NOT_RUN = 5
EVENT_TYPES = {kind.__struct_config__.tag for kind in get_args(AnyEvent)}


# -- reading the pages ----------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Block:
    """A fenced block. `not_run` is the reason in the comment above it, `output` the `text` block below it."""

    page: Path
    line: int
    language: str
    text: str
    not_run: str | None
    output: str | None

    @property
    def place(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


_FENCED = re.compile(
    r"(?:^<!-- not run: (?P<reason>.+?) -->\n+)?"
    r"^```(?P<language>\w*)\n(?P<text>.*?)^```$"
    r"(?:\n+^```text\n(?P<output>.*?)^```$)?",
    re.DOTALL | re.MULTILINE,
)


def blocks_of(page: Path) -> list[Block]:
    markdown = page.read_text()
    return [
        Block(
            page=page,
            line=markdown.count("\n", 0, found.start("language")) + 1,
            language=found["language"],
            text=found["text"],
            not_run=found["reason"],
            output=found["output"],
        )
        for found in _FENCED.finditer(markdown)
    ]


BLOCKS = [block for page in PAGES for block in blocks_of(page)]
RUN_PAGES = [
    page for page in PAGES if any(b.page == page and b.language in ("bash", "python") for b in BLOCKS)
]


def output_pattern(expected: str) -> re.Pattern[str]:
    """What the printed text must contain; see the top of the file."""
    lines = [
        r"(?:[^\n]*\n)*?" if line == "…" else re.escape(line).replace("…", r"[^\n]*") + r"\n"
        for line in expected.strip("\n").split("\n")
    ]
    return re.compile("^" + "".join(lines), re.MULTILINE)


# -- running them ---------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Served:
    """A running `armillary serve` and what it has printed."""

    base_url: str
    api_key: str
    agent_id: str

    def environment(self) -> dict[str, str]:
        """For examples: address and key, and the folder of our packages."""
        return {
            **clean_environment(),
            "BASE_URL": self.base_url,
            "API_KEY": self.api_key,
            "AGENT_ID": self.agent_id,
            "PYTHONPATH": str(ROOT),
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "NO_PROXY": "*",
        }


def clean_environment() -> dict[str, str]:
    """Without settings of ours and without keys, so that only the rehearsal model is configured."""
    return {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(PREFIX) and name not in FALLBACKS.values()
    }


@pytest.fixture(scope="module")
def served(
    servers: Endpoints, worker_number: int, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    """One server for all pages, with a database of its own beside those of the other tests."""
    folder = tmp_path_factory.mktemp("served")
    name = f"docs_{worker_number}"
    asyncio.run(_new_database(servers.database_url, name))
    database_url = urlunsplit(urlsplit(servers.database_url)._replace(path=f"/{name}"))
    log = folder / "log"
    environment = {
        **clean_environment(),
        "ARMILLARY_DATABASE_URL": database_url,
        "ARMILLARY_REDIS_URL": f"{servers.redis_url}?db={REDIS_NUMBERS - 1 - worker_number}",
        "ARMILLARY_DATA_DIR": str(folder / "data"),
        "ARMILLARY_PORT": "0",
    }
    with (
        log.open("w") as stderr,
        subprocess.Popen(
            [sys.executable, "-m", "app", "serve"],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
        ) as process,
    ):
        try:
            assert process.stdout is not None
            printed = process.stdout.readline() + process.stdout.readline()
            found = re.match(r"API key: (\S+)\ncurl -N (\S+)/v1/agents/(\w+)/prompt ", printed)
            assert found, f"{printed}\n{log.read_text()}"
            yield Served(api_key=found[1], base_url=found[2], agent_id=found[3])
        finally:
            process.terminate()
            process.wait(STOP_S)


async def _new_database(url: str, name: str) -> None:
    connection = await asyncpg.connect(url)
    try:
        await connection.execute(f"DROP DATABASE IF EXISTS {name} WITH (FORCE)")
        await connection.execute(f"CREATE DATABASE {name}")
    finally:
        await connection.close()


def run(argv: list[str], environment: dict[str, str], folder: Path) -> tuple[int, str]:
    """The exit code, and all that was printed."""
    done = subprocess.run(
        argv,
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=BLOCK_END_S,
        check=False,
    )
    return done.returncode, done.stdout


# Variables and functions of a block are there in the next one, as in one shell.
SHELL = """
set -euo pipefail
if [ -f state ]; then . ./state; fi
set -a
{text}
set +a
{{ export -p; declare -f; }} > state
"""


@pytest.mark.skipif(shutil.which("curl") is None, reason="the examples use curl")
@pytest.mark.parametrize("page", RUN_PAGES, ids=lambda page: page.name)
def test_examples_of_a_page_run_as_they_are_printed(page: Path, served: Served, tmp_path: Path) -> None:
    for block in blocks_of(page):
        if block.not_run is not None or block.language not in ("bash", "python"):
            continue
        if block.language == "bash":
            argv = ["bash", "-c", SHELL.format(text=block.text)]
        else:
            argv = [sys.executable, "-W", "error", "-c", block.text]
        code, printed = run(argv, served.environment(), tmp_path)
        assert code == 0, f"{block.place} ended with {code}:\n{printed}"
        if block.output is not None:
            shown = printed.rstrip("\n") + "\n"
            assert output_pattern(block.output).search(shown), f"{block.place} printed:\n{printed}"


@pytest.mark.parametrize(
    ("program", "said"),
    [
        ("stream_a_prompt.py", '[calculate {"expression": "12 * 34"}]\nThe result is 408.\n(end_turn)\n'),
        ("anthropic_client.py", "> And goodbye.\nYou sent “And goodbye.”."),
        ("approve_a_call.py", "The tools say:\n42"),
        ("client_side_tool.py", f"Your machine says:\n{sys.platform.capitalize()}\n"),
    ],
)
def test_example_programs_run(program: str, said: str, served: Served, tmp_path: Path) -> None:
    argv = [sys.executable, "-W", "error", str(ROOT / "examples" / program)]
    code, printed = run(argv, served.environment(), tmp_path)
    assert code == 0, printed
    assert said in printed


def test_every_example_program_is_run_here() -> None:
    [mark] = test_example_programs_run.pytestmark  # type: ignore[attr-defined]
    assert [path.name for path in EXAMPLES] == sorted(program for program, _ in mark.args[1])


def test_few_examples_are_not_run_and_each_says_why() -> None:
    not_run = [f"{block.place}: {block.not_run}" for block in BLOCKS if block.not_run is not None]
    sys.stdout.write("\n".join([f"{len(not_run)} examples are not run:", *not_run, ""]))
    assert len(not_run) <= MOST_NOT_RUN, not_run
    marks = sum(page.read_text().count("<!-- not run:") for page in PAGES)
    assert marks == len(not_run), "a comment `not run` stands above no block"


# -- checking what is not run ---------------------------------------------------------------------------


def _read_event(text: str, given: Any) -> Any:
    return json.loads(encode_event(decode_event(text.encode())))


def _read_start(text: str, given: Any) -> Any:
    event = given["event"]
    return _data_of(start_frame(event_id=event["id"], kind=event["type"], seq=1, n=1))


def _read_delta(text: str, given: Any) -> Any:
    return _data_of(delta_frame(event_id=given["event_id"], delta=encode_delta(given["delta"]), seq=1, n=1))


def _read_gap(text: str, given: Any) -> Any:
    frame = gap_frame(session_id=given["session_id"], reason=given["reason"], first_seq=given["first_seq"])
    return _data_of(frame)


def _read_problem(text: str, given: Any) -> Any:
    return msgspec.to_builtins(msgspec.convert(given, Problem))


def _read_agent(text: str, given: Any) -> Any:
    msgspec.convert(given, AgentCreate)  # refuses unknown fields; those that are left out are not shown
    return given


def _read_answers(text: str, given: Any) -> Any:
    options = [{"label": label} for answer in given["answers"] for label in _listed(answer)]
    questions = [{"question": f"Question {n}?", "options": options} for n in range(len(given["answers"]))]
    (block,) = read_answers({"questions": questions}, (TextBlock(text=text),))
    assert isinstance(block, TextBlock)
    assert block.text.startswith("Question 0?\n"), "it was not read as answers"
    for answer in given["answers"]:
        assert ", ".join(_listed(answer)) in block.text
    return given


def _listed(answer: Any) -> list[str]:
    return [] if answer is None else answer if isinstance(answer, list) else [answer]


def _read_prices(text: str, given: Any) -> Any:
    settings = load_settings({"ARMILLARY_PRICE_OVERRIDES": text})
    return {
        name: {field: value for field, value in msgspec.to_builtins(price).items() if value is not None}
        for name, price in settings.price_overrides.items()
    }


def _data_of(frame: bytes) -> Any:
    [data] = re.findall(rb"^data: (.*)$", frame, re.MULTILINE)
    return json.loads(data)


def reader_of(given: dict[str, Any]) -> Callable[[str, Any], Any]:
    """What reads an example and gives it back; the first of the product's types that it looks like."""
    frames = {"event_start": _read_start, "event_delta": _read_delta, "session.gap": _read_gap}
    if given.get("type") in EVENT_TYPES:
        return _read_event
    if given.get("type") in frames:
        return frames[given["type"]]
    if {"status", "code"} <= given.keys():
        return _read_problem
    if {"name", "model"} <= given.keys():
        return _read_agent
    if given.keys() == {"answers"}:
        return _read_answers
    return _read_prices


@pytest.mark.parametrize(
    "block", [block for block in BLOCKS if block.language == "json"], ids=lambda block: block.place
)
def test_json_examples_are_what_the_product_reads_and_writes(block: Block) -> None:
    given = json.loads(block.text)
    assert reader_of(given)(block.text, given) == given


def _documented(kind: str) -> list[Any]:
    examples = [json.loads(block.text) for block in blocks_of(EVENTS_PAGE) if block.language == "json"]
    return [example for example in examples if example["type"] == kind]


def test_every_event_has_a_heading_and_an_example() -> None:
    headings = set(re.findall(r"^### `([a-z_.]+)`$", EVENTS_PAGE.read_text(), re.MULTILINE))
    assert headings == EVENT_TYPES | {"session.gap"}
    assert [kind for kind in EVENT_TYPES if not _documented(str(kind))] == []


# Previews are best effort: a reader must have come before they are over, so the first one waits.
SHOW_ALL = """\
wait: 2
pace: 50
think: I should wait.
say: Let me wait.
call: delay {"seconds": 1.1}
---
say: Waited.
"""


def test_the_documented_deltas_are_those_that_a_stream_sends(served: Served) -> None:
    streamed = httpx.post(
        f"{served.base_url}/v1/agents/{served.agent_id}/prompt",
        json={"prompt": SHOW_ALL, "stream": True},
        headers={"Authorization": f"Bearer {served.api_key}"},
        timeout=BLOCK_END_S,
        trust_env=False,
    ).raise_for_status()
    data = [json.loads(line) for line in re.findall(r"^data: (.*)$", streamed.text, re.MULTILINE)]
    sent = {(event["delta"]["type"], *event["delta"]) for event in data if event["type"] == "event_delta"}
    shown = {(event["delta"]["type"], *event["delta"]) for event in _documented("event_delta")}
    assert shown == sent
    started = {event["event"]["type"] for event in data if event["type"] == "event_start"}
    page = EVENTS_PAGE.read_text()
    assert [kind for kind in started if f"`{kind}`" not in page] == []


def test_every_route_is_named_on_the_page_of_the_api() -> None:
    document = json.loads((ROOT / "openapi" / "openapi.json").read_text())
    page = re.sub(r"\{\w+\}", "{}", (ROOT / "docs" / "api.md").read_text())
    missing = [
        f"{method.upper()} {path}"
        for path, operations in document["paths"].items()
        for method in operations
        if not re.search(rf"`(?:\w+, )*{method.upper()}(?:, \w+)* {re.sub(r'{[a-z_]+}', '{}', path)}`", page)
    ]
    assert missing == []


def test_links_between_the_pages_lead_somewhere() -> None:
    broken = []
    for page in PAGES:
        text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
        for link in re.findall(r"\]\(([^)\s]+)\)", text):
            path, _, anchor = link.partition("#")
            if "://" in link:
                continue
            target = (page.parent / path) if path else page
            if not target.exists() or (anchor and anchor not in anchors_of(target)):
                broken.append(f"{page.name}: {link}")
    assert broken == []


def anchors_of(page: Path) -> set[str]:
    """The anchors of its headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
