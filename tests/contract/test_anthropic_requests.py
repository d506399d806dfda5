"""What the Anthropic adapter sends, as the API receives it from the vendor's real SDK."""

import json
import subprocess
import sys
from typing import Any

import pytest

from providers.anthropic_messages import AnthropicMessages
from providers.errors import RequestRejected
from providers.types import (
    Base64Source,
    FileSource,
    ImageBlock,
    Message,
    MessageEnd,
    NativeBlocks,
    ProviderRequest,
    TextBlock,
    ThinkingBlock,
    ToolChoice,
    ToolResultBlock,
    ToolSpec,
    ToolUseBlock,
    UrlSource,
)
from tests.support.anthropic_script import DONE, api, block, call, collect, delta, ended, start, stop, text
from tests.support.model_server import Answer, RecordedRequest, sse

MODEL = "claude-sonnet-4-6"
OK = sse(start(), *text(0, "a"), ended("end_turn"), DONE)
LS = ToolSpec(name="ls", description="Lists files.", input_schema={"properties": {}})
EPHEMERAL = {"type": "ephemeral"}


def user(*texts: str) -> Message:
    return Message(role="user", blocks=tuple(TextBlock(text=text) for text in texts))


def assistant(
    *blocks: TextBlock | ThinkingBlock | ToolUseBlock, native: NativeBlocks | None = None
) -> Message:
    return Message(role="assistant", blocks=blocks, native=native)


def results(*ids: str, text: str = "1") -> Message:
    content = (TextBlock(text=text),)
    return Message(role="tool", blocks=tuple(ToolResultBlock(tool_use_id=i, content=content) for i in ids))


def native(*blocks: dict[str, Any], model: str = MODEL, api: str = "anthropic_messages") -> NativeBlocks:
    return NativeBlocks(api=api, model=model, body=json.dumps(blocks).encode())


async def sent(request: ProviderRequest) -> RecordedRequest:
    async with api() as (server, provider):
        server.enqueue(Answer(chunks=[OK]))
        await collect(provider, request)
        return server.requests[0]


async def sent_body(*messages: Message, model: str = MODEL, **fields: Any) -> dict[str, Any]:
    request = await sent(ProviderRequest(model=model, messages=messages or (user("hi"),), **fields))
    body: dict[str, Any] = request.body_json
    return body


async def sent_messages(*messages: Message, model: str = MODEL, **fields: Any) -> Any:
    return [
        (m["role"], m["content"]) for m in (await sent_body(*messages, model=model, **fields))["messages"]
    ]


