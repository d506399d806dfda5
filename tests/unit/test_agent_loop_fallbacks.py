"""Fallback models and output schemas: which model is asked, with what, and what the log and ledger say."""

import pytest

from agents.config import AgentConfig
from providers.errors import (
    AuthRefused,
    ContextTooLong,
    Overloaded,
    ProviderError,
    QuotaExceeded,
    RequestRejected,
)
from providers.types import Capabilities, MessageStart, Provider, Stop, TextDelta
from tests.support.loop_driver import Answer, ScriptedModel, agent, call, check, end, text, work
from tests.support.memory_hold import MemorySession
from tools.builtin import builtin_registry

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}


async def played(
    config: AgentConfig, first: ScriptedModel, **fallbacks: ScriptedModel
) -> tuple[MemorySession, tuple[str, str | None]]:
    session = MemorySession(config)
    session.post("go")
    models: dict[str, Provider] = dict(fallbacks)
    await work(session, model=first, fallbacks=models, tools=builtin_registry())
    check(session)
    stop = session.runs[0].stop
    assert stop is not None
    return session, (stop.type, stop.code)


def asked(session: MemorySession) -> list[str]:
    return [event["model"] for event in session.find_events("span.model_request_start")]


@pytest.mark.parametrize("error", [QuotaExceeded("no credit"), AuthRefused("bad key")])
async def test_another_model_takes_over_when_the_first_fails_for_good(error: ProviderError) -> None:
    session, stop = await played(agent(), ScriptedModel([error]), second=ScriptedModel(text("hello")))
    assert stop == ("end_turn", None)
    assert asked(session) == ["fast", "second"]
    assert [row["model"] for row in session.ledger.values()] == ["fast", "second"]
    errors = [event["error"] for event in session.find_events("session.error")]
    assert [(told["code"], told["retry_status"]["type"]) for told in errors] == [(error.code, "retrying")]
    assert [event["attempt"] for event in session.find_events("span.model_request_start")] == [1, 2]


async def test_retries_come_first_and_each_model_has_its_own() -> None:
    busy: Answer = [MessageStart(), TextDelta(index=0, text="Hel"), Overloaded("busy")]
    session, stop = await played(
        agent(), ScriptedModel(busy), second=ScriptedModel(busy), third=ScriptedModel(busy, text("hello"))
    )
    assert stop == ("end_turn", None)
    assert asked(session) == ["fast"] * 4 + ["second"] * 4 + ["third"] * 2
    assert len(session.find_events("agent.message")) == 1


async def test_when_all_have_failed_the_last_error_closes_the_run() -> None:
    models = {name: ScriptedModel([AuthRefused(name)]) for name in ("second", "third")}
    session, stop = await played(agent(), ScriptedModel([QuotaExceeded("no credit")]), **models)
    assert stop == ("error", "provider_auth")
    assert asked(session) == ["fast", "second", "third"]


@pytest.mark.parametrize("error", [ContextTooLong("too long"), RequestRejected("wrong")])
async def test_a_request_that_is_at_fault_itself_is_not_sent_elsewhere(error: ProviderError) -> None:
    session, stop = await played(agent(), ScriptedModel([error]), second=ScriptedModel(text("hello")))
    assert stop == ("error", error.code)
    assert asked(session) == ["fast"]


async def test_a_model_that_took_over_keeps_the_run() -> None:
    first = ScriptedModel([QuotaExceeded("no credit")])
    calling = [MessageStart(), *call(0, "calculate", '{"expression": "1+1"}'), *end(Stop.TOOL_USE)]
    second = ScriptedModel(calling, text("done"))
    session, stop = await played(agent("calculate"), first, second=second)
    assert stop == ("end_turn", None)
    assert asked(session) == ["fast", "second", "second"]


async def test_a_fallback_model_that_lacks_what_the_agent_needs_is_passed_over() -> None:
    unable = ScriptedModel(text("never"), capabilities=Capabilities(tools=False))
    session, _ = await played(
        agent("calculate"),
        ScriptedModel([QuotaExceeded("no credit")]),
        unable=unable,
        able=ScriptedModel(text("hello")),
    )
    assert asked(session) == ["fast", "able"]
    assert unable.requests == []


async def test_extra_body_goes_to_the_api_that_it_was_made_for() -> None:
    other = ScriptedModel([QuotaExceeded("no credit")])
    other.api = "another"
    same = ScriptedModel(text("hello"))
    first = ScriptedModel([QuotaExceeded("no credit")])
    await played(agent(extra_body={"seed": 1}), first, other=other, same=same)
    sent = [model.requests[0].extra_body for model in (first, other, same)]
    assert sent == [{"seed": 1}, {}, {"seed": 1}]


async def test_a_schema_goes_with_each_request() -> None:
    model = ScriptedModel(text('{"city": "Rom"}'), capabilities=Capabilities(output_schema=True))
    _, stop = await played(agent(output_schema=SCHEMA), model)
    assert stop == ("end_turn", None)
    assert model.requests[0].output_schema == SCHEMA


async def test_a_schema_on_a_model_that_takes_none_is_refused_before_any_request() -> None:
    model = ScriptedModel(text("never"))
    session, stop = await played(agent(output_schema=SCHEMA), model)
    assert stop == ("error", "model_without_output_schema")
    assert model.requests == []
    assert not session.ledger
