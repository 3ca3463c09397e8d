"""Word indexes that outlive changes."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import numpy as np
import pytest

from ragcache.retrieval import words
from ragcache.retrieval.words import LONGEST_WORD, MOST_WORDS, UpdatedWords, WordIndex

TEXTS = ["The boat is moored at the quay.", "A key, and a key of the boat.", "船停在北京。", "?"]
IDS = np.array([4, 7, 8, 9])


def test_bm25s_calls_no_jax(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would at its import, and JAX would take most of a GPU's memory."""
    (tmp_path / "jax").mkdir()
    (tmp_path / "jax" / "__init__.py").write_text("")
    (tmp_path / "jax" / "lax.py").write_text("def top_k(*_): raise AssertionError('called')\n")
    monkeypatch.syspath_prepend(tmp_path)
    for name in [name for name in sys.modules if name.partition(".")[0] == "bm25s"]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(AssertionError, match="called"):
        importlib.import_module("bm25s")
    assert importlib.import_module("jax.lax") is sys.modules["jax.lax"]
    assert words.import_bm25s().BM25 is not None
    assert "jax.lax" in sys.modules, "others may use it"


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> WordIndex:
    monkeypatch.setattr(words, "BUILT_AT_ONCE", 0)
    index = WordIndex(IDS, TEXTS)
    index.build()
    return index


@pytest.mark.parametrize("query", ["boat", "key key boats", "北京", "船", "nothing", ""])
def test_a_text_that_came_scores_as_its_twin_in_the_index(built: WordIndex, query: str) -> None:
    ids = np.array([7, 9, 20, 21, 22, 23])
    updated = built.update(ids, [TEXTS[1], TEXTS[3], *TEXTS])
    assert updated.is_outdated
    scores = updated.scores(query)
    before = built.scores(query)
    assert scores[:2].tolist() == before[[1, 3]].tolist()
    assert scores[2:] == pytest.approx(before, rel=1e-5)


@pytest.mark.parametrize("texts", [1, 2, 50])
def test_what_a_text_has_of_a_question_counts_alike_among_few_and_many(texts: int) -> None:
    others = ["Paraffin costs four crowns."] * (texts - 1)
    index = WordIndex(np.arange(texts), ["The lighthouse is 43 metres high.", *others])
    query = "How tall is the lighthouse?"
    most = sum(index.weights(query).values())
    assert index.scores(query)[0] / most == pytest.approx(0.2, abs=0.02)
    assert index.weights("How is it?") == {}


def test_of_a_long_query_the_words_that_count_most_have_a_weight() -> None:
    index = WordIndex(np.arange(4), ["The quay is wet.", "A quay.", "A quay.", "A quay."])
    lots = " ".join(f"w{number}" for number in range(MOST_WORDS))
    weights = index.weights(f"quay {lots} {'x' * 99} w1")
    assert len(weights) == MOST_WORDS
    assert "quay" not in weights, "which is in every text"
    assert weights["w1"] == 2 * weights["w2"], "it stands there twice"
    assert max(map(len, weights)) <= LONGEST_WORD


def test_words_that_the_index_lacks_are_found(built: WordIndex) -> None:
    updated = built.update(np.array([4, 30]), [TEXTS[0], "An anchor. 猫"])
    assert updated.scores("anchor").tolist()[0] == 0.0 < updated.scores("anchor")[1]
    assert updated.scores("猫")[1] > 0.0
    again = updated.update(IDS, TEXTS)
    assert again is built, "nothing has changed after all"


def test_an_index_without_a_word_is_updated(built: WordIndex) -> None:
    empty = WordIndex(np.array([1]), ["?"])
    empty.build()
    updated = empty.update(np.array([1, 2]), ["?", "An anchor."])
    assert isinstance(updated, UpdatedWords)
    assert updated.scores("anchor")[1] > 0.0


def test_a_small_or_unbuilt_index_is_made_anew() -> None:
    small = WordIndex(IDS, TEXTS)
    assert isinstance(small.update(np.array([1]), ["boat"]), WordIndex)
    small.build()
    assert isinstance(small.update(np.array([1]), ["boat"]), WordIndex)
