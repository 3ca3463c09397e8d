"""Errors of ragcache as LangChain knows them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

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
_made: dict[type[ours.RagCacheError], type[ours.RagCacheError] | None] = {}
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


def _both(kind: type[ours.RagCacheError]) -> type[ours.RagCacheError] | None:
    """A type that is both, the same one each time; None where there is nothing to add."""
    if kind not in _made:
        _made[kind] = _make(kind)
    return _made[kind]


def _make(kind: type[ours.RagCacheError]) -> type[ours.RagCacheError] | None:
    name = next((_THEIRS[each] for each in kind.__mro__ if each in _THEIRS), None)
    if name is None or issubclass(kind, exceptions.LangChainException):
        return None
    theirs = getattr(exceptions, name, exceptions.LangChainException)
    return type(kind.__name__, (kind, theirs), {"__module__": __name__, "__doc__": kind.__doc__})
