"""One statement put together from parts, for all that is written into a session at a time."""

from collections.abc import Sequence
from typing import Any

import msgspec

from agents.events import Event
from agents.log import LoggedEvent
from db.ids import to_uuid

_json = msgspec.json.Encoder(decimal_format="string")


class Parts:
    """Common table expressions with their values. `{}` in a part stands for its next value.

    The first part changes the session and is called `fence`; all others read from it, so when it finds no row
    nothing is written at all.
    """

    def __init__(self) -> None:
        self._parts: list[str] = []
        self.values: list[Any] = []

    def add(self, name: str, text: str, *values: Any) -> None:
        numbers = range(len(self.values) + 1, len(self.values) + len(values) + 1)
        self._parts.append(f"{name} AS ({text.format(*(f'${number}' for number in numbers))})")
        self.values.extend(values)

    def statement(self, tail: str) -> str:
        return f"WITH {', '.join(self._parts)} {tail}"


def add_events(parts: Parts, events: Sequence[Event], logged: Sequence[LoggedEvent]) -> None:
    """Inserts `events` as the last of the session. `logged` has their bodies; its numbers are not used."""
    if not events:
        return
    parts.add(
        "new_events",
        """
        INSERT INTO events (session_id, tenant_id, seq, id, run_id, type, body, created_at)
        SELECT fence.session_id, fence.tenant_id, fence.last_seq - {} + n, new.id, new.run_id, new.type,
            new.body, new.created_at
        FROM fence, unnest({}::uuid[], {}::uuid[], {}::text[], {}::bytea[], {}::timestamptz[])
            WITH ORDINALITY AS new (id, run_id, type, body, created_at, n)
        """,
        len(logged),
        [to_uuid(event.id) for event in logged],
        [None if event.run_id is None else to_uuid(event.run_id) for event in events],
        [event.type for event in logged],
        [event.body for event in logged],
        [event.created_at for event in events],
    )


def encode_json(value: Any) -> str:
    """For a column of type JSON."""
    return _json.encode(value).decode()
