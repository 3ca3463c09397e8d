"""PowerPoint presentations."""

from __future__ import annotations

import io
from typing import Any

from ragcache.documents.formats.base import (
    Content,
    Format,
    RawFile,
    flat,
    import_library,
    open_archive,
)
from ragcache.documents.markdown import write_table
from ragcache.documents.source import DocumentPart


def read_pptx(file: RawFile) -> Content:
    """Read the slides of a presentation with their tables and notes. `page` is the slide."""
    pptx = import_library("pptx")
    open_archive(file)
    presentation = pptx.Presentation(io.BytesIO(file.raw))
    parts = []
    for number, slide in enumerate(presentation.slides, start=1):
        title = slide.shapes.title
        blocks = [f"# {flat(title.text_frame.text)}"] if title and flat(title.text) else []
        others = (each for each in slide.shapes if title is None or each.shape_id != title.shape_id)
        blocks += [block for shape in others for block in _shape_blocks(shape)]
        notes = slide.notes_slide.notes_text_frame if slide.has_notes_slide else None
        if notes is not None and notes.text.strip():
            blocks.append(f"Notes: {notes.text.strip()}")
        if blocks:
            parts.append(DocumentPart("\n\n".join(blocks), {"page": number}))
    return Content(parts)


def _shape_blocks(shape: Any) -> list[str]:
    if hasattr(shape, "shapes"):  # a group
        return [block for each in shape.shapes for block in _shape_blocks(each)]
    if getattr(shape, "has_table", False):
        return [write_table(_table_rows(shape.table))]
    if getattr(shape, "has_chart", False):
        return _chart_blocks(shape.chart)
    if not getattr(shape, "has_text_frame", False):
        return []
    paragraphs = [each for each in shape.text_frame.paragraphs if flat(each.text)]
    if len(paragraphs) == 1:
        return [flat(paragraphs[0].text)]
    items = [f"{'  ' * each.level}- {flat(each.text)}" for each in paragraphs]
    return ["\n".join(items)] if items else []


def _table_rows(table: Any) -> list[list[str]]:
    """Return the cells of a table, with the text of each merged cell in all places it covers."""
    rows = [[cell.text for cell in row.cells] for row in table.rows]
    for top, row in enumerate(table.rows):
        for left, cell in enumerate(row.cells):
            if cell.is_merge_origin and cell.span_width < len(row.cells):
                for below in rows[top : top + cell.span_height]:
                    below[left : left + cell.span_width] = [cell.text] * cell.span_width
    return rows


def _plots(chart: Any) -> list[Any]:
    """Return the plots of a chart, or none if they are of a kind that the library does not know."""
    try:
        return list(chart.plots)
    except ValueError:
        return []


def _chart_blocks(chart: Any) -> list[str]:
    """Return a chart as the table of its values."""
    title = flat(chart.chart_title.text_frame.text) if chart.has_title else ""
    rows: list[list[str]] = []
    for plot in _plots(chart):
        series = list(plot.series)
        rows.append(["", *(str(each.name) for each in series)])
        for number, category in enumerate(plot.categories):
            values = (each.values[number] for each in series if number < len(each.values))
            rows.append([str(category), *("" if v is None else str(v) for v in values)])
    return [block for block in (title, write_table(rows)) if block]


FORMATS = (Format.of(".pptx .pptm", read_pptx),)
