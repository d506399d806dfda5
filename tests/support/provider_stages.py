"""Scenes that every provider plays, and one stage per adapter that puts a scene on its wire.

An adapter joins the contract by a stage: it turns a `Scene` into what its API would send.
"""

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from typing import Any, Literal, Protocol

from msgspec import Struct

from providers.anthropic_messages import AnthropicMessages
from providers.ollama import Ollama
from providers.openai_chat import OpenAIChat
from providers.openai_chat_endpoint import DEEPSEEK_CHAT, LITELLM_CHAT, OPENROUTER_CHAT
from providers.openai_responses import OpenAIResponses
from providers.rehearsal import Rehearsal
from providers.types import Message, Provider, ProviderRequest, Stop, TextBlock, ToolSpec
from tests.support import anthropic_script as anthropic
from tests.support.model_server import Answer, ModelServer, RecordedRequest, json_answer, sse

Json = dict[str, Any]
Break = Literal["none", "truncated", "overloaded", "silence"]

KEY = "key-of-a-test"
RETRY_AFTER_S = 2.0
# One request as each API counts it: 2572 tokens in all, 2048 of them read from the cache.
INPUT_TOKENS, CACHE_READ_TOKENS, OUTPUT_TOKENS, REASONING_TOKENS = 2572, 2048, 40, 25


class Scene(Struct, frozen=True, kw_only=True):
    """What the model does: thinks, speaks (in these pieces), calls tools, and how that ends.

    `calls` are names and the raw text of the arguments. `breaks` happens in place of the end.
    """

    thinking: str = ""
    text: tuple[str, ...] = ()
    calls: tuple[tuple[str, str], ...] = ()
    stop: Stop = Stop.END_TURN
    breaks: Break = "none"


class Stage(Protocol):
    """An adapter and its wire. `api` names the wire, `name` the stage.

    `failures` are the error codes that it can be made to raise.
    """

    @property
    def name(self) -> str: ...

    @property
    def api(self) -> str: ...

    @property
    def model(self) -> str: ...

    @property
    def failures(self) -> frozenset[str]: ...

    @property
    def stops(self) -> frozenset[Stop]:
        """The reasons for an early end that the API can tell."""
        ...

    @property
    def counts_cache(self) -> bool:
        """Whether the API tells how much of the input it had in its cache."""
        ...

    def play(self, scene: Scene, *, times: int = 1) -> "AbstractAsyncContextManager[Performance]":
        """A provider whose next requests, `times` of them, get this scene."""
        ...

    def fail(self, code: str) -> "AbstractAsyncContextManager[Performance]":
        """A provider whose next request fails with this error before any content."""
        ...


class Performance(Struct, kw_only=True):
    """A provider, the request to send to it, the answers prepared on its wire, and what it was asked."""

    provider: Provider
    request: ProviderRequest
    answers: list[Answer] = []
    requests: list[RecordedRequest] = []

    async def until_the_connection_is_released(self) -> None:
        for answer in self.answers:
            await answer.client_gone.wait()


def request_for(model: str, text: str = "Go on.") -> ProviderRequest:
    tools = tuple(
        ToolSpec(name=name, description="A tool.", input_schema={"type": "object"})
        for name in ("look", "count")
    )
    return ProviderRequest(
        model=model,
        messages=(Message(role="user", blocks=(TextBlock(text=text),)),),
        tools=tools,
        cache_key="sess_of_a_test",
    )


# -- rehearsal ------------------------------------------------------------------------------------------


