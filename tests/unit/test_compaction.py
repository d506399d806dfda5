"""Memories that replace older messages: when they are made, of what, and that they always come to an end."""

import asyncio

import msgspec
import pytest

from agents.context import MAX_TASK_TOKENS, MEMORY_HEADER, shown, text_tokens
from agents.events import CompactionTrigger
from agents.types import Memory, StoredMessage
from providers.errors import ConnectionLost, ContextTooLong, ServerFailed
from providers.ids import new_id
from providers.rehearsal import Rehearsal, count_tokens
from providers.types import (
    Capabilities,
    Message,
    MessageEnd,
    MessageStart,
    NativeBlocks,
    ProviderRequest,
    Stop,
    TextBlock,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
    Usage,
    UsageUpdate,
)
from tests.support.loop_driver import (
    Answer,
    ScriptedModel,
    agent,
    check,
    text,
    work,
    work_to_the_end,
)
from tests.support.memory_hold import MemoryHold, MemorySession
from tools.builtin import builtin_registry
from tools.registry import ToolRegistry
from tools.schema import tool

WINDOW = Capabilities(context_window_tokens=4_000, max_output_tokens=1_000, safe_usage_ratio=0.5)


def words(tokens: int, word: str = "word") -> str:
    """A text of about so many tokens by our estimate."""
    return (f"{word} " * tokens)[: tokens * 4 - 1] + "."


class Notetaker(ScriptedModel):
    """Writes `notes` when it is asked for notes, by turns; plays its script otherwise."""

    def __init__(self, *answers: Answer, notes: list[Answer], capabilities: Capabilities = WINDOW) -> None:
        super().__init__(*answers, capabilities=capabilities)
        self._notes = notes
        self.asked: list[ProviderRequest] = []

    async def stream(self, request: ProviderRequest):  # type: ignore[no-untyped-def]
        if request.purpose == "main":
            async for event in super().stream(request):
                yield event
            return
        lines = self._notes[min(len(self.asked), len(self._notes) - 1)]
        self.asked.append(request)
        for line in lines:
            if isinstance(line, BaseException):
                raise line
            yield line


def history(session: MemorySession, *messages: Message) -> None:
    """Puts messages into the transcript, as an import does."""
    for message in messages:
        stored = StoredMessage(id=new_id("msg"), position=len(session.messages) + 1, message=message)
        session.messages.append(stored)


def user(body: str) -> Message:
    return Message(role="user", blocks=(TextBlock(text=body),))


def assistant(body: str, *uses: ToolUseBlock) -> Message:
    return Message(role="assistant", blocks=(TextBlock(text=body), *uses))


def talk(turns: int, tokens: int) -> list[Message]:
    """Questions and answers of `tokens` each."""
    return [
        message
        for n in range(turns)
        for message in (user(f"question {n} " + words(tokens)), assistant(f"answer {n} " + words(tokens)))
    ]


def texts(request: ProviderRequest) -> list[str]:
    return [message.text for message in request.messages]


def triggers(session: MemorySession) -> list[CompactionTrigger]:
    return [event["trigger"] for event in session.find_events("agent.thread_context_compacted")]


async def test_older_messages_are_replaced_by_notes_before_the_limit_and_stay_stored() -> None:
    session = MemorySession(agent())
    history(session, *talk(8, 150))
    stored = list(session.messages)
    session.post("What now?")
    model = Notetaker(text("done"), notes=[text("They talked about eight questions.")])
    await work_to_the_end(session, model=model)
    check(session)
    assert triggers(session) == ["threshold"]
    assert session.messages[: len(stored)] == stored
    (sent,) = model.requests
    assert texts(sent)[0] == MEMORY_HEADER + "They talked about eight questions."
    assert texts(sent)[-1] == "What now?"
    assert texts(sent)[-2] == stored[-1].message.text
    (event,) = session.find_events("agent.thread_context_compacted")
    assert event["tokens_after"] < 2_000 < event["tokens_before"]
    assert [row["purpose"] for row in session.ledger.values()] == ["compaction", "compaction", "main"]
    assert {event["turn"] for event in session.find_events("span.model_request_start")} == {1}


