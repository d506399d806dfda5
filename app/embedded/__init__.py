"""Postgres and Redis from wheels, for one machine, with nothing installed.

Imported only when no database or Redis URL is set.
"""

from app.embedded.errors import EmbeddedError
from app.embedded.folder import Endpoints, attach, is_supervised
from app.embedded.supervisor import Supervisor, running_servers

__all__ = ["EmbeddedError", "Endpoints", "Supervisor", "attach", "is_supervised", "running_servers"]
