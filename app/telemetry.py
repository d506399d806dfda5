"""Log lines as JSON objects, with the id of the request that they belong to."""

import logging
import sys
from datetime import UTC, datetime
from typing import Any, Literal

import msgspec

from app.access_log import current_request_id

_encoder = msgspec.json.Encoder(enc_hook=str)

# uvicorn would log each request a second time, with its query string.
_SILENT = ("uvicorn.access", "sse_starlette.sse")


class JsonFormatter(logging.Formatter):
    """One line of JSON: time, level, logger, message, request id, and the record's `fields`."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if (request_id := current_request_id.get()) is not None:
            line["request_id"] = request_id
        line |= getattr(record, "fields", {})
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return _encoder.encode(line).decode()


class TextFormatter(logging.Formatter):
    """For reading: time, level, message, and the record's `fields` as `name=value`."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)-7s %(name)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802
        fields: dict[str, Any] = getattr(record, "fields", {})
        pairs = "".join(f" {name}={value}" for name, value in fields.items())
        return super().formatMessage(record) + pairs


def configure_logging(*, level: str, form: Literal["json", "text"]) -> None:
    """Sends every log line of this process to standard error. Safe to call twice."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if form == "json" else TextFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    for name in _SILENT:
        logging.getLogger(name).setLevel(logging.WARNING)
