"""A `ProviderRequest` as the body of a stateless Responses request: the whole transcript, each time."""

import hashlib
from typing import Any

import msgspec

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
from providers.openai_sse import decode_json
from providers.output_schema import named_schema
from providers.tool_names import ToolNames
from providers.types import (
    ImageBlock,
    JsonObject,
    Message,
    NativeBlocks,
    ProviderRequest,
    TextBlock,
    ToolResultBlock,
    ToolUseBlock,
)

MAX_CALL_ID_CHARS = 64
MIN_OUTPUT_TOKENS = 16  # the API refuses less


def responses_body(
    request: ProviderRequest, names: ToolNames, *, api: str, reasoning_summary: str | None
) -> JsonObject:
    """The body, with `extra_body` merged in last.

    Raises: RequestRejected.
    """
    family = model_family(request.model)
    body: JsonObject = {
        "model": request.model,
        "input": _Transcript(request.model, names, api).items(request.messages),
        "stream": True,
        "store": False,
        "stream_options": {"include_obfuscation": False},
    }
    if request.system.strip():
        body["instructions"] = request.system
    if request.tools:
        body["tools"] = [
            {
                "type": "function",
                "name": names.to_wire(spec.name),
                "description": spec.description,
                "parameters": spec.input_schema,
                "strict": spec.strict,
            }
            for spec in request.tools
        ]
        body["tool_choice"] = _tool_choice(request, names)
        body["parallel_tool_calls"] = request.tool_choice.parallel
    if family.is_reasoning:  # other models refuse the field
        body["include"] = ["reasoning.encrypted_content"]
        body |= _reasoning(request, family, reasoning_summary)
    if (schema := request.output_schema) is not None and family.output_schema:
        body["text"] = {"format": {"type": "json_schema"} | named_schema(schema)}
    if (limit := request.max_output_tokens) is not None:
        body["max_output_tokens"] = max(min(limit, family.max_output_tokens or limit), MIN_OUTPUT_TOKENS)
    if request.cache_key:
        body["prompt_cache_key"] = bounded_key(request.cache_key)
    if request.end_user_id:
        body["safety_identifier"] = hashlib.sha256(request.end_user_id.encode()).hexdigest()
    return body | request.extra_body


def _tool_choice(request: ProviderRequest, names: ToolNames) -> str | JsonObject:
    match request.tool_choice.type:
        case "any":
            return "required"
        case "tool":
            return {"type": "function", "name": names.to_wire(request.tool_choice.name or "")}
        case kind:
            return kind


def _reasoning(request: ProviderRequest, family: ModelFamily, summary: str | None) -> JsonObject:
    level = nearest_effort(family.efforts, request.think_effort)
    fields: JsonObject = {}
    if level is not None:
        fields["effort"] = level
    if summary is not None and level != "none":
        fields["summary"] = summary
    return {"reasoning": fields} if fields else {}


class _Transcript:
    def __init__(self, model: str, names: ToolNames, api: str) -> None:
        self._model = model
        self._names = names
        self._api = api

    def items(self, messages: tuple[Message, ...]) -> list[Any]:
        items: list[Any] = []
        for step in steps(messages):
            message = step.message
            if message.role == "assistant":
                items += self._assistant(step)
            elif message.role == "system":
                if text := text_of(message):
                    items.append({"role": "system", "content": text})
            elif parts := [_part(block) for block in texts_and_images(message.blocks)]:
                items.append({"role": "user", "content": parts})
        return items

    def _assistant(self, step: Step) -> list[Any]:
        message = step.message
        native = message.native if message.native is not None and message.native.api == self._api else None
        items = self._output_items(message, native)
        return items + [_output(result) for result in step.results]

    def _call(self, use: ToolUseBlock) -> JsonObject:
        return {
            "type": "function_call",
            "call_id": _call_id(use.id),
            "name": self._names.to_wire(use.name),
            "arguments": msgspec.json.encode(use.input).decode(),
        }

    def _output_items(self, message: Message, native: NativeBlocks | None) -> list[Any]:
        """The provider's own items, unchanged as far as it will take them, and what of the message they lack.

        Reasoning without its encrypted content, or another model's, is unknown to a stateless API and left
        out; what followed it loses its id, which would point at it. Reasoning that nothing follows is left
        out too. The calls are those of the message, no more and no fewer, so that each result has its call.
        """
        items: list[Any] = []
        reasoning: list[msgspec.Raw] = []
        has_ids, has_text = True, False
        open_uses = {use.id: use for use in message.tool_uses}
        for raw in msgspec.json.decode(native.body if native else b"[]", type=list[msgspec.Raw]):
            item = decode_json(bytes(raw))
            kind = item.get("type")
            if kind == "reasoning":
                is_same_model = native is not None and native.model == self._model
                has_ids = is_same_model and bool(item.get("encrypted_content"))
                reasoning = [*reasoning, raw] if has_ids else []
                continue
            sent: Any = raw if has_ids else {key: value for key, value in item.items() if key != "id"}
            if kind == "function_call":
                use = open_uses.pop(item.get("call_id"), None)
                if use is None:
                    continue
                if use.input_error is not None or _call_id(use.id) != use.id:
                    sent = self._call(use)
            elif kind == "message":
                if not _says_something(item):
                    continue
                has_text = True
            items += [*reasoning, sent]
            reasoning = []
        if not has_text and (text := text_of(message)):
            items.append({"role": "assistant", "content": text})
        return items + [self._call(use) for use in open_uses.values()]


def _call_id(use_id: str) -> str:
    return wire_call_id(use_id, max_chars=MAX_CALL_ID_CHARS)


def _says_something(item: JsonObject) -> bool:
    parts = item.get("content") or ()
    return any(str(part.get("text") or part.get("refusal") or "").strip() for part in parts)


def _output(result: ToolResultBlock) -> JsonObject:
    text = result_text(result)
    images = [_part(image) for image in result_images(result)]
    return {
        "type": "function_call_output",
        "call_id": _call_id(result.tool_use_id),
        "output": [{"type": "input_text", "text": text}, *images] if images else text,
    }


def _part(block: TextBlock | ImageBlock) -> JsonObject:
    if isinstance(block, TextBlock):
        return {"type": "input_text", "text": block.text}
    return {"type": "input_image", "image_url": image_url(block), "detail": "auto"}
