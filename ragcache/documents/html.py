"""HTML as Markdown: headings, lists, tables and paragraphs, without scripts and styles."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
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
_DECLARATION = re.compile(r"^\s*<\?xml[^>]*\?>")


@dataclass(frozen=True, slots=True)
class HtmlText:
    """The text of an HTML page."""

    title: str
    """Title of the page. Empty without one."""
    text: str
    """Markdown."""


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
    return HtmlText(title, _Writer().write(root))


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
        rows = [_cells(row) for row in element.iter("tr")]
        if max(map(len, rows), default=0) > 1:
            caption = element.find("caption")
            table = write_table(rows)
            return table if caption is None else f"{_flat(caption)}\n\n{table}"
    return None


def _cells(row: Any) -> list[str]:
    cells: list[str] = []
    for cell in row.iterchildren("td", "th"):
        span = cell.get("colspan", "1")
        width = min(int(span), 100) if span.isdecimal() else 1
        cells += [_flat(cell), *[""] * (width - 1)]
    return cells


def _flat(element: Any) -> str:
    """Return the text of an element in one line."""
    return " ".join(_Writer().write(element).split())