def wire_text(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


# -- the whole body -------------------------------------------------------------------------------------


async def test_a_plain_request_has_the_models_limit_and_its_cache_breakpoints() -> None:
    request = await sent(
        ProviderRequest(model=MODEL, messages=(user("hi"),), system="Be kind.", tools=(LS,), end_user_id="u1")
    )
    assert (request.method, request.path) == ("POST", "/v1/messages")
    assert request.headers["authorization"] == "Bearer key-1234567890"
    assert "anthropic-beta" not in request.headers
    assert request.body_json == {
        "model": MODEL,
        "max_tokens": 128_000,
        "messages": [{"role": "user", "content": [wire_text("hi")]}],
        "system": [{**wire_text("Be kind."), "cache_control": EPHEMERAL}],
        "cache_control": EPHEMERAL,
        "tools": [
            {
                "name": "ls",
                "description": "Lists files.",
                "input_schema": {"type": "object", "properties": {}},
            }
        ],
        "tool_choice": {"type": "auto"},
        "metadata": {"user_id": "u1"},
        "stream": True,
    }


async def test_the_extra_body_is_merged_last() -> None:
    body = await sent_body(extra_body={"max_tokens": 5, "service_tier": "auto"})
    assert (body["max_tokens"], body["service_tier"], body["model"]) == (5, "auto", MODEL)


@pytest.mark.parametrize(
    ("model", "asked", "expected"),
    [
        (MODEL, None, 128_000),
        (MODEL, 100, 100),
        (MODEL, 10**6, 128_000),
        ("claude-haiku-4-5-20251001", None, 64_000),
        ("some-local-model", None, 8_192),
        ("some-local-model", 30_000, 30_000),
    ],
)
async def test_the_output_limit_is_the_models_unless_less_is_asked(
    model: str, asked: int | None, expected: int
) -> None:
    assert (await sent_body(model=model, max_output_tokens=asked))["max_tokens"] == expected


async def test_a_long_turn_gets_a_breakpoint_where_the_last_request_ended() -> None:
    ids = [f"t{number}" for number in range(12)]
    uses = [ToolUseBlock(id=call_id, name="ls") for call_id in ids]
    sizes = {}
    for count in (3, 12):
        messages = await sent_messages(user("hi"), assistant(*uses[:count]), results(*ids[:count]))
        sizes[count] = [block.get("cache_control") for _, content in messages for block in content]
    assert sizes[3] == [None] * 7
    assert sizes[12] == [EPHEMERAL, *[None] * 24]


# -- thinking -------------------------------------------------------------------------------------------

SUMMARIZED = {"type": "adaptive", "display": "summarized"}
BOUND = {**SUMMARIZED, "block_binding": {"prefix_mismatch_behavior": "drop_block"}}


@pytest.mark.parametrize(
    ("model", "effort", "thinking", "level"),
    [
        ("claude-opus-5", None, SUMMARIZED, None),
        ("claude-opus-5", 0.0, {"type": "disabled"}, None),
        ("claude-opus-5", 0.01, SUMMARIZED, "low"),
        ("claude-opus-5", 0.5, SUMMARIZED, "medium"),
        ("claude-opus-5", 1.0, SUMMARIZED, "max"),
        ("claude-opus-4-8", None, None, None),
        ("claude-opus-4-8", 0.0, None, None),
        ("claude-sonnet-4-6", 0.75, SUMMARIZED, "high"),
        ("claude-sonnet-4-6", 0.2, SUMMARIZED, "low"),
        ("claude-fable-5", 0.0, SUMMARIZED, "low"),
        ("claude-fable-5-2", None, BOUND, None),
        ("claude-opus-5-5", 0.0, BOUND, "low"),
        ("claude-sonnet-5-5", 0.0, {"type": "between_tools"}, None),
        ("claude-haiku-4-5", None, None, None),
        ("claude-haiku-4-5", 0.0, None, None),
        ("claude-haiku-4-5", 0.01, {"type": "enabled", "budget_tokens": 1024}, None),
        ("claude-haiku-4-5", 0.5, {"type": "enabled", "budget_tokens": 16_000}, None),
        ("claude-haiku-4-5-20251001", 1.0, {"type": "enabled", "budget_tokens": 32_000}, None),
        ("some-local-model", 1.0, None, None),
    ],
)
async def test_effort_is_put_in_the_words_of_each_model(
    model: str, effort: float | None, thinking: dict[str, Any] | None, level: str | None
) -> None:
    request = await sent(ProviderRequest(model=model, messages=(user("hi"),), think_effort=effort))
    assert request.body_json.get("thinking") == thinking
    assert request.body_json.get("output_config") == ({"effort": level} if level else None)
    is_bound = thinking is not None and "block_binding" in thinking
    assert ("anthropic-beta" in request.headers) is is_bound


@pytest.mark.parametrize(("limit", "budget"), [(1024, None), (1025, 1024), (10_000, 5_000)])
async def test_a_thinking_budget_leaves_room_for_the_answer(limit: int, budget: int | None) -> None:
    body = await sent_body(model="claude-haiku-4-5", max_output_tokens=limit, think_effort=1.0)
    assert body.get("thinking", {}).get("budget_tokens") == budget


async def test_a_budget_is_left_out_in_a_tool_loop_that_began_without_thinking() -> None:
    loop = (user("hi"), assistant(ToolUseBlock(id="t1", name="ls")), results("t1"))
    assert "thinking" not in await sent_body(*loop, model="claude-haiku-4-5", think_effort=1.0)
    assert "thinking" in await sent_body(
        *loop,
        user("more"),
        assistant(TextBlock(text="b")),
        user("c"),
        model="claude-haiku-4-5",
        think_effort=1.0,
    )


# -- tools ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "choice", "expected"),
    [
        (MODEL, ToolChoice(), {"type": "auto"}),
        (MODEL, ToolChoice(type="any", parallel=False), {"type": "any", "disable_parallel_tool_use": True}),
        (MODEL, ToolChoice(type="none", parallel=False), {"type": "none"}),
        (MODEL, ToolChoice(type="tool", name="ls"), {"type": "tool", "name": "ls"}),
        ("claude-opus-5-5", ToolChoice(type="tool", name="ls"), {"type": "auto"}),
        (
            "claude-fable-5-1",
            ToolChoice(type="any", parallel=False),
            {"type": "auto", "disable_parallel_tool_use": True},
        ),
    ],
)
async def test_a_forced_tool_is_asked_for_only_where_the_model_takes_it(
    model: str, choice: ToolChoice, expected: dict[str, Any]
) -> None:
    assert (await sent_body(model=model, tools=(LS,), tool_choice=choice))["tool_choice"] == expected


