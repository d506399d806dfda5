"""Log lines as JSON objects, with the ids of the request or the run that they belong to.

No line shows a key, wherever it may stand: in a path, a request id, an exception, the words of a vendor.
"""

import logging
import re
import sys
from collections.abc import Iterable
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Any, Literal

import msgspec

from db.keys import KEY_PREFIX, SESSION_TOKEN_PREFIX

_encoder = msgspec.json.Encoder(enc_hook=str)

current_request_id: ContextVar[str | None] = ContextVar("request_id", default=None)
"""The id of the request that this task works on."""

current_run: ContextVar[dict[str, str]] = ContextVar("current_run", default={})  # noqa: B039 - never changed
"""`session_id` and `run_id` of what this task works on; set for the whole task of a run."""

# uvicorn would log each request a second time, with its query string; arq two lines for each wake-up.
_SILENT = ("uvicorn.access", "sse_starlette.sse", "arq.worker")


_OWN_KEY = re.compile(f"({KEY_PREFIX}|{SESSION_TOKEN_PREFIX})[A-Za-z0-9_-]{{20,}}")
_LEAST_SECRET = 8  # shorter ones would be found in words that are no secrets


class Redaction:
    """Takes keys of ours, and the secrets of the settings, out of lines."""

    def __init__(self, secrets: Iterable[str] = ()) -> None:
        plain = {secret for secret in secrets if len(secret) >= _LEAST_SECRET}
        as_json = {_encoder.encode(secret).decode()[1:-1] for secret in plain}
        known = sorted(plain | as_json, key=len, reverse=True)
        self._known = re.compile("|".join(map(re.escape, known))) if known else None

    def __call__(self, line: str) -> str:
        if self._known is not None:
            line = self._known.sub("***", line)
        return _OWN_KEY.sub(r"\1***", line)


class JsonFormatter(logging.Formatter):
    """One line of JSON: time, level, logger, message, ids, and what was given as `extra`."""

    def __init__(self, secrets: Iterable[str] = ()) -> None:
        super().__init__()
        self._redacted = Redaction(secrets)

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if (request_id := current_request_id.get()) is not None:
            line["request_id"] = request_id
        line |= _fields(record)
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return self._redacted(_encoder.encode(line).decode())


class TextFormatter(logging.Formatter):
    """For reading: time, level, message, and what was given as `extra`, as `name=value`."""

    def __init__(self, secrets: Iterable[str] = ()) -> None:
        super().__init__("%(asctime)s %(levelname)-7s %(name)s: %(message)s")
        self._redacted = Redaction(secrets)

    def format(self, record: logging.LogRecord) -> str:
        return self._redacted(super().format(record))

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802
        pairs = "".join(f" {name}={value}" for name, value in _fields(record).items())
        return super().formatMessage(record) + pairs


_OF_EVERY_RECORD = frozenset(logging.makeLogRecord({}).__dict__) | {
    "message",
    "asctime",
    "taskName",
    "color_message",  # uvicorn's message once more, with terminal colours
}


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    """What the caller gave as `extra`, and the ids of the run."""
    given = {name: value for name, value in vars(record).items() if name not in _OF_EVERY_RECORD}
    return {**current_run.get(), **given}


def configure_logging(*, level: str, form: Literal["json", "text"], secrets: Iterable[str] = ()) -> None:
    """Sends every log line of this process to standard error, without `secrets`. Safe to call twice."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter(secrets) if form == "json" else TextFormatter(secrets))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    for name in _SILENT:
        logging.getLogger(name).setLevel(logging.WARNING)
