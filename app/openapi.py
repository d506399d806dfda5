"""The OpenAPI document, made from the handlers; the committed `openapi/openapi.json` is exactly this.

Litestar contributes paths and parameters. Bodies and answers come from msgspec's own schemas, which keep what
Litestar's lose: bounds, closed objects, discriminators, descriptions. A handler says in `opt` what its types
do not: `request_content` and `response_content` (media type objects of OpenAPI), `event_stream` (True when it
can answer with a stream of events; alone, or beside the JSON of its return type), `other_answers` (what
further statuses of success mean; all but 204 carry its JSON).
"""

import inspect
import json
import typing
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec
from litestar import Litestar, Response
from litestar.handlers import HTTPRouteHandler
from litestar.openapi import OpenAPIConfig
from litestar.openapi.spec import Components, SecurityScheme
from litestar.routes import HTTPRoute

from agents.events import AnyEvent
from agents.types import DeltaKind
from app.auth import authenticate
from app.errors import PROBLEM_MEDIA_TYPE, Problem
from app.http_json import ApiRequest
from app.injection import DEPENDENCIES
from app.streaming.frames import GapReason
from providers.types import JsonObject

VERSION = "0.1.0"
REF = "#/components/schemas/{name}"
EVENT = "SessionEvent"
FRAME = "SessionEventFrame"


