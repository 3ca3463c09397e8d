"""BM25: which texts are found, their scores, changes of an index, and how texts become words."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ragcache.retrieval import BM25Index, bm25
from ragcache.retrieval.bm25 import LONGEST_WORD, MOST_WORDS, STOP_WORDS, characters, terms
from tests.conftest import scaled

TEXTS = {
    40: "The survey boat is moored at the north quay.",
    7: "The spare key hangs in the red cupboard. Keys are counted on Fridays.",
    19: "Leave requests go to Ines Marlow.",
    3: "船停在北京的码头。",
}


def ids(ranking: list[tuple[int, float]]) -> list[int]:
    scores = [score for _, score in ranking]
    assert scores == sorted(scores, reverse=True)
    return [number for number, _ in ranking]


@pytest.fixture(scope="module")
def index() -> BM25Index:
    return BM25Index(TEXTS)


@pytest.fixture
def never_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Changes of small indexes are written to them."""
    monkeypatch.setattr(bm25, "BUILT_ANEW", 0)


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ("Where does the key of the boat hang?", [7, 40]),
        ("zyxwv requests", [19]),
        ("北京在哪里", [3]),
        ("船", [3]),
        ("京", [3]),  # within a word
        *((query, []) for query in ("zyxwv", "", "how many of the", "?", "猫", "x" * 70_000)),
    ],
)
def test_texts_are_ranked_by_shared_words(
    index: BM25Index, query: str, expected: list[int]
) -> None:
    """Words of Chinese are pairs of characters, and lone ones. Unknown words do not count."""
    assert ids(index.search(query, 10)) == expected
    assert ids(index.search(query, 1)) == expected[:1]


def test_characters_do_not_change_other_scores() -> None:
    """Lengths of texts are counted in words, so a text of ideographs is no longer for it."""
    texts = {1: "boats at the quay", 2: "boats 船停在北京的码头上"}
    pairs = dict(BM25Index(texts).search("boats", 5))
    alone = dict(BM25Index(texts | {2: "boats ab cd ef gh ij kl mn op"}).search("boats", 5))
    assert pairs == pytest.approx(alone)


def test_half_of_a_character_matches_nothing_and_the_rest_counts(index: BM25Index) -> None:
    assert index.search("red\ud800keys \udfff 船", 9) == index.search("red keys 船", 9)
    assert index.word_weights("keys \ud800") == index.word_weights("keys")
    assert index.search("\ud800", 9) == []
    assert ids(BM25Index({1: "boats\ud800 quay"}).search("boats", 9)) == [1]


def test_disallowed_texts_do_not_count_to_the_limit(index: BM25Index) -> None:
    assert ids(index.search("boat key", 1, {7, 19, 3})) == [7]
    assert index.search("boat key", 5, set()) == []


def test_texts_without_words_are_indexed() -> None:
    assert ids(BM25Index({1: "?!", 2: "boats"}).search("boats", 5)) == [2]
    assert BM25Index({1: "the"}).search("boats", 5) == []
    assert BM25Index({}).search("boats", 5) == []


def test_equal_texts_are_found_by_id() -> None:
    assert ids(BM25Index(dict.fromkeys((5, 2, 9), "boat")).search("boat", 5)) == [2, 5, 9]


@pytest.mark.parametrize("texts", [1, 2, 50])
def test_the_share_of_a_question_is_the_same_among_few_and_many(texts: int) -> None:
    every = dict.fromkeys(range(texts), "Paraffin costs four crowns.")
    index = BM25Index(every | {0: "The lighthouse is 43 metres high."})
    query = "How tall is the lighthouse?"
    most = sum(index.word_weights(query).values())
    assert index.search(query, 1)[0][1] / most == pytest.approx(0.225, abs=0.025)
    assert index.word_weights("How is it?") == {}


def test_a_weight_is_the_most_that_a_word_adds_to_a_score() -> None:
    """A word that is repeated without end adds its whole weight."""
    index = BM25Index({1: "quay " * 500, 2: "A key.", 3: "A boat."})
    [(_, score)] = index.search("quay", 1)
    assert 0.97 < score / index.word_weights("quay")["quay"] < 1


