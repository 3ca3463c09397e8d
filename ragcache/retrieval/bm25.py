"""BM25 search over words, in a tantivy index in memory, and splitting of texts into words."""

from __future__ import annotations

import math
import re
import threading
from collections import defaultdict
from collections.abc import Collection, Mapping
from copy import copy
from functools import cache
from heapq import nlargest
from operator import itemgetter
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # imported by the first text
    import tantivy

Ranking = list[tuple[int, float]]
"""Ids of modules with their scores, best first."""

MOST_WORDS, LONGEST_WORD = 64, 64
"""Most words of a query that get a weight, and most characters of such a word."""

BUILT_ANEW = 64
"""Most texts of an index that is rebuilt at each change, in some milliseconds. The scores of a
rebuilt index are exact: deleted texts do not count in its statistics."""

_SATURATION = 2.2  # tantivy's k1 + 1: a word adds less than its IDF times this to a score
_HEAP_BYTES = 15_000_000  # the least that tantivy accepts for a writer, allocated on use


class BM25Index:
    """BM25 index over texts by id. A snapshot, which `update` does not change. Thread-safe.

    Words, and single Chinese, Japanese and Korean characters, are two fields with separate
    statistics, so that the length of a text is its number of words.

    Example:
        >>> index = BM25Index({7: "The boat is moored.", 9: "A red key."})
        >>> [number for number, _ in index.update({9: "A boat key."}).search("boats", 4)]
        [9]
    """

    def __init__(self, texts: Mapping[int, str]) -> None:
        import tantivy

        schema = tantivy.SchemaBuilder()
        schema.add_integer_field("id", indexed=True, fast=True)
        for field in ("words", "characters"):
            schema.add_text_field(field, tokenizer_name=field, index_option="freq")
        self._schema = schema.build()
        self._index = tantivy.Index(self._schema)
        self._index.register_tokenizer("words", _analyzer())
        split_at_spaces = tantivy.TextAnalyzerBuilder(tantivy.Tokenizer.whitespace())
        self._index.register_tokenizer("characters", split_at_spaces.build())
        self._ids: frozenset[int] = frozenset()
        self._written = 0  # texts since the index was built, including deleted ones
        self._merging: threading.Thread | None = None
        self._write(texts, texts.keys())

    def update(self, texts: Mapping[int, str]) -> BM25Index:
        """Return a snapshot over other texts, most of them the same.

        The text of an id must never change. Only the newest snapshot can be updated, by one thread
        at a time. tantivy counts deleted texts in its statistics until it merges them away, so the
        index is rebuilt when more texts were deleted than it has.
        """
        came = texts.keys() - self._ids
        if not came and len(texts) == len(self._ids):
            return self
        if len(texts) <= BUILT_ANEW or self._written + len(came) > 2 * len(texts):
            return BM25Index(texts)
        other = copy(self)
        other._write(texts, came)
        return other

    def _write(self, texts: Mapping[int, str], came: Collection[int]) -> None:
        """Add the texts that came, and delete the texts that `texts` lacks.

        A writer has threads, so it lives for one change only. Merging goes on in the background
        while the change can already be searched.
        """
        import tantivy

        if self._merging is not None:
            self._merging.join()
        writer = self._index.writer(_HEAP_BYTES, num_threads=1)
        gone = self._ids - texts.keys()
        for number in (gone | set(came)) if self._written else ():  # also texts that an error left
            writer.delete_documents_by_term("id", number)
        for number in sorted(came):
            document = tantivy.Document()
            document.add_integer("id", number)
            document.add_text("words", _spaced(texts[number]))
            document.add_text("characters", " ".join(characters(texts[number])))
            writer.add_document(document)
        writer.commit()
        self._index.reload()
        self._searcher = self._index.searcher()
        self._ids, self._written = frozenset(texts), self._written + len(came)
        self._merging = threading.Thread(target=writer.wait_merging_threads, name="ragcache-merge")
        self._merging.start()

    def search(self, query: str, limit: int, allowed: Collection[int] | None = None) -> Ranking:
        """Find texts that share a word with a query, best BM25 score first.

        Chinese, Japanese and Korean are compared by pairs of characters, or by a single character
        that is alone.

        Args:
            query: Any text.
            limit: The most texts to return.
            allowed: Ids of the texts that may be found. Defaults to all.
        """
        import tantivy

        words = _fields(query)
        if not words or not self._ids:
            return []
        one_of = [
            (tantivy.Occur.Should, tantivy.Query.term_query(self._schema, field, word, "freq"))
            for field, word in words
        ]
        most = limit if allowed is None else len(self._ids)
        hits = self._searcher.search(tantivy.Query.boolean_query(one_of), most, count=False).hits
        ids = self._searcher.fast_field_values("id", [address for _, address in hits])
        found = [(int(number or 0), score) for number, (score, _) in zip(ids, hits, strict=True)]
        if allowed is not None:
            found = [pair for pair in found if pair[0] in allowed]
        return sorted(found, key=lambda pair: (-pair[1], pair[0]))[:limit]

    def word_weights(self, query: str) -> dict[str, float]:
        """Return the most that each word of a query can add to the score of a text.

        The bound is the score of a text that repeats the word without end. A word that no text
        contains gets the weight of a word in one text: among few texts, unknown words would
        otherwise outweigh all known ones. Since weights travel to replicas, only the `MOST_WORDS`
        heaviest words are returned, without words over `LONGEST_WORD` characters.
        """
        weights: defaultdict[str, float] = defaultdict(float)
        for field, word in _fields(query):
            if len(word) <= LONGEST_WORD:
                weights[word] += _SATURATION * self._idf(field, word)
        return dict(nlargest(MOST_WORDS, weights.items(), key=itemgetter(1)))

    def _idf(self, field: str, word: str) -> float:
        count = len(self._ids)
        frequency = min(max(self._searcher.doc_freq(field, word), 1), count)
        return math.log(1 + (count - frequency + 0.5) / (frequency + 0.5))


