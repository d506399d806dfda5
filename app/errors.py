"""The only place where an exception becomes an HTTP answer.

ApiError
├── InvalidRequest         400  not JSON, or a parameter that cannot be read
├── NotAuthenticated       401  no key, or one that is unknown, revoked or expired
├── ScopeMissing           403  the key may not do this
├── BodyTooLarge           413  larger than the server accepts
├── MediaTypeRefused       415  not JSON, or an encoded body
├── InvalidField           422  the body is JSON, but a field of it is not usable; names the field
├── NotAvailable           422  a documented part of the API that this version refuses; names the field
├── IdempotencyMismatch    409  the Idempotency-Key was used for another request
└── ClientGone             400  the connection closed before the body had arrived

Answers are problem documents (RFC 9457) with a stable `code`. Texts of unexpected errors stay in the log.
"""

import logging
from http import HTTPStatus
from typing import Any, ClassVar, Literal

import msgspec
from litestar import Request, Response
from litestar.exceptions import HTTPException
from msgspec import Struct

import db.errors
import providers.errors
import tools.errors
from app.access_log import request_id_of

log = logging.getLogger("armillary.api")

PROBLEM_MEDIA_TYPE = "application/problem+json"
RETRY_AFTER_S = 1

ErrorType = Literal[
    "invalid_request_error",
    "authentication_error",
    "permission_error",
    "not_found_error",
    "conflict_error",
    "rate_limit_error",
    "timeout_error",
    "overloaded_error",
    "api_error",
]


class ErrorBody(Struct, frozen=True, kw_only=True):
    """The same error in the shape that clients of hosted agent APIs read."""

    type: ErrorType
    message: str


