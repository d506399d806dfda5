"""API keys that change while the process runs: read from a file, or given by a program of the operator's."""

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from pathlib import Path
from typing import cast

from msgspec import Struct

from providers.errors import AuthRefused, ProviderError
from providers.types import Capabilities, Provider, ProviderEvent, ProviderRequest

FILE_GOOD_FOR_S = 30.0
MAX_KEY_BYTES = 65_536


class ApiKey(Struct, frozen=True, kw_only=True):
    """A key or bearer token, and for how long from now it may be used without asking again."""

    value: str
    good_for_s: float

    def __repr__(self) -> str:
        return f"ApiKey(good_for_s={self.good_for_s})"


KeySource = Callable[[], Awaitable[ApiKey]]
"""Called when a key is needed and the last one is used up. What it raises is an `AuthRefused` for the run."""


def file_key(path: str) -> KeySource:
    """A source that reads the key from a file, which may be replaced at any time."""

    async def read() -> ApiKey:
        text = await asyncio.to_thread(_read, Path(path))
        return ApiKey(value=text, good_for_s=FILE_GOOD_FOR_S)

    return read


def _read(path: Path) -> str:
    with path.open("rb") as file:
        return file.read(MAX_KEY_BYTES).decode().strip()


class FreshKey:
    """An adapter for each key that `source` gives, one at a time.

    Implements `providers.types.Provider`. A key that the API refuses is asked for anew: if another comes, the
    error says that it is worth trying again at once. `make` builds the adapter for a key; it may block.
    """

    def __init__(
        self,
        *,
        api: str,
        source: KeySource,
        make: Callable[[str], Provider],
        capabilities: Callable[[str], Capabilities],
    ) -> None:
        self.api = api
        self._source = source
        self._make = make
        self._capabilities = capabilities
        self._asking = asyncio.Lock()
        self._good_until_s = 0.0
        self._key = ""
        self._current: _Held | None = None

    def capabilities(self, model: str) -> Capabilities:
        current = self._current
        return self._capabilities(model) if current is None else current.provider.capabilities(model)

    async def stream(self, request: ProviderRequest) -> AsyncIterator[ProviderEvent]:
        """One request with the key of the moment.

        Raises: ProviderError, as the adapter does; AuthRefused, when there is no key.
        """
        held = await self._hold()
        try:
            events = cast("AsyncGenerator[ProviderEvent, None]", held.provider.stream(request))
            async with aclosing(events):
                async for event in events:
                    yield event
        except AuthRefused as error:
            error.may_retry_at_once = await self._has_other_key(held)
            raise
        finally:
            await held.release()

    async def _hold(self) -> "_Held":
        async with self._asking:
            if self._current is None or time.monotonic() >= self._good_until_s:
                await self._renew()
            assert self._current is not None
            self._current.users += 1
            return self._current

    async def _renew(self) -> None:
        try:
            key = await self._source()
        except ProviderError:
            raise
        except Exception as error:  # an operator's program: whatever it is, the run must hear of it
            raise AuthRefused(f"no key could be had ({type(error).__name__})") from error
        self._good_until_s = time.monotonic() + key.good_for_s
        if self._current is not None and key.value == self._key:
            return
        retired = self._current
        self._current = _Held(await asyncio.to_thread(self._make, key.value))
        self._key = key.value
        if retired is not None:
            await retired.release()

    async def _has_other_key(self, refused: "_Held") -> bool:
        async with self._asking:
            if self._current is refused:
                await self._renew()
            return self._current is not refused

    async def aclose(self) -> None:
        current, self._current = self._current, None
        self._good_until_s = 0.0
        if current is not None:
            await current.release()


class _Held:
    """An adapter and how many use it, the owner included: the last one out closes it."""

    def __init__(self, provider: Provider) -> None:
        self.provider = provider
        self.users = 1

    async def release(self) -> None:
        self.users -= 1
        if self.users == 0:
            await self.provider.aclose()