def test_of_a_long_query_the_words_that_count_most_have_a_weight() -> None:
    index = BM25Index({0: "The quay is wet.", 1: "A quay.", 2: "A quay.", 3: "A quay."})
    lots = " ".join(f"w{number}" for number in range(MOST_WORDS))
    weights = index.word_weights(f"quay {lots} {'x' * 99} w1")
    assert len(weights) == MOST_WORDS
    assert "quay" not in weights, "which is in every text"
    assert weights["w1"] == 2 * weights["w2"], "it stands there twice"
    assert max(map(len, weights)) <= LONGEST_WORD


@pytest.mark.usefixtures("never_anew")
def test_an_update_leaves_earlier_snapshots_as_they_are() -> None:
    before = BM25Index(TEXTS)
    after = before.update({number: TEXTS[number] for number in (40, 3)} | {8: "A sloop. 猫"})
    assert ids(after.search("sloop", 5)) == ids(after.search("猫", 5)) == [8]
    assert after.search("key", 5) == before.search("sloop", 5) == []
    assert ids(before.search("key", 5)) == [7]
    assert after.update({**{n: TEXTS[n] for n in (40, 3)}, 8: "A sloop. 猫"}) is after


@settings(max_examples=scaled(100, quick=0.1))
@given(st.lists(st.sets(st.integers(0, 40), max_size=25), min_size=1, max_size=6))
@pytest.mark.usefixtures("never_anew")
def test_an_updated_index_finds_what_a_new_one_finds(steps: list[set[int]]) -> None:
    every = {n: f"boat {n % 7} {'key' if n % 2 else '船'}" for n in range(41)}
    index = BM25Index({})
    for step in steps:
        texts = {number: every[number] for number in step}
        index, fresh = index.update(texts), BM25Index(texts)
        for query in ("boat 3", "key", "船"):
            assert {n for n, _ in index.search(query, 50)} == {
                n for n, _ in fresh.search(query, 50)
            }


@pytest.mark.usefixtures("never_anew")
def test_an_index_is_rebuilt_if_most_of_it_is_deleted() -> None:
    texts = {n: f"boat {n}" for n in range(20)}
    index, wanted = BM25Index(texts), {n: f"boat {n}" for n in range(100, 115)}
    replaced = index.update(wanted)
    assert replaced.search("boat", 50) == BM25Index(wanted).search("boat", 50)
    assert replaced._index is not index._index


def test_a_small_index_scores_after_a_change_as_if_it_were_new(index: BM25Index) -> None:
    texts = {8: "A key and a boat.", **{n: TEXTS[n] for n in (7, 3)}}
    assert index.update(texts).search("key boat", 9) == BM25Index(texts).search("key boat", 9)


@pytest.mark.usefixtures("never_anew")
def test_an_update_that_failed_is_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    index = BM25Index(TEXTS)
    texts = TEXTS | {8: "A sloop."}
    with monkeypatch.context() as failing:
        failing.setattr(bm25.threading, "Thread", lambda **_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            index.update(texts)
    assert ids(index.update(texts).search("sloop", 5)) == [8], "once, although it was written"


def test_threads_search_and_split_texts_side_by_side(index: BM25Index) -> None:
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda _: ids(index.search("the red keys", 3)), range(200)))
    assert found == [[7]] * 200


@pytest.mark.usefixtures("never_anew")
def test_no_thread_of_an_index_outlives_its_change() -> None:
    before = threading.active_count()
    index = BM25Index(TEXTS)
    for number in range(9):
        index = index.update(TEXTS | {100 + number: "A sloop."})
    assert index._merging is not None
    index._merging.join(10)
    assert threading.active_count() <= before


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Requested requests: REQUEST", ["request"] * 3),
        ("How many of the boats are there?", ["boat"]),
        (" ".join(STOP_WORDS), []),
        ("26 days, 3.5%; B-17_x", ["26", "day", "3", "5", "b", "17", "x"]),
        ("北京大学", ["北京", "京大", "大学"]),
        ("船", ["船"]),
        ("すし。", ["すし"]),
        ("한국어", ["한국", "국어"]),
        ("在A4纸", ["在a", "a4", "4纸"]),
        *((text, []) for text in ("", "  \n", "?!…", "\0")),
    ],
)
def test_terms_are_stems_numbers_and_pairs_of_characters(text: str, expected: list[str]) -> None:
    assert terms(text) == expected


def test_characters_are_those_of_writing_without_spaces() -> None:
    assert characters("A4纸 (すし), 한국!") == ["纸", "す", "し", "한", "국"]
    assert characters("boats") == []
