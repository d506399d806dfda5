"""What an operator can set. The only module that reads the environment.

A setting `x` is read from `ARMILLARY_X`. Units are in the names: `_s` seconds, `_bytes`, `_usd`.
"""

import difflib
import math
import os
import types
import typing
from collections.abc import Mapping
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import unquote, urlsplit

import msgspec
from msgspec import Meta, Struct

PREFIX = "ARMILLARY_"

# Names that vendors' own tools read, taken when ours is not set.
FALLBACKS = {
    "anthropic_api_key": "ANTHROPIC_API_KEY",
    "anthropic_base_url": "ANTHROPIC_BASE_URL",
    "openai_api_key": "OPENAI_API_KEY",
    "openai_base_url": "OPENAI_BASE_URL",
    "deepseek_api_key": "DEEPSEEK_API_KEY",
    "openrouter_api_key": "OPENROUTER_API_KEY",
}

PostgresUrl = Annotated[str, Meta(pattern="^postgres(ql)?://", description="libpq URL of the database.")]
RedisUrl = Annotated[str, Meta(pattern="^(rediss?|unix)://", description="URL of Redis.")]
HttpUrl = Annotated[str, Meta(pattern="^https?://[^/]", description="Where the API is served.")]
ApiKeys = Annotated[str, Meta(min_length=1, description="API key, or several with commas between them.")]

Vendor = Literal["anthropic", "openai", "openai_chat", "deepseek", "openrouter", "litellm", "ollama"]


