"""Readable text out of marked-up files: Markdown, reStructuredText, HTML and XML, book texts, JSON.

Each converter takes the text of a file and returns its blocks: paragraphs, list items and headings
(which start with `#`). Code, tables, images, links' addresses and templating are dropped.
"""

from __future__ import annotations

import html
import json
import re
from collections.abc import Callable, Iterator

from lxml import etree
from lxml import html as lxml_html

Converter = Callable[[str], list[str]]

_FRONT_MATTER = re.compile(r"\A\ufeff?\s*(---|\+\+\+)\s*\n.*?\n\1\s*\n", re.S)
_FENCE = re.compile(r"^\s*(`{3,}|~{3,}).*?^\s*\1\s*$", re.S | re.M)
_COMMENT = re.compile(r"<!--.*?-->", re.S)
_TAG = re.compile(r"</?[a-zA-Z][^<>\n]{0,300}>")
_TEMPLATING = re.compile(r"\{\{.*?\}\}|\{%.*?%\}|\{:.*?\}|\[!\w+[^\]\n]*\]", re.S)
_IMAGE = re.compile(r"!\[[^\]]*\](\([^)]*\)|\[[^\]]*\])?")
_LINK = re.compile(r"\[([^\[\]]*)\]\((?:[^()\s]|\([^()]*\))*(?:\s+\"[^\"]*\")?\s*\)")
_REFERENCE = re.compile(r"\[([^\[\]]+)\]\[[^\]]*\]")
_DEFINITION = re.compile(r"^\s*\[[^\]]+\]:\s*\S+.*$", re.M)
_EMPHASIS = re.compile(r"(\*{1,3}|_{2,3})(?=\S)(.+?)(?<=\S)\1", re.S)
_ITALIC = re.compile(r"(?<![\w_])_(?=\S)([^_\n]+?)(?<=\S)_(?![\w_])")
_BULLET = re.compile(r"^\s*(?:[-*+•·]|\d{1,3}[.)、])\s+")
_HAN = re.compile(r"[\u3400-\u9fff]")


def markdown(text: str) -> list[str]:
    text = _FRONT_MATTER.sub("", text)
    for pattern in (_COMMENT, _FENCE, _TEMPLATING, _IMAGE, _DEFINITION):
        text = pattern.sub("", text)
    text = _REFERENCE.sub(r"\1", _LINK.sub(r"\1", text))
    text = html.unescape(_TAG.sub("", text)).replace("`", "")
    text = _ITALIC.sub(r"\1", _EMPHASIS.sub(r"\2", text)).replace("\\", "")
    return list(_blocks(text))


def _blocks(text: str) -> Iterator[str]:
    """Joins wrapped lines; headings and list items are blocks of their own."""
    lines: list[str] = []
    for line in [*text.splitlines(), ""]:
        line = line.strip().lstrip("> ").rstrip()
        special = line.startswith(("#", "|", ":::", "import ", "export ")) or _BULLET.match(line)
        if (not line or special) and lines:
            yield join_lines(lines)
            lines = []
        if line.startswith("#"):
            yield line.rstrip("# ")
        elif line and not line.startswith(("|", ":::", "import ", "export ", "---", "===")):
            lines.append(_BULLET.sub("", line))


def join_lines(lines: list[str]) -> str:
    """One line of wrapped ones; Chinese is joined without a space."""
    text = " ".join(" ".join(lines).split())
    return re.sub(r"(?<=[\u3000-\u9fff，。；：]) (?=[\u3000-\u9fff])", "", text)


_RST_DIRECTIVE = re.compile(r"^(\s*)\.\. .*$")
_RST_ROLE = re.compile(r":[\w:.+-]+:`~?([^`<]*?)(?:\s*<[^>]*>)?`")
_RST_LINK = re.compile(r"`([^`<]+?)\s*<[^>]*>`_{1,2}|`([^`]+)`_{0,2}|\|([^|\s]+)\|")