async def test_a_forced_tool_wins_over_a_thinking_budget() -> None:
    choice = ToolChoice(type="any")
    body = await sent_body(model="claude-haiku-4-5", tools=(LS,), tool_choice=choice, think_effort=1.0)
    assert body["tool_choice"] == {"type": "any"}
    assert "thinking" not in body


async def test_names_are_legal_in_tools_choice_and_history() -> None:
    """P-12"""
    dotted = ToolSpec(name="calendar.list", description="d", input_schema={})
    plain = ToolSpec(name="calendar_list", description="d", input_schema={})
    body = await sent_body(
        user("hi"),
        assistant(ToolUseBlock(id="t1", name="calendar.list"), ToolUseBlock(id="t2", name="gone.tool")),
        results("t1", "t2"),
        tools=(dotted, plain),
        tool_choice=ToolChoice(type="tool", name="calendar.list"),
    )
    wire = [tool["name"] for tool in body["tools"]]
    assert wire == ["calendar_list_8fe73bc12f", "calendar_list"]
    assert body["tool_choice"]["name"] == wire[0]
    assert body["messages"][1]["content"][0]["name"] == wire[0]
    assert body["messages"][1]["content"][1]["name"].startswith("gone_tool_")


async def test_no_more_tools_are_strict_than_the_api_takes() -> None:
    tools = tuple(
        ToolSpec(name=f"t{number}", description="d", input_schema={}, strict=True) for number in range(22)
    )
    body = await sent_body(tools=tools)
    assert [tool.get("strict") for tool in body["tools"]] == [True] * 20 + [None] * 2


# -- messages -------------------------------------------------------------------------------------------


async def test_blank_text_and_empty_messages_are_not_sent_and_users_are_merged() -> None:
    """H-04"""
    messages = await sent_messages(
        user("q1"),
        assistant(),
        user("q2", "", " \n"),
        assistant(TextBlock(text="")),
        user("q3"),
        assistant(TextBlock(text="\n\n")),
        user("q4"),
        assistant(
            ThinkingBlock(thinking="hm"),
            native=native({"type": "thinking", "thinking": "hm", "signature": "s"}),
        ),
        user("q5"),
        assistant(ToolUseBlock(id="a", name="touch")),
        results("a", text=""),
    )
    assert messages == [
        ("user", [wire_text(q) for q in ("q1", "q2", "q3", "q4", "q5")]),
        ("assistant", [{"type": "tool_use", "id": "a", "name": "touch", "input": {}}]),
        ("user", [{"type": "tool_result", "tool_use_id": "a", "content": [wire_text("(no output)")]}]),
    ]


async def test_all_results_of_a_turn_come_first_in_one_user_message() -> None:
    uses = (
        ToolUseBlock(id="a", name="ls", input={"x": 1}),
        ToolUseBlock(id="b", name="ls", input_error="bad"),
    )
    failed = Message(
        role="tool",
        blocks=(ToolResultBlock(tool_use_id="b", content=(TextBlock(text="no"),), is_error=True),),
    )
    note = Message(role="system", blocks=(TextBlock(text="be brief"),))
    messages = await sent_messages(
        user("q"), assistant(*uses), results("a"), user("by the way"), note, failed
    )
    assert messages[1:] == [
        (
            "assistant",
            [
                {"type": "tool_use", "id": "a", "name": "ls", "input": {"x": 1}},
                {"type": "tool_use", "id": "b", "name": "ls", "input": {}},
            ],
        ),
        (
            "user",
            [
                {"type": "tool_result", "tool_use_id": "a", "content": [wire_text("1")]},
                {"type": "tool_result", "tool_use_id": "b", "content": [wire_text("no")], "is_error": True},
                wire_text("by the way"),
                wire_text("<system>\nbe brief\n</system>"),
            ],
        ),
    ]


