"""A `ProviderRequest` as the body of Ollama's `/api/chat`."""

from collections.abc import Mapping
from typing import Any

import msgspec

from providers.ollama_models import OllamaModel
from providers.openai_messages import Step, result_images, result_text, steps, text_of, texts_and_images
from providers.think_effort import nearest
from providers.tool_names import ToolNames
from providers.types import (
    Base64Source,
    FileSource,
    ImageBlock,
    JsonObject,
    ProviderRequest,
    TextBlock,
    UrlSource,
)

API = "ollama"
_LEVELS = ("low", "medium", "high")


def chat_body(
    request: ProviderRequest,
    model: OllamaModel,
    names: ToolNames,
    *,
    context_tokens: int,
    keep_alive: str | None,
) -> JsonObject:
    """The body. `extra_body` is merged in last, its `options` with ours one by one."""
    # Without these two the server drops the beginning of a long conversation and tells nobody.
    body: JsonObject = {"model": request.model, "stream": True, "truncate": False, "shift": False}
    options: JsonObject = {"num_ctx": model.window_tokens(context_tokens)}
    if request.max_output_tokens is not None:
        options["num_predict"] = request.max_output_tokens
    body["messages"] = _Transcript(request, model, names).messages()
    if tools := _tools(request, names):
        body["tools"] = tools
    if (think := _think(model, request.think_effort)) is not None:
        body["think"] = think
    if request.output_schema is not None:
        body["format"] = request.output_schema
    if keep_alive is not None:
        body["keep_alive"] = keep_alive
    extra = dict(request.extra_body)
    own_options = extra.pop("options", None)
    if isinstance(own_options, Mapping):
        options |= own_options
    return body | {"options": options} | extra


def _tools(request: ProviderRequest, names: ToolNames) -> list[JsonObject]:
    """The API has no tool choice: tools that may not be called are not shown, a named one is shown alone."""
    choice = request.tool_choice
    if choice.type == "none":
        return []
    offered = [spec for spec in request.tools if choice.type != "tool" or spec.name == choice.name]
    return [
        {
            "type": "function",
            "function": {
                "name": names.to_wire(spec.name),
                "description": spec.description,
                "parameters": spec.input_schema,
            },
        }
        for spec in offered
    ]


def _think(model: OllamaModel, effort: float | None) -> bool | str | None:
    if effort is None or model.think == "none":
        return None
    return nearest(effort, _LEVELS) if model.think == "levels" else effort > 0


class _Transcript:
    def __init__(self, request: ProviderRequest, model: OllamaModel, names: ToolNames) -> None:
        self._request = request
        self._sees = model.images
        self._names = names

    def messages(self) -> list[JsonObject]:
        request = self._request
        written: list[JsonObject] = []
        if request.system.strip():
            written.append({"role": "system", "content": request.system})
        last_prompt = max(
            (number for number, message in enumerate(request.messages) if message.role == "user"), default=-1
        )
        loop = {id(message) for message in request.messages[last_prompt + 1 :]}
        for step in steps(request.messages):
            message = step.message
            if message.role == "assistant":
                written += self._assistant(step, is_in_loop=id(message) in loop)
            elif message.role == "system":
                if text := text_of(message):
                    written.append({"role": "system", "content": text})
            elif blocks := tuple(texts_and_images(message.blocks)):
                text = "\n\n".join(filter(None, map(self._words, blocks)))
                written.append(self._spoken(text, [b for b in blocks if isinstance(b, ImageBlock)]))
        return written

    def _assistant(self, step: Step, *, is_in_loop: bool) -> list[JsonObject]:
        message = step.message
        text = text_of(message)
        if not text and not message.tool_uses:
            return []
        written: JsonObject = {"role": "assistant", "content": text}
        # The templates of models drop the thinking of earlier turns: it is sent only while tools are at work.
        if is_in_loop and (thinking := self._own_thinking(step)):
            written["thinking"] = thinking
        if message.tool_uses:
            written["tool_calls"] = [
                {
                    "id": use.id,
                    "function": {
                        "index": index,
                        "name": self._names.to_wire(use.name),
                        "arguments": use.input,
                    },
                }
                for index, use in enumerate(message.tool_uses)
            ]
        return [written, *self._results(step)]

    def _own_thinking(self, step: Step) -> str:
        native = step.message.native
        if native is None or native.api != API or native.model != self._request.model:
            return ""
        kept = msgspec.json.decode(native.body, type=list[dict[str, Any]])
        return "".join(str(part.get("thinking") or "") for part in kept)

    def _results(self, step: Step) -> list[JsonObject]:
        called = {use.id: self._names.to_wire(use.name) for use in step.message.tool_uses}
        written: list[JsonObject] = [
            {
                "role": "tool",
                "tool_name": called[result.tool_use_id],
                "tool_call_id": result.tool_use_id,
                "content": result_text(result),
            }
            for result in step.results
        ]
        for result in step.results:  # templates show no images of tool messages
            if images := list(result_images(result)):
                words = [f"Image from {called[result.tool_use_id]}:", *map(self._words, images)]
                written.append(self._spoken("\n".join(filter(None, words)), images))
        return written

    def _spoken(self, text: str, images: list[ImageBlock]) -> JsonObject:
        data = [shown for image in images if (shown := self._data(image)) is not None]
        return {"role": "user", "content": text} | ({"images": data} if data else {})

    def _data(self, image: ImageBlock) -> str | None:
        """The base64 text of an image that can be shown to the model; the server fetches none."""
        return image.source.data if self._sees and isinstance(image.source, Base64Source) else None

    def _words(self, block: TextBlock | ImageBlock) -> str:
        """The text of a block. An image that cannot be shown is named, so that the session can go on."""
        if isinstance(block, TextBlock):
            return block.text
        if self._data(block) is not None:
            return ""
        match block.source:
            case UrlSource(url=url):
                return f"(An image at {url}, which is not shown to this model.)"
            case FileSource(file_id=file_id):
                return f"(The image {file_id}, which is not shown to this model.)"
            case _:
                return "(An image, which this model cannot see.)"
