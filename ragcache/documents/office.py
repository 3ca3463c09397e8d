"""PDF, Word, PowerPoint, Excel and EPUB as Markdown.

Each reader takes a file's bytes and the most bytes that it may unpack to, and returns its parts:
pages, slides, sheets or chapters. The libraries come with the extra `documents`.
"""

from __future__ import annotations

import io
import posixpath
import re
import statistics
import threading
import zipfile
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any
from urllib.parse import unquote

from ragcache.documents.html import read_html
from ragcache.documents.markdown import write_table
from ragcache.documents.source import DocumentPart
from ragcache.errors import MissingExtra, UnreadableDocument

MAX_SHEET = 20_000_000  # maximum cells of a sheet, including empty ones
_PDFIUM = threading.Lock()  # pdfium keeps global state
_LARGER = 1.15  # ratio to the usual line height from which a line may be a heading
_TITLE_CHARACTERS = 200
_TITLE_LINES = 3
_LEVELS = 4
_HYPHENS = "\x02\ufffe"  # pdfium's marks of a word that is broken at the end of a line


def read_pdf(raw: bytes, _: int) -> list[DocumentPart]:
    """Read the pages of a PDF that contain text.

    Headings come from the outline, or else from lines that are larger than most text.
    """
    pdfium = _library("pypdfium2")
    with _PDFIUM:
        try:
            document = pdfium.PdfDocument(raw)
        except pdfium.PdfiumError as error:
            locked = "password" in str(error).lower()
            reason = "it needs a password" if locked else "it is damaged, or no PDF"
            raise UnreadableDocument(reason) from error
        try:
            pages = [_page_lines(page, pdfium.raw) for page in document]
            outline = _outline(document)
        finally:
            document.close()
    if not any(pages):
        raise UnreadableDocument("it holds no text; pages that were scanned need OCR first")
    levels = _outlined(pages, outline) or _larger(pages)
    empty = [number for number, lines in enumerate(pages, start=1) if not lines]
    missing = {"pages_without_text": empty} if empty else {}
    return [
        DocumentPart(_page_text(lines, levels, number), {"page": number + 1, **missing}, True)
        for number, lines in enumerate(pages)
        if lines
    ]


@dataclass(frozen=True, slots=True)
class _Line:
    """A line of a page."""

    text: str
    height: float
    """Median height of its characters, in points."""


def _page_lines(page: Any, raw: Any) -> list[_Line]:
    """Return the lines of a page that are not blank. `raw` is pdfium's module of C functions."""
    text_page = page.get_textpage()
    lines: list[_Line] = []
    units = bytearray()  # UTF-16
    heights: list[float] = []
    box = raw.FS_RECTF()

    def end() -> None:
        text = units.decode("utf-16-le", "replace")
        if text.strip():
            height = statistics.median(heights) if heights else 0.0
            lines.append(_Line(" ".join(text.split(" ")).strip(), round(2 * height) / 2))
        units.clear()
        heights.clear()

    for index in range(text_page.count_chars()):
        code = raw.FPDFText_GetUnicode(text_page.raw, index)
        if code in (10, 13):
            end()
            continue
        units.extend(chr(code).encode("utf-16-le", "surrogatepass"))
        if code > 32 and raw.FPDFText_GetLooseCharBox(text_page.raw, index, box):
            heights.append(abs(box.top - box.bottom))
    end()
    return _joined(lines)


def _joined(lines: Sequence[_Line]) -> list[_Line]:
    """Join words that a hyphen breaks at the end of a line."""
    found: list[_Line] = []
    for line in lines:
        if found and found[-1].text.endswith(tuple(_HYPHENS)):
            before = found.pop()
            found.append(_Line(before.text[:-1] + line.text, before.height))
        else:
            found.append(line)
    return [_Line(each.text.rstrip(_HYPHENS), each.height) for each in found]


def _outline(document: Any) -> list[tuple[int, str, int]]:
    """Return the outline of a PDF: page index, title and level."""
    found = []
    for entry in document.get_toc():
        target = entry.get_dest()
        page = None if target is None else target.get_index()
        if page is not None and (title := " ".join(entry.get_title().split())):
            found.append((page, title, min(entry.level + 1, _LEVELS)))
    return found


Levels = dict[tuple[int, int], int]
"""Level of each line that is a heading, by page and number of the line."""


def _outlined(pages: Sequence[Sequence[_Line]], outline: Iterable[tuple[int, str, int]]) -> Levels:
    """Return the levels of the lines that are titles of the outline."""
    levels: Levels = {}
    for page, title, level in outline:
        for number, line in enumerate(pages[page] if 0 <= page < len(pages) else ()):
            same = _bare(line.text) == _bare(title) or _bare(line.text).endswith(f" {_bare(title)}")
            if same and len(line.text) <= len(title) + 12 and (page, number) not in levels:
                levels[page, number] = level
                break
    return levels


def _bare(text: str) -> str:
    return " ".join(text.casefold().split())


