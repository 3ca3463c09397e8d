from __future__ import annotations

import pytest
from langchain_core import exceptions

from ragcache import errors
from ragcache_connectors.langchain.errors import as_langchain


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (errors.PromptTooLong, "ContextOverflowError"),
        (errors.DeadlineExceeded, "ModelTimeoutError"),
        (errors.QueueFull, "ModelRateLimitError"),
        (errors.EngineFailed, "ModelAPIError"),
        (errors.ModelNotFound, "ModelNotFoundError"),
        (errors.UnsupportedModel, "ModelInvalidRequestError"),
        (errors.UnknownCollection, "ModelInvalidRequestError"),
        (errors.InvalidRequest, "ModelInvalidRequestError"),
    ],
)
def test_an_error_is_of_both_types(ours: type[Exception], theirs: str) -> None:
    with pytest.raises(ours, match="what it was") as caught, as_langchain():
        raise ours("what it was")
    assert isinstance(caught.value, getattr(exceptions, theirs, exceptions.LangChainException))
    assert type(caught.value).__name__ == ours.__name__
    assert type(caught.value.__cause__) is ours


@pytest.mark.parametrize("kind", [errors.EngineClosed, errors.StoreFull, errors.MissingExtra])
def test_an_error_without_a_name_there_passes(kind: type[Exception]) -> None:
    with pytest.raises(kind) as caught, as_langchain():
        raise kind("x")
    assert type(caught.value) is kind


def test_an_error_is_made_both_once() -> None:
    with pytest.raises(errors.InvalidRequest) as caught, as_langchain(), as_langchain():
        raise errors.InvalidRequest("x")
    assert type(caught.value.__cause__) is errors.InvalidRequest


def test_errors_of_programs_pass() -> None:
    with pytest.raises(ZeroDivisionError), as_langchain():
        raise ZeroDivisionError
