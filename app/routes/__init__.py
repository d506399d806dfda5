"""One module per resource; `ROUTES` is all that the server answers."""

from app.routes import admin, agents, catalogue, docs, files, health

ROUTES = [
    *agents.ROUTES,
    *files.ROUTES,
    *catalogue.ROUTES,
    *admin.ROUTES,
    *health.ROUTES,
    *docs.ROUTES,
]
