"""The agent loop and its vocabulary. It knows no HTTP, no SQL, no Redis and no vendor SDK."""
