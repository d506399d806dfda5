"""What a worker hears from others: that there is work, and that a run is to stop."""

from collections.abc import Callable

from app.streaming import keys
from app.streaming.subscriptions import Subscriptions


class Signals:
    """Calls `on_wake` with the name of a wake-up when a run may be waiting, and `on_cancel` with a session id
    when its run is to stop.

    Signals can be lost; after each loss of the connection `on_wake` is called once it is back, with an empty
    name. What must not be missed is looked up in Postgres.
    """

    def __init__(
        self, redis_url: str, *, on_wake: Callable[[str], None], on_cancel: Callable[[str], None]
    ) -> None:
        self._on_wake = on_wake
        self._on_cancel = on_cancel
        self._subscriptions = Subscriptions(
            redis_url, on_message=self._hear, on_subscribed=lambda _: on_wake("")
        )

    async def start(self) -> None:
        """Returns at once; whether Redis can be reached shows in `is_connected`."""
        self._subscriptions.add(keys.WAKE_CHANNEL)
        self._subscriptions.add(keys.CANCEL_CHANNEL)
        self._subscriptions.start()

    async def aclose(self) -> None:
        await self._subscriptions.aclose()

    @property
    def is_connected(self) -> bool:
        return self._subscriptions.is_connected

    def _hear(self, channel: str, payload: bytes) -> None:
        if channel == keys.WAKE_CHANNEL:
            self._on_wake(payload.decode(errors="replace"))
        elif channel == keys.CANCEL_CHANNEL:
            self._on_cancel(payload.decode(errors="replace"))
