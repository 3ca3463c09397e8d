"""One open `RagCache` for each state folder and process, and errors that are LangChain's too."""

from __future__ import annotations

import atexit
import shutil
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from langchain_core import exceptions

from ragcache import errors
from ragcache.errors import ConfigurationError

if TYPE_CHECKING:
    from ragcache import RagCache


@dataclass(slots=True, eq=False)
class _SharedFolder:
    """A state folder and the `RagCache` that is open over it."""

    path: Path | None  # None is a temporary folder of the process, removed at its end
    options: dict[str, Any]  # as declared; fixed once opening has begun
    begun: bool = False
    rag: RagCache | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)  # held for minutes while opening


_folders: dict[Path, _SharedFolder] = {}
_process_folders: list[_SharedFolder] = []  # open ones first, in the order of their opening
_temporary_paths: list[Path] = []
_tables = threading.Lock()  # never held while a folder is opened


def shared_rag(rag: RagCache | None, state: str | Path | None, **options: Any) -> RagCache:
    """The `RagCache` of a state folder: opened once, shared by all classes that name the folder,
    closed when the process ends or by `close_shared`.

    Args:
        rag: an open one, which is returned as it is.
        state: the folder; None is a temporary one of the process, removed at its end.
        options: of `RagCache.open`; None is left out (see `declare_options`).

    Raises:
        ConfigurationError: for a `rag` with a `state` or options, or as `declare_options`.
        RagCacheError: as `RagCache.open`; the declared options are then forgotten.
    """
    found = find_open_rag(rag, state, **options)
    if found is not None:
        return found
    folder = _declared(state, options)
    with folder.lock:
        return _open(folder, options) if folder.rag is None else folder.rag


def find_open_rag(
    rag: RagCache | None, state: str | Path | None, **options: Any
) -> RagCache | None:
    """As `shared_rag`, but None for a folder that is not open."""
    if rag is not None:
        given = ["state"] * (state is not None) + sorted(_given(options))
        if given:
            raise ConfigurationError(f"give an open `rag`, or else {', '.join(given)}; not both")
        return rag
    return _declared(state, options).rag


def declare_options(state: str | Path | None, **options: Any) -> None:
    """Sets how a folder will be opened by its first user, and opens nothing: a chain may call its
    retriever before the chat model that names the model.

    Options that are None are left open. Until the folder is opened the later of two declarations
    that differ holds. The process has a temporary folder for each set of options; a class that
    names none shares the first that was opened, or else the last declared.

    Raises:
        ConfigurationError: for an option that differs from those of the open folder.
    """
    _declared(state, options)


def close_shared() -> None:
    """Closes every `RagCache` that `shared_rag` opened and forgets their options; a later use opens
    it anew."""
    with _tables:
        closing = [*_folders.values(), *_process_folders]
    for folder in closing:
        with folder.lock:
            if folder.rag is not None:
                folder.rag.close()
            _forget(folder)
    while _temporary_paths:
        shutil.rmtree(_temporary_paths.pop(), ignore_errors=True)


def _declared(state: str | Path | None, options: Mapping[str, Any]) -> _SharedFolder:
    path = None if state is None else Path(state).resolve()
    given = _given(options)
    with _tables:
        if path is None:
            return _process_folder(given)
        folder = _folders.setdefault(path, _SharedFolder(path, {}))
        for name, value in given.items():
            if folder.begun and not _same(folder.options, name, value):
                raise ConfigurationError(
                    f"the folder {path} is opened with {name}={folder.options.get(name)!r} in this "
                    f"process; {name}={value!r} needs a `RagCache` of its own: give it as `rag`"
                )
            folder.options[name] = value
        return folder


def _process_folder(given: dict[str, Any]) -> _SharedFolder:
    for folder in _process_folders:
        if given.keys() == folder.options.keys() and all(
            _same(folder.options, *each) for each in given.items()
        ):
            return folder
    if _process_folders and not given:
        return next((folder for folder in _process_folders if folder.begun), _process_folders[-1])
    _process_folders.append(_SharedFolder(None, given))
    return _process_folders[-1]


def _open(folder: _SharedFolder, options: Mapping[str, Any]) -> RagCache:
    from ragcache import RagCache  # loads torch and transformers

    with _tables:
        if not folder.begun:  # closed since it was found: the options of this call hold
            folder.options.update(_given(options))
            if folder.path is None and folder not in _process_folders:
                _process_folders.append(folder)
        folder.begun = True
    try:
        rag = RagCache.open(folder.path or _new_temporary_path(), **folder.options)
    except BaseException:
        _forget(folder)
        raise
    with _tables:
        folder.rag = rag
        _process_folders.sort(key=lambda each: each.rag is None)  # stable
    return rag


def _forget(folder: _SharedFolder) -> None:
    with _tables:
        folder.rag, folder.begun, folder.options = None, False, {}
        if folder in _process_folders:
            _process_folders.remove(folder)


def _given(options: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None}


def _same(known: Mapping[str, Any], name: str, value: Any) -> bool:
    return name in known and (known[name] is value or bool(known[name] == value))


def _new_temporary_path() -> Path:
    _temporary_paths.append(Path(tempfile.mkdtemp(prefix="ragcache-")))
    return _temporary_paths[-1]


atexit.register(close_shared)


# The first that an error is an instance of counts. Early versions of LangChain lack some names; its
# root class takes their place.
_LANGCHAIN_NAMES: dict[type[errors.RagCacheError], str] = {
    errors.PromptTooLong: "ContextOverflowError",
    errors.DeadlineExceeded: "ModelTimeoutError",
    errors.QueueFull: "ModelRateLimitError",
    errors.EngineFailed: "ModelAPIError",
    errors.TextFailed: "ModelAPIError",
    errors.ModelNotFound: "ModelNotFoundError",
    errors.UnsupportedModel: "ModelInvalidRequestError",
    errors.ConfigurationError: "ModelInvalidRequestError",
    errors.RequestError: "ModelInvalidRequestError",
}
_UNMAPPED = (errors.ConstraintFailed, errors.EngineClosed, errors.RequestCancelled)


@contextmanager
def langchain_errors() -> Iterator[None]:
    """Errors that leave the block are of their own type and of LangChain's for the same thing.

    So `except ContextOverflowError` and `except PromptTooLong` both catch a prompt that is too
    long. Errors that LangChain has no name for pass as they are.
    """
    try:
        yield
    except errors.RagCacheError as error:
        kind: Any = type(error)
        combined = None if isinstance(error, _UNMAPPED) else _combined_type(kind)
        if combined is None:
            raise
        raise combined(*error.args) from error


@cache
def _combined_type(kind: type[errors.RagCacheError]) -> type[errors.RagCacheError] | None:
    """A type that is both; None where LangChain has nothing to add."""
    names = (_LANGCHAIN_NAMES[each] for each in kind.__mro__ if each in _LANGCHAIN_NAMES)
    name = next(names, None)
    if name is None or issubclass(kind, exceptions.LangChainException):
        return None
    theirs = getattr(exceptions, name, exceptions.LangChainException)
    return type(kind.__name__, (kind, theirs), {"__module__": __name__, "__doc__": kind.__doc__})
