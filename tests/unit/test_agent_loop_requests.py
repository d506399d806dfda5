"""Requests to the model: retries, failures, refusals, limits, and what the ledger says of them."""

import asyncio

import pytest

from providers.errors import (
    AuthRefused,
    BadPayload,
    ConnectionLost,
    ContextTooLong,
    Overloaded,
    ProviderError,
    QuotaExceeded,
    RateLimited,
    StreamTruncated,
)
from providers.types import (
    Capabilities,
    MessageEnd,
    MessageStart,
    NativeBlocks,
    Stop,
    TextDelta,
    ThinkingDelta,
    ToolCallDelta,
    ToolCallEnd,
    ToolCallStart,
    Usage,
    UsageUpdate,
)
from tests.support.loop_driver import (
    Answer,
    ScriptedModel,
    agent,
    call,
    calls,
    check,
    client_tool,
    end,
    text,
    work,
    work_to_the_end,
)
from tests.support.memory_hold import MemoryHold, MemorySession
from tools.builtin import builtin_registry
from tools.registry import ToolRegistry


async def played(*answers: Answer, session: MemorySession | None = None) -> MemorySession:
    session = session or MemorySession(agent())
    session.post("go")
    await work_to_the_end(session, model=ScriptedModel(*answers), tools=ToolRegistry())
    check(session)
    return session


def stop_of(session: MemorySession) -> tuple[str, str | None]:
    stop = session.runs[0].stop
    assert stop is not None
    return stop.type, stop.code


def errors_of(session: MemorySession) -> list[tuple[str, str]]:
    errors = [event["error"] for event in session.find_events("session.error")]
    return [(error["code"], error["retry_status"]["type"]) for error in errors]


async def test_an_overload_before_any_content_is_retried_and_the_client_sees_one_answer() -> None:
    """P-01: the start of a message is not content."""
    session = await played([MessageStart(), Overloaded("busy")], text("one", " answer"))
    assert stop_of(session) == ("end_turn", None)
    assert len(session.find_events("agent.message")) == 1
    assert errors_of(session) == [("provider_overloaded", "retrying")]
    assert [event["attempt"] for event in session.find_events("span.model_request_start")] == [1, 2]
    assert [row["state"] for row in session.ledger.values()] == ["closed", "closed"]


async def test_retries_that_are_used_up_close_the_run_with_the_code_and_that_it_might_pass() -> None:
    """P-01, exhausted."""
    session = await played([MessageStart(), Overloaded("busy")])
    assert stop_of(session) == ("retries_exhausted", "provider_overloaded")
    assert errors_of(session) == [("provider_overloaded", "retrying")] * 3 + [
        ("provider_overloaded", "exhausted")
    ]
    assert len(session.ledger) == 4
    assert session.transcript()[-1]["role"] == "user"


async def test_a_wait_that_the_api_asks_for_is_kept() -> None:
    session = await played([RateLimited("slow down", retry_after_s=7.0)], text("ok"))
    assert stop_of(session) == ("end_turn", None)
    (slept_s,) = session.clock.slept
    assert slept_s >= 7.0


@pytest.mark.parametrize(
    "error", [QuotaExceeded("no credit"), AuthRefused("bad key"), ContextTooLong("too long")]
)
async def test_an_error_that_does_not_pass_is_not_retried(error: ProviderError) -> None:
    session = await played([error])
    assert stop_of(session) == ("error", error.code)
    assert errors_of(session) == [(error.code, "terminal")]
    assert len(session.ledger) == 1


async def test_the_words_of_the_provider_are_not_told_to_users() -> None:
    session = await played([AuthRefused("key sk-secret is wrong")])
    assert "sk-secret" not in str(session.events)


async def test_half_an_answer_is_void_when_it_is_asked_for_again() -> None:
    """Promise 8: the previews of the first attempt have no final event, its text is nowhere."""
    first: Answer = [MessageStart(), TextDelta(index=0, text="Half an ans"), ConnectionLost("reset")]
    session = await played(first, text("A whole answer."))
    assert [event["content"][0]["text"] for event in session.find_events("agent.message")] == [
        "A whole answer."
    ]
    assert session.transcript()[-1]["content"] == [{"type": "text", "text": "A whole answer."}]
    first_row = next(iter(session.ledger.values()))
    assert first_row["estimated"]
    assert first_row["error_code"] == "connection_lost"


