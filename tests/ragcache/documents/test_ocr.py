"""Recognition of pages without text: by a function, and by the program tesseract."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest
from fpdf import FPDF

from ragcache.documents import ReadOptions, load_sources, read_file
from ragcache.documents.formats import pdf
from ragcache.documents.formats.base import OMITTED
from ragcache.documents.ocr import resolve_ocr
from ragcache.errors import ConfigurationError, UnreadableDocument
from ragcache.params import OpenConfig

WORDS = "The harbour master writes the log of the tides each morning."


def scan(pages: int) -> bytes:
    """Make a PDF with a page of text, and pages with a drawing alone."""
    made = FPDF()
    made.add_page()
    made.set_font("helvetica", size=11)
    made.multi_cell(0, 6, WORDS)
    for _ in range(pages):
        made.add_page()
        made.rect(20, 20, 50, 50, style="F")
    return bytes(made.output())


def test_a_function_recognizes_the_pages_without_text() -> None:
    pictures: list[bytes] = []

    def recognize(picture: bytes) -> str:
        pictures.append(picture)
        return f"Scanned text {len(pictures)}" if len(pictures) < 3 else " "

    document = read_file("a.pdf", scan(3), ReadOptions.of(OpenConfig(ocr=recognize)))
    assert [part.text for part in document.sections] == [WORDS, "Scanned text 1", "Scanned text 2"]
    assert [part.metadata["page"] for part in document.sections] == [1, 2, 3]
    assert document.metadata[OMITTED] == ["page 4: no text; scanned pages need OCR (option ocr)"]
    assert all(picture.startswith(b"\x89PNG") for picture in pictures)


def test_pages_are_drawn_in_portions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pdf, "_DRAWN_BYTES", 1)
    drawn, following = pdf.draw_unread_pages(scan(3), 0)
    assert ([number for number, _ in drawn], following) == ([2], 2)
    drawn, following = pdf.draw_unread_pages(scan(3), 3)
    assert ([number for number, _ in drawn], following) == ([4], 0)


def _program(folder: Path, script: str) -> None:
    program = folder / "tesseract"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)


def test_tesseract_is_run_with_all_its_languages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _program(
        tmp_path,
        'if [ "$1" = --list-langs ]; then printf "List:\\ndeu\\neng\\nosd\\n"; exit; fi\n'
        'cat > "$0.png"; echo "languages $4"',
    )
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    (tmp_path / "scan.pdf").write_bytes(scan(1))
    options = ReadOptions.of(OpenConfig(ocr="tesseract"))
    [document] = load_sources(tmp_path / "scan.pdf", limits=options).documents
    assert document.sections[1].text == "languages deu+eng"
    assert (tmp_path / "tesseract.png").read_bytes().startswith(b"\x89PNG")


def test_tesseract_that_fails_or_is_slow_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    _program(tmp_path, "exit 3")
    recognize = resolve_ocr("tesseract", 60)
    assert recognize is not None
    with pytest.raises(UnreadableDocument, match="tesseract failed"):
        recognize(b"")
    _program(tmp_path, "exec sleep 60")
    slow = resolve_ocr("tesseract", 0.05)
    assert slow is not None
    with pytest.raises(UnreadableDocument, match=r"more than 0.05 s .*document_seconds"):
        slow(b"")


def test_an_ocr_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ConfigurationError, match="apt install tesseract-ocr"):
        resolve_ocr("tesseract", 1)
    with pytest.raises(ConfigurationError, match="give 'tesseract', or a function"):
        resolve_ocr("paddle", 1)