async def test_images_are_sent_inline_or_by_url_and_unresolved_files_refused() -> None:
    inline = ImageBlock(source=Base64Source(media_type="image/png", data="AAAA"))
    linked = ImageBlock(source=UrlSource(url="https://example.org/a.png"))
    wire = [
        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}},
        {"type": "image", "source": {"type": "url", "url": "https://example.org/a.png"}},
    ]
    messages = await sent_messages(
        Message(role="user", blocks=(inline, linked)),
        assistant(ToolUseBlock(id="a", name="ls")),
        Message(role="tool", blocks=(ToolResultBlock(tool_use_id="a", content=(inline, linked)),)),
    )
    assert messages[0] == ("user", wire)
    assert messages[2][1][0]["content"] == wire
    stray = Message(role="user", blocks=(ImageBlock(source=FileSource(file_id="file_1")),))
    async with api() as (server, provider):
        with pytest.raises(RequestRejected, match="file_1"):
            await collect(provider, ProviderRequest(model=MODEL, messages=(stray,)))
        assert server.requests == []


async def test_ids_of_other_apis_become_legal_and_stay_paired() -> None:
    ids = ("call_1|fc_2", "call_1/fc_2", "", "toolu_1")
    messages = await sent_messages(
        user("q"), assistant(*(ToolUseBlock(id=i, name="ls") for i in ids)), results(*ids)
    )
    used = [block["id"] for block in messages[1][1]]
    assert used == [block["tool_use_id"] for block in messages[2][1]]
    assert len(set(used)) == 4
    assert used[3] == "toolu_1"
    assert all(i and i.replace("_", "").replace("-", "").isalnum() for i in used)


async def test_text_that_is_not_unicode_is_cleaned_on_the_way_out() -> None:
    messages = await sent_messages(user("half \ud83d, whole \ud83d\ude42"))
    assert messages == [("user", [wire_text("half \ufffd, whole 🙂")])]


async def test_a_request_without_content_is_refused() -> None:
    async with api() as (server, provider):
        with pytest.raises(RequestRejected):
            await collect(provider, ProviderRequest(model=MODEL, messages=(user(" "),)))
        assert server.requests == []


# -- replay ---------------------------------------------------------------------------------------------

THINKING = {"type": "thinking", "thinking": "step\u2028one 🙂 é", "signature": "sigA=="}
REDACTED = {"type": "redacted_thinking", "data": "blob=="}
CALL = {"type": "tool_use", "id": "a", "name": "f", "input": {}}
SERVER_CALL = {"type": "server_tool_use", "id": "srvtoolu_1", "name": "web_search", "input": {"query": "x"}}
ONE_CALL = (ThinkingBlock(thinking="step one"), TextBlock(text="Let me see"), ToolUseBlock(id="a", name="f"))


async def replayed(
    *blocks: dict[str, Any], model: str = MODEL, uses: tuple[Any, ...] = ONE_CALL, **fields: Any
) -> list[Any]:
    message = assistant(*uses, native=native(*blocks, **fields))
    messages = await sent_messages(user("q"), message, results("a"), model=model)
    content: list[Any] = messages[1][1]
    return content


async def test_native_blocks_go_back_unchanged_to_the_same_model() -> None:
    """P-13"""
    blocks = (THINKING, REDACTED, SERVER_CALL, wire_text("Let me see"), CALL)
    assert await replayed(*blocks) == list(blocks)


async def test_another_model_gets_the_blocks_without_thinking() -> None:
    """P-13"""
    blocks = (THINKING, REDACTED, wire_text("Let me see"), CALL)
    assert await replayed(*blocks, model="claude-opus-4-8") == [wire_text("Let me see"), CALL]


async def test_blocks_of_another_api_are_rebuilt_from_the_transcript() -> None:
    """P-13"""
    assert await replayed({"type": "reasoning", "id": "rs_1"}, api="openai_responses") == [
        wire_text("Let me see"),
        CALL,
    ]


