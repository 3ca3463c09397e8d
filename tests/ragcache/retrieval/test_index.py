"""The two indexes over one collection."""

from __future__ import annotations

import numpy as np
import pytest

from ragcache.retrieval import CollectionIndex

TEXTS = [
    "The survey boat is moored at the north quay.",
    "The spare key hangs in the red cupboard. Keys are counted on Fridays.",
    "Leave requests go to Ines Marlow.",
    "船停在北京的码头。",
]
IDS = np.array([40, 7, 19, 3], dtype=np.int64)
VECTORS = np.array([[3, 0, 0], [0, 5, 0], [0, 0, 0.1], [1, 1, 0]], dtype=np.float32)


def ids(ranking: list[tuple[int, float]]) -> list[int]:
    scores = [score for _, score in ranking]
    assert scores == sorted(scores, reverse=True)
    return [number for number, _ in ranking]


@pytest.fixture
def index() -> CollectionIndex:
    return CollectionIndex(IDS, TEXTS, VECTORS)


def test_modules_that_share_words_come_best_first(index: CollectionIndex) -> None:
    assert ids(index.by_words("Where does the key of the boat hang?", 10)) == [7, 40]
    assert ids(index.by_words("Where does the key of the boat hang?", 1)) == [7]


def test_chinese_is_found_by_pairs_of_characters(index: CollectionIndex) -> None:
    assert ids(index.by_words("北京在哪里", 10)) == [3]


@pytest.mark.parametrize("query", ["zyxwv", "", "how many of the", "?"])
def test_a_query_that_shares_no_word_finds_nothing(index: CollectionIndex, query: str) -> None:
    assert index.by_words(query, 10) == []


def test_words_unknown_to_the_collection_do_not_disturb_known_ones(index: CollectionIndex) -> None:
    assert ids(index.by_words("zyxwv requests", 10)) == [19]


def test_meaning_is_the_cosine_and_lengths_do_not_count(index: CollectionIndex) -> None:
    assert ids(index.by_meaning(np.array([1, 0.2, 0], dtype=np.float32), 10))[:3] == [40, 3, 7]
    assert ids(index.by_meaning(np.array([0, 0, 9], dtype=np.float32), 1)) == [19]


def test_no_more_is_found_than_there_is(index: CollectionIndex) -> None:
    found = ids(index.by_meaning(np.array([1, 1, 1], dtype=np.float32), 50))
    assert sorted(found) == sorted(IDS.tolist())


def test_a_query_vector_of_zeros_finds_something_and_does_not_fail(index: CollectionIndex) -> None:
    assert len(index.by_meaning(np.zeros(3, dtype=np.float32), 2)) == 2


def test_without_vectors_meaning_finds_nothing() -> None:
    index = CollectionIndex(IDS, TEXTS)
    assert index.by_meaning(np.array([1, 0, 0], dtype=np.float32), 5) == []


def test_a_module_without_words_does_no_harm() -> None:
    index = CollectionIndex(np.array([1, 2]), ["?!", "boats"])
    assert ids(index.by_words("boats", 5)) == [2]
    assert CollectionIndex(np.array([1]), ["the"]).by_words("boats", 5) == []


def test_an_empty_collection_finds_nothing() -> None:
    index = CollectionIndex(np.zeros(0, dtype=np.int64), [])
    assert index.by_words("boats", 5) == []
    assert index.by_meaning(np.ones(3, dtype=np.float32), 5) == []


def test_a_character_that_stands_alone_is_found_wherever_it_stands(index: CollectionIndex) -> None:
    assert ids(index.by_words("船", 10)) == [3]
    assert ids(index.by_words("京", 10)) == [3], "within a word"
    assert set(ids(index.by_words("boat 船", 10))) == {3, 40}
    assert index.by_words("猫", 10) == []


def test_the_characters_index_leaves_other_questions_as_they_were() -> None:
    """Lengths of texts are counted in words, so a text of ideographs is no longer for it."""
    texts = ["boats at the quay", "boats 船停在北京的码头上"]
    pairs = CollectionIndex(np.array([1, 2]), texts)
    scores = dict(pairs.by_words("boats", 5))
    alone = CollectionIndex(np.array([1, 2]), [texts[0], "boats ab cd ef gh ij kl mn op"])
    assert scores == pytest.approx(dict(alone.by_words("boats", 5)))


def test_what_is_not_allowed_takes_no_place(index: CollectionIndex) -> None:
    allowed = np.array([False, True, True, True])
    assert ids(index.by_words("boat key", 1, allowed)) == [7]
    query = np.array([1, 0.2, 0], dtype=np.float32)
    assert ids(index.by_meaning(query, 2, allowed)) == [3, 7]
    nothing = np.zeros(4, dtype=bool)
    assert index.by_words("boat key", 5, nothing) == index.by_meaning(query, 5, nothing) == []


def test_meaning_scores_are_cosines(index: CollectionIndex) -> None:
    scores = dict(index.by_meaning(np.array([2, 0, 0], dtype=np.float32), 4))
    assert scores == pytest.approx({40: 1.0, 3: 0.5**0.5, 7: 0.0, 19: 0.0})


def test_vectors_may_be_given_later_and_the_first_index_stays() -> None:
    words = CollectionIndex(IDS, TEXTS)
    both = words.with_vectors(VECTORS)
    assert (words.dimension, both.dimension) == (None, 3)
    assert words.vectors([7]) is None
    rows = both.vectors([7, 40])
    assert rows is not None
    assert rows.tolist() == [[0, 1, 0], [1, 0, 0]]
    assert both.by_words("quay", 5) == words.by_words("quay", 5) != []


def test_words_are_counted_when_a_question_first_needs_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    counted: list[str] = []
    monkeypatch.setattr(
        "ragcache.retrieval.index.terms", lambda text: (counted.append(text), text.split())[1]
    )
    index = CollectionIndex(IDS, TEXTS, VECTORS)
    index.by_meaning(np.ones(3, dtype=np.float32), 2)
    assert counted == []
    for _ in range(2):
        index.by_words("quay.", 2)
    assert sorted(counted) == sorted([*TEXTS, "quay.", "quay."])
