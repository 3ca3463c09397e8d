"""Errors of ragcache as LangChain knows them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

from langchain_core import exceptions

from ragcache import errors as ours

# The first that an error is an instance of. LangChain's names came one after another, so that an
# early version lacks some; its root stands in for them.
_THEIRS: dict[type[ours.RagCacheError], str] = {
    ours.PromptTooLong: "ContextOverflowError",
    ours.DeadlineExceeded: "ModelTimeoutError",
    ours.QueueFull: "ModelRateLimitError",
    ours.EngineFailed: "ModelAPIError",
    ours.ModelNotFound: "ModelNotFoundError",
    ours.UnsupportedModel: "ModelInvalidRequestError",
    ours.ConfigurationError: "ModelInvalidRequestError",
    ours.RequestError: "ModelInvalidRequestError",
}
_NOT_OF_THE_REQUEST = (ours.ConstraintFailed, ours.EngineClosed, ours.RequestCancelled)


@contextmanager
def as_langchain() -> Iterator[None]:
    """Errors that leave here are of their own type and of LangChain's for the same thing.

    So `except ContextOverflowError` and `except PromptTooLong` both catch a prompt that is too
    long. Errors that LangChain has no name for pass as they are.
    """
    try:
        yield
    except ours.RagCacheError as error:
        both = None if isinstance(error, _NOT_OF_THE_REQUEST) else _both(type(error))
        if both is None:
            raise
        raise both(*error.args) from error


@cache
def _both(kind: type[ours.RagCacheError]) -> type[ours.RagCacheError] | None:
    """A type that is both; None where there is nothing to add."""
    name = next((_THEIRS[each] for each in kind.__mro__ if each in _THEIRS), None)
    if name is None or issubclass(kind, exceptions.LangChainException):
        return None
    theirs = getattr(exceptions, name, exceptions.LangChainException)
    return type(kind.__name__, (kind, theirs), {"__module__": __name__, "__doc__": kind.__doc__})
