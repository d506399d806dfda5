"""Questions to the user: how answers are read, and a run that asks some."""

import json
from typing import Any

import pytest

from providers.types import TextBlock
from tests.support.loop_driver import ScriptedModel, agent, call, check, end, text, work
from tests.support.memory_hold import MemorySession
from tools.errors import AnswerRefused, InvalidArguments
from tools.questions import MAX_QUESTIONS, ask_user, read_answers
from tools.registry import ToolRegistry
from tools.types import Tool, ToolContext, ToolResult, text_result
from tools.validation import validate_arguments

COLOUR = {
    "question": "Which colour?",
    "header": "Colour",
    "options": [{"label": "Blue", "description": "As the sky."}, {"label": "Red"}],
    "allow_free_text": False,
}
EXTRAS = {
    "question": "Which extras?",
    "options": [{"label": "Bell"}, {"label": "Lamp"}],
    "multi_select": True,
}
NAME = {"question": "Whose is it?"}
ARGUMENTS: dict[str, Any] = {"questions": [COLOUR, EXTRAS, NAME]}


def told(answers: Any) -> str:
    content = (TextBlock(text=json.dumps({"answers": answers})),)
    (block,) = read_answers(ARGUMENTS, content)
    assert isinstance(block, TextBlock)
    return block.text


@pytest.mark.parametrize(
    "answers",
    [
        [" blue", ["lamp", "A basket"], "Ann's"],
        {"Colour": ["BLUE"], "which extras?": ["Lamp", "A basket"], "Whose is it?": "Ann's"},
    ],
)
def test_answers_in_order_or_by_name_are_told_with_their_questions(answers: Any) -> None:
    assert told(answers) == (
        "Which colour?\n→ Blue\n\nWhich extras?\n→ Lamp, A basket\n\nWhose is it?\n→ Ann's"
    )


@pytest.mark.parametrize("answers", [[], [None, " ", []], {}])
def test_what_is_left_out_is_told_as_not_answered(answers: Any) -> None:
    assert told(answers).count("(not answered)") == 3


@pytest.mark.parametrize(
    ("answers", "why"),
    [
        (["green"], "none of the options: Blue, Red"),
        (["blue", None, None, "more"], "4 answers to 3"),
        ({"Size": "L"}, "'Size' is neither"),
        ([1], "a string, a list of strings"),
    ],
)
def test_answers_to_nothing_and_beside_the_options_are_refused(answers: Any, why: str) -> None:
    with pytest.raises(AnswerRefused, match=why):
        told(answers)


@pytest.mark.parametrize("prose", ["green, please", "[1]", '{"colour": "blue"}', '{"answers": 3}', "{", ""])
def test_anything_else_is_passed_on_as_it_is(prose: str) -> None:
    content = (TextBlock(text=prose),)
    assert read_answers(ARGUMENTS, content) == content
    both = (TextBlock(text='{"answers": []}'), TextBlock(text="b"))
    assert read_answers(ARGUMENTS, both) == both


def test_one_call_holds_one_to_ten_questions() -> None:
    for count in (1, MAX_QUESTIONS):
        validate_arguments(ask_user.input_schema, {"questions": [NAME] * count})
    for count in (0, MAX_QUESTIONS + 1):
        with pytest.raises(InvalidArguments):
            validate_arguments(ask_user.input_schema, {"questions": [NAME] * count})


async def test_a_run_that_asks_waits_for_the_client_and_goes_on_with_the_answer() -> None:
    session = MemorySession(agent("ask_user", "look"))
    session.post("go")

    async def execute(_: Any, __: ToolContext) -> ToolResult:
        return text_result("seen")

    look = Tool(name="look", description="Looks.", input_schema={"type": "object"}, execute=execute)
    tools = ToolRegistry([ask_user, look])
    ask = call(0, "ask_user", json.dumps(ARGUMENTS))
    model = ScriptedModel([*ask, *call(1, "look"), *end()], text("thanks"))
    await work(session, model=model, tools=tools)
    (use,) = session.find_events("agent.custom_tool_use")
    assert (use["name"], use["input"]) == ("ask_user", ARGUMENTS)
    assert session.events[-1]["stop_reason"] == {"type": "requires_action", "event_ids": [use["id"]]}

    session.answer(use["id"], '{"answers": ["red"]}')
    await work(session, model=model, tools=tools)
    check(session)
    first, second = session.transcript()[2]["content"]
    assert first["content"][0]["text"].startswith("Which colour?\n→ Red\n")
    assert second["content"][0]["text"] == "seen"


async def test_a_plain_reply_is_the_result_of_every_open_question() -> None:
    session = MemorySession(agent("ask_user"))
    session.post("go")
    asks = [line for n in range(2) for line in call(n, "ask_user", json.dumps({"questions": [NAME]}))]
    model = ScriptedModel([*asks, *end()], text("thanks"))
    await work(session, model=model, tools=ToolRegistry([ask_user]))
    session.reply("Ann's, both.")
    await work(session, model=model, tools=ToolRegistry([ask_user]))
    check(session)
    told_to_model = [block["content"][0]["text"] for block in session.transcript()[2]["content"]]
    assert told_to_model == ["Ann's, both."] * 2