class RehearsalStage:
    name = api = "rehearsal"
    model = "fast"
    stops = frozenset({Stop.MAX_TOKENS, Stop.REFUSAL})
    counts_cache = True
    failures = frozenset(
        {
            "rate_limited", "quota_exceeded", "provider_overloaded", "provider_failed", "connection_lost",
            "bad_payload", "context_too_long", "provider_auth", "model_not_found", "request_rejected",
        }
    )  # fmt: skip

    @asynccontextmanager
    async def play(self, scene: Scene, *, times: int = 1) -> AsyncIterator[Performance]:
        provider = Rehearsal()
        yield Performance(provider=provider, request=request_for(self.model, "\n".join(self._script(scene))))
        await provider.aclose()

    @asynccontextmanager
    async def fail(self, code: str) -> AsyncIterator[Performance]:
        provider = Rehearsal()
        script = f"fail: {code}\nretry_after: {RETRY_AFTER_S}"
        yield Performance(provider=provider, request=request_for(self.model, script))
        await provider.aclose()

    def _script(self, scene: Scene) -> list[str]:
        deltas = bool(scene.thinking) + len(scene.text)
        lines = ["chunk: 1000000", *([f"think: {scene.thinking}"] if scene.thinking else [])]
        if scene.text:
            lines.append("chunk: " + str(len(scene.text[0])))
            lines.append("say: " + "".join(scene.text))
        lines += [f"call: {name} {arguments}" for name, arguments in scene.calls]
        lines.append(
            f"usage: in={INPUT_TOKENS} cache_read={CACHE_READ_TOKENS} out={OUTPUT_TOKENS} "
            f"reasoning={REASONING_TOKENS}"
        )
        lines += {Stop.MAX_TOKENS: ["max_tokens"], Stop.REFUSAL: ["refuse"]}.get(scene.stop, [])
        lines += {
            "truncated": ["truncate"],
            "overloaded": [f"fail: provider_overloaded after {deltas}"],
            "silence": [f"hang: after {deltas}"],
            "none": [],
        }[scene.breaks]
        return lines


# -- adapters that speak HTTP ---------------------------------------------------------------------------


class HttpStage:
    """A stage on a scripted server. Its subclasses write the frames of a scene and the errors."""

    name: str
    api: str
    model: str
    errors: Mapping[str, Answer]
    stops = frozenset({Stop.MAX_TOKENS, Stop.REFUSAL})
    counts_cache = True

    def provider(self, base_url: str) -> Provider:
        raise NotImplementedError

    def frames(self, scene: Scene) -> list[str | Json]:
        raise NotImplementedError

    def overloaded_frame(self) -> str | Json:
        raise NotImplementedError

    def encode(self, frames: list[str | Json]) -> bytes:
        return sse(*frames)

    def first_answers(self) -> list[Answer]:
        """The answers to what an adapter asks before its first request to a model."""
        return []

    @property
    def failures(self) -> frozenset[str]:
        return frozenset(self.errors) | {"connection_lost", "bad_payload"}

    @asynccontextmanager
    async def play(self, scene: Scene, *, times: int = 1) -> AsyncIterator[Performance]:
        frames = self.frames(scene)
        if scene.breaks == "overloaded":
            frames.append(self.overloaded_frame())
        answers = [
            Answer(chunks=[self.encode(frames)], end="hang" if scene.breaks == "silence" else "chunked_end")
            for _ in range(times)
        ]
        async with self._serving(answers) as performance:
            yield performance

    @asynccontextmanager
    async def fail(self, code: str) -> AsyncIterator[Performance]:
        if code == "connection_lost":
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                port = free.getsockname()[1]
            provider = self.provider(f"http://127.0.0.1:{port}")
            yield Performance(provider=provider, request=request_for(self.model))
            await provider.aclose()
            return
        page = Answer(chunks=[b"<html><body>Sign in</body></html>"], content_type="text/html")
        answer = page if code == "bad_payload" else replace(self.errors[code], client_gone=asyncio.Event())
        async with self._serving([answer]) as performance:
            yield performance

    @asynccontextmanager
    async def _serving(self, answers: list[Answer]) -> AsyncIterator[Performance]:
        async with ModelServer() as server:
            first = self.first_answers() if answers else []
            server.enqueue(*first, *answers)
            provider = self.provider(server.base_url)
            yield Performance(
                provider=provider,
                request=request_for(self.model),
                answers=answers,
                requests=server.requests,
            )
            await provider.aclose()
            made = len(server.requests)
            assert made == len(first) + len(answers), "each stream is one request, without retries"


