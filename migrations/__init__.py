"""Alembic revisions. Changes come in pairs: add before the code that needs it, remove a release later."""
