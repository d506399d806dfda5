"""Whether a session kept its promises, by what Postgres, the readers, the tools and the clients say."""

import asyncio
import contextlib
import json
import traceback
from collections import Counter, defaultdict
from typing import Any

import msgspec

from agents.transcript import repaired
from db.errors import DatabaseError
from db.ids import public, to_uuid
from db.sweeping import MAX_TAKEOVERS, MAX_TAKEOVERS_SINCE_PROGRESS
from providers.types import Block, Message, TextBlock, ToolResultBlock
from tests.support.chaos.acts import TOOL_NAMES, Desk
from tests.support.chaos.answering import named_in
from tests.support.chaos.stage import FALSE_KEY, LEASE_S, SWEEP_S, Stage
from tests.support.fleet import eventually
from tests.support.provider_rules import refusals
from tests.support.visit import Visit

SETTLED_S = 40.0  # for all runs of a round to close, the last fault included
LOOK_S = 0.1
MEMORY_MADE = "agent.thread_context_compacted"
SLACK_S = 4.0  # a stopped process may hold a lock for 2 s; the rest is for a busy machine

_blocks = msgspec.json.Decoder(tuple[Block, ...])


async def settled(visit: Visit) -> None:
    """Returns when nothing is open for the tenant. Raises: TimeoutError."""

    async def is_settled() -> bool:
        try:
            return not await visit.value(
                "SELECT (SELECT count(*) FROM runs WHERE tenant_id = $1 AND state <> 'closed')"
                " + (SELECT count(*) FROM prompts WHERE tenant_id = $1 AND state = 'pending')",
                visit.tenant_id,
            )
        except DatabaseError:
            return False

    await eventually(is_settled, "the close of all runs", patience_s=SETTLED_S)


