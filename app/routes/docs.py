"""`/openapi.json`, and the same as a page that needs no network."""

from functools import cache
from html import escape
from typing import Any

import msgspec
from litestar import Response, get

from app.auth import PUBLIC
from app.openapi import document
from providers.types import JsonObject

_STYLE = """
body{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;color:#222}
h2{margin-top:2.5rem;border-bottom:1px solid #ccc}
code,pre{font:13px/1.5 ui-monospace,monospace;background:#f5f5f5;border-radius:3px;padding:.1em .3em}
pre{padding:.7em;overflow:auto}
summary{cursor:pointer;padding:.25rem 0}
.method{display:inline-block;width:4.5rem;font-weight:600}
td{padding:.1rem 1rem .1rem 0;vertical-align:top}
@media(prefers-color-scheme:dark){body{background:#161616;color:#ddd}code,pre{background:#262626}a{color:#8bf}}
"""


@get("/openapi.json", opt=PUBLIC, include_in_schema=False)
async def openapi() -> Response[bytes]:
    return Response(_document(), media_type="application/json", headers={"cache-control": "max-age=60"})


@get("/docs", opt=PUBLIC, include_in_schema=False)
async def docs() -> Response[bytes]:
    policy = "default-src 'none'; style-src 'unsafe-inline'"
    return Response(_page(), media_type="text/html", headers={"content-security-policy": policy})


ROUTES = [openapi, docs]


@cache
def _document() -> bytes:
    return document()


@cache
def _page() -> bytes:
    described: JsonObject = msgspec.json.decode(_document())
    groups: dict[str, list[str]] = {}
    for path, operations in described["paths"].items():
        for method, operation in operations.items():
            groups.setdefault(operation.get("tags", ["Other"])[0], []).append(
                _operation(path, method, operation)
            )
    parts = [f"<h2>{escape(tag)}</h2>{''.join(entries)}" for tag, entries in sorted(groups.items())]
    parts.append("<h2>Schemas</h2>")
    parts += [_schema(name, schema) for name, schema in sorted(described["components"]["schemas"].items())]
    title = f"{escape(described['info']['title'])} {escape(described['info']['version'])}"
    head = f'<meta charset="utf-8"><title>{title}</title><style>{_STYLE}</style>'
    intro = f"<h1>{title}</h1><p>{escape(described['info']['description'])}</p>"
    link = '<p>As a document: <a href="openapi.json">openapi.json</a></p>'
    return f"<!doctype html><html lang=en>{head}<body>{intro}{link}{''.join(parts)}".encode()


def _operation(path: str, method: str, operation: JsonObject) -> str:
    rows = "".join(
        f"<tr><td><code>{escape(parameter['name'])}</code><td>{parameter['in']}"
        f"<td>{escape(parameter.get('description', ''))}"
        for parameter in operation.get("parameters", ())
    )
    body = _content("Body", operation.get("requestBody", {}))
    answers = "".join(
        _content(f"Answer {status}", answer)
        for status, answer in operation["responses"].items()
        if "$ref" not in answer
    )
    text = escape(operation.get("description") or operation.get("summary") or "")
    head = f"<span class=method>{method.upper()}</span><code>{escape(path)}</code> {text}"
    return f"<details><summary>{head}</summary><table>{rows}</table>{body}{answers}</details>"


def _content(label: str, holder: JsonObject) -> str:
    return "".join(
        f"<p>{label}: {escape(media_type)} {_reference(content.get('schema', {}))}</p>"
        for media_type, content in holder.get("content", {}).items()
    )


def _reference(schema: JsonObject) -> str:
    name = schema.get("$ref", "").rpartition("/")[2]
    return f'<a href="#{escape(name)}">{escape(name)}</a>' if name else ""


def _schema(name: str, schema: Any) -> str:
    text = escape(msgspec.json.format(msgspec.json.encode(schema), indent=2).decode())
    head = f'<details id="{escape(name)}"><summary><code>{escape(name)}</code></summary>'
    return f"{head}<pre>{text}</pre></details>"