def _fields(query: str) -> list[tuple[str, str]]:
    """Return the words of a query, each after the field of the index that contains it."""
    lone = (w for w in _WORD.findall(query) if len(w) == 1 and _IDEOGRAPHS.match(w))
    return [*(("words", w) for w in terms(query)), *(("characters", c) for c in lone)]


_WORD = re.compile(r"[^\W_]+", re.UNICODE)
_IDEOGRAPHS = re.compile(r"[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]+")
STOP_WORDS = frozenset(
    "a an and are as at be been by can could did do does for from had has have he her him his how "
    "i if in into is it its long many may me much must my no not of on one or our shall she should "
    "so than that the their them there they this those to up us was we were what when where which "
    "who whom whose why will with would you your".split()
)


@cache
def _analyzer() -> tantivy.TextAnalyzer:
    """Return tantivy's analyzer for words: letters and digits, no stop words, Snowball stems."""
    from tantivy import Filter, TextAnalyzerBuilder, Tokenizer

    steps = TextAnalyzerBuilder(Tokenizer.simple()).filter(Filter.lowercase())
    steps = steps.filter(Filter.custom_stopword(sorted(STOP_WORDS)))
    return steps.filter(Filter.stemmer("english")).build()


def terms(text: str) -> list[str]:
    """Split a text into stems without stop words, and Chinese, Japanese and Korean into pairs."""
    return _analyzer().analyze(_spaced(text))


def _spaced(text: str) -> str:
    """Write Chinese, Japanese and Korean words as pairs of characters between spaces.

    tantivy refuses lone surrogates: they become question marks, which are part of no word.
    """
    text = text.encode(errors="replace").decode()
    if not _IDEOGRAPHS.search(text):
        return text
    return _WORD.sub(_pairs, text)


def _pairs(found: re.Match[str]) -> str:
    word = found[0]
    if not _IDEOGRAPHS.search(word):
        return word
    return " " + " ".join(word[i : i + 2] for i in range(max(1, len(word) - 1))) + " "


def characters(text: str) -> list[str]:
    """List the Chinese, Japanese and Korean characters of a text."""
    return [character for run in _IDEOGRAPHS.findall(text) for character in run]
