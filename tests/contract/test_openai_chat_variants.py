"""What DeepSeek, OpenRouter and a LiteLLM proxy do differently, through the real SDK on scripted bytes."""

from decimal import Decimal
from typing import Any

import pytest

from providers.errors import ProviderError, RequestRejected, ServerFailed, UnclassifiedRejection
from providers.openai_chat import OpenAIChat
from providers.openai_chat_endpoint import DEEPSEEK_CHAT, LITELLM_CHAT, OPENROUTER_CHAT, ChatEndpoint
from providers.retry import RetryPolicy
from providers.types import (
    Capabilities,
    Message,
    MessageEnd,
    ProviderEvent,
    ProviderRequest,
    Stop,
    TextBlock,
    TextDelta,
    ToolChoice,
    ToolResultBlock,
    ToolSpec,
    ToolUseBlock,
    UsageUpdate,
)
from tests.support.model_server import Answer, ModelServer, RecordedRequest, json_answer, split_every, sse

LOOK = ToolSpec(name="look", description="Looks.", input_schema={"type": "object"})
DONE = "data: [DONE]\n\n"
HELLO = Message(role="user", blocks=(TextBlock(text="hello"),))


def asking(*messages: Message, model: str = "some/model", **fields: Any) -> ProviderRequest:
    return ProviderRequest(model=model, messages=messages or (HELLO,), **fields)


def chunk(delta: Any = None, reason: Any = None, **fields: Any) -> dict[str, Any]:
    choice = {"index": 0, "delta": delta or {}, "finish_reason": reason}
    return {"id": "c1", "object": "chat.completion.chunk", "model": "m1", "choices": [choice]} | fields


async def play(
    endpoint: ChatEndpoint, answer: Answer, request: ProviderRequest | None = None, **settings: Any
) -> tuple[list[ProviderEvent], RecordedRequest, ProviderError | None]:
    events: list[ProviderEvent] = []
    failure = None
    async with ModelServer() as server:
        server.enqueue(answer)
        provider = OpenAIChat(api_key="k", base_url=server.base_url, endpoint=endpoint, **settings)
        try:
            async for event in provider.stream(request or asking()):
                events.append(event)
        except ProviderError as error:
            failure = error
        finally:
            await provider.aclose()
        return events, server.requests[0], failure


def fine(**usage: Any) -> Answer:
    return Answer(chunks=[sse(chunk({"content": "ok"}), chunk(None, "stop", usage=usage or None), DONE)])


async def sent(endpoint: ChatEndpoint, request: ProviderRequest) -> Any:
    _, recorded, failure = await play(endpoint, fine(), request)
    assert failure is None
    return recorded.body_json


def usage_of(events: list[ProviderEvent]) -> Any:
    return [event.usage for event in events if isinstance(event, UsageUpdate)][-1]


# -- DeepSeek ---------------------------------------------------------------------------------------------


async def test_deepseek_counts_what_its_cache_had() -> None:
    counts = {"prompt_tokens": 100, "prompt_cache_hit_tokens": 64, "prompt_cache_miss_tokens": 36}
    events, _, _ = await play(DEEPSEEK_CHAT, fine(completion_tokens=5, **counts))
    usage = usage_of(events)
    assert (usage.input_tokens, usage.cache_read_tokens, usage.output_tokens) == (100, 64, 5)


@pytest.mark.parametrize("choice", [ToolChoice(type="any"), ToolChoice(type="tool", name="look")])
async def test_deepseek_does_not_think_where_a_tool_is_forced(choice: ToolChoice) -> None:
    """It answers 400 to a forced tool while it thinks, and it thinks unless told not to."""
    body = await sent(DEEPSEEK_CHAT, asking(tools=(LOOK,), tool_choice=choice, think_effort=1.0))
    assert body["thinking"] == {"type": "disabled"}
    assert "reasoning_effort" not in body
    assert body["tool_choice"] != "auto"


async def test_deepseek_is_not_asked_for_a_schema_that_it_would_refuse() -> None:
    assert not OpenAIChat(api_key="k", endpoint=DEEPSEEK_CHAT).capabilities("deepseek-flash").output_schema
    body = await sent(DEEPSEEK_CHAT, asking(output_schema={"type": "object"}))
    assert "response_format" not in body


