"""Splitting: never over the limit, nothing lost, headings repeated."""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ragcache.documents import DocumentPart, SourceDocument, split_document, split_text
from ragcache.documents.formats.text import CODE, LANGUAGES
from ragcache.documents.split import MIN_TOKENS
from ragcache.errors import ConfigurationError
from tests.conftest import scaled

Count = Callable[[str], int]


def words(text: str) -> int:
    return len(text.split())


def subwords(text: str) -> int:
    """As a tokenizer does: a word with the space before it, in parts of four letters."""
    return sum((len(part) + 3) // 4 for part in re.findall(r" ?\S+|\s", text))


def openings(text: str) -> int:
    """A word that nothing stands before costs three more: parts do not add up to the whole."""
    return words(text) + 3 * (text[:1].strip() != "")


counters = st.sampled_from([words, len, subwords, openings])
limits = st.integers(MIN_TOKENS, 90)


@st.composite
def documents(draw: st.DrawFn) -> str:
    """Paragraphs of words that are numbered, so that each is known again, under headings."""
    number = count()
    blocks: list[str] = []
    for _ in range(draw(st.integers(1, 12))):
        level = draw(st.integers(0, 4))  # 0: a paragraph
        run = [f"w{next(number)}" for _ in range(draw(st.integers(1, 6 if level else 60)))]
        end = draw(st.sampled_from(["", ".", "。", "\nand", "\n\n\n"]))
        blocks.append(("#" * level + " " if level else "") + " ".join(run) + end)
    return draw(st.sampled_from(["\n", "\n\n"])).join(blocks)


def in_order(wanted: list[str], found: list[str]) -> bool:
    rest = iter(found)
    return all(word in rest for word in wanted)


@given(text=documents(), limit=limits, counter=counters)
@settings(max_examples=scaled(200))
def test_parts_stay_within_the_limit_and_keep_all_words_in_order(
    text: str, limit: int, counter: Count
) -> None:
    pieces = split_text(text, limit, counter)
    for piece in pieces:
        assert counter(piece) <= limit
        assert piece.endswith("\n\n")
        assert piece.strip()
    number = r"w\d+"
    assert in_order(re.findall(number, text), re.findall(number, " ".join(pieces)))


@given(text=st.text(max_size=400), limit=limits, counter=counters)
@settings(max_examples=scaled(200))
def test_any_text_keeps_its_characters_and_the_limit(text: str, limit: int, counter: Count) -> None:
    pieces = split_text(text, limit, counter)
    assert all(counter(piece) <= limit for piece in pieces)
    assert in_order(list("".join(text.split())), list("".join(pieces)))


def test_a_short_text_stays_whole() -> None:
    assert split_text("  # A\n\nOne two.\n", 32, words) == ["# A\n\nOne two.\n\n"]


def numbered(begin: int, end: int) -> str:
    return " ".join(f"w{n}" for n in range(begin, end))


def test_later_parts_begin_with_the_headings_above_them() -> None:
    text = f"# Boat\n\n## Engine\n\n{numbered(0, 60)}\n\n## Hull\n\n{numbered(60, 120)}"
    pieces = split_text(text, 40, words)
    assert len(pieces) == 4
    for piece in pieces:
        section = "Engine" if int(re.findall(r"w(\d+)", piece)[0]) < 60 else "Hull"
        assert piece.startswith(f"# Boat\n\n## {section}\n\nw")
    assert [number for piece in pieces for number in re.findall(r"w\d+", piece)] == numbered(
        0, 120
    ).split()


def test_heading_replaces_those_of_its_level_and_below() -> None:
    text = f"# A\n\n## B\n\n### C\n\n{numbered(0, 40)}\n\n# D\n\n{numbered(40, 80)}"
    pieces = split_text(text, 45, words)
    last = next(piece for piece in pieces if "w79" in piece)
    assert last.startswith("# D\n\n")
    assert not any(line in last for line in ("# A", "## B", "### C"))


def test_no_part_contains_only_headings() -> None:
    text = f"# A\n\n## B\n\n{numbered(0, 28)}\n\n{numbered(28, 56)}"
    assert all(re.search(r"w\d", piece) for piece in split_text(text, 32, words))


def test_long_headings_are_dropped_outermost_first() -> None:
    long = " ".join(f"h{n}" for n in range(25))
    text = f"# {long}\n\n## Short\n\n{numbered(0, 80)}"
    pieces = split_text(text, 32, words)
    assert all(words(piece) <= 32 for piece in pieces)
    assert pieces[-1].startswith("## Short\n\n")
    assert "h0" not in pieces[-1]


@pytest.mark.parametrize(("size", "between"), [(20, "\n\n"), (30, "! ")])
def test_paragraphs_and_sentences_are_kept_together(size: int, between: str) -> None:
    wholes = [numbered(n, n + size) for n in range(0, 5 * size, size)]
    pieces = split_text(between.join(wholes), 34, words)
    assert [piece.strip(" !\n") for piece in pieces] == wholes


def test_chinese_is_cut_at_the_ends_of_sentences() -> None:
    sentence = "灰烬镇的船坞在北码头旁边,每天早上八点开门。"
    pieces = split_text(sentence * 20, 60, len)
    assert len(pieces) == 10
    assert all(piece.strip() == sentence * 2 for piece in pieces)


def check_places(document: SourceDocument, limit: int, counter: Count) -> None:
    """Every run of a module stands where its places say, and all that it says stands in runs."""
    for module in split_document(document, limit, lambda text: [1] * counter(text)):
        begins = [begin for begin, _ in module.places]
        assert begins[0] == 0
        for (begin, at), end in zip(module.places, [*begins[1:], None], strict=True):
            said = module.text[begin:end].strip()
            assert said
            assert document.text.startswith(said, at)


@given(text=documents(), limit=limits, counter=counters, rows=st.integers(0, 40))
@settings(max_examples=scaled(200))
def test_modules_stand_in_the_document_where_they_say(
    text: str, limit: int, counter: Count, rows: int
) -> None:
    whole = f" \n{text}\n\n{HEADER}" + "".join(f"{row}\n" for row in ROWS[:rows]) + f"\n{text}"
    check_places(SourceDocument("a", whole), limit, counter)
    pages = tuple(DocumentPart(each, continues=True) for each in (text, "# B\n\nw.", text))
    check_places(SourceDocument("a", f"{text}\n\n# B\n\nw.\n\n{text}", parts=pages), limit, counter)


def test_a_module_knows_its_place_and_that_of_what_it_repeats() -> None:
    lines = [f"w{n}" for n in range(40)]
    text = "# A\n\n## B\n\nOne.\n\n### C\n\n" + "\n\n".join(lines)
    first, _, third, *_ = split_document(SourceDocument("a", text), 32, tokens)
    assert (first.places, first.start) == (((0, 0),), 0)
    begin = int(third.text.split()[6][1:])
    assert third.text.startswith(f"# A\n\n## B\n\n### C\n\nw{begin}\n")
    own = text.index(f"w{begin}\n")
    assert third.places == ((0, 0), (11, text.index("### C")), (18, own))
    assert third.start == own


def test_parts_that_are_not_in_the_document_have_no_place() -> None:
    document = SourceDocument("a", "One.\n\nTwo.", parts=("One.", "Other.", "Two."))
    found = split_document(document, 32, tokens)
    assert [module.start for module in found] == [0, None, 6]


@pytest.mark.parametrize("limit", [-1, 0, MIN_TOKENS - 1])
def test_a_limit_that_is_too_small_is_refused(limit: int) -> None:
    with pytest.raises(ConfigurationError, match=f"module_tokens is {limit}; it must be 32"):
        split_text("text", limit, words)


ROWS = [f"| r{n} | {numbered(4 * n, 4 * n + 4)} |" for n in range(30)]
HEADER = "| name | words |\n| --- | --- |\n"


def test_a_table_that_fits_stays_whole_and_with_its_heading() -> None:
    table = HEADER + "\n".join(ROWS[:5])  # 46 words
    text = f"# A\n\n{numbered(200, 240)}\n\n## Rows\n{table}\n\nAfter it. {numbered(240, 280)}"
    pieces = split_text(text, 60, words)
    [whole] = [piece for piece in pieces if "| r0 |" in piece]
    assert whole.startswith("# A\n\n## Rows")
    assert table in whole


def test_a_long_table_is_cut_between_rows_under_its_header() -> None:
    text = f"# A\n\n{numbered(200, 205)}\n\n{HEADER}" + "\n".join(ROWS) + "\n\nAfter it."
    pieces = split_text(text, 60, words)
    rows = [line for piece in pieces for line in piece.splitlines() if line.startswith("| r")]
    assert rows == ROWS
    for piece in pieces:
        assert words(piece) <= 60
        assert ("| r" in piece) <= (HEADER in piece)


def test_a_row_longer_than_a_part_is_cut() -> None:
    text = f"{HEADER}| a | {numbered(0, 200)} |\n| b | short |\n"
    pieces = split_text(text, 60, words)
    assert all(words(piece) <= 60 for piece in pieces)
    found = re.findall(r"w\d+", " ".join(pieces))
    assert found == numbered(0, 200).split()
    assert "| b | short |" in pieces[-1]


def test_lines_of_fenced_code_are_no_headings() -> None:
    text = f"# A\n\n```python\n# a comment\nx = 1\n```\n\n{numbered(0, 80)}"
    assert all("# a comment" not in piece for piece in split_text(text, 40, words)[1:])


def tokens(text: str) -> list[int]:
    return [1] * words(text)


def split(document: SourceDocument, limit: int = 40) -> list[tuple[str, dict[str, object]]]:
    return [(each.text, dict(each.metadata)) for each in split_document(document, limit, tokens)]


def test_modules_know_their_page_and_the_headings_above_them() -> None:
    pages = (
        DocumentPart(f"# Boat\n\n## Hull\n\n{numbered(0, 60)}", {"page": 1}, continues=True),
        DocumentPart(f"{numbered(60, 90)}\n\n## Mast\n\n{numbered(90, 110)}", {"page": 2}, True),
    )
    found = split(SourceDocument("a.pdf", "\n\n".join(p.text for p in pages), parts=pages))
    assert [metadata["page"] for _, metadata in found] == [1, 1, 2, 2]
    assert [metadata["headings"] for _, metadata in found] == [["Boat", "Hull"]] * 3 + [
        ["Boat", "Mast"]
    ]
    assert found[2][0].startswith("# Boat\n\n## Hull\n\nw60")
    assert split(SourceDocument("b", "Words.")) == [("Words.\n\n", {})]


def test_parts_of_others_do_not_continue() -> None:
    parts = ("# Boat\n\nBlue.", "Green.")
    found = split(SourceDocument("a", "\n\n".join(parts), parts=parts))
    assert found == [("# Boat\n\nBlue.\n\n", {"headings": ["Boat"]}), ("Green.\n\n", {})]


def test_code_is_cut_at_functions_and_has_no_headings() -> None:
    functions = [
        f"def f{n}():\n    # no heading\n    return '{numbered(n, n + 15)}'" for n in range(4)
    ]
    text = "\n\n".join(functions)
    found = split(SourceDocument("a.py", text, parts=(DocumentPart(text, language="python"),)))
    assert [module.strip() for module, _ in found] == functions[:]
    assert all(metadata == {} for _, metadata in found)


def test_portions_of_long_texts_keep_headings_and_table_headers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("ragcache.documents.split._PORTION", 400)
    rows = "\n".join(f"| r{n} | w{n} |" for n in range(200))
    text = f"# Top\n\n## Words\n\n{numbered(1000, 1300)}\n\n## Table\n\n{HEADER}{rows}\n"
    seen: list[int] = []
    modules = split_document(SourceDocument("a", text), 40, tokens, seen.append)
    whole = " ".join(module.text for module in modules)
    assert re.findall(r"w\d+", whole) == [*numbered(1000, 1300).split(), *numbered(0, 200).split()]
    assert all(HEADER in m.text for m in modules if "| r" in m.text)
    assert {tuple(m.metadata["headings"]) for m in modules} == {("Top", "Words"), ("Top", "Table")}
    assert len(seen) > 5
    check_places(SourceDocument("a", text), 40, words)


@pytest.mark.parametrize("language", sorted({*LANGUAGES.values(), CODE}))
def test_every_language_is_cut(language: str) -> None:
    text = "\n".join(f"value_{n} = {n};" for n in range(200))
    found = split(SourceDocument("a", text, parts=(DocumentPart(text, language=language),)))
    assert len(found) > 1
    assert "".join("".join(module.split()) for module, _ in found) == "".join(text.split())
