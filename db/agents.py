"""Agents and their versions. A version is never changed once stored; an update adds one."""

from collections.abc import Callable
from datetime import datetime
from uuid import UUID

import msgspec
from msgspec import Struct

from agents.config import AgentConfig
from db.engine import Record, Transaction
from db.errors import Conflict, NotFound
from db.ids import public, to_uuid
from providers.ids import new_id

_SELECT = """
    SELECT a.id, v.version, v.config, a.created_at, v.created_at AS updated_at, a.archived_at
    FROM agents a JOIN agent_versions v ON v.agent_id = a.id
"""


class Agent(Struct, frozen=True, kw_only=True):
    """An agent in one of its versions. `updated_at` is when this version was made."""

    id: UUID
    version: int
    config: AgentConfig
    created_at: datetime
    updated_at: datetime
    archived_at: datetime | None


async def create_agent(tx: Transaction, config: AgentConfig) -> UUID:
    """The id of a new agent, at version 1."""
    agent_id = to_uuid(new_id("agent"))
    await tx.execute("INSERT INTO agents (id, tenant_id, version) VALUES ($1, $2, 1)", agent_id, tx.tenant_id)
    await _add_version(tx, agent_id, 1, config)
    return agent_id


async def get_agent(tx: Transaction, agent_id: UUID, *, version: int | None = None) -> Agent:
    """The agent in this version, or in its newest. Raises: NotFound."""
    row = await tx.fetchrow(
        f"{_SELECT} WHERE a.id = $1 AND a.tenant_id = $2 AND v.version = coalesce($3, a.version)",
        agent_id,
        tx.tenant_id,
        version,
    )
    if row is None:
        what = "agent" if version is None else f"version {version} of agent"
        raise NotFound(what, public("agent", agent_id))
    return _agent(row)


async def list_agents(
    tx: Transaction,
    *,
    limit: int,
    before: tuple[datetime, UUID] | None = None,
    after_at: datetime | None = None,
    from_at: datetime | None = None,
    before_at: datetime | None = None,
    until_at: datetime | None = None,
    include_archived: bool = False,
) -> list[Agent]:
    """Newest first, each in its newest version; `*_at` bound the time of creation."""
    moment, agent_id = before or (None, None)
    rows = await tx.fetch(
        f"""{_SELECT}
        WHERE a.tenant_id = $1 AND v.version = a.version AND ($2 OR a.archived_at IS NULL)
          AND ($3::timestamptz IS NULL OR (a.created_at, a.id) < ($3, $4::uuid))
          AND ($5::timestamptz IS NULL OR a.created_at > $5)
          AND ($6::timestamptz IS NULL OR a.created_at >= $6)
          AND ($7::timestamptz IS NULL OR a.created_at < $7)
          AND ($8::timestamptz IS NULL OR a.created_at <= $8)
        ORDER BY a.created_at DESC, a.id DESC LIMIT $9""",
        tx.tenant_id,
        include_archived,
        moment,
        agent_id,
        after_at,
        from_at,
        before_at,
        until_at,
        limit,
    )
    return [_agent(row) for row in rows]


async def list_versions(
    tx: Transaction, agent_id: UUID, *, limit: int, below: int | None = None
) -> list[Agent]:
    """The versions below `below`, newest first. Raises: NotFound."""
    await get_agent(tx, agent_id)
    rows = await tx.fetch(
        f"""{_SELECT} WHERE a.id = $1 AND a.tenant_id = $2 AND ($3::int8 IS NULL OR v.version < $3)
        ORDER BY v.version DESC LIMIT $4""",
        agent_id,
        tx.tenant_id,
        below,
        limit,
    )
    return [_agent(row) for row in rows]


async def update_agent(
    tx: Transaction,
    agent_id: UUID,
    change: Callable[[AgentConfig], AgentConfig],
    *,
    expected_version: int | None = None,
) -> int:
    """The version after `change`; the same as before when nothing changed.

    Raises: NotFound; Conflict `agent_archived`, or `version_mismatch` when it is not at `expected_version`.
    """
    await _lock(tx, agent_id)
    agent = await get_agent(tx, agent_id)
    if agent.archived_at is not None:
        raise Conflict("agent_archived", "The agent is archived and cannot be changed.")
    if expected_version not in (None, agent.version):
        raise Conflict(
            "version_mismatch",
            f"The agent is at version {agent.version}, not {expected_version}; read it again, then update.",
        )
    config = change(agent.config)
    if config == agent.config:
        return agent.version
    await _add_version(tx, agent_id, agent.version + 1, config)
    await tx.execute(
        "UPDATE agents SET version = $2, updated_at = clock_timestamp() WHERE id = $1",
        agent_id,
        agent.version + 1,
    )
    return agent.version + 1


async def archive_agent(tx: Transaction, agent_id: UUID) -> None:
    """No session can be made of it from the commit on; sessions that exist go on. Raises: NotFound."""
    await _lock(tx, agent_id)
    await tx.execute(
        "UPDATE agents SET archived_at = coalesce(archived_at, clock_timestamp()) WHERE id = $1", agent_id
    )


async def _lock(tx: Transaction, agent_id: UUID) -> None:
    found = await tx.fetchval(
        "SELECT true FROM agents WHERE id = $1 AND tenant_id = $2 FOR UPDATE", agent_id, tx.tenant_id
    )
    if not found:
        raise NotFound("agent", public("agent", agent_id))


async def _add_version(tx: Transaction, agent_id: UUID, version: int, config: AgentConfig) -> None:
    await tx.execute(
        "INSERT INTO agent_versions (agent_id, version, tenant_id, config) VALUES ($1, $2, $3, $4)",
        agent_id,
        version,
        tx.tenant_id,
        msgspec.json.encode(config).decode(),
    )


def _agent(row: Record) -> Agent:
    return Agent(
        id=row["id"],
        version=row["version"],
        config=msgspec.json.decode(row["config"], type=AgentConfig),
        created_at=row["created_at"],
        updated_at=row["updated_at"],
        archived_at=row["archived_at"],
    )
