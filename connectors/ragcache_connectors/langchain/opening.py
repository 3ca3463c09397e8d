"""Where LangChain's classes find their `RagCache`: one for each state folder and process."""

from __future__ import annotations

import atexit
import shutil
import tempfile
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ragcache.errors import ConfigurationError

if TYPE_CHECKING:
    from ragcache import RagCache

_opened: dict[Path, tuple[RagCache, dict[str, Any]]] = {}
_temporary: list[Path] = []
_opening = threading.RLock()


def shared_rag(rag: RagCache | None, state: str | Path | None, **options: Any) -> RagCache:
    """`rag` itself, or that of a state folder: opened once, shared by all that name the folder, and
    closed when the process ends or by `close_shared`.

    state: None is a folder of the process's own, which is removed at the end. options: as of
    `RagCache.open`; those that the first caller gives hold, and a later caller may leave them out
    or give the same. Raises `ConfigurationError` for a `rag` with a `state` or options, or for
    options that differ from those that the folder was opened with; and as `RagCache.open`.
    """
    given = {name: value for name, value in options.items() if value is not None}
    if rag is not None:
        if state is not None or given:
            named = ", ".join(["state"] * (state is not None) + sorted(given))
            raise ConfigurationError(f"give an open `rag`, or else {named}; not both")
        return rag
    with _opening:
        folder = _own_folder() if state is None else Path(state).resolve()
        if folder not in _opened:
            from ragcache import RagCache  # loads torch and transformers

            _opened[folder] = RagCache.open(folder, **given), given
        found, first = _opened[folder]
    for name, value in given.items():
        if name not in first or (first[name] is not value and first[name] != value):
            raise ConfigurationError(
                f"the folder {folder} is open in this process, with {name}={first.get(name)!r}; "
                f"{name}={value!r} needs a `RagCache` of its own: give it as `rag`"
            )
    return found


def close_shared() -> None:
    """Closes every `RagCache` that `shared_rag` opened; who uses one of them later opens it
    anew."""
    with _opening:
        while _opened:
            _opened.popitem()[1][0].close()
        while _temporary:
            shutil.rmtree(_temporary.pop(), ignore_errors=True)


def _own_folder() -> Path:
    if not _temporary:
        _temporary.append(Path(tempfile.mkdtemp(prefix="ragcache-")).resolve())
    return _temporary[0]


atexit.register(close_shared)
