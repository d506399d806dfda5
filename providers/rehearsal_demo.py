"""What the rehearsal model says to a prompt that is no script: a small, pleasant, deterministic demo."""

import re

import msgspec

from providers.rehearsal_script import Part, Step
from providers.types import ImageBlock, Message, ProviderRequest, ToolResultBlock

PACE_S = 0.015  # between words: fast to read along, slow enough to be seen streaming

_ARITHMETIC = re.compile(r"(?<![\w.])[(\-+]*\d[\d_.]*(?:\s*(?:\*\*|//|[-+*/%^()]|×|÷)[\s(]*-?\d*[\d_.]*)+")
_TIME = re.compile(
    r"\b(what time|the time|current time|what day|the date|what date|today|clock)\b", re.IGNORECASE
)
_ZONE = re.compile(r"\b([A-Z][A-Za-z_]+/[A-Z][A-Za-z_]+(?:/[A-Z][A-Za-z_]+)?|UTC)\b")
_WAIT = re.compile(r"\bwait(?: for)? (\d{1,4}(?:\.\d+)?) ?s(?:ec(?:ond)?s?)?\b", re.IGNORECASE)
_QUOTED_CHARS = 120


def demo_step(prompt: Message | None, request: ProviderRequest, *, index: int, pace_s: float) -> Step:
    """The answer to `prompt`: first a call of each offered tool that fits, then what the tools returned."""
    text = "" if prompt is None else prompt.text.strip()
    results = _last_results(request)
    calls = _fitting_calls(text, request) if index == 0 else []
    if calls:
        names = " and ".join(name for name, _ in calls)
        thought = f"The request asks for something that {names} can find out."
        parts = [
            ("say", f"Let me use {names}.", ""),
            *(("call", msgspec.json.encode(arguments).decode(), name) for name, arguments in calls),
        ]
    elif results:
        thought = "The tools have answered. I can put their results into words."
        parts = [("say", "\n".join(_in_words(result, request) for result in results), "")]
    else:
        thought = "No tool is needed here, so I can answer directly."
        parts = [("say", _introduction(text, prompt, request), "")]
    thinking = () if request.think_effort == 0 else (Part(kind="think", text=thought, pace_s=pace_s),)
    return Step(
        parts=(
            *thinking,
            *(
                Part(kind="call" if kind == "call" else "say", text=body, name=name, pace_s=pace_s)
                for kind, body, name in parts
            ),
        )
    )


def _fitting_calls(text: str, request: ProviderRequest) -> list[tuple[str, dict[str, str | float]]]:
    if request.tool_choice.type == "none":
        return []
    offered = {tool.name for tool in request.tools}
    calls: list[tuple[str, dict[str, str | float]]] = []
    if "calculate" in offered and (found := _ARITHMETIC.search(text)):
        expression = found.group().replace("×", "*").replace("÷", "/").strip().rstrip(".+-*/%^(")
        if any(operator in expression for operator in "+-*/%^"):
            calls.append(("calculate", {"expression": expression}))
    if "current_time" in offered and _TIME.search(text):
        zone = _ZONE.search(text)
        calls.append(("current_time", {"timezone": zone.group()} if zone else {}))
    if "delay" in offered and (wait := _WAIT.search(text)):
        calls.append(("delay", {"seconds": float(wait[1])}))
    return calls if request.tool_choice.parallel else calls[:1]


def _last_results(request: ProviderRequest) -> list[ToolResultBlock]:
    """The results that end the transcript; empty when it ends otherwise."""
    results: list[ToolResultBlock] = []
    for message in reversed(request.messages):
        found = [block for block in message.blocks if isinstance(block, ToolResultBlock)]
        if not found:
            break
        results = found + results
    return results


def results_text(request: ProviderRequest) -> str:
    """What the tool results that end the transcript say, one per line."""
    return "\n".join(_result_text(result) for result in _last_results(request))


def _result_text(result: ToolResultBlock) -> str:
    texts = ("[image]" if isinstance(block, ImageBlock) else block.text for block in result.content)
    return " ".join(texts) or "(empty)"


def _in_words(result: ToolResultBlock, request: ProviderRequest) -> str:
    names = {use.id: use.name for message in request.messages for use in message.tool_uses}
    name = names.get(result.tool_use_id, "the tool")
    said = _result_text(result)
    if result.is_error:
        return f"{name} could not do it: {said}"
    return {"calculate": f"The result is {said}.", "current_time": f"It is {said}."}.get(
        name, f"{name} says: {said}"
    )


def _introduction(text: str, prompt: Message | None, request: ProviderRequest) -> str:
    images = sum(isinstance(block, ImageBlock) for block in prompt.blocks) if prompt else 0
    quoted = " ".join(text.split())
    if len(quoted) > _QUOTED_CHARS:
        quoted = quoted[:_QUOTED_CHARS] + "…"
    seen = [f"“{quoted}”"] if quoted else []
    seen += [f"{images} image{'s' if images > 1 else ''}"] if images else []
    tools = ", ".join(tool.name for tool in request.tools[:8])
    return (
        f"You sent {' and '.join(seen) or 'nothing yet'}. "
        "I am the rehearsal model: I work without a key or a network, and I always answer the same. "
        f"A real model would answer you here{f', and could use {tools}' if tools else ''}. "
        "Ask me for a sum or for the time to see a tool at work."
    )
