"""Questions to the user: a tool that is never executed, and how the client's answers to it are read."""

from collections.abc import Iterable
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from providers.types import ImageBlock, JsonObject, TextBlock
from tools.errors import AnswerRefused, ToolError
from tools.schema import tool

MAX_QUESTIONS = 10
MAX_OPTIONS = 20
NO_ANSWER = "(not answered)"

Content = tuple[TextBlock | ImageBlock, ...]


class Option(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One of the answers that are offered."""

    label: Annotated[str, Meta(min_length=1, max_length=200, description="Short; it is what comes back.")]
    description: Annotated[str, Meta(max_length=2000, description="What choosing it means.")] = ""


class Question(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A question without options is answered in free text, whatever `allow_free_text` says."""

    question: Annotated[str, Meta(min_length=1, max_length=4000)]
    header: Annotated[str, Meta(max_length=40, description="A title of one or two words.")] = ""
    options: Annotated[list[Option], Meta(max_length=MAX_OPTIONS)] = []
    multi_select: Annotated[bool, Meta(description="Several options may be chosen.")] = False
    allow_free_text: Annotated[bool, Meta(description="The user may answer in words of their own.")] = True


@tool(label="Ask the user", asks_user=True)
async def ask_user(
    questions: Annotated[list[Question], Meta(min_length=1, max_length=MAX_QUESTIONS)],
) -> str:
    """Asks the user and waits for the answers. Ask all that you need to know at once, with options to choose
    from where there are some. Use it only for what you cannot find out yourself.
    """
    raise ToolError("Nobody can be asked here.")


def read_answers(arguments: JsonObject, content: Content) -> Content:
    """What the model reads of the client's answer to a call with these arguments.

    One text block that is a JSON object with `answers` is read: a list in the order of the questions, or an
    object by question or header; each a string, a list of strings, or null. All else is passed on as it is.
    Raises: AnswerRefused, for answers to nothing, or beside the options where no others are allowed.
    """
    given = _structured(content)
    if given is None:
        return content
    questions = msgspec.convert(arguments.get("questions", []), list[Question], strict=False)
    answers = _by_place(questions, given)
    lines = [
        f"{question.question}\n→ {_told(question, answers.get(n))}" for n, question in enumerate(questions)
    ]
    return (TextBlock(text="\n\n".join(lines)),)


def _structured(content: Content) -> list[Any] | dict[str, Any] | None:
    if len(content) != 1 or not isinstance(content[0], TextBlock):
        return None
    try:
        decoded = msgspec.json.decode(content[0].text)
    except (msgspec.DecodeError, RecursionError):
        return None
    answers = decoded.get("answers") if isinstance(decoded, dict) else None
    return answers if isinstance(answers, list | dict) else None


def _by_place(questions: list[Question], given: list[Any] | dict[str, Any]) -> dict[int, Any]:
    """Each answer under the index of its question."""
    if isinstance(given, list):
        if len(given) > len(questions):
            raise AnswerRefused(f"There are {len(given)} answers to {len(questions)} questions.")
        return dict(enumerate(given))
    places = {_folded(name): n for n, q in enumerate(questions) for name in (q.header, q.question) if name}
    unknown = [name for name in given if _folded(name) not in places]
    if unknown:
        raise AnswerRefused(f"{unknown[0][:80]!r} is neither a question nor the header of one.")
    return {places[_folded(name)]: answer for name, answer in given.items()}


def _told(question: Question, answer: Any) -> str:
    chosen = [] if answer is None else answer if isinstance(answer, list) else [answer]
    if not all(isinstance(item, str) for item in chosen):
        raise AnswerRefused("An answer is a string, a list of strings, or null.")
    return ", ".join(_matched(question, [item.strip() for item in chosen if item.strip()])) or NO_ANSWER


def _matched(question: Question, chosen: Iterable[str]) -> Iterable[str]:
    """Labels as the model wrote them; other text as it is, where it is allowed."""
    labels = {_folded(option.label): option.label for option in question.options}
    for text in chosen:
        label = labels.get(_folded(text))
        if label is None and labels and not question.allow_free_text:
            raise AnswerRefused(f"{text[:80]!r} is none of the options: {', '.join(labels.values())}.")
        yield label or text


def _folded(text: str) -> str:
    return text.strip().casefold()
