"""Postgres: table definitions, the engine, and one module of queries per aggregate."""
