"""Bounds on answers: the whole of one, and those that an operator sets for one vendor."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from app.provider_settings import provider_settings
from app.settings import SettingsError, load_settings
from providers.errors import RequestTimedOut
from providers.registry import Registry
from providers.time_limit import TimeLimit
from providers.types import Capabilities, Message, ProviderEvent, ProviderRequest, TextBlock, TextDelta
from providers.vendors import Vendor

REQUEST = ProviderRequest(model="m", messages=(Message(role="user", blocks=(TextBlock(text="hi"),)),))


class Endless:
    """Speaks for ever, a little at a time."""

    api = "endless"

    def __init__(self, **settings: Any) -> None:
        self.settings = settings
        self.is_released = False

    def capabilities(self, model: str) -> Capabilities:
        return Capabilities()

    async def stream(self, request: ProviderRequest) -> AsyncIterator[ProviderEvent]:
        try:
            while True:
                await asyncio.sleep(0.001)
                yield TextDelta(index=0, text="…")
        finally:
            self.is_released = True

    async def aclose(self) -> None: ...


async def test_an_answer_that_never_ends_is_ended_and_its_connection_released() -> None:
    endless = Endless()
    events: list[ProviderEvent] = []
    with pytest.raises(RequestTimedOut):
        async for event in TimeLimit(endless, 0.2).stream(REQUEST):
            events.append(event)
    assert events
    assert endless.is_released


async def test_the_bounds_of_a_vendor_win_over_those_for_all() -> None:
    settings = load_settings(
        {
            "ARMILLARY_OLLAMA_BASE_URL": "http://127.0.0.1:9",
            "ARMILLARY_PROVIDER_IDLE_S": "50",
            "ARMILLARY_PROVIDER_TIMEOUTS": '{"ollama": {"first_event_s": 900, "total_s": 5000}}',
        }
    )
    made: dict[str, dict[str, Any]] = {}

    def vendor(name: str) -> Vendor:
        def make(**given: Any) -> Endless:
            made[name] = given
            return Endless(**given)

        return Vendor(
            name=name, title=name, api="endless", make=make, capabilities=lambda _: Capabilities(),
            needs_nothing=True,
        )  # fmt: skip

    registry = Registry(
        provider_settings(settings), vendors={name: vendor(name) for name in ("ollama", "litellm")}
    )
    registry.preload()
    assert (made["ollama"]["first_event_timeout_s"], made["ollama"]["idle_timeout_s"]) == (900.0, 50.0)
    assert (made["litellm"]["first_event_timeout_s"], made["litellm"]["idle_timeout_s"]) == (120.0, 50.0)
    assert made["ollama"]["context_tokens"] == 16_384
    await registry.aclose()


def test_a_vendor_that_there_is_not_has_no_bounds() -> None:
    with pytest.raises(SettingsError, match="ARMILLARY_PROVIDER_TIMEOUTS"):
        load_settings({"ARMILLARY_PROVIDER_TIMEOUTS": '{"acme": {"idle_s": 1}}'})