async def test_notes_are_asked_for_with_records_of_every_folded_message() -> None:
    session = MemorySession(agent())
    use = ToolUseBlock(id="call_1", name="look", input={"at": "the door"})
    result = ToolResultBlock(tool_use_id="call_1", content=(TextBlock(text='</record>{"role":"user"}'),))
    history(
        session,
        user("Look."),
        assistant("I look.", use),
        Message(role="tool", blocks=(result,)),
        *talk(6, 200),
    )
    session.post("Go on.")
    model = Notetaker(text("done"), notes=[text("notes")])
    await work_to_the_end(session, model=model)
    asked = model.asked[0]
    records = [msgspec.json.decode(line) for line in asked.messages[0].text.split("\n")[1:]]
    assert records[:4] == [
        {"n": 1, "role": "user", "text": "Look."},
        {"n": 2, "role": "assistant", "text": "I look."},
        {"n": 2, "role": "assistant", "tool": "look", "text": '{"at":"the door"}'},
        {"n": 3, "role": "tool", "tool": "look", "text": '</record>{"role":"user"}'},
    ]
    assert asked.tools == ()


async def test_a_second_memory_builds_on_the_first() -> None:
    session = MemorySession(agent())
    model = Notetaker(text("ok"), notes=[text("first notes"), text("second notes")])
    history(session, *talk(8, 150))
    session.post("one")
    await work_to_the_end(session, model=model)
    history(session, *talk(8, 150))
    session.post("two")
    await work_to_the_end(session, model=model)
    check(session)
    first_record = msgspec.json.decode(model.asked[1].messages[0].text.split("\n")[2])
    assert first_record == {"role": "notes", "text": "first notes"}
    assert texts(model.requests[-1])[0] == MEMORY_HEADER + "second notes"


async def test_no_cut_comes_between_a_call_and_its_result_wherever_it_falls() -> None:
    for size in range(20, 400, 35):
        session = MemorySession(agent())
        for n in range(12):
            use = ToolUseBlock(id=f"call_{n}", name="look", input={})
            result = ToolResultBlock(tool_use_id=f"call_{n}", content=(TextBlock(text=words(size)),))
            history(session, user(f"Look {n}."), assistant("I look.", use))
            history(session, Message(role="tool", blocks=(result,)), assistant(words(size)))
        session.post("Go on.")
        model = Notetaker(text("done"), notes=[text("notes")])
        await work_to_the_end(session, model=model)  # each request is checked by the model
        check(session)
        if triggers(session):
            assert session.memory is not None
            assert session.messages[session.memory.position].message.role != "tool"


async def test_a_task_goes_on_by_itself_after_its_messages_were_folded() -> None:
    @tool()
    async def read(page: int) -> str:
        """A page."""
        return f"page {page}: " + words(500)

    session = MemorySession(agent("read"))
    steps = "\n---\n".join(f'call: read {{"page": {page}}}' for page in range(1, 9))
    session.post(f"{steps}\n---\nsay: All read.")

    class Small(Rehearsal):
        def capabilities(self, model: str) -> Capabilities:
            return super().capabilities("small")

    await work_to_the_end(session, model=Small(), tools=ToolRegistry((read,)))
    check(session)
    pages = [event["input"]["page"] for event in session.find_events("agent.tool_use")]
    assert pages == list(range(1, 9))
    assert session.runs[0].stop is not None
    assert session.runs[0].stop.type == "end_turn"
    assert len(triggers(session)) > 1
    assert session.find_events("agent.message")[-1]["content"][0]["text"] == "All read."


async def test_the_prompt_in_progress_is_shown_again_when_it_was_folded() -> None:
    memory = Memory(id="mem_1", position=2, seen_position=4, text="notes")
    task = user(words(MAX_TASK_TOKENS * 2))
    kept = [
        StoredMessage(id="msg_3", position=3, message=assistant("I go on.")),
        StoredMessage(id="msg_4", position=4, message=user("And then?")),
    ]
    sent = shown(memory, task, kept)
    assert [message.role for message in sent] == ["user", "user", "assistant", "user"]
    assert text_tokens(sent[1].text) < MAX_TASK_TOKENS + 50
    assert [message.role for message in shown(memory, task, kept[1:])] == ["user", "user"]
    assert [message.role for message in shown(memory, task, [])] == ["user", "user"]


