"""PDF: text, headings and tables of pages."""

from __future__ import annotations

import io
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import groupby
from typing import Any

from ragcache.documents.formats.base import Content, Format, RawFile, import_library
from ragcache.documents.pdf_page import PageLine, read_page
from ragcache.documents.plausibility import find_garbage
from ragcache.documents.source import DocumentPart
from ragcache.errors import UnreadableDocument

_PDFIUM = threading.Lock()  # pdfium keeps global state
_LARGER = 1.15  # ratio to the usual line height from which a line may be a heading
_NO_TEXT = "no text; scanned pages need OCR (option ocr)"
_NO_MAP = "; its font has no map to characters: it needs OCR (option ocr)"
_DPI = 200  # of pictures for recognition
_MAX_PIXELS = 25_000_000
_DRAWN_BYTES = 32_000_000  # of pictures that are drawn at once
_TITLE_CHARACTERS = 200
_TITLE_LINES = 3
_LEVELS = 4
_RUNNING = 0.4  # share of the pages on which a line stands that is no heading


def read_pdf(file: RawFile) -> Content:
    """Read the pages of a PDF that contain text.

    Headings come from the outline, or else from lines that are larger than most text.
    """
    with _opened(file.raw) as (pdfium, document):
        read = [read_page(page, pdfium.raw) for page in document]
        outline = _outline(document)
        attached = _attachments(document)
    pages, omitted = _without_garbage(read, file.page_texts)
    levels = _outlined(pages, outline) or _larger(pages)
    empty = [number for number, lines in enumerate(pages, start=1) if not lines]
    missing = {"pages_without_text": empty} if empty else {}
    parts = [
        DocumentPart(_page_text(lines, levels, number), {"page": number + 1, **missing}, True)
        for number, lines in enumerate(pages)
        if lines
    ]
    for name, payload in attached:
        found, lacks = file.read_inner(name, payload)
        parts += found
        omitted += lacks
    return Content(parts, omitted=tuple(omitted))


@contextmanager
def _opened(raw: bytes) -> Iterator[tuple[Any, Any]]:
    """Open a PDF. Yields the library and the document."""
    pdfium = import_library("pypdfium2")
    with _PDFIUM:
        try:
            document = pdfium.PdfDocument(raw)
        except pdfium.PdfiumError as error:
            locked = "password" in str(error).lower()
            reason = "it needs a password" if locked else "it is damaged, or no PDF"
            raise UnreadableDocument(reason) from error
        try:
            yield pdfium, document
        finally:
            document.close()


def draw_unread_pages(raw: bytes, start: int) -> tuple[list[tuple[int, bytes]], int]:
    """Draw pages of a PDF that have no text, for their recognition.

    Args:
        raw: The PDF.
        start: Index of the first page to look at.

    Returns:
        Number and PNG picture of each page, up to a limit of bytes, and the index of the next page
        to look at. It is 0 after the last page.

    Raises:
        UnreadableDocument: The file is locked or damaged.
    """
    drawn: list[tuple[int, bytes]] = []
    with _opened(raw) as (pdfium, document):
        for index in range(start, len(document)):
            if sum(len(picture) for _, picture in drawn) > _DRAWN_BYTES:
                return drawn, index
            page = document[index]
            if not _reason_of(read_page(page, pdfium.raw)):
                continue
            width, height = page.get_size()
            scale = min(_DPI / 72, (_MAX_PIXELS / max(1, width * height)) ** 0.5)
            saved = io.BytesIO()
            page.render(scale=scale, grayscale=True).to_pil().save(saved, "PNG")
            drawn.append((index + 1, saved.getvalue()))
    return drawn, 0


def _reason_of(lines: Sequence[PageLine]) -> str:
    """Return why the text of a page is not kept, or an empty text."""
    return find_garbage("\n".join(line.text for line in lines)) if lines else _NO_TEXT


