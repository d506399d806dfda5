"""The adapter for Ollama's own API, played against a scripted server on loopback."""

import base64
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import msgspec
import pytest

from providers.errors import (
    BadPayload,
    ConnectionLost,
    ModelNotFound,
    Overloaded,
    ProviderError,
    RequestRejected,
    RequestTimedOut,
    ServerFailed,
    StreamTruncated,
)
from providers.ollama import Ollama
from providers.registry import ProviderSettings, Registry, VendorSettings
from providers.tool_names import wire_name
from providers.types import (
    Base64Source,
    Block,
    ImageBlock,
    Message,
    MessageEnd,
    NativeBlocks,
    ProviderEvent,
    ProviderRequest,
    Stop,
    TextBlock,
    TextDelta,
    ThinkingBlock,
    ThinkingDelta,
    ToolCallEnd,
    ToolCallStart,
    ToolChoice,
    ToolResultBlock,
    ToolSpec,
    ToolUseBlock,
    UrlSource,
    UsageUpdate,
)
from tests.support.model_server import Answer, End, ModelServer, json_answer, split_every

MODEL = "qwen3:8b"
WIRE_NAME = wire_name("calendar.list")
PIXEL = base64.b64encode(b"pixel").decode()
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOLS = tuple(
    ToolSpec(name=name, description=name, input_schema=SCHEMA) for name in ("weather", "calendar.list")
)


def shown(*capabilities: str, length: int = 40_960, parameters: str = "") -> Answer:
    """The answer of `/api/show`."""
    details = {"general.architecture": "qwen3", "qwen3.context_length": length}
    document = {"capabilities": list(capabilities), "model_info": details, "parameters": parameters}
    return replace(json_answer(document), end="chunked_end")


def line(message: dict[str, Any] | None = None, **fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "message": {"role": "assistant", "content": ""} | (message or {}), **fields}


def done(reason: str | None = "stop", **fields: Any) -> dict[str, Any]:
    return line(done=True) | ({"done_reason": reason} if reason else {}) | fields


def call(name: str, arguments: Any, **fields: Any) -> dict[str, Any]:
    return {"function": {"index": 0, "name": name, "arguments": arguments}, **fields}


def lines(*entries: dict[str, Any] | str, size: int = 1 << 20, end: End = "chunked_end") -> Answer:
    data = b"".join(
        entry.encode() if isinstance(entry, str) else json.dumps(entry, ensure_ascii=False).encode() + b"\n"
        for entry in entries
    )
    return Answer(chunks=split_every(data, size), content_type="application/x-ndjson", end=end)


def asking(*messages: Message, **fields: Any) -> ProviderRequest:
    asked = messages or (Message(role="user", blocks=(TextBlock(text="hi"),)),)
    return ProviderRequest(model=MODEL, messages=asked, **fields)


@asynccontextmanager
async def server(*answers: Answer, **settings: Any) -> AsyncIterator[tuple[ModelServer, Ollama]]:
    async with ModelServer() as served:
        served.enqueue(*answers)
        provider = Ollama(base_url=served.base_url, **settings)
        try:
            yield served, provider
        finally:
            await provider.aclose()


async def play(
    *answers: Answer, request: ProviderRequest | None = None, **settings: Any
) -> tuple[list[ProviderEvent], dict[str, Any]]:
    """The events of one answer, and the body of its request."""
    async with server(*answers, **settings) as (served, provider):
        events = [event async for event in provider.stream(request or asking())]
        assert [asked.path for asked in served.requests] == ["/api/show", "/api/chat"]
        return events, served.requests[-1].body_json


async def sent(model: Answer, request: ProviderRequest, **settings: Any) -> dict[str, Any]:
    return (await play(model, lines(done()), request=request, **settings))[1]


async def fail(*answers: Answer, **settings: Any) -> tuple[ProviderError, list[ProviderEvent]]:
    events: list[ProviderEvent] = []
    async with server(*answers, **settings) as (_, provider):
        with pytest.raises(ProviderError) as caught:
            async for event in provider.stream(asking()):
                events.append(event)
    return caught.value, events