def restructured_text(text: str) -> list[str]:
    kept: list[str] = []
    skipped: int | None = None
    for line in text.splitlines():
        indent = len(line) - len(line.lstrip())
        if skipped is not None and (not line.strip() or indent > skipped):
            continue
        skipped = None
        directive = _RST_DIRECTIVE.match(line)
        if directive:
            skipped = indent
        elif re.fullmatch(r"\s*([=\-~^\"'`#*+.:_])\1{2,}\s*", line):
            if kept and kept[-1].strip():
                kept[-1:] = ["", f"# {kept[-1].strip()}", ""]
        else:
            if line.rstrip().endswith("::"):
                skipped, line = indent, line.rstrip()[:-1] + "\n"
            kept.append(line)
    body = _RST_ROLE.sub(r"\1", "\n".join(kept).replace("``", ""))
    body = _RST_LINK.sub(lambda m: m[1] or m[2] or m[3], body)
    body = _EMPHASIS.sub(r"\2", body).replace("\\ ", "")
    return [b for b in _blocks(body) if not b.startswith((":", "+-"))]


_BLOCK_TAGS = {"p", "para", "li", "item", "dd", "blockquote", "summary", "entry"}
_HEADING_TAGS = {"h1", "h2", "h3", "h4", "h5", "title"}
_SKIPPED_TAGS = {"script", "style", "pre", "code", "table", "figure", "math", "exercise", "nav"}


def xml(text: str) -> list[str]:
    """HTML and any XML whose paragraphs are called as in HTML, CNXML or DocBook."""
    if "<html" in text[:2000].lower():
        root = lxml_html.fromstring(text.encode())
    else:
        root = etree.fromstring(text.encode(), etree.XMLParser(recover=True, huge_tree=True))
    return [] if root is None else list(_elements(root))


def _elements(node: etree._Element) -> Iterator[str]:
    name = etree.QName(node).localname if isinstance(node.tag, str) else ""
    if not name or name in _SKIPPED_TAGS:
        return
    if name in _HEADING_TAGS or (name in _BLOCK_TAGS and not _holds_blocks(node)):
        words = " ".join("".join(_strings(node)).split())
        if words:
            yield f"# {words}" if name in _HEADING_TAGS else words
        return
    for child in node:
        yield from _elements(child)


def _holds_blocks(node: etree._Element) -> bool:
    tags = (etree.QName(d).localname for d in node.iterdescendants() if isinstance(d.tag, str))
    return any(tag in _BLOCK_TAGS for tag in tags)


def _strings(node: etree._Element) -> Iterator[str]:
    yield node.text or ""
    for child in node:
        if isinstance(child.tag, str) and etree.QName(child).localname not in _SKIPPED_TAGS:
            yield from _strings(child)
        yield child.tail or ""


_BOOK_START = re.compile(r"\*\*\* ?START OF TH.*?\*\*\*", re.S)
_BOOK_END = re.compile(r"\*\*\* ?END OF TH|End of (?:the )?Project Gutenberg", re.I)


def book(text: str) -> list[str]:
    """A plain book with hard-wrapped lines; Project Gutenberg's own words are cut off."""
    start, end = _BOOK_START.search(text[:60_000]), _BOOK_END.search(text, len(text) // 2)
    text = text[start.end() if start else 0 : end.start() if end else len(text)]
    blocks = (join_lines(b.splitlines()).replace("_", "") for b in re.split(r"\n\s*\n", text))
    return [b for b in blocks if b and not b.startswith(("[Illustration", "Produced by"))]


def facts(text: str) -> list[str]:
    """JSON whose leaves are prose: each under the names of its last two keys."""
    return list(_leaves(json.loads(text), ()))


def _leaves(value: object, path: tuple[str, ...]) -> Iterator[str]:
    if isinstance(value, dict):
        if len(path) == 1:
            yield f"# {path[0]}"
        for key, inner in value.items():
            yield from _leaves(inner, path if key == "text" else (*path, str(key)))
    elif isinstance(value, str):
        words = " ".join(html.unescape(re.sub(r"<[^>]+>", " ", value)).split())
        name = path[-1] if path else ""
        yield words if len(path) <= 2 and len(words) > 200 else f"{name}: {words}"


CONVERTERS: dict[str, Converter] = {
    "markdown": markdown, "rst": restructured_text, "xml": xml, "book": book, "facts": facts,
}  # fmt: skip


def is_chinese(text: str) -> bool:
    return len(_HAN.findall(text)) > 0.25 * len(text)