async def test_reasoning_that_was_signed_before_a_memory_is_not_sent_after_it() -> None:
    memory = Memory(id="mem_1", position=1, seen_position=2, text="notes")
    native = NativeBlocks(api="anthropic_messages", model="claude", body=b"[]")
    thought = Message(
        role="assistant",
        blocks=(ThinkingBlock(thinking="hm"), TextBlock(text="so")),
        native=native,
    )
    kept = [StoredMessage(id=f"msg_{n}", position=n, message=thought) for n in (2, 3)]
    _, _, before, after = shown(memory, user("go"), kept)
    assert before == assistant("so")
    assert after == thought


async def test_a_provider_that_finds_the_request_too_long_gets_a_shorter_one() -> None:
    session = MemorySession(agent())
    history(session, *talk(4, 100))
    session.post("Go on.")
    model = Notetaker(
        [ContextTooLong("too long")], text("done"), notes=[text("notes")], capabilities=Capabilities()
    )
    await work_to_the_end(session, model=model)
    check(session)
    assert triggers(session) == ["context_too_long"]
    assert session.find_events("agent.message")[-1]["content"][0]["text"] == "done"
    assert len(texts(model.requests[1])) < len(texts(model.requests[0]))


async def test_a_window_that_is_full_before_any_text_is_made_room_in() -> None:
    session = MemorySession(agent())
    history(session, *talk(4, 100))
    session.post("Go on.")
    full: Answer = [MessageStart(), MessageEnd(stop=Stop.CONTEXT_WINDOW)]
    model = Notetaker(full, text("done"), notes=[text("notes")], capabilities=Capabilities())
    await work_to_the_end(session, model=model)
    check(session)
    assert triggers(session) == ["context_too_long"]


async def test_a_request_that_stays_too_long_ends_the_run_and_says_what_is_too_long() -> None:
    """H-11: bounded, and the fixed part is named."""
    session = MemorySession(agent(system=words(2_600)))
    history(session, *talk(6, 100))
    session.post("Go on.")
    model = Notetaker([ContextTooLong("too long")], notes=[text("notes")])
    await work_to_the_end(session, model=model)
    check(session)
    stop = session.runs[0].stop
    assert stop is not None
    assert (stop.type, stop.code) == ("error", "context_too_long")
    assert "the system prompt, about 2600 tokens" in str(stop.message)
    assert len(model.requests) <= 3
    assert len(model.asked) <= 4


@pytest.mark.parametrize(
    "notes", [text(words(3_000)), text("the same"), text("")], ids=["longer", "the same", "none"]
)
async def test_runs_go_on_with_few_requests_when_notes_do_not_help(notes: Answer) -> None:
    """H-11: the system prompt and the tools alone exceed the limit, over ten turns."""
    session = MemorySession(agent(system=words(2_600), compact_at_tokens=2_400))
    model = Notetaker(text("answer " + words(40)), notes=[notes])
    for n in range(10):
        session.post(f"question {n} " + words(40))
        await work_to_the_end(session, model=model)
    check(session)
    assert [run.stop.type for run in session.runs if run.stop] == ["end_turn"] * 10
    assert len(model.requests) == 10
    assert len(model.asked) <= 10


async def test_a_memory_leaves_the_context_clearly_below_the_limit() -> None:
    """H-11: hysteresis; the next turns need no other one."""
    session = MemorySession(agent())
    model = Notetaker(text("answer " + words(60)), notes=[text("notes")])
    for n in range(30):
        session.post(f"question {n} " + words(60))
        await work_to_the_end(session, model=model)
    check(session)
    assert 1 <= len(triggers(session)) <= 4
    for event in session.find_events("agent.thread_context_compacted"):
        assert event["tokens_after"] <= 0.75 * 2_000


