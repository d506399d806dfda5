"""One request to a provider: its ledger entry, its span, its answer so far."""

from collections import Counter

from msgspec.structs import replace

from agents.assembly import Assembly, Part
from agents.closing import add_session_error, model_usage
from agents.drafts import Draft
from agents.events import (
    AgentCustomToolUse,
    AgentMessage,
    AgentThinking,
    AgentToolUse,
    ErrorType,
    RequestEnd,
    RequestStart,
    RetryType,
    TokenUsage,
)
from agents.hooks import RequestInfo
from agents.types import Clock, Pricer, RequestClosed, RequestOpened, ToolCall
from providers.errors import (
    Overloaded,
    ProviderError,
    QuotaExceeded,
    RateLimited,
)
from providers.ids import new_id
from providers.types import (
    Message,
    ProviderRequest,
    Purpose,
    Stop,
    TextBlock,
    ThinkingBlock,
    ToolUseBlock,
    Usage,
)


class Exchange:
    """Made before the request leaves; closed once, however it ends."""

    def __init__(
        self, *, turn: int, attempt: int, vendor: str, model: str, clock: Clock, purpose: Purpose = "main"
    ) -> None:
        self.id = new_id("evt")
        self.turn = turn
        self.assembly = Assembly()
        self._attempt = attempt
        self._purpose = purpose
        self._vendor = vendor
        self._model = model
        self._clock = clock
        self._started_s = clock.monotonic()
        self._first_token_s: float | None = None

    def open(self, draft: Draft) -> None:
        """Adds the span's start and the ledger entry, which carry the same id."""
        draft.event(
            RequestStart,
            event_id=self.id,
            provider=self._vendor,
            model=self._model,
            purpose=self._purpose,
            attempt=self._attempt,
        )
        draft.opened = RequestOpened(
            id=self.id,
            turn=self.turn,
            provider=self._vendor,
            model=self._model,
            purpose=self._purpose,
        )

    @property
    def text(self) -> str:
        """Of the answer so far."""
        blocks = (part.block for part in self.assembly.parts())
        return "".join(block.text for block in blocks if isinstance(block, TextBlock))

    def info(self, request: ProviderRequest, prompt_tokens: int) -> RequestInfo:
        """What observers are told of the request."""
        return RequestInfo(
            provider=self._vendor,
            model=self._model,
            turn=self.turn,
            attempt=self._attempt,
            messages=len(request.messages),
            roles=dict(Counter(message.role for message in request.messages)),
            tools=len(request.tools),
            prompt_tokens=prompt_tokens,
        )

    def left(self) -> None:
        """The request leaves at this moment."""
        self._started_s = self._clock.monotonic()

    def content_arrived(self) -> None:
        if self._first_token_s is None:
            self._first_token_s = self._clock.monotonic()

    def close(self, draft: Draft, price: Pricer, *, error_code: str | None = None) -> None:
        """Adds the span's end and closes the ledger entry.

        An answer without its terminal marker has no final counts: its output is estimated from what arrived.
        """
        end = self.assembly.end
        usage, is_estimated = self.assembly.usage, False
        if end is None and self.assembly.has_content:
            estimate = self.assembly.estimated_output_tokens()
            is_estimated = estimate > (usage.output_tokens or 0)
            usage = replace(usage, output_tokens=max(usage.output_tokens or 0, estimate))
        cost, source = (None, None) if _is_empty(usage) else price(usage)
        draft.closed = RequestClosed(
            id=self.id,
            usage=usage,
            cost_usd=cost,
            price_source=source,
            stop=None if end is None else end.stop.value,
            native_stop=None if end is None else end.native_stop,
            error_code=error_code,
            estimated=is_estimated,
            latency_ms=self._since_start_ms(self._clock.monotonic()),
            first_token_ms=self._since_start_ms(self._first_token_s),
        )
        draft.event(
            RequestEnd,
            model_request_start_id=self.id,
            model_usage=model_usage(usage),
            usage=TokenUsage(
                input_tokens=usage.input_tokens,
                cache_read_tokens=usage.cache_read_tokens,
                cache_write_tokens=usage.cache_write_tokens,
                output_tokens=usage.output_tokens,
                reasoning_tokens=usage.reasoning_tokens,
                cost_usd=cost,
                estimated=is_estimated,
            ),
            is_error=error_code is not None,
            stop=draft.closed.stop,
            native_stop=draft.closed.native_stop,
            error_code=error_code,
            latency_ms=draft.closed.latency_ms,
            first_token_ms=draft.closed.first_token_ms,
        )

    def _since_start_ms(self, moment_s: float | None) -> int | None:
        return None if moment_s is None else round((moment_s - self._started_s) * 1000)


