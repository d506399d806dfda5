import re

import pytest

from providers.tool_names import ToolNames, wire_name

NAMES = [
    "calendar.list",
    "calendar_list",
    "a/b",
    "two words",
    "café",
    "x" * 68,
    "x" * 64,
    "",
    "9start",
    "GET:/patterns/{id}",
    "server.with.long.prefix." + "y" * 47,
    "server.with.long.prefix." + "y" * 48,
    "lone\ud800surrogate",
    "line\n",
]


def test_every_name_maps_to_a_legal_one_of_its_own_and_back() -> None:
    """P-12"""
    names = ToolNames(NAMES)
    wires = [names.to_wire(name) for name in NAMES]
    assert all(re.fullmatch(r"[a-zA-Z0-9_-]{1,64}", wire) for wire in wires)
    assert len(set(wires)) == len(NAMES)
    assert [names.from_wire(wire) for wire in wires] == NAMES


@pytest.mark.parametrize("name", ["calendar_list", "9start", "x" * 64, "-"])
def test_a_legal_name_stays_as_it_is(name: str) -> None:
    """P-12"""
    assert wire_name(name) == name


def test_the_mapping_is_the_same_in_every_process() -> None:
    """P-12"""
    assert wire_name("calendar.list") == "calendar_list_8fe73bc12f"


def test_order_and_company_of_tools_change_no_name() -> None:
    """P-12"""
    forwards, backwards, alone = ToolNames(NAMES), ToolNames(reversed(NAMES)), ToolNames(["a/b"])
    assert [forwards.to_wire(name) for name in NAMES] == [backwards.to_wire(name) for name in NAMES]
    assert alone.to_wire("a/b") == forwards.to_wire("a/b")


def test_a_tool_that_is_gone_keeps_its_name_in_old_history() -> None:
    """P-12"""
    assert ToolNames([]).to_wire("a/b") == ToolNames(["a/b"]).to_wire("a/b")


def test_a_tool_that_takes_the_name_made_for_another_does_not_shadow_it() -> None:
    """P-12"""
    taken = wire_name("a/b")
    names = ToolNames(["a/b", taken])
    assert names.to_wire(taken) == taken
    assert names.to_wire("a/b") != taken
    assert names.from_wire(names.to_wire("a/b")) == "a/b"


def test_a_tool_that_the_model_invents_keeps_its_name() -> None:
    assert ToolNames(["a/b"]).from_wire("nonsense") == "nonsense"