class AnthropicStage(HttpStage):
    name = api = "anthropic_messages"
    model = anthropic.MODEL
    errors: Mapping[str, Answer] = {
        code: json_answer(anthropic.api_error(kind, message), status=status, headers=headers)
        for code, status, kind, message, headers in (
            ("rate_limited", 429, "rate_limit_error", "Slow down", {"retry-after": "2"}),
            ("quota_exceeded", 402, "billing_error", "Add credit", {}),
            ("provider_overloaded", 529, "overloaded_error", "Overloaded", {}),
            ("provider_failed", 500, "api_error", "Internal error", {}),
            ("context_too_long", 400, "invalid_request_error", "prompt is too long: 9 > 8", {}),
            ("provider_auth", 401, "authentication_error", "Invalid key", {}),
            ("model_not_found", 404, "not_found_error", "model: m", {}),
            ("request_rejected", 400, "invalid_request_error", "messages: wrong", {}),
        )
    }
    _STOPS: Mapping[Stop, str] = {
        Stop.END_TURN: "end_turn",
        Stop.TOOL_USE: "tool_use",
        Stop.MAX_TOKENS: "max_tokens",
        Stop.REFUSAL: "refusal",
    }

    def provider(self, base_url: str) -> Provider:
        return AnthropicMessages(api_key=KEY, base_url=base_url)

    def overloaded_frame(self) -> Json:
        return anthropic.api_error("overloaded_error")

    def frames(self, scene: Scene) -> list[str | Json]:
        fresh = INPUT_TOKENS - CACHE_READ_TOKENS  # this API counts what is cached beside the input
        frames: list[str | Json] = [
            anthropic.start(
                input_tokens=fresh,
                cache_read_input_tokens=CACHE_READ_TOKENS,
                cache_creation_input_tokens=0,
                output_tokens=1,
            )
        ]
        index = 0
        if scene.thinking:
            frames += [
                anthropic.block(index, type="thinking", thinking="", signature=""),
                anthropic.delta(index, "thinking_delta", thinking=scene.thinking),
                anthropic.delta(index, "signature_delta", signature="c2ln"),
                anthropic.stop(index),
            ]
            index += 1
        if scene.text:
            block = anthropic.text(index, *scene.text)
            frames += block if scene.breaks == "none" else block[:-1]
            index += 1
        for number, (name, arguments) in enumerate(scene.calls):
            block = anthropic.call(index + number, f"toolu_{number}", name, arguments)
            is_cut = scene.stop is Stop.MAX_TOKENS and number == len(scene.calls) - 1
            frames += block[:-1] if is_cut else block
        if scene.breaks == "none":
            details = {"thinking_tokens": REASONING_TOKENS}
            stop = self._STOPS[scene.stop]
            frames += [
                anthropic.ended(stop, output_tokens=OUTPUT_TOKENS, output_tokens_details=details),
                anthropic.DONE,
            ]
        return frames


def _openai_error(status: int, code: str, message: str, headers: dict[str, str] | None = None) -> Answer:
    error = {"message": message, "type": code, "code": code, "param": None}
    return json_answer({"error": error}, status=status, headers=headers)


OPENAI_ERRORS: Mapping[str, Answer] = {
    "rate_limited": _openai_error(429, "rate_limit_exceeded", "Slow down", {"retry-after": "2"}),
    "quota_exceeded": _openai_error(429, "insufficient_quota", "Check your plan"),
    "provider_overloaded": _openai_error(503, "server_is_overloaded", "Overloaded"),
    "provider_failed": _openai_error(500, "server_error", "Internal error"),
    "context_too_long": _openai_error(400, "context_length_exceeded", "Too long"),
    "provider_auth": _openai_error(401, "invalid_api_key", "Invalid key"),
    "model_not_found": _openai_error(404, "model_not_found", "No such model"),
    "request_rejected": _openai_error(400, "invalid_request_error", "Wrong"),
}


