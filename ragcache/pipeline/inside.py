"""Tokens of texts that stand inside a prompt, side by side with others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

from ragcache.models import LoadedModel
from ragcache.pipeline.template_text import TemplateText

_ANCHOR = "\ue000"  # a private character, with which no letter makes a token
_EDGE = 3  # tokens at the front of a text that its surroundings may change


@dataclass(frozen=True, slots=True)
class Agreement:
    """Tokens begin:end of a module are tokens of a text too. before, after: the text's others."""

    before: tuple[int, ...]
    begin: int
    end: int
    after: tuple[int, ...]


class InsideText:
    """Tokenises parts of a prompt so that their tokens, one after the other, decode to it.

    Tokenizers of the sentencepiece kind put a space before every text that they are given. Inside
    of a prompt there is none: a text is tokenised behind an anchor, whose tokens are dropped.
    """

    def __init__(self, model: LoadedModel, template: TemplateText) -> None:
        self._model, self._template = model, template
        self._lead = model.encode_untrusted(_ANCHOR)
        alone = model.encode_untrusted("a")
        self._prefixes = self._anchored("a") not in (None, alone)

    def encode(self, text: str, *, first: bool) -> list[int]:
        """Tokens of a text with marks (see `TemplateText`). first: it begins the prompt."""
        return self._template.encode(text, lambda piece, at: self._piece(piece, first and at == 0))

    def agreement(
        self, text: str, token_ids: Sequence[int], *, whole: bool, first: bool
    ) -> Agreement:
        """The longest run of a module's tokens that the text which stands for it has too.

        whole: the text is the module's own; else it lacks outer whitespace. States of a run that
        is cut off at the end are what they would be without the rest: no token sees those after it.
        """
        if whole and (first or not self._prefixes):
            return Agreement((), 0, len(token_ids), ())
        here = self._piece(text, first)
        best = (0, 0, 0)  # length, and where it begins in the module and here
        for begin, at in sorted(product(range(_EDGE), repeat=2), key=sum):
            best = max(best, (_common(token_ids[begin:], here[at:]), begin, at), key=lambda b: b[0])
            if best[0] >= min(len(token_ids), len(here)) - sum(best[1:]):
                break
        length, begin, at = best
        return Agreement(tuple(here[:at]), begin, begin + length, tuple(here[at + length :]))

    def _piece(self, text: str, first: bool) -> list[int]:
        if first or not self._prefixes:
            return self._model.encode_untrusted(text)
        return self._anchored(text) or self._model.encode_untrusted(text)

    def _anchored(self, text: str) -> list[int] | None:
        """None where the anchor is not told from the text."""
        ids = self._model.encode_untrusted(_ANCHOR + text)
        size = len(self._lead)
        return ids[size:] if ids[:size] == self._lead else None


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens two runs begin with alike."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))
