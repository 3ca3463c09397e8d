"""Distance of a mode from `exact`, by first-token distributions over the same prompts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

import torch
from torch import Tensor

from ragcache.engine import Choice
from ragcache.errors import InvalidRequest


@dataclass(frozen=True, slots=True)
class Fidelity:
    """First tokens of a mode compared with a reference, prompt by prompt."""

    divergences: tuple[float, ...]
    """Kullback-Leibler divergence of each prompt, in nats: of the reference's distribution from the
    mode's, over the whole vocabulary. Infinite if the mode excludes a token that the reference
    allows."""
    agreements: tuple[bool, ...]
    """Whether the likeliest token is the same, for each prompt."""

    @property
    def kl_divergence(self) -> float:
        """Mean over the prompts, in nats."""
        return fmean(self.divergences)

    @property
    def agreement(self) -> float:
        """Share of prompts with the same likeliest first token, 0 to 1."""
        return fmean(self.agreements)


def compare_first_tokens(reference: Sequence[Choice], other: Sequence[Choice]) -> Fidelity:
    """Compare first tokens of answers to the same prompts in two modes.

    Compares the model's own distributions, before penalties, temperature and constraints.

    Args:
        reference: One choice for each prompt, of mode `exact`, generated with
            `SamplingParams(first_logprobs=True)`. One new token is enough.
        other: Choices of the mode, in the same order.

    Raises:
        InvalidRequest: There are no prompts, their numbers differ, or a choice lacks
            `first_logprobs`.

    Example:
        >>> from ragcache import GenerationParams
        >>> first = GenerationParams(first_logprobs=True, max_tokens=1)
        >>> asked = {"collection": "handbook", "generation": first}
        >>> exact = rag.ask("How many days of leave?", mode="exact", **asked)  # doctest: +SKIP
        >>> rooted = rag.ask("How many days of leave?", **asked)  # doctest: +SKIP
        >>> compare_first_tokens(exact.choices, rooted.choices).agreement  # doctest: +SKIP
        1.0
    """
    if not reference or len(reference) != len(other):
        raise InvalidRequest(
            f"{len(reference)} and {len(other)} first tokens cannot be compared; give one choice "
            "for each prompt and mode"
        )
    pairs = [(_logprobs(a), _logprobs(b)) for a, b in zip(reference, other, strict=True)]
    return Fidelity(
        tuple(kl_divergence(exact, given) for exact, given in pairs),
        tuple(bool(exact.argmax() == given.argmax()) for exact, given in pairs),
    )


def kl_divergence(reference: Tensor, other: Tensor) -> float:
    """Return KL(reference || other) in nats, 0 or more, of two log-distributions [V]."""
    p, q = reference.double(), other.double()
    possible = p > -torch.inf  # 0 * log 0 is 0
    terms = p[possible].exp() * (p[possible] - q[possible])
    total = float(terms.sum())
    return total if math.isinf(total) else max(0.0, total)


def _logprobs(choice: Choice) -> Tensor:
    if choice.first_logprobs is None:
        raise InvalidRequest(
            "a choice lacks the log-probabilities of its first token; generate it with "
            "SamplingParams(first_logprobs=True)"
        )
    return choice.first_logprobs
