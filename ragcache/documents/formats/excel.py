"""Workbooks of Excel, old and new, and of OpenDocument."""

from __future__ import annotations

import io
from collections.abc import Sequence
from datetime import datetime, time
from typing import Any

from ragcache.documents.formats.base import (
    OLE,
    Content,
    Format,
    RawFile,
    import_library,
    open_archive,
)
from ragcache.documents.markdown import write_table
from ragcache.documents.source import DocumentPart
from ragcache.errors import UnreadableDocument

MAX_SHEET = 20_000_000  # maximum cells of a sheet, including empty ones
_MAX_MERGED = 2_000  # cells of a merged range that repeat its value


def read_workbook(file: RawFile) -> Content:
    """Read the sheets of a workbook as tables, with the saved values of formulas."""
    calamine = import_library("python_calamine")
    if not file.raw.startswith(OLE):
        open_archive(file).close()
    try:
        book = calamine.CalamineWorkbook.from_filelike(io.BytesIO(file.raw))
    except calamine.PasswordError as error:
        raise UnreadableDocument("it needs a password") from error
    parts = []
    for each in book.sheets_metadata:
        if each.typ != calamine.SheetTypeEnum.WorkSheet:
            continue  # a chart or a macro
        sheet = book.get_sheet_by_name(each.name)
        if table := write_table(_trimmed(_rows(sheet))):
            parts.append(DocumentPart(f"# {each.name}\n\n{table}", {"sheet": each.name}))
    return Content(parts)


def _rows(sheet: Any) -> list[list[str]]:
    """Return the rows of a sheet, with the value of each merged range in all of its cells."""
    if sheet.total_height * sheet.total_width > MAX_SHEET:
        raise UnreadableDocument(f"the sheet {sheet.name!r} has more than {MAX_SHEET:,} cells")
    rows = [list(map(_value, row)) for row in sheet.to_python(skip_empty_area=False)]
    for (top, left), (bottom, right) in sheet.merged_cell_ranges or ():
        is_title = left == 0 and right + 1 >= sheet.total_width
        if is_title or (bottom - top + 1) * (right - left + 1) > _MAX_MERGED or top >= len(rows):
            continue
        value = rows[top][left] if left < len(rows[top]) else ""
        for row in rows[top : bottom + 1]:
            row[left : right + 1] = [value] * len(row[left : right + 1])
    return rows


def _value(cell: Any) -> str:
    if isinstance(cell, bool):
        return str(cell)
    if isinstance(cell, float) and cell.is_integer():
        return str(int(cell))
    if isinstance(cell, datetime) and cell.time() == time():
        return str(cell.date())
    return str(cell)


def _trimmed(rows: Sequence[Sequence[str]]) -> list[list[str]]:
    """Return the rows without columns that are empty in all of them."""
    width = max(map(len, rows), default=0)
    used = [column for column in range(width) if any(_filled(row, column) for row in rows)]
    return [[row[column] if column < len(row) else "" for column in used] for row in rows]


def _filled(row: Sequence[str], column: int) -> bool:
    return column < len(row) and row[column] != ""


FORMATS = (Format.of(".xlsx .xlsm .xlsb .xls .ods", read_workbook),)
