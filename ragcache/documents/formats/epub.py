"""EPUB books."""

from __future__ import annotations

import posixpath
from urllib.parse import unquote

from ragcache.documents.formats.base import (
    Content,
    Format,
    RawFile,
    omitted_formulas,
    open_archive,
    parse_xml,
)
from ragcache.documents.html import read_html
from ragcache.documents.source import DocumentPart

_PACKAGE = {
    "c": "urn:oasis:names:tc:opendocument:xmlns:container",
    "p": "http://www.idpf.org/2007/opf",
}


def read_epub(file: RawFile) -> Content:
    """Read the chapters of a book in order. The title replaces a missing heading."""
    with open_archive(file) as book:
        container = parse_xml(book.read("META-INF/container.xml"))
        [path, *_] = container.xpath("//c:rootfile/@full-path", namespaces=_PACKAGE)
        package = parse_xml(book.read(path))
        items = {each.get("id"): each for each in package.xpath("//p:item", namespaces=_PACKAGE)}
        parts, formulas = [], 0
        for reference in dict.fromkeys(package.xpath("//p:itemref/@idref", namespaces=_PACKAGE)):
            item = items.get(reference)
            if item is None or "html" not in (item.get("media-type") or ""):
                continue
            if "nav" in (item.get("properties") or "").split():
                continue  # the table of contents
            name = posixpath.normpath(posixpath.join(posixpath.dirname(path), item.get("href")))
            page = read_html(book.read(unquote(name)).decode("utf-8", "replace"))
            formulas += page.formulas
            if page.text:
                bare = page.title and not page.text.startswith("#")
                text = f"# {page.title}\n\n{page.text}" if bare else page.text
                parts.append(DocumentPart(text))
    return Content(parts, omitted=omitted_formulas(formulas))


FORMATS = (Format.of(".epub", read_epub),)
