"""No log line shows a secret, whatever the part of it that the secret came in."""

import json
import logging

import pytest

from app.settings import Settings
from app.telemetry import JsonFormatter, TextFormatter

OWN = "arm_" + "k" * 43
TOKEN = "armt_" + "t" * 43
SETTINGS = Settings(
    database_url="postgresql://me:pass%2Fword-1@db/armillary",
    redis_url="redis://:hunter2hunter2@redis/0",
    anthropic_api_key='sk-ant-one,sk-ant-"two',
)
SECRETS = (
    OWN,
    TOKEN,
    "pass/word-1",
    "pass%2Fword-1",
    "hunter2hunter2",
    "sk-ant-one",
    'sk-ant-"two',
    r"sk-ant-\"two",
)


@pytest.mark.parametrize("secret", SECRETS)
@pytest.mark.parametrize("kind", [JsonFormatter, TextFormatter])
def test_a_line_shows_no_secret(kind: type[JsonFormatter | TextFormatter], secret: str) -> None:
    error = ValueError(f"refused: {secret}")
    exception = (ValueError, error, None)
    record = logging.LogRecord("test", logging.ERROR, "", 0, "said %s.", (secret,), exception)
    record.path = f"/v1/{secret}"
    line = kind(SETTINGS.secrets).format(record)
    assert secret not in line
    assert "said " in line
    assert "refused: " in line


def test_a_line_without_its_secrets_is_json() -> None:
    record = logging.LogRecord("test", logging.INFO, "", 0, 'a "%s"', (OWN,), None)
    assert json.loads(JsonFormatter().format(record))["message"] == 'a "arm_***"'
