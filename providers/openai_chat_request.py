"""A `ProviderRequest` as the body of a Chat Completions request."""

import hashlib
from typing import Any

import msgspec

from providers.openai_chat_endpoint import ChatEndpoint
from providers.openai_messages import (
    Step,
    bounded_key,
    image_url,
    result_images,
    result_text,
    steps,
    text_of,
    texts_and_images,
    wire_call_id,
)
from providers.openai_models import ModelFamily, model_family, nearest_effort
from providers.output_schema import named_schema
from providers.tool_names import ToolNames
from providers.types import ImageBlock, JsonObject, Message, ProviderRequest, TextBlock, ToolSpec

MAX_CALL_ID_CHARS = 40
_ASSEMBLED = frozenset({"role", "content", "tool_calls"})  # rebuilt from the blocks, never from `native`


def chat_body(request: ProviderRequest, endpoint: ChatEndpoint, names: ToolNames, api: str) -> JsonObject:
    """The body, with `extra_body` merged in last.

    Raises: RequestRejected.
    """
    family = model_family(request.model)
    body: JsonObject = {
        "model": request.model,
        "messages": _Transcript(request, endpoint, names, api).messages(),
        "stream": True,
    }
    if endpoint.include_usage:
        body["stream_options"] = {"include_usage": True}
    if request.tools:
        body["tools"] = [_tool(spec, endpoint, names) for spec in request.tools]
        body |= _tool_choice(request, names)
    if (limit := request.max_output_tokens) is not None:
        body[endpoint.max_tokens_field] = min(limit, family.max_output_tokens or limit)
    if endpoint.cache_key_field and request.cache_key:
        body[endpoint.cache_key_field] = bounded_key(request.cache_key)
    if endpoint.end_user_field and request.end_user_id:
        body[endpoint.end_user_field] = hashlib.sha256(request.end_user_id.encode()).hexdigest()
    if request.output_schema is not None and endpoint.schema_field:
        schema = named_schema(request.output_schema)
        body[endpoint.schema_field] = {"type": "json_schema", "json_schema": schema}
    return body | _effort(request, endpoint, family) | request.extra_body


def _tool(spec: ToolSpec, endpoint: ChatEndpoint, names: ToolNames) -> JsonObject:
    function: JsonObject = {
        "name": names.to_wire(spec.name),
        "description": spec.description,
        "parameters": spec.input_schema,
    }
    if spec.strict and endpoint.strict_tools:
        function["strict"] = True
    return {"type": "function", "function": function}


def _tool_choice(request: ProviderRequest, names: ToolNames) -> JsonObject:
    """Only what differs from the default: several servers refuse the fields themselves."""
    fields: JsonObject = {}
    match request.tool_choice.type:
        case "any":
            fields["tool_choice"] = "required"
        case "none":
            fields["tool_choice"] = "none"
        case "tool":
            name = names.to_wire(request.tool_choice.name or "")
            fields["tool_choice"] = {"type": "function", "function": {"name": name}}
    if not request.tool_choice.parallel:
        fields["parallel_tool_calls"] = False
    return fields


def _effort(request: ProviderRequest, endpoint: ChatEndpoint, family: ModelFamily) -> JsonObject:
    levels = family.efforts if endpoint.effort_levels is None else endpoint.effort_levels
    if endpoint.is_openai:
        if request.tools and family.chat_tools_need_effort_none:
            return {"reasoning_effort": "none"}
        levels = tuple(level for level in levels if level != "max")
    wanted = request.think_effort
    if endpoint.thinks_unless_told and request.tools and request.tool_choice.type in ("any", "tool"):
        wanted = 0.0  # the caller named the tool, so thinking gives way
    level = nearest_effort(levels, wanted)
    if level is None or endpoint.effort_style == "none":
        return {}
    if endpoint.effort_style == "reasoning_object":
        return {"reasoning": {"enabled": False} if level == "none" else {"effort": level}}
    if endpoint.effort_style == "thinking_toggle":
        thinks = level != "none"
        toggle: JsonObject = {"thinking": {"type": "enabled" if thinks else "disabled"}}
        return toggle | ({"reasoning_effort": level} if thinks else {})
    return {"reasoning_effort": level}


