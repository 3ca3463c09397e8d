"""Pages that are no language are kept out and named; language of any kind is kept."""

from __future__ import annotations

import io
import random
import string
import zipfile

import pytest
from fpdf import FPDF

from ragcache.documents.formats import read_document
from ragcache.documents.formats.base import OMITTED
from ragcache.documents.plausibility import find_garbage
from tests.ragcache.documents.sample_files import docx
from tests.ragcache.documents.test_charset import TEXTS

PROSE = (
    "The harbour master writes the log of the tides each morning before the pilots come. "
    "Ships that wait outside are told by lamp when the gate opens, and which quay is free. "
    "In winter the oldest lighthouse keeper brings soup to the crew of the dredger. "
)
SHIFTED = "".join(chr(ord(each) - 29) if each > "=" else each for each in PROSE)
KOREAN = "등대의 열쇠는 빨간 찬장에 있습니다. 빌리기 전에 먼저 선장에게 물어보세요. "
CHINESE = "灯塔的钥匙挂在红色的柜子里。借用之前请先问一下船长。冬天老守塔人会给船员送汤。"


@pytest.mark.parametrize("language", TEXTS)
def test_language_passes(language: str) -> None:
    assert find_garbage(TEXTS[language][1] * 3) == ""


@pytest.mark.parametrize(
    "text",
    [
        PROSE,
        PROSE.upper(),
        KOREAN * 2,
        CHINESE,
        "ボート小屋の鍵は赤い戸棚に掛かっています。借りる前に船長に聞いてください。" * 2,
        "Chìa khóa của ngọn hải đăng treo trong tủ đỏ. Hãy hỏi thuyền trưởng trước khi mượn. " * 3,
        "Contents ........................ 3\nTides ........................... 17\n" * 5,
        "Healthy Students\n" + "_" * 80 + "\n170\nAppendix 1",
        "Plain words of a brochure, and \x03\x07\x0e\x05\x03\x07\x0e of another font. " * 2,
        "for (int i = 0; i < n; ++i) { sum += a[i][0] * (b[i] - 1); }\n" * 4,
        "12.50 -23.00 1,289.00 4% 17 (3) 450 6.00 | 88 | 91 | - | - |\n" * 8,
    ],
)
def test_prose_code_and_tables_of_numbers_pass(text: str) -> None:
    assert find_garbage(text) == ""


def _substituted(seed: int) -> str:
    letters = list(string.ascii_lowercase)
    random.Random(seed).shuffle(letters)
    return PROSE.lower().translate(str.maketrans(string.ascii_lowercase, "".join(letters)))


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("# +%%3*(-./5) %*+ (-./5) #%+3 *(-./ 5)%%+ 3*(", "marks"),
        ("\ue001\ue014\ue0f3 \ue012\ue002" * 9, "no meaning"),
        ("컪픦팢솒빪 짝쭖쩣먾래헏 젊몋캏오윦캏맞 뫷뷁쯃뢟 힣챀퓵뗶" * 2, "common use"),
        (SHIFTED, "no language"),
        (_substituted(1), "no language"),
        (_substituted(4), "no language"),
    ],
)
def test_text_of_a_font_without_a_map_is_found(text: str, reason: str) -> None:
    assert reason in find_garbage(text)


def _page(made: FPDF, text: str) -> None:
    made.add_page()
    made.set_font("helvetica", size=11)
    made.multi_cell(0, 6, text)


def test_a_page_of_garbage_is_left_out_and_named() -> None:
    made = FPDF()
    for text in (PROSE, "# +%%3*(-./5) " * 12, "", SHIFTED, "# +%%3*(-./5) " * 12):
        _page(made, text)
    document = read_document("a.pdf", bytes(made.output()))
    assert [part.metadata["page"] for part in document.sections] == [1]
    assert document.text.startswith("The harbour master")
    marks, empty, letters = document.metadata[OMITTED]
    assert marks.startswith("pages 2, 5: most of its characters are marks; its font has no map")
    assert empty == "page 3: no text; scanned pages need OCR (option ocr)"
    assert letters.startswith("page 4: its letters have the frequencies of no language")


def test_initials_and_headers_of_pages_are_no_headings() -> None:
    made = FPDF()
    for number in range(5):
        made.add_page()
        made.set_font("helvetica", size=18)
        made.cell(0, 12, "Harbour Press", new_x="LMARGIN", new_y="NEXT")
        if number == 2:
            made.cell(0, 12, "Tides of the year", new_x="LMARGIN", new_y="NEXT")
        made.cell(6, 6, "T")
        made.set_font("helvetica", size=11)
        made.cell(0, 6, "he quay is closed.", new_x="LMARGIN", new_y="NEXT")
        made.multi_cell(0, 6, PROSE)
    text = read_document("a.pdf", bytes(made.output())).text
    assert [line for line in text.splitlines() if line.startswith("#")] == ["# Tides of the year"]


def test_formulas_that_are_left_out_are_counted() -> None:
    page = b"<p>So <math><mi>x</mi></math> and <math><mi>y</mi></math>.</p>"
    assert read_document("a.html", page).metadata[OMITTED] == ["2 formulas"]
    saved = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(docx())) as old, zipfile.ZipFile(saved, "w") as new:
        for name in old.namelist():
            raw = old.read(name)
            if name == "word/document.xml":
                namespace = b"http://schemas.openxmlformats.org/officeDocument/2006/math"
                formula = b'<w:p><m:oMath xmlns:m="%s"><m:r/></m:oMath></w:p><w:sectPr'
                raw = raw.replace(b"<w:sectPr", formula % namespace, 1)
            new.writestr(name, raw)
    assert read_document("a.docx", saved.getvalue()).metadata[OMITTED] == ["1 formula"]
