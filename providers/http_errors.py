"""What a failed HTTP exchange with a model API means, in the classes of `providers.errors`.

Shared by all adapters: statuses and the codes and sentences that override them, transport exceptions,
`retry-after`, and messages that are fit for a log.
"""

import math
import re
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime

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

MAX_MESSAGE_CHARS = 500  # an error page of a proxy may be megabytes long

_BY_STATUS: Mapping[int, type[ProviderError]] = {
    401: AuthRefused,
    402: QuotaExceeded,
    403: AuthRefused,
    404: ModelNotFound,
    408: RequestTimedOut,
    429: RateLimited,
    529: Overloaded,
}

# Codes and sentences say more than the status: several vendors send 429 for an empty account and 400 for a
# full window. Sources: PROVIDERS 1.4 of the design notes, the vendors' error pages, read 2026-11-30.
_QUOTA_CODES = frozenset(
    {
        "insufficient_quota",
        "billing_error",
        "billing_hard_limit_reached",
        "credit_balance_exhausted",
        "organization_usage_limit_exceeded",
        "contract_spend_limit_reached",
        "enforced_spend_limit_reached",
    }
)
_QUOTA_CODE_END = "_spend_limit_exceeded"
_QUOTA_TEXTS = ("credit balance is too low", "insufficient balance", "exceeded your current quota")
_CONTEXT_CODES = frozenset({"context_length_exceeded", "exceed_context_size_error"})
_CONTEXT_TEXTS = (
    "prompt is too long",
    "maximum context length",
    "reduce the length of the messages",
    "exceed context limit",
)
_OVERLOADED_CODES = frozenset({"overloaded_error", "server_is_overloaded"})


def error_class(
    status: int | None, *, codes: Iterable[str | None] = (), message: str = ""
) -> type[ProviderError]:
    """The class for an error answer.

    `status` is None when the API gave none and none can be inferred: such an error counts as the API's.
    `codes` are all of the error's codes and types, in any order.
    """
    known = {code for code in codes if code}
    text = message.lower()
    if known & _QUOTA_CODES or any(code.endswith(_QUOTA_CODE_END) for code in known):
        return QuotaExceeded
    if any(phrase in text for phrase in _QUOTA_TEXTS):
        return QuotaExceeded
    # "maximum context length" may stand in the text of a rate limit or a crash: only a refusal means it.
    if known & _CONTEXT_CODES or (
        status in (None, 400, 413, 422) and any(phrase in text for phrase in _CONTEXT_TEXTS)
    ):
        return ContextTooLong
    if known & _OVERLOADED_CODES or (status == 503 and "overloaded" in text):
        return Overloaded
    if status is None or status >= 500:
        return _BY_STATUS.get(status or 500, ServerFailed)
    return _BY_STATUS.get(status, RequestRejected)


def transport_error(error: BaseException, *, is_answering: bool) -> ProviderError:
    """The error for an exception of `httpx2` or `httpx`.

    `is_answering`: the status line had come, so a lost connection cuts an answer short.
    """
    # By name: the two libraries have the same tree, and neither is imported here (200 ms at start-up).
    kinds = {kind.__name__ for kind in type(error).__mro__}
    name = type(error).__name__
    if kinds & {"ConnectTimeout", "PoolTimeout", "ConnectError", "ProxyError"}:
        return ConnectionLost(f"no connection to the API could be made ({name})")
    if "TimeoutException" in kinds:
        return RequestTimedOut(f"the API was silent for too long ({name})")
    if kinds & {"LocalProtocolError", "UnsupportedProtocol", "InvalidURL"}:
        return RequestRejected(f"the request cannot be sent: check the base URL and the API key ({name})")
    if kinds & {"DecodingError", "TooManyRedirects"}:
        return BadPayload(f"the answer cannot be read ({name})")
    if is_answering:
        return StreamTruncated(f"the connection broke in the middle of the answer ({name})")
    return ConnectionLost(f"the connection to the API broke ({name})")


def parse_retry_after(headers: Mapping[str, str], *, now: datetime) -> float | None:
    """Seconds that the API asks us to wait, or None where it asks nothing that we can follow.

    Reads `retry-after-ms`, then `retry-after`: whole or decimal seconds or an HTTP date. Junk, negative
    numbers and dates in the past are None. There is no upper bound: the caller has one.
    `headers` must find lower-case names.
    """
    milliseconds = _seconds(headers.get("retry-after-ms"))
    if milliseconds is not None:
        return milliseconds / 1000
    value = headers.get("retry-after")
    seconds = _seconds(value)
    if seconds is not None or value is None:
        return seconds
    try:
        moment = parsedate_to_datetime(value)
    except (ValueError, OverflowError):
        return None
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
    wait_s = (moment - now).total_seconds()
    return wait_s if wait_s > 0 else None


def _seconds(value: str | None) -> float | None:
    if value is None or not re.fullmatch(r"\s*\d+(\.\d*)?\s*", value, re.ASCII):
        return None
    number = float(value)
    return number if math.isfinite(number) else None


def log_message(text: str, *, secrets: Iterable[str] = ()) -> str:
    """`text` on one line, of bounded length, without the `secrets` that an API may have echoed."""
    for secret in secrets:
        if secret:
            text = text.replace(secret, "[secret]")
    text = " ".join(text[: 4 * MAX_MESSAGE_CHARS].split())
    return text if len(text) <= MAX_MESSAGE_CHARS else text[:MAX_MESSAGE_CHARS] + "…"
