"""Where LangChain's classes find their `RagCache`: one for each state folder and process."""

# MERGED ragcache_connectors.langchain.errors: Errors of ragcache as LangChain knows them.

from __future__ import annotations

import asyncio
import atexit
import shutil
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from langchain_core import exceptions

from ragcache import errors as ours
from ragcache.errors import ConfigurationError

if TYPE_CHECKING:
    from ragcache import RagCache


@dataclass(slots=True, eq=False)
class _Folder:
    """path: None is a folder of the process itself, made when it is opened and removed at the end.
    options: as declared; they hold from when opening has begun. lock: held while it is opened or
    closed, which may take minutes."""

    path: Path | None
    options: dict[str, Any]
    begun: bool = False
    rag: RagCache | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)


_folders: dict[Path, _Folder] = {}
_own: list[_Folder] = []  # those that are open first, in the order in which they were opened
_temporary: list[Path] = []
_tables = threading.Lock()  # never held while a folder is opened


def shared_rag(rag: RagCache | None, state: str | Path | None, **options: Any) -> RagCache:
    """`rag` itself, or that of a state folder: opened once, shared by all that name the folder, and
    closed when the process ends or by `close_shared`.

    state: None is a folder of the process's own, which is removed at the end. options: as of
    `RagCache.open`, those that are None left out; see `declare`. Raises `ConfigurationError` for a
    `rag` with a `state` or options, or as `declare`; and as `RagCache.open`, after which the
    options that were declared are forgotten.
    """
    found = opened_rag(rag, state, **options)
    if found is not None:
        return found
    folder = _declared(state, options)
    with folder.lock:
        return _open(folder, options) if folder.rag is None else folder.rag


async def ashared_rag(rag: RagCache | None, state: str | Path | None, **options: Any) -> RagCache:
    """As `shared_rag`, in a thread if the folder is still to be opened."""
    found = opened_rag(rag, state, **options)
    if found is not None:
        return found
    return await asyncio.to_thread(shared_rag, rag, state, **options)


def opened_rag(rag: RagCache | None, state: str | Path | None, **options: Any) -> RagCache | None:
    """As `shared_rag`, at once, and None for a folder that is not open."""
    if rag is not None:
        given = ["state"] * (state is not None) + sorted(_given(options))
        if given:
            raise ConfigurationError(f"give an open `rag`, or else {', '.join(given)}; not both")
        return rag
    return _declared(state, options).rag


def declare(state: str | Path | None, **options: Any) -> None:
    """Says how a folder is to be opened by whoever needs it first, and opens nothing: a chain may
    ask its retriever before the chat model that knows which model it is.

    Options that are None say nothing. Until the folder is opened the later of two that differ
    holds. The process has a folder of its own for each set of options; who names none, and finds
    none that was declared so, shares the first that was opened, or else the last declared. Raises
    `ConfigurationError` for an option that differs from those with which the folder was opened.
    """
    _declared(state, options)


def close_shared() -> None:
    """Closes every `RagCache` that `shared_rag` opened and forgets their options; who uses one of
    them later opens it anew."""
    with _tables:
        closing = [*_folders.values(), *_own]
    for folder in closing:
        with folder.lock:
            if folder.rag is not None:
                folder.rag.close()
            _forget(folder)
    while _temporary:
        shutil.rmtree(_temporary.pop(), ignore_errors=True)


def _declared(state: str | Path | None, options: Mapping[str, Any]) -> _Folder:
    path = None if state is None else Path(state).resolve()
    given = _given(options)
    with _tables:
        if path is None:
            return _own_folder(given)
        folder = _folders.setdefault(path, _Folder(path, {}))
        for name, value in given.items():
            if folder.begun and not _same(folder.options, name, value):
                raise ConfigurationError(
                    f"the folder {path} is opened with {name}={folder.options.get(name)!r} in this "
                    f"process; {name}={value!r} needs a `RagCache` of its own: give it as `rag`"
                )
            folder.options[name] = value
        return folder


def _own_folder(given: dict[str, Any]) -> _Folder:
    for folder in _own:
        if given.keys() == folder.options.keys() and all(
            _same(folder.options, *each) for each in given.items()
        ):
            return folder
    if _own and not given:
        return next((folder for folder in _own if folder.begun), _own[-1])
    _own.append(_Folder(None, given))
    return _own[-1]


def _open(folder: _Folder, options: Mapping[str, Any]) -> RagCache:
    from ragcache import RagCache  # loads torch and transformers

    with _tables:
        if not folder.begun:  # closed since it was found: what is asked for now holds
            folder.options.update(_given(options))
            if folder.path is None and folder not in _own:
                _own.append(folder)
        folder.begun = True
    try:
        rag = RagCache.open(folder.path or _temporary_folder(), **folder.options)
    except BaseException:
        _forget(folder)
        raise
    with _tables:
        folder.rag = rag
        _own.sort(key=lambda each: each.rag is None)  # stable
    return rag


def _forget(folder: _Folder) -> None:
    with _tables:
        folder.rag, folder.begun, folder.options = None, False, {}
        if folder in _own:
            _own.remove(folder)


def _given(options: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None}


def _same(known: Mapping[str, Any], name: str, value: Any) -> bool:
    return name in known and (known[name] is value or bool(known[name] == value))


def _temporary_folder() -> Path:
    _temporary.append(Path(tempfile.mkdtemp(prefix="ragcache-")))
    return _temporary[-1]


atexit.register(close_shared)


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
