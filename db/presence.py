"""Whether a database has been migrated at all. For processes that do not migrate; it imports no Alembic."""

from db.engine import Database


async def has_schema(database: Database) -> bool:
    """Raises: DatabaseBusy, DatabaseAway."""
    async with database.statements() as reads:
        return bool(await reads.fetchval("SELECT to_regclass('alembic_version') IS NOT NULL"))
