"""How events get from a commit to readers: published through Redis, read from Postgres, served as SSE."""