@pytest.mark.parametrize(
    "thinking",
    [
        {"type": "thinking", "thinking": "cut", "signature": ""},
        {"type": "thinking", "thinking": "", "signature": "sigA=="},
        {"type": "thinking", "thinking": "half \ud83d", "signature": "sigA=="},
        {"type": "redacted_thinking", "data": ""},
    ],
)
async def test_thinking_that_the_api_would_refuse_is_dropped_whole(thinking: dict[str, Any]) -> None:
    """P-13"""
    assert await replayed(thinking, CALL) == [CALL]


async def test_bound_thinking_is_not_replayed_while_thinking_is_off() -> None:
    message = assistant(*ONE_CALL, native=native(THINKING, CALL, model="claude-sonnet-5-5"))
    history = (user("q"), message, results("a"))
    off = await sent_messages(*history, model="claude-sonnet-5-5", think_effort=0.0)
    on = await sent_messages(*history, model="claude-sonnet-5-5")
    assert (off[1][1], on[1][1]) == ([CALL], [THINKING, CALL])


async def test_the_transcript_decides_which_calls_are_replayed() -> None:
    dropped = {**CALL, "id": "cut"}
    assert await replayed(wire_text("x"), dropped, CALL) == [wire_text("x"), CALL]
    assert await replayed(wire_text("x")) == [wire_text("x"), CALL]


async def test_blank_native_text_and_trailing_thinking_are_dropped() -> None:
    assert await replayed(wire_text(""), CALL, THINKING) == [CALL]


async def test_what_was_streamed_is_replayed_byte_for_byte_in_the_next_request() -> None:
    """P-13"""
    script = sse(
        start(),
        block(0, type="thinking", thinking="", signature=""),
        delta(0, "thinking_delta", thinking="step\u2028one "),
        delta(0, "thinking_delta", thinking="🙂 é"),
        delta(0, "signature_delta", signature="sigA=="),
        stop(0),
        block(1, **REDACTED),
        stop(1),
        *call(2, "a", "f", '{"b": 1.50}'),
        ended("tool_use"),
        DONE,
    )
    # The halves of a pair may come in two pieces, as escapes.
    script = script.replace("🙂".encode(), rb"\ud83d\ude42")
    async with api() as (server, provider):
        server.enqueue(Answer(chunks=[script]), Answer(chunks=[OK]))
        events = await collect(
            provider, ProviderRequest(model=MODEL, messages=(user("q"),), think_effort=0.5)
        )
        end = events[-1]
        assert isinstance(end, MessageEnd)
        answer = assistant(ToolUseBlock(id="a", name="f", input={"b": 1.5}), native=end.native)
        history = (user("q"), answer, results("a"))
        await collect(provider, ProviderRequest(model=MODEL, messages=history, think_effort=0.5))
        first, second = (request.body_json for request in server.requests)
    assert second["messages"][1]["content"] == [
        THINKING,
        REDACTED,
        {**CALL, "input": {"b": 1.5}},
    ]
    assert second["messages"][0] == first["messages"][0]
    assert {**second, "messages": None} == {**first, "messages": None}


# -- capabilities ---------------------------------------------------------------------------------------


def test_capabilities_come_from_a_table_with_careful_defaults() -> None:
    provider = AnthropicMessages(api_key="k")
    opus = provider.capabilities("claude-opus-5-5")
    assert (opus.context_window_tokens, opus.max_output_tokens) == (1_000_000, 128_000)
    assert (opus.thinking, opus.images, opus.tools) == (True, True, True)
    dated = provider.capabilities("claude-haiku-4-5-20251001")
    assert (dated.context_window_tokens, dated.max_output_tokens) == (200_000, 64_000)
    unknown = provider.capabilities("some-local-model")
    assert (unknown.context_window_tokens, unknown.max_output_tokens, unknown.thinking) == (
        None,
        8_192,
        False,
    )


def test_importing_the_adapter_does_not_import_the_sdk() -> None:
    slow = {"anthropic", "httpx2", "pydantic"}
    code = f"import sys, providers.anthropic_messages; print({slow} & set(sys.modules))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "set()"
