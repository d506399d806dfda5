"""What reading may cost. Each bound is here, with its reason."""

from msgspec import Struct


class StreamLimits(Struct, frozen=True, kw_only=True):
    """Defaults fit thousands of readers in one process."""

    ring_bytes: int = 512 * 1024
    """Of frames per watched session: seconds of a fast model, so that a hiccup costs no database read."""

    rings_bytes: int = 64 * 1024 * 1024
    """Of all rings together. Beyond it each ring keeps `ring_least_bytes` only."""

    ring_least_bytes: int = 16 * 1024

    parked_bytes: int = 1024 * 1024
    """What may wait per session while events are read from Postgres. Beyond it they are read there too."""

    joinable_bytes: int = 1024 * 1024
    """Text of unfinished events per session, for readers that join in the middle."""

    chunk_bytes: int = 64 * 1024
    """One write to a socket. A reader that does not read holds this much, and its transport as much again."""

    stall_bytes: int = 4 * 1024 * 1024
    """How much its session may produce while one write of a reader is stuck, before the reader is dropped."""

    stall_s: float = 30.0
    """How long one write may be stuck."""

    heartbeat_s: float = 12.0
    """Silence after which a comment is sent; checked once a second, so 15 s is never reached."""

    poll_s: float = 1.0
    """How often all watched sessions are compared with Postgres; a lost publish costs at most this."""

    unwell_poll_s: float = 0.2
    """The same while Redis is not there."""

    acknowledge_s: float = 1.0
    """How long the acknowledgement of a subscription is waited for before reading goes on without it."""

    database_reads: int = 4
    """Reads of Postgres at the same time, so that readers leave connections for everybody else."""

    database_read_s: float = 5.0

    end_s: float = 1.0
    """How long reads of Postgres have at shutdown to come to their end."""

    flush_s: float = 1.5
    """How long readers have at shutdown to take what was produced."""