# -- OpenRouter -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 7, 1 << 20])
async def test_openrouter_comments_are_passed_over_wherever_the_bytes_are_split(size: int) -> None:
    stream = sse(
        ": OPENROUTER PROCESSING\n\n",
        "id: 1\n" + sse(chunk({"content": "Hé"})).decode(),
        ": OPENROUTER PROCESSING\n\n",
        chunk(None, "stop"),
        DONE,
    )
    events, _, failure = await play(OPENROUTER_CHAT, Answer(chunks=split_every(stream, size)))
    assert failure is None
    assert [event.text for event in events if isinstance(event, TextDelta)] == ["Hé"]


@pytest.mark.parametrize(
    "end",
    [
        chunk({"content": ""}, "error", error={"code": 502, "message": "upstream"}),
        {"error": {"code": 502, "message": "upstream"}, "choices": None},
        chunk({"content": ""}, "stop")
        | {"choices": [{"delta": {}, "native_finish_reason": "network_error"}]},
    ],
)
async def test_openrouter_errors_in_mid_stream_are_no_answers(end: dict[str, Any]) -> None:
    events, _, failure = await play(
        OPENROUTER_CHAT, Answer(chunks=[sse(chunk({"content": "Hel"}), end, DONE)])
    )
    assert type(failure) is ServerFailed
    assert not any(isinstance(event, MessageEnd) for event in events)


@pytest.mark.parametrize(
    ("usage", "cost"),
    [
        ({"cost": 0.0012}, Decimal("0.0012")),
        ({"cost": 0}, Decimal(0)),
        ({}, None),
        (
            {"cost": 0.0001, "is_byok": True, "cost_details": {"upstream_inference_cost": 0.002}},
            Decimal("0.0021"),
        ),
        ({"cost": 0.0001, "is_byok": True}, None),
    ],
)
async def test_openrouter_says_what_it_billed(usage: dict[str, Any], cost: Decimal | None) -> None:
    events, _, _ = await play(OPENROUTER_CHAT, fine(prompt_tokens=5, completion_tokens=1, **usage))
    assert usage_of(events).cost_usd == cost


async def test_openrouter_is_told_where_a_request_comes_from_and_its_id_is_kept() -> None:
    headers = {"X-OpenRouter-Title": "Armillary", "HTTP-Referer": "https://example.com"}
    refused = json_answer({"error": {"message": "no"}}, status=400, headers={"x-generation-id": "gen-1"})
    _, recorded, failure = await play(OPENROUTER_CHAT, refused, headers=headers)
    assert recorded.headers["x-openrouter-title"] == "Armillary"
    assert recorded.headers["http-referer"] == "https://example.com"
    assert failure is not None
    assert (type(failure), failure.request_id) == (RequestRejected, "gen-1")


# -- LiteLLM proxy ----------------------------------------------------------------------------------------


async def test_a_refusal_that_litellm_could_not_classify_is_tried_once_more() -> None:
    unclear = {"message": "litellm.BadRequestError", "type": "None", "param": "None", "code": "400"}
    events, _, failure = await play(LITELLM_CHAT, json_answer({"error": unclear}, status=400))
    assert events == []
    assert type(failure) is UnclassifiedRejection
    policy = RetryPolicy()
    assert policy.delay_s(failure, 1, lambda: 0.0) is not None
    assert policy.delay_s(failure, 2, lambda: 0.0) is None


async def test_a_refusal_with_a_reason_is_final() -> None:
    clear = {"message": "wrong", "type": "invalid_request_error", "param": "None", "code": "400"}
    _, _, failure = await play(LITELLM_CHAT, json_answer({"error": clear}, status=400))
    assert type(failure) is RequestRejected
    _, _, elsewhere = await play(OPENROUTER_CHAT, json_answer({"error": {"message": "x"}}, status=400))
    assert type(elsewhere) is RequestRejected


