"""Lexical support: how many of a question's words are near its answer.

A model may be as certain of a sentence that has nothing to do with the question as of the right
one. The question's own words tell the two apart: they are in the answer's sentence, in the one
before it, or in the titles above. BM25 weights the words (Robertson and Zaragoza, 2009).
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from ragcache.db import ModuleRow
from ragcache.documents.markdown import find_headings, find_tables, headings_above
from ragcache.retrieval.bm25 import characters, terms

_BREAK = re.compile(
    r"(?<=[.!?])\s+|(?<=[。！？])"  # a sentence ends
    r"|\n(?=\s*(?:\n|[-*+|#>]|\d+[.)]\s))"  # a paragraph, an item, a row, a heading
)


@dataclass(frozen=True, slots=True)
class LexicalSupport:
    """The words of a question and the modules that its answer is read from.

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
        return max(map(self._weight, passages)) / total

    def _weight(self, passage: str) -> float:
        found = {*terms(passage), *characters(passage)}
        return sum(weight for word, weight in self.words.items() if word in found)


def passages_with(answer: str, module: ModuleRow) -> Iterator[str]:
    """Yield the passage around each occurrence of an answer in a module.

    A passage has the answer's sentence, the one before it, the titles above and, in a table, the
    header.
    """
    answer, text = answer.strip(), module.text
    begin = text.find(answer) if answer else -1
    if begin < 0:
        return
    breaks = sorted({0, *(found.end() for found in _BREAK.finditer(text)), len(text)})
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
