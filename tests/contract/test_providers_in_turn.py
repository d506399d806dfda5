"""One session that goes from provider to provider: each must accept the transcript that the others left."""

from itertools import pairwise
from typing import Any

import pytest
from msgspec.structs import replace

from agents.assembly import Assembly
from providers.types import Message, Stop, TextBlock, ToolResultBlock
from tests.support.provider_stages import STAGES, Performance, Scene, Stage

Json = dict[str, Any]

SIGNED = {  # what an API alone understands, as its stage sends it
    "anthropic_messages": "c2ln",
    "openai_responses": "gAAA==",
    "openrouter": "b3Jz",
    "litellm": "bGl0",
}
REPLAYED = {*SIGNED, "deepseek"}  # those that want their reasoning back in a later turn


def thought(stage: Stage) -> str:
    return f"Only {stage.name} may see this."


async def answer(performance: Performance, history: tuple[Message, ...]) -> Message:
    """The assistant message for the history, put together as the loop does."""
    assembly = Assembly()
    request = replace(performance.request, messages=history, think_effort=0.5)
    async for event in performance.provider.stream(request):
        assembly.feed(event)
    assert assembly.end is not None
    blocks = tuple(part.block for part in assembly.parts())
    return Message(role="assistant", blocks=blocks, native=assembly.end.native)


async def turn(
    stage: Stage, scene: Scene, history: tuple[Message, ...], *, prompts: bool
) -> tuple[tuple[Message, ...], Json | None]:
    """The history after one answer of a stage, and the body of its request."""
    async with stage.play(scene) as performance:
        if prompts:
            history = (*history, *performance.request.messages)
        message = await answer(performance, history)
        body = performance.requests[-1].body_json if performance.requests else None
    results = tuple(
        ToolResultBlock(tool_use_id=use.id, content=(TextBlock(text=f"{use.name} of {stage.name}"),))
        for use in message.tool_uses
    )
    tool = (Message(role="tool", blocks=results),) if results else ()
    return (*history, message, *tool), body


@pytest.mark.parametrize("order", [1, -1], ids=["there", "and back"])
async def test_a_session_moves_between_all_providers_in_turn(order: int) -> None:
    """P-13: native blocks go back to the API and model that made them, and to no other."""
    history: tuple[Message, ...] = ()
    for visit in (1, 2):
        for stage in STAGES[::order]:
            calls = Scene(
                thinking=thought(stage) if stage.api != "rehearsal" else "",
                text=("Looking",),
                calls=(("look", '{"n": 1}'), ("count", "{}")),
                stop=Stop.TOOL_USE,
            )
            history, body = await turn(stage, calls, history, prompts=True)
            check(stage, body, has_been_here=visit == 2)
            if stage.api != "rehearsal":  # its script stands in the prompt
                history, body = await turn(stage, Scene(text=("Done",)), history, prompts=False)
                check(stage, body, has_been_here=True, is_in_tool_loop=True)


def check(stage: Stage, body: Json | None, *, has_been_here: bool, is_in_tool_loop: bool = False) -> None:
    if body is None:
        return
    wire = str(body)
    for other in STAGES:
        if other.name != stage.name:
            assert thought(other) not in wire, f"{stage.name} was sent the reasoning of {other.name}"
            assert SIGNED.get(other.name, "-no-") not in wire
    if has_been_here and stage.name in REPLAYED:
        assert thought(stage) in wire
        assert SIGNED.get(stage.name, "") in wire
    if is_in_tool_loop and stage.name == "ollama":
        assert thought(stage) in wire
    RULES[stage.api](body)


# -- what each API demands of a transcript ------------------------------------------------------------------


def messages_rules(body: Json) -> None:
    """Roles alternate, and the results of all calls come first in the very next user message."""
    messages = body["messages"]
    assert [message["role"] for message in messages] == ["user", "assistant"] * (len(messages) // 2) + [
        "user"
    ]
    assert all(message["content"] for message in messages)
    for message, following in pairwise(messages):
        used = [block["id"] for block in message["content"] if block["type"] == "tool_use"]
        answered = [block["tool_use_id"] for block in following["content"] if block["type"] == "tool_result"]
        assert used == answered
        kinds = [block["type"] for block in following["content"]]
        assert kinds == sorted(kinds, key=lambda kind: kind != "tool_result")


def responses_rules(body: Json) -> None:
    """Every call has its output, no output is without its call, and something follows all reasoning."""
    items = body["input"]
    called: list[str] = []
    for item in items:
        if item.get("type") == "function_call":
            called.append(item["call_id"])
        elif item.get("type") == "function_call_output":
            called.remove(item["call_id"])
    assert called == []
    for item, following in pairwise(items):
        if item.get("type") == "reasoning":
            assert item["encrypted_content"]
            assert following.get("type") in ("function_call", "message", "reasoning")
    assert items[-1].get("type") != "reasoning"


def chat_rules(body: Json) -> None:
    """The results of all calls follow their message directly, in the order of the calls."""
    open_calls: list[str] = []
    for message in body["messages"]:
        if message["role"] == "tool":
            assert message["content"]
            assert message["tool_call_id"] == open_calls.pop(0)
            continue
        assert open_calls == []
        assert message["content"] or message.get("tool_calls")
        open_calls = [call["id"] for call in message.get("tool_calls", ())]
    assert open_calls == []
    assert body["messages"][-1]["role"] in ("user", "tool")


RULES = {
    "anthropic_messages": messages_rules,
    "openai_responses": responses_rules,
    "openai_chat": chat_rules,
    "ollama": chat_rules,
}
