"""The outermost layer of the API: the request's id, one log line, and the request counters.

A line is written when the answer is over, so a stream is one line too. It names the path, never the query.
"""

import logging
import re
import time
import uuid
from typing import Any

from litestar.enums import ScopeType
from litestar.types import ASGIApp, Message, Receive, Scope, Send
from prometheus_client import CollectorRegistry, Counter, Histogram

from app.streaming.response import SENT_BESIDE
from app.telemetry import current_request_id

log = logging.getLogger("armillary.access")

REQUEST_ID_HEADER = b"x-request-id"
_KEY = "armillary.request_id"
_ACCEPTED = re.compile(rb"[A-Za-z0-9._-]{1,128}")
_BUCKETS_S = (0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 10, 60)


def request_id_of(scope: Any) -> str:
    """The id of a request; empty outside the access log."""
    value: str = scope.get(_KEY, "")
    return value


class RequestMetrics:
    """Counters of finished requests by route and status; they name no tenant."""

    def __init__(self, registry: CollectorRegistry) -> None:
        labels = ("method", "route", "status")
        self._count = Counter("armillary_http_requests", "Finished requests.", labels, registry=registry)
        self._seconds = Histogram(
            "armillary_http_request_seconds",
            "Time from the request to the first byte of its answer.",
            ("route",),
            buckets=_BUCKETS_S,
            registry=registry,
        )

    def record(self, method: str, route: str, status: int, first_byte_s: float) -> None:
        self._count.labels(method, route, str(status)).inc()
        self._seconds.labels(route).observe(first_byte_s)


class AccessLog:
    """Wraps the application: takes or makes the request id, and reports when the answer is over."""

    def __init__(self, app: ASGIApp, metrics: RequestMetrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != ScopeType.HTTP:
            await self._app(scope, receive, send)
            return
        request_id = _given_id(scope) or f"req_{uuid.uuid4().hex}"
        cast_scope: Any = scope
        cast_scope[_KEY] = request_id
        current_request_id.set(request_id)
        answer = _Answer(send, request_id)
        try:
            await self._app(scope, receive, answer.send)
        finally:
            self._report(scope, answer, request_id)

    def _report(self, scope: Any, answer: "_Answer", request_id: str) -> None:
        ended = time.monotonic()
        route = scope.get("path_template") or "unmatched"
        first_byte_s = (answer.first_byte_at or ended) - answer.began_at
        method = scope["method"] if route != "unmatched" else "other"
        self._metrics.record(method, route, answer.status, first_byte_s)
        principal = scope.get("user")
        fields = {
            "method": scope["method"],
            "path": scope["path"][:500],
            "route": route,
            "status": answer.status,
            "duration_ms": round((ended - answer.began_at) * 1000, 1),
            "first_byte_ms": round(first_byte_s * 1000, 1),
            "sent_bytes": answer.sent_bytes + scope.get(SENT_BESIDE, 0),
            "client": (scope.get("client") or ("",))[0],
            "request_id": request_id,
        }
        if principal is not None:
            fields |= {"tenant_id": principal.public_tenant_id, "key_id": principal.public_key_id}
        log.info("request", extra=fields)


class _Answer:
    """Passes an answer on, adds the request id and keeps what the log line needs."""

    def __init__(self, send: Send, request_id: str) -> None:
        self._send = send
        self._request_id = request_id
        self.began_at = time.monotonic()
        self.first_byte_at: float | None = None
        self.status = 0  # stays so when the client left before an answer
        self.sent_bytes = 0

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.first_byte_at = time.monotonic()
            self.status = message["status"]
            headers = [*message.get("headers", ()), (REQUEST_ID_HEADER, self._request_id.encode())]
            message = {**message, "headers": headers}
        elif message["type"] == "http.response.body":
            self.sent_bytes += len(message.get("body", b""))
        await self._send(message)


def _given_id(scope: Any) -> str | None:
    for name, value in scope["headers"]:
        if name == REQUEST_ID_HEADER:
            return value.decode() if _ACCEPTED.fullmatch(value) else None
    return None
