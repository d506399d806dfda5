import pytest

from providers.tool_arguments import MAX_QUOTED_CHARS, read_arguments


@pytest.mark.parametrize("raw", [None, "", " ", "\n", "null", "{}", '"{}"'])
def test_nothing_means_an_empty_object(raw: str | None) -> None:
    assert read_arguments(raw) == ({}, None, None)


@pytest.mark.parametrize(
    "raw",
    [
        '{"a": tru]',
        "[1,2]",
        '"text"',
        "3",
        "true",
        '{"a":1}{"a":2}',
        '```json\n{"a":1}\n```',
        "{'a':1}",
        '{"a":1,}',
        '{"a": NaN}',
        '{"a": 1e999}',
        '{"a": ' + "1" * 5_000 + "}",
        '{"a":' * 65 + "1" + "}" * 65,
        "[" * 100_000,
    ],
)
def test_unreadable_arguments_give_a_reason_and_the_text(raw: str) -> None:
    read = read_arguments(raw)
    assert read.input == {}
    assert read.input_error
    assert read.input_raw == raw[:MAX_QUOTED_CHARS]


def test_an_object_encoded_twice_is_accepted() -> None:
    assert read_arguments('"{\\"a\\":1}"').input == {"a": 1}


def test_of_two_equal_keys_the_last_wins() -> None:
    assert read_arguments('{"a":1,"a":2}').input == {"a": 2}


def test_keys_and_strings_are_cleaned() -> None:
    read = read_arguments('{"a\\u0000b": "x\\u0000", "half": "\\ud83d", "pair": "\\ud83d\\ude42"}')
    assert read.input == {"a\ufffdb": "x\ufffd", "half": "\ufffd", "pair": "\N{SLIGHTLY SMILING FACE}"}
