"""All tables. The migrations under `migrations/` build exactly this; a test compares the two.

Every row belongs to a tenant, and row-level security is on for all of them (see `TENANT_TABLES`).
Ids are UUIDv7 and shown with a prefix; order is kept by `seq` and `position`, never by ids. Text-preserving
`JSON` holds what is sent to providers again, since `JSONB` would reorder keys and so change a prompt's bytes.
"""

from datetime import datetime
from uuid import UUID

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import ARRAY, BYTEA, JSONB

metadata = sa.MetaData(
    naming_convention={
        "pk": "pk_%(table_name)s",
        "fk": "fk_%(table_name)s_%(column_0_name)s",
        "ix": "ix_%(table_name)s_%(column_0_name)s",
        "uq": "uq_%(table_name)s_%(column_0_name)s",
        "ck": "ck_%(table_name)s_%(constraint_name)s",
    }
)


def _id() -> sa.Column[UUID]:
    return sa.Column("id", sa.Uuid, primary_key=True)


def _tenant() -> sa.Column[UUID]:
    return sa.Column("tenant_id", sa.Uuid, sa.ForeignKey("tenants.id"), nullable=False)


def _session(*, primary_key: bool = False) -> sa.Column[UUID]:
    reference = sa.ForeignKey("sessions.id", ondelete="CASCADE")
    return sa.Column("session_id", sa.Uuid, reference, nullable=False, primary_key=primary_key)


def _moment(name: str, *, nullable: bool = True) -> sa.Column[datetime]:
    default = None if nullable else sa.text("clock_timestamp()")
    return sa.Column(name, sa.DateTime(timezone=True), nullable=nullable, server_default=default)


def _count(name: str) -> sa.Column[int]:
    return sa.Column(name, sa.BigInteger, nullable=False, server_default="0")


def _state(*values: str, name: str = "state") -> tuple[sa.Column[str], sa.CheckConstraint]:
    listed = ", ".join(f"'{value}'" for value in values)
    return sa.Column(name, sa.Text, nullable=False), sa.CheckConstraint(f"{name} IN ({listed})", name=name)


tenants = sa.Table(
    "tenants",
    metadata,
    _id(),
    sa.Column("name", sa.Text, nullable=False, unique=True),
    sa.Column("max_running_runs", sa.Integer),
    sa.Column("max_queued_runs", sa.Integer),
    _moment("created_at", nullable=False),
    _moment("archived_at"),
)

api_keys = sa.Table(
    "api_keys",
    metadata,
    _id(),
    _tenant(),
    sa.Column("name", sa.Text, nullable=False),
    sa.Column("sha256", BYTEA, nullable=False, unique=True),
    sa.Column("hint", sa.Text, nullable=False),
    sa.Column("scopes", ARRAY(sa.Text), nullable=False),
    # A key with a session is a short-lived token that opens this one session only.
    sa.Column("session_id", sa.Uuid, sa.ForeignKey("sessions.id", ondelete="CASCADE"), index=True),
    sa.Column("max_running_runs", sa.Integer),
    _moment("created_at", nullable=False),
    _moment("expires_at"),
    _moment("revoked_at"),
    sa.Index("ix_api_keys_tenant_id", "tenant_id", "created_at"),
    sa.Index("ix_api_keys_capped", "id", postgresql_where=sa.text("max_running_runs IS NOT NULL")),
)

workers = sa.Table(
    "workers",
    metadata,
    _id(),
    sa.Column("host", sa.Text, nullable=False),
    sa.Column("pid", sa.Integer, nullable=False),
    sa.Column("slots", sa.Integer, nullable=False),
    _moment("started_at", nullable=False),
    _moment("lease_until", nullable=False),
    # Since when the lease has not lapsed. A worker that was just back may not call others dead.
    _moment("steady_since", nullable=False),
)

agents = sa.Table(
    "agents",
    metadata,
    _id(),
    _tenant(),
    sa.Column("version", sa.Integer, nullable=False),
    _moment("created_at", nullable=False),
    _moment("updated_at", nullable=False),
    _moment("archived_at"),
    sa.Index("ix_agents_tenant_id", "tenant_id", "created_at", "id"),
)

