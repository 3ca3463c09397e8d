"""The built-in documents and their questions."""

from __future__ import annotations

from collections import Counter

from ragcache.evaluation.builtin import builtin_dataset


def test_each_document_holds_its_answers() -> None:
    dataset = builtin_dataset()
    texts = {each.id: each.text for each in dataset.documents}
    for question in dataset.questions:
        for answer in question.answers:
            assert answer in texts[question.document], question.question
            assert answer not in question.question


def test_half_of_the_questions_have_no_answer() -> None:
    questions = builtin_dataset().questions
    assert len({each.question for each in questions}) == len(questions) == 200
    kinds = Counter((each.document, len(each.answers)) for each in questions)
    assert set(kinds.values()) == {2}, "each document has two of each"
    assert len(kinds) == 100


def test_some_questions_are_chinese_and_german() -> None:
    titles = [each.text.split("\n")[0] for each in builtin_dataset().documents]
    assert sum(title[2] > "\u3400" for title in titles) == 4
    assert sum(" Hausordnung " in title or "äckerei" in title for title in titles) == 2
