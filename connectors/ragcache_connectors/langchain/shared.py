"""One open `RagCache` for each state folder of a process, and errors that are also LangChain's."""

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

    path: Path | None
    """The folder. Without one, a temporary folder is used, and removed when the process ends."""
    options: dict[str, Any]
    """The declared options, fixed once opening has begun."""
    begun: bool = False
    """Whether opening has begun."""
    rag: RagCache | None = None
    """The open `RagCache`."""
    lock: threading.Lock = field(default_factory=threading.Lock)
    """Held while the folder is opened, which may take minutes."""


_folders: dict[Path, _SharedFolder] = {}
_process_folders: list[_SharedFolder] = []  # open ones first, in the order of their opening
_temporary_paths: list[Path] = []
_tables = threading.Lock()  # never held while a folder is opened


def shared_rag(rag: RagCache | None, state: str | Path | None, **options: Any) -> RagCache:
    """Return the `RagCache` of a state folder, which all classes share.

    It is opened at first use, and closed by `close_shared` or when the process ends.

    Args:
        rag: An open `RagCache`, returned unchanged.
        state: The state folder. Defaults to a temporary folder, which is removed when the process
            ends.
        options: Options of `RagCache.open` (see `declare_options`). None values are ignored.

    Raises:
        ConfigurationError: `rag` is given together with `state` or options, or an option differs
            from the open folder's.
        RagCacheError: `RagCache.open` failed. The declared options are then forgotten.
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
    """Return the `RagCache` of a state folder if it is open, or None (see `shared_rag`)."""
    if rag is not None:
        given = ["state"] * (state is not None) + sorted(_given(options))
        if given:
            raise ConfigurationError(f"give an open `rag`, or else {', '.join(given)}; not both")
        return rag
    return _declared(state, options).rag


def declare_options(state: str | Path | None, **options: Any) -> None:
    """Set the options with which the first user of a folder will open it.

    A chain may call its retriever before the chat model that names the model. Before the folder is
    opened, a later declaration of an option replaces an earlier one. None values are ignored.

    Without `state`, the process has a temporary folder for each set of options. A class without
    options shares the first one that was opened, or else the last declared.

    Raises:
        ConfigurationError: An option differs from the open folder's.
    """
    _declared(state, options)


def close_shared() -> None:
    """Close every `RagCache` that `shared_rag` opened, and forget the options.

    A later use opens the folder again.
    """
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
        if not folder.begun:  # closed since it was found: the options of this call apply
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


# The first class that an error is an instance of counts. Early versions of LangChain lack some
# names, which its root class replaces.
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
    """Raise errors of the block as ragcache's and LangChain's type at once.

    So `except ContextOverflowError` and `except PromptTooLong` both catch a prompt that is too
    long. Errors without a type in LangChain pass unchanged.
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
    """Return a type that is also LangChain's, if LangChain has a type for the error."""
    names = (_LANGCHAIN_NAMES[each] for each in kind.__mro__ if each in _LANGCHAIN_NAMES)
    name = next(names, None)
    if name is None or issubclass(kind, exceptions.LangChainException):
        return None
    theirs = getattr(exceptions, name, exceptions.LangChainException)
    return type(kind.__name__, (kind, theirs), {"__module__": __name__, "__doc__": kind.__doc__})