def _larger(pages: Sequence[Sequence[_Line]]) -> Levels:
    """Return the levels of lines that are larger than most text, the largest heights first."""
    sizes: Counter[float] = Counter()
    for lines in pages:
        for line in lines:
            sizes[line.height] += len(line.text)
    usual = sizes.most_common(1)[0][0]
    heights = sorted((h for h in sizes if usual and h >= usual * _LARGER), reverse=True)
    level = {height: min(n + 1, _LEVELS) for n, height in enumerate(heights)}
    levels: Levels = {}
    for page, lines in enumerate(pages):
        for height, group in groupby(enumerate(lines), key=lambda each: each[1].height):
            run = list(group)
            if height in level and _is_title([line for _, line in run]):
                levels |= {(page, number): level[height] for number, _ in run}
    return levels


def _is_title(lines: Sequence[_Line]) -> bool:
    """Whether lines of one height can be a heading, and not a table or a paragraph."""
    text = " ".join(line.text for line in lines)
    return (
        len(lines) <= _TITLE_LINES
        and len(text) <= _TITLE_CHARACTERS
        and any(character.isalpha() for character in text)
    )


def _page_text(lines: Sequence[_Line], levels: Levels, page: int) -> str:
    blocks: list[str] = []
    before = 0  # level of the line above
    for number, line in enumerate(lines):
        level = levels.get((page, number), 0)
        if level and level == before and line.height == lines[number - 1].height:
            blocks[-1] += f" {line.text}"  # a title of several lines
        elif level:
            blocks.append(f"{'#' * level} {line.text}")
        elif blocks and not before:
            blocks[-1] += f"\n{line.text}"
        else:
            blocks.append(line.text)
        before = level
    return "\n\n".join(blocks)


_WORD_STYLES = "p[style-name='Title'] => p.title:fresh\np[style-name='Subtitle'] => p:fresh"


def read_docx(raw: bytes, max_bytes: int) -> list[DocumentPart]:
    """Read a Word document with headings, lists, tables and notes."""
    mammoth = _library("mammoth")
    _check_unpacked(raw, max_bytes)
    ignore_pictures = mammoth.images.img_element(lambda _: {})
    converted = mammoth.convert_to_html(
        io.BytesIO(raw), style_map=_WORD_STYLES, convert_image=ignore_pictures
    )
    return [DocumentPart(read_html(_below_title(converted.value)).text)]


def _below_title(markup: str) -> str:
    """Make the title of a document its first heading, with all other headings below it."""
    if '<p class="title">' not in markup:
        return markup
    lower = re.sub(r"<(/?)h([1-5])>", lambda found: f"<{found[1]}h{int(found[2]) + 1}>", markup)
    return re.sub(r'<p class="title">(.*?)</p>', r"<h1>\1</h1>", lower, flags=re.DOTALL)


def read_pptx(raw: bytes, max_bytes: int) -> list[DocumentPart]:
    """Read the slides of a presentation with their tables and notes. `page` is the slide."""
    pptx = _library("pptx")
    _check_unpacked(raw, max_bytes)
    presentation = pptx.Presentation(io.BytesIO(raw))
    parts = []
    for number, slide in enumerate(presentation.slides, start=1):
        title = slide.shapes.title
        blocks = [f"# {_flat(title.text_frame.text)}"] if title and _flat(title.text) else []
        others = (each for each in slide.shapes if title is None or each.shape_id != title.shape_id)
        blocks += [block for shape in others for block in _shape_blocks(shape)]
        notes = slide.notes_slide.notes_text_frame if slide.has_notes_slide else None
        if notes is not None and notes.text.strip():
            blocks.append(f"Notes: {notes.text.strip()}")
        if blocks:
            parts.append(DocumentPart("\n\n".join(blocks), {"page": number}))
    return parts


def _shape_blocks(shape: Any) -> list[str]:
    if hasattr(shape, "shapes"):  # a group
        return [block for each in shape.shapes for block in _shape_blocks(each)]
    if getattr(shape, "has_table", False):
        return [write_table([[cell.text for cell in row.cells] for row in shape.table.rows])]
    if getattr(shape, "has_chart", False):
        return _chart_blocks(shape.chart)
    if not getattr(shape, "has_text_frame", False):
        return []
    paragraphs = [each for each in shape.text_frame.paragraphs if _flat(each.text)]
    if len(paragraphs) == 1:
        return [_flat(paragraphs[0].text)]
    items = [f"{'  ' * each.level}- {_flat(each.text)}" for each in paragraphs]
    return ["\n".join(items)] if items else []


def _chart_blocks(chart: Any) -> list[str]:
    """Return a chart as the table of its values."""
    title = _flat(chart.chart_title.text_frame.text) if chart.has_title else ""
    rows: list[list[str]] = []
    for plot in chart.plots:
        series = list(plot.series)
        rows.append(["", *(str(each.name) for each in series)])
        for number, category in enumerate(plot.categories):
            values = (each.values[number] for each in series if number < len(each.values))
            rows.append([str(category), *("" if v is None else str(v) for v in values)])
    return [block for block in (title, write_table(rows)) if block]


