"""A bound on the whole of an answer, around any provider."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import cast

from providers.errors import RequestTimedOut
from providers.types import Capabilities, Provider, ProviderEvent, ProviderRequest


class TimeLimit:
    """`provider` with answers that take `total_s` at most, however steadily they arrive.

    Implements `providers.types.Provider`. Counted is the time in which the answer is waited for and the time
    that the reader takes.
    """

    def __init__(self, provider: Provider, total_s: float) -> None:
        self.wrapped = provider
        self.api = provider.api
        self._total_s = total_s

    def capabilities(self, model: str) -> Capabilities:
        return self.wrapped.capabilities(model)

    async def stream(self, request: ProviderRequest) -> AsyncIterator[ProviderEvent]:
        """As the provider does.

        Raises: RequestTimedOut; ProviderError, as the provider does.
        """
        deadline = asyncio.get_running_loop().time() + self._total_s
        stream = cast("AsyncGenerator[ProviderEvent, None]", self.wrapped.stream(request))
        async with aclosing(stream) as events:
            while True:
                try:
                    async with asyncio.timeout_at(deadline):  # never around the reader's own work
                        event = await anext(events, None)
                except TimeoutError as error:
                    raise RequestTimedOut(f"the answer took longer than {self._total_s:.0f} s") from error
                if event is None:
                    return
                yield event

    async def aclose(self) -> None:
        await self.wrapped.aclose()