class Problem(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An error. `code` is stable; `detail` says what happened and what to do; `field` names the culprit.

    `queue_depth`, with `queue_full`: how many wait already.
    """

    type: str
    title: str
    status: int
    detail: str
    code: str
    request_id: str
    error: ErrorBody
    field: str | None = None
    queue_depth: int | None = None


class ApiError(Exception):
    """Base of what the HTTP layer itself refuses."""

    code: ClassVar[str] = "api_error"

    def __init__(self, message: str, *, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


class InvalidRequest(ApiError):
    code = "invalid_request"


class NotAuthenticated(ApiError):
    code = "not_authenticated"


class ScopeMissing(ApiError):
    code = "scope_missing"


class BodyTooLarge(ApiError):
    code = "body_too_large"


class MediaTypeRefused(ApiError):
    code = "unsupported_media_type"


class InvalidField(ApiError):
    """`field` is the path in the body, such as `tools[2].name`."""

    code = "invalid_field"


class NotAvailable(ApiError):
    """The message says what to send instead."""

    code = "not_available"


class IdempotencyMismatch(ApiError):
    code = "idempotency_mismatch"


class ClientGone(ApiError):
    code = "client_gone"


STATUS: dict[type[Exception], int] = {
    ApiError: 400,
    InvalidRequest: 400,
    NotAuthenticated: 401,
    ScopeMissing: 403,
    BodyTooLarge: 413,
    MediaTypeRefused: 415,
    InvalidField: 422,
    NotAvailable: 422,
    IdempotencyMismatch: 409,
    ClientGone: 400,
    db.errors.DatabaseError: 500,
    db.errors.NotFound: 404,
    db.errors.Conflict: 409,
    db.errors.QueueFull: 429,
    db.errors.DatabaseBusy: 503,
    db.errors.DatabaseAway: 503,
    providers.errors.ProviderError: 502,
    providers.errors.RateLimited: 503,
    providers.errors.QuotaExceeded: 502,
    providers.errors.Overloaded: 503,
    providers.errors.ServerFailed: 502,
    providers.errors.ConnectionLost: 502,
    providers.errors.RequestTimedOut: 504,
    providers.errors.StreamTruncated: 502,
    providers.errors.BadPayload: 502,
    providers.errors.ContextTooLong: 422,
    providers.errors.AuthRefused: 502,
    providers.errors.ModelNotFound: 422,
    providers.errors.RequestRejected: 502,
    providers.errors.UnclassifiedRejection: 502,
    providers.errors.UnknownModel: 422,
    tools.errors.ToolError: 422,
    tools.errors.InvalidArguments: 422,
    tools.errors.UnknownTool: 422,
    tools.errors.UnusableResult: 500,
    tools.errors.AnswerRefused: 422,
    tools.errors.SchemaRefused: 422,
}
"""Every class of the four `errors` modules, by itself: a test fails when one is missing."""

_TYPES: dict[int, ErrorType] = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    409: "conflict_error",
    429: "rate_limit_error",
    500: "api_error",
    502: "api_error",
    503: "overloaded_error",
    504: "timeout_error",
}

# Codes of the framework's own refusals, which know only a status.
_FRAMEWORK_CODES = {
    400: "invalid_request",
    401: "not_authenticated",
    403: "scope_missing",
    404: "not_found",
    405: "method_not_allowed",
    413: "body_too_large",
    415: "unsupported_media_type",
    429: "rate_limited",
}
# Query parameters whose names are none of Python's.
_QUERY_NAMES = {
    "created_after": "created_at[gt]",
    "created_from": "created_at[gte]",
    "created_before": "created_at[lt]",
    "created_until": "created_at[lte]",
}
_FRAMEWORK_DETAILS = {
    404: "There is nothing at this path.",
    405: "This path does not take this method.",
    413: "The request body is larger than this server accepts.",
}


def to_problem(request: Request[Any, Any, Any], error: Exception) -> Response[bytes]:
    """The answer for any exception; what nobody foresaw is logged and answered with a general text."""
    status = _status_of(error)
    if status == 500:
        log.error("unexpected error", exc_info=error, extra={"path": request.scope["path"]})
    detail, code, field = _describe(error, status)
    problem = Problem(
        type="about:blank",
        title=HTTPStatus(status).phrase,
        status=status,
        detail=detail,
        code=code,
        request_id=request_id_of(request.scope),
        error=ErrorBody(type=_TYPES.get(status, "invalid_request_error"), message=detail),
        field=field,
        queue_depth=error.depth if isinstance(error, db.errors.QueueFull) else None,
    )
    return Response(
        msgspec.json.encode(problem),
        status_code=status,
        media_type=PROBLEM_MEDIA_TYPE,
        headers=_headers(error, status),
    )


def _status_of(error: Exception) -> int:
    for kind in type(error).__mro__:
        if kind in STATUS:
            return STATUS[kind]
    return error.status_code if isinstance(error, HTTPException) else 500


def _describe(error: Exception, status: int) -> tuple[str, str, str | None]:
    """Detail, code and field."""
    if status == 500:
        return "Something went wrong on our side; the request id helps to find it.", "internal_error", None
    if isinstance(error, HTTPException):
        detail, field = _framework_detail(error)
        return detail, _FRAMEWORK_CODES.get(status, "invalid_request"), field
    if isinstance(error, db.errors.Conflict):
        return str(error), error.reason, None
    if isinstance(error, db.errors.DatabaseBusy | db.errors.DatabaseAway):
        return "The database cannot answer at the moment; try again.", error.code, None
    return str(error), getattr(error, "code", "error"), getattr(error, "field", None)


def _framework_detail(error: HTTPException) -> tuple[str, str | None]:
    """What the framework found wrong, without the URL that it likes to repeat."""
    if error.status_code in _FRAMEWORK_DETAILS:
        return _FRAMEWORK_DETAILS[error.status_code], None
    first = error.extra[0] if isinstance(error.extra, list) and error.extra else None
    if not isinstance(first, dict):
        return error.detail.partition(" for path ")[0], None
    name, message = str(first.get("key", "")), str(first.get("message", error.detail))
    field = _QUERY_NAMES.get(name, name) or None
    if field == "data" or "field `data`" in message:
        return "The request needs a JSON body.", None
    return (f"{field}: {message}" if field else message), field


def _headers(error: Exception, status: int) -> dict[str, str]:
    headers = {"cache-control": "no-store"}
    if isinstance(error, HTTPException) and error.headers:
        headers |= error.headers
    if status == 401:
        headers["www-authenticate"] = "Bearer"
    if status == 409:
        headers["x-should-retry"] = "false"  # some clients repeat every 409
    if isinstance(error, db.errors.QueueFull):
        headers["retry-after"] = str(error.retry_after_s)
    if status == 503:
        headers["retry-after"] = str(RETRY_AFTER_S)
    return headers
