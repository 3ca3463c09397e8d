"""Passages of documents, and how far they say what an answer says.

A model may be as certain of a sentence that has nothing to do with the question as of the right
one. The question's own words tell the two apart: they are in the sentence that answers it, in the
one before it, or in the titles above. BM25 weights the words (Robertson and Zaragoza, 2009).
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cache
from itertools import pairwise

from ragcache.db import ModuleRow
from ragcache.documents.markdown import find_headings, find_tables, headings_above
from ragcache.retrieval.bm25 import characters, terms

PASSAGE_SHARE = 0.25
"""Part of the question's words in `grounding` that a passage itself has to have (ADR 104)."""

_NUMBER = re.compile(r"\d[\d.,:]*\d|\d")
_ASSENT = frozenset("yes no ja nein oui non si sí sim 是 否 不 对".split())
"""Answers to questions that are answered by themselves."""
_COUNTED = (
    "two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen "
    "seventeen eighteen nineteen",
    "zwei drei vier fünf sechs sieben acht neun zehn elf zwölf dreizehn vierzehn fünfzehn sechzehn "
    "siebzehn achtzehn neunzehn",
)
_TENS = (
    "twenty thirty forty fifty sixty seventy eighty ninety",
    "zwanzig dreißig vierzig fünfzig sechzig siebzig achtzig neunzig",
)
_BREAK = re.compile(
    r"(?<=[.!?])\s+|(?<=[。！？])"  # a sentence ends
    r"|\n(?=\s*(?:\n|[-*+|#>]|\d+[.)]\s))"  # a paragraph, an item, a row, a heading
)


def sentence_breaks(text: str) -> list[int]:
    """Return where sentences, items, rows and headings of a text begin, and the text's end."""
    return sorted({0, *(found.end() for found in _BREAK.finditer(text)), len(text)})


def passages_with(answer: str, module: ModuleRow) -> Iterator[str]:
    """Yield the passage around each occurrence of an answer in a module.

    A passage has the answer's sentence, the one before it, the titles above and, in a table, the
    header.
    """
    answer, text = answer.strip(), module.text
    begin = text.find(answer) if answer else -1
    if begin < 0:
        return
    breaks = sentence_breaks(text)
    headings, tables = find_headings(text), list(find_tables(text))
    before = None
    while begin >= 0:
        first = max(0, bisect_right(breaks, begin) - 2)
        place = first, bisect_left(breaks, begin + len(answer))
        if place != before:
            before = place
            rows = [text[a : text.find("\n", a)] for a, b in tables if a <= begin < b]
            lines = [each.line for each in headings_above(headings, begin)]
            above = [*module.headings, *lines, *rows]
            yield "\n".join([*above, text[breaks[first] : breaks[place[1]]]])
        begin = text.find(answer, begin + 1)


@dataclass(frozen=True, slots=True)
class Passage:
    """A sentence, an item or a row of a module, with the words that it says."""

    module: ModuleRow
    begin: int
    """First character in the module's text."""
    end: int
    """End in the module's text, exclusive."""
    words: frozenset[str]
    """Words and numbers of the sentence and of the titles above it."""


def passages_of(module: ModuleRow) -> Iterator[Passage]:
    """Yield the passages of a module in order."""
    text, headings = module.text, find_headings(module.text)
    breaks = sentence_breaks(text)
    for begin, end in pairwise(breaks):
        said = text[begin:end]
        if not said.strip():
            continue
        begin += len(said) - len(said.lstrip())
        above = [*module.headings, *(each.line for each in headings_above(headings, begin))]
        words = words_of(said) | {each for line in above for each in words_of(line)}
        yield Passage(module, begin, begin + len(said.strip()), frozenset(words))


@cache
def number_words() -> Mapping[str, str]:
    """Return the digits of number words, by their stems. *One* is left out: it is a pronoun, too.

    Models write `7 weeks` where a document says *seven weeks*.
    """
    named = {word: str(number) for line in _COUNTED for number, word in enumerate(line.split(), 2)}
    named |= {word: f"{ten}0" for line in _TENS for ten, word in enumerate(line.split(), 2)}
    return {stem: digits for word, digits in named.items() for stem in terms(word)}


def numbers_of(text: str) -> set[str]:
    """Return the numbers of a text, whole, such as `7:40`, `1,200`, and `7` for *seven*."""
    named = number_words()
    return {*_NUMBER.findall(text), *(named[each] for each in named.keys() & terms(text))}


def words_of(text: str) -> set[str]:
    """Return the stems and the whole numbers of a text. Number words are digits."""
    return {*terms(text), *characters(text)} - number_words().keys() | numbers_of(text)


@dataclass(frozen=True, slots=True)
class LexicalSupport:
    """Lexical support: how many of a question's words are near its answer.

    Example:
        >>> text = "The key hangs in the office. It is red."
        >>> module = ModuleRow(1, "keys.md#1", "keys.md", "keys.md", text)
        >>> LexicalSupport({"key": 3.0, "hang": 2.0, "pool": 5.0}, (module,)).share("the office")
        0.5
    """

    words: Mapping[str, float]
    """Weight of each word (`Selection.words`)."""
    modules: Sequence[ModuleRow]
    """The modules in the prompt."""

    def share(self, answer: str) -> float | None:
        """Return the weighted share, 0 to 1, of the words around an answer.

        The occurrence with the highest share counts. Without an occurrence it is None.
        """
        total = sum(self.words.values())
        passages = {each for module in self.modules for each in passages_with(answer, module)}
        if not passages or not total:
            return None
        return max(self._weight({*terms(each), *characters(each)}) for each in passages) / total

    def grounding(self, answer: str) -> float | None:
        """Return how far the documents say a free answer to the question, 0 to 1.

        Of each passage, the share of the words of one of the answer's sentences is multiplied by
        the weighted share of the question's words: a quarter of it is of the passage, the rest of
        its module. The highest product counts, times the share of all words of the answer that any
        passage has. An answer without words has none.
        """
        total = sum(self.words.values())
        said = words_of(answer)
        passages = [[*passages_of(module)] for module in self.modules]
        whole = [frozenset[str]().union(*(each.words for each in found)) for found in passages]
        if not said or not total or not any(passages):
            return None
        said -= _ASSENT
        sentences = [words_of(answer[a:b]) - _ASSENT for a, b in pairwise(sentence_breaks(answer))]
        best = max(
            _share(sentence, each.words) * asked / total
            for found, words in zip(passages, whole, strict=True)
            for each, asked in self._asked(found, words)
            for sentence in sentences
        )
        return best * _share(said, frozenset[str]().union(*whole))

    def _asked(
        self, passages: Sequence[Passage], module: Set[str]
    ) -> Iterator[tuple[Passage, float]]:
        """Yield the passages of a module with the weight of the question's words around them."""
        around = (1 - PASSAGE_SHARE) * self._weight(module)
        for each in passages:
            yield each, around + PASSAGE_SHARE * self._weight(each.words)

    def _weight(self, found: Set[str]) -> float:
        named = number_words()
        return sum(
            weight
            for word, weight in self.words.items()
            if word in found or named.get(word) in found
        )


def _share(wanted: Set[str], found: Set[str]) -> float:
    """Return the share of the wanted words that were found."""
    return len(wanted & found) / len(wanted) if wanted else 1.0
