"""Marks: SQuAD's normalization, exact match and F1, and questions as they are read."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from ragcache import RagCache
from ragcache.errors import ConfigurationError
from ragcache.evaluation import (
    Question,
    evaluate,
    exact_match,
    f1,
    first_tokens_agree,
    load_questions,
    normalize,
)
from ragcache.models import LoadedModel


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("The Red  Cupboard.", "red cupboard"),
        ("a boat, an oar", "boat oar"),
        ("Marta Quill's", "marta quills"),
        ("theatre and another", "theatre and another"),
        ("26 days\n", "26 days"),
        ("The", ""),
    ],
)
def test_normalization_drops_case_punctuation_and_articles(text: str, expected: str) -> None:
    assert normalize(text) == expected


def test_an_exact_match_is_equal_to_one_answer_after_normalization() -> None:
    assert exact_match("the Red cupboard!", ["blue tin", "Red Cupboard"])
    assert not exact_match("red", ["blue tin", "Red Cupboard"])


def test_f1_counts_shared_words_of_the_best_answer() -> None:
    assert f1("the red cupboard", ["red cupboard"]) == 1.0
    assert f1("in the red cupboard", ["red cupboard"]) == pytest.approx(2 * 2 / (3 + 2))
    assert f1("red", ["blue tin", "red cupboard"]) == pytest.approx(2 / 3)
    assert f1("tin tin tin", ["tin roof"]) == pytest.approx(2 * 1 / (3 + 2)), "a word counts once"
    assert f1("boat", ["red cupboard"]) == 0.0


def test_f1_of_nothing_is_one_only_beside_nothing() -> None:
    assert f1("the", ["a"]) == 1.0
    assert f1("", ["red"]) == 0.0
    assert f1("red", ["the"]) == 0.0


def write(path: Path, *lines: str) -> Path:
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


def test_questions_are_read_line_by_line(tmp_path: Path) -> None:
    full = {"id": "q7", "question": "Where?", "answers": ["here", "there"], "document": "keys.md"}
    path = write(
        tmp_path / "q.jsonl", json.dumps(full), "", '{"question": "Who?", "answers": ["Ines"]}'
    )
    assert load_questions(path) == [
        Question("q7", "Where?", ("here", "there"), "keys.md"),
        Question("3", "Who?", ("Ines",), ""),
    ]


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ("{not json", "JSONDecodeError"),
        ('["Who?"]', "TypeError"),
        ('{"answers": ["Ines"]}', "KeyError('question')"),
        ('{"question": "Who?"}', "KeyError('answers')"),
        ('{"question": "Who?", "answers": "Ines"}', "list of one text or more"),
        ('{"question": "Who?", "answers": []}', "list of one text or more"),
        ('{"question": 7, "answers": ["Ines"]}', "must be texts"),
        ('{"question": "Who?", "answers": [7]}', "must be texts"),
        ('{"question": "Who?", "answers": ["Ines"], "document": 7}', "must be texts"),
    ],
)
def test_a_line_that_is_no_question_is_named_by_its_number(
    tmp_path: Path, line: str, fault: str
) -> None:
    path = write(tmp_path / "q.jsonl", '{"question": "Who?", "answers": ["Ines"]}', "", line)
    with pytest.raises(ConfigurationError) as caught:
        load_questions(path)
    assert str(caught.value).startswith(f"{path}:3: not a question (")
    assert fault in str(caught.value)


def test_files_without_questions_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="holds no questions"):
        load_questions(write(tmp_path / "empty.jsonl", "", "  "))
    with pytest.raises(ConfigurationError, match="cannot read the questions in"):
        load_questions(tmp_path / "missing.jsonl")
    (tmp_path / "latin.jsonl").write_bytes(b"\xfc")
    with pytest.raises(ConfigurationError, match="cannot read the questions in"):
        load_questions(tmp_path / "latin.jsonl")


@pytest.fixture
def rag(tmp_path: Path, reader: LoadedModel, notes: Path) -> Iterator[RagCache]:
    with RagCache.open(tmp_path / "state", reader, max_new_tokens=6) as opened:
        opened.ingest("notes", [notes])
        yield opened


ASKED = [
    Question("1", "Where does the spare key hang?", ("unlikely answer",), "keys.md"),
    Question("2", "Who serviced the engine of the Pipit?", ("unlikely answer",), "boats.md"),
    Question("3", "How many days of leave are there?", ("unlikely answer",), "nowhere.md"),
]


@pytest.mark.parametrize("mode", ["rooted", "exact"])
def test_answers_to_the_notes_are_marked(rag: RagCache, mode: str) -> None:
    asked = [q.question for q in ASKED]
    given = [a.text for a in rag.ask_batch(asked, collection="notes", k=1, mode=mode)]
    known = [
        Question(q.id, q.question, (text if q.id == "1" else "unlikely answer",), q.document)
        for q, text in zip(ASKED, given, strict=True)
    ]
    seen: list[tuple[int, int]] = []
    report = evaluate(
        rag, "notes", known, mode=mode, k=1, batch=2, progress=lambda *at: seen.append(at)
    )
    assert seen == [(2, 3), (3, 3)]
    assert (report.mode, report.questions) == (mode, 3)
    assert [m.question for m in report.marked] == known
    assert report.marked[0].exact_match
    assert report.marked[0].f1 == 1.0
    assert [m.retrieved for m in report.marked] == [True, True, False]
    for name in ("exact_match", "f1", "retrieved"):
        assert getattr(report, name) == pytest.approx(
            sum(getattr(m, name) for m in report.marked) / 3
        )


def test_questions_through_a_chat_paste_what_was_retrieved(rag: RagCache) -> None:
    reports = {
        mode: evaluate(rag, "notes", ASKED, mode=mode, k=2, through="chat")
        for mode in ("rooted", "linked:400", "exact")
    }
    rooted, linked, exact = reports.values()
    assert [report.mode for report in reports.values()] == [f"chat:{mode}" for mode in reports]
    assert rooted.computed_tokens < exact.computed_tokens
    assert rooted.retrieved == exact.retrieved == pytest.approx(2 / 3), "sources were recognized"
    assert [m.given for m in linked.marked] == [m.given for m in exact.marked]
    assert first_tokens_agree(linked, exact) == first_tokens_agree(rooted, rooted) == 1.0
    assert all(m.first_token is not None for m in rooted.marked)
    [first, *rest] = exact.marked
    other = replace(exact, marked=(replace(first, first_token=-1), *rest))
    assert first_tokens_agree(other, exact) == pytest.approx(2 / 3)


def test_an_evaluation_needs_questions(rag: RagCache) -> None:
    with pytest.raises(ConfigurationError, match="no questions"):
        evaluate(rag, "notes", [], mode="rooted")
