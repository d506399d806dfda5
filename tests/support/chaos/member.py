"""An api or a worker with fault points: `python -m tests.support.chaos.member api|worker FOLDER NAME`.

It is the program itself, with its seams wrapped: nothing in it knows of faults. `--clock-shift=SECONDS` sets
its clock wrong.
"""

import argparse
import os
import sys
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator
from contextlib import aclosing, asynccontextmanager, contextmanager
from contextvars import ContextVar
from functools import wraps
from pathlib import Path
from typing import Any, cast

from agents.types import CloseRun, Step, WaitForClient
from app.settings import load_settings
from db.engine import Database, Transaction
from providers.rehearsal import Rehearsal
from providers.types import ProviderEvent, ProviderRequest
from tests.support.chaos.points import REQUESTS, Points
from tests.support.postgres_proxy import LOSE_COMMIT, LOSE_STATEMENT
from tests.support.worker_with_tools import traced_tools
from tools.builtin import builtin_registry

JUMP_S = -5400.0  # an hour and a half back, as a wrong time zone and more does

Passing = Callable[[str], str]


def kind_of(step: Step) -> str:
    """What a commit is for, by the words of `points.COMMIT_KINDS`."""
    kinds = (
        ("close", isinstance(step.ending, CloseRun)),
        ("wait", isinstance(step.ending, WaitForClient)),
        ("memory", step.memory is not None),
        ("open_request", step.opened is not None),
        ("answer", any(stored.message.role == "assistant" for stored in step.messages)),
        ("tool_result", any(call.state == "done" for call in step.calls)),
    )
    return next((kind for kind, is_it in kinds if is_it), "other")


def around(owner: Any, name: str, *, before: str = "", after: str = "", passed: Passing) -> None:
    """Puts points before and after a coroutine function. Raises: AttributeError, when there is none."""
    wrapped = getattr(owner, name)

    @wraps(wrapped)
    async def passing(*args: Any, **options: Any) -> Any:
        if before:
            passed(before)
        result = await wrapped(*args, **options)
        if after:
            passed(after)
        return result

    setattr(owner, name, passing)


def inside(owner: Any, name: str, point: str, *, before: str = "", passed: Passing) -> None:
    """A point in an open transaction, after a query function has changed something in it."""
    wrapped = getattr(owner, name)

    @wraps(wrapped)
    async def passing(tx: Transaction, *args: Any, **options: Any) -> Any:
        if before:
            passed(before)
        result = await wrapped(tx, *args, **options)
        if result is not None:
            await in_transaction(tx, passed(point))
        return result

    setattr(owner, name, passing)


async def in_transaction(tx: Transaction, verdict: str) -> None:
    if verdict == "lose":
        await tx.execute(LOSE_COMMIT)


def install_in_worker(passed: Passing, folder: Path) -> None:
    from agents import tool_calls
    from app import lease, recovery, supervisor
    from app.holding import HoldSink
    from app.streaming.publisher import Publisher

    _wrap_commits(HoldSink, passed)
    _wrap_claims(supervisor, passed)
    _wrap_single_statements(passed)
    inside(lease, "renew_lease", "renewal.inside", before="renewal.before", passed=passed)
    inside(recovery, "sweep_session", "sweep.inside", before="sweep.before", passed=passed)
    inside(supervisor, "hand_over", "handover.inside", passed=passed)
    around(Publisher, "_pipeline", before="publish.before", after="publish.after", passed=passed)
    around(tool_calls.ToolCalls, "_execute", before="tool.before", after="tool.after", passed=passed)
    _wrap_requests(passed, folder)


def _wrap_commits(sink: Any, passed: Passing) -> None:
    commit = sink._commit

    @wraps(commit)
    async def _commit(self: Any, step: Step, seen: int | None) -> Any:
        name = f"commit.{kind_of(step)}"
        passed(f"{name}.before")
        with _named(name):
            events = await commit(self, step, seen)
        passed(f"{name}.after")
        return events

    sink._commit = _commit


