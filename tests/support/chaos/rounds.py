"""One round: sessions are played while things go wrong, then everything is compared."""

import asyncio
import random
import time
from collections import Counter
from pathlib import Path

from msgspec import Struct

from tests.support.chaos.acts import TOOLS, WAIT_TIMEOUT_S, Act, Desk
from tests.support.chaos.answering import answer_all
from tests.support.chaos.checks import Evidence, LeaseWatch, described, settled
from tests.support.chaos.faults import BLOWS, STRIKES, PointFault, Target, TimedFault
from tests.support.chaos.plan import Plan
from tests.support.chaos.stage import Stage
from tests.support.visit import Visit, visiting

TOLERATED = ("provider request failed for good",)  # as the script asks


class Report(Struct, kw_only=True):
    """What came of a round. `broken`: the promises that were not kept; empty when all is well.

    `exhibits`: the logs and what readers were shown of sessions that broke one, by the name of a file.
    """

    plan: Plan
    broken: list[str] = []
    exhibits: dict[str, str] = {}
    counts: dict[str, int] = {}
    struck: dict[str, int] = {}
    not_reached: list[str] = []
    alone_s: float = 0.0
    took_s: float = 0.0


async def play(stage: Stage, plan: Plan) -> Report:
    """Never fails: what goes wrong is in the report."""
    report = Report(plan=plan)
    began_s, before = time.monotonic(), Counter(stage.struck)
    try:
        async with visiting(stage.fleet, tolerated=TOLERATED) as visit:
            await _Round(stage, plan, visit, report).play()
    except (AssertionError, TimeoutError, ExceptionGroup, OSError) as error:
        inner = error.exceptions if isinstance(error, ExceptionGroup) else (error,)
        report.broken += [described(one) for one in inner]
    report.struck = dict(stage.struck - before)
    report.took_s = time.monotonic() - began_s
    return report


class _Round:
    def __init__(self, stage: Stage, plan: Plan, visit: Visit, report: Report) -> None:
        self._stage = stage
        self._plan = plan
        self._visit = visit
        self._report = report
        self._rng = random.Random(plan.seed)
        self._desks: list[Desk] = []

    async def play(self) -> None:
        agent_id = await self._visit.agent(*TOOLS, wait_timeout_s=WAIT_TIMEOUT_S)
        watch = LeaseWatch(self._visit)
        try:
            for _ in self._plan.sessions:
                await self._open(agent_id)
            await self._go(agent_id)
        finally:
            await watch.aclose()
        self._report.broken += watch.problems
        self._report.alone_s = watch.longest_s
        for desk in self._desks:
            await self._check(desk)

    async def _open(self, agent_id: str) -> None:
        session_id = await self._visit.at("api 1").session(agent_id)
        self._desks.append(Desk(self._visit, session_id))
        self._visit.follow(session_id, "api 1", "api 2", runs=None)
        self._visit.follow(
            session_id, "api 2", "api 1", runs=None, kinds=(), cut_after=self._rng.randint(5, 60)
        )

    async def _go(self, agent_id: str) -> None:
        """Returns when all is over and everything is there again."""
        for fault in self._plan.faults:
            if isinstance(fault, PointFault):
                self._stage.arm(fault.point, STRIKES[fault.strike], nth=fault.nth)
        async with asyncio.TaskGroup() as group:
            answering = [group.create_task(answer_all(desk)) for desk in self._desks]
            playing = [
                group.create_task(_perform(desk, acts))
                for desk, acts in zip(self._desks, self._plan.sessions, strict=True)
            ]
            striking = group.create_task(self._strike())
            await asyncio.gather(striking, *playing)
            await settled(self._visit)
            self._report.not_reached = self._stage.disarm()
            await self._stage.calm()
            await settled(self._visit)
            for task in answering:
                task.cancel()

    async def _strike(self) -> None:
        target = Target(self._stage, self._visit.followers, self._rng)
        began_s = time.monotonic()
        timed = [fault for fault in self._plan.faults if isinstance(fault, TimedFault)]
        for fault in sorted(timed, key=lambda fault: fault.after_s):
            await asyncio.sleep(max(0.0, began_s + fault.after_s - time.monotonic()))
            self._stage.struck[f"{fault.blow} @ any time"] += 1
            await BLOWS[fault.blow](target)

    async def _check(self, desk: Desk) -> None:
        evidence = Evidence(self._stage, desk)
        problems = await evidence.problems()
        if problems:
            self._report.exhibits |= evidence.exhibits()
        self._report.broken += problems
        counts = {
            "sessions": 1,
            "runs": len(evidence.runs),
            "prompts": len(evidence.prompts),
            "events": len(evidence.events),
            "takeovers": sum(row["takeovers"] for row in evidence.runs),
            "handovers": sum(event.get("reason") == "handed_over" for event in evidence.events),
            "lost for good": sum(
                event["type"] == "session.error" and event["error"]["code"] == "worker_lost"
                for event in evidence.events
            ),
            "calls": len(evidence.calls),
            "answers": len(desk.accepted),
            "messages taken as answers": len(desk.replies),
            "waits that timed out": sum(
                event["type"] == "session.status_idle" and event["stop_reason"].get("code") == "not_answered"
                for event in evidence.events
            ),
            "requests": len(evidence.ledger),
            "requests abandoned": sum(row["state"] == "abandoned" for row in evidence.ledger),
            "outcome unknown": sum(row["outcome"] == "unknown" for row in evidence.calls),
            "repeated posts": desk.repeated,
            "reconnects": sum(
                follower.connections - 1
                for follower in self._visit.followers
                if follower.session_id == desk.session_id
            ),
        }
        self._report.counts = dict(Counter(self._report.counts) + Counter(counts))


async def _perform(desk: Desk, acts: tuple[Act, ...]) -> None:
    for act in acts:
        await act.perform(desk)


def write_failure(stage: Stage, report: Report, folder: Path) -> None:
    """Keeps what is needed to understand a round that failed."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "report.txt").write_text("\n".join([*report.plan.lines(), "", *report.broken, ""]))
    for name, text in report.exhibits.items():
        (folder / name).write_text(text)
    for member in stage.fleet.members.values():
        (folder / member.log.name).write_bytes(member.log.read_bytes()[-200_000:])
