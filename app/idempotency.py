"""`Idempotency-Key`: a request sent twice has the effect of one.

    made = await once(tx, request, make)
    return render(await get_agent(tx, made["agent_id"]))

`make` runs at most once per key and returns the ids of what it made; the answer is always rendered from those
ids, so that first and repeated answers cannot differ. Everything happens in the caller's transaction.
"""

import hashlib
from collections.abc import Awaitable, Callable
from typing import Any

from app.auth import Principal
from app.errors import IdempotencyMismatch, InvalidRequest
from app.http_json import ApiRequest
from db import idempotency
from db.engine import Transaction

HEADER = "idempotency-key"
MAX_LENGTH = 255

Resources = dict[str, Any]
"""JSON of ids and numbers, such as `{"session_id": "sess_…", "run_id": "run_…"}`. Never a secret."""


async def once(
    tx: Transaction,
    request: ApiRequest,
    make: Callable[[], Awaitable[Resources]],
    *,
    content: bytes | None = None,
) -> Resources:
    """What `make` returns, or what it returned for this key before.

    Without the header `make` simply runs. `content` stands for the body where equal bodies differ in their
    bytes (multipart). Raises: IdempotencyMismatch, InvalidRequest, and whatever `make` raises; then the key
    stays free.
    """
    key = request.headers.get(HEADER)
    if key is None:
        return await make()
    if not key or len(key) > MAX_LENGTH or not key.isprintable():
        raise InvalidRequest(f"`Idempotency-Key` must be 1 to {MAX_LENGTH} printable characters.")
    principal: Principal = request.user
    key_sha256 = hashlib.sha256(key.encode()).digest()
    request_sha256 = await _fingerprint(request, content)
    earlier = await idempotency.begin(
        tx,
        tenant_id=principal.tenant_id,
        key_sha256=key_sha256,
        request_sha256=request_sha256,
        status=request.route_handler.status_code,
        hours=request.app.state.resources.settings.idempotency_hours,
    )
    if earlier is None:
        made = await make()
        await idempotency.finish(tx, tenant_id=principal.tenant_id, key_sha256=key_sha256, resources=made)
        return made
    if earlier.request_sha256 != request_sha256:
        raise IdempotencyMismatch("This `Idempotency-Key` was used for another request; send a new one.")
    return earlier.resources


async def _fingerprint(request: ApiRequest, content: bytes | None) -> bytes:
    """The hash of what the request asks for."""
    body = await request.body() if content is None else content
    digest = hashlib.sha256()
    path, query = request.scope["path"].encode(), request.scope["query_string"]
    for part in (request.method.encode(), path, query, body):
        digest.update(len(part).to_bytes(8))
        digest.update(part)
    return digest.digest()