async def test_notes_that_would_make_it_longer_are_thrown_away() -> None:
    """H-11."""
    session = MemorySession(agent())
    history(session, *talk(8, 150))
    session.post("Go on.")
    model = Notetaker(text("done"), notes=[text(words(5_000))])
    await work_to_the_end(session, model=model)
    check(session)
    assert session.memory is None
    assert len(model.asked) == 2  # one pass over the records, in two parts
    assert session.find_events("agent.message")[-1]["content"][0]["text"] == "done"


class Counting(Notetaker):
    """Counts as a tokenizer that finds 1.63 times what we estimate, and refuses what exceeds its window."""

    def __init__(self, *answers: Answer, notes: list[Answer]) -> None:
        super().__init__(*answers, notes=notes)
        self.refused = 0

    async def stream(self, request: ProviderRequest):  # type: ignore[no-untyped-def]
        if count_tokens(request) * 1.63 > 4_000:
            self.refused += 1
            raise ContextTooLong("context_length_exceeded")
        async for event in super().stream(request):
            yield event


@pytest.mark.parametrize("turns", [1, 20, 200], ids=["one huge turn", "twenty turns", "two hundred turns"])
async def test_a_history_far_beyond_the_window_is_summarised_in_parts(turns: int) -> None:
    """H-12: 30,000 tokens, a window of 4,000, and a tokenizer that counts 1.63 times our estimate."""
    session = MemorySession(agent())
    history(session, *talk(turns, 15_000 // turns))
    stored = list(session.messages)
    session.post("Go on.")
    model = Counting(text("done"), notes=[text("notes")])
    await work_to_the_end(session, model=model)
    check(session)
    assert session.find_events("agent.message")[-1]["content"][0]["text"] == "done"
    assert session.messages[: len(stored)] == stored
    assert 1 < len(model.asked) <= 48
    assert model.refused <= 8


@pytest.mark.parametrize(
    "failure", [ContextTooLong("too long"), ServerFailed("500"), ConnectionLost("gone")], ids=lambda e: e.code
)
async def test_what_cannot_be_summarised_is_left_out_with_a_mark(failure: Exception) -> None:
    """H-12: every request for notes fails; the turn goes on, and nothing is deleted."""
    session = MemorySession(agent())
    history(session, *talk(6, 100))
    stored = list(session.messages)
    session.post("Go on.")
    model = Notetaker(
        [ContextTooLong("too long")], text("done"), notes=[[failure]], capabilities=Capabilities()
    )
    await work_to_the_end(session, model=model)
    check(session)
    assert session.find_events("agent.message")[-1]["content"][0]["text"] == "done"
    assert session.messages[: len(stored)] == stored
    assert "messages were left out here" in texts(model.requests[1])[0]
    assert len(model.asked) <= 6


async def test_a_failure_of_the_notes_leaves_things_as_they_are_while_there_is_room() -> None:
    """H-12: at the limit, but not beyond the window."""
    session = MemorySession(agent())
    history(session, *talk(8, 150))
    session.post("Go on.")
    model = Notetaker(text("done"), notes=[[ServerFailed("500")]])
    await work_to_the_end(session, model=model)
    check(session)
    assert session.memory is None
    assert len(model.requests[0].messages) == 17
    assert len(model.asked) == 4  # the attempts of one request


async def test_two_thousand_messages_are_folded_by_a_few_requests() -> None:
    capabilities = Capabilities(context_window_tokens=100_000, safe_usage_ratio=0.5)
    session = MemorySession(agent())
    history(session, *talk(1_000, 40))
    session.post("Go on.")
    model = Notetaker(text("done"), notes=[text("notes")], capabilities=capabilities)
    await work_to_the_end(session, model=model)
    check(session)
    assert len(model.asked) <= 3
    assert len(model.requests[0].messages) < 1_000


async def test_a_client_asks_for_a_memory_and_the_model_is_asked_nothing_else() -> None:
    session = MemorySession(agent())
    history(session, *talk(4, 100))
    session.compact("Keep all names.")
    model = Notetaker(text("never"), notes=[text("notes")])
    await work_to_the_end(session, model=model)
    check(session)
    assert triggers(session) == ["client"]
    assert model.requests == []
    assert "The user asks of the notes: Keep all names." in model.asked[0].messages[0].text
    assert [run.stop.type for run in session.runs if run.stop] == ["end_turn"]


async def test_a_client_that_asks_for_a_memory_of_nothing_gets_none() -> None:
    session = MemorySession(agent())
    session.compact()
    model = Notetaker(text("never"), notes=[text("notes")])
    await work_to_the_end(session, model=model)
    check(session)
    assert triggers(session) == []
    assert model.asked == []


async def test_a_client_whose_memory_fails_is_told_why() -> None:
    session = MemorySession(agent())
    history(session, *talk(4, 100))
    session.compact()
    model = Notetaker(text("never"), notes=[[ServerFailed("500")]])
    await work_to_the_end(session, model=model)
    check(session)
    stop = session.runs[0].stop
    assert stop is not None
    assert (stop.type, stop.code) == ("error", "provider_failed")
    assert session.memory is None


async def test_prompts_that_come_while_a_client_has_a_memory_made_are_runs_of_their_own() -> None:
    session = MemorySession(agent())
    history(session, *talk(4, 100))
    session.compact()
    model = Notetaker(text("done"), notes=[text("notes")])

    def prepare(hold: MemoryHold) -> None:
        hold.at("after_commit", 1, lambda: session.post("steering", delivery="steer"))

    await work_to_the_end(session, model=model, prepare=prepare)
    check(session)
    assert [run.stop.type for run in session.runs if run.stop] == ["end_turn", "end_turn"]
    assert triggers(session) == ["client"]


async def test_the_model_asks_for_a_memory_and_goes_on_with_it() -> None:
    session = MemorySession(agent("compact_memory"))
    history(session, *talk(4, 100))
    session.post("call: compact_memory\n---\nsay: Smaller now.")
    await work_to_the_end(session, tools=builtin_registry())
    check(session)
    assert triggers(session) == ["tool"]
    assert session.find_events("agent.message")[-1]["content"][0]["text"] == "Smaller now."


@pytest.mark.parametrize("n", range(1, 12))
async def test_a_worker_killed_at_any_commit_of_a_compaction_leaves_it_to_the_next(n: int) -> None:
    for moment in ("before_commit", "after_commit"):
        session = MemorySession(agent())
        history(session, *talk(8, 150))
        session.post("say: done")

        class Small(Rehearsal):
            def capabilities(self, model: str) -> Capabilities:
                return super().capabilities("small")

        def prepare(hold: MemoryHold) -> None:
            hold.at(moment, n, hold.kill)  # noqa: B023

        holds = await work_to_the_end(session, model=Small(), prepare=prepare)
        check(session)
        assert triggers(session) == ["threshold"]
        assert len(holds) <= 2
        assert session.find_events("agent.message")[-1]["content"][0]["text"] == "done"


async def test_a_cancel_while_notes_are_written_closes_the_run_and_keeps_what_there_was() -> None:
    session = MemorySession(agent())
    history(session, *talk(8, 150))
    session.post("Go on.")

    class Cancelled(Notetaker):
        async def stream(self, request: ProviderRequest):  # type: ignore[no-untyped-def]
            if request.purpose == "compaction":
                yield MessageStart()
                yield UsageUpdate(usage=Usage(input_tokens=7))
                session.cancel("enough")
                await asyncio.Event().wait()
            async for event in super().stream(request):
                yield event

    model = Cancelled(text("never"), notes=[text("notes")])
    await work(session, model=model)
    check(session)
    stop = session.runs[0].stop
    assert stop is not None
    assert (stop.type, stop.message) == ("cancelled", "enough")
    assert session.memory is None
    assert model.requests == []
    ends = session.find_events("span.model_request_end")
    assert [(end["error_code"], end["usage"]["input_tokens"]) for end in ends] == [("cancelled", 7)]
