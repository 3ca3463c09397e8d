"""Rich Text Format (RTF)."""

from __future__ import annotations

import re
from itertools import groupby

from ragcache.documents.formats.base import Content, Format, RawFile, import_library
from ragcache.documents.markdown import write_table
from ragcache.documents.source import DocumentPart

_PICTURE = re.compile(r"\{\\\*?\\?pict\b[^{}]*(?:\{[^{}]*\}[^{}]*)*\}")


def read_rtf(file: RawFile) -> Content:
    """Read the text and the tables of an RTF file. Pictures and footnotes are left out."""
    striprtf = import_library("striprtf.striprtf")
    text = striprtf.rtf_to_text(_PICTURE.sub("", file.raw.decode("latin-1")), errors="replace")
    blocks: list[str] = []
    for in_table, lines in groupby(text.splitlines(), key=_is_row):
        listed = [" ".join(line.split()) for line in lines]
        if in_table:
            blocks.append(write_table([line.removesuffix("|").split("|") for line in listed]))
        else:
            blocks += [line for line in listed if line]
    return Content([DocumentPart("\n\n".join(block for block in blocks if block))])


def _is_row(line: str) -> bool:
    """Whether a line is a row of a table: the library ends each cell with a bar."""
    return line.rstrip().endswith("|")


FORMATS = (Format(frozenset({".rtf"}), read_rtf, (b"{\\rtf",)),)
