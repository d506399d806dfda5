"""Alembic's entry: runs on the connection that `db.migrate` hands over."""

from alembic import context

from db.tables import metadata

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=metadata,
    compare_server_default=True,
)
with context.begin_transaction():
    context.run_migrations()
