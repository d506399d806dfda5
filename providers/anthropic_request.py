"""Our request as a body of the Anthropic Messages API."""

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

from providers.anthropic_models import ClaudeModel, claude_model
from providers.cleaning import clean_text
from providers.errors import RequestRejected
from providers.output_schema import closed
from providers.think_effort import nearest
from providers.tool_names import ToolNames
from providers.types import (
    Base64Source,
    Block,
    FileSource,
    ImageBlock,
    JsonObject,
    Message,
    ProviderRequest,
    TextBlock,
    ToolChoice,
    ToolResultBlock,
    ToolSpec,
    ToolUseBlock,
    UrlSource,
)

API = "anthropic_messages"
BINDING_BETA = "thinking-binding-controls-2026-08-01"

MIN_THINKING_TOKENS = 1024  # the API refuses a smaller budget
MAX_THINKING_TOKENS = 32_000  # the budget at full effort; beyond it the vendor advises batch requests
MAX_STRICT_TOOLS = 20  # the API refuses more in one request
CACHE_LOOK_BACK_BLOCKS = 20  # how far before a breakpoint the API looks for an earlier entry

NO_OUTPUT = "(no output)"  # an empty result is refused
_EPHEMERAL = {"type": "ephemeral"}
_THINKING_TYPES = frozenset({"thinking", "redacted_thinking"})
_ID = re.compile(r"[a-zA-Z0-9_-]+", re.ASCII)
_ID_CHARACTER = re.compile(r"[^a-zA-Z0-9_-]", re.ASCII)


def build_body(request: ProviderRequest, names: ToolNames) -> JsonObject:
    """The arguments of `messages.create`, without `extra_body` and `stream`.

    Raises: RequestRejected for a file that nobody resolved, or a history without content.
    """
    model = claude_model(request.model)
    limit = min(request.max_output_tokens or model.max_output_tokens, model.max_output_tokens)
    if model.context_window_tokens is None and request.max_output_tokens:
        limit = request.max_output_tokens  # our guess at an unknown model's limit does not bind the caller
    forces_tool = request.tool_choice.type in ("any", "tool") and bool(request.tools)
    thinking = _thinking(model, request.think_effort, limit, forces_tool=forces_tool)
    messages = _messages(request, names, keeps_thinking=_may_replay_thinking(model, thinking))
    if not messages:
        raise RequestRejected("the request has no message with content")
    if thinking.get("type") == "enabled" and _ends_in_unthinking_tool_loop(messages):
        thinking = {}
    _mark_long_turn(messages)
    body: JsonObject = {
        "model": request.model,
        "max_tokens": limit,
        "messages": messages,
        "cache_control": _EPHEMERAL,
    }
    if (system := _text(request.system)) is not None:
        body["system"] = [{**system, "cache_control": _EPHEMERAL}]
    if request.tools:
        body["tools"] = list(_tools(request.tools, names))
        body["tool_choice"] = _tool_choice(request.tool_choice, model, names)
    if thinking:
        body["thinking"] = thinking
    if output := _output_config(request, model, thinking):
        body["output_config"] = output
    if "block_binding" in thinking:
        body["extra_headers"] = {"anthropic-beta": BINDING_BETA}
    if request.end_user_id:
        body["metadata"] = {"user_id": request.end_user_id}
    return body


# -- thinking and tools ---------------------------------------------------------------------------------


