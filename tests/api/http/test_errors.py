"""Every named error has a status, and both shapes tell it."""

from __future__ import annotations

import inspect

import pytest

from ragcache import errors
from ragcache.errors import RagCacheError
from ragcache_api.http.errors import STATUS, HTTPProblem, error_info, is_openai
from ragcache_schemas import PMLError

NAMED = [
    kind
    for _, kind in inspect.getmembers(errors, inspect.isclass)
    if issubclass(kind, RagCacheError) and kind is not RagCacheError
]


@pytest.mark.parametrize("kind", NAMED, ids=lambda kind: kind.__name__)
def test_every_named_error_is_told(kind: type[RagCacheError]) -> None:
    info = error_info(kind("what was wrong"))
    assert info is not None
    assert 400 <= info.status < 600
    assert info.detail == "what was wrong"
    assert ("Retry-After" in info.headers) is (info.status in (429, 503))
    problem = info.problem("/v1/x")
    assert problem["status"] == info.status
    assert problem["type"].startswith("urn:ragcache:problem:")
    assert info.openai()["error"]["message"] == "what was wrong"


def test_the_table_names_errors_that_there_are() -> None:
    assert set(STATUS) <= {kind.__name__ for kind in NAMED} | {PMLError.__name__}


def test_what_nobody_named_is_not_told() -> None:
    assert error_info(RuntimeError("a secret")) is None


def test_a_refusal_carries_its_headers() -> None:
    info = error_info(HTTPProblem(429, "rate-limited", "too many", {"Retry-After": "7"}))
    assert info is not None
    assert info.headers == {"Retry-After": "7"}
    assert info.openai()["error"]["type"] == "rate_limit_error"


@pytest.mark.parametrize(
    ("path", "openai"),
    [("/v1/chat/completions", True), ("/v1/completions", True), ("/v1/models/a/b", True),
     ("/v1/answers", False), ("/v1/chatter", False), ("/admin/stats", False)],
)  # fmt: skip
def test_shapes_go_by_the_path(path: str, openai: bool) -> None:
    assert is_openai(path) is openai
