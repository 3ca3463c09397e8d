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


@pytest.fixture
def index() -> CollectionIndex:
    return CollectionIndex(IDS, TEXTS, VECTORS)


def test_modules_that_share_words_come_best_first(index: CollectionIndex) -> None:
    assert index.by_words("Where does the key of the boat hang?", 10) == [7, 40]
    assert index.by_words("Where does the key of the boat hang?", 1) == [7]


def test_chinese_is_found_by_pairs_of_characters(index: CollectionIndex) -> None:
    assert index.by_words("北京在哪里", 10) == [3]


@pytest.mark.parametrize("query", ["zyxwv", "", "how many of the", "?"])
def test_a_query_that_shares_no_word_finds_nothing(index: CollectionIndex, query: str) -> None:
    assert index.by_words(query, 10) == []


def test_words_unknown_to_the_collection_do_not_disturb_known_ones(index: CollectionIndex) -> None:
    assert index.by_words("zyxwv requests", 10) == [19]


def test_meaning_is_the_cosine_and_lengths_do_not_count(index: CollectionIndex) -> None:
    assert index.by_meaning(np.array([1, 0.2, 0], dtype=np.float32), 10)[:3] == [40, 3, 7]
    assert index.by_meaning(np.array([0, 0, 9], dtype=np.float32), 1) == [19]


def test_no_more_is_found_than_there_is(index: CollectionIndex) -> None:
    found = index.by_meaning(np.array([1, 1, 1], dtype=np.float32), 50)
    assert sorted(found) == sorted(IDS.tolist())


def test_a_query_vector_of_zeros_finds_something_and_does_not_fail(index: CollectionIndex) -> None:
    assert len(index.by_meaning(np.zeros(3, dtype=np.float32), 2)) == 2


def test_without_vectors_meaning_finds_nothing() -> None:
    index = CollectionIndex(IDS, TEXTS)
    assert index.by_meaning(np.array([1, 0, 0], dtype=np.float32), 5) == []


def test_a_module_without_words_does_no_harm() -> None:
    index = CollectionIndex(np.array([1, 2]), ["?!", "boats"])
    assert index.by_words("boats", 5) == [2]
    assert CollectionIndex(np.array([1]), ["the"]).by_words("boats", 5) == []


def test_an_empty_collection_finds_nothing() -> None:
    index = CollectionIndex(np.zeros(0, dtype=np.int64), [])
    assert index.by_words("boats", 5) == []
    assert index.by_meaning(np.ones(3, dtype=np.float32), 5) == []
