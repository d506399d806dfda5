"""What can go wrong, by name: at a point inside a process, or from outside at a moment.

A strike happens to the member that stands at a point. A blow comes from outside.
"""

import random
from collections.abc import Awaitable, Callable
from signal import SIGINT, SIGKILL, SIGQUIT, SIGTERM

from msgspec import Struct

from tests.support.chaos.points import API_POINTS, WORKER_POINTS
from tests.support.chaos.stage import ZOMBIE_S, Stage, Strike
from tests.support.fleet import Member
from tests.support.follower import Follower

# -- strikes --------------------------------------------------------------------------------------------


async def kill(stage: Stage, member: Member) -> str:
    stage.kill(member)
    return "go"


async def zombie(stage: Stage, member: Member) -> str:
    """It stands still until its lease has run out and others have its runs, and wakes up then."""
    stage.pause(member, ZOMBIE_S)
    return "go"


async def term(stage: Stage, member: Member) -> str:
    stage.kill(member, SIGTERM)
    return "go"


async def cut(stage: Stage, member: Member) -> str:
    stage.cut(member)
    return "go"


async def lose(stage: Stage, member: Member) -> str:
    """The transaction that is open here commits, and its answer gets lost."""
    return "lose"


async def jump(stage: Stage, member: Member) -> str:
    """Its clock is set back."""
    return "jump"


async def flush(stage: Stage, member: Member) -> str:
    stage.flush_redis()
    return "go"


STRIKES: dict[str, Strike] = {
    strike.__name__: strike for strike in (kill, zombie, term, cut, lose, jump, flush)
}
WEIGHTS = {"kill": 6, "zombie": 2, "term": 1, "cut": 3, "lose": 3, "jump": 1, "flush": 1}


class PointFault(Struct, frozen=True, kw_only=True, tag="point"):
    """`strike` at the `nth` passage of `point`."""

    point: str
    strike: str
    nth: int = 1


def random_point_fault(rng: random.Random) -> PointFault:
    point = rng.choice(WORKER_POINTS * 3 + API_POINTS * 2)
    strike = rng.choices(list(WEIGHTS), list(WEIGHTS.values()))[0]
    if strike == "lose" and not point.endswith(".inside"):
        strike = "kill"
    most = 8 if point == "request.streaming" else 3
    return PointFault(point=point, strike=strike, nth=rng.randint(1, most))


# -- blows ----------------------------------------------------------------------------------------------

Blow = Callable[["Target"], Awaitable[None]]


class Target:
    """Where blows land: the stage, and the readers of the round. `rng` chooses among them."""

    def __init__(self, stage: Stage, readers: list[Follower], rng: random.Random) -> None:
        self.stage = stage
        self.readers = readers
        self.rng = rng

    def worker(self) -> Member:
        return self.rng.choice(self.stage.fleet.workers)

    def api(self) -> Member:
        return self.rng.choice(self.stage.fleet.apis)


async def kill_worker(target: Target) -> None:
    target.stage.kill(target.worker())


async def kill_api(target: Target) -> None:
    target.stage.kill(target.api())


async def pause_worker(target: Target) -> None:
    target.stage.pause(target.worker(), target.rng.choice((0.3, ZOMBIE_S)))


async def pause_api(target: Target) -> None:
    target.stage.pause(target.api(), target.rng.choice((0.3, 1.5)))


async def end_worker(target: Target) -> None:
    target.stage.kill(target.worker(), SIGTERM)


async def end_api(target: Target) -> None:
    target.stage.kill(target.api(), SIGTERM)


async def cut_readers(target: Target) -> None:
    for reader in target.readers:
        reader.cut()


async def stall_readers(target: Target) -> None:
    for reader in target.rng.sample(target.readers, len(target.readers) // 2):
        target.stage.keep(reader.stall(target.rng.uniform(0.2, 1.5)))


async def empty_redis(target: Target) -> None:
    target.stage.flush_redis()


async def kill_redis(target: Target) -> None:
    await target.stage.restart_redis(target.rng.uniform(0.0, 0.8))


async def restart_postgres(target: Target) -> None:
    await target.stage.restart_postgres(SIGINT, 0.0)


async def crash_postgres(target: Target) -> None:
    await target.stage.restart_postgres(SIGQUIT, target.rng.uniform(0.0, 0.5))


async def kill_postgres(target: Target) -> None:
    await target.stage.restart_postgres(SIGKILL, 0.1)


async def terminate_connections(target: Target) -> None:
    """All of our processes lose their connections, however they reach Postgres."""
    await target.stage.ask_postgres(
        "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity"
        " WHERE datname = current_database() AND pid <> pg_backend_pid()"
    )


async def cut_database(target: Target) -> None:
    for proxy in target.stage.proxies.values():
        proxy.cut()


BLOWS: dict[str, Blow] = {
    blow.__name__: blow
    for blow in (
        kill_worker, kill_api, pause_worker, pause_api, end_worker, end_api, cut_readers, stall_readers,
        empty_redis, kill_redis, restart_postgres, crash_postgres, kill_postgres, terminate_connections,
        cut_database,
    )
}  # fmt: skip


class TimedFault(Struct, frozen=True, kw_only=True, tag="timed"):
    """`blow` so long after the round has begun."""

    blow: str
    after_s: float


def random_timed_fault(rng: random.Random) -> TimedFault:
    return TimedFault(blow=rng.choice(list(BLOWS)), after_s=round(rng.uniform(0.0, 1.5), 3))


Fault = PointFault | TimedFault
