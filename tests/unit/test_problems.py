"""What clients get for an error, and what stays in the log."""

import logging
from typing import Any, cast

import httpx
import pytest
from litestar import Litestar, get
from litestar.params import FromPath

from app.errors import to_problem
from db.errors import Conflict, DatabaseAway, DatabaseBusy, DatabaseError

ERRORS: dict[str, Exception] = {
    "unexpected": RuntimeError("the password is hunter2"),
    "unmapped": DatabaseError("relation xyz does not exist"),
    "away": DatabaseAway("could not connect to 10.0.0.1"),
    "busy": DatabaseBusy("process 42 holds the lock"),
    "conflict": Conflict("session_archived", "The session is archived."),
}


@get("/{name:str}")
async def _fail(name: FromPath[str]) -> None:
    raise ERRORS[name]


async def _answer(name: str) -> httpx.Response:
    app = Litestar(
        [_fail], exception_handlers={Exception: to_problem}, openapi_config=None, logging_config=None
    )
    transport = httpx.ASGITransport(cast(Any, app))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        return await client.get(f"/{name}")


@pytest.mark.parametrize("name", ["unexpected", "unmapped"])
async def test_unexpected_error_is_logged_with_its_traceback_and_told_to_nobody(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR)
    answer = await _answer(name)
    assert (answer.status_code, answer.json()["code"]) == (500, "internal_error")
    assert str(ERRORS[name]) not in answer.text
    assert str(ERRORS[name]) in caplog.text
    assert "Traceback" in caplog.text


@pytest.mark.parametrize("name", ["away", "busy"])
async def test_database_that_cannot_answer_is_told_as_passing_without_details(name: str) -> None:
    answer = await _answer(name)
    assert answer.status_code == 503
    assert answer.headers["retry-after"] == "1"
    assert str(ERRORS[name]) not in answer.text
    assert answer.json()["error"]["type"] == "overloaded_error"


async def test_conflict_names_its_reason_and_is_not_worth_a_retry() -> None:
    answer = await _answer("conflict")
    assert (answer.status_code, answer.json()["code"]) == (409, "session_archived")
    assert answer.json()["title"] == "Conflict"
    assert answer.json()["detail"] == "The session is archived."
    assert answer.headers["x-should-retry"] == "false"
