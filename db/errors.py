"""What the database layer raises. Driver exceptions do not leave `db/`.

DatabaseError
├── NotFound           no such row for this tenant
├── Conflict           the state of the row forbids it; `code` says how
├── QueueFull          too much waits already; nothing was stored
├── DatabaseBusy       a lock could not be had in time; the same call may succeed later
└── DatabaseAway       the connection could not be made or broke; whether a commit got through is not known
"""

from typing import ClassVar


class DatabaseError(Exception):
    """Base of all. `code` is stable and reaches clients."""

    code: ClassVar[str] = "database_error"


class NotFound(DatabaseError):
    code = "not_found"

    def __init__(self, what: str, public_id: str) -> None:
        super().__init__(f"There is no {what} {public_id!r}.")
        self.what = what
        self.public_id = public_id


class Conflict(DatabaseError):
    """`reason` is a stable code such as `session_archived`; the message says what to do."""

    code = "conflict"

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class QueueFull(DatabaseError):
    """`depth`: how many wait already. `retry_after_s`: when there may be room, as far as can be told."""

    code = "queue_full"

    def __init__(self, message: str, *, depth: int, retry_after_s: int) -> None:
        super().__init__(message)
        self.depth = depth
        self.retry_after_s = retry_after_s


class DatabaseBusy(DatabaseError):
    code = "database_busy"


class DatabaseAway(DatabaseError):
    code = "database_away"
