"""Sampling parameters of a request, and their ranges."""

from __future__ import annotations

from dataclasses import dataclass

from ragcache.errors import InvalidRequest

MAX_LOGPROBS = 20
# As in vLLM: below this, a difference of 0.001 between two logits already decides.
GREEDY_BELOW = 1e-5


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling parameters of one sequence. Greedy by default.

    Penalties come first, then temperature, top-k, top-p over the renormalized k likeliest tokens,
    and min-p (the order of Hugging Face's `generate`). Tokens of equal probability at a filter's
    boundary are all kept.

    Raises:
        InvalidRequest: A value is outside its range.
    """

    temperature: float = 0.0
    """0 (any value below 1e-5) takes the likeliest token."""
    top_k: int = 0
    """Keep only the k likeliest tokens. 0 keeps all."""
    top_p: float = 1.0
    """Keep only the smallest set of likeliest tokens with this much probability (Holtzman et al.,
    2020). 1 keeps all."""
    min_p: float = 0.0
    """Keep only tokens at least this fraction as likely as the likeliest (Nguyen et al., 2024)."""
    repetition_penalty: float = 1.0
    """Divides positive logits of tokens in the prompt or the answer so far, and multiplies negative
    ones (CTRL, Keskar et al., 2019, section 4.1). 1 changes nothing."""
    frequency_penalty: float = 0.0
    """Subtracted from a token's logit once for each time it was generated."""
    presence_penalty: float = 0.0
    """Subtracted from a token's logit once if it was generated."""
    seed: int | None = None
    """Seed of the random numbers. Defaults to a new one for every sequence."""
    logprobs: int | None = None
    """Number of likeliest tokens to report with the log-probability of the chosen one. Without it,
    none are reported."""
    first_logprobs: bool = False
    """Whether to report the log-probabilities of all tokens at the first place
    (`Choice.first_logprobs`)."""

    def __post_init__(self) -> None:
        _check_number("temperature", self.temperature, 0, 2)
        _check_whole("top_k", self.top_k, 0, 2**31 - 1)
        _check_number("top_p", self.top_p, 0, 1, above=True)
        _check_number("min_p", self.min_p, 0, 1)
        _check_number("repetition_penalty", self.repetition_penalty, 0.01, 100)
        _check_number("frequency_penalty", self.frequency_penalty, -2, 2)
        _check_number("presence_penalty", self.presence_penalty, -2, 2)
        if self.seed is not None:
            _check_whole("seed", self.seed, -(2**63), 2**63 - 1)
        if self.logprobs is not None:
            _check_whole("logprobs", self.logprobs, 0, MAX_LOGPROBS)

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW

    @property
    def penalized(self) -> bool:
        """Whether earlier tokens change the logits."""
        added = self.frequency_penalty != 0 or self.presence_penalty != 0
        return added or self.repetition_penalty != 1

    @property
    def filtered(self) -> bool:
        """Whether a filter may remove tokens before the draw."""
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0


def _check_number(name: str, value: float, low: float, high: float, *, above: bool = False) -> None:
    """Raise `InvalidRequest` unless `value` is a number from `low` to `high`, without `low` if
    `above`."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not (number and low <= value <= high and not (above and value == low)):
        bound = f"above {low} and at most {high}" if above else f"from {low} to {high}"
        raise InvalidRequest(f"{name} is {value!r:.80}; it must be a number {bound}")


def _check_whole(name: str, value: int, low: int, high: int) -> None:
    whole = isinstance(value, int) and not isinstance(value, bool)
    if not (whole and low <= value <= high):
        raise InvalidRequest(f"{name} is {value!r:.80}; it must be an integer from {low} to {high}")
