"""Reading folders of source code, for `ragcache_schemas.code_schema`."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from ragcache.errors import NoDocuments, UnreadableDocument

CODE_SUFFIXES = frozenset(
    ".c .cc .cpp .cs .css .go .h .hpp .html .java .js .json .jsx .kt .lua .md .php .pl .proto .py "
    ".pyi .r .rb .rs .scala .sh .sql .swift .toml .ts .tsx .yaml .yml".split()
)
"""What a folder is searched for."""


def read_code(folder: str | Path, suffixes: Iterable[str] = CODE_SUFFIXES) -> dict[str, str]:
    """The files below `folder` by their paths in it, in their order. Hidden ones are left alone.

    Raises `NoDocuments` where there are none, `UnreadableDocument` for one that is no UTF-8 text.
    """
    root, wanted = Path(folder), frozenset(suffixes)
    files: dict[str, str] = {}
    for file in sorted(root.rglob("*")):
        path = file.relative_to(root)
        hidden = any(part.startswith(".") or part == "__pycache__" for part in path.parts)
        if hidden or file.suffix.lower() not in wanted or not file.is_file():
            continue
        try:
            files[path.as_posix()] = file.read_text(encoding="utf-8-sig")
        except (OSError, UnicodeDecodeError) as error:
            raise UnreadableDocument(f"{file}: {error}") from error
    if not files:
        raise NoDocuments(
            f"the folder {root} holds no source code; looked for {' '.join(sorted(wanted))}"
        )
    return files