def _thinking(model: ClaudeModel, effort: float | None, limit: int, *, forces_tool: bool) -> JsonObject:
    """The `thinking` parameter; empty to leave it out."""
    if model.thinking == "none" or (effort is None and not model.thinks_by_default):
        return {}
    if effort == 0 and model.off is not None:
        return {"type": model.off} if model.thinks_by_default else {}
    if model.thinking == "budget":
        # A forced tool is refused beside a budget. The caller named the tool, so thinking gives way, as it
        # does by itself in the models that take both.
        if forces_tool or limit <= MIN_THINKING_TOKENS:
            return {}
        wanted = min(round((effort or 0) * MAX_THINKING_TOKENS), limit // 2)
        return {"type": "enabled", "budget_tokens": max(MIN_THINKING_TOKENS, wanted)}
    parameter: JsonObject = {"type": "adaptive", "display": "summarized"}
    if model.binds_thinking:
        # Compaction and changed instructions alter what stands before old thinking. Without this the API
        # would refuse the session for ever.
        parameter["block_binding"] = {"prefix_mismatch_behavior": "drop_block"}
    return parameter


def _output_config(request: ProviderRequest, model: ClaudeModel, thinking: JsonObject) -> JsonObject:
    config: JsonObject = {}
    if thinking.get("type") == "adaptive" and (effort := _effort(model, request.think_effort)):
        config["effort"] = effort
    if request.output_schema is not None and model.takes_schema:
        config["format"] = {"type": "json_schema", "schema": closed(request.output_schema)}
    return config


def _effort(model: ClaudeModel, effort: float | None) -> str | None:
    if effort is None or not model.efforts:
        return None
    return nearest(effort, model.efforts)


def _may_replay_thinking(model: ClaudeModel, thinking: JsonObject) -> bool:
    return not model.binds_thinking or "block_binding" in thinking


def _ends_in_unthinking_tool_loop(messages: list[JsonObject]) -> bool:
    """A budget is refused while tool results answer a turn that does not begin with thinking."""
    if len(messages) < 2 or not any(block["type"] == "tool_result" for block in messages[-1]["content"]):
        return False
    return messages[-2]["content"][0]["type"] not in _THINKING_TYPES


def _tools(tools: Iterable[ToolSpec], names: ToolNames) -> Iterable[JsonObject]:
    strict_left = MAX_STRICT_TOOLS
    for tool in tools:
        spec: JsonObject = {
            "name": names.to_wire(tool.name),
            "description": clean_text(tool.description),
            "input_schema": {"type": "object", **tool.input_schema},
        }
        if tool.strict and strict_left:
            spec["strict"] = True
            strict_left -= 1
        yield spec


def _tool_choice(choice: ToolChoice, model: ClaudeModel, names: ToolNames) -> JsonObject:
    kind = choice.type
    if kind in ("any", "tool") and not model.accepts_forced_tool:
        kind = "auto"
    wire: JsonObject = {"type": kind}
    if kind == "tool":
        wire["name"] = names.to_wire(choice.name or "")
    if kind != "none" and not choice.parallel:
        wire["disable_parallel_tool_use"] = True
    return wire


# -- messages -------------------------------------------------------------------------------------------


def _messages(request: ProviderRequest, names: ToolNames, *, keeps_thinking: bool) -> list[JsonObject]:
    """User and assistant messages in turns: neighbours of one role merged, tool results first."""
    turns: list[JsonObject] = []
    for message in request.messages:
        role = "assistant" if message.role == "assistant" else "user"
        if role == "assistant":
            content = _assistant_content(message, request.model, names, keeps_thinking=keeps_thinking)
        else:
            content = _user_content(message)
        if not content:
            continue
        if turns and turns[-1]["role"] == role:
            turns[-1]["content"].extend(content)
        else:
            turns.append({"role": role, "content": content})
    for turn in turns:
        if turn["role"] == "user":
            turn["content"].sort(key=lambda block: block["type"] != "tool_result")
    return turns


def _user_content(message: Message) -> list[JsonObject]:
    content = [wire for block in message.blocks if (wire := _user_block(block)) is not None]
    if message.role != "system":
        return content
    # Only some models honour a system message in the middle of a conversation, and older ones refuse it.
    return [
        {"type": "text", "text": f"<system>\n{block['text']}\n</system>"}
        if block["type"] == "text"
        else block
        for block in content
    ]


def _user_block(block: Block) -> JsonObject | None:
    match block:
        case TextBlock():
            return _text(block.text)
        case ImageBlock():
            return _image(block)
        case ToolResultBlock():
            return _tool_result(block)
        case _:
            return None


def _text(text: str) -> JsonObject | None:
    """None for a blank text, which the API refuses."""
    return {"type": "text", "text": clean_text(text)} if text.strip() else None


def _image(block: ImageBlock) -> JsonObject:
    match block.source:
        case Base64Source(media_type=media_type, data=data):
            source = {"type": "base64", "media_type": media_type, "data": data}
        case UrlSource(url=url):
            source = {"type": "url", "url": url}
        case FileSource(file_id=file_id):
            raise RequestRejected(f"the image file {file_id} was not resolved before the request")
    return {"type": "image", "source": source}


def _tool_result(block: ToolResultBlock) -> JsonObject:
    content = [wire for part in block.content if (wire := _user_block(part)) is not None]
    result: JsonObject = {
        "type": "tool_result",
        "tool_use_id": wire_id(block.tool_use_id),
        "content": content or [{"type": "text", "text": NO_OUTPUT}],
    }
    if block.is_error:
        result["is_error"] = True
    return result


def _assistant_content(
    message: Message, model: str, names: ToolNames, *, keeps_thinking: bool
) -> list[JsonObject]:
    native = message.native
    if native is not None and native.api == API:
        content = _native_content(message, names, keeps_thinking=keeps_thinking and native.model == model)
    else:
        content = [wire for block in message.blocks if (wire := _rebuilt_block(block, names)) is not None]
    while content and content[-1]["type"] in _THINKING_TYPES:
        content.pop()  # thinking must not be the last block, nor the only one
    return content


def _rebuilt_block(block: Block, names: ToolNames) -> JsonObject | None:
    match block:
        case TextBlock():
            return _text(block.text)
        case ToolUseBlock():
            return {
                "type": "tool_use",
                "id": wire_id(block.id),
                "name": names.to_wire(block.name),
                "input": block.input,
            }
        case _:
            return None


def _native_content(message: Message, names: ToolNames, *, keeps_thinking: bool) -> list[JsonObject]:
    """The vendor's own blocks, with exactly those tool uses that the transcript has.

    The transcript decides, since it is what the results were made for: a call that it dropped must not be
    sent, and one that it has must be.
    """
    assert message.native is not None
    missing = {block.id: block for block in message.tool_uses}
    content: list[JsonObject] = []
    blocks: list[JsonObject] = json.loads(message.native.body)
    for block in blocks:
        kind = block.get("type")
        if kind == "tool_use":
            if missing.pop(block.get("id", ""), None) is not None:
                content.append({**block, "id": wire_id(block["id"])})
        elif kind in _THINKING_TYPES:
            if keeps_thinking and _is_valid_thinking(block):
                content.append(block)
        elif kind != "text":
            content.append(block)
        elif (text := _text(block.get("text") or "")) is not None:
            content.append({**block, **text})
    content.extend(wire for use in missing.values() if (wire := _rebuilt_block(use, names)) is not None)
    return content


def _is_valid_thinking(block: Mapping[str, Any]) -> bool:
    """False for what the API would refuse: no signature (a cut stream), no text, or text we cannot send."""
    if block["type"] == "redacted_thinking":
        return bool(block.get("data"))
    thinking = block.get("thinking") or ""
    return bool(block.get("signature")) and bool(thinking) and clean_text(thinking) == thinking


def wire_id(call_id: str) -> str:
    """A call id that the API accepts: itself where it is legal, else a legal one made from it."""
    if _ID.fullmatch(call_id):
        return call_id
    digest = hashlib.sha256(call_id.encode("utf-8", "surrogatepass")).hexdigest()[:10]
    return f"{_ID_CHARACTER.sub('_', call_id)[:48]}_{digest}"


def _mark_long_turn(messages: list[JsonObject]) -> None:
    """An extra cache breakpoint where the last request ended, if the turn since then is a long one."""
    if len(messages) < 3 or messages[-1]["role"] != "user":
        return
    if len(messages[-1]["content"]) + len(messages[-2]["content"]) < CACHE_LOOK_BACK_BLOCKS:
        return
    previous = messages[-3]["content"]
    previous[-1] = {**previous[-1], "cache_control": _EPHEMERAL}
