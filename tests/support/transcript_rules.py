"""What every transcript, log and stream of a session must keep, as checks over what the API returns.

Plain dictionaries in, a list of broken rules out: empty when all is well.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

Json = dict[str, Any]

USES = {"agent.tool_use", "agent.mcp_tool_use", "agent.custom_tool_use"}
RESULTS = {"agent.tool_result", "agent.mcp_tool_result"}
FINISHED_BY_EVENT = {"agent.message", "agent.thinking", "agent.tool_use"}  # kinds of previews that need one
_ABOUT_CALLS = {"span.tool_start", "user.custom_tool_result", "user.tool_confirmation"}
DELTAS = {"event_start", "event_delta"}


# -- transcripts ----------------------------------------------------------------------------------------


def transcript_problems(messages: Sequence[Json], *, may_be_open: bool = False) -> list[str]:
    """Broken rules of a transcript, each message with `role` and `content` (or `blocks`).

    `may_be_open`: the last assistant message may still lack its results.
    """
    return list(_transcript_problems(messages, may_be_open=may_be_open))


def _transcript_problems(messages: Sequence[Json], *, may_be_open: bool) -> Iterator[str]:
    before: Json | None = None
    for at, message in enumerate(messages, start=1):
        role, blocks = message["role"], _blocks(message)
        name = f"message {at} ({role})"
        if not blocks:
            yield f"{name} is empty"
        yield from _block_problems(name, blocks, role)
        asked = [] if before is None else _use_ids(before)
        if role == "tool":
            given = [block["tool_use_id"] for block in blocks if block["type"] == "tool_result"]
            if given != asked:
                yield f"{name} answers {given}, asked were {asked}"
        elif asked:
            yield f"{name} stands where the results of {asked} are due"
        if role == "assistant" and (before is None or before["role"] == "assistant"):
            yield f"{name} follows no message that it could answer"
        before = message
    if before is not None and _use_ids(before) and not may_be_open:
        yield f"the last message lacks the results of {_use_ids(before)}"


def _block_problems(name: str, blocks: list[Json], role: str) -> Iterator[str]:
    kinds = [block["type"] for block in blocks]
    allowed = {
        "user": {"text", "image"},
        "assistant": {"text", "thinking", "tool_use"},
        "tool": {"tool_result"},
    }.get(role, {"text"})
    if not set(kinds) <= allowed:
        yield f"{name} holds {sorted(set(kinds) - allowed)}"
    if blocks and set(kinds) == {"thinking"}:
        yield f"{name} holds nothing but thinking"
    if any(block["type"] == "text" and not block["text"].strip() for block in blocks):
        yield f"{name} has blank text"
    if "tool_use" in kinds and set(kinds[kinds.index("tool_use") :]) != {"tool_use"}:
        yield f"{name} goes on after its first tool use"
    ids = [block["id"] for block in blocks if block["type"] == "tool_use"]
    if len(ids) != len(set(ids)):
        yield f"{name} uses a tool use id twice"


def _blocks(message: Json) -> list[Json]:
    return list(message["content"] if "content" in message else message["blocks"])


def _use_ids(message: Json) -> list[str]:
    return [block["id"] for block in _blocks(message) if block["type"] == "tool_use"]


# -- event logs -----------------------------------------------------------------------------------------


def log_problems(
    events: Sequence[Json], *, ledger: Iterable[Json] | None = None, is_settled: bool = True
) -> list[str]:
    """Broken rules of a log from its first event on.

    `ledger`: rows with `id`, `state` (open, closed, abandoned) and the counts, one per request. `is_settled`
    False: a run may be unfinished at the end.
    """
    rules = _LogRules()
    for event in events:
        rules.read(event)
    rules.end(is_settled=is_settled)
    if ledger is not None:
        rules.compare(list(ledger))
    return rules.problems


class _LogRules:
    def __init__(self) -> None:
        self.problems: list[str] = []
        self._seq = 0
        self._ids: set[str] = set()
        self._runs: set[str] = set()
        self._closed: set[str] = set()
        self._turns: dict[str, int] = {}
        self._spans: dict[str, bool] = {}  # id: has it ended
        self._uses: dict[str, str] = {}  # id: run
        self._answered: set[str] = set()
        self._started: set[str] = set()
        self._unapproved: set[str] = set()

    def read(self, event: Json) -> None:
        if event["seq"] != self._seq + 1:
            self._complain(event, f"follows {self._seq}")
        self._seq = event["seq"]
        if event["id"] in self._ids:
            self._complain(event, "has an id that was used before")
        self._ids.add(event["id"])
        self._read_run(event)
        kind = event["type"]
        if kind.startswith("span.model_request"):
            self._read_span(event)
        elif kind in USES or kind in RESULTS or kind in _ABOUT_CALLS:
            self._read_tool(event)
        elif kind == "session.status_rescheduled":
            self._started.clear()
        elif kind == "agent.message" and not "".join(block["text"] for block in event["content"]).strip():
            self._complain(event, "is blank")
        if kind in {"session.status_idle", "session.status_rescheduled"} and not all(self._spans.values()):
            self._complain(event, "comes while a model request is open")
        if kind == "session.status_idle" and event["stop_reason"]["type"] != "requires_action":
            self._read_close(event)

    def end(self, *, is_settled: bool) -> None:
        if is_settled and self._runs - self._closed:
            self.problems.append(f"not closed: {sorted(self._runs - self._closed)}")

    def compare(self, ledger: list[Json]) -> None:
        ids = [row["id"] for row in ledger]
        if sorted(ids) != sorted(self._spans):
            self.problems.append(f"ledger entries {sorted(ids)}, requests in the log {sorted(self._spans)}")
        for row in ledger:
            if (row["state"] != "open") != self._spans.get(row["id"]):
                self.problems.append(f"the ledger says {row['state']} of {row['id']}, the log does not")
            counts = [row.get("input_tokens"), row.get("output_tokens"), row.get("cost_usd")]
            if row["state"] == "abandoned" and any(count is not None for count in counts):
                self.problems.append(f"an abandoned request has counts: {row}")

    def _read_run(self, event: Json) -> None:
        run_id, turn = event.get("run_id"), event.get("turn")
        if run_id is None:
            return
        if run_id in self._closed:
            self._complain(event, "comes after the close of its run")
        self._runs.add(run_id)
        if turn is not None:
            if turn < self._turns.get(run_id, 1):
                self._complain(event, f"goes back to turn {turn}")
            self._turns[run_id] = turn

    def _read_close(self, event: Json) -> None:
        run_id = event["run_id"]
        left = [use for use, run in self._uses.items() if run == run_id and use not in self._answered]
        if left:
            self._complain(event, f"closes with {left} unanswered")
        self._closed.add(run_id)

    def _read_span(self, event: Json) -> None:
        if event["type"] == "span.model_request_start":
            if not all(self._spans.values()):
                self._complain(event, "begins while another is open")
            self._spans[event["id"]] = False
            return
        start = event["model_request_start_id"]
        if self._spans.get(start) is not False:
            self._complain(event, "ends a request that is not open")
        self._spans[start] = True

    def _read_tool(self, event: Json) -> None:
        kind = event["type"]
        if kind in USES:
            self._uses[event["id"]] = event["run_id"]
            if event.get("evaluated_permission") == "ask":
                self._unapproved.add(event["id"])
            return
        use = event["custom_tool_use_id" if kind == "user.custom_tool_result" else "tool_use_id"]
        if use not in self._uses:
            self._complain(event, f"belongs to no tool use: {use}")
        if use in self._answered:
            self._complain(event, f"comes after the result of {use}")
        if kind == "user.tool_confirmation":
            if use not in self._unapproved:
                self._complain(event, f"confirms {use}, which does not wait for it")
            if event["result"] == "allow":
                self._unapproved.discard(use)
        elif kind == "span.tool_start":
            if use in self._unapproved:
                self._complain(event, f"starts {use}, which nobody has allowed")
            if use in self._started:
                self._complain(event, f"starts {use} twice in one hold")
            self._started.add(use)
        else:
            self._answered.add(use)

    def _complain(self, event: Json, text: str) -> None:
        self.problems.append(f"{event['seq']} {event['type']} {text}")


# -- streams --------------------------------------------------------------------------------------------


def stream_problems(frames: Sequence[Json], *, may_rejoin: bool = False) -> list[str]:
    """Broken rules of previews in a stream: durable events and deltas in the order in which they came.

    `may_rejoin`: what is not over may begin again, with all of its text, as for a reader that lost its place.
    """
    rules = _StreamRules(may_rejoin=may_rejoin)
    for frame in frames:
        rules.read(frame)
    return rules.problems


class _StreamRules:
    def __init__(self, *, may_rejoin: bool) -> None:
        self._may_rejoin = may_rejoin
        self.problems: list[str] = []
        self._kinds: dict[str, str] = {}  # previews that are not over
        self._shown: dict[str, str] = {}
        self._over: set[str] = set()

    def read(self, frame: Json) -> None:
        kind = frame["type"]
        if kind == "event_start":
            self._begin(frame["event"]["id"], frame["event"]["type"])
        elif kind == "event_delta":
            self._extend(frame["event_id"], frame["delta"])
        else:
            self._settle(frame)

    def _begin(self, event_id: str, kind: str) -> None:
        if kind not in FINISHED_BY_EVENT:
            return
        if event_id in self._over or (event_id in self._kinds and not self._may_rejoin):
            self.problems.append(f"{event_id} begins twice")
        self._kinds[event_id] = kind
        self._shown[event_id] = ""

    def _extend(self, event_id: str, delta: Json) -> None:
        needs_start = delta["type"] in {"content_delta", "thinking_delta", "input_json_delta"}
        if needs_start and event_id not in self._kinds:
            self.problems.append(f"a delta of {event_id}, which has not begun or is over: {delta}")
        if delta["type"] == "content_delta":
            self._shown[event_id] = self._shown.get(event_id, "") + delta["content"]["text"]
        elif delta["type"] == "thinking_delta":
            self._shown[event_id] = self._shown.get(event_id, "") + delta["thinking"]

    def _settle(self, event: Json) -> None:
        kind = event["type"]
        previewed = self._kinds.pop(event["id"], None)
        if previewed is not None:
            self._over.add(event["id"])
            same = "agent.tool_use" if kind in USES else kind
            if same != previewed:
                self.problems.append(f"{event['id']} was previewed as {previewed} and became {kind}")
            final = event.get("thinking") or "".join(block["text"] for block in event.get("content", ()))
            if kind not in USES and not final.startswith(self._shown[event["id"]]):
                self.problems.append(f"{event['id']} was shown as {self._shown[event['id']]!r}, is {final!r}")
        is_void = kind == "session.status_rescheduled" or event.get("is_error") is True
        if kind in {"span.model_request_end", "session.status_rescheduled", "session.status_idle"}:
            if self._kinds and not is_void:
                self.problems.append(f"{kind} leaves previews without an end: {self._kinds}")
            self._over |= set(self._kinds)
            self._kinds.clear()