@pytest.mark.parametrize("size", [1, 3, 1 << 20])
async def test_thinking_text_calls_and_usage_arrive_whatever_the_chunks(size: int) -> None:
    answer = lines(
        line({"thinking": "Hé"}),
        line({"thinking": " 修"}),
        line({"content": "Look"}),
        line({"content": "ing 🙂"}),
        line({"tool_calls": [call("weather", {"city": "Zürich"}, id="call_1")]}),
        line({"tool_calls": [call(WIRE_NAME, {}), call("weather", '{"city": "Rom"}')]}),
        done(prompt_eval_count=11, eval_count=7, total_duration=5),
        size=size,
    )
    events, _ = await play(shown("tools", "thinking"), answer, request=asking(tools=TOOLS))
    thinking = "".join(event.text for event in events if isinstance(event, ThinkingDelta))
    text = "".join(event.text for event in events if isinstance(event, TextDelta))
    assert (thinking, text) == ("Hé 修", "Looking 🙂")
    starts = [event for event in events if isinstance(event, ToolCallStart)]
    assert starts[0].id == "call_1"
    assert len({start.id for start in starts}) == 3
    assert [event.input for event in events if isinstance(event, ToolCallEnd)] == [
        {"city": "Zürich"},
        {},
        {"city": "Rom"},
    ]
    [usage] = [event.usage for event in events if isinstance(event, UsageUpdate)]
    assert (usage.input_tokens, usage.output_tokens, usage.cache_read_tokens) == (11, 7, None)
    assert usage.raw["total_duration"] == 5
    end = events[-1]
    assert isinstance(end, MessageEnd)
    assert (end.stop, end.native_stop) == (Stop.TOOL_USE, "stop")


async def test_a_count_that_the_server_leaves_out_is_not_known() -> None:
    """The server sends no `prompt_eval_count` for a prompt that it had in its cache."""
    events, _ = await play(shown(), lines(line({"content": "Hi"}), done(eval_count=2)))
    [usage] = [event.usage for event in events if isinstance(event, UsageUpdate)]
    assert (usage.input_tokens, usage.output_tokens) == (None, 2)


@pytest.mark.parametrize("reason", [None, "load", "a new one"])
async def test_an_unknown_reason_ends_the_message_and_is_kept(reason: str | None) -> None:
    events, _ = await play(shown(), lines(line({"content": "Hi"}), done(reason)))
    end = events[-1]
    assert isinstance(end, MessageEnd)
    assert (end.stop, end.native_stop) == (Stop.UNKNOWN if reason else Stop.END_TURN, reason)


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        (lines(line({"content": "Hel"})), StreamTruncated),
        (lines(line({"content": "Hel"}), '{"message": {"content": "lo'), StreamTruncated),
        (lines(line({"content": "Hel"}), end="cut"), StreamTruncated),
        (lines(line({"content": "Hel"}), end="reset"), StreamTruncated),
        (lines(line({"content": "Hel"}), {"error": "the model runner stopped"}), ServerFailed),
        (lines(line({"content": "Hel"}), {"error": "busy", "status_code": 503}), ServerFailed),
        (lines(line({"content": "Hel"}), {"error": "server overloaded, retry"}), Overloaded),
        (lines(line({"content": "Hel"}), "no json\n"), BadPayload),
        (lines(line({"content": "Hel"}), "[1]\n"), BadPayload),
    ],
)
async def test_what_breaks_an_answer_has_a_class_and_keeps_the_text_so_far(
    answer: Answer, kind: type[ProviderError]
) -> None:
    error, events = await fail(shown(), answer)
    assert type(error) is kind
    assert [event.text for event in events if isinstance(event, TextDelta)] == ["Hel"]
    assert not any(isinstance(event, MessageEnd) for event in events)


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        (lines(), StreamTruncated),
        (lines({"unknown": True}), BadPayload),
        (Answer(chunks=[b"<html></html>"], content_type="text/html"), BadPayload),
        (lines({"error": "model requires more memory"}), ServerFailed),
    ],
)
async def test_what_is_no_answer_is_an_error_and_never_text(
    answer: Answer, kind: type[ProviderError]
) -> None:
    error, events = await fail(shown(), answer)
    assert type(error) is kind
    assert events == []


async def test_a_model_that_the_server_does_not_have_is_told_before_the_chat() -> None:
    error, _ = await fail(json_answer({"error": "model 'qwen3:8b' not found"}, status=404))
    assert isinstance(error, ModelNotFound)


async def test_a_port_where_nobody_listens_is_a_lost_connection() -> None:
    async with ModelServer() as gone:
        address = gone.base_url
    provider = Ollama(base_url=address)
    with pytest.raises(ConnectionLost):
        [event async for event in provider.stream(asking())]
    await provider.aclose()


@pytest.mark.parametrize("entries", [(), (line({"content": "Hel"}),)])
async def test_silence_before_and_within_an_answer_times_out(entries: tuple[dict[str, Any], ...]) -> None:
    times = {"first_event_timeout_s": 0.2, "idle_timeout_s": 0.2}
    error, _ = await fail(shown(), lines(*entries, end="hang"), **times)
    assert isinstance(error, RequestTimedOut)


async def test_tools_on_a_model_that_has_none_are_refused_before_the_chat() -> None:
    async with server(shown("completion")) as (served, provider):
        assert provider.capabilities(MODEL).tools
        with pytest.raises(RequestRejected):
            [event async for event in provider.stream(asking(tools=TOOLS))]
        assert not provider.capabilities(MODEL).tools
        assert len(served.requests) == 1