agent_versions = sa.Table(
    "agent_versions",
    metadata,
    sa.Column("agent_id", sa.Uuid, sa.ForeignKey("agents.id"), primary_key=True),
    sa.Column("version", sa.Integer, primary_key=True),
    _tenant(),
    sa.Column("config", sa.JSON, nullable=False),
    _moment("created_at", nullable=False),
)

sessions = sa.Table(
    "sessions",
    metadata,
    _id(),
    _tenant(),
    sa.Column("agent_id", sa.Uuid, sa.ForeignKey("agents.id"), nullable=False),
    sa.Column("agent_version", sa.Integer, nullable=False),
    # What this session changes of its agent version; null when nothing.
    sa.Column("agent_overrides", sa.JSON),
    sa.Column("title", sa.Text),
    sa.Column("end_user_id", sa.Text),
    sa.Column("environment_id", sa.Text),
    sa.Column("metadata", JSONB, nullable=False, server_default="{}"),
    sa.Column("budget", JSONB),
    sa.Column("forked_from", sa.Uuid),
    _count("epoch"),
    _count("commit_no"),
    _count("inbox_no"),
    _count("last_seq"),
    _count("last_position"),
    # The memory in effect; null: the model is sent the whole transcript.
    sa.Column("memory_id", sa.Uuid),
    # Counters are sums of the ledger: current since the last compaction, full for the segments before.
    _count("current_cache_hit_tokens"),
    _count("current_cache_miss_tokens"),
    _count("current_output_tokens"),
    _count("full_cache_hit_tokens"),
    _count("full_cache_miss_tokens"),
    _count("full_output_tokens"),
    sa.Column("cost_usd", sa.Numeric, nullable=False, server_default="0"),
    _count("unpriced_requests"),
    _moment("created_at", nullable=False),
    _moment("updated_at", nullable=False),
    _moment("archived_at"),
    sa.ForeignKeyConstraint(
        ["agent_id", "agent_version"],
        ["agent_versions.agent_id", "agent_versions.version"],
        name="fk_sessions_agent_version",
    ),
    sa.Index("ix_sessions_tenant_id", "tenant_id", "created_at", "id"),
    sa.Index("ix_sessions_agent_id", "agent_id", "created_at"),
    # Each commit updates this row; room on its page keeps the updates out of the indexes.
    postgresql_with={"fillfactor": "70"},
)

runs = sa.Table(
    "runs",
    metadata,
    _id(),
    _tenant(),
    _session(),
    *_state("queued", "running", "waiting", "closed"),
    sa.Column("api_key_id", sa.Uuid),
    sa.Column("worker_id", sa.Uuid),
    sa.Column("options", sa.JSON),
    # The log position just before the run's first event.
    sa.Column("after_seq", sa.BigInteger, nullable=False),
    sa.Column("turns", sa.Integer, nullable=False, server_default="0"),
    sa.Column("takeovers", sa.Integer, nullable=False, server_default="0"),
    sa.Column("takeovers_since_progress", sa.Integer, nullable=False, server_default="0"),
    # What a commit decided that the transcript does not show, for the next hold.
    sa.Column("decision", sa.JSON),
    sa.Column("stop_reason", sa.JSON),
    sa.Column("cancel_reason", sa.Text),
    sa.Column("cancel_mode", sa.Text),
    _moment("cancel_requested_at"),
    _moment("queued_at", nullable=False),
    _moment("started_at"),
    _moment("deadline_at"),
    # When a run that waits for the client is closed without an answer; null: never.
    _moment("wait_until"),
    _moment("closed_at"),
    sa.Index("uq_runs_open", "session_id", unique=True, postgresql_where=sa.text("state <> 'closed'")),
    sa.Index("ix_runs_session_id", "session_id", "queued_at", "id"),
    # Which tenant was served last, for turns among tenants.
    sa.Index("ix_runs_started", "tenant_id", "started_at"),
    sa.Index("ix_runs_queued", "tenant_id", "queued_at", "id", postgresql_where=sa.text("state = 'queued'")),
    sa.Index("ix_runs_running", "worker_id", postgresql_where=sa.text("state = 'running'")),
    sa.Index("ix_runs_wait_until", "wait_until", postgresql_where=sa.text("state = 'waiting'")),
    sa.Index("ix_runs_running_tenant", "tenant_id", postgresql_where=sa.text("state = 'running'")),
    # How many of a key's runs are worked on, for keys with a cap.
    sa.Index("ix_runs_running_key", "api_key_id", postgresql_where=sa.text("state = 'running'")),
)