def read_xlsx(raw: bytes, max_bytes: int) -> list[DocumentPart]:
    """Read the sheets of a workbook as tables, with the saved values of formulas."""
    openpyxl = _library("openpyxl")
    _check_unpacked(raw, max_bytes)
    book = openpyxl.load_workbook(io.BytesIO(raw), read_only=True, data_only=True)
    parts = []
    try:
        for sheet in book.worksheets:
            rows = _rows(sheet)
            if table := write_table(_trimmed(rows)):
                parts.append(DocumentPart(f"# {sheet.title}\n\n{table}", {"sheet": sheet.title}))
    finally:
        book.close()
    return parts


def _rows(sheet: Any) -> list[list[str]]:
    """Return the rows of a sheet that are not empty.

    Counts cells, since the size that a sheet declares may be wrong.
    """
    rows, cells = list[list[str]](), 0
    for row in sheet.iter_rows(values_only=True):
        cells += len(row)
        if cells > MAX_SHEET:
            raise UnreadableDocument(f"the sheet {sheet.title!r} has more than {MAX_SHEET:,} cells")
        if any(cell is not None for cell in row):
            rows.append([_value(cell) for cell in row])
    return rows


def _value(cell: Any) -> str:
    if cell is None:
        return ""
    if isinstance(cell, float) and cell.is_integer():
        return str(int(cell))
    text = str(cell)
    return text.removesuffix(" 00:00:00") if hasattr(cell, "isoformat") else text


def _trimmed(rows: Sequence[Sequence[str]]) -> list[list[str]]:
    """Return the rows without columns that are empty in all of them."""
    width = max(map(len, rows), default=0)
    used = [
        column
        for column in range(width)
        if any(row[column : column + 1] != [""] and column < len(row) for row in rows)
    ]
    return [[row[column] if column < len(row) else "" for column in used] for row in rows]


_PACKAGE = {
    "c": "urn:oasis:names:tc:opendocument:xmlns:container",
    "p": "http://www.idpf.org/2007/opf",
}


def read_epub(raw: bytes, max_bytes: int) -> list[DocumentPart]:
    """Read the chapters of a book in order. The title replaces a missing heading."""
    _check_unpacked(raw, max_bytes)
    with zipfile.ZipFile(io.BytesIO(raw)) as book:
        container = _parse_xml(book.read("META-INF/container.xml"))
        [path, *_] = container.xpath("//c:rootfile/@full-path", namespaces=_PACKAGE)
        package = _parse_xml(book.read(path))
        items = {each.get("id"): each for each in package.xpath("//p:item", namespaces=_PACKAGE)}
        parts = []
        for reference in dict.fromkeys(package.xpath("//p:itemref/@idref", namespaces=_PACKAGE)):
            item = items.get(reference)
            if item is None or "html" not in (item.get("media-type") or ""):
                continue
            if "nav" in (item.get("properties") or "").split():
                continue  # the table of contents
            name = posixpath.normpath(posixpath.join(posixpath.dirname(path), item.get("href")))
            page = read_html(book.read(unquote(name)).decode("utf-8", "replace"))
            if page.text:
                bare = page.title and not page.text.startswith("#")
                text = f"# {page.title}\n\n{page.text}" if bare else page.text
                parts.append(DocumentPart(text))
    return parts


def _parse_xml(raw: bytes) -> Any:
    from lxml import etree

    return etree.fromstring(raw, etree.XMLParser(resolve_entities=False, no_network=True))


def _check_unpacked(raw: bytes, max_bytes: int) -> None:
    """Raise `UnreadableDocument` unless this is a ZIP archive of at most `max_bytes` unpacked."""
    if raw.startswith(b"\xd0\xcf\x11\xe0"):
        raise UnreadableDocument("it needs a password, or is of an old Office under a new name")
    try:
        with zipfile.ZipFile(io.BytesIO(raw)) as archive:
            size = sum(each.file_size for each in archive.infolist())
    except zipfile.BadZipFile as error:
        raise UnreadableDocument("it is damaged, or of another type than its name says") from error
    if size > max_bytes:
        raise UnreadableDocument(
            f"it unpacks to {size:,} bytes, more than the {max_bytes:,} that may be "
            "(option document_bytes)"
        )


def _flat(text: str) -> str:
    return " ".join(text.split())


def _library(name: str) -> Any:
    """Import a library of the extra. Raises `MissingExtra`."""
    from importlib import import_module

    try:
        return import_module(name)
    except ImportError as error:
        raise MissingExtra("it needs the extra: pip install 'ragcache[documents]'") from error


READERS: dict[str, Callable[[bytes, int], list[DocumentPart]]] = {
    ".pdf": read_pdf,
    ".docx": read_docx,
    ".docm": read_docx,
    ".pptx": read_pptx,
    ".pptm": read_pptx,
    ".xlsx": read_xlsx,
    ".xlsm": read_xlsx,
    ".epub": read_epub,
}