TRUNCATED: list[Answer] = [
    [],
    [MessageStart(), UsageUpdate(usage=Usage(input_tokens=11, output_tokens=1))],
    [MessageStart(), TextDelta(index=0, text="Hel")],
    [MessageStart(), *call(0, "write", '{"path":"a"}')],
    [MessageStart(), ToolCallStart(index=0, id="t1", name="write")],
]


@pytest.mark.parametrize("answer", TRUNCATED)
async def test_an_answer_without_its_terminal_marker_is_retried_and_never_taken_for_one(
    answer: Answer,
) -> None:
    """P-03."""
    session = await played(answer, text("whole"))
    assert stop_of(session) == ("end_turn", None)
    assert errors_of(session) == [("stream_truncated", "retrying")]
    assert session.find_events("agent.tool_use") == []
    assert len(session.transcript()) == 2


@pytest.mark.parametrize("answer", TRUNCATED)
async def test_when_every_answer_is_truncated_the_text_of_the_last_is_kept_as_incomplete(
    answer: Answer,
) -> None:
    """P-03: no call of a truncated answer is executed, even if its JSON is complete."""
    session = await played([*answer, StreamTruncated("eof")])
    assert stop_of(session) == ("retries_exhausted", "stream_truncated")
    has_text = any(isinstance(line, TextDelta) for line in answer)
    assert [event["incomplete"] for event in session.find_events("agent.message")] == [True] * has_text
    assert session.find_events("agent.tool_use") == []
    for row in session.ledger.values():
        has_content = len(answer) > 1 and not isinstance(answer[-1], UsageUpdate)
        assert row["estimated"] == has_content
        if has_content:
            assert row["output_tokens"] >= 1


async def test_an_answer_that_is_no_answer_is_tried_twice_only() -> None:
    session = await played([BadPayload("<html>")])
    assert stop_of(session) == ("retries_exhausted", "bad_payload")
    assert len(session.ledger) == 2


async def test_tools_on_a_model_without_tools_are_refused_before_any_request() -> None:
    session = MemorySession(agent(client_tool("ask")))
    session.post("go")
    model = ScriptedModel(text("never"), capabilities=Capabilities(tools=False))
    await work_to_the_end(session, model=model)
    check(session)
    assert model.requests == []
    assert session.ledger == {}
    assert stop_of(session) == ("error", "model_without_tools")
    assert errors_of(session) == [("model_without_tools", "terminal")]
    assert session.find_events("prompt.withdrawn") != []


async def test_the_number_of_turns_is_bounded_over_all_holds() -> None:
    session = MemorySession(agent(client_tool("ask"), max_turns=2))
    session.post("go")
    model = ScriptedModel(calls("ask"))
    holds = await work_to_the_end(session, model=model)
    check(session)
    assert len(holds) == 3
    assert len(model.requests) == 2
    assert stop_of(session) == ("max_turns", None)


async def test_a_refusal_keeps_its_text_and_makes_none_of_its_calls() -> None:
    refused = [
        MessageStart(),
        TextDelta(index=0, text="I had better"),
        *call(1, "a"),
        ToolCallStart(index=2, id="half", name="a"),
        *end(Stop.REFUSAL),
    ]
    session = await played(refused, session=MemorySession(agent(client_tool("a"))))
    assert stop_of(session) == ("refusal", None)
    assert session.find_events("agent.custom_tool_use") == []
    assert session.transcript()[-1]["content"] == [{"type": "text", "text": "I had better"}]
    (ended,) = session.find_events("span.model_request_end")
    assert (ended["stop"], ended["error_code"], ended["is_error"]) == ("refusal", "refusal", True)


async def test_an_answer_that_the_output_limit_cut_is_kept_and_marked() -> None:
    session = await played(text("and then", stop=Stop.MAX_TOKENS))
    assert stop_of(session) == ("end_turn", None)
    assert session.find_events("agent.message")[0]["incomplete"]


