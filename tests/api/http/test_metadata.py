"""Metadata over the wire: what JSON cannot give back is refused before it is stored."""

from __future__ import annotations

import pytest
from starlette.testclient import TestClient

JSON = {"Content-Type": "application/json"}
PATH = "/v1/collections/tagged/documents"


@pytest.mark.parametrize(
    "metadata",
    [
        '{"a": "\\ud800"}', '{"\\ud800": 1}', '{"a": NaN}', '{"a": 1e999}', '{"a": [-Infinity]}',
        '{"a":' * 150 + "1" + "}" * 150, '{"a":' * 400 + "1" + "}" * 400,
        '{"a": ' + "9" * 5000 + "}",
    ],
)  # fmt: skip
def test_what_json_cannot_give_back_is_not_stored(client: TestClient, metadata: str) -> None:
    body = f'{{"documents": [{{"id": "x", "text": "Words.", "metadata": {metadata}}}]}}'
    refused = client.post(PATH, content=body, headers=JSON)
    assert refused.status_code == 422, refused.text
    assert refused.json()["detail"]
    assert client.get(PATH).status_code == 404


@pytest.mark.parametrize(
    "document",
    [
        '{"id": "\\ud800", "text": "b"}', '{"id": "x", "text": "\\ud800"}',
        '{"id": "x", "text": "b", "uri": "\\u0000"}', '{"id": "\\u0000", "text": "b"}',
        '{"id": "x", "text": "b", "\\ud800": 1}',
    ],
)  # fmt: skip
def test_names_and_texts_are_utf_8(client: TestClient, document: str) -> None:
    refused = client.post(PATH, content=f'{{"documents": [{document}]}}', headers=JSON)
    assert refused.status_code == 422, refused.text
    assert refused.headers["content-type"] == "application/problem+json"
