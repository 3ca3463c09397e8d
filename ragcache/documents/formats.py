"""Files of all types as documents: the choice of a reader, and readers of text formats.

The suffix of a file decides its type, but binary content is never read as text: signatures and
bytes that no encoding explains are refused.
"""

from __future__ import annotations

import codecs
import csv
import io
import json
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from email import message_from_bytes, policy
from email.message import EmailMessage
from pathlib import PurePosixPath
from typing import Any

from ragcache.documents import office
from ragcache.documents.charset import detect_encoding
from ragcache.documents.html import read_html
from ragcache.documents.markdown import write_fence, write_table
from ragcache.documents.source import DocumentPart, SourceDocument
from ragcache.errors import MissingExtra, UnreadableDocument

TEXT_SUFFIXES = frozenset(
    ".md .markdown .mdx .txt .text .rst .adoc .org .tex .log .srt .vtt".split()
)
LANGUAGES = {
    ".py": "python",
    ".pyi": "python",
    ".js": "js",
    ".jsx": "js",
    ".mjs": "js",
    ".ts": "ts",
    ".tsx": "ts",
    ".java": "java",
    ".kt": "kotlin",
    ".scala": "scala",
    ".go": "go",
    ".rs": "rust",
    ".rb": "ruby",
    ".php": "php",
    ".swift": "swift",
    ".c": "c",
    ".h": "c",
    ".cc": "cpp",
    ".cpp": "cpp",
    ".cxx": "cpp",
    ".hpp": "cpp",
    ".cs": "csharp",
    ".lua": "lua",
    ".hs": "haskell",
    ".ex": "elixir",
    ".exs": "elixir",
    ".ps1": "powershell",
    ".proto": "proto",
    ".sol": "sol",
}
"""Languages of source code, by suffix, as LangChain's splitters name them."""
_PLAIN_CODE = frozenset(
    ".sh .bash .zsh .fish .sql .r .jl .m .dart .vue .svelte .css .scss .yaml .yml .toml .ini .cfg "
    ".conf .properties .xml .xsd .gradle .cmake .tf .graphql .bat .diff .patch .pl".split()
)
CODE = "code"  # language of code without a splitter of its own

_SIGNATURES = {
    b"%PDF-": "a PDF",
    b"PK\x03\x04": "a ZIP archive or an office document",
    b"\x89PNG": "a picture",
    b"GIF8": "a picture",
    b"\xff\xd8\xff": "a picture",
    b"\x1f\x8b": "a gzip archive",
    b"7z\xbc\xaf": "a 7z archive",
    b"BZh": "a bzip2 archive",
    b"\xfd7zXZ": "an xz archive",
    b"Rar!": "a RAR archive",
    b"\x7fELF": "a program",
    b"OggS": "sound",
    b"ID3": "sound",
    b"{\\rtf": "RTF; save it as .docx",
    b"\xd0\xcf\x11\xe0": "a file of an old Office; save it as .docx, .xlsx or .pptx",
    b"SQLite format 3": "a database",
}
_BOMS = (
    (codecs.BOM_UTF8, "utf-8-sig"),
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)


@dataclass(frozen=True, slots=True)
class _Content:
    """Content that a reader found in a file."""

    parts: list[DocumentPart]
    metadata: Mapping[str, Any] = field(default_factory=dict)


def read_document(
    name: str, raw: bytes, uri: str = "", *, max_bytes: int = sys.maxsize
) -> SourceDocument:
    """Read the content of a file as a document, in this process.

    `ragcache.documents.reading.read_file` limits time and memory, too.

    Args:
        name: Id of the document. Its suffix decides the type.
        raw: The content.
        uri: Address of the document.
        max_bytes: Most bytes that an archive may unpack to, and most characters of the text.
            Unlimited by default.

    Raises:
        UnreadableDocument: The content is binary, damaged, empty, locked or too large.
        MissingExtra: The type needs the extra `documents`.
    """
    suffix = PurePosixPath(name).suffix.lower()
    if raw.startswith(b"%PDF-"):
        suffix = ".pdf"
    if not raw.strip():
        raise UnreadableDocument("an empty file")
    reader = _READERS.get(suffix, _read_text)
    try:
        content = reader(raw, suffix, max_bytes)
    except (UnreadableDocument, MissingExtra, MemoryError):
        raise
    except Exception as error:  # libraries raise any type for damaged files
        kind = type(error).__name__
        raise UnreadableDocument(f"it cannot be read as {suffix}: {kind}: {error}") from error
    parts = [part for part in content.parts if part.text.strip()]
    if not parts:
        raise UnreadableDocument("it holds no text")
    characters = sum(len(part.text) for part in parts)
    if characters > max_bytes:
        raise UnreadableDocument(
            f"it holds {characters:,} characters of text, more than the {max_bytes:,} that may be "
            "(option document_bytes); divide it"
        )
    text = "\n\n".join(part.text for part in parts)
    bare = len(parts) == 1 and parts[0] == DocumentPart(parts[0].text)
    return SourceDocument(name, text, uri, content.metadata, () if bare else tuple(parts))