@pytest.mark.parametrize(
    "deltas",
    [
        [],
        [TextDelta(index=0, text="")],
        [TextDelta(index=0, text="\n\n"), TextDelta(index=0, text=" ")],
        [ThinkingDelta(index=0, text="hm")],
    ],
)
async def test_an_answer_without_text_is_not_a_message_of_the_transcript(
    deltas: list[TextDelta | ThinkingDelta],
) -> None:
    """H-04: nothing blank is stored, shown or sent; thinking alone is no message."""
    session = MemorySession(agent())
    session.post("q1")
    model = ScriptedModel([MessageStart(), *deltas, *end()], text("here"))
    await work_to_the_end(session, model=model)
    assert stop_of(session) == ("end_turn", None)
    assert session.find_events("agent.message") == []
    session.post("q2")
    await work_to_the_end(session, model=model)
    check(session)
    assert [message.role for message in model.requests[1].messages] == ["user", "user"]


async def test_an_empty_result_of_a_tool_is_sent_and_not_dropped() -> None:
    """H-04."""
    session = MemorySession(agent(client_tool("touch")))
    session.post("go")
    model = ScriptedModel(calls("touch"), text("ok"))
    await work(session, model=model)
    session.answer(session.open_calls()[0].id, "")
    await work(session, model=model)
    assert [message.role for message in model.requests[1].messages] == ["user", "assistant", "tool"]


async def test_a_surrogate_pair_that_is_split_over_deltas_is_never_shown_half() -> None:
    """H-07, in text and in arguments."""
    answer = [
        MessageStart(),
        *(TextDelta(index=0, text=piece) for piece in ("hi \ud83d", "\ude42!", " end \ud83d")),
        ToolCallStart(index=1, id="c", name="ask"),
        ToolCallDelta(index=1, json='{"a":"\ud83d'),
        ToolCallDelta(index=1, json='\ude42"}'),
        ToolCallEnd(index=1, input={"a": "\ud83d\ude42"}),
        *end(Stop.TOOL_USE),
    ]
    session = MemorySession(agent(client_tool("ask")))
    session.post("go")
    await work_to_the_end(session, model=ScriptedModel(answer, text("ok")))
    check(session)
    deltas = [frame["delta"] for frame in session.frames if frame["type"] == "event_delta"]
    shown = "".join(delta["content"]["text"] for delta in deltas if delta["type"] == "content_delta")
    assert shown == "hi \U0001f642! end ok"
    arguments = "".join(delta["partial_json"] for delta in deltas if delta["type"] == "input_json_delta")
    assert arguments == '{"a":"\U0001f642"}'
    assert session.find_events("agent.message")[0]["content"][0]["text"] == "hi \U0001f642! end \ufffd"
    assert session.find_events("agent.custom_tool_use")[0]["input"] == {"a": "\U0001f642"}


async def test_nul_from_the_model_is_replaced_in_stream_and_store_alike() -> None:
    """H-05."""
    session = await played(text("a\x00b"))
    shown = [frame for frame in session.frames if frame.get("delta", {}).get("type") == "content_delta"]
    assert shown[0]["delta"]["content"]["text"] == "a\ufffdb"
    assert session.transcript()[-1]["content"][0]["text"] == "a\ufffdb"


async def test_signed_blocks_are_stored_as_they_came() -> None:
    native = NativeBlocks(api="rehearsal", model="fast", body=b'[{"signature":"a=="}]')
    session = await played(
        [MessageStart(), TextDelta(index=0, text="x"), MessageEnd(stop=Stop.END_TURN, native=native)]
    )
    assert session.messages[-1].message.native == native


# -- the ledger -----------------------------------------------------------------------------------------


async def test_running_totals_are_not_added_up() -> None:
    """A-06."""
    updates = [UsageUpdate(usage=Usage(input_tokens=11, output_tokens=n)) for n in (1, 5, 9, 9)]
    session = await played(
        [MessageStart(), TextDelta(index=0, text="a"), *updates, MessageEnd(stop=Stop.END_TURN)]
    )
    (row,) = session.ledger.values()
    assert (row["input_tokens"], row["output_tokens"], row["estimated"]) == (11, 9, False)


