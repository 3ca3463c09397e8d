"""Where LangChain's classes find their `RagCache`: one for each state folder and process."""

from __future__ import annotations

import atexit
import shutil
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ragcache.errors import ConfigurationError

if TYPE_CHECKING:
    from ragcache import RagCache

Folder = Path | None
"""A state folder; None is that of the process itself, which is removed at its end."""

_opened: dict[Folder, RagCache] = {}
_options: dict[Folder, dict[str, Any]] = {}
_temporary: list[Path] = []
_opening = threading.RLock()


def shared_rag(rag: RagCache | None, state: str | Path | None, **options: Any) -> RagCache:
    """`rag` itself, or that of a state folder: opened once, shared by all that name the folder, and
    closed when the process ends or by `close_shared`.

    state: None is a folder of the process's own, which is removed at the end. options: as of
    `RagCache.open`, those that are None left out; see `declare`. Raises `ConfigurationError` for a
    `rag` with a `state` or options, or as `declare`; and as `RagCache.open`.
    """
    if rag is not None:
        given = ["state"] * (state is not None) + sorted(_given(options))
        if given:
            raise ConfigurationError(f"give an open `rag`, or else {', '.join(given)}; not both")
        return rag
    with _opening:
        folder = declare(state, **options)
        if folder not in _opened:
            from ragcache import RagCache  # loads torch and transformers

            where = _own_folder() if folder is None else folder
            _opened[folder] = RagCache.open(where, **_options[folder])
        return _opened[folder]


def declare(state: str | Path | None, **options: Any) -> Folder:
    """Says how a folder is to be opened by whoever needs it first, and opens nothing: a chain may
    ask its retriever before the chat model that knows which model it is.

    Options that are None say nothing. Raises `ConfigurationError` for one that differs from what
    was declared, or that comes after the folder was opened.
    """
    folder = None if state is None else Path(state).resolve()
    with _opening:
        known = _options.setdefault(folder, {})
        for name, value in _given(options).items():
            if name in known and (known[name] is value or known[name] == value):
                continue
            if name in known or folder in _opened:
                shown = "the folder of the process" if folder is None else f"the folder {folder}"
                raise ConfigurationError(
                    f"{shown} is opened with {name}={known.get(name)!r} in this process; "
                    f"{name}={value!r} needs a `RagCache` of its own: give it as `rag`"
                )
            known[name] = value
    return folder


def close_shared() -> None:
    """Closes every `RagCache` that `shared_rag` opened and forgets their options; who uses one of
    them later opens it anew."""
    with _opening:
        _options.clear()
        while _opened:
            _opened.popitem()[1].close()
        while _temporary:
            shutil.rmtree(_temporary.pop(), ignore_errors=True)


def _given(options: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None}


def _own_folder() -> Path:
    if not _temporary:
        _temporary.append(Path(tempfile.mkdtemp(prefix="ragcache-")))
    return _temporary[0]


atexit.register(close_shared)