def is_plain(name: str, raw: bytes) -> bool:
    """Whether a file is text or code in UTF-8, which is read in linear time and memory."""
    if PurePosixPath(name).suffix.lower() in _READERS or raw.startswith(b"%PDF-"):
        return False
    try:
        raw.decode()
    except UnicodeDecodeError:
        return False
    return True


def is_supported(name: str) -> bool:
    """Whether a file of this name in a folder is loaded."""
    return PurePosixPath(name).suffix.lower() in SUFFIXES


def decode_text(raw: bytes, declared: str = "") -> str:
    """Decode the text of a file.

    Tries its byte order mark, UTF-8, the encoding that it declares, and the likeliest encoding
    (`ragcache.documents.charset`). Raises `UnreadableDocument`.
    """
    for bom, encoding in _BOMS:
        if raw.startswith(bom):
            return _decode(raw, encoding)
    for signature, kind in _SIGNATURES.items():
        if raw.startswith(signature):
            raise UnreadableDocument(f"a binary file: {kind}")
    if b"\0" in raw:
        raise UnreadableDocument("a binary file")
    for encoding in ("utf-8", declared):
        try:
            if encoding:
                return raw.decode(encoding)
        except (UnicodeDecodeError, LookupError):
            continue
    return raw.decode(detect_encoding(raw))


def _decode(raw: bytes, encoding: str) -> str:
    try:
        return raw.decode(encoding)
    except UnicodeDecodeError as error:
        message = f"it begins as {encoding.removesuffix('-sig').upper()}, but is not at byte"
        raise UnreadableDocument(f"{message} {error.start}") from error


def _read_text(raw: bytes, suffix: str, _: int) -> _Content:
    text = decode_text(raw)
    if suffix in LANGUAGES or suffix in _PLAIN_CODE:
        return _Content([DocumentPart(text, language=LANGUAGES.get(suffix, CODE))])
    return _Content([DocumentPart(text)])


_CHARSET = re.compile(rb"charset\s*=\s*[\"']?\s*([\w.:-]+)|encoding\s*=\s*[\"']([\w.:-]+)", re.I)


def _read_html(raw: bytes, _: str, __: int) -> _Content:
    found = _CHARSET.search(raw[:4096])
    declared = (found[1] or found[2]).decode("ascii") if found else ""
    page = read_html(decode_text(raw, declared))
    metadata = {"title": page.title} if page.title else {}
    bare = page.title and not re.search(r"^# ", page.text, re.MULTILINE)
    text = f"# {page.title}\n\n{page.text}" if bare and page.text else page.text
    return _Content([DocumentPart(text)], metadata)


_DELIMITERS = ",;\t|"


def _read_csv(raw: bytes, suffix: str, _: int) -> _Content:
    text = decode_text(raw)
    try:
        mark = csv.Sniffer().sniff(text[:65536], delimiters=_DELIMITERS).delimiter
    except csv.Error:  # use the delimiter that occurs most often in the header
        header = text.partition("\n")[0]
        mark = "\t" if suffix == ".tsv" else max(_DELIMITERS, key=header.count)
    # the sniffer's other guesses are ignored: it reads only the start
    return _Content(
        [DocumentPart(write_table(list(csv.reader(io.StringIO(text), delimiter=mark))))]
    )


def _read_json(raw: bytes, suffix: str, _: int) -> _Content:
    text = decode_text(raw)
    try:
        lines = suffix != ".json"
        value = (
            [json.loads(each) for each in text.splitlines() if each.strip()]
            if lines
            else (json.loads(text))
        )
    except ValueError:  # comments, or another format of the same suffix
        return _Content([DocumentPart(text, language=CODE)])
    return _Content([DocumentPart("\n\n".join(_json_blocks(value, 1)))])


_DEEPEST = 3  # level of JSON that becomes a heading


def _json_blocks(value: Any, level: int) -> Iterable[str]:
    """Yield JSON as text: keys of objects become headings, lists of flat objects tables."""
    if _is_table(value):
        keys = list(dict.fromkeys(key for each in value for key in each))
        yield write_table([keys, *([_scalar(each.get(key)) for key in keys] for each in value)])
        return
    if not isinstance(value, dict) or level > _DEEPEST:
        yield "\n".join(_json_lines(value, 0))
        return
    plain = [f"{key}: {_scalar(inner)}" for key, inner in value.items() if _is_scalar(inner)]
    if plain:
        yield "\n".join(plain)
    for key, inner in value.items():
        if not _is_scalar(inner):
            yield f"{'#' * level} {' '.join(key.split())}"
            yield from _json_blocks(inner, level + 1)


def _is_table(value: Any) -> bool:
    """Whether it is a list of objects that hold no others, and mostly have the same keys."""
    if not (isinstance(value, list) and value and all(isinstance(each, dict) for each in value)):
        return False
    width = len({key for each in value for key in each})
    if width * len(value) > 4 * sum(map(len, value)):
        return False
    return all(_is_scalar(inner) for each in value for inner in each.values())