async def test_an_aborted_answer_is_one_ledger_row_with_estimated_output() -> None:
    """A-03: cancelled twice, and the finaliser runs too."""
    session = MemorySession(agent())
    session.post("go")

    async def cancel_twice() -> None:
        session.cancel("first")
        session.cancel("second")
        await asyncio.Event().wait()

    usage = Usage(input_tokens=11, output_tokens=1, cache_read_tokens=5)
    answer: Answer = [
        MessageStart(),
        UsageUpdate(usage=usage),
        TextDelta(index=0, text="one two three four five"),
        cancel_twice,
    ]
    await work_to_the_end(session, model=ScriptedModel(answer))
    check(session)
    (row,) = session.ledger.values()
    assert row["estimated"]
    assert (row["input_tokens"], row["cache_read_tokens"], row["output_tokens"]) == (11, 5, 6)
    assert row["cost_usd"] is not None
    assert stop_of(session) == ("cancelled", None)


async def test_what_a_provider_did_not_count_is_unknown_and_not_zero() -> None:
    session = await played([AuthRefused("no")])
    (row,) = session.ledger.values()
    assert row["input_tokens"] is None
    assert row["output_tokens"] is None
    assert row["cost_usd"] is None


async def test_a_call_that_had_only_begun_counts_as_output() -> None:
    session = await played([ToolCallStart(index=0, id="a", name="x"), AuthRefused("no")])
    (row,) = session.ledger.values()
    assert (row["estimated"], row["output_tokens"]) == (True, 1)


# -- prompts and hand-over ------------------------------------------------------------------------------


async def test_a_batch_of_prompts_is_one_run_and_later_batches_follow_in_order() -> None:
    session = MemorySession(agent())
    session.post("say: one", "say: two")
    session.post("say: three")
    session.post("say: four")
    await work_to_the_end(session)
    check(session)
    assert [run.state for run in session.runs] == ["closed"] * 3
    texts = [message["content"][0]["text"] for message in session.transcript()]
    assert texts == ["say: one", "say: two", "two", "say: three", "three", "say: four", "four"]


async def test_a_storm_of_prompts_delays_no_decision_for_good_and_loses_none() -> None:
    session = MemorySession(agent("calculate"))
    session.post('call: calculate {"expression": "6 * 7"}\n---\necho')

    def storm(hold: MemoryHold) -> None:
        for n in range(1, 12):
            hold.at("before_commit", n, lambda n=n: session.post(f"say: {n}"))  # type: ignore[misc]

    await work_to_the_end(session, prepare=storm, tools=builtin_registry())
    check(session)
    assert len(session.runs) == 12
    assert all(run.stop is not None and run.stop.type == "end_turn" for run in session.runs)
    texts = [event["content"][0]["text"] for event in session.find_events("agent.message")]
    assert texts[-11:] == [str(n) for n in range(1, 12)]


@pytest.mark.parametrize("n", range(6))
async def test_a_worker_that_goes_away_hands_over_between_two_steps_and_nothing_is_repeated(n: int) -> None:
    session = MemorySession(agent("calculate"))
    session.post('call: calculate {"expression": "6 * 7"}\n---\necho')

    def drain(hold: MemoryHold) -> None:
        hold.at("after_commit", n, lambda: setattr(hold, "is_draining", True))
        hold.is_draining = n == 0

    holds = await work_to_the_end(session, prepare=drain, tools=builtin_registry())
    check(session)
    assert stop_of(session) == ("end_turn", None)
    assert session.transcript()[-1]["content"][0]["text"] == "42"
    assert all(row["state"] == "closed" for row in session.ledger.values())
    assert len(session.find_events("span.tool_start")) == 1
    assert all(
        event["reason"] == "handed_over" for event in session.find_events("session.status_rescheduled")
    )
    assert len(holds) == (1 if n >= 4 else 2)


async def test_a_worker_that_goes_away_does_not_send_a_failed_request_again() -> None:
    session = MemorySession(agent())
    session.post("go")
    model = ScriptedModel([Overloaded("busy")], text("ok"))

    def drain(hold: MemoryHold) -> None:
        hold.at("after_commit", 2, lambda: setattr(hold, "is_draining", True))

    first = await work(session, model=model, prepare=drain)
    assert len(first.steps) == 2
    assert len(model.requests) == 1
    await work_to_the_end(session, model=model)
    check(session)
    assert stop_of(session) == ("end_turn", None)


async def test_an_adapter_that_cancels_itself_is_a_failure_and_not_a_lost_run() -> None:
    session = MemorySession(agent())
    session.post("go")
    with pytest.raises(RuntimeError):
        await work(session, model=ScriptedModel([asyncio.CancelledError()]))
