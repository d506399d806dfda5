"""How the rehearsal model keeps the notes of a conversation: what it needs to go on where it was."""

import re

import msgspec

from providers.rehearsal_script import Part, Step
from providers.types import JsonObject, Message, ProviderRequest

_ANSWERED = re.compile(r"I have answered (\d+) times since the last prompt\.")


def notes_step(request: ProviderRequest) -> Step:
    """The notes on the records of `request`: how many there are, and how far the last prompt has come."""
    records = [_record(line) for line in request.messages[-1].text.split("\n") if line.startswith("{")]
    answered = 0
    seen: set[int] = set()
    for record in records:
        if record.get("role") == "notes":
            answered = answered_times(str(record.get("text")))
        elif record.get("role") == "user":
            answered = 0
        elif record.get("role") == "assistant" and record.get("n") not in seen:
            seen.add(record["n"])
            answered += 1
    text = (
        f"Rehearsed notes on {len(records)} records. I have answered {answered} times since the last prompt."
    )
    return Step(parts=(Part(kind="say", text=text),))


def answered_times(notes: str) -> int:
    """How often the last prompt had been answered when `notes` were written."""
    found = _ANSWERED.search(notes)
    return int(found[1]) if found else 0


def answered_before(message: Message | None) -> int:
    """The same for the message before the last prompt, which may hold notes."""
    return 0 if message is None or message.role != "user" else answered_times(message.text)


def _record(line: str) -> JsonObject:
    try:
        found = msgspec.json.decode(line)
    except msgspec.DecodeError:
        return {}
    return found if isinstance(found, dict) else {}
