"""Tables of PDF pages, by the geometry of their words and rules.

A table with ruled columns is read by its rules. Any other table is a run of lines whose words stand
in columns: gaps between words that go through most of the lines separate columns. Coordinates are
in points, from the lower left corner of the page.
"""

from __future__ import annotations

import re
import statistics
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

_SNAP = 3.0  # points within which rules are one
_SHORT = 4.0  # points of the shortest rule
_GAP = 0.85  # of the height of letters: a gap between words that may separate columns
_NUMBER_GAP = 0.45  # of the height of letters: such a gap between numbers
_RIVER = 0.3  # of the height of letters: the narrowest gap that goes through the lines of a table
_FAR = 3.2  # of the height of letters: lines that are farther apart are not of one table
_MAX_CELLS = 20_000
_MAX_CROSSINGS = 400_000
_NUMBER = re.compile(r"[^\w\s]*\d[\d.,:/%\s–-]*[^\w\s]*[A-Za-z%€$£*]{0,3}|[-–—.…*]+|n/?a", re.I)


@dataclass(frozen=True, slots=True)
class Word:
    """A word of a page with its box."""

    text: str
    left: float
    bottom: float
    right: float
    top: float
    start: int
    """Index of its first character on the page."""
    end: int
    """Index after its last character."""

    @property
    def middle(self) -> float:
        """Vertical center."""
        return (self.bottom + self.top) / 2

    @property
    def center(self) -> float:
        """Horizontal center."""
        return (self.left + self.right) / 2

    @property
    def height(self) -> float:
        return self.top - self.bottom


@dataclass(frozen=True, slots=True)
class Rule:
    """A horizontal or vertical line of a page."""

    at: float
    """Position across the line."""
    begin: float
    end: float
    is_vertical: bool


@dataclass(frozen=True, slots=True)
class PageTable:
    """A table of a page."""

    rows: list[list[str]]
    words: frozenset[int]
    """Indexes of the words in it."""


def find_tables(words: Sequence[Word], rules: Sequence[Rule]) -> list[PageTable]:
    """Return the tables of a page.

    Args:
        words: Words in the order of the page's content.
        rules: Rules, and the edges of filled areas.
    """
    tables: list[PageTable] = []
    taken: set[int] = set()
    flat = _merged(rules, is_vertical=False)
    for grid in _grids(flat, _merged(rules, is_vertical=True)):
        table = grid.read(words, taken)
        if table is not None:
            tables.append(table)
            taken |= table.words
    tables += _aligned(words, taken)
    return tables


# --- tables with ruled columns


def _merged(rules: Iterable[Rule], *, is_vertical: bool) -> list[Rule]:
    """Return the rules of one direction, with parts of one line joined."""
    chosen = sorted((r for r in rules if r.is_vertical == is_vertical), key=lambda r: r.at)
    lines: list[list[Rule]] = []
    for rule in chosen:
        if lines and rule.at - lines[-1][0].at <= _SNAP:
            lines[-1].append(rule)
        else:
            lines.append([rule])
    found: list[Rule] = []
    for line in lines:
        at = statistics.fmean(rule.at for rule in line)
        begin, end = None, 0.0
        for rule in sorted(line, key=lambda r: r.begin):
            if begin is None:
                begin, end = rule.begin, rule.end
            elif rule.begin <= end + _SNAP:
                end = max(end, rule.end)
            else:
                found.append(Rule(at, begin, end, is_vertical))
                begin, end = rule.begin, rule.end
        if begin is not None:
            found.append(Rule(at, begin, end, is_vertical))
    return [rule for rule in found if rule.end - rule.begin >= _SHORT]


