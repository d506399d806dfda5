"""The settings as a page of the handbook, made from their definitions."""

import re
import typing
from typing import Any, Literal

import msgspec
from msgspec import Meta

from app.settings import FALLBACKS, PREFIX, Settings, bare_type


def settings_page() -> str:
    """`docs/settings.md`, whole."""
    return (
        "# Settings\n\n"
        "Every setting comes from the environment and is checked at the start: a wrong value, or an\n"
        "unknown variable that begins with `ARMILLARY_`, stops it with one line for each problem. An empty\n"
        "value counts as not set. With neither `ARMILLARY_DATABASE_URL` nor `ARMILLARY_REDIS_URL`, Postgres\n"
        "and Redis run embedded, with their data under `ARMILLARY_DATA_DIR`.\n\n"
        "This page is printed by `armillary settings`.\n\n" + settings_table()
    )


def settings_table() -> str:
    """The settings as a Markdown table, for the handbook."""
    rows = ["| variable | default | unit | range | meaning |", "|---|---|---|---|---|"]
    for field in msgspec.structs.fields(Settings):
        meta = _meta(field.type)
        variable = f"`{PREFIX}{field.name.upper()}`"
        if fallback := FALLBACKS.get(field.name):
            variable += f", else `{fallback}`"
        default = field.default_factory() if field.default is msgspec.NODEFAULT else field.default
        cells = (variable, _shown(default), _unit(field.name), _range(field.type, meta), meta.description)
        rows.append("| " + " | ".join(str(cell).replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(rows) + "\n"


def _meta(kind: Any) -> Meta:
    for part in (kind, *typing.get_args(kind)):
        for item in getattr(part, "__metadata__", ()):
            if isinstance(item, Meta):
                return item
    raise TypeError(f"{kind} has no description")


def _shown(default: object) -> str:
    if default is None:
        return "not set"
    if isinstance(default, bool):
        return f"`{str(default).lower()}`"
    return f"`{default}`"


def _unit(name: str) -> str:
    units = {"_s": "seconds", "_bytes": "bytes", "_days": "days", "_hours": "hours", "_usd": "US dollars"}
    match = re.search(r"_[a-z]+$", name)
    return units.get(match.group(), "") if match else ""


def _range(kind: Any, meta: Meta) -> str:
    bare = bare_type(kind)
    if bare is bool:
        return "`true`, `false`"
    if typing.get_origin(bare) is Literal:
        return ", ".join(f"`{value}`" for value in typing.get_args(bare))
    if meta.pattern is not None:
        return f"`{meta.pattern}`"
    low = f"≥ {meta.ge}" if meta.ge is not None else f"> {meta.gt}" if meta.gt is not None else ""
    high = f"≤ {meta.le}" if meta.le is not None else ""
    return ", ".join(bound for bound in (low, high) if bound)
