"""BM25 over the words of modules, and how texts become words.

bm25s builds an index as a whole. So an index that is built outlives changes (`UpdatedWords`):
modules that are gone are masked, and those that came are scored by its statistics, until another
is built.
"""

from __future__ import annotations

import importlib
import re
import sys
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import nlargest
from operator import itemgetter
from types import ModuleType
from typing import TYPE_CHECKING

import numpy as np
import Stemmer

if TYPE_CHECKING:
    import bm25s


def import_bm25s() -> ModuleType:
    """Imports bm25s without JAX: at its import it would call JAX wherever that is installed, which
    takes three quarters of a GPU's memory for itself. ragcache uses none of what JAX does there."""
    hidden = "jax.lax"
    known = sys.modules.get(hidden)
    sys.modules[hidden] = None  # type: ignore[assignment]  # as `import` documents: none is there
    try:
        return importlib.import_module("bm25s")
    finally:
        sys.modules.pop(hidden, None)
        if known is not None:
            sys.modules[hidden] = known


if not TYPE_CHECKING:
    bm25s = import_bm25s()

BUILT_AT_ONCE = 256
"""Modules of an index that is built anew at each change: it takes less than 0.1 s."""

MOST_WORDS, LONGEST_WORD = 64, 64
"""Words of a query that have a weight, and the characters of one."""


class WordIndex:
    """BM25 over texts, built at the first query; concurrent queries wait for it. Single Chinese,
    Japanese and Korean characters have a separate BM25, so that lengths in the first count words.

    ids: [N] int64, the modules of the texts."""

    is_outdated = False

    def __init__(self, ids: np.ndarray, texts: Sequence[str]) -> None:
        self.ids = ids
        self._texts = texts
        self._made: tuple[_Bm25, _Bm25] | None = None
        self._making = threading.Lock()

    def build(self) -> tuple[_Bm25, _Bm25]:
        """The BM25 over words and the one over single characters."""
        with self._making:
            if self._made is None:
                self._made = _bm25(self._texts, terms), _bm25(self._texts, characters)
            return self._made

    def scores(self, query: str) -> np.ndarray:
        """Scores [N] float32 of all texts; 0 where no word is shared with the query."""
        return _sum_of_scores(self.build(), query)

    def weights(self, query: str) -> dict[str, float]:
        """Of each word of a query what it adds to the score of a text at most: its inverse document
        frequency, where one that no text has counts as one of a single text. Of a long query those
        `MOST_WORDS` that count most, without very long ones, since they travel."""
        found: defaultdict[str, float] = defaultdict(float)
        for bm25, words in zip(self.build(), _spelled(query), strict=True):
            for word in words:
                if len(word) <= LONGEST_WORD:
                    found[word] += bm25.idf(word, least=1)
        return dict(nlargest(MOST_WORDS, found.items(), key=itemgetter(1)))

    def update(self, ids: np.ndarray, texts: Sequence[str]) -> WordIndex | UpdatedWords:
        """An index over other modules; built anew only where that is quick or there is none yet."""
        if np.array_equal(ids, self.ids):
            return self
        if self._made is None or len(self.ids) < BUILT_AT_ONCE:
            return WordIndex(ids, texts)
        return UpdatedWords(self, ids, texts)


class UpdatedWords:
    """A built `WordIndex` without the modules that are gone and with those that came since.

    It finds what an index over all of them finds; scores differ a little, being by the statistics
    (lengths, frequencies) of the built one. Only the texts of those that came are read."""

    is_outdated = True

    def __init__(self, built: WordIndex, ids: np.ndarray, texts: Sequence[str]) -> None:
        self._built, self.ids = built, ids
        places = {number: place for place, number in enumerate(built.ids.tolist())}
        at = np.array([places.get(number, -1) for number in ids.tolist()], dtype=np.int64)
        self._kept, self._came = np.flatnonzero(at >= 0), np.flatnonzero(at < 0)
        self._at = at[self._kept]
        came = [texts[place] for place in self._came.tolist()]
        self._counts = tuple(
            [Counter(spell(text)) for text in came] for spell in (terms, characters)
        )

    def build(self) -> None:
        """Nothing: the index that it goes by is built."""

    def scores(self, query: str) -> np.ndarray:
        """As `WordIndex.scores`."""
        made = self._built.build()
        scores = np.zeros(len(self.ids), dtype=np.float32)
        scores[self._kept] = _sum_of_scores(made, query)[self._at]
        for bm25, counts, words in zip(made, self._counts, _spelled(query), strict=True):
            if words:
                scores[self._came] += [bm25.score(each, words) for each in counts]
        return scores

    def weights(self, query: str) -> dict[str, float]:
        """As `WordIndex.weights`."""
        return self._built.weights(query)

    def update(self, ids: np.ndarray, texts: Sequence[str]) -> WordIndex | UpdatedWords:
        """As `WordIndex.update`."""
        return self._built.update(ids, texts)