def _json_lines(value: Any, depth: int) -> Iterable[str]:
    indent = "  " * depth
    if isinstance(value, dict):
        for key, inner in value.items():
            if _is_scalar(inner):
                yield f"{indent}{key}: {_scalar(inner)}"
            else:
                yield f"{indent}{key}:"
                yield from _json_lines(inner, depth + 1)
    elif isinstance(value, list):
        for inner in value:
            first, *rest = [*_json_lines(inner, 0)] or [""]
            yield f"{indent}- {first}"
            yield from (f"{indent}  {line}" for line in rest)
    else:
        yield indent + _scalar(value)


def _is_scalar(value: Any) -> bool:
    return not isinstance(value, dict | list) or not value


def _scalar(value: Any) -> str:
    if value is None or value == {} or value == []:
        return ""
    return value if isinstance(value, str) else json.dumps(value)


def _read_notebook(raw: bytes, _: str, __: int) -> _Content:
    """Read a Jupyter notebook of format 3 or 4: Markdown, code, and outputs of text."""
    book = json.loads(decode_text(raw))
    cells = book.get("cells") or [c for sheet in book.get("worksheets", ()) for c in sheet["cells"]]
    language = book.get("metadata", {}).get("kernelspec", {}).get("language", "python")
    blocks = [block for cell in cells for block in _cell_blocks(cell, language)]
    return _Content([DocumentPart("\n\n".join(blocks))])


def _cell_blocks(cell: Mapping[str, Any], language: str) -> Iterable[str]:
    text = _joined(cell.get("source", cell.get("input", "")))
    if not text.strip():
        return
    if cell.get("cell_type") == "heading":  # notebook format 3
        yield f"{'#' * int(cell.get('level', 1))} {text}"
    elif cell.get("cell_type") != "code":
        yield text
    else:
        yield write_fence(text, language)
        for output in cell.get("outputs", ()):
            data = output.get("data", output)
            shown = _joined(output.get("text") or data.get("text/plain") or "")
            if shown.strip():
                yield write_fence(shown, "output")


def _joined(text: str | list[str]) -> str:
    return text if isinstance(text, str) else "".join(text)


_HEADERS = ("From", "To", "Cc", "Date")


def _read_mail(raw: bytes, _: str, max_bytes: int) -> _Content:
    """Read a message with its headers, and each attachment of a known type as a part."""
    message = message_from_bytes(raw, policy=policy.default)
    assert isinstance(message, EmailMessage)
    subject = " ".join(str(message.get("Subject", "")).split())
    headers = {name: str(message[name]) for name in _HEADERS if message[name]}
    lines = [f"{name}: {value}" for name, value in headers.items()]
    blocks = [f"# {subject}"] if subject else []
    parts: list[DocumentPart] = []
    for attachment in message.iter_attachments():
        name, read = _attachment(attachment, max_bytes)
        lines.append(f"Attachment: {name}" + ("" if read else " (not read)"))
        parts += read
    metadata = {name.lower(): value for name, value in headers.items()}
    text = "\n\n".join(each for each in [*blocks, "\n".join(lines), _mail_body(message)] if each)
    return _Content(
        [DocumentPart(text), *parts], metadata | ({"subject": subject} if subject else {})
    )


def _mail_body(message: EmailMessage) -> str:
    body = message.get_body(("plain", "html"))
    if not isinstance(body, EmailMessage):
        return ""
    try:
        text = str(body.get_content())
    except LookupError:  # a charset that Python does not know
        payload = body.get_payload(decode=True)
        text = decode_text(payload) if isinstance(payload, bytes) else ""
    return read_html(text).text if body.get_content_subtype() == "html" else text.strip()


def _attachment(attachment: Any, max_bytes: int) -> tuple[str, list[DocumentPart]]:
    """Return the name of an attachment, and its parts if it can be read."""
    name = attachment.get_filename() or "without a name"
    payload = attachment.get_payload(decode=True)
    if not isinstance(payload, bytes) or not is_supported(name):
        return name, []
    try:
        document = read_document(name, payload, max_bytes=max_bytes)
    except (UnreadableDocument, MissingExtra):
        return name, []
    return name, [
        replace(each, metadata={**each.metadata, "attachment": name}) for each in document.sections
    ]


def _read_office(raw: bytes, suffix: str, max_bytes: int) -> _Content:
    return _Content(office.READERS[suffix](raw, max_bytes))


_READERS: dict[str, Callable[[bytes, str, int], _Content]] = {
    **dict.fromkeys((".html", ".htm", ".xhtml"), _read_html),
    **dict.fromkeys((".csv", ".tsv"), _read_csv),
    **dict.fromkeys((".json", ".jsonl", ".ndjson"), _read_json),
    ".ipynb": _read_notebook,
    ".eml": _read_mail,
    **dict.fromkeys(office.READERS, _read_office),
}
SUFFIXES = TEXT_SUFFIXES | LANGUAGES.keys() | _PLAIN_CODE | _READERS.keys()
"""Files of a folder that are loaded. A file given by its own path may have any suffix."""
