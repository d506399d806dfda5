"""First schema"""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


TENANT_ROLE = "armillary_tenant"
TENANT_TABLES = (
    "agents",
    "agent_versions",
    "api_keys",
    "sessions",
    "runs",
    "prompts",
    "messages",
    "events",
    "tool_calls",
    "usage_entries",
    "memories",
    "files",
    "idempotency_keys",
)


def _secure() -> None:
    """Row-level security: the tenant role sees the rows of `armillary.tenant_id` and no others."""
    op.execute("ALTER TABLE events ALTER COLUMN body SET STORAGE EXTERNAL")
    op.execute("ALTER TABLE files ALTER COLUMN content SET STORAGE EXTERNAL")
    # Roles belong to the whole server: another database may have made it, or the operator in advance.
    op.execute(f"""
        DO $$ BEGIN
            IF NOT EXISTS (SELECT FROM pg_roles WHERE rolname = '{TENANT_ROLE}') THEN
                CREATE ROLE {TENANT_ROLE} NOLOGIN;
            END IF;
        EXCEPTION WHEN duplicate_object OR unique_violation THEN NULL;
        END $$
    """)
    op.execute(f"""
        DO $$ BEGIN
            IF NOT pg_has_role(CURRENT_USER, '{TENANT_ROLE}', 'SET') THEN
                EXECUTE 'GRANT {TENANT_ROLE} TO ' || quote_ident(CURRENT_USER);
            END IF;
        END $$
    """)
    for table in TENANT_TABLES:
        _isolate(table, "tenant_id")
        op.execute(f"GRANT SELECT, INSERT, UPDATE, DELETE ON {table} TO {TENANT_ROLE}")
    _isolate("tenants", "id")
    op.execute(f"GRANT SELECT ON tenants TO {TENANT_ROLE}")


def _isolate(table: str, column: str) -> None:
    tenant = "NULLIF(current_setting('armillary.tenant_id', true), '')::uuid"
    op.execute(f"ALTER TABLE {table} ENABLE ROW LEVEL SECURITY")
    op.execute(
        f"CREATE POLICY one_tenant ON {table} TO {TENANT_ROLE}"
        f" USING ({column} = {tenant}) WITH CHECK ({column} = {tenant})"
    )


