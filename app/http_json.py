"""Request bodies: read within limits, decoded strictly, cleaned once.

A handler names the struct of its body as its `data` parameter; `ApiRequest.json` does all the rest:

- JSON media types only, no content encoding, at most the server's limit of bytes (chunked bodies too);
- at most `MAX_DEPTH` levels, no NaN or infinity, valid UTF-8; a byte order mark is skipped, and of two equal
  keys the last counts;
- no conversion between types (`"0"` is no number), no unknown fields where the struct forbids them;
- NUL and lone surrogates become U+FFFD in free text and are refused, naming the field, everywhere else.

`refuse_nul` does the last of these for queries, of all routes.
"""

import asyncio
import json
import math
import re
from collections.abc import AsyncGenerator
from typing import Any
from urllib.parse import parse_qsl

import msgspec
from litestar import Request
from litestar.connection import ASGIConnection
from litestar.datastructures import State
from litestar.exceptions import InternalServerException
from litestar.handlers.base import BaseRouteHandler

from app.auth import Principal
from app.errors import BodyTooLarge, ClientGone, InvalidField, InvalidRequest, MediaTypeRefused
from providers.cleaning import MAX_DEPTH, clean_text

FREE_TEXT = frozenset(
    {"text", "system", "description", "content", "deny_message", "reason", "summary", "prompt"}
)
"""Fields whose text is repaired. In all others, and in keys, text that cannot be stored is refused."""

_THREAD_FROM_BYTES = 256 * 1024  # larger bodies would hold up the other requests of this process
_BOM = b"\xef\xbb\xbf"
_SURROGATE_ESCAPE = re.compile(rb"\\u[dD][89a-fA-F]")
_PATH = re.compile(r" - at `(?:key in )?\$\.?(.*)`$")
_UNKNOWN = re.compile(r"^Object contains unknown field `(.*)`$")


class ApiRequest(Request[Principal, Any, State]):
    """A request whose JSON is already the handler's `data` struct."""

    async def stream(self) -> AsyncGenerator[bytes, None]:
        try:
            async for piece in super().stream():
                yield piece
        except InternalServerException as error:
            raise ClientGone("The connection closed before the request had arrived.") from error

    async def json(self) -> Any:
        """Raises: MediaTypeRefused, InvalidRequest, InvalidField, BodyTooLarge."""
        check_json_media_type(self)
        field = self.route_handler.parsed_data_field
        kind = Any if field is None else field.annotation
        return await decode_body(await self.body(), kind)


def refuse_nul(connection: ASGIConnection[Any, Any, Any, Any], _: BaseRouteHandler) -> None:
    """A guard of the whole application: Postgres cannot hold NUL. Raises: InvalidRequest."""
    query: bytes = connection.scope["query_string"]
    if b"%00" not in query and b"\0" not in query:
        return
    for name, value in parse_qsl(query.decode("latin-1"), keep_blank_values=True):
        if "\0" in name or "\0" in value:
            field = clean_text(name)
            raise InvalidRequest(f"{field}: NUL cannot be part of a parameter.", field=field)


def check_json_media_type(request: Request[Any, Any, Any]) -> None:
    """Raises: MediaTypeRefused."""
    check_no_encoding(request)
    media_type, _ = request.content_type
    if media_type != "application/json" and not (
        media_type.startswith("application/") and media_type.endswith("+json")
    ):
        raise MediaTypeRefused("Send the body as `Content-Type: application/json`.")


def check_no_encoding(request: Request[Any, Any, Any]) -> None:
    """Raises: MediaTypeRefused."""
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding not in ("", "identity"):
        raise MediaTypeRefused("Send the body without `Content-Encoding`.")


async def read_limited(request: Request[Any, Any, Any], limit_bytes: int) -> bytes:
    """The whole body. Raises: BodyTooLarge as soon as it is longer than `limit_bytes`."""
    body = bytearray()
    async for piece in request.stream():
        body += piece
        if len(body) > limit_bytes:
            raise BodyTooLarge(f"The body is longer than {limit_bytes} bytes.")
    return bytes(body)


async def decode_body(body: bytes, kind: Any) -> Any:
    """A value of type `kind`. Raises: InvalidRequest, InvalidField."""
    if len(body) > _THREAD_FROM_BYTES:
        return await asyncio.to_thread(decode_json, body, kind)
    return decode_json(body, kind)


def decode_json(body: bytes, kind: Any) -> Any:
    """As `decode_body`, in this thread."""
    try:
        return msgspec.convert(_cleaned(_parsed(body.removeprefix(_BOM)), "", MAX_DEPTH), kind)
    except msgspec.ValidationError as error:
        raise invalid_field(error) from error


def invalid_field(error: msgspec.ValidationError) -> InvalidField:
    """Our error for one of msgspec: the field's path apart from what is wrong with it."""
    message = str(error)
    path = _PATH.search(message)
    field, message = (path[1], message[: path.start()]) if path else ("", message)
    if unknown := _UNKNOWN.match(message):
        field = f"{field}.{unknown[1]}" if field else unknown[1]
        return InvalidField(f"{field}: there is no such field.", field=field)
    return InvalidField(f"{field}: {message}." if field else f"{message}.", field=field or None)


def _parsed(body: bytes) -> Any:
    """The JSON value, possibly with lone surrogates and 1000 levels deep, never with NaN."""
    try:
        return msgspec.json.decode(body)
    except RecursionError as error:
        raise _too_deep() from error
    except msgspec.DecodeError as error:
        if not _SURROGATE_ESCAPE.search(body):
            raise InvalidRequest(_reason(error)) from error
    # Browsers send lone surrogates as escapes; only the slow decoder lets them through.
    try:
        return json.loads(body.decode(), parse_constant=_refuse_constant)
    except RecursionError as error:
        raise _too_deep() from error
    except ValueError as error:
        raise InvalidRequest(f"The body is not JSON: {error}.") from error


def _reason(error: msgspec.DecodeError) -> str:
    if isinstance(error, msgspec.ValidationError):  # a number that no float can hold
        return f"The body is not usable: {str(error).partition(' - at')[0]}."
    return f"The body is not JSON: {str(error).removeprefix('JSON is malformed: ')}."


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON number")


def _cleaned(value: Any, path: str, depth: int) -> Any:
    if isinstance(value, str):
        return _cleaned_text(value, path)
    if isinstance(value, list):
        _check_depth(depth)
        return [_cleaned(item, f"{path}[{index}]", depth - 1) for index, item in enumerate(value)]
    if isinstance(value, dict):
        _check_depth(depth)
        return {
            _clean_key(key, path): _cleaned(item, f"{path}.{key}" if path else key, depth - 1)
            for key, item in value.items()
        }
    if isinstance(value, float) and not math.isfinite(value):
        raise InvalidRequest(f"{path}: the number is too large.", field=path)
    return value


def _cleaned_text(text: str, path: str) -> str:
    cleaned = clean_text(text)
    if cleaned != text and path.rpartition(".")[2].partition("[")[0] not in FREE_TEXT:
        raise InvalidField(f"{path}: NUL and lone surrogates cannot be stored.", field=path)
    return cleaned


def _clean_key(key: str, path: str) -> str:
    if clean_text(key) != key:
        place = f"{path}.{clean_text(key)}" if path else clean_text(key)
        raise InvalidField(f"{place}: NUL and lone surrogates cannot be stored in a key.", field=place)
    return key


def _check_depth(depth: int) -> None:
    if depth == 0:
        raise _too_deep()


def _too_deep() -> InvalidRequest:
    return InvalidRequest(f"The body is nested deeper than {MAX_DEPTH} levels.")
