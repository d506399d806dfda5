"""What a request body may look like, whatever route it is for."""

from typing import Any

import pytest
from msgspec import Struct

from app.errors import ApiError, InvalidField, InvalidRequest
from app.http_json import decode_body, decode_json
from providers.cleaning import MAX_DEPTH


class Body(Struct, forbid_unknown_fields=True):
    name: str = ""
    text: str = ""
    prompt: str | list[Any] = ""
    count: int = 0
    flag: bool = False
    metadata: dict[str, Any] = {}


def _nested(levels: int) -> bytes:
    return b'{"metadata":{"x":' + b"[" * (levels - 2) + b"]" * (levels - 2) + b"}}"


def test_text_of_a_user_is_repaired() -> None:
    """H-05."""
    assert (
        decode_json(b'{"text":"a\\u0000b\\ud83d"}', Body).text
        == "a\N{REPLACEMENT CHARACTER}b\N{REPLACEMENT CHARACTER}"
    )


def test_prompt_is_repaired_as_text_and_in_blocks() -> None:
    assert decode_json(b'{"prompt":"\\u0000"}', Body).prompt == "\N{REPLACEMENT CHARACTER}"
    blocks = decode_json(b'{"prompt":[{"text":"\\u0000"}]}', Body).prompt
    assert blocks == [{"text": "\N{REPLACEMENT CHARACTER}"}]


def test_surrogate_pairs_are_one_character() -> None:
    assert decode_json(b'{"name":"\\ud83d\\ude42"}', Body).name == "\N{SLIGHTLY SMILING FACE}"


@pytest.mark.parametrize(
    ("body", "field"),
    [
        (b'{"name":"a\\u0000b"}', "name"),
        (b'{"name":"\\udc00"}', "name"),
        (b'{"metadata":{"k":["\\u0000"]}}', "metadata.k[0]"),
        (b'{"metadata":{"a\\u0000":1}}', "metadata.a\N{REPLACEMENT CHARACTER}"),
        (b'{"nope":1}', "nope"),
        (b'{"count":"1"}', "count"),
        (b'{"flag":"0"}', "flag"),
        (b'{"flag":0}', "flag"),
        (b'{"count":1.5}', "count"),
        (b'{"metadata":[]}', "metadata"),
    ],
)
def test_field_that_cannot_be_used_is_named(body: bytes, field: str) -> None:
    """H-05: names, titles, keys and metadata are refused, not repaired."""
    with pytest.raises(InvalidField) as refused:
        decode_json(body, Body)
    assert refused.value.field == field
    assert field in str(refused.value)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[" * 20_000 + b"]" * 20_000,
        b'{"metadata":{"x":' + b"[" * 20_000,
        b'{"text":"\\ud800","metadata":' + b"[" * 20_000 + b"]" * 20_000 + b"}",
        b'{"text":"\xff"}',
        b'{"text":"\xed\xa0\xbd"}',
        b'{"metadata":{"x":1e999}}',
        b'{"metadata":{"x":NaN}}',
        b'{"metadata":{"x":-Infinity}}',
        b'{"text":"\\ud800","metadata":{"x":NaN}}',
        b'{"text":"\\ud800","metadata":{"x":1e999}}',
        b'{"text":"\\ud800","count":' + b"9" * 10_000 + b"}",
        b'{"text":"a\x00b"}',
        _nested(MAX_DEPTH + 1),
    ],
)
def test_body_that_is_not_json_is_refused(body: bytes) -> None:
    """S-14."""
    with pytest.raises(InvalidRequest):
        decode_json(body, Body)


@pytest.mark.parametrize("body", [b"[]", b'"text"', b"1", b"null"])
def test_body_of_another_kind_is_refused(body: bytes) -> None:
    with pytest.raises(ApiError):
        decode_json(body, Body)


def test_nesting_up_to_the_limit_is_taken() -> None:
    assert decode_json(_nested(MAX_DEPTH), Body).metadata["x"] is not None


def test_byte_order_mark_is_skipped() -> None:
    assert decode_json(b'\xef\xbb\xbf{"name":"a"}', Body).name == "a"


def test_of_two_equal_keys_the_last_counts() -> None:
    assert decode_json(b'{"name":"a","name":"b"}', Body).name == "b"


async def test_large_body_means_the_same_as_a_small_one() -> None:
    text = "x" * 1_000_000
    assert (await decode_body(b'{"text":"' + text.encode() + b'"}', Body)).text == text
