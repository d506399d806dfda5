from datetime import UTC, datetime, timedelta
from email.utils import format_datetime

import httpx
import httpx2
import pytest

from providers.errors import (
    AuthRefused,
    BadPayload,
    ConnectionLost,
    ContextTooLong,
    ModelNotFound,
    Overloaded,
    ProviderError,
    QuotaExceeded,
    RateLimited,
    RequestRejected,
    RequestTimedOut,
    ServerFailed,
    StreamTruncated,
)
from providers.http_errors import (
    MAX_MESSAGE_CHARS,
    error_class,
    log_message,
    parse_retry_after,
    transport_error,
)

NOW = datetime(2026, 11, 30, 12, 0, 0, tzinfo=UTC)


@pytest.mark.parametrize(
    ("value", "wait_s"),
    [
        ("2", 2.0),
        ("0", 0.0),
        ("1.5", 1.5),
        (" 7 ", 7.0),
        ("2000000", 2_000_000.0),
        ("-5", None),
        ("Wed, 21 Oct 2015 07:28:00 GMT", None),
        (format_datetime(NOW + timedelta(seconds=3), usegmt=True), 3.0),
        ("Mon, 30 Nov 2026 12:00:09", 9.0),
        ("abc", None),
        ("", None),
        ("nan", None),
        ("inf", None),
        ("1e3", None),
        ("9" * 400, None),
        ("Mon, 99 Nov 2026 99:00:00 GMT", None),
    ],
)
def test_retry_after_is_read_as_seconds_or_date_and_junk_is_ignored(value: str, wait_s: float | None) -> None:
    """P-15"""
    assert parse_retry_after({"retry-after": value}, now=NOW) == wait_s


def test_milliseconds_win_over_seconds_unless_they_are_junk() -> None:
    """P-15"""
    assert parse_retry_after({"retry-after-ms": "250", "retry-after": "9"}, now=NOW) == 0.25
    assert parse_retry_after({"retry-after-ms": "soon", "retry-after": "9"}, now=NOW) == 9.0
    assert parse_retry_after({}, now=NOW) is None


@pytest.mark.parametrize(
    ("status", "codes", "message", "expected"),
    [
        (400, ("invalid_request_error",), "max_tokens: too large", RequestRejected),
        (400, ("invalid_request_error",), "Your credit balance is too low to access the API.", QuotaExceeded),
        (400, ("invalid_request_error",), "prompt is too long: 210000 tokens > 200000", ContextTooLong),
        (400, ("context_length_exceeded",), "", ContextTooLong),
        (400, ("exceed_context_size_error",), "", ContextTooLong),
        (400, (None,), "This model's maximum context length is 8192 tokens", ContextTooLong),
        (429, ("rate_limit_error",), "reduce the length of the messages or slow down", RateLimited),
        (500, (), "could not compute the maximum context length", ServerFailed),
        (401, (), "", AuthRefused),
        (402, ("billing_error",), "", QuotaExceeded),
        (403, (), "", AuthRefused),
        (404, (), "", ModelNotFound),
        (408, (), "", RequestTimedOut),
        (409, (), "", RequestRejected),
        (413, (), "", RequestRejected),
        (422, (), "", RequestRejected),
        (429, ("rate_limit_error",), "", RateLimited),
        (429, ("rate_limit_error", "ramp_limit_exceeded"), "", RateLimited),
        (429, ("insufficient_quota",), "", QuotaExceeded),
        (429, (None, "enforced_spend_limit_reached"), "", QuotaExceeded),
        (429, ("project_spend_limit_exceeded",), "", QuotaExceeded),
        (500, ("api_error",), "", ServerFailed),
        (502, (), "<html>", ServerFailed),
        (503, (), "", ServerFailed),
        (503, (), "The engine is currently overloaded", Overloaded),
        (504, ("timeout_error",), "", ServerFailed),
        (529, ("overloaded_error",), "", Overloaded),
        (None, ("server_is_overloaded",), "", Overloaded),
        (None, (), "something", ServerFailed),
        (418, (), "", RequestRejected),
    ],
)
def test_an_error_answer_is_classified_by_codes_first_then_by_status(
    status: int | None, codes: tuple[str | None, ...], message: str, expected: type[ProviderError]
) -> None:
    """P-15, P-18"""
    assert error_class(status, codes=codes, message=message) is expected


@pytest.mark.parametrize("library", [httpx, httpx2])
@pytest.mark.parametrize(
    ("name", "before", "in_answer"),
    [
        ("ConnectError", ConnectionLost, ConnectionLost),
        ("ConnectTimeout", ConnectionLost, ConnectionLost),
        ("PoolTimeout", ConnectionLost, ConnectionLost),
        ("ReadTimeout", RequestTimedOut, RequestTimedOut),
        ("WriteTimeout", RequestTimedOut, RequestTimedOut),
        ("ReadError", ConnectionLost, StreamTruncated),
        ("WriteError", ConnectionLost, StreamTruncated),
        ("RemoteProtocolError", ConnectionLost, StreamTruncated),
        ("LocalProtocolError", RequestRejected, RequestRejected),
        ("UnsupportedProtocol", RequestRejected, RequestRejected),
        ("InvalidURL", RequestRejected, RequestRejected),
        ("DecodingError", BadPayload, BadPayload),
    ],
)
def test_transport_exceptions_of_both_libraries_are_mapped(
    library: object, name: str, before: type[ProviderError], in_answer: type[ProviderError]
) -> None:
    error = getattr(library, name)("secret detail")
    assert type(transport_error(error, is_answering=False)) is before
    assert type(transport_error(error, is_answering=True)) is in_answer
    assert "secret detail" not in transport_error(error, is_answering=True).message


def test_a_log_message_is_short_and_holds_no_key() -> None:
    assert log_message("Incorrect key:\n sk-123 ", secrets=["sk-123", ""]) == "Incorrect key: [secret]"
    assert len(log_message("x" * 10_000_000)) == MAX_MESSAGE_CHARS + 1
