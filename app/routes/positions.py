"""Pages of what has numbers of its own: events, messages, prompts. A cursor is the last number of a page."""

import base64
import binascii
from collections.abc import Callable, Sequence
from typing import Annotated, Literal, TypeVar

from litestar.params import QueryParameter

from app.errors import InvalidRequest
from app.pagination import Page

Item = TypeVar("Item")
Row = TypeVar("Row")

Order = Literal["asc", "desc"]
Direction = Annotated[Order, QueryParameter(name="order", description="`asc`: oldest first.")]

_MARK = b"p"
_MAX_POSITION = (1 << 63) - 1


def write_position(position: int) -> str:
    """An opaque name for a place in a numbered list."""
    return base64.urlsafe_b64encode(_MARK + position.to_bytes(8)).decode()


def read_position(page: str | None) -> int | None:
    """The number that a cursor names; None without one. Raises: InvalidRequest."""
    if page is None:
        return None
    try:
        raw = base64.b64decode(page.encode(), altchars=b"-_", validate=True)
    except (binascii.Error, ValueError) as error:
        raise _not_a_cursor() from error
    position = int.from_bytes(raw[1:])
    if len(raw) != 9 or raw[:1] != _MARK or position > _MAX_POSITION:
        raise _not_a_cursor()
    return position


def position_page(
    rows: Sequence[Row], *, limit: int, view: Callable[[Row], Item], place: Callable[[Row], int]
) -> Page[Item]:
    """The page of `rows`, of which there may be one more than `limit`. `place`: the number of a row."""
    shown = rows[:limit]
    next_page = write_position(place(shown[-1])) if len(rows) > limit else None
    return Page(data=[view(row) for row in shown], next_page=next_page)


def _not_a_cursor() -> InvalidRequest:
    return InvalidRequest("`page` is not a cursor of this list; take it from `next_page`.", field="page")