class StartedEvent(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    type: DeltaKind


class EventStart(msgspec.Struct, frozen=True, kw_only=True, tag="event_start", tag_field="type"):
    """An event is being produced; its previews follow, and its final form has the same id."""

    event: StartedEvent


class EventDelta(msgspec.Struct, frozen=True, kw_only=True, tag="event_delta", tag_field="type"):
    """More of an event that has started. Append it; what `delta` holds depends on its `type`."""

    event_id: str
    delta: JsonObject


class SessionGap(msgspec.Struct, frozen=True, kw_only=True, tag="session.gap", tag_field="type"):
    """The cursor could not be read; the log follows from `first_seq`."""

    session_id: str
    reason: GapReason
    first_seq: int


PREVIEWS = (EventStart, EventDelta, SessionGap)
"""What a stream carries besides durable events."""

_DESCRIPTION = """\
Agents as a service: create agents, post prompts, and read every token over Server-Sent Events.

Send a key as `Authorization: Bearer …` or `x-api-key: …`. Errors are problem documents (RFC 9457). Every POST
takes an `Idempotency-Key`: the same request again answers with the same resources.
"""

_IDEMPOTENCY_KEY: JsonObject = {
    "name": "Idempotency-Key",
    "in": "header",
    "required": False,
    "description": "Makes a repeated request have the effect of one. Remembered for a day.",
    "schema": {"type": "string", "minLength": 1, "maxLength": 255},
}


def document() -> bytes:
    """The document as indented JSON, the same for the same code."""
    from app.routes import ROUTES

    text = json.dumps(build(ROUTES), indent=2, sort_keys=True, ensure_ascii=False)
    return (text + "\n").encode()


def build(handlers: Iterable[Any]) -> JsonObject:
    """The document of these handlers."""
    app = _schema_app(handlers)
    document: JsonObject = app.openapi_schema.to_schema()
    routed = list(_operations(app, document))
    schemas = _schemas(
        {kind for handler, _, _ in routed for kind in (_body_type(handler), _answer_type(handler)) if kind}
    )
    document["components"]["schemas"] = schemas.components
    for handler, method, operation in routed:
        _describe(operation, handler, method, schemas)
    document["components"]["responses"] = {"Problem": _problem_response()}
    return document


class _Schemas:
    """msgspec's schemas of some types: how each is referred to, and the components behind the references."""

    def __init__(self, kinds: list[Any]) -> None:
        found, self.components = msgspec.json.schema_components(kinds, ref_template=REF)
        self._of = {str(kind): schema for kind, schema in zip(kinds, found, strict=True)}

    def of(self, kind: Any) -> JsonObject:
        return self._of[str(kind)]


def _schemas(kinds: set[Any]) -> _Schemas:
    schemas = _Schemas([*sorted(kinds, key=str), AnyEvent, Problem, *PREVIEWS])
    schemas.components[EVENT] = _event_union(schemas.of(AnyEvent))
    previews = [schemas.of(kind) for kind in PREVIEWS]
    schemas.components[FRAME] = _event_frame([{"$ref": REF.format(name=EVENT)}, *previews])
    return schemas


def _schema_app(handlers: Iterable[Any]) -> Litestar:
    """An application that is never served: it only knows its own paths."""
    return Litestar(
        list(handlers),
        guards=[authenticate],
        request_class=ApiRequest,
        dependencies=DEPENDENCIES,
        openapi_config=OpenAPIConfig(
            title="Armillary",
            version=VERSION,
            description=_DESCRIPTION,
            security=[{"bearer": []}, {"key": []}],
            components=Components(
                security_schemes={
                    "bearer": SecurityScheme(type="http", scheme="bearer"),
                    "key": SecurityScheme(type="apiKey", name="x-api-key", security_scheme_in="header"),
                }
            ),
            operation_id_creator=lambda handler, method, _: handler.handler_name,
        ),
        logging_config=None,
    )


def _operations(app: Litestar, document: JsonObject) -> Iterator[tuple[HTTPRouteHandler, str, JsonObject]]:
    """Each handler in the document with its method and its operation object."""
    for route in app.routes:
        if not isinstance(route, HTTPRoute):
            continue
        path = document["paths"].get(route.path_format, {})
        for method, (handler, _) in route.route_handler_map.items():
            if (operation := path.get(method.lower())) is not None:
                yield handler, method, operation


def _describe(operation: JsonObject, handler: HTTPRouteHandler, method: str, schemas: _Schemas) -> None:
    """Puts texts, parameters, body, answers and errors in place."""
    operation.pop("deprecated", None)
    summary, _, description = (inspect.getdoc(handler.fn) or handler.handler_name).partition("\n\n")
    operation["summary"] = " ".join(summary.split())
    if description:
        operation["description"] = " ".join(description.split())
    if "parameters" in operation:
        operation["parameters"] = [_tidy(parameter) for parameter in operation["parameters"]]
    if (body := _body_type(handler)) is not None:
        operation["requestBody"] = {
            "required": not handler.parsed_data_field.has_default,  # type: ignore[union-attr]
            "content": {"application/json": {"schema": schemas.of(body)}},
        }
    elif content := handler.opt.get("request_content"):
        operation["requestBody"] = {"required": True, "content": content}
    answer: JsonObject = {"description": "Done."}
    if content := _answer_content(handler, schemas):
        answer["content"] = content
    operation["responses"] = {str(handler.status_code): answer, **_other_answers(handler, schemas)}
    if handler.opt.get("public"):
        operation["security"] = []
    problem = {"$ref": "#/components/responses/Problem"}
    operation["responses"] |= {"4XX": problem, "5XX": problem}
    if method == "POST":
        operation.setdefault("parameters", []).append(_IDEMPOTENCY_KEY)


def _tidy(parameter: JsonObject) -> JsonObject:
    """A parameter without what says nothing; one that may be left out cannot be sent as null."""
    schema = {name: value for name, value in parameter["schema"].items() if name != "description"}
    kinds = [kind for kind in schema.pop("oneOf", ()) if kind.get("type") != "null"]
    if len(kinds) == 1:
        schema = kinds[0] | schema
    elif kinds:
        schema["oneOf"] = kinds
    for bound in ("minimum", "maximum"):
        if schema.get("type") == "integer" and bound in schema:
            schema[bound] = int(schema[bound])
    kept = {name: parameter[name] for name in ("name", "in", "description") if name in parameter}
    return kept | {"required": parameter.get("required", False), "schema": schema}


def _answer_content(handler: HTTPRouteHandler, schemas: _Schemas) -> JsonObject:
    content: JsonObject = dict(handler.opt.get("response_content") or {})
    if (kind := _answer_type(handler)) is not None and not content:
        content["application/json"] = {"schema": schemas.of(kind)}
    if handler.opt.get("event_stream"):
        content["text/event-stream"] = {"schema": {"$ref": REF.format(name=FRAME)}}
    return content


def _other_answers(handler: HTTPRouteHandler, schemas: _Schemas) -> JsonObject:
    answers: JsonObject = {}
    for status, meaning in handler.opt.get("other_answers", {}).items():
        answers[str(status)] = {"description": meaning}
        if status != 204:
            answers[str(status)]["content"] = {
                "application/json": {"schema": schemas.of(_answer_type(handler))}
            }
    return answers


def _body_type(handler: HTTPRouteHandler) -> Any:
    field = handler.parsed_data_field
    return None if field is None else field.annotation


def _answer_type(handler: HTTPRouteHandler) -> Any:
    """The type of the JSON that a handler answers with; None when it answers with something else."""
    kind = handler.parsed_fn_signature.return_type.annotation
    if typing.get_origin(kind) is Response:
        kind = typing.get_args(kind)[0]
    origin = typing.get_origin(kind) or kind
    is_json = isinstance(origin, type) and issubclass(origin, msgspec.Struct | list | dict)
    return kind if is_json or _is_union(kind) else None


def _is_union(kind: Any) -> bool:
    return bool(typing.get_args(kind)) and all(
        isinstance(part, type) and issubclass(part, msgspec.Struct) for part in typing.get_args(kind)
    )


def _event_union(schema: JsonObject) -> JsonObject:
    return {"title": EVENT, "description": "Any durable event of a session's log.", **schema}


def _event_frame(data: list[JsonObject]) -> JsonObject:
    return {
        "title": FRAME,
        "description": "One Server-Sent Event; `data` is one line of JSON. A durable event has a number"
        " as its id, a preview two with a dash between. A frame of an id alone only sets the cursor.",
        "type": "object",
        "properties": {
            "id": {"type": "string", "pattern": r"^\d+(-\d+)?$"},
            "event": {"type": "string", "description": "The `type` of the data."},
            "data": {
                "type": "string",
                "contentMediaType": "application/json",
                "contentSchema": {"anyOf": data},
            },
        },
    }


def _problem_response() -> JsonObject:
    return {
        "description": "A problem document.",
        "content": {PROBLEM_MEDIA_TYPE: {"schema": {"$ref": REF.format(name="Problem")}}},
    }
