"""One module per resource; `ROUTES` is all that the server answers."""

from app.routes import (
    admin,
    agent_prompt,
    agents,
    catalogue,
    copies,
    docs,
    events,
    files,
    health,
    memories,
    messages,
    prompts,
    runs,
    sessions,
    usage,
)

ROUTES = [
    *agents.ROUTES,
    *agent_prompt.ROUTES,
    *sessions.ROUTES,
    *copies.ROUTES,
    *events.ROUTES,
    *prompts.ROUTES,
    *runs.ROUTES,
    *messages.ROUTES,
    *memories.ROUTES,
    *usage.ROUTES,
    *files.ROUTES,
    *catalogue.ROUTES,
    *admin.ROUTES,
    *health.ROUTES,
    *docs.ROUTES,
]
