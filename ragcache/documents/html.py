"""HTML as Markdown: headings, lists, tables and paragraphs, without scripts and styles."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from ragcache.documents.markdown import write_fence, write_table

_DROPPED = frozenset(
    "script style noscript template head nav svg math canvas iframe object embed audio video "
    "select button input textarea".split()
)
_INLINE = frozenset(
    "a abbr acronym b bdi bdo big cite code data del dfn em font i img ins kbd label mark q s samp "
    "small span strike strong sub sup time tt u var wbr".split()
)
_LISTS = frozenset({"ul", "ol", "menu"})
_MAX_COLUMNS = 1000  # that a cell may span
_DECLARATION = re.compile(r"^\s*<\?xml[^>]*\?>")


@dataclass(frozen=True, slots=True)
class HtmlText:
    """The text of an HTML page."""

    title: str
    """Title of the page. Empty without one."""
    text: str
    """Markdown."""
    formulas: int = 0
    """Number of formulas that were left out."""


def read_html(markup: str) -> HtmlText:
    """Convert an HTML or XHTML page to Markdown.

    Leaves out scripts, styles, navigation, form controls, hidden elements and link targets. Keeps
    the alternative texts of pictures. Tables of one column and tables that contain tables are
    layout: their cells become paragraphs.
    """
    from lxml import etree
    from lxml import html as lxml_html

    parser = lxml_html.HTMLParser(huge_tree=True, remove_comments=True, remove_pis=True)
    try:
        root = lxml_html.document_fromstring(_DECLARATION.sub("", markup), parser=parser)
    except etree.ParserError:  # an empty document
        return HtmlText("", "")
    title = " ".join((root.findtext(".//title") or "").split())
    formulas = sum(1 for _ in root.iter("math"))
    return HtmlText(title, _Writer().write(root), formulas)


@dataclass(slots=True)
class _Writer:
    """Blocks of Markdown, written while a tree is walked. Iterative: pages may be nested deep."""

    blocks: list[str] = field(default_factory=list)
    line: list[str] = field(default_factory=list)
    lists: list[list[Any]] = field(default_factory=list)  # kind and count of each open list
    mark: str = ""  # bullet before the next block

    def write(self, root: Any) -> str:
        from lxml import etree

        walk = etree.iterwalk(root, events=("start", "end"))
        for event, element in walk:
            if event == "end":
                self._end(element)
                self._text(None if element is root else element.tail)
            elif _is_hidden(element):
                walk.skip_subtree()
            elif element is not root and (block := _whole_block(element)) is not None:
                self._flush()
                self._add(block)
                walk.skip_subtree()
            else:
                self._start(element)
        self._flush()
        return "\n\n".join(self.blocks)

    def _start(self, element: Any) -> None:
        tag = element.tag
        if tag == "br":
            self.line.append("\n")
        elif tag == "img":
            self._text(element.get("alt"))
        elif tag not in _INLINE:
            self._flush()
        if tag in _LISTS:
            self.lists.append([tag, 0])
        elif tag == "li":
            self.mark = self._bullet()
        self._text(element.text)

    def _end(self, element: Any) -> None:
        tag = element.tag
        if tag in _INLINE or tag == "br" or _is_hidden(element):
            return
        self._flush()
        if tag in _LISTS and self.lists:
            self.lists.pop()
        if tag == "li":
            self.mark = ""

    def _bullet(self) -> str:
        if not self.lists:
            return "- "
        self.lists[-1][1] += 1
        kind, number = self.lists[-1]
        return f"{number}. " if kind == "ol" else "- "

    def _text(self, text: str | None) -> None:
        if text:
            self.line.append(re.sub(r"\s+", " ", text))

    def _flush(self) -> None:
        lines = (" ".join(line.split()) for line in "".join(self.line).split("\n"))
        self.line.clear()
        self._add("\n".join(line for line in lines if line))

    def _add(self, block: str) -> None:
        """Add a block. Items of a list follow each other without a blank line."""
        if not block:
            return
        if block.startswith("#") or ("\n" in block and block[0] in "|`"):
            self.blocks.append(block)
            return
        depth = max(0, len(self.lists) - 1)
        indent = "  " * depth
        if self.mark:
            item = indent + self.mark + block.replace("\n", f"\n{indent}  ")
            self.mark = ""
            if self.blocks and re.match(r" *(- |\d+\. )", self.blocks[-1]):
                self.blocks[-1] += f"\n{item}"
            else:
                self.blocks.append(item)
        elif self.lists and self.blocks:
            self.blocks[-1] += "\n" + re.sub(r"^", f"{indent}  ", block, flags=re.MULTILINE)
        else:
            self.blocks.append(block)


def _is_hidden(element: Any) -> bool:
    return (
        element.tag in _DROPPED
        or element.get("hidden") is not None
        or element.get("aria-hidden") == "true"
        or "display:none" in element.get("style", "").replace(" ", "").lower()
    )


def _whole_block(element: Any) -> str | None:
    """Return the block of a heading, of code or of a data table, which is read as a whole."""
    tag = element.tag
    if re.fullmatch("h[1-6]", tag):
        text = _flat(element)
        return f"{'#' * int(tag[1])} {text}" if text else ""
    if tag == "pre":
        text = "".join(element.itertext())
        return write_fence(text) if text.strip() else ""
    if tag == "table" and element.find(".//table") is None:
        rows = _grid(element)
        if max(map(len, rows), default=0) > 1:
            caption = element.find("caption")
            table = write_table(rows)
            return table if caption is None else f"{_flat(caption)}\n\n{table}"
    return None


def _grid(table: Any) -> list[list[str]]:
    """Return the cells of a table by row and column.

    A merged cell stands in each place that it covers, and a cell across the whole table once. The
    HTML standard forms tables in this way (WHATWG, 4.9.12). A cell ends with its group of rows.
    """
    rows: list[list[_Cell]] = []
    for _, group in groupby(table.iter("tr"), key=lambda row: row.getparent()):
        rows += _group_rows([list(row.iterchildren("td", "th")) for row in group])
    width = max(map(len, rows), default=0)
    kept = (row[:1] if _is_title(row, width) else row for row in rows)
    return [[cell.text for cell in row] for row in kept]


@dataclass(frozen=True, slots=True, eq=False)
class _Cell:
    """A cell, which may cover several places of a table."""

    text: str


_EMPTY = _Cell("")


def _group_rows(group: Sequence[Sequence[Any]]) -> list[list[_Cell]]:
    """Return the cells of a group of rows by row and column."""
    rows: list[dict[int, _Cell]] = [{} for _ in group]
    for top, elements in enumerate(group):
        left = 0
        for element in elements:
            while left in rows[top]:
                left += 1
            cell = _Cell(_flat(element))
            height = _span(element, "rowspan", len(group) - top)
            width = _span(element, "colspan", _MAX_COLUMNS)
            for row in rows[top : top + height]:
                for column in range(left, left + width):
                    row.setdefault(column, cell)
            left += width
    return [[row.get(column, _EMPTY) for column in range(max(row, default=-1) + 1)] for row in rows]


def _span(cell: Any, name: str, most: int) -> int:
    """Return the rows or columns of a cell. A rowspan of 0 reaches the end of its group."""
    value = cell.get(name, "1").strip()
    if not (value.isascii() and value.isdecimal()):
        return 1
    span = int(value[:9])
    if span == 0:
        return most if name == "rowspan" else 1
    return min(span, most)


def _is_title(row: Sequence[_Cell], width: int) -> bool:
    """Whether one cell covers a whole row of a table."""
    return len(row) == width and all(cell is row[0] for cell in row)


def _flat(element: Any) -> str:
    """Return the text of an element in one line."""
    return " ".join(_Writer().write(element).split())