@dataclass(frozen=True, slots=True)
class _Grid:
    """Rules that touch each other."""

    flat: list[Rule]
    upright: list[Rule]

    def read(self, words: Sequence[Word], taken: set[int]) -> PageTable | None:
        """Return the table in this grid, or None if it is none."""
        edges = _positions([*(r.at for r in self.upright)], self.flat)
        levels = _positions([*(r.at for r in self.flat)], self.upright)
        if len(edges) < 2 or len(levels) < 2 or len(edges) * len(levels) > _MAX_CELLS:
            return None
        inside = [
            number
            for number, word in enumerate(words)
            if number not in taken
            and edges[0] - _SNAP < word.center < edges[-1] + _SNAP
            and levels[0] - _SNAP < word.middle < levels[-1] + _SNAP
        ]
        if not inside:
            return None
        edges = _with_gaps(edges, [words[number] for number in inside])
        places = _Places(edges, levels, self._owners(edges, levels))
        held = places.hold(inside, words)
        if not places.is_table(held):
            return None
        rows = _without_empty_columns(places.rows(held, words))
        if max(map(len, rows), default=0) < 2 or len(rows) < 2 or len(held) < 3:
            return None
        return PageTable(rows, frozenset(inside))

    def _owners(self, edges: Sequence[float], levels: Sequence[float]) -> list[int]:
        """Return the cell of each place: the first of the places that no rule divides."""
        bands, columns = len(levels) - 1, len(edges) - 1
        parent = list(range(bands * columns))

        def root(place: int) -> int:
            while parent[place] != place:
                parent[place] = parent[parent[place]]
                place = parent[place]
            return place

        for row in range(bands):
            for column in range(columns):
                place = row * columns + column
                low, high = levels[row], levels[row + 1]
                left, right = edges[column], edges[column + 1]
                if column + 1 < columns and not _covers(self.upright, right, low, high):
                    parent[root(place + 1)] = root(place)
                if row + 1 < bands and not _covers(self.flat, high, left, right):
                    parent[root(place + columns)] = root(place)
        return [root(place) for place in range(bands * columns)]


@dataclass(slots=True)
class _Places:
    """The places of a grid, row by row from below, and the cell of each."""

    edges: Sequence[float]
    levels: Sequence[float]
    owner: list[int]

    @property
    def columns(self) -> int:
        return len(self.edges) - 1

    def place(self, word: Word) -> int:
        """Return the place of a word."""
        row = min(max(bisect_right(self.levels, word.middle) - 1, 0), len(self.levels) - 2)
        column = min(max(bisect_right(self.edges, word.center) - 1, 0), self.columns - 1)
        return row * self.columns + column

    def hold(self, inside: Sequence[int], words: Sequence[Word]) -> dict[int, list[int]]:
        """Return the words of each cell. Divides cells whose lines have gaps into their places."""
        held: dict[int, list[int]] = {}
        for number in inside:
            held.setdefault(self.owner[self.place(words[number])], []).append(number)
        for cell, numbers in [*held.items()]:
            lines = _visual_lines([words[number] for number in numbers])
            divided = sum(len(_segments(line)) > 1 for line in lines)
            spread = {self.place(words[number]) % self.columns for number in numbers}
            if len(spread) > 1 and 2 * divided >= len(lines):
                del held[cell]
                self.owner = [n if each == cell else each for n, each in enumerate(self.owner)]
                for number in numbers:
                    held.setdefault(self.place(words[number]), []).append(number)
        return held

    def is_table(self, held: dict[int, list[int]]) -> bool:
        """Whether cells of one place are common and many have text, unlike in a drawing."""
        sizes = Counter(self.owner)
        single = sum(sizes[cell] == 1 for cell in held)
        least = 0.2 if len(held) <= 30 else 0.5
        return single >= least * len(held) and len(held) >= 0.15 * len(self.owner)

    def rows(self, held: dict[int, list[int]], words: Sequence[Word]) -> list[list[str]]:
        """Return the texts of the cells by row, from the top."""
        rows: list[list[str]] = []
        above: list[int] = []
        for row in reversed(range(len(self.levels) - 1)):
            cells = self.owner[row * self.columns : (row + 1) * self.columns]
            if len(set(cells)) == 1:
                if cells != above:
                    rows.append([_text(held.get(cells[0], ()), words)])
            else:
                rows += _split_band([held.get(each, []) for each in cells], words)
            above = cells
        return rows


def _with_gaps(edges: Sequence[float], inside: Sequence[Word]) -> list[float]:
    """Return the edges of columns with the middles of gaps that divide columns without rules."""
    lines = [_line([*range(len(line))], line) for line in _visual_lines(inside)]
    several = [line for line in lines if len(line.segments) > 1]
    if len(several) < 2:
        return [*edges]
    cuts = [left for left, _ in _columns(several)[1:]]
    size = statistics.median(word.height for word in inside)
    known = [*edges]
    for cut in cuts:
        left = max((each for each in edges if each <= cut), default=edges[0])
        right = min((each for each in edges if each > cut), default=edges[-1])
        within = [line for line in several if _has_both_sides(line, left, cut, right)]
        if len(within) >= max(2, 0.3 * len(several)) and min(cut - left, right - cut) > 0.3 * size:
            known.append(cut)
    return sorted(known)


