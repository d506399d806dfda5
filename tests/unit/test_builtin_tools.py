import asyncio
from collections.abc import Callable
from datetime import UTC, datetime

import pytest

from providers.types import JsonObject
from tools.arithmetic import evaluate, format_number
from tools.builtin import builtin_registry
from tools.clock import current_time_tool
from tools.delay import MAX_DELAY_S, wait_reporting
from tools.errors import InvalidArguments, ToolError
from tools.types import Tool, ToolContext, text_result


def context(progress: Callable[[JsonObject], None] = lambda _: None) -> ToolContext:
    return ToolContext(
        session_id="sess_1", run_id="run_1", tool_use_id="call_1", idempotency_key="key_1", progress=progress
    )


def test_the_built_in_tools_are_registered_and_may_be_run_again_after_a_crash() -> None:
    registry = builtin_registry()
    assert registry.names() == ("ask_user", "calculate", "compact_memory", "current_time", "delay")
    assert all(tool.idempotent or tool.asks_user for tool in registry)
    assert all(tool.label and tool.description for tool in registry)


@pytest.mark.parametrize(
    ("expression", "result"),
    [
        ("2+2", "4"),
        ("0.1 + 0.2", "0.3"),
        ("12 * (3 + 4) - 5", "79"),
        ("-2^2", "-4"),
        ("2^-2", "0.25"),
        ("2**3^2", "512"),
        ("(-8) ^ 3", "-512"),
        ("7 // 2 + 7 % 4", "6"),
        ("-7 % 3", "2"),
        ("--3", "3"),
        ("1/3", "0.333333333333333333333333333333"),
        ("1/3*3", "1"),
        ("1_000 * 1e3", "1000000"),
        ("1.5e-3", "0.0015"),
        (".5 + 5.", "5.5"),
        ("2^200", str(2**200)),
        ("1/2^40", "0.0000000000009094947017729282379150390625"),
        ("sqrt(2)", "1.41421356237309504880168872421"),
        ("sqrt(9) + 16^0.5", "7"),
        ("round(2.567, 2)", "2.57"),
        ("round(-1234.5, -2)", "-1200"),
        ("max(1, 2, 3) - min(4, 5)", "-1"),
        ("abs(-3.5)", "3.5"),
        ("PI", "3.14159265358979323846264338328"),
        ("10^-40", "1E-40"),
        ("0^0", "1"),
    ],
)
def test_arithmetic_is_exact(expression: str, result: str) -> None:
    assert format_number(evaluate(expression)) == result


@pytest.mark.parametrize(
    ("expression", "reason"),
    [
        ("", "the end at character 1"),
        ("2 +", "the end at character 4"),
        ("2 2", "2 at character 3"),
        ("(1 + 2", "the end"),
        ("1 + )", r"\) at character 5"),
        ("2 $ 3", r"'\$' at character 3"),
        ("__import__('os')", "'_' at character 1"),
        ("open(1)", "'open' at character 1 is not known"),
        ("sqrt 4", "parentheses"),
        ("sqrt(1, 2)", ", at character 7"),
        ("sqrt(-1)", "negative"),
        ("1 / (2 - 2)", "divides by zero"),
        ("1 % 0", "divides by zero"),
        ("1 // 0", "divides by zero"),
        ("0 ^ -1", "divides by zero"),
        ("2 ^ 0.3", "whole number"),
        ("round(1, 0.5)", "number of digits"),
        ("9^9^9^9", "too large"),
        ("2^99999999999", "too large"),
        ("1e9999", "too large"),
        ("1e99999", "Did not expect|too large"),
        ("9" * 900 + "*" + "(" + "9" * 90 + ")^9", "too large"),
        ("(" * 60 + "1" + ")" * 60, "nested deeper"),
        ("2" + "^2" * 400, "nested deeper|too large"),
        ("1+" * 600 + "1", "longer than"),
    ],
)
def test_an_expression_that_cannot_be_worked_out_says_why(expression: str, reason: str) -> None:
    with pytest.raises(ToolError, match=reason):
        evaluate(expression)


def test_many_signs_in_a_row_are_read() -> None:
    assert evaluate("-" * 998 + "1") == 1


async def test_calculate_answers_with_the_number() -> None:
    calculate = builtin_registry().prepare("calculate", {"expression": "6*7"})
    assert await calculate.execute({"expression": "6*7"}, context()) == text_result("42")


def clock_at(moment: str) -> Tool:
    return current_time_tool(lambda: datetime.fromisoformat(moment).replace(tzinfo=UTC))


async def test_the_time_is_told_in_utc_or_in_the_zone_asked_for() -> None:
    clock = clock_at("2026-11-30T23:30:15.9")
    assert await clock.execute({}, context()) == text_result("Monday, 2026-11-30 23:30:15+00:00 (UTC)")
    assert await clock.execute({"timezone": "Europe/Berlin"}, context()) == text_result(
        "Tuesday, 2026-12-01 00:30:15+01:00 (Europe/Berlin)"
    )


@pytest.mark.parametrize(
    "zone", ["Mars/Olympus", "Europe", "../../etc/hostname", "/etc/hostname", "", "a\x00b", "x" * 64]
)
async def test_an_unknown_zone_is_answered_with_what_to_use(zone: str) -> None:
    with pytest.raises(ToolError, match="IANA name"):
        await clock_at("2026-11-30T00:00:00").execute({"timezone": zone}, context())


async def test_a_delay_reports_progress_until_it_is_over() -> None:
    reports: list[JsonObject] = []
    await wait_reporting(0.3, reports.append, every_s=0.01)
    assert len(reports) >= 2
    assert {report["total_s"] for report in reports} == {0.3}
    assert [report["elapsed_s"] for report in reports] == sorted(report["elapsed_s"] for report in reports)


async def test_a_delay_of_nothing_answers_at_once() -> None:
    delay = builtin_registry().prepare("delay", {"seconds": 0})
    assert await delay.execute({"seconds": 0}, context()) == text_result("Waited 0 seconds.")


async def test_a_delay_can_be_cancelled() -> None:
    started = asyncio.Event()
    waiting = asyncio.ensure_future(
        wait_reporting(600, lambda _: started.set(), every_s=0.001),
    )
    await started.wait()
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting


@pytest.mark.parametrize("seconds", [-1, MAX_DELAY_S + 1, "long"])
def test_a_delay_is_bounded(seconds: object) -> None:
    with pytest.raises(InvalidArguments, match="seconds"):
        builtin_registry().prepare("delay", {"seconds": seconds})