class ResponsesStage(HttpStage):
    name = api = "openai_responses"
    model = "gpt-6.1-sol"
    errors = OPENAI_ERRORS

    def provider(self, base_url: str) -> Provider:
        return OpenAIResponses(api_key=KEY, base_url=base_url)

    def overloaded_frame(self) -> Json:
        return {"type": "error", "code": "server_is_overloaded", "message": "Overloaded", "param": None}

    def frames(self, scene: Scene) -> list[str | Json]:
        frames: list[str | Json] = [
            self._event("created", response={"id": "resp_1", "model": self.model, "status": "in_progress"})
        ]
        items = 0
        if scene.thinking:
            item = {"id": "rs_1", "type": "reasoning", "encrypted_content": "gAAA=="}
            summary = [{"type": "summary_text", "text": scene.thinking}]
            frames += [
                self._item("added", items, item | {"summary": []}),
                self._delta("reasoning_summary_text", items, scene.thinking, summary_index=0),
                self._item("done", items, item | {"summary": summary}),
            ]
            items += 1
        if scene.text:
            frames += self._said(items, scene)
            items += 1
        for number, (name, arguments) in enumerate(scene.calls):
            is_cut = scene.stop is Stop.MAX_TOKENS and number == len(scene.calls) - 1
            frames += self._called(items + number, name, arguments, is_cut=is_cut)
        if scene.breaks == "none":
            frames.append(self._ended(scene))
        return frames

    def _said(self, index: int, scene: Scene) -> list[Json]:
        is_refusal = scene.stop is Stop.REFUSAL
        item = {"id": "msg_1", "type": "message", "role": "assistant", "status": "completed"}
        whole = "".join(scene.text)
        part = (
            {"type": "refusal", "refusal": whole}
            if is_refusal
            else {"type": "output_text", "text": whole, "annotations": []}
        )
        kind = "refusal" if is_refusal else "output_text"
        frames = [self._item("added", index, item | {"content": []})]
        frames += [self._delta(kind, index, piece, content_index=0) for piece in scene.text]
        return (
            frames
            if scene.breaks != "none"
            else [*frames, self._item("done", index, item | {"content": [part]})]
        )

    def _called(self, index: int, name: str, arguments: str, *, is_cut: bool) -> list[Json]:
        item = {"id": f"fc_{index}", "type": "function_call", "call_id": f"call_{index}", "name": name}
        frames = [
            self._item("added", index, item | {"arguments": "", "status": "in_progress"}),
            self._delta("function_call_arguments", index, arguments),
        ]
        status = "incomplete" if is_cut else "completed"
        return [*frames, self._item("done", index, item | {"arguments": arguments, "status": status})]

    def _ended(self, scene: Scene) -> Json:
        is_cut = scene.stop is Stop.MAX_TOKENS
        status = "incomplete" if is_cut else "completed"
        usage = {
            "input_tokens": INPUT_TOKENS,
            "input_tokens_details": {"cached_tokens": CACHE_READ_TOKENS, "cache_write_tokens": 0},
            "output_tokens": OUTPUT_TOKENS,
            "output_tokens_details": {"reasoning_tokens": REASONING_TOKENS},
            "total_tokens": INPUT_TOKENS + OUTPUT_TOKENS,
        }
        response = {"id": "resp_1", "status": status, "error": None, "usage": usage}
        return self._event(
            status,
            response=response | {"incomplete_details": {"reason": "max_output_tokens"} if is_cut else None},
        )

    def _event(self, kind: str, **fields: Any) -> Json:
        return {"type": f"response.{kind}"} | fields

    def _item(self, kind: str, index: int, item: Json) -> Json:
        return self._event(f"output_item.{kind}", output_index=index, item=item)

    def _delta(self, kind: str, index: int, text: str, **fields: Any) -> Json:
        return self._event(f"{kind}.delta", output_index=index, item_id=f"item_{index}", delta=text, **fields)


class ChatStage(HttpStage):
    name = api = "openai_chat"
    model = "some-model"
    errors = OPENAI_ERRORS
    _FINISHES: Mapping[Stop, str] = {
        Stop.END_TURN: "stop",
        Stop.TOOL_USE: "tool_calls",
        Stop.MAX_TOKENS: "length",
        Stop.REFUSAL: "content_filter",
    }

    def provider(self, base_url: str) -> Provider:
        return OpenAIChat(api_key=KEY, base_url=base_url)

    def overloaded_frame(self) -> Json:
        return {"error": {"message": "Overloaded", "type": "server_error", "code": "server_is_overloaded"}}

    def frames(self, scene: Scene) -> list[str | Json]:
        frames: list[str | Json] = [self._chunk({"role": "assistant", "content": ""})]
        if scene.thinking:
            frames.append(self._chunk({"reasoning_content": scene.thinking}))
        frames += [self._chunk({"content": piece}) for piece in scene.text]
        for index, (name, arguments) in enumerate(scene.calls):
            head = {"index": index, "id": f"call_{index}", "type": "function"}
            started = head | {"function": {"name": name, "arguments": ""}}
            grown = {"index": index, "function": {"arguments": arguments}}
            frames += [self._chunk({"tool_calls": [call]}) for call in (started, grown)]
        if scene.breaks == "none":
            usage = {
                "prompt_tokens": INPUT_TOKENS,
                "completion_tokens": OUTPUT_TOKENS,
                "prompt_tokens_details": {"cached_tokens": CACHE_READ_TOKENS},
                "completion_tokens_details": {"reasoning_tokens": REASONING_TOKENS},
            }
            frames += [
                self._chunk({}, self._FINISHES[scene.stop]),
                {"choices": [], "usage": usage},
                "data: [DONE]\n\n",
            ]
        return frames

    def _chunk(self, delta: Json, finish: str | None = None) -> Json:
        choice = {"index": 0, "delta": delta, "finish_reason": finish}
        return {"id": "c1", "object": "chat.completion.chunk", "model": "m1", "choices": [choice]}


