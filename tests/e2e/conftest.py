"""A fleet of processes that all tests share. A test kills what it likes; the next one finds all running.

With xdist each of its processes has a fleet of its own, started when it gets the first test that needs one.
"""

from collections.abc import AsyncIterator, Generator, Iterator

import pytest

from tests.support.fleet import Fleet, running_fleet
from tests.support.visit import Visit, visiting

WORKER_SHUTDOWN_S = 6


@pytest.fixture(scope="session")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """Two apis and two workers on servers of their own."""
    settings = {"WORKER_SHUTDOWN_S": str(WORKER_SHUTDOWN_S)}
    with running_fleet(tmp_path_factory.mktemp("fleet"), settings=settings) as fleet:
        yield fleet


@pytest.fixture
async def visit(fleet: Fleet) -> AsyncIterator[Visit]:
    """A tenant of its own on the fleet, all of which runs."""
    async with visiting(fleet) as visit:
        yield visit


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Shows what the processes said when a test fails."""
    report = yield
    if report.failed:
        for fleet in getattr(item, "funcargs", {}).values():
            if isinstance(fleet, Fleet):
                report.sections.append(("processes", fleet.tails()))
    return report
