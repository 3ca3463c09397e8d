"""Words of a question around its answer."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragcache.answers.passages import LexicalSupport, numbers_of, passages_with, words_of
from ragcache.db import ModuleRow
from ragcache.retrieval.bm25 import terms

GUIDE = """# Harbour

## Keys

The pool car is grey. Its key hangs in the office. Sign for it
in the ledger. Bring it back full.

- The boathouse has no key.
- The chandlery has two.

## Masts

| Name | Height |
| --- | --- |
| Tern | 12 m |
| Pipit | 9 m |
"""


def module(text: str, *headings: str) -> ModuleRow:
    return ModuleRow(
        1, "guide.md#1", "guide.md", "guide.md", text, details={"headings": [*headings]}
    )


@pytest.mark.parametrize(
    ("answer", "passages"),
    [
        ("grey", ["## Keys ## Keys The pool car is grey."]),
        ("the office", ["## Keys The pool car is grey. Its key hangs in the office."]),
        ("the ledger", ["## Keys Its key hangs in the office. Sign for it in the ledger."]),
        ("two", ["## Keys - The boathouse has no key. - The chandlery has two."]),
        ("9 m", ["## Masts | Name | Height | | Tern | 12 m | | Pipit | 9 m |"]),
        ("grey. Its", ["## Keys ## Keys The pool car is grey. Its key hangs in the office."]),
        ("nowhere", []),
        (" ", []),
    ],
)
def test_an_answer_stands_in_its_sentence_below_its_titles(
    answer: str, passages: list[str]
) -> None:
    found = [" ".join(each.split()) for each in passages_with(answer, module(GUIDE))]
    assert found == [f"# Harbour {passage}" for passage in passages]


def test_titles_that_the_module_does_not_repeat_count() -> None:
    [passage] = passages_with("two", module("It has two.", "Harbour", "Keys"))
    assert passage == "Harbour\nKeys\nIt has two."


def test_the_place_with_most_of_the_question_counts() -> None:
    modules = (module("The pool has a key. " * 9), module("The car has a key. Or not."))
    support = LexicalSupport({"pool": 1.0, "car": 2.0, "rust": 1.0}, modules)
    assert support.share("key") == 0.5
    assert support.share("Or not") == 0.5
    assert support.share("pool") == 0.25
    assert support.share("rust") is None
    assert LexicalSupport({}, modules).share("key") is None, "a question without words"


def test_chinese_counts_by_pairs_and_by_characters() -> None:
    support = LexicalSupport({"钥匙": 3.0, "船": 1.0}, (module("船屋的钥匙。办公室是红色的。"),))
    assert support.share("红色") == 1.0
    assert LexicalSupport({"钥匙": 3.0, "猫": 1.0}, support.modules).share("红色") == 0.75


@given(
    st.lists(st.sampled_from("a key hangs. in the\n office! | - # 12 。".split(" ")), max_size=40),
    st.data(),
)
def test_every_place_of_an_answer_lies_in_a_passage(words: list[str], data: st.DataObject) -> None:
    text = " ".join(words)
    begin = data.draw(st.integers(0, len(text)))
    answer = text[begin : data.draw(st.integers(begin, len(text)))].strip()
    passages = list(passages_with(answer, module(text)))
    assert bool(passages) == bool(answer)
    assert all(answer in passage for passage in passages)
    weights = dict.fromkeys(Counter(terms(text)), 1.0)
    share = LexicalSupport(weights, (module(text),)).share(answer)
    assert (share is None) == (not answer or not weights)
    assert share is None or 0 <= share <= 1


def test_free_answers_are_grounded_in_one_passage() -> None:
    modules = (module("The pool car is red. The key hangs in the office."),)
    support = LexicalSupport({"pool": 1.0, "car": 2.0, "color": 1.0}, modules)
    assert support.grounding("The car is red.") == 0.75
    assert support.grounding("Red") == 0.75
    assert support.grounding("It is blue.") == 0.0
    assert support.grounding("In the office") == 0.75 * 0.75, "its sentence has no such word"
    assert support.grounding("The car hangs in the office.") == pytest.approx(0.75 / 2)
    assert support.grounding("!") is None
    assert support.grounding("Yes.") == 0.75, "the question says what is agreed to"


def test_of_a_long_answer_one_sentence_answers_the_question() -> None:
    modules = (module("The pool car is red. It needs diesel from the pump."),)
    support = LexicalSupport({"pool": 1.0, "car": 1.0}, modules)
    assert support.grounding("The car is red. It needs diesel.") == 1.0
    said = support.grounding("The car is red. Its seats are leather.")
    assert said == pytest.approx(2 / 4)


def test_number_words_are_digits() -> None:
    assert numbers_of("Twenty boats, seven keys, one car, 1,200 ropes") == {"20", "7", "1,200"}
    assert words_of("sieben Wochen") == words_of("7 Wochen")
    assert words_of("one key") != words_of("1 key"), "a pronoun, too"
    soup = (module("The soup keeps for three days. The bread keeps for two days."),)
    support = LexicalSupport({"soup": 2.0, "keep": 1.0, "two": 1.0}, soup)
    assert support.grounding("3 days") == support.grounding("three days") == 0.9375
    assert support.grounding("2 days") == support.grounding("Two days.") == 0.875
    assert LexicalSupport({"bread": 1.0, "two": 1.0}, (module("2 breads"),)).grounding("2") == 1.0
