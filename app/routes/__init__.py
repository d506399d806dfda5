"""One module per resource; `ROUTES` is all that the server answers."""

from app.routes import health

ROUTES = [*health.ROUTES]
