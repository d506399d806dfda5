"""What a session has used."""

from decimal import Decimal

from litestar import get
from litestar.di import NamedDependency
from litestar.params import FromPath
from msgspec import Struct

from app.auth import SESSION_TOKENS, Principal
from app.resources import Resources
from db.sessions import TokenCounters
from db.usage import LedgerSum, get_session_usage


class SessionUsageView(Struct, frozen=True, kw_only=True):
    """Token counters, and the sums of the requests that they come from.

    `current` counts since the last compaction, `full` the segments before it, `total` both. `cost_usd` sums
    the requests whose price is known; `unpriced_requests` counts the others.
    """

    session_id: str
    current: TokenCounters
    full: TokenCounters
    total: TokenCounters
    cost_usd: Decimal
    unpriced_requests: int
    by_model: list[LedgerSum]


@get("/v1/sessions/{session_id:str}/usage", opt=SESSION_TOKENS, tags=["Usage"])
async def get_usage_of_session(
    session_id: FromPath[str], principal: NamedDependency[Principal], resources: NamedDependency[Resources]
) -> SessionUsageView:
    """Tells what the session has used so far, requests of cancelled and failed runs included."""
    async with resources.database.transaction(principal.tenant_id) as tx:
        usage = await get_session_usage(tx, session_id)
    return SessionUsageView(
        session_id=usage.session_id,
        current=usage.counters.current,
        full=usage.counters.full,
        total=usage.counters.total,
        cost_usd=usage.cost_usd,
        unpriced_requests=usage.unpriced_requests,
        by_model=list(usage.ledger),
    )


ROUTES = [get_usage_of_session]
