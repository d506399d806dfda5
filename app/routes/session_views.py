"""A session as clients read it."""

from datetime import datetime
from decimal import Decimal
from typing import Literal

from msgspec import Struct

from agents.config import AgentTool, QueueMode
from app.routes.agents import ModelView, ServiceAccount, view_model
from app.streaming.live import Live, Unfinished
from db.live import LastError, LiveState, PendingCall
from db.runs import RunState
from db.sessions import Session, SessionStatus, TokenCounters
from providers.types import JsonObject


class SessionAgentView(Struct, frozen=True, kw_only=True):
    """What the session runs with: the agent's version with the session's own changes."""

    id: str
    type: Literal["agent"] = "agent"
    version: int
    name: str
    description: str | None
    model: ModelView
    system: str | None
    tools: tuple[AgentTool, ...]
    skills: list[JsonObject]
    mcp_servers: list[JsonObject]
    multiagent: None = None
    execution_identity: ServiceAccount
    max_turns: int
    time_limit_s: float
    wait_timeout_s: float | None
    max_output_tokens: int | None
    tool_execution: Literal["parallel", "sequential"]
    steering_mode: QueueMode
    follow_up_mode: QueueMode


class SessionStatsView(Struct, frozen=True, kw_only=True):
    """`duration_seconds`: since its creation, until it was archived. `active_seconds`: its runs' added up,
    each from its start to its close, waits for the client included."""

    active_seconds: float
    duration_seconds: float


class SessionUsageTotals(Struct, frozen=True, kw_only=True):
    """Totals of the session. `input_tokens` excludes `cache_read_input_tokens`, as hosted agent APIs count.

    `cost_usd` sums the requests whose price is known, `unpriced_requests` counts the others. `current` counts
    since the last compaction; `GET /v1/sessions/{id}/usage` has all counters.
    """

    input_tokens: int
    output_tokens: int
    cache_read_input_tokens: int
    cost_usd: Decimal
    unpriced_requests: int
    current: TokenCounters


class SessionView(Struct, frozen=True, kw_only=True):
    """A session as it stands.

    `status`: `running` while a run is queued or worked on, `idle` when it is your turn, `rescheduling` when
    the run waits for another worker, `terminated` when it is archived. `waits_for` are the event ids
    of the tool uses that you must answer. `last_seq` is the end of its log.
    """

    id: str
    type: Literal["session"] = "session"
    agent: SessionAgentView
    environment_id: str
    title: str | None
    end_user_id: str | None
    metadata: dict[str, str]
    status: SessionStatus
    waits_for: tuple[str, ...]
    stats: SessionStatsView
    usage: SessionUsageTotals
    last_seq: int
    outcome_evaluations: list[JsonObject]
    resources: list[JsonObject]
    vault_ids: list[str]
    budget: None = None
    created_at: datetime
    updated_at: datetime
    archived_at: datetime | None


class QueueView(Struct, frozen=True, kw_only=True):
    """Prompts that no run has taken up. `prompt_ids`: the first of them, as they came; `count`: of all."""

    count: int
    prompt_ids: tuple[str, ...]


class LiveView(Struct, frozen=True, kw_only=True):
    """What goes on at this moment.

    `cursor` is the id from which a stream goes on behind it. `unfinished`: events that are being produced,
    with their deltas so far, put together; empty when Redis is away. `pending_calls`: calls without a result.
    `last_error`: the newest `session.error` of the newest run.
    """

    cursor: str
    run_id: str | None
    run_state: RunState | None
    unfinished: list[Unfinished]
    pending_calls: tuple[PendingCall, ...]
    queue: QueueView
    last_error: LastError | None


class LiveSessionView(SessionView, frozen=True, kw_only=True):
    """A session with what goes on in it."""

    live: LiveView


def view_live_session(session: Session, state: LiveState, now: Live) -> LiveSessionView:
    """A session with what goes on in it."""
    seen = view_session(session)
    return LiveSessionView(
        **{field: getattr(seen, field) for field in seen.__struct_fields__},
        live=LiveView(
            cursor=now.cursor,
            run_id=state.run_id,
            run_state=state.run_state,
            unfinished=now.unfinished,
            pending_calls=state.calls,
            queue=QueueView(count=state.prompt_count, prompt_ids=state.prompt_ids),
            last_error=state.last_error,
        ),
    )


def view_session(session: Session) -> SessionView:
    """A session as clients read it."""
    total = session.counters.total
    return SessionView(
        id=session.id,
        agent=_view_agent(session),
        environment_id=session.environment_id or "",
        title=session.title,
        end_user_id=session.end_user_id,
        metadata=session.metadata,
        status=session.status,
        waits_for=session.waits_for,
        stats=SessionStatsView(active_seconds=session.active_s, duration_seconds=session.duration_s),
        usage=SessionUsageTotals(
            input_tokens=total.cache_miss_tokens,
            output_tokens=total.output_tokens,
            cache_read_input_tokens=total.cache_hit_tokens,
            cost_usd=session.cost_usd,
            unpriced_requests=session.unpriced_requests,
            current=session.counters.current,
        ),
        last_seq=session.last_seq,
        outcome_evaluations=[],
        resources=[],
        vault_ids=[],
        created_at=session.created_at,
        updated_at=session.updated_at,
        archived_at=session.archived_at,
    )


def _view_agent(session: Session) -> SessionAgentView:
    config = session.agent
    return SessionAgentView(
        id=session.agent_id,
        version=session.agent_version,
        name=config.name,
        description=config.description,
        model=view_model(config.model),
        system=config.system,
        tools=config.tools,
        skills=[],
        mcp_servers=[],
        execution_identity=ServiceAccount(),
        max_turns=config.max_turns,
        time_limit_s=config.time_limit_s,
        wait_timeout_s=config.wait_timeout_s,
        max_output_tokens=config.max_output_tokens,
        tool_execution=config.tool_execution,
        steering_mode=config.steering_mode,
        follow_up_mode=config.follow_up_mode,
    )
