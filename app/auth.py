"""Who is calling, and what their key may do.

A guard on the whole application, so it runs before any body is read and a new route cannot forget it. Routes
say in `opt` when they differ: `PUBLIC`, `scope(...)`, `SESSION_TOKENS`. Without a word a GET needs `read`,
all else `write`, and tokens of a single session are refused.
"""

from functools import lru_cache
from typing import Any, Literal
from urllib.parse import parse_qsl
from uuid import UUID

from litestar.connection import ASGIConnection, Request
from litestar.handlers.base import BaseRouteHandler
from msgspec import Struct

from app.errors import NotAuthenticated, ScopeMissing
from app.key_lookups import KeyLookups
from db.errors import NotFound
from db.ids import parse_id, public
from db.keys import KEY_PREFIX, SESSION_TOKEN_PREFIX, Scope

PUBLIC: dict[str, Any] = {"public": True}
"""`opt` of a route that needs no key."""

SESSION_TOKENS: dict[str, Any] = {"session_tokens": True}
"""`opt` of a route that also takes tokens of a session.

With a `session_id` in its path the guard compares; any other such route calls `Principal.check_session`.
"""

SESSION_TOKEN_COOKIE = "armillary_token"
SESSION_TOKEN_QUERY = "token"
_MAX_KEY_LENGTH = 256
_IMPLIED: dict[Scope, frozenset[Scope]] = {
    "admin": frozenset({"admin", "write", "read"}),
    "write": frozenset({"write", "read"}),
    "read": frozenset({"read"}),
}
_KEY_NAMES = frozenset(
    {"api_key", "apikey", "api-key", "key", "x-api-key", "access_token", "authorization", "bearer", "secret"}
)


def scope(needed: Literal["read", "write", "admin"]) -> dict[str, Any]:
    """`opt` of a route that needs another scope than its method suggests."""
    return {"scope": needed}


class Principal(Struct, frozen=True, kw_only=True):
    """The caller. `scopes` holds the implied ones too; `session_id` is set for a token of one session."""

    tenant_id: UUID
    key_id: UUID
    scopes: frozenset[Scope]
    session_id: UUID | None = None

    @property
    def public_tenant_id(self) -> str:
        return public("ten", self.tenant_id)

    @property
    def public_key_id(self) -> str:
        return public("key", self.key_id)

    def check_session(self, session_id: UUID) -> None:
        """Raises: NotFound, when this is the token of another session."""
        if self.session_id not in (None, session_id):
            raise NotFound("session", public("sess", session_id))


Connection = ASGIConnection[Any, Any, Any, Any]


async def authenticate(connection: Connection, handler: BaseRouteHandler) -> None:
    """Finds the principal and checks its scope. Raises: NotAuthenticated, ScopeMissing, NotFound."""
    method = connection.scope.get("method")
    if handler.opt.get("public") or method == "OPTIONS":
        return
    takes_tokens = bool(handler.opt.get("session_tokens"))
    secret = _secret_of(connection, takes_tokens=takes_tokens)
    principal = await find_principal(connection.app.state.resources.keys, secret)
    if principal is None:
        raise NotAuthenticated("The key is not known, was revoked, or has expired.")
    connection.scope["user"] = principal
    _check_token_use(connection, principal, takes_tokens=takes_tokens)
    needed: Scope = handler.opt.get("scope") or ("read" if method == "GET" else "write")
    if needed not in principal.scopes:
        raise ScopeMissing(f"This needs a key with the scope `{needed}`.")


async def find_principal(keys: KeyLookups, secret: str) -> Principal | None:
    """Whose key `secret` is; None when it opens nothing at this moment."""
    key = await keys.find(secret)
    if key is None:
        return None
    return Principal(
        tenant_id=key.tenant_id,
        key_id=key.id,
        scopes=_with_implied(tuple(key.scopes)),
        session_id=key.session_id,
    )


@lru_cache
def _with_implied(scopes: tuple[Scope, ...]) -> frozenset[Scope]:
    """One set for all principals, of which each open stream holds one."""
    return frozenset().union(*(_IMPLIED[name] for name in scopes))


def current_principal(request: Request[Any, Any, Any]) -> Principal:
    """The caller of this request, for injection into handlers."""
    principal: Principal = request.scope["user"]
    return principal


def _secret_of(connection: Connection, *, takes_tokens: bool) -> str:
    """The key or token of a request. Raises: NotAuthenticated."""
    query_token = _query_token(connection.scope["query_string"], takes_tokens=takes_tokens)
    headers = connection.headers
    kind, _, value = headers.get("authorization", "").partition(" ")
    secret = value.strip() if kind.lower() == "bearer" else headers.get("x-api-key", "").strip()
    if not secret and takes_tokens:
        secret = query_token or connection.cookies.get(SESSION_TOKEN_COOKIE, "")
        if secret and not secret.startswith(SESSION_TOKEN_PREFIX):
            raise NotAuthenticated("Only tokens of a session may be sent in a cookie or a query.")
    if not secret:
        raise NotAuthenticated("Send a key as `Authorization: Bearer …` or `x-api-key: …`.")
    if len(secret) > _MAX_KEY_LENGTH:
        raise NotAuthenticated("The key is not known, was revoked, or has expired.")
    return secret


def _query_token(query: bytes, *, takes_tokens: bool) -> str:
    """The session token of a query, or nothing. Raises: NotAuthenticated for anything that is a key."""
    token = ""
    for name, value in parse_qsl(query.decode("latin-1"), keep_blank_values=True):
        is_token = name == SESSION_TOKEN_QUERY
        if name.lower() in _KEY_NAMES or value.startswith(KEY_PREFIX) or (is_token and not takes_tokens):
            raise NotAuthenticated("Keys are not accepted in URLs. Send it as a header and replace this key.")
        if is_token:
            token = value
    return token


def _check_token_use(connection: Connection, principal: Principal, *, takes_tokens: bool) -> None:
    if principal.session_id is None:
        return
    if not takes_tokens:
        raise ScopeMissing("A token of a session does not open this.")
    if (session_id := connection.path_params.get("session_id")) is not None:
        principal.check_session(parse_id("sess", session_id))
