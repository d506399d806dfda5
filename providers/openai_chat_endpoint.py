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
    reports_cost: bool = False


GENERIC_CHAT = ChatEndpoint()

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
)

OPENROUTER_CHAT = ChatEndpoint(
    null_content=True,
    effort_style="reasoning_object",
    effort_levels=("none", "low", "medium", "high"),
    cache_key_field="session_id",
    end_user_field="user",
    reports_cost=True,
)

LITELLM_CHAT = ChatEndpoint(
    null_content=True,
    effort_style="reasoning_effort",
    effort_levels=("low", "medium", "high"),
    end_user_field="user",
)
