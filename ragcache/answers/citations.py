"""Source marks in free answers: each sentence cites the passages that say it.

A mark is made here and not by the model, which may cite a source that does not exist or says
something else. A sentence cites the fewest passages that together have its words and numbers
(attribution by lexical overlap, as the baseline of Bohnet et al., 2022). A sentence that no
passage says stays without a mark.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from ragcache.answers.passages import (
    Passage,
    numbers_of,
    passages_of,
    sentence_breaks,
    words_of,
)
from ragcache.answers.policy import AnsweredPrompt, AnswerOutput, AnswerPolicy, AnswerSpan
from ragcache.db import ModuleRow
from ragcache.engine import Choice, RequestOutput, TokenDelta
from ragcache.errors import InvalidRequest

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


@dataclass(frozen=True, slots=True)
class CitationPolicy(AnswerPolicy):
    """Puts source marks into free answers, and lists their places in the documents."""

    modules: tuple[ModuleRow, ...]
    """The modules in the prompt, best first."""

    @classmethod
    def for_prompt(cls, prompt: AnsweredPrompt) -> CitationPolicy:
        """Return the policy of a prompt whose answers cite.

        Raises:
            InvalidRequest: The prompt is a PML prompt.
        """
        if prompt.kind == "prompt":
            raise InvalidRequest(
                "citations name documents, and a PML prompt reads a schema; ask a collection "
                "instead, or leave out citations"
            )
        return cls(prompt.modules)

    @property
    def holds(self) -> bool:
        """A mark is known at the end of its sentence, and the answer is checked as a whole."""
        return True

    def finish(
        self,
        answer: AnswerOutput,
        passes: Sequence[RequestOutput],  # noqa: ARG002
    ) -> AnswerOutput:
        """Return the answer with marks in its choices, and their spans. Refusals cite nothing."""
        choices, spans = list[Choice](), list[AnswerSpan]()
        for number, choice in enumerate(answer.output.choices):
            if choice.finish_reason != "no_answer":
                text, found = cite(choice.text, self.modules, number)
                choice = replace(choice, text=text)
                spans += found
            choices.append(choice)
        output = replace(answer.output, choices=tuple(choices))
        return replace(answer, output=output, spans=(*answer.spans, *spans))

    def release(self, deltas: Sequence[TokenDelta], answer: AnswerOutput) -> list[TokenDelta]:
        """Return the deltas with the whole text of each choice, with its marks, at its end."""
        cited = {
            number: choice.text
            for number, choice in enumerate(answer.output.choices)
            if choice.finish_reason != "no_answer"
        }
        shown = [replace(each, text="") if each.choice in cited else each for each in deltas]
        return [*shown, *(TokenDelta(number, None, text) for number, text in cited.items())]
