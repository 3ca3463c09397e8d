"""OpenDocument texts and presentations, by their translation to HTML."""

from __future__ import annotations

from typing import Any

from ragcache.documents.formats.base import Content, Format, RawFile, flat, open_archive, parse_xml
from ragcache.documents.html import read_html
from ragcache.documents.source import DocumentPart
from ragcache.errors import UnreadableDocument

_NAMES = "{urn:oasis:names:tc:opendocument:xmlns:%s:1.0}"
_TEXT, _TABLE, _OFFICE = _NAMES % "text", _NAMES % "table", _NAMES % "office"
_DRAW, _STYLE, _SLIDE = _NAMES % "drawing", _NAMES % "style", _NAMES % "presentation"
_TAGS = {
    f"{_TEXT}p": "p",
    f"{_TEXT}list": "ul",
    f"{_TEXT}list-item": "li",
    f"{_TEXT}list-header": "li",
    f"{_TEXT}line-break": "br",
    f"{_TEXT}span": "span",
    f"{_TEXT}a": "a",
    f"{_TEXT}s": "span",
    f"{_TEXT}tab": "span",
    f"{_TEXT}ruby": "span",
    f"{_TEXT}ruby-base": "span",
    f"{_TABLE}table": "table",
    f"{_TABLE}table-row": "tr",
    f"{_TABLE}table-cell": "td",
}
"""Elements of HTML by elements of OpenDocument. Other inline fields become `span`, others `div`."""
_DROPPED = frozenset(
    {
        f"{_TEXT}tracked-changes",
        f"{_TEXT}sequence-decls",
        f"{_TEXT}variable-decls",
        f"{_TEXT}ruby-text",
        f"{_TABLE}covered-table-cell",
        f"{_OFFICE}annotation",
        f"{_OFFICE}forms",
    }
)
_BLOCKS = frozenset({_TABLE, _OFFICE, _DRAW})
_SECTIONS = frozenset(f"{_TEXT}{name}" for name in ("section", "table-of-content", "index-body"))
_SPANS = {
    "colspan": f"{_TABLE}number-columns-spanned",
    "rowspan": f"{_TABLE}number-rows-spanned",
}


def read_odt(file: RawFile) -> Content:
    """Read a text with headings, lists, tables and notes."""
    body, titles = _body(file, "text")
    return Content([DocumentPart(_markdown(body, titles))])


def read_odp(file: RawFile) -> Content:
    """Read the slides of a presentation with their notes. `page` is the slide."""
    body, titles = _body(file, "presentation")
    parts = []
    for number, slide in enumerate(body.findall(f"{_DRAW}page"), start=1):
        notes = slide.find(f"{_SLIDE}notes")
        told = "" if notes is None else flat(" ".join(notes.itertext()))
        if notes is not None:
            slide.remove(notes)
        for frame in slide.iter(f"{_DRAW}frame"):
            if frame.get(f"{_SLIDE}class") == "title":
                frame.tag = f"{_TEXT}h"
        blocks = (_markdown(slide, titles), f"Notes: {told}" if told else "")
        parts.append(DocumentPart("\n\n".join(filter(None, blocks)), {"page": number}))
    return Content(parts)


def _body(file: RawFile, kind: str) -> tuple[Any, frozenset[str]]:
    """Return the body of a document, and the names of styles of titles."""
    with open_archive(file) as archive:
        manifest = archive.read("META-INF/manifest.xml")
        if b"encryption-data" in manifest:
            raise UnreadableDocument("it needs a password")
        root = parse_xml(archive.read("content.xml"))
    body = root.find(f"{_OFFICE}body/{_OFFICE}{kind}")
    if body is None:
        raise UnreadableDocument("it is of another type than its name says")
    titles = {
        style.get(f"{_STYLE}name", "")
        for style in root.iter(f"{_STYLE}style")
        if style.get(f"{_STYLE}parent-style-name") == "Title"
    }
    return body, frozenset(titles | {"Title"})


def _markdown(body: Any, titles: frozenset[str]) -> str:
    """Return an element as Markdown. Turns its elements into elements of HTML, in place."""
    from lxml import etree

    notes = _take_notes(body)
    for element in [*body.iter(*_DROPPED)]:
        _remove(element)
    has_title = any(each.get(f"{_TEXT}style-name") in titles for each in body.iter(f"{_TEXT}p"))
    for element in [*body.iter(etree.Element)]:
        _translate(element, titles, has_title)
    markup = etree.tostring(body, encoding="unicode", method="html", with_tail=False)
    return "\n\n".join(filter(None, [read_html(markup).text, *notes]))


def _take_notes(body: Any) -> list[str]:
    """Replace each note by its mark, and return the notes."""
    notes: list[str] = []
    for note in [*body.iter(f"{_TEXT}note")]:
        mark = f"[{len(notes) + 1}]"
        text = note.find(f"{_TEXT}note-body")
        notes.append(f"{mark} {'' if text is None else flat(' '.join(text.itertext()))}")
        note.tail = mark + (note.tail or "")
        _remove(note)
    return notes


def _remove(element: Any) -> None:
    """Remove an element, but not the text that follows it."""
    parent, before = element.getparent(), element.getprevious()
    if parent is None:
        return
    if before is not None:
        before.tail = (before.tail or "") + (element.tail or "")
    else:
        parent.text = (parent.text or "") + (element.tail or "")
    parent.remove(element)


def _translate(element: Any, titles: frozenset[str], has_title: bool) -> None:
    """Turn an element into an element of HTML without attributes but spans."""
    tag, attributes = element.tag, dict(element.attrib)
    element.attrib.clear()
    namespace = tag[: tag.find("}") + 1]
    if tag == f"{_TEXT}h":
        level = int(attributes.get(f"{_TEXT}outline-level", 1)) + has_title
        element.tag = f"h{min(level, 6)}"
    elif tag == f"{_TEXT}p" and attributes.get(f"{_TEXT}style-name") in titles:
        element.tag = "h1"
    elif tag in _TAGS:
        element.tag = _TAGS[tag]
    else:
        is_block = namespace in _BLOCKS or tag in _SECTIONS
        element.tag = "div" if is_block else "span"
    if tag in (f"{_TEXT}s", f"{_TEXT}tab"):
        element.text = " "
    if tag == f"{_TABLE}table-cell":
        for name, key in _SPANS.items():
            if key in attributes:
                element.set(name, attributes[key])


FORMATS = (Format.of(".odt .ott", read_odt), Format.of(".odp", read_odp))