@pytest.mark.parametrize(
    ("header", "usage", "cost"),
    [
        ("0.00021", {}, Decimal("0.00021")),
        ("0.0", {}, None),
        (None, {"cost": 0.5}, Decimal("0.5")),
        (None, {"cost": 0}, None),
        ("0.1", {"cost": 0.5}, Decimal("0.5")),
        ("None", {}, None),
    ],
)
async def test_the_cost_that_litellm_reports_counts_where_it_knows_one(
    header: str | None, usage: dict[str, Any], cost: Decimal | None
) -> None:
    answer = fine(prompt_tokens=5, completion_tokens=1, **usage)
    answer.headers = {} if header is None else {"x-litellm-response-cost": header}
    events, _, _ = await play(LITELLM_CHAT, answer)
    assert usage_of(events).cost_usd == cost


async def test_signed_thinking_goes_back_through_litellm_and_to_no_other_server() -> None:
    use = ToolUseBlock(id="a", name="look")
    signed = [
        {"type": "thinking", "thinking": "Let me"},
        {"type": "thinking", "thinking": " see"},
        {"type": "thinking", "thinking": "", "signature": "sig"},
    ]
    called = {"index": 0, "id": "a", "function": {"name": "look", "arguments": "{}"}}
    frames = [chunk({"reasoning_content": part["thinking"], "thinking_blocks": [part]}) for part in signed]
    answer = Answer(chunks=[sse(*frames, chunk({"tool_calls": [called]}), chunk(None, "tool_calls"), DONE)])
    events, _, _ = await play(LITELLM_CHAT, answer)
    end = events[-1]
    assert isinstance(end, MessageEnd)
    assert end.stop is Stop.TOOL_USE
    result = ToolResultBlock(tool_use_id="a", content=(TextBlock(text="r"),))
    history = (
        HELLO,
        Message(role="assistant", blocks=(use,), native=end.native),
        Message(role="tool", blocks=(result,)),
    )
    body = await sent(LITELLM_CHAT, asking(*history))
    assert body["messages"][1]["thinking_blocks"] == [
        {"type": "thinking", "thinking": "Let me see", "signature": "sig"}
    ]
    elsewhere = await sent(OPENROUTER_CHAT, asking(*history))
    assert "thinking_blocks" not in elsewhere["messages"][1]


async def test_litellm_tells_its_models_and_their_limits() -> None:
    facts = {"supports_vision": True, "supports_function_calling": False, "max_input_tokens": 32_000}
    rows = [
        {"model_name": "ours", "model_info": facts | {"max_output_tokens": None}},
        {"model_name": "ours", "model_info": {}},
        {"model_name": "openai/*", "model_info": {}},
    ]
    async with ModelServer() as server:
        server.enqueue(json_answer({"data": rows}))
        provider = OpenAIChat(api_key="k", base_url=server.base_url, endpoint=LITELLM_CHAT)
        [listed] = await provider.list_models()
        await provider.aclose()
        assert server.requests[0].path == "/model/info"
    known = Capabilities(tools=False, images=True, context_window_tokens=32_000)
    assert (listed.model, listed.capabilities) == ("ours", known)
    assert provider.capabilities("ours") == known


async def test_where_only_admins_may_see_the_limits_the_names_are_listed() -> None:
    async with ModelServer() as server:
        server.enqueue(
            json_answer({"error": {"message": "admins only"}}, status=403),
            json_answer({"object": "list", "data": [{"id": "gpt-4.1"}, {"id": None}]}),
        )
        provider = OpenAIChat(api_key="k", base_url=server.base_url, endpoint=LITELLM_CHAT)
        [listed] = await provider.list_models()
        await provider.aclose()
    assert (listed.model, listed.capabilities.max_output_tokens) == ("gpt-4.1", 32_768)


async def test_openrouter_tells_what_its_models_can_do() -> None:
    entry = {
        "id": "vendor/sees",
        "context_length": 65_536,
        "architecture": {"input_modalities": ["text", "image"]},
        "top_provider": {"max_completion_tokens": None},
        "supported_parameters": ["tools", "structured_outputs"],
    }
    async with ModelServer() as server:
        server.enqueue(json_answer({"data": [entry]}))
        provider = OpenAIChat(api_key="k", base_url=server.base_url, endpoint=OPENROUTER_CHAT)
        [listed] = await provider.list_models()
        await provider.aclose()
        assert server.requests[0].path == "/models"
    known = Capabilities(tools=True, images=True, output_schema=True, context_window_tokens=65_536)
    assert (listed.model, listed.capabilities) == ("vendor/sees", known)
