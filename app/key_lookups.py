"""Reads keys from Postgres, those that are asked for at the same time together.

Thousands of readers that come back at once would else fill the queue for database connections, in which
prompts wait too.
"""

import asyncio

from db.engine import Database
from db.keys import ApiKey, find_keys

READS = 2
"""Statements at the same time; the other connections are for what comes after."""


class KeyLookups:
    """One per process. What it finds is never older than the question."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._places = asyncio.Semaphore(READS)
        self._open: _Batch | None = None

    async def find(self, secret: str) -> ApiKey | None:
        """As `db.keys.find_key`. Raises: DatabaseBusy, DatabaseAway."""
        batch = self._open
        if batch is None:
            batch = self._open = _Batch()
            batch.answers = asyncio.create_task(self._read(batch))
        batch.secrets.add(secret)
        return (await asyncio.shield(batch.answers)).get(secret)

    async def _read(self, batch: "_Batch") -> dict[str, ApiKey]:
        try:
            async with self._places, self._database.statements() as tx:
                self._open = None  # the statement begins: whoever comes later is in the next one
                return await find_keys(tx, batch.secrets)
        finally:
            if self._open is batch:
                self._open = None


class _Batch:
    """What is asked for by one statement."""

    def __init__(self) -> None:
        self.secrets: set[str] = set()
        self.answers: asyncio.Task[dict[str, ApiKey]]