@dataclass(frozen=True, slots=True)
class _Bm25:
    """index: None where no text has a term; count: of texts; mean_length: in terms."""

    index: bm25s.BM25 | None
    count: int
    mean_length: float

    def score(self, counts: Counter[str], words: Sequence[str]) -> float:
        """The score of a text that the index lacks, by its terms: the variant of Lucene (Kamphuis
        et al., ECIR 2020), as bm25s computes it, with the index's own k1 and b."""
        index = self.index or bm25s.BM25()
        relative = max(1, counts.total()) / self.mean_length
        saturation = index.k1 * (1 - index.b + index.b * relative)
        shares = ((word, counts[word] / (saturation + counts[word])) for word in words)
        return float(sum(self.idf(word) * share for word, share in shares if share))

    def idf(self, word: str, least: int = 0) -> float:
        """The inverse document frequency of a word. least: in how many texts it counts as standing
        where it stands in fewer: among few texts, whose words are all frequent, those that none has
        would outweigh these."""
        frequency = 0
        if self.index is not None and (number := self.index.vocab_dict.get(word)) is not None:
            starts = self.index.scores["indptr"]
            frequency = int(starts[number + 1] - starts[number])
        frequency = min(max(frequency, least), self.count)
        return float(np.log(1 + (self.count - frequency + 0.5) / (frequency + 0.5)))


def _bm25(texts: Sequence[str], spell: Callable[[str], list[str]]) -> _Bm25:
    """An index over the terms of texts."""
    corpus = [spell(text) or ["\0"] for text in texts]  # bm25s requires a term in every text
    mean_length = sum(map(len, corpus)) / max(1, len(corpus)) or 1.0
    if all(words == ["\0"] for words in corpus):
        return _Bm25(None, len(corpus), mean_length)
    index = bm25s.BM25()
    index.index(corpus, show_progress=False)
    return _Bm25(index, len(corpus), mean_length)


def _sum_of_scores(made: tuple[_Bm25, _Bm25], query: str) -> np.ndarray:
    scores = np.zeros(made[0].count, dtype=np.float32)
    for bm25, words in zip(made, _spelled(query), strict=True):
        if bm25.index is not None and words:
            scores += bm25.index.get_scores(words)
    return scores


def _spelled(query: str) -> tuple[list[str], list[str]]:
    return terms(query), lone_characters(query)


_WORD = re.compile(r"[^\W_]+", re.UNICODE)
_IDEOGRAPHS = re.compile(r"[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]+")
STOP_WORDS = frozenset(
    "a an and are as at be been by can could did do does for from had has have he her him his how "
    "i if in into is it its long many may me much must my no not of on one or our shall she should "
    "so than that the their them there they this those to up us was we were what when where which "
    "who whom whose why will with would you your".split()
)


class _Local(threading.local):
    """A stemmer for each thread: PyStemmer's are not thread-safe."""

    def __init__(self) -> None:
        self.stemmer = Stemmer.Stemmer("english")


_local = _Local()


def terms(text: str) -> list[str]:
    """Stemmed words without stop words; Chinese, Japanese and Korean as pairs of characters."""
    found: list[str] = []
    for word in _WORD.findall(text.lower()):
        if _IDEOGRAPHS.search(word):
            found += [word[i : i + 2] for i in range(max(1, len(word) - 1))]
        elif word not in STOP_WORDS:
            found.append(word)
    stemmed: list[str] = _local.stemmer.stemWords(found)
    return stemmed


def characters(text: str) -> list[str]:
    """The Chinese, Japanese and Korean characters of a text, one by one."""
    return [character for run in _IDEOGRAPHS.findall(text) for character in run]


def lone_characters(text: str) -> list[str]:
    """Such characters that form a word of their own, which no pair of characters can match."""
    return [w for w in _WORD.findall(text) if len(w) == 1 and _IDEOGRAPHS.match(w)]
