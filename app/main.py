"""The API application."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from litestar import Litestar
from litestar.datastructures import State
from litestar.types import LifeSpanReceive, LifeSpanScope, LifeSpanSend, Receive, Scope, Send
from prometheus_client import CollectorRegistry

from app.access_log import AccessLog, RequestMetrics
from app.auth import authenticate
from app.errors import to_problem
from app.http_json import ApiRequest, refuse_nul
from app.injection import DEPENDENCIES
from app.metrics import ProcessMetrics
from app.resources import open_resources
from app.routes import ROUTES
from app.settings import Settings


class Api(Litestar):
    """Litestar inside the access log, so that also what matches no route has a request id and a log line."""

    def wrap(self, metrics: RequestMetrics) -> None:
        self._edge = AccessLog(super().__call__, metrics)

    async def __call__(
        self,
        scope: Scope | LifeSpanScope,
        receive: Receive | LifeSpanReceive,
        send: Send | LifeSpanSend,
    ) -> None:
        await self._edge(scope, receive, send)  # type: ignore[arg-type]

    def begin_closing(self) -> None:
        """Lets go of what would keep connections open: streams, and requests that wait for a run."""
        resources = self.state.get("resources")
        if resources is not None:  # None: it has not started
            resources.hub.begin_closing()


def create_app(settings: Settings) -> Api:
    """The application; it opens nothing before its lifespan begins."""
    metrics = CollectorRegistry()

    @asynccontextmanager
    async def lifespan(app: Litestar) -> AsyncIterator[None]:
        async with open_resources(settings, metrics) as resources:
            app.state.resources = resources
            metrics.register(ProcessMetrics(resources.hub, resources.database))
            yield

    app = Api(
        ROUTES,
        lifespan=[lifespan],
        guards=[authenticate, refuse_nul],
        dependencies=DEPENDENCIES,
        request_class=ApiRequest,
        request_max_body_size=settings.request_body_limit_bytes,
        exception_handlers={Exception: to_problem},
        state=State(),
        openapi_config=None,  # app/openapi.py makes the document
        logging_config=None,  # app/errors.py logs what is unexpected
    )
    app.wrap(RequestMetrics(metrics))
    return app
