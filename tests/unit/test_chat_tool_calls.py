"""Which fragments belong to one call, for the habits of all the servers."""

import itertools
from typing import Any

import pytest

from providers.chat_tool_calls import ToolCallAssembler
from providers.errors import BadPayload
from providers.types import ToolCallDelta, ToolCallEnd, ToolCallStart


def fragment(
    index: Any = None, *, call_id: Any = None, name: Any = None, arguments: Any = None
) -> dict[str, Any]:
    given: dict[str, Any] = {"function": {"name": name, "arguments": arguments}}
    if index is not None:
        given["index"] = index
    if call_id is not None:
        given["id"] = call_id
    return given


def assemble(*chunks: Any, is_cut: bool = False) -> tuple[list[Any], list[ToolCallEnd]]:
    assembler = ToolCallAssembler(next_index=itertools.count().__next__, agent_name=str)
    events = [event for chunk in chunks for event in assembler.feed(chunk)]
    return events, assembler.finish(is_cut=is_cut)


def names_and_inputs(*chunks: Any) -> list[tuple[str, dict[str, Any]]]:
    events, ends = assemble(*chunks)
    starts = [event for event in events if isinstance(event, ToolCallStart)]
    assert len({start.id for start in starts}) == len(starts), "ids are unique"
    assert all(start.id for start in starts)
    by_index = {end.index: end.input for end in ends}
    return [(start.name, by_index[start.index]) for start in starts]


def test_an_id_that_comes_on_the_first_fragment_only_is_one_call() -> None:
    events, ends = assemble(
        [fragment(0, call_id="c1", name="f", arguments="")],
        [fragment(0, arguments='{"a":')],
        [fragment(0, arguments="1}")],
    )
    assert events == [
        ToolCallStart(index=0, id="c1", name="f"),
        ToolCallDelta(index=0, json='{"a":'),
        ToolCallDelta(index=0, json="1}"),
    ]
    assert ends == [ToolCallEnd(index=0, input={"a": 1})]


def test_fragments_of_parallel_calls_may_alternate() -> None:
    assert names_and_inputs(
        [
            fragment(0, call_id="a", name="f", arguments='{"x"'),
            fragment(1, call_id="b", name="g", arguments='{"y"'),
        ],
        [fragment(1, arguments=":2}")],
        [fragment(0, arguments=":1}")],
    ) == [("f", {"x": 1}), ("g", {"y": 2})]


def test_another_id_and_name_open_a_call_although_the_index_is_always_0() -> None:
    assert names_and_inputs(
        [fragment(0, call_id="a", name="f", arguments="{}")],
        [fragment(0, call_id="b", name="g", arguments='{"y":')],
        [fragment(0, arguments="2}")],
    ) == [("f", {}), ("g", {"y": 2})]


def test_the_same_name_with_another_id_is_another_call() -> None:
    calls = names_and_inputs([fragment(0, call_id="a", name="f")], [fragment(0, call_id="b", name="f")])
    assert calls == [("f", {}), ("f", {})]


def test_id_and_name_repeated_in_each_fragment_are_one_call() -> None:
    pieces = ['{"a"', ":", '{"b":1}', "}", ""]
    chunks = [[fragment(0, call_id="a", name="get_weather", arguments=piece)] for piece in pieces]
    assert names_and_inputs(*chunks) == [("get_weather", {"a": {"b": 1}})]


def test_a_name_repeated_without_any_id_is_one_call() -> None:
    pieces = ["{", ' "city"', ': "Paris"', " }", ""]
    chunks = [[fragment(0, name="get_weather", arguments=piece)] for piece in pieces]
    assert names_and_inputs(*chunks) == [("get_weather", {"city": "Paris"})]


def test_calls_without_index_and_id_are_told_apart_by_their_whole_arguments() -> None:
    assert names_and_inputs(
        [fragment(name="f", arguments='{"a":1}'), fragment(name="f", arguments='{"a":2}')],
        [fragment(name="g", arguments='{"a":')],
        [fragment(arguments="3}")],
    ) == [("f", {"a": 1}), ("f", {"a": 2}), ("g", {"a": 3})]


