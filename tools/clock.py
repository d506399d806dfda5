"""Tells the time."""

from collections.abc import Callable
from datetime import UTC, datetime
from typing import Annotated
from zoneinfo import ZoneInfo

from msgspec import Meta

from tools.errors import ToolError
from tools.schema import tool
from tools.types import Tool

_DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")


def _utc_now() -> datetime:
    return datetime.now(UTC)


def current_time_tool(now: Callable[[], datetime] = _utc_now) -> Tool:
    """The tool `current_time`, with a clock that returns aware datetimes."""

    @tool(label="Current time", idempotent=True)
    async def current_time(
        timezone: Annotated[str, Meta(max_length=64, description="IANA name such as Europe/Berlin.")] = "UTC",
    ) -> str:
        """Tells the current date, time and day of the week, in UTC or in the given time zone."""
        try:
            zone = ZoneInfo(timezone)
        except (OSError, ValueError, KeyError):  # a folder of the database, a path out of it, not there
            raise ToolError(
                f"There is no time zone {timezone!r}. Use an IANA name such as Europe/Berlin, or UTC."
            ) from None
        moment = now().astimezone(zone)
        return f"{_DAYS[moment.weekday()]}, {moment.isoformat(sep=' ', timespec='seconds')} ({timezone})"

    return current_time
