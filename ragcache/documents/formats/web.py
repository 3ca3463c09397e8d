"""HTML pages."""

from __future__ import annotations

import re

from ragcache.documents.charset import decode_text
from ragcache.documents.formats.base import Content, Format, RawFile, omitted_formulas
from ragcache.documents.html import read_html
from ragcache.documents.source import DocumentPart

_CHARSET = re.compile(rb"charset\s*=\s*[\"']?\s*([\w.:-]+)|encoding\s*=\s*[\"']([\w.:-]+)", re.I)


def read_page(file: RawFile) -> Content:
    """Read an HTML page. Its title replaces a missing heading."""
    found = _CHARSET.search(file.raw[:4096])
    declared = (found[1] or found[2]).decode("ascii") if found else ""
    page = read_html(decode_text(file.raw, declared))
    metadata = {"title": page.title} if page.title else {}
    bare = page.title and not re.search(r"^# ", page.text, re.MULTILINE)
    text = f"# {page.title}\n\n{page.text}" if bare and page.text else page.text
    return Content([DocumentPart(text)], metadata, omitted_formulas(page.formulas))


FORMATS = (Format.of(".html .htm .xhtml", read_page),)
