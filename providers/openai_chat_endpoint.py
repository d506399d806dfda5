"""How the servers of the Chat Completions format differ, as data."""

from typing import Literal

from msgspec import Struct

from providers.openai_models import Effort


class ChatEndpoint(Struct, frozen=True, kw_only=True):
    """The habits of one server. The defaults suit an unknown one: nothing is sent that may be refused.

    `is_openai`: what OpenAI itself refuses is left out (effort beside tools, effort `max`).
    `null_content`: an assistant message of calls alone has `content` null, else an empty string.
    `allows_later_system`: `system` messages may stand behind others, else they are sent as marked user text.
    `effort_style`: how `think_effort` is sent; `effort_levels` None takes the model's own from the table.
    `reasoning_fields`: where readable reasoning comes, the first present one counts.
    `returned_fields`: fields of an answer that the server wants to see again in the transcript.
    `reasoning_placeholder`: sent as `reasoning_content` where a message has none; None sends nothing.
    `thinks_unless_told`: thinking must be off where a tool is forced, and is on when nothing is said of it.
    `schema_field`: where a JSON Schema for the answer goes; None: the server takes none.
    `requires_finish_reason`: an answer without one is truncated, else `[DONE]` is enough.
    `cost`: whether its usage tells what was billed, or does so when it is more than 0. `cost_header` may too.
    `is_proxy`: a refusal that it could not classify may pass, so it is tried once more.
    `model_facts_path`: where it tells the limits of its models, beside their names at `/models`.
    """

    is_openai: bool = False
    max_tokens_field: Literal["max_tokens", "max_completion_tokens"] = "max_tokens"
    null_content: bool = False
    include_usage: bool = True
    strict_tools: bool = False
    allows_later_system: bool = False
    effort_style: Literal["none", "reasoning_effort", "reasoning_object", "thinking_toggle"] = "none"
    effort_levels: tuple[Effort, ...] | None = None
    reasoning_fields: tuple[str, ...] = ("reasoning_content", "reasoning")
    returned_fields: tuple[str, ...] = ("reasoning_details", "thinking_blocks")
    reasoning_placeholder: str | None = None
    cache_key_field: str | None = None
    end_user_field: str | None = None
    thinks_unless_told: bool = False
    schema_field: Literal["response_format"] | None = "response_format"
    requires_finish_reason: bool = True
    cost: Literal["no", "exact", "positive"] = "no"
    cost_header: str | None = None
    is_proxy: bool = False
    model_facts_path: str | None = None


GENERIC_CHAT = ChatEndpoint(requires_finish_reason=False)

OPENAI_CHAT = ChatEndpoint(
    is_openai=True,
    max_tokens_field="max_completion_tokens",
    null_content=True,
    strict_tools=True,
    allows_later_system=True,
    effort_style="reasoning_effort",
    returned_fields=(),
    cache_key_field="prompt_cache_key",
    end_user_field="safety_identifier",
)

DEEPSEEK_CHAT = ChatEndpoint(
    effort_style="thinking_toggle",
    effort_levels=("none", "low", "high", "max"),
    allows_later_system=True,
    returned_fields=("reasoning_content",),
    reasoning_placeholder="",
    thinks_unless_told=True,
    schema_field=None,
)

OPENROUTER_CHAT = ChatEndpoint(
    null_content=True,
    effort_style="reasoning_object",
    effort_levels=("none", "low", "medium", "high"),
    returned_fields=("reasoning_details",),
    cache_key_field="session_id",
    end_user_field="user",
    cost="exact",
    model_facts_path="/models",
)

LITELLM_CHAT = ChatEndpoint(
    null_content=True,
    effort_style="reasoning_effort",
    effort_levels=("low", "medium", "high"),
    returned_fields=("thinking_blocks",),
    end_user_field="user",
    cost="positive",  # 0 for every model that it has no price of
    cost_header="x-litellm-response-cost",
    is_proxy=True,
    model_facts_path="/model/info",
)
