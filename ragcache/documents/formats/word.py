"""Word documents."""

from __future__ import annotations

import io
import re

from ragcache.documents.formats.base import (
    Content,
    Format,
    RawFile,
    import_library,
    omitted_formulas,
    open_archive,
)
from ragcache.documents.html import read_html
from ragcache.documents.source import DocumentPart

_BODY = re.compile(r"word/document\d*\.xml")  # Word 365 numbers it
_FORMULA = re.compile(rb"<m:oMath[\s>]")
_WORD_STYLES = "p[style-name='Title'] => p.title:fresh\np[style-name='Subtitle'] => p:fresh"


def read_docx(file: RawFile) -> Content:
    """Read a Word document with headings, lists, tables and notes."""
    mammoth = import_library("mammoth")
    with open_archive(file) as archive:
        names = [each for each in archive.namelist() if _BODY.fullmatch(each)]
        formulas = sum(len(_FORMULA.findall(archive.read(name))) for name in names)
    ignore_pictures = mammoth.images.img_element(lambda _: {})
    converted = mammoth.convert_to_html(
        io.BytesIO(file.raw), style_map=_WORD_STYLES, convert_image=ignore_pictures
    )
    parts = [DocumentPart(read_html(_below_title(converted.value)).text)]
    return Content(parts, omitted=omitted_formulas(formulas))


def _below_title(markup: str) -> str:
    """Make the title of a document its first heading, with all other headings below it."""
    if '<p class="title">' not in markup:
        return markup
    lower = re.sub(r"<(/?)h([1-5])>", lambda found: f"<{found[1]}h{int(found[2]) + 1}>", markup)
    return re.sub(r'<p class="title">(.*?)</p>', r"<h1>\1</h1>", lower, flags=re.DOTALL)


FORMATS = (Format.of(".docx .docm", read_docx),)