def upgrade() -> None:
    op.create_table(
        "tenants",
        sa.Column("id", sa.Uuid(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("max_running_runs", sa.Integer(), nullable=True),
        sa.Column("max_queued_runs", sa.Integer(), nullable=True),
        sa.Column(
            "created_at",
            sa.DateTime(timezone=True),
            server_default=sa.text("clock_timestamp()"),
            nullable=False,
        ),
        sa.Column("archived_at", sa.DateTime(timezone=True), nullable=True),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_tenants")),
        sa.UniqueConstraint("name", name=op.f("uq_tenants_name")),
    )
    op.create_table(
        "workers",
        sa.Column("id", sa.Uuid(), nullable=False),
        sa.Column("host", sa.Text(), nullable=False),
        sa.Column("pid", sa.Integer(), nullable=False),
        sa.Column("slots", sa.Integer(), nullable=False),
        sa.Column(
            "started_at",
            sa.DateTime(timezone=True),
            server_default=sa.text("clock_timestamp()"),
            nullable=False,
        ),
        sa.Column(
            "lease_until",
            sa.DateTime(timezone=True),
            server_default=sa.text("clock_timestamp()"),
            nullable=False,
        ),
        sa.Column(
            "steady_since",
            sa.DateTime(timezone=True),
            server_default=sa.text("clock_timestamp()"),
            nullable=False,
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_workers")),
    )
    op.create_table(
        "agents",
        sa.Column("id", sa.Uuid(), nullable=False),
        sa.Column("tenant_id", sa.Uuid(), nullable=False),
        sa.Column("version", sa.Integer(), nullable=False),
        sa.Column(
            "created_at",
            sa.DateTime(timezone=True),
            server_default=sa.text("clock_timestamp()"),
            nullable=False,
        ),
        sa.Column(
            "updated_at",
            sa.DateTime(timezone=True),
            server_default=sa.text("clock_timestamp()"),
            nullable=False,
        ),
        sa.Column("archived_at", sa.DateTime(timezone=True), nullable=True),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenants.id"], name=op.f("fk_agents_tenant_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_agents")),
    )
    op.create_index("ix_agents_tenant_id", "agents", ["tenant_id", "created_at", "id"], unique=False)
    op.create_table(
        "idempotency_keys",
        sa.Column("tenant_id", sa.Uuid(), nullable=False),
        sa.Column("key_sha256", postgresql.BYTEA(), nullable=False),
        sa.Column("request_sha256", postgresql.BYTEA(), nullable=False),
        sa.Column("resources", postgresql.JSONB(astext_type=sa.Text()), nullable=False),
        sa.Column("status", sa.Integer(), nullable=False),
        sa.Column(
            "created_at",
            sa.DateTime(timezone=True),
            server_default=sa.text("clock_timestamp()"),
            nullable=False,
        ),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenants.id"], name=op.f("fk_idempotency_keys_tenant_id")),
        sa.PrimaryKeyConstraint("tenant_id", "key_sha256", name=op.f("pk_idempotency_keys")),
    )
    op.create_index("ix_idempotency_keys_created_at", "idempotency_keys", ["created_at"], unique=False)
    op.create_table(
        "usage_entries",
        sa.Column("id", sa.Uuid(), nullable=False),
        sa.Column("tenant_id", sa.Uuid(), nullable=False),
        sa.Column("api_key_id", sa.Uuid(), nullable=True),
        sa.Column("agent_id", sa.Uuid(), nullable=False),
        sa.Column("session_id", sa.Uuid(), nullable=False),
        sa.Column("run_id", sa.Uuid(), nullable=False),
        sa.Column("end_user_id", sa.Text(), nullable=True),
        sa.Column("turn", sa.Integer(), nullable=False),
        sa.Column("epoch", sa.BigInteger(), nullable=False),
        sa.Column("purpose", sa.Text(), nullable=False),
        sa.Column("provider", sa.Text(), nullable=False),
        sa.Column("model", sa.Text(), nullable=False),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("input_tokens", sa.BigInteger(), nullable=True),
        sa.Column("cache_read_tokens", sa.BigInteger(), nullable=True),
        sa.Column("cache_write_tokens", sa.BigInteger(), nullable=True),
        sa.Column("output_tokens", sa.BigInteger(), nullable=True),
        sa.Column("reasoning_tokens", sa.BigInteger(), nullable=True),
        sa.Column("cost_usd", sa.Numeric(), nullable=True),
        sa.Column("price_source", sa.Text(), nullable=True),
        sa.Column("reserved_tokens", sa.BigInteger(), nullable=True),
        sa.Column("reserved_usd", sa.Numeric(), nullable=True),
        sa.Column("estimated", sa.Boolean(), server_default=sa.text("false"), nullable=False),
        sa.Column("stop", sa.Text(), nullable=True),
        sa.Column("native_stop", sa.Text(), nullable=True),
        sa.Column("error_code", sa.Text(), nullable=True),
        sa.Column("latency_ms", sa.Integer(), nullable=True),
        sa.Column("first_token_ms", sa.Integer(), nullable=True),
        sa.Column("raw", sa.JSON(), nullable=True),
        sa.Column(
            "opened_at",
            sa.DateTime(timezone=True),
            server_default=sa.text("clock_timestamp()"),
            nullable=False,
        ),
        sa.Column("closed_at", sa.DateTime(timezone=True), nullable=True),
        sa.CheckConstraint("state IN ('open', 'closed', 'abandoned')", name=op.f("ck_usage_entries_state")),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenants.id"], name=op.f("fk_usage_entries_tenant_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_usage_entries")),
    )
    op.create_index(
        "ix_usage_entries_open",
        "usage_entries",
        ["session_id"],
        unique=False,
        postgresql_where=sa.text("state = 'open'"),
    )
    op.create_index("ix_usage_entries_session_id", "usage_entries", ["session_id", "opened_at"], unique=False)
    op.create_index("ix_usage_entries_tenant_id", "usage_entries", ["tenant_id", "opened_at"], unique=False)
    op.create_table(
        "agent_versions",
        sa.Column("agent_id", sa.Uuid(), nullable=False),
        sa.Column("version", sa.Integer(), nullable=False),
        sa.Column("tenant_id", sa.Uuid(), nullable=False),
        sa.Column("config", sa.JSON(), nullable=False),
        sa.Column(
            "created_at",
            sa.DateTime(timezone=True),
            server_default=sa.text("clock_timestamp()"),
            nullable=False,
        ),
        sa.ForeignKeyConstraint(["agent_id"], ["agents.id"], name=op.f("fk_agent_versions_agent_id")),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenants.id"], name=op.f("fk_agent_versions_tenant_id")),
        sa.PrimaryKeyConstraint("agent_id", "version", name=op.f("pk_agent_versions")),
    )
    op.create_table(
        "sessions",
        sa.Column("id", sa.Uuid(), nullable=False),
        sa.Column("tenant_id", sa.Uuid(), nullable=False),
        sa.Column("agent_id", sa.Uuid(), nullable=False),
        sa.Column("agent_version", sa.Integer(), nullable=False),
        sa.Column("agent_overrides", sa.JSON(), nullable=True),
        sa.Column("title", sa.Text(), nullable=True),
        sa.Column("end_user_id", sa.Text(), nullable=True),
        sa.Column("environment_id", sa.Text(), nullable=True),
        sa.Column("metadata", postgresql.JSONB(astext_type=sa.Text()), server_default="{}", nullable=False),
        sa.Column("budget", postgresql.JSONB(astext_type=sa.Text()), nullable=True),
        sa.Column("forked_from", sa.Uuid(), nullable=True),
        sa.Column("epoch", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("commit_no", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("inbox_no", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("last_seq", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("last_position", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("memory_id", sa.Uuid(), nullable=True),
        sa.Column("current_cache_hit_tokens", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("current_cache_miss_tokens", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("current_output_tokens", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("full_cache_hit_tokens", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("full_cache_miss_tokens", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("full_output_tokens", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("cost_usd", sa.Numeric(), server_default="0", nullable=False),
        sa.Column("unpriced_requests", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column(
            "created_at",
            sa.DateTime(timezone=True),
            server_default=sa.text("clock_timestamp()"),
            nullable=False,
        ),
        sa.Column(
            "updated_at",
            sa.DateTime(timezone=True),
            server_default=sa.text("clock_timestamp()"),
            nullable=False,
        ),
        sa.Column("archived_at", sa.DateTime(timezone=True), nullable=True),
        sa.ForeignKeyConstraint(
            ["agent_id", "agent_version"],
            ["agent_versions.agent_id", "agent_versions.version"],
            name="fk_sessions_agent_version",
        ),
        sa.ForeignKeyConstraint(["agent_id"], ["agents.id"], name=op.f("fk_sessions_agent_id")),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenants.id"], name=op.f("fk_sessions_tenant_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_sessions")),
        postgresql_with={"fillfactor": "70"},
    )
    op.create_index("ix_sessions_agent_id", "sessions", ["agent_id", "created_at"], unique=False)
    op.create_index("ix_sessions_tenant_id", "sessions", ["tenant_id", "created_at", "id"], unique=False)
    op.create_table(
        "api_keys",
        sa.Column("id", sa.Uuid(), nullable=False),
        sa.Column("tenant_id", sa.Uuid(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("sha256", postgresql.BYTEA(), nullable=False),
        sa.Column("hint", sa.Text(), nullable=False),
        sa.Column("scopes", postgresql.ARRAY(sa.Text()), nullable=False),
        sa.Column("session_id", sa.Uuid(), nullable=True),
        sa.Column("max_running_runs", sa.Integer(), nullable=True),
        sa.Column(
            "created_at",
            sa.DateTime(timezone=True),
            server_default=sa.text("clock_timestamp()"),
            nullable=False,
        ),
        sa.Column("expires_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("revoked_at", sa.DateTime(timezone=True), nullable=True),
        sa.ForeignKeyConstraint(
            ["session_id"], ["sessions.id"], name=op.f("fk_api_keys_session_id"), ondelete="CASCADE"
        ),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenants.id"], name=op.f("fk_api_keys_tenant_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_api_keys")),
        sa.UniqueConstraint("sha256", name=op.f("uq_api_keys_sha256")),
    )
    op.create_index(op.f("ix_api_keys_session_id"), "api_keys", ["session_id"], unique=False)
    op.create_index(
        "ix_api_keys_capped",
        "api_keys",
        ["id"],
        unique=False,
        postgresql_where=sa.text("max_running_runs IS NOT NULL"),
    )
    op.create_index("ix_api_keys_tenant_id", "api_keys", ["tenant_id", "created_at"], unique=False)
    op.create_table(
        "events",
        sa.Column("session_id", sa.Uuid(), nullable=False),
        sa.Column("seq", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("id", sa.Uuid(), nullable=False),
        sa.Column("tenant_id", sa.Uuid(), nullable=False),
        sa.Column("run_id", sa.Uuid(), nullable=True),
        sa.Column("type", sa.Text(), nullable=False),
        sa.Column("body", postgresql.BYTEA(), nullable=False),
        sa.Column(
            "created_at",
            sa.DateTime(timezone=True),
            server_default=sa.text("clock_timestamp()"),
            nullable=False,
        ),
        sa.ForeignKeyConstraint(
            ["session_id"], ["sessions.id"], name=op.f("fk_events_session_id"), ondelete="CASCADE"
        ),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenants.id"], name=op.f("fk_events_tenant_id")),
        sa.PrimaryKeyConstraint("session_id", "seq", name=op.f("pk_events")),
    )
    op.create_table(
        "files",
        sa.Column("id", sa.Uuid(), nullable=False),
        sa.Column("tenant_id", sa.Uuid(), nullable=False),
        sa.Column("session_id", sa.Uuid(), nullable=True),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("media_type", sa.Text(), nullable=False),
        sa.Column("size_bytes", sa.BigInteger(), nullable=False),
        sa.Column("sha256", postgresql.BYTEA(), nullable=False),
        sa.Column("content", postgresql.BYTEA(), nullable=False),
        sa.Column(
            "created_at",
            sa.DateTime(timezone=True),
            server_default=sa.text("clock_timestamp()"),
            nullable=False,
        ),
        sa.ForeignKeyConstraint(
            ["session_id"], ["sessions.id"], name=op.f("fk_files_session_id"), ondelete="CASCADE"
        ),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenants.id"], name=op.f("fk_files_tenant_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_files")),
    )
    op.create_index(op.f("ix_files_session_id"), "files", ["session_id"], unique=False)
    op.create_index("ix_files_tenant_id", "files", ["tenant_id", "created_at", "id"], unique=False)
    op.create_table(
        "memories",
        sa.Column("id", sa.Uuid(), nullable=False),
        sa.Column("tenant_id", sa.Uuid(), nullable=False),
        sa.Column("session_id", sa.Uuid(), nullable=False),
        sa.Column("position", sa.BigInteger(), nullable=False),
        sa.Column("seen_position", sa.BigInteger(), nullable=False),
        sa.Column("text", sa.Text(), nullable=False),
        sa.Column("usage_entry_id", sa.Uuid(), nullable=True),
        sa.Column(
            "created_at",
            sa.DateTime(timezone=True),
            server_default=sa.text("clock_timestamp()"),
            nullable=False,
        ),
        sa.ForeignKeyConstraint(
            ["session_id"], ["sessions.id"], name=op.f("fk_memories_session_id"), ondelete="CASCADE"
        ),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenants.id"], name=op.f("fk_memories_tenant_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_memories")),
    )
    op.create_index("ix_memories_session_id", "memories", ["session_id", "created_at"], unique=False)
    op.create_table(
        "messages",
        sa.Column("session_id", sa.Uuid(), nullable=False),
        sa.Column("position", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("seq", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("id", sa.Uuid(), nullable=False),
        sa.Column("tenant_id", sa.Uuid(), nullable=False),
        sa.Column("run_id", sa.Uuid(), nullable=True),
        sa.Column("role", sa.Text(), nullable=False),
        sa.Column("blocks", sa.JSON(), nullable=False),
        sa.Column("native_api", sa.Text(), nullable=True),
        sa.Column("native_model", sa.Text(), nullable=True),
        sa.Column("native_body", postgresql.BYTEA(), nullable=True),
        sa.Column(
            "created_at",
            sa.DateTime(timezone=True),
            server_default=sa.text("clock_timestamp()"),
            nullable=False,
        ),
        sa.Column("rolled_back_at", sa.DateTime(timezone=True), nullable=True),
        sa.ForeignKeyConstraint(
            ["session_id"], ["sessions.id"], name=op.f("fk_messages_session_id"), ondelete="CASCADE"
        ),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenants.id"], name=op.f("fk_messages_tenant_id")),
        sa.PrimaryKeyConstraint("session_id", "position", name=op.f("pk_messages")),
    )
    op.create_table(
        "runs",
        sa.Column("id", sa.Uuid(), nullable=False),
        sa.Column("tenant_id", sa.Uuid(), nullable=False),
        sa.Column("session_id", sa.Uuid(), nullable=False),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("api_key_id", sa.Uuid(), nullable=True),
        sa.Column("worker_id", sa.Uuid(), nullable=True),
        sa.Column("options", sa.JSON(), nullable=True),
        sa.Column("after_seq", sa.BigInteger(), nullable=False),
        sa.Column("turns", sa.Integer(), server_default="0", nullable=False),
        sa.Column("takeovers", sa.Integer(), server_default="0", nullable=False),
        sa.Column("takeovers_since_progress", sa.Integer(), server_default="0", nullable=False),
        sa.Column("decision", sa.JSON(), nullable=True),
        sa.Column("stop_reason", sa.JSON(), nullable=True),
        sa.Column("cancel_reason", sa.Text(), nullable=True),
        sa.Column("cancel_mode", sa.Text(), nullable=True),
        sa.Column("cancel_requested_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column(
            "queued_at",
            sa.DateTime(timezone=True),
            server_default=sa.text("clock_timestamp()"),
            nullable=False,
        ),
        sa.Column("started_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("deadline_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("wait_until", sa.DateTime(timezone=True), nullable=True),
        sa.Column("closed_at", sa.DateTime(timezone=True), nullable=True),
        sa.CheckConstraint("state IN ('queued', 'running', 'waiting', 'closed')", name=op.f("ck_runs_state")),
        sa.ForeignKeyConstraint(
            ["session_id"], ["sessions.id"], name=op.f("fk_runs_session_id"), ondelete="CASCADE"
        ),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenants.id"], name=op.f("fk_runs_tenant_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_runs")),
    )
    op.create_index(
        "ix_runs_queued",
        "runs",
        ["tenant_id", "queued_at", "id"],
        unique=False,
        postgresql_where=sa.text("state = 'queued'"),
    )
    op.create_index(
        "ix_runs_running", "runs", ["worker_id"], unique=False, postgresql_where=sa.text("state = 'running'")
    )
    op.create_index(
        "ix_runs_running_tenant",
        "runs",
        ["tenant_id"],
        unique=False,
        postgresql_where=sa.text("state = 'running'"),
    )
    op.create_index(
        "ix_runs_running_key",
        "runs",
        ["api_key_id"],
        unique=False,
        postgresql_where=sa.text("state = 'running'"),
    )
    op.create_index(
        "ix_runs_wait_until",
        "runs",
        ["wait_until"],
        unique=False,
        postgresql_where=sa.text("state = 'waiting'"),
    )
    op.create_index("ix_runs_started", "runs", ["tenant_id", "started_at"], unique=False)
    op.create_index("ix_runs_session_id", "runs", ["session_id", "queued_at", "id"], unique=False)
    op.create_index(
        "uq_runs_open", "runs", ["session_id"], unique=True, postgresql_where=sa.text("state <> 'closed'")
    )
    op.create_table(
        "prompts",
        sa.Column("id", sa.Uuid(), nullable=False),
        sa.Column("tenant_id", sa.Uuid(), nullable=False),
        sa.Column("session_id", sa.Uuid(), nullable=False),
        sa.Column("batch_id", sa.Uuid(), nullable=False),
        sa.Column("seq", sa.BigInteger(), nullable=False),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("delivery", sa.Text(), nullable=False),
        sa.Column("content", sa.JSON(), nullable=False),
        sa.Column("options", sa.JSON(), nullable=True),
        sa.Column("api_key_id", sa.Uuid(), nullable=True),
        sa.Column("run_id", sa.Uuid(), nullable=True),
        sa.Column(
            "created_at",
            sa.DateTime(timezone=True),
            server_default=sa.text("clock_timestamp()"),
            nullable=False,
        ),
        sa.Column(
            "updated_at",
            sa.DateTime(timezone=True),
            server_default=sa.text("clock_timestamp()"),
            nullable=False,
        ),
        sa.CheckConstraint("state IN ('pending', 'applied', 'withdrawn')", name=op.f("ck_prompts_state")),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name=op.f("fk_prompts_run_id"), ondelete="CASCADE"),
        sa.ForeignKeyConstraint(
            ["session_id"], ["sessions.id"], name=op.f("fk_prompts_session_id"), ondelete="CASCADE"
        ),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenants.id"], name=op.f("fk_prompts_tenant_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_prompts")),
    )
    op.create_index(
        "ix_prompts_pending",
        "prompts",
        ["session_id", "seq"],
        unique=False,
        postgresql_where=sa.text("state = 'pending'"),
    )
    op.create_index("ix_prompts_session_id", "prompts", ["session_id", "seq"], unique=False)
    op.create_table(
        "tool_calls",
        sa.Column("id", sa.Uuid(), nullable=False),
        sa.Column("tenant_id", sa.Uuid(), nullable=False),
        sa.Column("session_id", sa.Uuid(), nullable=False),
        sa.Column("run_id", sa.Uuid(), nullable=False),
        sa.Column("child_run_id", sa.Uuid(), nullable=True),
        sa.Column("tool_use_id", sa.Text(), nullable=False),
        sa.Column("position", sa.BigInteger(), nullable=False),
        sa.Column("index", sa.Integer(), nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("input", sa.JSON(), nullable=False),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("idempotent", sa.Boolean(), server_default=sa.text("false"), nullable=False),
        sa.Column("outcome", sa.Text(), nullable=True),
        sa.Column("result", sa.JSON(), nullable=True),
        sa.Column("answer_sha256", postgresql.BYTEA(), nullable=True),
        sa.Column(
            "created_at",
            sa.DateTime(timezone=True),
            server_default=sa.text("clock_timestamp()"),
            nullable=False,
        ),
        sa.Column("started_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("finished_at", sa.DateTime(timezone=True), nullable=True),
        sa.CheckConstraint(
            "state IN ('pending', 'running', 'open', 'done')", name=op.f("ck_tool_calls_state")
        ),
        sa.ForeignKeyConstraint(
            ["run_id"], ["runs.id"], name=op.f("fk_tool_calls_run_id"), ondelete="CASCADE"
        ),
        sa.ForeignKeyConstraint(
            ["session_id"], ["sessions.id"], name=op.f("fk_tool_calls_session_id"), ondelete="CASCADE"
        ),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenants.id"], name=op.f("fk_tool_calls_tenant_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_tool_calls")),
    )
    op.create_index(
        "ix_tool_calls_session_id", "tool_calls", ["session_id", "position", "index"], unique=False
    )
    _secure()


def downgrade() -> None:
    op.drop_index("ix_tool_calls_session_id", table_name="tool_calls")
    op.drop_table("tool_calls")
    op.drop_index("ix_prompts_session_id", table_name="prompts")
    op.drop_index("ix_prompts_pending", table_name="prompts", postgresql_where=sa.text("state = 'pending'"))
    op.drop_table("prompts")
    op.drop_index("uq_runs_open", table_name="runs", postgresql_where=sa.text("state <> 'closed'"))
    op.drop_index("ix_runs_session_id", table_name="runs")
    op.drop_index("ix_runs_started", table_name="runs")
    op.drop_index("ix_runs_wait_until", table_name="runs", postgresql_where=sa.text("state = 'waiting'"))
    op.drop_index("ix_runs_running_key", table_name="runs", postgresql_where=sa.text("state = 'running'"))
    op.drop_index("ix_runs_running_tenant", table_name="runs", postgresql_where=sa.text("state = 'running'"))
    op.drop_index("ix_runs_running", table_name="runs", postgresql_where=sa.text("state = 'running'"))
    op.drop_index("ix_runs_queued", table_name="runs", postgresql_where=sa.text("state = 'queued'"))
    op.drop_table("runs")
    op.drop_table("messages")
    op.drop_index("ix_memories_session_id", table_name="memories")
    op.drop_table("memories")
    op.drop_index("ix_files_tenant_id", table_name="files")
    op.drop_index(op.f("ix_files_session_id"), table_name="files")
    op.drop_table("files")
    op.drop_table("events")
    op.drop_index(
        "ix_api_keys_capped", table_name="api_keys", postgresql_where=sa.text("max_running_runs IS NOT NULL")
    )
    op.drop_index("ix_api_keys_tenant_id", table_name="api_keys")
    op.drop_index(op.f("ix_api_keys_session_id"), table_name="api_keys")
    op.drop_table("api_keys")
    op.drop_index("ix_sessions_tenant_id", table_name="sessions")
    op.drop_index("ix_sessions_agent_id", table_name="sessions")
    op.drop_table("sessions")
    op.drop_table("agent_versions")
    op.drop_index("ix_usage_entries_tenant_id", table_name="usage_entries")
    op.drop_index("ix_usage_entries_session_id", table_name="usage_entries")
    op.drop_index(
        "ix_usage_entries_open", table_name="usage_entries", postgresql_where=sa.text("state = 'open'")
    )
    op.drop_table("usage_entries")
    op.drop_index("ix_idempotency_keys_created_at", table_name="idempotency_keys")
    op.drop_table("idempotency_keys")
    op.drop_index("ix_agents_tenant_id", table_name="agents")
    op.drop_table("agents")
    op.drop_table("workers")
    op.drop_table("tenants")
