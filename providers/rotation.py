"""Several keys of one vendor behind one provider."""

import time
import zlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing
from typing import cast

from providers.errors import AuthRefused, ProviderError, QuotaExceeded, RateLimited
from providers.types import Capabilities, Provider, ProviderEvent, ProviderRequest

LIMITED_S = 30.0  # a key that was limited rests so long where the API does not say
MAX_LIMITED_S = 300.0
REFUSED_S = 600.0  # so does a key without credit or that was refused: somebody may set it right


class KeyRotation:
    """Each session has its key; a key that the API objects to rests, and its sessions use the next one.

    Implements `providers.types.Provider`. `providers` are the same adapter with one key each, at least one.
    Requests of one session stay with one key, since the cache of a prompt belongs to a key's account. While
    all keys rest, the one is used that has rested the most of its time. `clock` gives seconds.
    """

    def __init__(self, providers: Sequence[Provider], *, clock: Callable[[], float] = time.monotonic) -> None:
        self._providers = tuple(providers)
        self._rests_until_s = [0.0] * len(self._providers)
        self._clock = clock
        self.api = self._providers[0].api

    def capabilities(self, model: str) -> Capabilities:
        return self._providers[0].capabilities(model)

    async def stream(self, request: ProviderRequest) -> AsyncIterator[ProviderEvent]:
        """One request with one key.

        Raises: ProviderError, as the adapter does. Where another key is ready, an error about this one says
        that it is worth trying again at once.
        """
        number = self._choose(request.cache_key)
        events = cast("AsyncGenerator[ProviderEvent, None]", self._providers[number].stream(request))
        try:
            async with aclosing(events):
                async for event in events:
                    yield event
        except (RateLimited, QuotaExceeded, AuthRefused) as error:
            now_s = self._clock()
            self._rests_until_s[number] = now_s + _rest_s(error)
            if any(until_s <= now_s for until_s in self._rests_until_s):
                error.may_retry_at_once = True
            raise

    def _choose(self, cache_key: str | None) -> int:
        count, now_s = len(self._providers), self._clock()
        first = zlib.crc32(cache_key.encode()) % count if cache_key else 0
        order = [(first + step) % count for step in range(count)]
        ready = (number for number in order if self._rests_until_s[number] <= now_s)
        return next(ready, min(order, key=lambda number: self._rests_until_s[number]))

    async def aclose(self) -> None:
        for provider in self._providers:
            await provider.aclose()


def _rest_s(error: ProviderError) -> float:
    if not isinstance(error, RateLimited):
        return REFUSED_S
    return min(error.retry_after_s or LIMITED_S, MAX_LIMITED_S)
