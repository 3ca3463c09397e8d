"""A page of a PDF as lines of text and tables, from pdfium's characters and paths.

pdfium keeps global state: callers hold a lock.
"""

from __future__ import annotations

import re
import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from ragcache.documents.markdown import write_table
from ragcache.documents.pdf_tables import PageTable, Rule, Word, find_tables

_HYPHENS = "\x02\ufffe"  # pdfium's marks of a word that is broken at the end of a line
_BROKEN = 0.35  # of the height of letters: a gap that divides words
_SURROGATE = re.compile("[\ud800-\udfff]")
_MAX_PATHS = 4_000  # objects of a page that are looked at for rules
_MAX_POINTS = 20_000
_THIN = 3.0  # points: a filled area that is thinner is a rule
_STRAIGHT = 0.7  # points by which a rule may lean
_RIGHT_TO_LEFT = range(0x0590, 0x0900)


@dataclass(frozen=True, slots=True)
class PageLine:
    """A line of a page, or a whole table."""

    text: str
    height: float
    """Median height of its characters, in points. 0 for a table."""
    is_table: bool = False


@dataclass(frozen=True, slots=True)
class _Character:
    """A character of a page with its box. Boxes of blanks and line ends are empty."""

    code: int
    """Unit of UTF-16."""
    left: float = 0.0
    bottom: float = 0.0
    right: float = 0.0
    top: float = 0.0


def read_page(page: Any, raw: Any) -> list[PageLine]:
    """Return the lines and tables of a page, without blank lines.

    Args:
        page: The page of pypdfium2.
        raw: pdfium's module of C functions.
    """
    text_page = page.get_textpage()
    characters, turn = _characters(text_page, raw)
    words = [*_words(characters)]
    tables: list[PageTable] = []
    if words and not _is_right_to_left(characters):
        tables = find_tables(words, [*_rules(page, raw, turn)])
    return _joined(_lines(characters, words, tables))


def _characters(text_page: Any, raw: Any) -> tuple[list[_Character], int]:
    """Return the characters of a page, turned upright, and the quarters of the turn."""
    box = raw.FS_RECTF()
    found: list[_Character] = []
    angles: Counter[int] = Counter()
    for index in range(text_page.count_chars()):
        code = raw.FPDFText_GetUnicode(text_page.raw, index)
        if code > 32 and raw.FPDFText_GetLooseCharBox(text_page.raw, index, box):
            found.append(_Character(code, box.left, box.bottom, box.right, box.top))
            if index % 8 == 0:
                radians = raw.FPDFText_GetCharAngle(text_page.raw, index)
                angles[round(radians / 1.5708) % 4] += 1
        else:
            found.append(_Character(code))
    turn = angles.most_common(1)[0][0] if angles else 0
    if turn:
        found = [_turned(each, turn) for each in found]
    return found, turn


def _turned(each: _Character, turn: int) -> _Character:
    one, other = _turn(each.left, each.bottom, turn), _turn(each.right, each.top, turn)
    (left, right), (bottom, top) = sorted((one[0], other[0])), sorted((one[1], other[1]))
    return _Character(each.code, left, bottom, right, top)


def _turn(x: float, y: float, turn: int) -> tuple[float, float]:
    """Turn a point of a page whose text runs upwards (1), backwards (2) or downwards (3)."""
    return ((x, y), (-y, x), (-x, -y), (y, -x))[turn]


def _is_right_to_left(characters: Sequence[_Character]) -> bool:
    letters = [each.code for each in characters if each.code > 64]
    return sum(code in _RIGHT_TO_LEFT for code in letters) * 4 > len(letters)


def _decode(characters: Sequence[_Character]) -> str:
    text = "".join([chr(each.code) for each in characters])
    if _SURROGATE.search(text) is None:
        return text
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def _words(characters: Sequence[_Character]) -> Iterator[Word]:
    """Yield the words of a page, in the order of its content."""
    start = 0
    for index, each in enumerate(characters):
        is_blank = each.code <= 32 or each.code == 0xA0
        if index > start and (is_blank or _breaks(characters[index - 1], each)):
            yield _word(characters, start, index)
            start = index
        if is_blank:
            start = index + 1
    if start < len(characters):
        yield _word(characters, start, len(characters))


def _breaks(before: _Character, each: _Character) -> bool:
    height = max(before.top - before.bottom, each.top - each.bottom)
    apart = abs((before.top + before.bottom) - (each.top + each.bottom)) / 2
    gap = each.left - before.right
    return apart > 0.6 * height or not -height < gap < _BROKEN * height


def _word(characters: Sequence[_Character], start: int, end: int) -> Word:
    part = characters[start:end]
    return Word(
        _decode(part).strip(_HYPHENS),
        min(each.left for each in part),
        min(each.bottom for each in part),
        max(each.right for each in part),
        max(each.top for each in part),
        start,
        end,
    )