def _has_both_sides(line: _Line, left: float, cut: float, right: float) -> bool:
    centers = [word.center for segment in line.segments for word in segment]
    return any(left < each < cut for each in centers) and any(
        cut < each < right for each in centers
    )


def _positions(found: list[float], across: Sequence[Rule]) -> list[float]:
    """Return where rules stand, and where the rules across them end."""
    ends = [min(r.begin for r in across), max(r.end for r in across)] if across else []
    positions = sorted(found)
    for end in ends:
        if not positions or min(abs(end - each) for each in positions) > 2 * _SNAP:
            positions.append(end)
    kept: list[float] = []
    for each in sorted(positions):
        if not kept or each - kept[-1] > _SNAP:
            kept.append(each)
    return kept


def _covers(rules: Iterable[Rule], at: float, begin: float, end: float) -> bool:
    """Whether a rule goes along most of a side of a cell."""
    length = sum(
        max(0.0, min(rule.end, end) - max(rule.begin, begin))
        for rule in rules
        if abs(rule.at - at) <= _SNAP
    )
    return length >= 0.6 * (end - begin)


def _grids(flat: Sequence[Rule], upright: Sequence[Rule]) -> list[_Grid]:
    """Return the groups of rules that touch each other, the largest first."""
    count = len(flat)
    if count * len(upright) > _MAX_CROSSINGS:
        return []  # a drawing
    parent = list(range(count + len(upright)))

    def root(each: int) -> int:
        while parent[each] != each:
            parent[each] = parent[parent[each]]
            each = parent[each]
        return each

    for i, line in enumerate(flat):
        for j, post in enumerate(upright):
            touches = (
                line.begin - _SNAP <= post.at <= line.end + _SNAP
                and post.begin - _SNAP <= line.at <= post.end + _SNAP
            )
            if touches:
                parent[root(count + j)] = root(i)
    groups: dict[int, _Grid] = {}
    for i, line in enumerate(flat):
        groups.setdefault(root(i), _Grid([], [])).flat.append(line)
    for j, post in enumerate(upright):
        groups.setdefault(root(count + j), _Grid([], [])).upright.append(post)
    whole = [each for each in groups.values() if each.flat and each.upright]
    return sorted(whole, key=lambda each: -len(each.flat) * len(each.upright))


def _split_band(cells: Sequence[list[int]], words: Sequence[Word]) -> list[list[str]]:
    """Return the rows between two rules: one, or one for each line if each is a row of its own."""
    lines = _visual_lines([words[n] for n in dict.fromkeys(n for cell in cells for n in cell)])
    filled = sum(1 for cell in cells if cell)
    if len(lines) >= 3 and filled >= 2:
        owners = {words[n].start: k for k, cell in enumerate(cells) for n in cell}
        spread = [len({owners[word.start] for word in line}) for line in lines]
        full = sum(each >= max(2, 0.7 * filled) for each in spread)
        if full >= 0.75 * len(lines):
            rows = []
            for line in lines:
                row: list[list[str]] = [[] for _ in cells]
                for word in line:
                    row[owners[word.start]].append(word.text)
                rows.append([" ".join(texts) for texts in row])
            return rows
    return [[_text(cell, words) for cell in cells]]


# --- tables without ruled columns


@dataclass(slots=True)
class _Line:
    """Words of a line, from left to right, as segments that gaps divide."""

    numbers: list[int]
    segments: list[list[Word]]
    bottom: float
    top: float

    @property
    def middle(self) -> float:
        return (self.bottom + self.top) / 2

    @property
    def left(self) -> float:
        return self.segments[0][0].left

    @property
    def right(self) -> float:
        return self.segments[-1][-1].right


def _aligned(words: Sequence[Word], taken: set[int]) -> list[PageTable]:
    """Return the tables whose columns only gaps divide."""
    tables = []
    for region in _regions(_content_lines(words, taken)):
        columns = _columns(region)
        if len(columns) < 2 or not _is_table(region, columns):
            continue
        rows = _joined_rows(region, columns)
        if len(rows) >= 2:
            numbers = frozenset(number for line in region for number in line.numbers)
            tables.append(PageTable(rows, numbers))
    return tables


