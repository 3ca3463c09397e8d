"""Source marks in free answers: each sentence cites the passages that say it.

A mark is made here and not by the model, which may cite a source that does not exist or says
something else. A sentence cites the fewest passages that together have its words and numbers
(attribution by lexical overlap, as the baseline of Bohnet et al., 2022). A sentence that no
passage says stays without a mark.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise

from ragcache.answers.passages import (
    Passage,
    numbers_of,
    passages_of,
    sentence_breaks,
    words_of,
)
from ragcache.answers.quotations import AnswerSpan
from ragcache.db import ModuleRow

SHARE = 0.6
"""Share of a sentence's words that its sources must have. They must have all of its numbers."""

MOST_SOURCES = 3
"""Most passages that a sentence cites."""

_FEWEST_NEW = 2  # words that a second source adds
_MARK = re.compile(r"\s*\[\d+(?:\s*,\s*\d+)*\]")
_END = re.compile(r"[\s.!?。！？…\"'”’)]*$")


def sources_of(sentence: str, passages: Sequence[Passage]) -> list[Passage]:
    """Return the passages that a sentence cites, the most important first.

    Args:
        sentence: A sentence of an answer.
        passages: Passages of the documents. Of equally good ones the first is cited.

    Example:
        >>> module = ModuleRow(1, "a#1", "a", "a", "The key is red. The door is 2 m high.")
        >>> found = sources_of("The door has a height of 2 m.", list(passages_of(module)))
        >>> [module.text[each.begin : each.end] for each in found]
        ['The door is 2 m high.']
    """
    wanted = words_of(sentence)
    missing, found = set(wanted), list[Passage]()
    while missing and len(found) < MOST_SOURCES:
        best = max(passages, key=lambda each: len(each.words & missing), default=None)
        gain = 0 if best is None else len(best.words & missing)
        if best is None or gain < (_FEWEST_NEW if found else 1):
            break
        found.append(best)
        missing -= best.words
    numbers = numbers_of(sentence)
    said = len(wanted) - len(missing) >= SHARE * len(wanted)
    return found if wanted and said and not numbers & missing else []


def cite(
    text: str, modules: Sequence[ModuleRow], choice: int = 0
) -> tuple[str, tuple[AnswerSpan, ...]]:
    """Return an answer with source marks, and the span of each mark.

    Marks are numbered from 1 as they appear. Marks that the model wrote are removed.

    Args:
        text: The answer.
        modules: The modules in the prompt, best first.
        choice: Index of the answer.

    Example:
        >>> module = ModuleRow(1, "a#1", "a", "a", "The key is red. The door is high.")
        >>> cite("The key is red.", [module])[0]
        'The key is red [1].'
    """
    passages = [each for module in modules for each in passages_of(module)]
    text = _MARK.sub("", text)
    breaks, pieces = sentence_breaks(text), list[str]()
    numbers: dict[Passage, int] = {}
    for begin, end in pairwise(breaks):
        sentence = text[begin:end]
        marks = ""
        for each in sources_of(sentence, passages):
            marks += f"[{numbers.setdefault(each, len(numbers) + 1)}]"
        close = _END.search(sentence)
        at = len(sentence) if close is None else close.start()
        pieces += [sentence[:at], f" {marks}" if marks else "", sentence[at:]]
    spans = (
        AnswerSpan.of(each.module, each.begin, each.end, choice, number)
        for each, number in numbers.items()
    )
    return "".join(pieces), tuple(spans)
