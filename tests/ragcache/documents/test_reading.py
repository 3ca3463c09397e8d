"""Reading files in workers: limits, errors of one file, and what needs no worker."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path

import pytest

from ragcache.documents import ReadOptions, load_sources, read_file, reading
from ragcache.documents.formats import read_document
from ragcache.documents.source import sanitize_document
from ragcache.errors import UnreadableDocument
from ragcache.params import OpenConfig
from tests.ragcache.documents.sample_files import WRITERS

LIMITS = ReadOptions.of(OpenConfig())
NESTED = b"<html>" + b"<b><i>a</i></b>" * 200_000
MEMORY = 2**27


def epub(chapter: bytes) -> bytes:
    """Pack a book of one chapter."""
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as book:
        container = "urn:oasis:names:tc:opendocument:xmlns:container"
        book.writestr(
            "META-INF/container.xml",
            f'<container xmlns="{container}"><rootfile full-path="b.opf"/></container>',
        )
        book.writestr(
            "b.opf",
            '<package xmlns="http://www.idpf.org/2007/opf"><item id="a" href="a.html" '
            'media-type="text/html"/><itemref idref="a"/></package>',
        )
        book.writestr("a.html", chapter)
    return packed.getvalue()


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow) if name.endswith("x") else name  # Office's
        for name in sorted(WRITERS)
    ],
)
def test_a_worker_reads_what_this_process_reads(name: str) -> None:
    raw = WRITERS[name]()
    expected = sanitize_document(read_document(name, raw, "file:///a"))
    assert read_file(name, raw, LIMITS, "file:///a") == expected


@pytest.mark.parametrize(
    ("name", "raw"),
    [
        pytest.param("a.html", NESTED, id="html"),
        pytest.param("a.epub", epub(NESTED), id="epub", marks=pytest.mark.slow),
    ],
)
def test_a_tree_that_takes_too_much_memory_is_refused(name: str, raw: bytes) -> None:
    limits = ReadOptions(seconds=60, memory=MEMORY, max_bytes=2**28)
    with pytest.raises(
        UnreadableDocument, match=r"takes more than 134,217,728 bytes of .*document_memory"
    ):
        read_file(name, raw, limits)


def test_a_file_that_takes_too_long_is_refused() -> None:
    limits = ReadOptions(seconds=0.01, memory=2**30, max_bytes=2**28)
    with pytest.raises(UnreadableDocument, match=r"more than 0.01 s to read .*document_seconds"):
        read_file("a.html", NESTED, limits)


def test_an_archive_may_unpack_to_document_bytes() -> None:
    limits = ReadOptions(seconds=60, memory=2**30, max_bytes=1000)
    with pytest.raises(UnreadableDocument, match=r"more than the 1,000 .*document_bytes"):
        read_file("a.epub", epub(b"<p>words</p>" * 1000), limits)


def test_a_file_over_a_limit_keeps_no_other_away(tmp_path: Path) -> None:
    for name, raw in {"a.html": b"<p>a", "b.html": NESTED, "c.html": b"<p>c"}.items():
        (tmp_path / name).write_bytes(raw)
    limits = ReadOptions(seconds=60, memory=MEMORY, max_bytes=2**28)
    loaded = load_sources(tmp_path, limits=limits)
    assert [each.text for each in loaded.documents] == ["a", "c"]
    assert [(Path(each.name).name, each.failed) for each in loaded.skipped] == [("b.html", True)]


def test_text_in_utf_8_needs_no_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "_WORKERS", None)
    assert read_file("a.md", "Ключ".encode(), LIMITS).text == "Ключ"
    assert read_file("a.py", b"x = 1", LIMITS).sections[0].language == "python"