def test_without_index_the_id_finds_its_call_again() -> None:
    assert names_and_inputs(
        [fragment(call_id="a", name="f", arguments='{"x":')],
        [fragment(call_id="b", name="g", arguments='{"y":')],
        [fragment(call_id="a", arguments="1}")],
        [fragment(call_id="b", arguments="2}")],
    ) == [("f", {"x": 1}), ("g", {"y": 2})]


def test_an_id_that_changes_within_a_call_does_not_split_it() -> None:
    assert names_and_inputs(
        [fragment(0, call_id="a", name="f", arguments='{"x":')], [fragment(0, call_id="b", arguments="1}")]
    ) == [("f", {"x": 1})]


@pytest.mark.parametrize("wire_id", [None, "", " "])
def test_calls_without_an_id_get_ids_of_their_own(wire_id: str | None) -> None:
    assert (
        len(
            names_and_inputs([fragment(0, call_id=wire_id, name="f"), fragment(1, call_id=wire_id, name="g")])
        )
        == 2
    )


def test_a_duplicate_id_is_replaced() -> None:
    events, _ = assemble([fragment(0, call_id="same", name="f"), fragment(1, call_id="same", name="g")])
    first, second = (event for event in events if isinstance(event, ToolCallStart))
    assert first.id == "same"
    assert second.id not in ("", "same")


def test_arguments_that_come_before_the_name_are_passed_on_with_it() -> None:
    events, ends = assemble(
        [fragment(0, call_id="a", arguments='{"x":')], [fragment(0, name="f", arguments="1}")]
    )
    assert events == [
        ToolCallStart(index=0, id="a", name="f"),
        ToolCallDelta(index=0, json='{"x":'),
        ToolCallDelta(index=0, json="1}"),
    ]
    assert ends[0].input == {"x": 1}


@pytest.mark.parametrize("arguments", ["", " ", "\n", "null", "{}", None, {}])
def test_no_arguments_mean_an_empty_object(arguments: Any) -> None:
    """P-08."""
    _, ends = assemble([fragment(0, call_id="a", name="f", arguments=arguments)])
    assert ends == [ToolCallEnd(index=0, input={})]


def test_arguments_may_be_an_object_instead_of_text() -> None:
    assert names_and_inputs([fragment(0, call_id="a", name="f", arguments={"x": [1]})]) == [("f", {"x": [1]})]


@pytest.mark.parametrize("arguments", ['{"a": tru]', "[1,2]", "3", '{"a":1}{"a":2}', "{'a':1}", '{"a":1,}'])
def test_unreadable_arguments_are_an_error_for_the_model(arguments: str) -> None:
    """P-09."""
    _, ends = assemble([fragment(0, call_id="a", name="f", arguments=arguments)])
    assert ends[0].input == {}
    assert ends[0].input_error
    assert ends[0].input_raw == arguments


def test_a_cut_message_ends_only_the_calls_that_are_whole() -> None:
    """P-06."""
    _, ends = assemble(
        [fragment(0, call_id="a", name="f", arguments='{"x":1}')],
        [fragment(1, call_id="b", name="g", arguments='{"y"')],
        [fragment(2, call_id="c", name="h", arguments="")],
        is_cut=True,
    )
    assert ends == [ToolCallEnd(index=0, input={"x": 1})]


def test_halves_of_a_surrogate_pair_in_two_fragments_are_joined() -> None:
    """H-07."""
    assert names_and_inputs(
        [fragment(0, call_id="a", name="f", arguments='{"x":"\ud83d')], [fragment(0, arguments='\ude42"}')]
    ) == [("f", {"x": "🙂"})]


def test_a_call_that_never_gets_a_name_is_a_bad_payload() -> None:
    with pytest.raises(BadPayload):
        assemble([fragment(0, call_id="a", arguments="{}")])


@pytest.mark.parametrize("junk", [None, {}, "x", [None], [1], [[]]])
def test_what_is_no_list_of_objects_is_ignored(junk: Any) -> None:
    assert assemble(junk) == ([], [])