prompts = sa.Table(
    "prompts",
    metadata,
    _id(),  # the id of its user.message event
    _tenant(),
    _session(),
    sa.Column("batch_id", sa.Uuid, nullable=False),
    sa.Column("seq", sa.BigInteger, nullable=False),
    *_state("pending", "applied", "withdrawn"),
    sa.Column("delivery", sa.Text, nullable=False),
    sa.Column("content", sa.JSON, nullable=False),
    sa.Column("options", sa.JSON),
    sa.Column("api_key_id", sa.Uuid),
    sa.Column("run_id", sa.Uuid, sa.ForeignKey("runs.id", ondelete="CASCADE")),
    _moment("created_at", nullable=False),
    _moment("updated_at", nullable=False),
    sa.Index("ix_prompts_session_id", "session_id", "seq"),
    sa.Index("ix_prompts_pending", "session_id", "seq", postgresql_where=sa.text("state = 'pending'")),
)

messages = sa.Table(
    "messages",
    metadata,
    _session(primary_key=True),
    sa.Column("position", sa.BigInteger, primary_key=True, autoincrement=False),
    # The end of the log once the message was stored.
    sa.Column("seq", sa.BigInteger, nullable=False, server_default="0"),
    sa.Column("id", sa.Uuid, nullable=False),
    _tenant(),
    sa.Column("run_id", sa.Uuid),
    sa.Column("role", sa.Text, nullable=False),
    sa.Column("blocks", sa.JSON, nullable=False),
    sa.Column("native_api", sa.Text),
    sa.Column("native_model", sa.Text),
    sa.Column("native_body", BYTEA),
    _moment("created_at", nullable=False),
    _moment("rolled_back_at"),
)

events = sa.Table(
    "events",
    metadata,
    _session(primary_key=True),
    sa.Column("seq", sa.BigInteger, primary_key=True, autoincrement=False),
    sa.Column("id", sa.Uuid, nullable=False),
    _tenant(),
    sa.Column("run_id", sa.Uuid),
    sa.Column("type", sa.Text, nullable=False),
    # Encoded JSON without `seq`, stored uncompressed: it is read far more often than written.
    sa.Column("body", BYTEA, nullable=False),
    _moment("created_at", nullable=False),
)

tool_calls = sa.Table(
    "tool_calls",
    metadata,
    _id(),  # the id of its tool use event
    _tenant(),
    _session(),
    sa.Column("run_id", sa.Uuid, sa.ForeignKey("runs.id", ondelete="CASCADE"), nullable=False),
    sa.Column("child_run_id", sa.Uuid),
    sa.Column("tool_use_id", sa.Text, nullable=False),
    sa.Column("position", sa.BigInteger, nullable=False),
    sa.Column("index", sa.Integer, nullable=False),
    sa.Column("kind", sa.Text, nullable=False),
    sa.Column("name", sa.Text, nullable=False),
    sa.Column("input", sa.JSON, nullable=False),
    *_state("pending", "running", "open", "done"),
    sa.Column("idempotent", sa.Boolean, nullable=False, server_default=sa.false()),
    sa.Column("outcome", sa.Text),
    sa.Column("result", sa.JSON),
    # Of the client's answer as it was sent, to tell the same answer again from another one.
    sa.Column("answer_sha256", BYTEA),
    _moment("created_at", nullable=False),
    _moment("started_at"),
    _moment("finished_at"),
    sa.Index("ix_tool_calls_session_id", "session_id", "position", "index"),
)

