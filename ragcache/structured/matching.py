"""A compiled grammar as the engine's constraint."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ragcache.engine import MakeConstraint
from ragcache.engine.constraint import pack
from ragcache.models import LoadedModel
from ragcache.structured.compiling import compiler_of
from ragcache.structured.grammar import Grammar

if TYPE_CHECKING:
    from xgrammar import CompiledGrammar, GrammarMatcher


def constraint_of(grammar: Grammar, model: LoadedModel) -> MakeConstraint:
    """Compiles the grammar for the model's vocabulary.

    Raises `InvalidRequest` where it cannot be compiled, `MissingExtra` without `structured`.
    """
    compiler = compiler_of(model)
    compiled = compiler.compile(grammar)
    stops = torch.zeros(1, compiler.width, dtype=torch.bool, device="cpu")
    stops[0, compiler.stop_ids] = True
    [packed] = pack(stops)
    return lambda: GrammarConstraint(compiled, packed)


class GrammarConstraint:
    """One answer's place in its grammar. stops: the stop tokens as a packed mask, int32 [W]."""

    def __init__(self, compiled: CompiledGrammar, stops: Tensor) -> None:
        from xgrammar import GrammarMatcher

        self._matcher: GrammarMatcher = GrammarMatcher(compiled)
        self._others = ~stops
        self._mask = torch.empty((1, len(stops)), dtype=torch.int32, device="cpu")
        self._filled = False
        self.finished = False

    def mask(self) -> Tensor | None:
        """See `Constraint.mask`."""
        if not self._filled:
            self._fill()
        return self._mask[0]

    def accept(self, token: int) -> None:
        """See `Constraint.accept`. Raises `ValueError` for a token that the grammar refuses."""
        if not self._matcher.accept_token(token):
            raise ValueError(f"the grammar does not allow token {token} here")
        self._filled = False
        if self._matcher.is_completed():
            self._fill()
            self.finished = not bool((self._mask[0] & self._others).any())

    def _fill(self) -> None:
        self._matcher.fill_next_token_bitmask(self._mask)
        self._filled = True