def _rules(page: Any, raw: Any, turn: int) -> Iterator[Rule]:
    """Yield the straight lines and the edges of filled areas of a page."""
    points_left = _MAX_POINTS
    objects = page.get_objects(filter=[raw.FPDF_PAGEOBJ_PATH])
    for _, path in zip(range(_MAX_PATHS), objects, strict=False):
        points, is_filled = _outline(path, raw)
        points_left -= len(points)
        if points_left < 0:
            return
        for contour in points:
            turned = [_turn(x, y, turn) for x, y in contour]
            yield from _contour_rules(turned, is_filled=is_filled)


Point = tuple[float, float]


def _outline(path: Any, raw: Any) -> tuple[list[list[Point]], bool]:
    """Return the contours of a path that is drawn, and whether its area is filled."""
    from ctypes import c_float, c_int

    mode, stroke = c_int(), c_int()
    raw.FPDFPath_GetDrawMode(path.raw, mode, stroke)
    if not mode.value and not stroke.value:
        return [], False
    matrix = path.get_matrix()
    container = path.container
    while container is not None:
        matrix = matrix.multiply(container.get_matrix())
        container = container.container
    x, y = c_float(), c_float()
    contours: list[list[Point]] = []
    for index in range(raw.FPDFPath_CountSegments(path.raw)):
        segment = raw.FPDFPath_GetPathSegment(path.raw, index)
        if not raw.FPDFPathSegment_GetPoint(segment, x, y):
            continue
        if raw.FPDFPathSegment_GetType(segment) == raw.FPDF_SEGMENT_MOVETO or not contours:
            contours.append([])
        contours[-1].append(matrix.on_point(x.value, y.value))
        if raw.FPDFPathSegment_GetClose(segment):
            contours[-1].append(contours[-1][0])
    return contours, bool(mode.value) and not stroke.value


def _contour_rules(contour: Sequence[Point], *, is_filled: bool) -> Iterator[Rule]:
    if not contour:
        return
    left, right = min(x for x, _ in contour), max(x for x, _ in contour)
    bottom, top = min(y for _, y in contour), max(y for _, y in contour)
    if is_filled and top - bottom <= _THIN < right - left:
        yield Rule((bottom + top) / 2, left, right, False)
    elif is_filled and right - left <= _THIN < top - bottom:
        yield Rule((left + right) / 2, bottom, top, True)
    else:
        closed = [*contour, contour[0]] if is_filled else contour
        for (x0, y0), (x1, y1) in pairwise(closed):
            if abs(y1 - y0) <= _STRAIGHT < abs(x1 - x0):
                yield Rule((y0 + y1) / 2, min(x0, x1), max(x0, x1), False)
            elif abs(x1 - x0) <= _STRAIGHT < abs(y1 - y0):
                yield Rule((x0 + x1) / 2, min(y0, y1), max(y0, y1), True)


def _lines(
    characters: Sequence[_Character], words: Sequence[Word], tables: Sequence[PageTable]
) -> list[PageLine]:
    """Return lines, with each table in the place of its first character."""
    owner: dict[int, PageTable] = {}
    for table in tables:
        for number in table.words:
            owner |= dict.fromkeys(range(words[number].start, words[number].end), table)
    lines: list[PageLine] = []
    current: list[_Character] = []
    written: set[int] = set()

    def end() -> None:
        text = " ".join(_decode(current).split(" ")).strip()
        if text.strip():
            heights = [each.top - each.bottom for each in current if each.top > each.bottom]
            height = statistics.median(heights) if heights else 0.0
            lines.append(PageLine(text, round(2 * height) / 2))
        current.clear()

    for index, each in enumerate(characters):
        if (found := owner.get(index)) is not None:
            end()
            if id(found) not in written:
                written.add(id(found))
                lines.append(PageLine(write_table(found.rows), 0.0, is_table=True))
        elif each.code in (10, 13):
            end()
        else:
            current.append(each)
    end()
    return lines


def _joined(lines: Sequence[PageLine]) -> list[PageLine]:
    """Join words that a hyphen breaks at the end of a line, and large initials with their words."""
    found: list[PageLine] = []
    for line in lines:
        if found and found[-1].text.endswith(tuple(_HYPHENS)) and not line.is_table:
            before = found.pop()
            found.append(PageLine(before.text[:-1] + line.text, before.height))
        elif found and _is_initial(found[-1], line):
            found[-1] = PageLine(found[-1].text + line.text, line.height)
        else:
            found.append(line)
    return [PageLine(each.text.rstrip(_HYPHENS), each.height, each.is_table) for each in found]


def _is_initial(before: PageLine, line: PageLine) -> bool:
    """Whether a line is a large first letter of the next one."""
    is_letter = len(before.text) == 1 and before.text.isupper()
    return is_letter and before.height > 1.3 * line.height > 0 and line.text[:1].islower()
