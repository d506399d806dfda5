"""`make bench`: runs the benchmarks, prints their tables. `ARGS="start_latency"` runs one."""

import asyncio
import sys
from importlib import import_module

NAMES = ("tokens", "start_latency", "fan_out", "idle_streams", "herd")


def main() -> None:
    for name in sys.argv[1:] or NAMES:
        if name not in NAMES:
            sys.exit(f"no benchmark is called {name}: choose from {', '.join(NAMES)}")
        benchmark = import_module(f"benchmarks.{name}")
        print(f"\n## {name}\n\n{asyncio.run(benchmark.run())}")


main()