class Price(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """US dollars per million tokens. None: as `input_usd`."""

    input_usd: Decimal
    output_usd: Decimal
    cache_read_usd: Decimal | None = None
    cache_write_usd: Decimal | None = None

    def __post_init__(self) -> None:
        for price in (self.input_usd, self.output_usd, self.cache_read_usd, self.cache_write_usd):
            if price is not None and not (price.is_finite() and price >= 0):
                raise ValueError("a price must be a number of at least 0")


class ModelFacts(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a model can do that the tables do not know. What is left out is as the tables have it."""

    tools: bool | None = None
    images: bool | None = None
    thinking: bool | None = None
    output_schema: bool | None = None
    context_window_tokens: Annotated[int, Meta(ge=1)] | None = None
    max_output_tokens: Annotated[int, Meta(ge=1)] | None = None
    safe_usage_ratio: Annotated[float, Meta(gt=0, le=1)] | None = None


class Timeouts(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Seconds for one vendor's answers. What is left out is as for all vendors."""

    first_event_s: Annotated[float, Meta(gt=0, le=86_400)] | None = None
    idle_s: Annotated[float, Meta(gt=0, le=86_400)] | None = None
    total_s: Annotated[float, Meta(gt=0, le=86_400)] | None = None


class SettingsError(Exception):
    """The environment is not usable. `problems` has a line for each fault and names no secret value."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


class Settings(Struct, frozen=True, kw_only=True):
    """All settings of one process. Its repr names no secret."""

    database_url: PostgresUrl | None = None
    database_pooler: Annotated[
        bool, Meta(description="True behind a pooler in transaction mode, such as PgBouncer.")
    ] = False
    database_pool_size: Annotated[
        int, Meta(ge=1, le=200, description="Connections that one process opens at most.")
    ] = 8
    redis_url: RedisUrl | None = None
    redis_pool_size: Annotated[
        int, Meta(ge=2, le=1000, description="Connections that one process opens at most.")
    ] = 32
    data_dir: Annotated[
        str, Meta(min_length=1, description="Folder of the embedded servers, workspaces and files.")
    ] = "./.armillary"

    host: Annotated[str, Meta(min_length=1, description="Address that the API listens on.")] = "127.0.0.1"
    port: Annotated[
        int, Meta(ge=0, le=65535, description="Port that the API listens on; 0 takes a free one.")
    ] = 8000
    request_body_limit_bytes: Annotated[
        int,
        Meta(ge=1 << 10, le=1 << 30, description="Largest request body; larger ones are refused with 413."),
    ] = 32 << 20
    api_connections: Annotated[
        int,
        Meta(ge=16, le=1_000_000, description="Connections, each stream one, that one API process takes."),
    ] = 10_000
    api_shutdown_s: Annotated[
        float, Meta(gt=0, le=60, description="Time that open requests have to end after SIGTERM.")
    ] = 5.0

    serve_workers: Annotated[
        int, Meta(ge=1, le=64, description="Worker processes that `armillary serve` starts.")
    ] = 1
    worker_slots: Annotated[
        int, Meta(ge=1, le=1000, description="Runs that one worker carries on at once.")
    ] = 64
    worker_shutdown_s: Annotated[
        float,
        Meta(gt=0, le=600, description="Time that turns have to reach their next commit after SIGTERM."),
    ] = 20.0
    lease_s: Annotated[
        float,
        Meta(
            ge=1, le=60, description="How long a worker that fell silent keeps its runs; renewed each third."
        ),
    ] = 3.0

    stream_buffer_bytes: Annotated[
        int, Meta(ge=16 << 10, le=64 << 20, description="Bytes that may wait for one slow reader.")
    ] = 1 << 20
    stream_send_timeout_s: Annotated[
        float, Meta(ge=1, le=600, description="A reader that takes nothing for so long is disconnected.")
    ] = 30.0
    stream_heartbeat_s: Annotated[
        float, Meta(ge=0.1, le=15, description="Longest silence on a stream before a comment is sent.")
    ] = 15.0

    default_model: Annotated[
        str, Meta(min_length=1, description="Model of an agent that names none, as `vendor:model`.")
    ] = "rehearsal:demo"
    anthropic_api_key: ApiKeys | None = None
    anthropic_base_url: HttpUrl | None = None
    openai_api_key: ApiKeys | None = None
    openai_base_url: HttpUrl | None = None
    openai_chat_api_key: ApiKeys | None = None
    openai_chat_base_url: HttpUrl | None = None
    deepseek_api_key: ApiKeys | None = None
    deepseek_base_url: HttpUrl | None = None
    openrouter_api_key: ApiKeys | None = None
    openrouter_base_url: HttpUrl | None = None
    litellm_api_key: ApiKeys | None = None
    litellm_base_url: HttpUrl | None = None
    ollama_api_key: ApiKeys | None = None
    ollama_base_url: HttpUrl | None = None
    ollama_context_tokens: Annotated[
        int,
        Meta(ge=256, le=10_000_000, description="Window asked of Ollama where a model's file names none."),
    ] = 16_384
    ollama_keep_alive: (
        Annotated[
            str,
            Meta(
                pattern=r"^-?\d+(\.\d+)?(ms|s|m|h)?$",
                description="How long Ollama keeps a model loaded, such as `10m`; -1 for ever.",
            ),
        ]
        | None
    ) = None
    openrouter_app_url: (
        Annotated[HttpUrl, Meta(description="Site that OpenRouter shows as the origin of requests.")] | None
    ) = None
    openrouter_app_title: Annotated[
        str,
        Meta(
            min_length=1,
            max_length=100,
            pattern="^[ -~]+$",
            description="Name that OpenRouter shows as the origin of requests.",
        ),
    ] = "Armillary"
    provider_first_event_s: Annotated[
        float, Meta(gt=0, le=86_400, description="Longest wait for an answer of a model API to begin.")
    ] = 120.0
    provider_idle_s: Annotated[
        float, Meta(gt=0, le=86_400, description="Longest silence within an answer of a model API.")
    ] = 120.0
    provider_total_s: Annotated[
        float, Meta(gt=0, le=86_400, description="Longest time for one answer of a model API.")
    ] = 3600.0
    provider_timeouts: Annotated[
        dict[Vendor, Timeouts],
        Meta(
            description="JSON object: a vendor (`openai_chat`) to its own `first_event_s`, `idle_s`,"
            " `total_s`."
        ),
    ] = {}
    capability_overrides: Annotated[
        dict[str, ModelFacts],
        Meta(
            description="JSON object: `vendor:model` to any of `tools`, `images`, `thinking`,"
            " `output_schema`, `context_window_tokens`, `max_output_tokens`, `safe_usage_ratio`."
        ),
    ] = {}
    price_overrides: Annotated[
        dict[str, Price],
        Meta(
            description="JSON object: a model name to its `input_usd`, `output_usd` and optional"
            " `cache_read_usd`, `cache_write_usd`, per million tokens."
        ),
    ] = {}

    run_max_turns: Annotated[
        int, Meta(ge=1, le=10_000, description="Turns of a run when the agent does not say.")
    ] = 20
    run_timeout_s: Annotated[
        float, Meta(ge=1, le=7 * 86400, description="Time limit of a run when the agent does not say.")
    ] = 3600.0

    max_queued_runs: Annotated[
        int,
        Meta(ge=1, le=10_000_000, description="Runs of one tenant that may wait for a worker; more get 429."),
    ] = 10_000
    max_pending_prompts: Annotated[
        int, Meta(ge=1, le=100_000, description="Prompts of one session that may wait; more get 429.")
    ] = 1000
    idempotency_hours: Annotated[
        int, Meta(ge=1, le=8760, description="How long an `Idempotency-Key` is remembered.")
    ] = 24

    log_level: Annotated[
        Literal["debug", "info", "warning", "error"], Meta(description="Least severity that is logged.")
    ] = "info"
    log_format: Annotated[
        Literal["json", "text"], Meta(description="`json`: one object a line; `text`: for reading.")
    ] = "json"

    @property
    def is_embedded(self) -> bool:
        """True when Postgres and Redis are ours to start."""
        return self.database_url is None

    @property
    def data_path(self) -> Path:
        return Path(self.data_dir).expanduser().absolute()

    def api_keys(self, vendor: Vendor) -> tuple[str, ...]:
        """The keys to rotate over; empty when none is set."""
        value: str | None = getattr(self, f"{vendor}_api_key")
        return tuple(key.strip() for key in (value or "").split(",") if key.strip())

    def base_url(self, vendor: Vendor) -> str | None:
        """Where the vendor's API is; None leaves it to the adapter."""
        value: str | None = getattr(self, f"{vendor}_base_url")
        return value

    @property
    def secrets(self) -> tuple[str, ...]:
        """Every key and password in the settings, for logs to leave out."""
        keys = [key for vendor in typing.get_args(Vendor) for key in self.api_keys(vendor)]
        values = [getattr(self, name) for name in self.__struct_fields__ if name.endswith("_url")]
        urls = [urlsplit(value) for value in values if value is not None]
        passwords = [url.password for url in urls if url.password]
        return (*keys, *passwords, *map(unquote, passwords))

    def __repr__(self) -> str:
        shown = ", ".join(
            f"{name}={'***' if is_secret(name) and value is not None else repr(value)}"
            for name in self.__struct_fields__
            for value in [getattr(self, name)]
        )
        return f"Settings({shown})"


def is_secret(name: str) -> bool:
    """True for settings whose value may hold a key or a password."""
    return name.endswith(("_api_key", "_url"))


def load_settings(environ: Mapping[str, str] | None = None) -> Settings:
    """The settings in `environ` (None: of this process). An empty value counts as not set.

    Raises: SettingsError, with every problem in it.
    """
    environ = os.environ if environ is None else environ
    fields = {field.name: field for field in msgspec.structs.fields(Settings)}
    known = {PREFIX + name.upper() for name in fields}
    problems = [
        _unknown(name, known) for name in sorted(environ) if name.startswith(PREFIX) and name not in known
    ]
    values: dict[str, Any] = {}
    for name, field in fields.items():
        variable, text = _find(environ, name)
        if not text:
            continue
        try:
            values[name] = _read(text, field.type)
        except msgspec.ValidationError as error:
            problems.append(_wrong(variable, name, text, str(error)))
        except msgspec.DecodeError as error:
            problems.append(f"{variable}: not valid JSON: {error}")
    if ("database_url" in values) != ("redis_url" in values):
        problems.append(
            f"{PREFIX}DATABASE_URL and {PREFIX}REDIS_URL: set both, or neither for the embedded servers"
        )
    if problems:
        raise SettingsError(problems)
    return Settings(**values)


def _find(environ: Mapping[str, str], name: str) -> tuple[str, str]:
    own, fallback = PREFIX + name.upper(), FALLBACKS.get(name, "")
    if not environ.get(own) and environ.get(fallback):
        return fallback, environ[fallback].strip()
    return own, environ.get(own, "").strip()


def _read(text: str, kind: Any) -> Any:
    if typing.get_origin(bare_type(kind)) is dict:
        return msgspec.json.decode(text.encode(), type=kind)
    value = msgspec.convert(text, kind, strict=False)
    if isinstance(value, float) and not math.isfinite(value):
        raise msgspec.ValidationError("Expected a finite number")
    return value


def bare_type(kind: Any) -> Any:
    """`kind` without its annotations and without None."""
    if isinstance(kind, types.UnionType) or typing.get_origin(kind) is typing.Union:
        kind = next(part for part in typing.get_args(kind) if part is not types.NoneType)
    return typing.get_args(kind)[0] if hasattr(kind, "__metadata__") else kind


def _wrong(variable: str, name: str, text: str, reason: str) -> str:
    shown = "the value" if is_secret(name) else repr(text)
    return f"{variable}: {shown} is not usable: {reason[:1].lower()}{reason[1:]}"


def _unknown(variable: str, known: set[str]) -> str:
    # Without the prefix, which makes any two names look alike.
    names = {name.removeprefix(PREFIX): name for name in known}
    close = difflib.get_close_matches(variable.removeprefix(PREFIX), names, n=1)
    return f"{variable}: there is no such setting" + (f", did you mean {names[close[0]]}?" if close else "")