class DeepSeekStage(ChatStage):
    name = "deepseek"
    model = "deepseek-flash"

    def provider(self, base_url: str) -> Provider:
        return OpenAIChat(api_key=KEY, base_url=base_url, endpoint=DEEPSEEK_CHAT)


class OpenRouterStage(ChatStage):
    name = "openrouter"
    model = "some/model"

    def provider(self, base_url: str) -> Provider:
        return OpenAIChat(api_key=KEY, base_url=base_url, endpoint=OPENROUTER_CHAT)

    def frames(self, scene: Scene) -> list[str | Json]:
        frames: list[str | Json] = [": OPENROUTER PROCESSING\n\n", *super().frames(scene)]
        if scene.thinking:
            detail = {"type": "reasoning.text", "index": 0, "text": scene.thinking, "signature": "b3Jz"}
            frames.insert(3, self._chunk({"reasoning_details": [detail]}))
        return frames


class LiteLLMStage(ChatStage):
    name = "litellm"
    model = "ours"

    def provider(self, base_url: str) -> Provider:
        return OpenAIChat(api_key=KEY, base_url=base_url, endpoint=LITELLM_CHAT)

    def frames(self, scene: Scene) -> list[str | Json]:
        frames = super().frames(scene)
        if scene.thinking:
            block = {"type": "thinking", "thinking": scene.thinking, "signature": "bGl0"}
            frames.insert(2, self._chunk({"thinking_blocks": [block]}))
        return frames


class OllamaStage(HttpStage):
    name = api = "ollama"
    model = "qwen3:8b"
    stops = frozenset({Stop.MAX_TOKENS})
    counts_cache = False
    errors: Mapping[str, Answer] = {
        code: json_answer({"error": message}, status=status, headers=headers)
        for code, status, message, headers in (
            ("rate_limited", 429, "too many requests", {"retry-after": "2"}),
            ("quota_exceeded", 402, "payment required", {}),
            ("provider_overloaded", 503, "server busy, please try again", {}),
            ("provider_failed", 500, "model requires more system memory", {}),
            ("context_too_long", 400, "the input length exceeds the context length", {}),
            ("provider_auth", 401, "unauthorized", {}),
            ("model_not_found", 404, "model 'qwen3:8b' not found", {}),
            ("request_rejected", 400, "invalid think value", {}),
        )
    }

    def provider(self, base_url: str) -> Provider:
        return Ollama(api_key=KEY, base_url=base_url)

    def overloaded_frame(self) -> Json:
        return {"error": "server busy, please try again"}

    def encode(self, frames: list[str | Json]) -> bytes:
        return b"".join(json.dumps(frame, ensure_ascii=False).encode() + b"\n" for frame in frames)

    def first_answers(self) -> list[Answer]:
        shown = {
            "capabilities": ["completion", "tools", "thinking", "vision"],
            "model_info": {"general.architecture": "qwen3", "qwen3.context_length": 40960},
        }
        return [replace(json_answer(shown), end="chunked_end")]

    def frames(self, scene: Scene) -> list[str | Json]:
        messages: list[Json] = [{"content": "", "thinking": scene.thinking}] if scene.thinking else []
        messages += [{"content": piece} for piece in scene.text]
        messages += [
            {"content": "", "tool_calls": [{"function": {"name": name, "arguments": self._arguments(raw)}}]}
            for name, raw in scene.calls
        ]
        frames: list[str | Json] = [self._line(message) for message in messages]
        if scene.breaks == "none":
            reason = "length" if scene.stop is Stop.MAX_TOKENS else "stop"
            counts = {"prompt_eval_count": INPUT_TOKENS, "eval_count": OUTPUT_TOKENS}
            frames.append(self._line({"content": ""}) | {"done": True, "done_reason": reason} | counts)
        return frames

    def _line(self, message: Json) -> Json:
        return {"model": self.model, "message": {"role": "assistant"} | message, "done": False}

    def _arguments(self, raw: str) -> Any:
        """An object as the server sends it; what a model got wrong as the text that it is."""
        try:
            value = json.loads(raw)
        except ValueError:
            return raw
        return raw if isinstance(value, str) else value


STAGES: tuple[Stage, ...] = (
    RehearsalStage(),
    AnthropicStage(),
    ResponsesStage(),
    ChatStage(),
    DeepSeekStage(),
    OpenRouterStage(),
    LiteLLMStage(),
    OllamaStage(),
)
