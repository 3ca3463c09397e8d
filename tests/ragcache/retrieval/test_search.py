"""The index over a collection: BM25, FAISS, terms, rank fusion and MMR."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from langchain_core.vectorstores.utils import maximal_marginal_relevance

from ragcache.retrieval import CollectionIndex, fuse
from ragcache.retrieval.search import overlaps, select_by_mmr
from ragcache.retrieval.words import STOP_WORDS, characters, lone_characters, terms

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


def test_sparse_search_ranks_by_shared_words(index: CollectionIndex) -> None:
    assert ids(index.search_sparse("Where does the key of the boat hang?", 10)) == [7, 40]
    assert ids(index.search_sparse("Where does the key of the boat hang?", 1)) == [7]


def test_chinese_is_found_by_pairs_of_characters(index: CollectionIndex) -> None:
    assert ids(index.search_sparse("北京在哪里", 10)) == [3]


@pytest.mark.parametrize("query", ["zyxwv", "", "how many of the", "?"])
def test_a_query_that_shares_no_word_finds_nothing(index: CollectionIndex, query: str) -> None:
    assert index.search_sparse(query, 10) == []


def test_words_unknown_to_the_collection_do_not_disturb_known_ones(index: CollectionIndex) -> None:
    assert ids(index.search_sparse("zyxwv requests", 10)) == [19]


def test_dense_search_ignores_vector_lengths(index: CollectionIndex) -> None:
    assert ids(index.search_dense(np.array([1, 0.2, 0], dtype=np.float32), 10))[:3] == [40, 3, 7]
    assert ids(index.search_dense(np.array([0, 0, 9], dtype=np.float32), 1)) == [19]


def test_limit_beyond_the_collection_finds_all(index: CollectionIndex) -> None:
    found = ids(index.search_dense(np.array([1, 1, 1], dtype=np.float32), 50))
    assert sorted(found) == sorted(IDS.tolist())


def test_a_query_vector_of_zeros_finds_something_and_does_not_fail(index: CollectionIndex) -> None:
    assert len(index.search_dense(np.zeros(3, dtype=np.float32), 2)) == 2


def test_dense_search_without_vectors_is_empty() -> None:
    index = CollectionIndex(IDS, TEXTS)
    assert index.search_dense(np.array([1, 0, 0], dtype=np.float32), 5) == []


def test_module_without_words_is_indexed() -> None:
    index = CollectionIndex(np.array([1, 2]), ["?!", "boats"])
    assert ids(index.search_sparse("boats", 5)) == [2]
    assert CollectionIndex(np.array([1]), ["the"]).search_sparse("boats", 5) == []


def test_an_empty_collection_finds_nothing() -> None:
    index = CollectionIndex(np.zeros(0, dtype=np.int64), [])
    assert index.search_sparse("boats", 5) == []
    assert index.search_dense(np.ones(3, dtype=np.float32), 5) == []


def test_lone_character_is_found_within_words(index: CollectionIndex) -> None:
    assert ids(index.search_sparse("船", 10)) == [3]
    assert ids(index.search_sparse("京", 10)) == [3], "within a word"
    assert set(ids(index.search_sparse("boat 船", 10))) == {3, 40}
    assert index.search_sparse("猫", 10) == []


def test_character_index_does_not_change_other_scores() -> None:
    """Lengths of texts are counted in words, so a text of ideographs is no longer for it."""
    texts = ["boats at the quay", "boats 船停在北京的码头上"]
    pairs = CollectionIndex(np.array([1, 2]), texts)
    scores = dict(pairs.search_sparse("boats", 5))
    alone = CollectionIndex(np.array([1, 2]), [texts[0], "boats ab cd ef gh ij kl mn op"])
    assert scores == pytest.approx(dict(alone.search_sparse("boats", 5)))


def test_disallowed_modules_do_not_count_to_the_limit(index: CollectionIndex) -> None:
    allowed = np.array([False, True, True, True])
    assert ids(index.search_sparse("boat key", 1, allowed)) == [7]
    query = np.array([1, 0.2, 0], dtype=np.float32)
    assert ids(index.search_dense(query, 2, allowed)) == [3, 7]
    nothing = np.zeros(4, dtype=bool)
    assert (
        index.search_sparse("boat key", 5, nothing) == index.search_dense(query, 5, nothing) == []
    )


def test_dense_scores_are_cosines(index: CollectionIndex) -> None:
    scores = dict(index.search_dense(np.array([2, 0, 0], dtype=np.float32), 4))
    assert scores == pytest.approx({40: 1.0, 3: 0.5**0.5, 7: 0.0, 19: 0.0})


def test_with_vectors_leaves_the_first_index_unchanged() -> None:
    words = CollectionIndex(IDS, TEXTS)
    both = words.with_vectors(dict(zip(IDS.tolist(), VECTORS, strict=True)), 3)
    assert (words.dimension, both.dimension) == (None, 3)
    assert words.vectors([7]) is None
    rows = both.vectors([7, 40])
    assert rows is not None
    assert rows.tolist() == [[0, 1, 0], [1, 0, 0]]
    assert both.search_sparse("quay", 5) == words.search_sparse("quay", 5) != []


def test_bm25_is_built_at_the_first_sparse_search(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    counted: list[str] = []
    monkeypatch.setattr(
        "ragcache.retrieval.words.terms", lambda text: (counted.append(text), text.split())[1]
    )
    index = CollectionIndex(IDS, TEXTS, VECTORS)
    index.search_dense(np.ones(3, dtype=np.float32), 2)
    assert counted == []
    for _ in range(2):
        index.search_sparse("quay.", 2)
    assert sorted(counted) == sorted([*TEXTS, "quay.", "quay."])


def test_terms_are_stemmed() -> None:
    assert terms("requests") == terms("Requested") == terms("REQUEST")
    assert terms("mooring boats") == terms("Moored: boat!")


def test_stop_words_are_no_terms() -> None:
    assert terms("How many of the boats are there?") == terms("boats")
    assert terms(" ".join(STOP_WORDS)) == []


def test_numbers_and_letters_count_and_punctuation_does_not() -> None:
    assert terms("26 days, 3.5%; B-17_x") == ["26", "day", "3", "5", "b", "17", "x"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("北京大学", ["北京", "京大", "大学"]),
        ("船", ["船"]),
        ("すし。", ["すし"]),
        ("한국어", ["한국", "국어"]),
    ],
)
def test_writing_without_spaces_counts_as_pairs_of_characters(
    text: str, expected: list[str]
) -> None:
    assert terms(text) == expected


@pytest.mark.parametrize("text", ["", "  \n", "?!…", "\0"])
def test_a_text_without_words_has_no_terms(text: str) -> None:
    assert terms(text) == []


def test_characters_are_those_of_writing_without_spaces() -> None:
    assert characters("A4纸 (すし), 한국!") == ["纸", "す", "し", "한", "국"]
    assert characters("boats") == []


def test_a_lone_character_has_no_neighbor() -> None:
    assert lone_characters("船 北京 a 7 猫?") == ["船", "猫"]


rankings = st.lists(st.lists(st.integers(0, 30), unique=True, max_size=12), max_size=4)


def test_scores_are_sums_of_reciprocal_ranks() -> None:
    fused = dict(fuse([[5, 7], [7, 9]]))
    assert fused[7] == pytest.approx(1 / 62 + 1 / 61)
    assert fused[5] == pytest.approx(1 / 61)
    assert fused[9] == pytest.approx(1 / 62)


def test_modules_of_both_rankings_come_first() -> None:
    assert fuse([[1, 2, 3], [9, 2, 8]])[0][0] == 2


def test_ties_are_broken_by_number_whatever_the_order_of_the_rankings() -> None:
    assert [n for n, _ in fuse([[4], [2]])] == [n for n, _ in fuse([[2], [4]])] == [2, 4]


@given(rankings)
def test_everything_that_was_ranked_is_fused_once_and_scores_descend(
    ranked: list[list[int]],
) -> None:
    fused = fuse(ranked)
    numbers = [number for number, _ in fused]
    assert sorted(numbers) == sorted({n for ranking in ranked for n in ranking})
    scores = [score for _, score in fused]
    assert scores == sorted(scores, reverse=True)


@given(st.lists(st.integers(), unique=True, max_size=20))
def test_one_ranking_alone_keeps_its_order(ranking: list[int]) -> None:
    assert [number for number, _ in fuse([ranking])] == ranking


@given(st.integers(0, 1000), st.integers(1, 8), st.sampled_from([0.0, 0.25, 0.5, 0.9, 1.0]))
def test_mmr_equals_langchain(seed: int, k: int, mmr: float) -> None:
    vectors = np.random.default_rng(seed).standard_normal((7, 4))
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    relevance = vectors[1:] @ vectors[0]
    picked = select_by_mmr(relevance, vectors[1:] @ vectors[1:].T, k, mmr)
    expected = maximal_marginal_relevance(vectors[0], list(vectors[1:]), 1 - mmr, k)
    assert picked == expected


def test_mmr_of_zero_sorts_by_relevance() -> None:
    relevance = np.array([0.1, 0.9, 0.5])
    assert select_by_mmr(relevance, np.ones((3, 3)), 2, 0.0) == [1, 2]


def test_mmr_skips_a_copy() -> None:
    relevance = np.array([0.9, 0.9, 0.3])
    similarity = np.array([[1, 1, 0], [1, 1, 0], [0, 0, 1]])
    assert select_by_mmr(relevance, similarity, 2, 0.5) == [0, 2]


def test_mmr_of_no_candidates_is_empty() -> None:
    assert select_by_mmr(np.zeros(0), np.zeros((0, 0)), 3, 0.5) == []


def test_overlaps_are_jaccard_indices() -> None:
    similarity = overlaps([["boat", "quay"], ["quay", "key", "key"], []])
    assert similarity == pytest.approx(np.array([[1, 1 / 3, 0], [1 / 3, 1, 0], [0, 0, 0]]))