class LeaseWatch:
    """Looks all the time whether a run stands as running with nobody working on it for too long."""

    def __init__(self, visit: Visit) -> None:
        self.problems: set[str] = set()
        self.longest_s = 0.0
        self._visit = visit
        self._task = asyncio.create_task(self._look_for_ever())

    async def aclose(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _look_for_ever(self) -> None:
        while True:
            with contextlib.suppress(DatabaseError):
                await self._look()
            await asyncio.sleep(LOOK_S)

    async def _look(self) -> None:
        """How long a run has been without a lease while there was somebody who could have taken it back."""
        async with self._visit.database.transaction() as tx:
            rows = await tx.fetch(
                """
                SELECT runs.id, extract(epoch FROM clock_timestamp() - greatest(workers.lease_until, (
                    SELECT min(steady_since) FROM workers other WHERE lease_until > clock_timestamp()
                )))::float8 AS alone_s
                FROM runs JOIN workers ON workers.id = runs.worker_id
                WHERE runs.tenant_id = $1 AND state = 'running' AND workers.lease_until < clock_timestamp()
                AND EXISTS (SELECT FROM workers other WHERE lease_until > clock_timestamp())
                """,
                self._visit.tenant_id,
            )
        for row in rows:
            self.longest_s = max(self.longest_s, row["alone_s"])
            if row["alone_s"] > LEASE_S + SWEEP_S + SLACK_S:
                self.problems.add(f"{row['id']} was running with nobody for {row['alone_s']:.1f} s")


class Evidence:
    """All that is known of one session when its runs have closed."""

    def __init__(self, stage: Stage, desk: Desk) -> None:
        self.stage = stage
        self.desk = desk
        self.events: list[Any] = []
        self.runs: list[Any] = []
        self.prompts: list[Any] = []
        self.calls: list[Any] = []
        self.ledger: list[Any] = []
        self.memories: list[Any] = []
        self.messages: list[Message] = []
        self.seen: list[Message] = []  # by the model: without what was rolled back

    async def problems(self) -> list[str]:
        """What was broken; empty when all is well."""
        await self._read()
        found = [
            *self._prompt_problems(),
            *self._run_problems(),
            *self._transcript_problems(),
            *self._call_problems(),
            *self._answer_problems(),
            *self._ledger_problems(),
            *self._secret_problems(),
        ]
        try:
            await self.desk.visit.checked(self.desk.session_id, runs=len(self.runs))
        except (AssertionError, TimeoutError) as error:
            found.append(described(error))
        return [f"{self.desk.session_id}: {problem}" for problem in found]

    def exhibits(self) -> dict[str, str]:
        """The session's log and what its readers were shown, a line for each event."""
        name = self.desk.session_id
        readers = [each for each in self.desk.visit.followers if each.session_id == name]
        shown = {
            f"{name}-reader-{at}.txt": "\n".join(f"{event.id} {event.data}" for event in reader.events)
            for at, reader in enumerate(readers)
        }
        return {f"{name}-log.txt": "\n".join(map(json.dumps, self.events)), **shown}

    async def _read(self) -> None:
        visit, session_id = self.desk.visit, self.desk.session_id
        self.events = [json.loads(event.json) for event in await visit.log(session_id)]
        for follower in visit.followers:
            if follower.session_id == session_id:
                follower.stop_at(len(self.events))
        async with visit.database.transaction() as tx:
            self.runs, self.prompts, self.calls, self.ledger, self.memories, messages = [
                await tx.fetch(
                    f"SELECT * FROM {table} WHERE session_id = $1 ORDER BY {order}", to_uuid(session_id)
                )
                for table, order in (
                    ("runs", "queued_at"),
                    ("prompts", "seq"),
                    ("tool_calls", "position, index"),
                    ("usage_entries", "opened_at"),
                    ("memories", "created_at"),
                    ("messages", "position"),
                )
            ]
        self.seen = [
            Message(role=row["role"], blocks=_blocks.decode(row["blocks"]))
            for row in messages
            if row["rolled_back_at"] is None
        ]
        self.messages = [Message(role=row["role"], blocks=_blocks.decode(row["blocks"])) for row in messages]

    # -- promise 1: what was acknowledged is stored, and run or withdrawn -------------------------------

    def _prompt_problems(self) -> list[str]:
        found = []
        states = {public("evt", row["id"]): row["state"] for row in self.prompts}
        said = Counter(
            event["content"][0]["text"] for event in self.events if event["type"] == "user.message"
        )
        withdrawn = {event["prompt_id"] for event in self.events if event["type"] == "prompt.withdrawn"}
        heard = Counter(
            block.text
            for message in self.messages
            if message.role == "user"
            for block in message.blocks
            if isinstance(block, TextBlock)
        )
        for prompt_id, text in self.desk.acknowledged.items():
            state = states.get(prompt_id)
            if said[text] != 1:
                found.append(f"the prompt {prompt_id} stands in the log {said[text]} times")
            if state not in {"applied", "withdrawn"}:
                found.append(f"the prompt {prompt_id} is {state}")
            if (state == "withdrawn") != (prompt_id in withdrawn):
                found.append(f"the prompt {prompt_id} is {state}, the log says something else")
            if heard[text] != (state == "applied"):
                found.append(f"the prompt {prompt_id}, {state}, is in the transcript {heard[text]} times")
        taken = self.desk.acknowledged.keys() | self.desk.replies
        if states.keys() != taken:
            found.append(f"prompts that nobody knows of, or that are gone: {states.keys() ^ taken}")
        return found

    # -- promise 9: a run closes exactly once -----------------------------------------------------------

    def _run_problems(self) -> list[str]:
        found = []
        closes: dict[str, list[Any]] = defaultdict(list)
        for event in self.events:
            if event["type"] == "session.status_idle" and event["stop_reason"]["type"] != "requires_action":
                closes[event["run_id"]].append(event["stop_reason"])
        for row in self.runs:
            run_id = public("run", row["id"])
            stops = closes.pop(run_id, [])
            if len(stops) != 1 or row["state"] != "closed":
                found.append(f"{run_id} is {row['state']} and was closed by {stops}")
            found += [f"{run_id} closed with {stop}" for stop in stops if not _is_expected(stop, row)]
        if closes:
            found.append(f"closes of unknown runs: {dict(closes)}")
        return found

    # -- promise 2: the transcript is valid for every provider ------------------------------------------

    def _transcript_problems(self) -> list[str]:
        found = refusals(self.seen, TOOL_NAMES)
        if repaired(self.seen) != tuple(self.seen):
            found.append("the stored transcript needs repair")
        for row in self.memories:
            after = self.messages[row["position"] : row["position"] + 1]
            if after and after[0].role == "tool":
                found.append(f"a memory parts the call at {row['position']} from its result")
        told = [event["memory_id"] for event in self.events if event["type"] == MEMORY_MADE]
        if told != [public("mem", row["id"]) for row in self.memories]:
            found.append(f"memories: {[row['id'] for row in self.memories]}, the log has {told}")
        return found

    # -- promise 7: a finished call never runs again ----------------------------------------------------

    def _call_problems(self) -> list[str]:
        found = []
        begun: dict[str, list[float]] = defaultdict(list)
        done: Counter[str] = Counter()
        path = self.stage.fleet.tools / f"{self.desk.session_id}.log"
        for line in path.read_text().splitlines() if path.exists() else []:
            what, key, _, at_s = line.split()
            if what == "begun":
                begun[key].append(float(at_s))
            else:
                done[key] += 1
        for row in self.calls:
            key = public("evt", row["id"])
            name, outcome = f"{row['name']} {key}", row["outcome"]
            if row["state"] != "done":
                found.append(f"{name} is {row['state']}")
            if row["name"] not in {"charge", "pay", "look_up", "refuse"}:
                continue
            if not row["idempotent"] and len(begun[key]) > 1:
                found.append(f"{name} was begun {len(begun[key])} times")
            if outcome == "denied" and begun[key]:
                found.append(f"{name} was denied, and executed")
            if outcome == "ok" and not done[key]:
                found.append(f"{name} has a result, but never ended")
            if row["finished_at"] is not None:
                late = [at for at in begun[key] if at > row["finished_at"].timestamp()]
                found += [f"{name} was begun when it had its result, {outcome}"] * len(late)
        strange = begun.keys() - {public("evt", row["id"]) for row in self.calls}
        return found + [f"executed without a call: {key}" for key in strange]

    # -- promises 1 and 7: what was accepted as an answer is the call's result, and nothing else is ------

    def _answer_problems(self) -> list[str]:
        found = []
        logged: dict[str, list[str]] = defaultdict(list)
        for event in self.events:
            if event["type"] == "user.custom_tool_result":
                logged[event["custom_tool_use_id"]] += [block["text"] for block in event["content"]]
        heard: dict[str, list[str]] = defaultdict(list)
        for block in (block for message in self.messages for block in message.blocks):
            if isinstance(block, ToolResultBlock):
                heard[block.tool_use_id] += [one.text for one in block.content if isinstance(one, TextBlock)]
        for row in self.calls:
            key = public("evt", row["id"])
            text = self.desk.accepted.get(key)
            if logged[key] != ([] if text is None else [text]):
                found.append(f"{row['name']} {key}: {text!r} was accepted, the log says {logged[key]}")
            if text is None and row["outcome"] == "ok" and row["kind"] != "server":
                found.append(f"{row['name']} {key} has a result that nobody gave")
            results = heard[row["tool_use_id"]]
            if text is not None and (len(results) != 1 or named_in(text) not in results[0]):
                found.append(f"{row['name']} {key}: {text!r} was accepted, the model was told {results}")
        strange = self.desk.accepted.keys() - {public("evt", row["id"]) for row in self.calls}
        return found + [f"accepted for no call: {key}" for key in strange]

    # -- promise 11: every request is in the ledger once ------------------------------------------------

    def _ledger_problems(self) -> list[str]:
        found = []
        left = self.stage.requests()[self.desk.session_id]
        # One that was cancelled just before it left has an entry too.
        answered = sum(row["state"] == "closed" and row["error_code"] is None for row in self.ledger)
        if not answered <= left <= len(self.ledger):
            found.append(f"{left} requests left; {answered} were answered of {len(self.ledger)} entries")
        found += [
            f"the ledger entry {row['id']} is {row['state']}" for row in self.ledger if row["state"] == "open"
        ]
        return found

    # -- promise 15: nothing secret leaves --------------------------------------------------------------

    def _secret_problems(self) -> list[str]:
        text = json.dumps(self.events)
        secrets = (self.desk.visit.key, FALSE_KEY, self.stage.fleet.database_url)
        return [f"the log holds {secret[:6]}…" for secret in secrets if secret in text]


def described(error: BaseException) -> str:
    """What went wrong, and in which line: a bare `assert` says nothing by itself."""
    frames = traceback.extract_tb(error.__traceback__)
    where = " < ".join(f"{frame.name}:{frame.lineno} {frame.line}" for frame in reversed(frames[-2:]))
    return f"{type(error).__name__} {error} ({where})"


def _is_expected(stop: Any, run: Any) -> bool:
    if stop["type"] in {"end_turn", "cancelled"} or stop.get("code") in {"request_rejected", "not_answered"}:
        return True
    # Nobody is to blame for a run whose workers were lost again and again.
    is_poison: bool = run["takeovers_since_progress"] + 1 >= MAX_TAKEOVERS_SINCE_PROGRESS
    return stop.get("code") == "worker_lost" and (is_poison or run["takeovers"] + 1 >= MAX_TAKEOVERS)
