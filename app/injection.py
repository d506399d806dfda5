"""What handlers may ask for by name: `principal`, `resources`, `page_query`."""

from litestar.di import Provide

from app.auth import current_principal
from app.pagination import page_query
from app.resources import current_resources

DEPENDENCIES = {
    "principal": Provide(current_principal, sync_to_thread=False),
    "resources": Provide(current_resources, sync_to_thread=False),
    "page_query": Provide(page_query, sync_to_thread=False),
}
