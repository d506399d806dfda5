"""Plays random rounds: `python -m tests.support.chaos ROUNDS [SEED]`. The exit code is 1 when one failed.

Round i has the seed SEED + i, so that a round which failed is played again by its own seed alone.
"""

import asyncio
import random
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from tests.support.chaos.plan import random_plan
from tests.support.chaos.rounds import Report, play, write_failure
from tests.support.chaos.stage import Stage, on_stage
from tests.support.fleet import Fleet, running_fleet

FAILURES = Path("chaos-failures")


def main() -> int:
    rounds = int(sys.argv[1])
    seed = int(sys.argv[2]) if len(sys.argv) > 2 and sys.argv[2] else random.SystemRandom().randrange(2**31)
    with (
        tempfile.TemporaryDirectory(prefix="chaos-fleet-") as folder,
        running_fleet(Path(folder), apis=0, workers=0) as fleet,
    ):
        reports = asyncio.run(_play(fleet, range(seed, seed + rounds)))
    _show(reports)
    return 1 if any(report.broken for report in reports) else 0


async def _play(fleet: Fleet, seeds: range) -> list[Report]:
    reports = []
    async with on_stage(fleet) as stage:
        for seed in seeds:
            report = await play(stage, random_plan(seed))
            reports.append(report)
            _tell(stage, report)
    return reports


def _tell(stage: Stage, report: Report) -> None:
    seed, struck = report.plan.seed, ", ".join(report.struck) or "nothing"
    print(f"{seed}: {report.took_s:.1f} s, {struck}: {'FAILED' if report.broken else 'ok'}", flush=True)
    if report.broken:
        print("\n".join(f"    {line}" for line in [*report.plan.lines(), *report.broken]), flush=True)
        write_failure(stage, report, FAILURES / str(seed))
        print(f"    logs: {FAILURES / str(seed)}; again: make chaos N=1 SEED={seed}", flush=True)


def _show(reports: list[Report]) -> None:
    struck, counts = Counter[str](), Counter[str]()
    for report in reports:
        struck.update(report.struck)
        counts.update(report.counts)
    missed = sum(len(report.not_reached) for report in reports)
    failed = [report.plan.seed for report in reports if report.broken]
    print(
        f"\n{len(reports)} rounds in {sum(report.took_s for report in reports):.0f} s, {len(failed)} failed"
    )
    for name, count in counts.items():
        print(f"  {count:7} {name}")
    longest_s = max((report.alone_s for report in reports), default=0.0)
    print(f"  {longest_s:7.1f} s is the longest that a run was left alone with somebody there to take it")
    print(f"  {missed:7} faults were planned at points that their round did not pass")
    for title, at in (("by kind", 0), ("by point", 1)):
        by = Counter[str]()
        for name, count in struck.items():
            by[name.split(" @ ")[at]] += count
        print(f"\nfaults {title}, {by.total()} in all")
        for name, count in by.most_common():
            print(f"  {count:7} {name}")
    if failed:
        print(f"\nfailed: {failed}")


if __name__ == "__main__":
    started_s = time.monotonic()
    code = main()
    print(f"{time.monotonic() - started_s:.0f} s in all")
    sys.exit(code)