class _Transcript:
    """Writes the messages. User messages that become neighbours are one, since many servers want turns."""

    def __init__(self, request: ProviderRequest, endpoint: ChatEndpoint, names: ToolNames, api: str) -> None:
        self._request = request
        self._endpoint = endpoint
        self._names = names
        self._api = api
        self._written: list[JsonObject] = []
        self._user_parts: list[JsonObject] = []

    def messages(self) -> list[JsonObject]:
        if self._request.system.strip():
            self._written.append({"role": "system", "content": self._request.system})
        for step in steps(self._request.messages):
            if step.message.role == "assistant":
                self._add_assistant(step)
            elif step.message.role == "system":
                self._add_system(text_of(step.message))
            else:
                self._user_parts += [_part(block) for block in texts_and_images(step.message.blocks)]
        self._flush_user()
        return self._written

    def _flush_user(self) -> None:
        parts, self._user_parts = self._user_parts, []
        if not parts:
            return
        content: str | list[JsonObject] = parts
        if all(part["type"] == "text" for part in parts):
            content = "\n\n".join(part["text"] for part in parts)
        self._written.append({"role": "user", "content": content})

    def _add_system(self, text: str) -> None:
        if not text:
            return
        if self._endpoint.allows_later_system:
            self._flush_user()
            self._written.append({"role": "system", "content": text})
        else:
            self._user_parts.append({"type": "text", "text": f"<system>\n{text}\n</system>"})

    def _add_assistant(self, step: Step) -> None:
        message = step.message
        text = text_of(message)
        if not text and not message.tool_uses:
            return
        self._flush_user()
        returned, call_extras = self._returned(message)
        written: JsonObject = {"role": "assistant", "content": text}
        if message.tool_uses:
            if not text and self._endpoint.null_content:
                written["content"] = None
            written["tool_calls"] = [
                {
                    "id": wire_call_id(use.id, max_chars=MAX_CALL_ID_CHARS),
                    "type": "function",
                    "function": {
                        "name": self._names.to_wire(use.name),
                        "arguments": msgspec.json.encode(use.input).decode(),
                    },
                }
                | call_extras.get(use.id, {})
                for use in message.tool_uses
            ]
        self._written.append(written | returned)
        self._add_results(step)

    def _returned(self, message: Message) -> tuple[JsonObject, dict[str, JsonObject]]:
        """What the server wants to see again: fields of the message, and by call id fields of the calls.

        Signed parts go only to the model that wrote them, readable reasoning to any model of the endpoint.
        """
        fields: JsonObject = {}
        extras: dict[str, JsonObject] = {}
        placeholder = self._endpoint.reasoning_placeholder
        if placeholder is not None:
            fields["reasoning_content"] = placeholder
        native = message.native
        if native is None or native.api != self._api:
            return fields, extras
        is_same_model = native.model == self._request.model
        for kept in msgspec.json.decode(native.body, type=list[dict[str, Any]]):
            fields |= {
                name: value
                for name, value in kept.items()
                if name in self._endpoint.returned_fields
                and name not in _ASSEMBLED
                and (is_same_model or isinstance(value, str))
            }
            if is_same_model:
                extras |= {
                    call["id"]: {key: value for key, value in call.items() if key != "id"}
                    for call in kept.get("tool_calls", ())
                }
        return fields, extras

    def _add_results(self, step: Step) -> None:
        for result in step.results:
            call_id = wire_call_id(result.tool_use_id, max_chars=MAX_CALL_ID_CHARS)
            self._written.append({"role": "tool", "tool_call_id": call_id, "content": result_text(result)})
        for result in step.results:  # a tool message holds text alone: images follow in a user message
            for number, image in enumerate(result_images(result)):
                if number == 0:
                    call_id = wire_call_id(result.tool_use_id, max_chars=MAX_CALL_ID_CHARS)
                    self._user_parts.append({"type": "text", "text": f"Image from tool call {call_id}:"})
                self._user_parts.append(_part(image))


def _part(block: TextBlock | ImageBlock) -> JsonObject:
    if isinstance(block, TextBlock):
        return {"type": "text", "text": block.text}
    return {"type": "image_url", "image_url": {"url": image_url(block)}}
