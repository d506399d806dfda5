"""What `/metrics` says of this process besides its requests: streams, and the connections in use."""

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from app.streaming.hub import Hub
from db.engine import Database

_COUNTERS = {
    "streams_opened": "Streams that began.",
    "slow_readers_dropped": "Streams that were ended since their reader took nothing.",
    "fills": "Holes in what came by Redis that were filled from Postgres.",
    "healed_by_poll": "Times that the log was ahead of what came by Redis.",
    "parked_overflows": "Times that more waited for a fill than may wait.",
    "pages_read": "Pages of events that were read from Postgres.",
    "unreadable_messages": "Messages from Redis that were not understood.",
}


class ProcessMetrics(Collector):
    """Read when somebody asks, so that they cost nothing while nobody does."""

    def __init__(self, hub: Hub, database: Database) -> None:
        self._hub = hub
        self._database = database

    def describe(self) -> list[Metric]:
        return []  # nothing is read at the time of registration

    def collect(self) -> Iterator[Metric]:
        hub = self._hub
        for name, text in _COUNTERS.items():
            yield CounterMetricFamily(f"armillary_{name}", text, value=getattr(hub.counters, name))
        yield CounterMetricFamily(
            "armillary_redis_reconnects", "Times that the connection was lost.", value=hub.redis_reconnects
        )
        for name, text, value in (
            ("open_streams", "Streams that are open.", hub.open_streams),
            ("watched_sessions", "Sessions that somebody reads.", hub.watched_sessions),
            ("ring_bytes", "Frames that are held for readers.", hub.ring_bytes),
            ("redis_connected", "1 while events come by Redis.", int(hub.is_redis_well)),
            ("redis_lag_ms", "Age of the newest message of Redis on arrival.", hub.counters.lag_ms),
            ("database_connections", "Connections in use.", self._database.checked_out),
        ):
            yield GaugeMetricFamily(f"armillary_{name}", text, value=value)
