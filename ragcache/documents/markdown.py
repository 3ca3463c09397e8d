"""Markdown that readers write and the splitter reads: headings, fences and pipe tables."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ragcache.errors import UnreadableDocument

_HEADING = re.compile(r"^(#{1,6}) +\S.*$", re.MULTILINE)
_FENCE = re.compile(r"^(`{3,}|~{3,})[^\n]*\n.*?(?:^\1[`~]*[ \t]*$|\Z)", re.MULTILINE | re.DOTALL)
_HIDDEN = "\ue000"
MAX_CELLS = 4_000_000  # of a table, including empty ones
_TABLE = re.compile(
    r"^[ \t]*\|.*\|[ \t]*\n"  # the header
    r"[ \t]*\|(?:[ \t]*:?-+:?[ \t]*\|)+[ \t]*(?:\n|\Z)"  # the delimiter row
    r"(?:[ \t]*\|.*(?:\n|\Z))*",
    re.MULTILINE,
)


@dataclass(frozen=True, slots=True)
class Heading:
    """A heading of a text."""

    start: int
    """Position in the text."""
    level: int
    """1 to 6."""
    line: str
    """The line with its number signs."""
    at: int | None = None
    """Position in the whole document, if known."""

    @property
    def title(self) -> str:
        return self.line.lstrip("#").strip()


def find_headings(text: str) -> list[Heading]:
    """Return the headings of a Markdown text, in order, without lines of fenced code."""
    edges = [edge for found in _FENCE.finditer(text) for edge in found.span()]
    found = (Heading(m.start(), len(m[1]), m[0].strip()) for m in _HEADING.finditer(text))
    return [each for each in found if bisect_right(edges, each.start) % 2 == 0]  # outside of fences


def headings_above(headings: Sequence[Heading], position: int) -> list[Heading]:
    """Return the headings above a position, outermost first."""
    path = path_after([], [each for each in headings if each.start < position])
    opened = next((each.level for each in headings if each.start == position), None)
    return [each for each in path if opened is None or each.level < opened]


def path_after(path: Sequence[Heading], headings: Sequence[Heading]) -> list[Heading]:
    """Return the path of headings after `headings` follow `path`, outermost first."""
    for heading in headings:
        path = [*(each for each in path if each.level < heading.level), heading]
    return list(path)


def hide_comments(text: str) -> str:
    """Replace each `#` that begins a line of fenced code by a character without meaning.

    Comments are then not taken for headings. Positions stay the same.
    """
    return _FENCE.sub(lambda found: re.sub(r"^#", _HIDDEN, found[0], flags=re.MULTILINE), text)


def is_heading(line: str) -> bool:
    return _HEADING.fullmatch(line) is not None


def find_tables(text: str) -> Iterator[tuple[int, int]]:
    """Return the start and end of each pipe table of a text."""
    return (found.span() for found in _TABLE.finditer(text))


def write_table(rows: Sequence[Sequence[str]]) -> str:
    """Format rows as a pipe table. The first row is its header.

    Leaves out empty rows and fills up short ones. Raises `UnreadableDocument` for more than
    `MAX_CELLS` cells.
    """
    kept = [[_cell(each) for each in row] for row in rows]
    kept = [row for row in kept if any(row)]
    width = max(map(len, kept), default=0)
    if not width:
        return ""
    if width * len(kept) > MAX_CELLS:
        raise UnreadableDocument(
            f"a table of {len(kept):,} rows and up to {width:,} columns has more than "
            f"{MAX_CELLS:,} cells"
        )
    lines = [f"| {' | '.join(row + [''] * (width - len(row)))} |" for row in kept]
    return "\n".join([lines[0], "|" + " --- |" * width, *lines[1:]])


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def write_fence(text: str, language: str = "") -> str:
    """Format code as a block, between fences that do not occur in it."""
    longest = max((len(run) for run in re.findall(r"`{3,}", text)), default=2)
    fence = "`" * (longest + 1)
    return f"{fence}{language}\n{text.strip(chr(10))}\n{fence}"