def _content_lines(words: Sequence[Word], taken: set[int]) -> list[_Line]:
    """Return lines of words that follow each other to the right, in the order of the content."""
    lines: list[_Line] = []
    current: list[int] = []

    def end() -> None:
        if current:
            lines.append(_line([*current], [words[n] for n in current]))
            current.clear()

    for number, word in enumerate(words):
        if number in taken:
            end()
            continue
        if current:
            last = words[current[-1]]
            size = min(last.height, word.height)
            follows = abs(last.middle - word.middle) < 0.5 * size and word.left > last.right - size
            if not follows:
                end()
        current.append(number)
    end()
    return lines


def _line(numbers: list[int], words: Sequence[Word]) -> _Line:
    line = sorted(words, key=lambda word: word.left)
    bottom, top = min(word.bottom for word in line), max(word.top for word in line)
    return _Line(numbers, _segments(line), bottom, top)


def _segments(line: Sequence[Word]) -> list[list[Word]]:
    segments: list[list[Word]] = []
    for word in line:
        before = segments[-1][-1] if segments else None
        if before is not None and word.left - before.right <= _least_gap(before, word):
            segments[-1].append(word)
        else:
            segments.append([word])
    return segments


def _least_gap(before: Word, word: Word) -> float:
    """Return the gap up to which two words are of one cell. Numbers stand closer."""
    numbers = _NUMBER.fullmatch(before.text) and _NUMBER.fullmatch(word.text)
    return (_NUMBER_GAP if numbers else _GAP) * min(before.height, word.height)


def _visual_lines(words: Iterable[Word]) -> list[list[Word]]:
    """Return words by lines, from top to bottom and left to right."""
    lines: list[list[Word]] = []
    for word in sorted(words, key=lambda each: -each.middle):
        if lines and lines[-1][0].middle - word.middle < 0.5 * min(
            word.height, lines[-1][0].height
        ):
            lines[-1].append(word)
        else:
            lines.append([word])
    return [sorted(line, key=lambda word: word.left) for line in lines]


def _regions(lines: Sequence[_Line]) -> list[list[_Line]]:
    """Return runs of lines, of which most have several segments."""
    regions: list[list[_Line]] = []
    run: list[_Line] = []

    def end() -> None:
        while run and len(run[-1].segments) < 2:
            run.pop()
        if len(run) >= 3 or (len(run) == 2 and all(len(each.segments) > 2 for each in run)):
            regions.append([*run])
        run.clear()

    single = 0
    for line in lines:
        if run:
            size = line.top - line.bottom
            down = run[-1].middle - line.middle
            near = -0.2 * size < down < _FAR * max(size, run[-1].top - run[-1].bottom)
            if not near:
                end()
                single = 0
        if len(line.segments) > 1:
            run.append(line)
            single = 0
        elif run:
            single += 1
            left, right = min(each.left for each in run), max(each.right for each in run)
            narrow = line.right - line.left < 0.55 * (right - left)
            if single > 2 or not narrow:
                end()
                single = 0
            else:
                run.append(line)
    end()
    return regions


def _columns(region: Sequence[_Line]) -> list[tuple[float, float]]:
    """Return the columns of a region, as places from left to right.

    A gap that few segments cross, and that is wide enough, divides columns.
    """
    size = statistics.median(line.top - line.bottom for line in region)
    several = [line for line in region if len(line.segments) > 1]
    spans = [
        (word.left, word.right) for line in several for segment in line.segments for word in segment
    ]
    crossed = [
        (segment[0].left, segment[-1].right) for line in several for segment in line.segments
    ]
    allowed = 0.12 * len(several)
    edges, over = _coverage(spans, spans)
    _, through = _coverage(spans, crossed)
    free: list[tuple[float, float]] = []
    for number, (left, right) in enumerate(pairwise(edges)):
        if over[number] <= allowed and through[number] <= 0.35 * len(several):
            if free and free[-1][1] == left:
                free[-1] = (free[-1][0], right)
            else:
                free.append((left, right))
    cuts = [(a + b) / 2 for a, b in free if b - a >= _RIVER * size and _divides(several, a, b)]
    bounds = [edges[0], *cuts, edges[-1]]
    return [*pairwise(bounds)]


