"""schemathesis over the OpenAPI document: no 5xx, and no answer that the document does not know."""

from __future__ import annotations

from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)
from starlette.testclient import TestClient

CHECKS = (
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
)
# What takes seconds each time: the plan measures, and verify reads every blob.
SLOW = r"/admin/(plan|verify)"


def operations(client: TestClient) -> list[Any]:
    """All of the service's own document."""
    loaded = schemathesis.openapi.from_dict(client.get("/openapi.json").json())
    loaded.app = client.app
    found = [result.ok() for result in loaded.exclude(path_regex=SLOW).get_all_operations()]
    assert len(found) > 35
    return found


def check(client: TestClient, operation: Any, examples: int) -> None:
    """Calls one operation with what its document allows, and with some that it does not."""

    @given(case=operation.as_strategy())
    @settings(
        max_examples=examples, suppress_health_check=list(HealthCheck),
        phases=[Phase.generate], derandomize=True, database=None,
    )  # fmt: skip
    def run(case: Any) -> None:
        _shorten(case.body)
        case.call_and_validate(checks=CHECKS, headers={**(case.headers or {}), "Host": "localhost"})

    run()


def check_all(client: TestClient, examples: int) -> None:
    failures = []
    for operation in operations(client):
        try:
            check(client, operation, examples)
        except Exception as error:
            failures.append(f"{operation.label}: {error}")
    assert not failures, "\n\n".join(failures)


def test_every_answer_is_documented(client: TestClient) -> None:
    check_all(client, 4)


@pytest.mark.slow
def test_every_answer_is_documented_at_length(client: TestClient) -> None:
    check_all(client, 60)


def test_openais_interface_tells_400_of_what_cannot_be_read(client: TestClient) -> None:
    paths = client.get("/openapi.json").json()["paths"]
    for path in ("/v1/chat/completions", "/v1/completions"):
        told = set(paths[path]["post"]["responses"])
        assert {"400", "500", "501", "504", "507"} <= told
        assert "422" not in told
    assert "422" in paths["/v1/answers"]["post"]["responses"]


def _shorten(body: Any) -> None:
    """Long answers test the model, not the document."""
    if isinstance(body, dict):
        for name in ("max_tokens", "max_completion_tokens", "n"):
            if isinstance(body.get(name), int) and body[name] > 4:
                body[name] = 4
        if "messages" in body and not body.get("max_tokens"):
            body["max_tokens"] = 4


def test_operations_are_named_by_tag_and_function(client: TestClient) -> None:
    paths = client.get("/openapi.json").json()["paths"]
    names = [each["operationId"] for operations in paths.values() for each in operations.values()]
    assert len(set(names)) == len(names)
    assert {"admin.list_modules", "openai.complete_chat", "documents.get_job"} <= set(names)
