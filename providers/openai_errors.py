"""Errors of the OpenAI-shaped APIs, in an HTTP answer and in the middle of a stream."""

from collections.abc import Mapping
from datetime import datetime
from typing import Any

import msgspec

from providers.errors import ProviderError, RequestRejected, UnclassifiedRejection
from providers.http_errors import error_class, log_message, parse_retry_after

# Inside a stream the status is 200, and the code says what it would have been. Codes of the Responses API,
# of Chat Completions and of OpenRouter. Source: openai SDK 3.57 and openrouter 1.3 types, read 2026-11-30.
_STATUS_OF_CODE: Mapping[str, int] = {
    "authentication_error": 401,
    "invalid_api_key": 401,
    "authentication": 401,
    "payment_required": 402,
    "permission_error": 403,
    "permission_denied": 403,
    "model_not_found": 404,
    "not_found_error": 404,
    "not_found": 404,
    "timeout": 504,
    "rate_limit_error": 429,
    "rate_limit_exceeded": 429,
    "requests": 429,
    "tokens": 429,
    "provider_overloaded": 529,
    "overloaded": 529,
    "provider_unavailable": 503,
    "server": 500,
    "server_error": 500,
    "internal_server_error": 500,
    "api_error": 500,
    "refusal": 400,
    "bio_policy": 400,
    "cyber_policy": 400,
    "misalignment_policy_violation": 400,
    "content_filter": 400,
    "content_policy_violation": 400,
    "bad_request": 400,
    "failed_to_download_image": 400,
    "unsupported_image_media_type": 400,
}
_REQUEST_ID_HEADERS = ("x-request-id", "x-generation-id", "x-litellm-call-id")
_REJECTED_PREFIXES = ("invalid_", "image_", "empty_image")


def http_error(
    status: int,
    headers: Mapping[str, str],
    body: bytes,
    *,
    now: datetime,
    secrets: tuple[str, ...],
    is_proxy: bool = False,
) -> ProviderError:
    """The error for an answer with a status of 400 or more. `headers` find lower-case names.

    `is_proxy`: a refusal of it that has no code but its status is one that it could not classify.
    """
    try:
        decoded: Any = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        decoded = body.decode("utf-8", "replace")
    codes, message = _codes_and_message(decoded)
    kind = error_class(status, codes=codes, message=message)
    if is_proxy and kind is RequestRejected and set(codes) <= {str(status), "None"}:
        kind = UnclassifiedRejection
    return kind(
        log_message(message or f"the API answered with status {status}", secrets=secrets),
        status=status,
        vendor_code=codes[0] if codes else None,
        retry_after_s=parse_retry_after(headers, now=now),
        request_id=request_id_in(headers),
    )


def request_id_in(headers: Mapping[str, str]) -> str | None:
    """The server's id of a request, for support; each vendor has its own name for it."""
    return next((headers[name] for name in _REQUEST_ID_HEADERS if headers.get(name)), None)


def stream_error(error: Any, *, request_id: str | None, secrets: tuple[str, ...]) -> ProviderError:
    """The error for an error object (or text) that came with status 200."""
    codes, message = _codes_and_message(error)
    kind = error_class(_stream_status(codes), codes=codes, message=message)
    return kind(
        log_message(message or "the API reported an error without a message", secrets=secrets),
        vendor_code=codes[0] if codes else None,
        request_id=request_id,
    )


def _stream_status(codes: list[str]) -> int | None:
    """A name says more than a number: OpenRouter gives 502 for an upstream that is overloaded."""
    named = next((_STATUS_OF_CODE[code] for code in codes if code in _STATUS_OF_CODE), None)
    if named is not None:
        return named
    for code in codes:
        if code.startswith(_REJECTED_PREFIXES):
            return 400
        if code.isascii() and code.isdecimal() and len(code) == 3 and code[0] in "45":
            return int(code)
    return None


def _codes_and_message(value: Any) -> tuple[list[str], str]:
    """All codes and types of an error, the most telling first, and its text."""
    if isinstance(value, list) and value:
        value = value[0]
    if isinstance(value, dict) and isinstance(value.get("error"), dict | str) and value["error"]:
        value = value["error"]
    if not isinstance(value, dict):
        return [], value if isinstance(value, str) else ""
    metadata = value.get("metadata")
    inner = metadata if isinstance(metadata, dict) else {}
    found = (
        value.get("code"),
        inner.get("error_type"),
        inner.get("provider_code"),
        value.get("type"),
        value.get("status"),
    )
    codes = [str(code) for code in found if isinstance(code, str | int) and code not in ("", "error")]
    message = next((text for key in ("message", "detail") if isinstance(text := value.get(key), str)), "")
    return codes, message