async def test_a_server_that_tells_nothing_of_its_models_is_used_all_the_same() -> None:
    nothing = replace(json_answer("404 page not found", status=404), end="chunked_end")
    body = await sent(nothing, asking(tools=TOOLS, think_effort=1.0))
    assert body["think"] is True  # as the name says
    assert len(body["tools"]) == 2


async def test_one_question_about_a_model_and_one_connection_serve_many_requests() -> None:
    answers = [lines(line({"content": "Hi"}), done()) for _ in range(3)]
    async with server(shown(), *answers) as (served, provider):
        for _ in answers:
            [event async for event in provider.stream(asking())]
        assert [asked.path for asked in served.requests] == ["/api/show", *["/api/chat"] * 3]
        assert served.connections_made == 1


@pytest.mark.parametrize(
    ("parameters", "length", "extra", "tokens"),
    [
        ("", 40_960, {}, 16_384),
        ("", 4_096, {}, 4_096),
        ('num_ctx     8192\nstop   "<|im_end|>"', 40_960, {}, 8_192),
        ("", 40_960, {"options": {"num_ctx": 32_000, "seed": 1}}, 32_000),
    ],
)
async def test_a_window_is_asked_for_and_nothing_is_cut_in_silence(
    parameters: str, length: int, extra: dict[str, Any], tokens: int
) -> None:
    """Unasked the server takes 4,096 tokens and drops the beginning of what is longer."""
    model = shown(length=length, parameters=parameters)
    body = await sent(model, asking(extra_body=extra, max_output_tokens=100))
    assert body["options"] == {"num_predict": 100} | extra.get("options", {}) | {"num_ctx": tokens}
    assert (body["truncate"], body["shift"]) == (False, False)


async def test_the_window_is_known_to_those_who_ask_what_the_model_can_do() -> None:
    model = shown("tools", "vision", length=8_192)
    async with server(model, lines(done()), context_tokens=100_000) as (_, provider):
        assert provider.capabilities(MODEL).context_window_tokens == 100_000
        [event async for event in provider.stream(asking())]
        told = provider.capabilities(MODEL)
        assert (told.context_window_tokens, told.images, told.thinking) == (8_192, True, False)


@pytest.mark.parametrize(
    ("model", "capabilities", "effort", "think"),
    [
        (MODEL, ("thinking",), None, None),
        (MODEL, ("thinking",), 0.0, False),
        (MODEL, ("thinking",), 0.3, True),
        (MODEL, ("completion",), 0.3, None),
        ("gpt-oss:20b", ("thinking",), 0.0, "low"),
        ("gpt-oss:20b", ("thinking",), 1.0, "high"),
    ],
)
async def test_thinking_is_asked_for_in_the_words_of_the_model(
    model: str, capabilities: tuple[str, ...], effort: float | None, think: Any
) -> None:
    request = msgspec.structs.replace(asking(think_effort=effort), model=model)
    assert (await sent(shown(*capabilities), request)).get("think") == think


@pytest.mark.parametrize(
    ("choice", "names"),
    [
        (ToolChoice(), ["weather", WIRE_NAME]),
        (ToolChoice(type="none"), []),
        (ToolChoice(type="tool", name="weather"), ["weather"]),
    ],
)
async def test_the_choice_of_a_tool_decides_which_are_shown(choice: ToolChoice, names: list[str]) -> None:
    body = await sent(shown("tools"), asking(tools=TOOLS, tool_choice=choice))
    assert [tool["function"]["name"] for tool in body.get("tools", ())] == names


async def test_keep_alive_schema_and_extra_fields_are_sent() -> None:
    request = asking(output_schema=SCHEMA, extra_body={"logprobs": True})
    body = await sent(shown(), request, keep_alive="10m")
    assert (body["keep_alive"], body["format"], body["logprobs"]) == ("10m", SCHEMA, True)


def own_turn(*blocks: Block, model: str = MODEL) -> Message:
    thinking = "".join(block.thinking for block in blocks if isinstance(block, ThinkingBlock))
    body = json.dumps([{"role": "assistant", "thinking": thinking}]).encode()
    return Message(role="assistant", blocks=blocks, native=NativeBlocks(api="ollama", model=model, body=body))