usage_entries = sa.Table(
    "usage_entries",
    metadata,
    _id(),  # the id of its span.model_request_start event
    _tenant(),
    # No foreign keys: the ledger outlives sessions, keys and agents.
    sa.Column("api_key_id", sa.Uuid),
    sa.Column("agent_id", sa.Uuid, nullable=False),
    sa.Column("session_id", sa.Uuid, nullable=False),
    sa.Column("run_id", sa.Uuid, nullable=False),
    sa.Column("end_user_id", sa.Text),
    sa.Column("turn", sa.Integer, nullable=False),
    sa.Column("epoch", sa.BigInteger, nullable=False),
    sa.Column("purpose", sa.Text, nullable=False),
    sa.Column("provider", sa.Text, nullable=False),
    sa.Column("model", sa.Text, nullable=False),
    *_state("open", "closed", "abandoned"),
    sa.Column("input_tokens", sa.BigInteger),
    sa.Column("cache_read_tokens", sa.BigInteger),
    sa.Column("cache_write_tokens", sa.BigInteger),
    sa.Column("output_tokens", sa.BigInteger),
    sa.Column("reasoning_tokens", sa.BigInteger),
    sa.Column("cost_usd", sa.Numeric),
    sa.Column("price_source", sa.Text),
    sa.Column("reserved_tokens", sa.BigInteger),
    sa.Column("reserved_usd", sa.Numeric),
    sa.Column("estimated", sa.Boolean, nullable=False, server_default=sa.false()),
    sa.Column("stop", sa.Text),
    sa.Column("native_stop", sa.Text),
    sa.Column("error_code", sa.Text),
    sa.Column("latency_ms", sa.Integer),
    sa.Column("first_token_ms", sa.Integer),
    sa.Column("raw", sa.JSON),
    _moment("opened_at", nullable=False),
    _moment("closed_at"),
    sa.Index("ix_usage_entries_session_id", "session_id", "opened_at"),
    sa.Index("ix_usage_entries_tenant_id", "tenant_id", "opened_at"),
    sa.Index("ix_usage_entries_open", "session_id", postgresql_where=sa.text("state = 'open'")),
)

memories = sa.Table(
    "memories",
    metadata,
    _id(),
    _tenant(),
    _session(),
    sa.Column("position", sa.BigInteger, nullable=False),
    # The last message there was when it was made.
    sa.Column("seen_position", sa.BigInteger, nullable=False),
    sa.Column("text", sa.Text, nullable=False),
    sa.Column("usage_entry_id", sa.Uuid),
    _moment("created_at", nullable=False),
    sa.Index("ix_memories_session_id", "session_id", "created_at"),
)

files = sa.Table(
    "files",
    metadata,
    _id(),
    _tenant(),
    sa.Column("session_id", sa.Uuid, sa.ForeignKey("sessions.id", ondelete="CASCADE"), index=True),
    sa.Column("name", sa.Text, nullable=False),
    sa.Column("media_type", sa.Text, nullable=False),
    sa.Column("size_bytes", sa.BigInteger, nullable=False),
    sa.Column("sha256", BYTEA, nullable=False),
    sa.Column("content", BYTEA, nullable=False),
    _moment("created_at", nullable=False),
    sa.Index("ix_files_tenant_id", "tenant_id", "created_at", "id"),
)

idempotency_keys = sa.Table(
    "idempotency_keys",
    metadata,
    sa.Column("tenant_id", sa.Uuid, sa.ForeignKey("tenants.id"), primary_key=True),
    sa.Column("key_sha256", BYTEA, primary_key=True),
    sa.Column("request_sha256", BYTEA, nullable=False),
    # Which resources the request made, so that the answer can be rendered again: {"session_id": …, …}.
    sa.Column("resources", JSONB, nullable=False),
    sa.Column("status", sa.Integer, nullable=False),
    _moment("created_at", nullable=False),
    sa.Index("ix_idempotency_keys_created_at", "created_at"),
)

TENANT_TABLES = tuple(
    table.name for table in metadata.sorted_tables if "tenant_id" in table.columns or table.name == "tenants"
)
"""Tables under row-level security. `workers` has no tenant and is closed to the tenant role."""
