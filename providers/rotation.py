"""Several keys of one vendor behind one provider."""

from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from typing import cast

from providers.errors import AuthRefused, QuotaExceeded, RateLimited
from providers.types import Capabilities, Provider, ProviderEvent, ProviderRequest

_ABOUT_THE_KEY = (RateLimited, QuotaExceeded, AuthRefused)


class KeyRotation:
    """Uses one key until the API objects to it, then the next: the attempt after that goes elsewhere.

    Implements `providers.types.Provider`. `providers` are the same adapter with one key each, at least one.
    Requests are not spread over the keys, since the cache of a prompt belongs to a key's account.
    """

    def __init__(self, providers: Sequence[Provider]) -> None:
        self._providers = tuple(providers)
        self._current = 0
        self.api = self._providers[0].api

    def capabilities(self, model: str) -> Capabilities:
        return self._providers[0].capabilities(model)

    async def stream(self, request: ProviderRequest) -> AsyncIterator[ProviderEvent]:
        """One request with the current key.

        Raises: ProviderError, as the adapter does.
        """
        number = self._current
        events = cast(AsyncGenerator[ProviderEvent, None], self._providers[number].stream(request))
        try:
            async with aclosing(events):
                async for event in events:
                    yield event
        except _ABOUT_THE_KEY:
            if self._current == number:  # else a request beside this one has moved on already
                self._current = (number + 1) % len(self._providers)
            raise

    async def aclose(self) -> None:
        for provider in self._providers:
            await provider.aclose()