async def test_a_tool_loop_is_replayed_with_names_ids_objects_and_its_own_thinking() -> None:
    use = ToolUseBlock(id="call_1", name="calendar.list", input={"city": "Rom"})
    old = own_turn(ThinkingBlock(thinking="old"), TextBlock(text="Hello"))
    turn = own_turn(ThinkingBlock(thinking="Let me see."), use)
    result = ToolResultBlock(tool_use_id="call_1", content=(TextBlock(text="12°"),))
    user = Message(role="user", blocks=(TextBlock(text="hi"),))
    request = asking(user, old, user, turn, Message(role="tool", blocks=(result,)), system="Be brief.")
    request = msgspec.structs.replace(request, tools=TOOLS)
    body = await sent(shown("tools", "thinking"), request)
    function = {"index": 0, "name": WIRE_NAME, "arguments": {"city": "Rom"}}
    assert body["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "Hello"},
        {"role": "user", "content": "hi"},
        {
            "role": "assistant",
            "content": "",
            "thinking": "Let me see.",
            "tool_calls": [{"id": "call_1", "function": function}],
        },
        {
            "role": "tool",
            "tool_name": WIRE_NAME,
            "tool_call_id": "call_1",
            "content": "12°",
        },
    ]


async def test_the_thinking_of_another_model_is_not_sent() -> None:
    use = ToolUseBlock(id="call_1", name="weather")
    turn = own_turn(ThinkingBlock(thinking="secret"), use, model="other")
    user = Message(role="user", blocks=(TextBlock(text="hi"),))
    body = await sent(shown("tools", "thinking"), asking(user, turn))
    assert "thinking" not in body["messages"][-1]


@pytest.mark.parametrize("sees", [True, False])
async def test_images_are_shown_to_models_that_see_and_named_to_others(sees: bool) -> None:
    inline = ImageBlock(source=Base64Source(media_type="image/png", data=PIXEL))
    linked = ImageBlock(source=UrlSource(url="https://example.com/a.png"))
    use = ToolUseBlock(id="c", name="weather")
    result = ToolResultBlock(tool_use_id="c", content=(inline,))
    body = await sent(
        shown(*(["vision"] if sees else []), "tools"),
        asking(
            Message(role="user", blocks=(TextBlock(text="See"), inline, linked)),
            Message(role="assistant", blocks=(use,)),
            Message(role="tool", blocks=(result,)),
        ),
    )
    user, _, tool, shown_result = body["messages"]
    assert user.get("images") == shown_result.get("images") == ([PIXEL] if sees else None)
    assert "https://example.com/a.png" in user["content"]
    assert ("cannot see" in user["content"]) is not sees
    assert tool["content"] == "(see the image below)"


async def test_the_models_of_a_server_are_listed_with_what_they_can_do() -> None:
    tags = {"models": [{"name": MODEL}, {"name": "gone"}, {"name": "embed", "model": "embed:latest"}]}
    gone = replace(json_answer({"error": "model 'gone' not found"}, status=404), end="chunked_end")
    answers = (replace(json_answer(tags), end="chunked_end"), shown("tools"), gone, shown("embedding"))
    async with server(*answers) as (_, provider):
        listed = await provider.list_models()
    assert [(entry.model, entry.capabilities.tools) for entry in listed] == [
        (MODEL, True),
        ("embed:latest", False),
    ]


async def test_a_key_is_sent_where_there_is_one_and_told_in_no_error() -> None:
    refused = json_answer({"error": "key secret-key is unknown"}, status=401)
    async with server(refused, api_key="secret-key") as (served, provider):
        with pytest.raises(ProviderError) as caught:
            [event async for event in provider.stream(asking())]
        assert served.requests[0].headers["authorization"] == "Bearer secret-key"
    assert "secret-key" not in caught.value.message


async def test_what_a_server_has_is_in_the_catalogue_once_it_was_asked() -> None:
    tags = replace(json_answer({"models": [{"name": "ours:1b"}]}), end="chunked_end")
    async with ModelServer() as served:
        served.enqueue(tags, shown("tools", "vision", length=8_192))
        registry = Registry(
            ProviderSettings(
                vendors={"ollama": VendorSettings(base_url=served.base_url)},
                capabilities={"ollama:ours:1b": {"max_output_tokens": 99}},
            )
        )
        assert not registry.capabilities("ollama:ours:1b").images
        await registry.discover()
        await registry.discover()  # a moment later nothing is asked
        entry = {model.id: model for model in registry.models(datetime.now(UTC))}["ollama:ours:1b"]
        told = entry.capabilities
        assert (told.images, told.context_window_tokens, told.max_output_tokens) == (True, 8_192, 99)
        assert (entry.is_configured, entry.prices, entry.price_source) == (True, None, None)
        assert registry.capabilities("ollama:ours:1b") == told
        await registry.aclose()


async def test_a_server_that_is_away_does_not_spoil_the_catalogue() -> None:
    async with ModelServer() as gone:
        address = gone.base_url
    here = VendorSettings(base_url=address)
    registry = Registry(ProviderSettings(vendors={"ollama": here, "litellm": here}))
    await registry.discover()
    assert "rehearsal:demo" in {model.id for model in registry.models(datetime.now(UTC))}
    await registry.aclose()
