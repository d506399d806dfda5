"""What a session has used: its counters, and the sums of its ledger entries that they come from."""

from decimal import Decimal

from msgspec import Struct

from db.engine import Transaction
from db.ids import to_uuid
from db.sessions import SessionCounters, get_session


class LedgerSum(Struct, frozen=True, kw_only=True):
    """Sums over the requests of one provider, model and purpose.

    A sum covers what is known. Of the requests that are over, `uncounted_requests` are those whose tokens
    are not known (abandoned by a crash), `unpriced_requests` those without a price. `open_requests` are under
    way.
    """

    provider: str
    model: str
    purpose: str
    requests: int
    open_requests: int
    uncounted_requests: int
    unpriced_requests: int
    estimated_requests: int
    input_tokens: int
    cache_read_tokens: int
    cache_write_tokens: int
    output_tokens: int
    reasoning_tokens: int
    cost_usd: Decimal


class SessionUsage(Struct, frozen=True, kw_only=True):
    """`counters` as they stand on the session; `ledger` by provider, model and purpose."""

    session_id: str
    counters: SessionCounters
    cost_usd: Decimal
    unpriced_requests: int
    ledger: tuple[LedgerSum, ...]


async def get_session_usage(tx: Transaction, session_id: str) -> SessionUsage:
    """Raises: NotFound."""
    session = await get_session(tx, session_id)
    rows = await tx.fetch(
        "SELECT provider, model, purpose, count(*) AS requests,"
        " count(*) FILTER (WHERE state = 'open') AS open_requests,"
        " count(*) FILTER (WHERE state <> 'open' AND (input_tokens IS NULL OR output_tokens IS NULL))"
        " AS uncounted_requests,"
        " count(*) FILTER (WHERE state <> 'open' AND cost_usd IS NULL) AS unpriced_requests,"
        " count(*) FILTER (WHERE estimated) AS estimated_requests,"
        " coalesce(sum(input_tokens), 0)::int8 AS input_tokens,"
        " coalesce(sum(cache_read_tokens), 0)::int8 AS cache_read_tokens,"
        " coalesce(sum(cache_write_tokens), 0)::int8 AS cache_write_tokens,"
        " coalesce(sum(output_tokens), 0)::int8 AS output_tokens,"
        " coalesce(sum(reasoning_tokens), 0)::int8 AS reasoning_tokens,"
        " coalesce(sum(cost_usd), 0) AS cost_usd"
        " FROM usage_entries WHERE tenant_id = $1 AND session_id = $2"
        " GROUP BY provider, model, purpose ORDER BY provider, model, purpose",
        tx.tenant_id,
        to_uuid(session_id),
    )
    return SessionUsage(
        session_id=session.id,
        counters=session.counters,
        cost_usd=session.cost_usd,
        unpriced_requests=session.unpriced_requests,
        ledger=tuple(LedgerSum(**dict(row)) for row in rows),
    )
