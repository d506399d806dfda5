"""Keys that many requests ask for at once."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from uuid import uuid4

from app.key_lookups import KeyLookups
from db.engine import Database, Transaction
from db.keys import create_key, revoke_key
from db.tenants import create_tenant


class CountingDatabase(Database):
    """Counts how often it was asked outside a transaction."""

    asked = 0

    @asynccontextmanager
    async def statements(self) -> AsyncIterator[Transaction]:
        self.asked += 1
        async with Database.statements(self) as tx:
            yield tx


async def test_a_thousand_lookups_at_once_take_a_few_statements_and_none_sees_a_revoked_key(
    database_url: str,
) -> None:
    database = CountingDatabase.open(database_url, pool_size=2)
    assert isinstance(database, CountingDatabase)
    try:
        async with database.transaction() as tx:
            tenant = await create_tenant(tx, name=str(uuid4()))
            made = [await create_key(tx, tenant_id=tenant.id, name="k", scopes=("read",)) for _ in range(2)]
        (kept, kept_text), (revoked, revoked_text) = made
        keys = KeyLookups(database)
        texts = [kept_text, revoked_text, "unknown"]
        before = [asyncio.create_task(keys.find(texts[number % 3])) for number in range(999)]
        found = [None if key is None else key.id for key in await asyncio.gather(*before)]
        assert found == [kept.id, revoked.id, None] * 333
        assert database.asked < 10
        flood = [asyncio.create_task(keys.find(revoked_text)) for _ in range(100)]
        await asyncio.sleep(0)  # their statement is on its way
        async with database.transaction() as tx:
            await revoke_key(tx, revoked.id)
        assert await keys.find(revoked_text) is None
        await asyncio.gather(*flood)
    finally:
        await database.close()
