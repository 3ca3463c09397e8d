"""Formats that are not read, and what to do about files of them."""

from __future__ import annotations

_ADVICE = {
    ".doc .dot": "of an old Word; save it as .docx",
    ".ppt .pps .pot": "of an old PowerPoint; save it as .pptx",
    ".wpd": "of WordPerfect; save it as .docx",
    ".pages": "of Pages; export it as .docx",
    ".numbers": "of Numbers; export it as .xlsx",
    ".key": "of Keynote; export it as .pptx",
    ".one": "of OneNote; export it as .docx",
    ".pub": "of Publisher; save it as .pdf",
    ".vsd .vsdx": "of Visio; save it as .pdf",
    ".djvu": "of scanned pages; convert it to a PDF with text",
    ".mobi .azw .azw3": "of a Kindle book; convert it to .epub",
    ".pst .ost": "a folder of Outlook; save its messages as .msg or .eml",
    ".mht .mhtml": "of a saved page; save it as .html",
    ".7z .rar .gz .tgz .tar .bz2 .xz": "an archive that is not ZIP; unpack it",
}
_BY_SUFFIX = {suffix: words for listed, words in _ADVICE.items() for suffix in listed.split()}
_STREAMS = {
    "EncryptedPackage": "",
    "__substg1.0_": ".msg",
    "WordDocument": ".doc",
    "PowerPoint Document": ".ppt",
    "Workbook": ".xls",
    "Book": ".xls",
}
"""Streams of the container that old programs write, and the suffix of the files that have them."""
LOCKED = "it needs a password"


def explain_suffix(suffix: str) -> str:
    """Return why files of a suffix in lower case are not read, and what to do about it."""
    if not suffix:
        return "no suffix tells its type"
    return _BY_SUFFIX.get(suffix, f"{suffix} is no type that is read")


def ole_suffix(raw: bytes) -> str:
    """Return the suffix of a file of an old program, by the streams in it. Empty if unknown."""
    found = (suffix for name, suffix in _STREAMS.items() if name.encode("utf-16-le") in raw)
    return next(found, "")


def explain_ole(raw: bytes) -> str:
    """Return why a file of an old program is not read."""
    if "EncryptedPackage".encode("utf-16-le") in raw:
        return LOCKED
    suffix = ole_suffix(raw)
    if suffix:
        return explain_suffix(suffix)
    return "of an old Office; save it as .docx, .xlsx or .pptx"
