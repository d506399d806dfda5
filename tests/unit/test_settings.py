from decimal import Decimal
from pathlib import Path

import msgspec
import pytest

from app.settings import PREFIX, Settings, SettingsError, is_secret, load_settings
from app.settings_page import settings_page

ROOT = Path(__file__).parents[2]


def problems_of(environ: dict[str, str]) -> list[str]:
    with pytest.raises(SettingsError) as caught:
        load_settings(environ)
    return caught.value.problems


def test_an_empty_environment_gives_the_defaults_and_embedded_servers() -> None:
    settings = load_settings({})
    assert settings == Settings()
    assert settings.is_embedded


def test_an_empty_value_counts_as_not_set() -> None:
    assert load_settings({"ARMILLARY_PORT": "", "ARMILLARY_REDIS_URL": " "}) == Settings()


def test_values_are_read_as_the_type_of_their_setting() -> None:
    settings = load_settings(
        {
            "ARMILLARY_DATABASE_URL": "postgresql://u:p@db/x",
            "ARMILLARY_REDIS_URL": "redis://cache:6379/0",
            "ARMILLARY_DATABASE_POOLER": "true",
            "ARMILLARY_PORT": "0",
            "ARMILLARY_LEASE_S": "2.5",
            "ARMILLARY_PRICE_OVERRIDES": '{"x:y": {"input_usd": "0.1", "output_usd": 2}}',
            "HOME": "/somewhere",
        }
    )
    assert (settings.is_embedded, settings.database_pooler, settings.port, settings.lease_s) == (
        False,
        True,
        0,
        2.5,
    )
    assert settings.price_overrides["x:y"].input_usd == Decimal("0.1")


def test_every_problem_is_named_in_one_line_of_its_own() -> None:
    problems = problems_of(
        {
            "ARMILLARY_PORT": "99999",
            "ARMILLARY_PROT": "1",
            "ARMILLARY_LEASE_S": "nan",
            "ARMILLARY_LOG_LEVEL": "loud",
            "ARMILLARY_WORKER_SLOTS": "many",
            "ARMILLARY_PRICE_OVERRIDES": "{",
            "ARMILLARY_DATABASE_POOLER": "perhaps",
        }
    )
    named = [problem.split(":")[0] for problem in problems]
    assert sorted(named) == [
        "ARMILLARY_DATABASE_POOLER",
        "ARMILLARY_LEASE_S",
        "ARMILLARY_LOG_LEVEL",
        "ARMILLARY_PORT",
        "ARMILLARY_PRICE_OVERRIDES",
        "ARMILLARY_PROT",
        "ARMILLARY_WORKER_SLOTS",
    ]
    assert all("\n" not in problem for problem in problems)


def test_an_unknown_variable_is_refused_with_the_name_that_was_meant() -> None:
    assert problems_of({"ARMILLARY_DATABSE_POOLER": "1"}) == [
        "ARMILLARY_DATABSE_POOLER: there is no such setting, did you mean ARMILLARY_DATABASE_POOLER?"
    ]
    assert problems_of({"ARMILLARY_FOO": "1"}) == ["ARMILLARY_FOO: there is no such setting"]


@pytest.mark.parametrize(
    "price", ['{"m": {"input_usd": -1, "output_usd": 1}}', '{"m": {"input_usd": 1}}', "[]"]
)
def test_a_price_that_cannot_be_charged_is_refused(price: str) -> None:
    assert len(problems_of({"ARMILLARY_PRICE_OVERRIDES": price})) == 1


def test_one_of_two_server_urls_alone_is_refused() -> None:
    assert "set both" in problems_of({"ARMILLARY_REDIS_URL": "redis://x"})[0]


@pytest.mark.parametrize("url", ["mysql://u:hunter2@x/y", "hunter2"])
def test_a_problem_never_repeats_a_secret(url: str) -> None:
    problems = problems_of({"ARMILLARY_DATABASE_URL": url, "ARMILLARY_REDIS_URL": url})
    assert len(problems) == 2
    assert not any("hunter2" in problem for problem in problems)


def test_the_repr_shows_no_secret() -> None:
    settings = load_settings(
        {
            "ANTHROPIC_API_KEY": "hunter2",
            "ARMILLARY_DATABASE_URL": "postgresql://u:hunter2@x/y",
            "ARMILLARY_REDIS_URL": "redis://:hunter2@x",
        }
    )
    assert "hunter2" not in repr(settings)
    assert "port=8000" in repr(settings)


def test_our_own_variable_wins_over_the_vendors_and_keys_rotate() -> None:
    environ = {"ANTHROPIC_API_KEY": "theirs", "OPENAI_API_KEY": "a, b ,c"}
    assert load_settings(environ).api_keys("anthropic") == ("theirs",)
    assert load_settings({**environ, "ARMILLARY_ANTHROPIC_API_KEY": "ours"}).api_keys("anthropic") == (
        "ours",
    )
    assert load_settings(environ).api_keys("openai") == ("a", "b", "c")
    assert load_settings(environ).api_keys("openai_chat") == ()


def test_every_default_is_inside_its_own_range() -> None:
    for field in msgspec.structs.fields(Settings):
        value = field.default_factory() if field.default is msgspec.NODEFAULT else field.default
        assert msgspec.convert(value, field.type) == value, field.name


def test_every_key_and_url_counts_as_secret() -> None:
    hidden = {field.name for field in msgspec.structs.fields(Settings) if is_secret(field.name)}
    named = {name for name in Settings.__struct_fields__ if "key" in name or "url" in name}
    assert hidden == named


def test_the_handbook_page_is_the_one_that_the_settings_print() -> None:
    page = (ROOT / "docs" / "settings.md").read_text()
    assert page == settings_page(), "run `armillary settings > docs/settings.md`"
    assert all(f"`{PREFIX}{name.upper()}`" in page for name in Settings.__struct_fields__)
