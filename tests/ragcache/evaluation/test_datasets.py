"""Sets of questions: lines of one's own, and SQuAD."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ragcache.errors import ConfigurationError
from ragcache.evaluation import Dataset, Question, load_dataset


def write(path: Path, *rows: Any) -> Path:
    lines = [row if isinstance(row, str) else json.dumps(row, ensure_ascii=False) for row in rows]
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


def texts(dataset: Dataset) -> dict[str, str]:
    return {document.id: document.text for document in dataset.documents}


def test_questions_are_read_line_by_line(tmp_path: Path) -> None:
    full = {"id": "q7", "question": "Where?", "answers": ["here", "there"], "document": "keys.md"}
    path = write(tmp_path / "q.jsonl", full, "", {"question": "Who?", "answers": []})
    found = load_dataset(path)
    assert found.questions == (
        Question("q7", "Where?", ("here", "there"), "keys.md"),
        Question("3", "Who?", (), ""),
    )
    assert (found.name, found.documents) == ("q", ())


def test_lines_may_bring_their_documents_and_equal_ones_are_one(tmp_path: Path) -> None:
    row = {"question": "Who?", "answers": ["Ines"], "context": "Ines did."}
    two = {"question": "What?", "answers": ["oars"], "contexts": ["Ines did.", "Oars, too."]}
    found = load_dataset(write(tmp_path / "q.jsonl", row, row, two))
    assert list(texts(found).values()) == ["Ines did.", "Oars, too."]
    assert [texts(found).get(q.document) for q in found.questions] == ["Ines did."] * 2 + [None]
    assert all(question.filters is None for question in found.questions)
    own = load_dataset(tmp_path / "q.jsonl", "own").questions
    assert own[2].own == tuple(texts(found))
    assert own[0].filters == {"evaluated": {"$in": [found.documents[0].id]}}
    assert dict(found.documents[0].metadata) == {"evaluated": found.documents[0].id}


SQUAD = {"data": [{
    "title": "River_Boats",
    "paragraphs": [{"context": "A punt is flat.", "qas": [
        {"id": "a", "question": "What is flat?", "answers": [
            {"text": "A punt", "answer_start": 0}, {"text": "A punt", "answer_start": 0}]},
        {"id": "b", "question": "What sinks?", "answers": [], "is_impossible": True,
         "plausible_answers": [{"text": "A punt", "answer_start": 0}]},
        {"id": "c", "question": "", "answers": [{"text": "A punt", "answer_start": 0}]},
    ]}],
}]}  # fmt: skip


def test_paragraphs_of_squad_are_documents_with_questions(tmp_path: Path) -> None:
    found = load_dataset(write(tmp_path / "set.json", SQUAD))
    assert found.format == "SQuAD; 1 without a question left out"
    assert list(texts(found).values()) == ["# River Boats\n\nA punt is flat."]
    [document] = texts(found)
    assert found.questions == (
        Question("a", "What is flat?", ("A punt",), document),
        Question("b", "What sinks?", (), document),
    )
    own = load_dataset(tmp_path / "set.json", "own")
    assert all(question.own == (document,) for question in own.questions)
    torn = {"data": [{"paragraphs": [{"context": "x", "qas": [{"id": 1}]}]}]}
    with pytest.raises(ConfigurationError, match="SQuAD holds articles with `paragraphs`"):
        load_dataset(write(tmp_path / "torn.json", torn))


def test_a_sample_is_seeded_and_leaves_unread_documents_out(tmp_path: Path) -> None:
    rows = [
        {"question": f"Who has {n}?", "answers": ["Ines"], "contexts": [f"Ines has {n}.", "Both."]}
        for n in range(20)
    ]
    path = write(tmp_path / "q.jsonl", *rows)
    own = load_dataset(path, "own")
    drawn = own.sample(3, seed=5)
    assert drawn.questions == own.sample(3, seed=5).questions != own.sample(3, seed=6).questions
    places = [own.questions.index(question) for question in drawn.questions]
    assert places == sorted(places)
    assert set(texts(drawn)) == {each for question in drawn.questions for each in question.own}
    assert len(texts(drawn)) == 4
    assert own.sample(20) is own
    everywhere = load_dataset(path).sample(3)
    assert len(everywhere.documents) == 21, "retrieval stays as hard"


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ("{not json", "JSONDecodeError"),
        ('["Who?"]', "TypeError"),
        ('{"answers": ["Ines"]}', "KeyError('question')"),
        ('{"question": "Who?"}', "KeyError('answers')"),
        ('{"question": "Who?", "answers": "Ines"}', "answers must be a list"),
        ('{"question": 7, "answers": ["Ines"]}', "the question must be a text, not int"),
        ('{"question": " ", "answers": ["Ines"]}', "the question is empty"),
        ('{"question": "Who?", "answers": [7]}', "an answer must be a text, not int"),
        ('{"question": "Who?", "answers": ["Ines"], "document": 7}', "document must be a text"),
        ('{"question": "Who?", "answers": ["Ines"], "context": " "}', "a document is empty"),
        ('{"question": "Who?", "answers": [], "contexts": "Ines."}', "contexts must be a list"),
    ],
)
def test_a_line_that_is_no_question_is_named_by_its_number(
    tmp_path: Path, line: str, fault: str
) -> None:
    path = write(tmp_path / "q.jsonl", '{"question": "Who?", "answers": ["Ines"]}', "", line)
    with pytest.raises(ConfigurationError) as caught:
        load_dataset(path)
    assert str(caught.value).startswith(f"{path}:3: not a question (")
    assert fault in str(caught.value)


def test_files_without_questions_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="holds no questions"):
        load_dataset(write(tmp_path / "empty.jsonl", "", "  "))
    with pytest.raises(ConfigurationError, match="holds no questions"):
        load_dataset(write(tmp_path / "none.json", {"data": [{"paragraphs": []}]}))
    with pytest.raises(ConfigurationError, match="cannot read the questions in"):
        load_dataset(tmp_path / "missing.jsonl")
    (tmp_path / "latin.jsonl").write_bytes(b"\xfc")
    with pytest.raises(ConfigurationError, match="cannot read the questions in"):
        load_dataset(tmp_path / "latin.jsonl")
    path = write(tmp_path / "q.jsonl", {"question": "Who?", "answers": ["Ines"]})
    with pytest.raises(ConfigurationError, match="brings no documents"):
        load_dataset(path, "own")
