"""Keys, channels and lifetimes in Redis. All of it may vanish at any moment without loss.

The braces keep the keys of one session on one node of a cluster. Channels are shared between the numbered
databases of a server; what travels on them is named by session, or only a hint.
"""

WAKE_CHANNEL = "armillary:wake"
"""A run may be waiting for a worker. The payload names the wake-up in the queue."""

CANCEL_CHANNEL = "armillary:cancel"
"""The payload is the id of a session whose run is to stop."""

EPOCH_LIFETIME_MS = 3_600_000
"""How long a stale worker is refused by Redis alone; readers know the epoch from Postgres besides."""

PREVIEWS_LIFETIME_MS = 600_000
"""How long a silent preview can still be joined. Longer than any pause of a model that streams."""


def events_channel(session_id: str) -> str:
    """Batches of a session's events and previews (see `app.streaming.batches`)."""
    return f"armillary:{{{session_id}}}:events"


def epoch_key(session_id: str) -> str:
    """The newest epoch that has published."""
    return f"armillary:{{{session_id}}}:epoch"


def previews_key(session_id: str) -> str:
    """A list of the batches from which the unfinished events of a session can be put together."""
    return f"armillary:{{{session_id}}}:previews"
