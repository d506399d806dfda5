"""Lists: `{"data": [...], "next_page": cursor | null}`, newest first.

A cursor names the last row of a page, so rows that come in between pages neither repeat nor hide others.
"""

import base64
import binascii
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from typing import Annotated, Generic, TypeVar
from uuid import UUID

from litestar.params import QueryParameter
from msgspec import Meta, Struct

from app.errors import InvalidRequest

Item = TypeVar("Item")
Row = TypeVar("Row")

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)

DEFAULT_LIMIT = 20
MAX_LIMIT = 1000

Limit = Annotated[
    int, QueryParameter(name="limit", ge=1, le=MAX_LIMIT, description="Items on a page at most.")
]
Cursor = Annotated[str | None, QueryParameter(name="page", description="`next_page` of the page before.")]
IncludeArchived = Annotated[
    bool, QueryParameter(name="include_archived", description="List archived ones too.")
]
After = Annotated[datetime | None, QueryParameter(name="created_at[gt]", description="Made after this time.")]
From = Annotated[
    datetime | None, QueryParameter(name="created_at[gte]", description="Made at this time or after it.")
]
Before = Annotated[
    datetime | None, QueryParameter(name="created_at[lt]", description="Made before this time.")
]
Until = Annotated[
    datetime | None, QueryParameter(name="created_at[lte]", description="Made at this time or before it.")
]


class Page(Struct, Generic[Item], frozen=True, kw_only=True):
    """One page of a list."""

    data: list[Item]
    next_page: Annotated[
        str | None, Meta(description="Send it as `page` to get what follows; null at the end.")
    ] = None


class Created(Struct, frozen=True, kw_only=True):
    """Bounds on `created_at`, all of which hold."""

    gt: datetime | None = None
    gte: datetime | None = None
    lt: datetime | None = None
    lte: datetime | None = None


class PageQuery(Struct, frozen=True, kw_only=True):
    """Which page of a list is asked for. `before`: moment and id of the row that the last page ended at."""

    limit: int
    before: tuple[datetime, UUID] | None
    created: Created

    @property
    def fetch(self) -> int:
        """How many rows to read: one more than asked for tells whether there is another page."""
        return self.limit + 1


def page_query(  # noqa: PLR0917 (injected by name)
    limit: Limit = DEFAULT_LIMIT,
    page: Cursor = None,
    created_after: After = None,
    created_from: From = None,
    created_before: Before = None,
    created_until: Until = None,
) -> PageQuery:
    """The page that the query parameters ask for, for injection into handlers. Raises: InvalidRequest."""
    bounds = Created(
        gt=aware(created_after),
        gte=aware(created_from),
        lt=aware(created_before),
        lte=aware(created_until),
    )
    return PageQuery(limit=limit, before=None if page is None else read_cursor(page), created=bounds)


def make_page(
    rows: Sequence[Row],
    query: PageQuery,
    view: Callable[[Row], Item],
    place: Callable[[Row], tuple[datetime, UUID]],
) -> Page[Item]:
    """The page of `rows`, of which there may be one more than asked for. `place`: moment and id of a row."""
    shown = rows[: query.limit]
    next_page = write_cursor(*place(shown[-1])) if len(rows) > query.limit else None
    return Page(data=[view(row) for row in shown], next_page=next_page)


def write_cursor(moment: datetime, row_id: UUID) -> str:
    """An opaque name for a place in a list."""
    micros = (moment - _EPOCH) // timedelta(microseconds=1)
    return base64.urlsafe_b64encode(micros.to_bytes(8, signed=True) + row_id.bytes).decode()


def read_cursor(text: str) -> tuple[datetime, UUID]:
    """The place that a cursor names. Raises: InvalidRequest."""
    try:
        raw = base64.b64decode(text.encode(), altchars=b"-_", validate=True)
        micros, row_id = int.from_bytes(raw[:8], signed=True), UUID(bytes=raw[8:])
        return _EPOCH + timedelta(microseconds=micros), row_id
    except (binascii.Error, ValueError, OverflowError) as error:
        complaint = "`page` is not a cursor of this list; take it from `next_page`."
        raise InvalidRequest(complaint, field="page") from error


def both_forms(plain: list[str] | None, bracketed: list[str] | None) -> list[str]:
    """The values of an array parameter that may be sent as `name=` and as `name[]=`."""
    return [*(plain or ()), *(bracketed or ())]


def aware(moment: datetime | None) -> datetime | None:
    """The same moment in UTC; a time without an offset is UTC already. Raises: InvalidRequest."""
    if moment is None or moment.tzinfo is None:
        return moment and moment.replace(tzinfo=UTC)
    try:
        return moment.astimezone(UTC)
    except OverflowError as error:
        raise InvalidRequest(f"{moment.isoformat()} is not within the years 1 to 9999 of UTC.") from error