def _coverage(
    spans: Sequence[tuple[float, float]], covering: Sequence[tuple[float, float]]
) -> tuple[list[float], list[int]]:
    """Return the ends of spans in order, and how many of `covering` go over each gap of them."""
    edges = sorted({edge for span in spans for edge in span})
    changes = Counter(left for left, _ in covering)
    changes.subtract(right for _, right in covering)
    return edges, [*accumulate(changes[edge] for edge in edges)]


def _divides(lines: Sequence[_Line], left: float, right: float) -> bool:
    """Whether a gap has segments of several lines on both of its sides."""
    middle = (left + right) / 2
    both = 0
    for line in lines:
        before = any(segment[-1].right <= middle for segment in line.segments)
        after = any(segment[0].left >= middle for segment in line.segments)
        both += before and after
    return both >= max(2, 0.3 * len(lines))


def _cells(line: _Line, columns: Sequence[tuple[float, float]]) -> list[str]:
    """Return the texts of a line by column. A segment over several columns stands in the first."""
    row: list[list[str]] = [[] for _ in columns]
    starts = [left for left, _ in columns]
    for segment in line.segments:
        pieces: list[list[Word]] = [[]]
        for word in segment:
            column = _column(word, starts)
            if pieces[-1] and _column(pieces[-1][-1], starts) != column:
                wide = word.left - pieces[-1][-1].right > _RIVER * word.height
                if wide:
                    pieces.append([])
            pieces[-1].append(word)
        for piece in pieces:
            row[_column(piece[0], starts)] += [word.text for word in piece]
    return [" ".join(texts) for texts in row]


def _column(word: Word, starts: Sequence[float]) -> int:
    return max(bisect_right(starts, word.center) - 1, 0)


def _is_table(region: Sequence[_Line], columns: Sequence[tuple[float, float]]) -> bool:
    """Whether lines in columns are a table, and not prose in columns, a list or a form."""
    rows = [_cells(line, columns) for line in region]
    full = [row for row in rows if sum(map(bool, row)) > 1]
    if len(full) < 2 or 2 * len(full) < len(rows):
        return False
    cells = [cell for row in full for cell in row if cell]
    numbers = sum(_NUMBER.fullmatch(cell) is not None for cell in cells)
    long = sum(len(cell) > 45 for cell in cells)
    if len(columns) == 2:
        first = [row[0] for row in full]
        marks = sum(len(cell) <= 3 for cell in first)
        if 2 * marks > len(first):
            return False  # a list with its bullets or numbers
        return len(full) >= 3 and long * 4 < len(cells) and numbers * 5 >= len(cells)
    return long * 3 < len(cells)


def _joined_rows(
    region: Sequence[_Line], columns: Sequence[tuple[float, float]]
) -> list[list[str]]:
    """Return the rows of a region. Lines of one row are joined."""
    rows: list[list[str]] = []
    steps = [a.middle - b.middle for a, b in pairwise(region)]
    least = min((step for step in steps if step > 0), default=0.0)
    for number, line in enumerate(region):
        row = _cells(line, columns)
        if rows and _continues(rows[-1], row, steps[number - 1], least):
            rows[-1] = [" ".join(filter(None, pair)) for pair in zip(rows[-1], row, strict=True)]
        else:
            rows.append(row)
    return rows


def _continues(before: Sequence[str], row: Sequence[str], step: float, least: float) -> bool:
    """Whether a line goes on with cells of the row above."""
    if step > 1.25 * least:
        return False
    filled = [column for column, cell in enumerate(row) if cell]
    if any(not before[column] for column in filled) or len(filled) == len(row):
        return False
    if any(_NUMBER.fullmatch(row[column]) for column in filled):
        return False
    return all(row[column][0].islower() or row[column][0] in "(-–" for column in filled)


# --- texts


def _text(numbers: Iterable[int], words: Sequence[Word]) -> str:
    lines = _visual_lines(words[number] for number in numbers)
    return " ".join(word.text for line in lines for word in line)


def _without_empty_columns(rows: Sequence[Sequence[str]]) -> list[list[str]]:
    width = max(map(len, rows), default=0)
    used = [c for c in range(width) if any(c < len(row) and row[c] for row in rows)]
    return [[row[column] for column in used if column < len(row)] for row in rows if any(row)]