def add_prose(draft: Draft, parts: tuple[Part, ...], *, incomplete: bool) -> None:
    """Adds the final events of text and thinking, under the ids of their previews."""
    for part in parts:
        if isinstance(part.block, ThinkingBlock):
            draft.event(AgentThinking, event_id=part.event_id, thinking=part.block.thinking)
        elif isinstance(part.block, TextBlock):
            draft.event(AgentMessage, event_id=part.event_id, content=(part.block,), incomplete=incomplete)


def add_use(draft: Draft, part: Part, call: ToolCall) -> None:
    """Adds the event of a call, under the id of its preview."""
    if call.kind != "server":
        draft.event(AgentCustomToolUse, event_id=call.id, name=call.name, input=call.input)
        return
    assert isinstance(part.block, ToolUseBlock)
    draft.event(
        AgentToolUse,
        event_id=call.id,
        name=call.name,
        input=call.input,
        input_error=part.block.input_error,
        evaluated_permission="ask" if call.state == "open" else "allow",
    )


def keep_partial_text(draft: Draft, exchange: Exchange) -> None:
    """Keeps the text of an answer that was cut. Calls and unsigned thinking of it are worth nothing."""
    parts = tuple(part for part in exchange.assembly.parts() if isinstance(part.block, TextBlock))
    if parts:
        add_prose(draft, parts, incomplete=True)
        draft.message(Message(role="assistant", blocks=tuple(part.block for part in parts)))


def add_error(draft: Draft, error: ProviderError, *, retry: RetryType) -> None:
    """Tells readers of a provider's failure, in words fit for users."""
    add_session_error(
        draft, code=error.code, message=user_text(error), error_type=_error_type(error), retry=retry
    )


def user_text(error: ProviderError) -> str:
    """What a user of the service may read. The provider's own words stay in our log."""
    return _TEXTS.get(error.code, "The model API could not answer this request.")


_TEXTS = {
    "rate_limited": "The model API limits how often it may be asked just now.",
    "quota_exceeded": "The account at the model API has no credit or has reached a spend limit.",
    "provider_overloaded": "The model API has no capacity just now.",
    "provider_failed": "The model API failed on its side.",
    "connection_lost": "The connection to the model API was lost.",
    "provider_timeout": "The model API did not answer in time.",
    "stream_truncated": "The model's answer ended too early.",
    "bad_payload": "The model API sent something that is not an answer.",
    "context_too_long": "The conversation is longer than the model can take.",
    "provider_auth": "The model API refused the configured key.",
    "model_not_found": "The model API does not know this model.",
    "request_rejected": "The model API rejected the request.",
    "rejected_without_reason": "The model API rejected the request.",
    "unknown_model": "No configured provider offers this model.",
}


def _error_type(error: ProviderError) -> ErrorType:
    if isinstance(error, Overloaded):
        return "model_overloaded_error"
    if isinstance(error, RateLimited):
        return "model_rate_limited_error"
    if isinstance(error, QuotaExceeded):
        return "billing_error"
    return "model_request_failed_error"


def _is_empty(usage: Usage) -> bool:
    return usage.input_tokens is None and usage.output_tokens is None and usage.cost_usd is None


def is_cut(stop: Stop) -> bool:
    """True when the answer is whole for the API but not for a reader."""
    return stop in {Stop.MAX_TOKENS, Stop.CONTEXT_WINDOW}
