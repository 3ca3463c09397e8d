"""Jupyter notebooks."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from ragcache.documents.charset import decode_text
from ragcache.documents.formats.base import Content, Format, RawFile
from ragcache.documents.markdown import write_fence
from ragcache.documents.source import DocumentPart


def read_notebook(file: RawFile) -> Content:
    """Read a Jupyter notebook of format 3 or 4: Markdown, code, and outputs of text."""
    book = json.loads(decode_text(file.raw))
    cells = book.get("cells") or [c for sheet in book.get("worksheets", ()) for c in sheet["cells"]]
    language = book.get("metadata", {}).get("kernelspec", {}).get("language", "python")
    blocks = [block for cell in cells for block in _cell_blocks(cell, language)]
    return Content([DocumentPart("\n\n".join(blocks))])


def _cell_blocks(cell: Mapping[str, Any], language: str) -> Iterable[str]:
    text = _joined(cell.get("source", cell.get("input", "")))
    if not text.strip():
        return
    if cell.get("cell_type") == "heading":  # notebook format 3
        yield f"{'#' * int(cell.get('level', 1))} {text}"
    elif cell.get("cell_type") != "code":
        yield text
    else:
        yield write_fence(text, language)
        for output in cell.get("outputs", ()):
            data = output.get("data", output)
            shown = _joined(output.get("text") or data.get("text/plain") or "")
            if shown.strip():
                yield write_fence(shown, "output")


def _joined(text: str | list[str]) -> str:
    return text if isinstance(text, str) else "".join(text)


FORMATS = (Format.of(".ipynb", read_notebook),)