def _without_garbage(
    pages: Sequence[list[PageLine]], recognized: Mapping[int, str]
) -> tuple[list[list[PageLine]], list[str]]:
    """Return the pages with the recognized text of pages that have no text.

    Empties the other pages whose text is no language, and describes all empty ones.
    """
    kept: list[list[PageLine]] = []
    reasons: dict[str, list[int]] = {}
    for number, lines in enumerate(pages, start=1):
        reason = _reason_of(lines)
        if reason and (text := recognized.get(number, "").strip()):
            lines, reason = [PageLine(line, 0.0) for line in text.splitlines()], ""
        if reason:
            reasons.setdefault(reason, []).append(number)
        kept.append([] if reason else lines)
    described = [
        f"{_numbered(numbers)}: {reason}" + ("" if reason == _NO_TEXT else _NO_MAP)
        for reason, numbers in reasons.items()
    ]
    return kept, described


def _numbered(pages: Sequence[int]) -> str:
    """Return page numbers as text, with consecutive ones as ranges."""
    groups = groupby(enumerate(pages), key=lambda each: each[1] - each[0])
    runs = [[page for _, page in group] for _, group in groups]
    listed = ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}–{run[-1]}" for run in runs)
    return f"page{'s' if len(pages) > 1 else ''} {listed}"


def _attachments(document: Any) -> list[tuple[str, bytes]]:
    files = (document.get_attachment(each) for each in range(document.count_attachments()))
    return [(each.get_name() or "without a name", bytes(each.get_data())) for each in files]


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


def _outlined(
    pages: Sequence[Sequence[PageLine]], outline: Iterable[tuple[int, str, int]]
) -> Levels:
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


def _larger(pages: Sequence[Sequence[PageLine]]) -> Levels:
    """Return the levels of lines that are larger than most text, the largest heights first."""
    sizes: Counter[float] = Counter()
    for lines in pages:
        for line in lines:
            if not line.is_table:
                sizes[line.height] += len(line.text)
    usual = max(sizes, key=lambda height: sizes[height], default=0.0)
    heights = sorted((h for h in sizes if usual and h >= usual * _LARGER), reverse=True)
    level = {height: min(n + 1, _LEVELS) for n, height in enumerate(heights)}
    repeated = _repeated(pages)
    levels: Levels = {}
    for page, lines in enumerate(pages):
        own = ((n, line) for n, line in enumerate(lines) if _bare(line.text) not in repeated)
        for height, group in groupby(own, key=lambda each: each[1].height):
            run = list(group)
            if height in level and _is_title([line for _, line in run]):
                levels |= {(page, number): level[height] for number, _ in run}
    return levels


def _repeated(pages: Sequence[Sequence[PageLine]]) -> set[str]:
    """Return the lines that stand on many pages, such as headers of pages, without numbers."""
    counts = Counter(text for lines in pages for text in {_bare(line.text) for line in lines})
    return {text for text, count in counts.items() if count >= max(3, _RUNNING * len(pages))}


def _is_title(lines: Sequence[PageLine]) -> bool:
    """Whether lines of one height can be a heading, and not a table or a paragraph."""
    text = " ".join(line.text for line in lines)
    return (
        len(lines) <= _TITLE_LINES
        and len(text) <= _TITLE_CHARACTERS
        and sum(character.isalpha() for character in text) > 1
        and not text[:1].islower()
        and not text.endswith((",", ";"))
    )


def _page_text(lines: Sequence[PageLine], levels: Levels, page: int) -> str:
    blocks: list[str] = []
    before, after_table = 0, False  # level of the line above
    for number, line in enumerate(lines):
        level = levels.get((page, number), 0)
        if level and level == before and line.height == lines[number - 1].height:
            blocks[-1] += f" {line.text}"  # a title of several lines
        elif level:
            blocks.append(f"{'#' * level} {line.text}")
        elif blocks and not before and not line.is_table and not after_table:
            blocks[-1] += f"\n{line.text}"
        else:
            blocks.append(line.text)
        before, after_table = level, line.is_table
    return "\n\n".join(blocks)


FORMATS = (Format(frozenset({".pdf"}), read_pdf, (b"%PDF-",)),)
