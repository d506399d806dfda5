"""Where the requests of a run go: its model, and those that take over when that one fails."""

from collections.abc import Sequence
from dataclasses import dataclass

from agents.types import Pricer
from providers.errors import ProviderError
from providers.types import Capabilities, Provider


@dataclass(frozen=True, kw_only=True)
class Target:
    """A model: `vendor:model` as the ledger names it, the adapter, what it can do, and what it costs."""

    vendor: str
    model: str
    provider: Provider
    capabilities: Capabilities
    price: Pricer


class Targets:
    """The models of a run in their order. One that has failed is not come back to in this hold.

    Fallback models that cannot do what the agent needs are left out; the first model is always there.
    """

    def __init__(self, targets: Sequence[Target], *, needs_tools: bool, needs_output_schema: bool) -> None:
        first, *others = targets
        self.current = first
        self._api = first.provider.api
        self._others = [
            other
            for other in others
            if other.capabilities.tools >= needs_tools
            and other.capabilities.output_schema >= needs_output_schema
        ]

    @property
    def takes_extra_body(self) -> bool:
        """Whether the agent's `extra_body`, made for its own model's API, fits the current one."""
        return self.current.provider.api == self._api

    def may_fall_back(self, error: ProviderError) -> bool:
        """Whether there is a model left, and `error` is of a kind that it need not have."""
        return bool(self._others) and error.another_model_may_help

    def fall_back(self) -> None:
        self.current = self._others.pop(0)
