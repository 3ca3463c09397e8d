"""Penalties on tokens that a sequence has already seen."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from ragcache.engine.sampling import Sampling


class Tally:
    """What one sequence has seen.

    Tables over the vocabulary, made on the logits' device at first use: a step then costs the same
    however long the prompt and the answer are.
    """

    __slots__ = ("_counts", "_prompt", "_prompt_tokens")

    def __init__(self, prompt_tokens: Iterable[int]) -> None:
        self._prompt_tokens = frozenset(prompt_tokens)
        self._prompt: Tensor | None = None  # bool [V]
        self._counts: Tensor | None = None  # float32 [V]: times generated

    def tables(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Whether a token is in the prompt, bool [V]; how often it was generated, float32 [V]."""
        if self._prompt is None or self._counts is None:
            vocabulary = logits.shape[-1]
            known = [token for token in self._prompt_tokens if 0 <= token < vocabulary]
            self._prompt = torch.zeros(vocabulary, dtype=torch.bool, device=logits.device)
            self._prompt[torch.tensor(known, dtype=torch.int64, device=logits.device)] = True
            self._counts = torch.zeros(vocabulary, device=logits.device)
            self._prompt_tokens = frozenset()
        return self._prompt, self._counts

    def add(self, token: int) -> None:
        """Counts a token that was generated; `tables` has been called before."""
        assert self._counts is not None
        self._counts[token] += 1


def penalize(logits: Tensor, samplings: Sequence[Sampling], tallies: Sequence[Tally]) -> Tensor:
    """Applies each row's penalties: repetition first, then frequency and presence.

    logits: float32 [R, V]. Returns a new tensor.
    """
    tables = [tally.tables(logits) for tally in tallies]
    counts = torch.stack([counts for _, counts in tables])  # [R, V]
    generated = counts > 0
    seen = torch.stack([prompt for prompt, _ in tables]) | generated
    repetition = _column([s.repetition_penalty for s in samplings], logits)
    frequency = _column([s.frequency_penalty for s in samplings], logits)
    presence = _column([s.presence_penalty for s in samplings], logits)
    repeated = torch.where(logits > 0, logits / repetition, logits * repetition)
    return torch.where(seen, repeated, logits) - frequency * counts - presence * generated


def _column(values: Sequence[float], like: Tensor) -> Tensor:
    return torch.tensor(values, dtype=like.dtype, device=like.device)[:, None]
