"""The OpenAPI document is valid, is the committed one, and says what clients need."""

import json
from pathlib import Path
from typing import Any

import pytest
from openapi_spec_validator import validate

from agents.events import AnyEvent
from app.openapi import document

COMMITTED = Path(__file__).parents[2] / "openapi" / "openapi.json"


@pytest.fixture(scope="module")
def described() -> Any:
    return json.loads(document())


def test_document_is_valid_openapi(described: Any) -> None:
    validate(described)


def test_committed_document_is_what_the_code_says() -> None:
    assert COMMITTED.read_bytes() == document(), "run: armillary openapi > openapi/openapi.json"


def test_every_event_is_told_apart_by_its_type(described: Any) -> None:
    schemas = described["components"]["schemas"]
    mapping = schemas["SessionEvent"]["discriminator"]["mapping"]
    assert len(mapping) == len(AnyEvent.__args__)
    for event_type, reference in mapping.items():
        assert schemas[reference.rpartition("/")[2]]["properties"]["type"]["enum"] == [event_type]


def test_streams_are_described_frame_by_frame(described: Any) -> None:
    schemas = described["components"]["schemas"]
    answer = described["paths"]["/v1/sessions/{session_id}/events/stream"]["get"]["responses"]["200"]
    reference = answer["content"]["text/event-stream"]["schema"]["$ref"]
    frame = schemas[reference.rpartition("/")[2]]
    names = {
        option["$ref"].rpartition("/")[2] for option in frame["properties"]["data"]["contentSchema"]["anyOf"]
    }
    assert names == {"SessionEvent", "EventStart", "EventDelta", "SessionGap"}


def test_request_bodies_are_closed(described: Any) -> None:
    create = described["components"]["schemas"]["AgentCreate"]
    assert create["additionalProperties"] is False
    assert create["properties"]["max_turns"]["anyOf"][0]["minimum"] == 1


def test_every_operation_names_its_errors_and_has_its_own_name(described: Any) -> None:
    operations = [operation for path in described["paths"].values() for operation in path.values()]
    for operation in operations:
        assert operation["responses"]["4XX"] == {"$ref": "#/components/responses/Problem"}
    names = [operation["operationId"] for operation in operations]
    assert sorted(set(names)) == sorted(names)


def test_every_post_takes_an_idempotency_key(described: Any) -> None:
    for path, operations in described["paths"].items():
        if "post" in operations:
            names = [parameter["name"] for parameter in operations["post"].get("parameters", ())]
            assert "Idempotency-Key" in names, path