def _wrap_claims(supervisor: Any, passed: Passing) -> None:
    claim_next, begin = supervisor.claim_next, supervisor.Supervisor._begin

    @wraps(claim_next)
    async def claimed(database: Database, *, worker_id: str) -> Any:
        passed("claim.before")
        with _named("claim"):
            return await claim_next(database, worker_id=worker_id)

    @wraps(begin)
    def _begin(self: Any, claim: Any) -> None:
        passed("claim.after")
        begin(self, claim)

    supervisor.claim_next = claimed
    supervisor.Supervisor._begin = _begin


_name: ContextVar[str] = ContextVar("name", default="")


@contextmanager
def _named(name: str) -> Iterator[None]:
    """Says what the single statement is that is about to be committed by being executed."""
    token = _name.set(name)
    try:
        yield
    finally:
        _name.reset(token)


def _wrap_single_statements(passed: Passing) -> None:
    """At the point inside of one, the statement is committed and its answer gets lost."""
    one_statement = Database.one_statement

    @asynccontextmanager
    async def with_point(self: Database) -> AsyncIterator[Transaction]:
        async with one_statement(self) as tx:
            if _name.get() and passed(f"{_name.get()}.inside") != "go":
                await tx._connection.execute(LOSE_STATEMENT)
            yield tx

    Database.one_statement = with_point  # type: ignore[method-assign]


def _wrap_requests(passed: Passing, folder: Path) -> None:
    """With a note of every request that leaves: its session and the attempt's process."""
    stream = Rehearsal.stream

    @wraps(stream)
    async def noted(self: Rehearsal, request: ProviderRequest) -> AsyncIterator[ProviderEvent]:
        passed("request.before")
        with (folder / REQUESTS).open("a") as file:
            file.write(f"{request.cache_key} {os.getpid()}\n")
        async with aclosing(cast("AsyncGenerator[ProviderEvent, None]", stream(self, request))) as events:
            async for event in events:
                passed("request.streaming")
                yield event
        passed("request.after")

    Rehearsal.stream = noted  # type: ignore[method-assign]


def install_in_api(passed: Passing) -> None:
    from app.queue import WakeUps
    from app.streaming.publisher import Publisher
    from db import admission, answers

    around(admission, "lock_session", before="admit.before", passed=passed)
    for module in (admission, answers):
        _wrap_append(module, passed)
    around(Publisher, "announce", before="announce.before", after="announce.after", passed=passed)
    around(WakeUps, "wake", before="wake.before", passed=passed)


def _wrap_append(module: Any, passed: Passing) -> None:
    append: Callable[..., Awaitable[None]] = module.append

    @wraps(append)
    async def appended(tx: Transaction, *args: Any, **options: Any) -> None:
        await append(tx, *args, **options)
        await in_transaction(tx, passed("admit.inside"))

    module.append = appended


def shift_clock(by_s: float) -> None:
    """Sets the wall clock of this process wrong."""
    real_s, real_ns = time.time, time.time_ns
    time.time = lambda: real_s() + by_s
    time.time_ns = lambda: real_ns() + int(by_s * 1e9)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("role", choices=("api", "worker"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("name")
    parser.add_argument("--clock-shift", type=float, default=0.0)
    arguments = parser.parse_args()
    if arguments.clock_shift:
        shift_clock(arguments.clock_shift)
    points = Points(arguments.folder, arguments.name)

    def passed(point: str) -> str:
        verdict = points.passed(point)
        if verdict == "jump":
            shift_clock(JUMP_S)
        return verdict

    if arguments.role == "api":
        from app.server import run_api

        install_in_api(passed)
        return run_api(load_settings())
    from app.worker import run_worker

    install_in_worker(passed, arguments.folder)
    registry = builtin_registry()
    for traced in traced_tools(arguments.folder / "tools"):
        registry.register(traced)
    return run_worker(load_settings(), tools=registry)


if __name__ == "__main__":
    sys.exit(main())
