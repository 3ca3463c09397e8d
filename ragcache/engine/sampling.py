"""The arithmetic of sampling: penalties, shares, filters, draws and log-probabilities.

Probabilities become whole numbers of shares. A sum of integers does not depend on the order of its
terms, so neither the other rows nor the device change the drawn token. Filters keep or drop tokens
by their shares alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ragcache.engine.sampling_params import MAX_LOGPROBS, SamplingParams

# A float32 probability times a power of two is exact. Below 2**-40 a token is never drawn.
SHARES = 2**40
# A nucleus is mostly this small; sorting 150,000 tokens takes twenty times as long as finding it.
HEAD = 1024


def likeliest_tokens(logits: Tensor) -> Tensor:
    """The first of each row's largest logits, [R]; -1 if that is infinite or a logit is NaN."""
    largest, tokens = logits.max(dim=-1)
    return torch.where(largest.isfinite(), tokens, -1)


def logprobs_of(logits: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The log-probability of each row's token, [R], and the ids and log-probabilities of the
    likeliest. logits: [R, V]."""
    logprobs = logits.float().log_softmax(dim=-1)
    own = logprobs.gather(-1, tokens[:, None]).squeeze(-1)
    # As many for every row, so that ties do not depend on the other rows.
    top = logprobs.topk(min(MAX_LOGPROBS, logits.shape[-1]), dim=-1)
    return own, top.indices, top.values


def shares_of(logits: Tensor, temperatures: Sequence[float]) -> Tensor:
    """softmax(logits / temperature) in units of 2**-40, int64 [R, V]. logits: float32 [R, V], the
    largest of each row finite."""
    return float_shares(logits, _column(temperatures, logits, torch.float32)).to(torch.int64)


def float_shares(logits: Tensor, temperatures: Tensor) -> Tensor:
    """The same before they are cut to whole numbers, float32. temperatures: [R, 1]."""
    # The largest logit becomes 0 first, so that a small temperature cannot make it infinite.
    scaled = (logits - logits.amax(dim=-1, keepdim=True)).div_(temperatures)
    return scaled.softmax(dim=-1).mul_(SHARES)


def keep_likeliest(shares: Tensor, samplings: Sequence[SamplingParams], head: int = HEAD) -> Tensor:
    """Zeroes the shares of the tokens that top-k, top-p or min-p remove. int64 [R, V]."""
    vocabulary = shares.shape[-1]
    width = min(vocabulary, max(head, *(s.top_k for s in samplings)))
    likeliest = shares.topk(width, dim=-1).values  # [R, width], descending
    least = _least_of_top_k(likeliest, [s.top_k for s in samplings])  # [R, 1]
    if any(s.top_p < 1 for s in samplings):
        kept = torch.where(shares >= least, shares, 0)
        top_p = _column([s.top_p for s in samplings], shares)
        nucleus = _least_of_nucleus(kept, torch.where(likeliest >= least, likeliest, 0), top_p)
        least = torch.where(top_p < 1, torch.maximum(least, nucleus), least)
    min_p = _column([s.min_p for s in samplings], shares)
    least = torch.maximum(least, (min_p * likeliest[:, :1]).ceil().to(torch.int64))
    return torch.where(shares >= least, shares, 0)


def draw(shares: Tensor, uniforms: Sequence[float]) -> Tensor:
    """Token ids [R]: each row's distribution function inverted at its uniform number in
    [0, 1 - 2**-48]. shares: int64 [R, V], no row all zero."""
    cumulative = shares.cumsum(dim=-1)
    at = (_column(uniforms, shares) * cumulative[:, -1:]).to(torch.int64)  # [R, 1], below the total
    tokens = torch.searchsorted(cumulative, at, right=True)
    return tokens.clamp(max=shares.shape[-1] - 1).squeeze(-1)  # only rows of NaN need the clamp


def _least_of_top_k(likeliest: Tensor, top_k: Sequence[int]) -> Tensor:
    """The k-th largest share of each row, [R, 1]; 0 where top-k removes nothing."""
    width = likeliest.shape[-1]
    wanted = [k if k <= width else 0 for k in top_k]
    last = torch.tensor([max(k, 1) - 1 for k in wanted], device=likeliest.device)[:, None]
    used = torch.tensor([k > 0 for k in wanted], device=likeliest.device)[:, None]
    return torch.where(used, likeliest.gather(-1, last), 0)


def _least_of_nucleus(shares: Tensor, likeliest: Tensor, top_p: Tensor) -> Tensor:
    """The smallest share in each row's nucleus, [R, 1]. likeliest: the largest, descending."""
    mass = top_p * shares.sum(dim=-1, keepdim=True)
    least = _last_before(likeliest, mass)
    if likeliest.shape[-1] < shares.shape[-1]:
        open_end = (likeliest.sum(dim=-1, keepdim=True) < mass) & (top_p < 1)
        rows = open_end.squeeze(-1).nonzero().squeeze(-1)
        if len(rows):
            ordered = shares[rows].sort(dim=-1, descending=True).values
            least[rows] = _last_before(ordered, mass[rows])
    return least


def _last_before(descending: Tensor, mass: Tensor) -> Tensor:
    """The last share before the mass is reached. [R, 1]."""
    before = descending.cumsum(dim=-1) - descending
    count = (before < mass).sum(dim=-1, keepdim=True)
    return descending.gather(-1, (count - 1).clamp(min=0))


class TokenCounts:
    """The tokens that one sequence has seen, as tables over the vocabulary on the logits' device: a
    step costs the same however long the prompt and the answer are."""

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
            self._prompt.index_fill_(0, upload(known, torch.int64, logits.device), True)
            self._counts = torch.zeros(vocabulary, device=logits.device)
            self._prompt_tokens = frozenset()
        return self._prompt, self._counts

    def move(self, prompt: Tensor, counts: Tensor) -> None:
        """Keeps its tables in this memory, which holds them already."""
        self._prompt, self._counts = prompt, counts


@dataclass(frozen=True, slots=True)
class Penalties:
    """The penalties of some rows, as columns [R, 1]."""

    repetition: Tensor
    frequency: Tensor
    presence: Tensor

    @classmethod
    def of(cls, samplings: Sequence[SamplingParams], logits: Tensor) -> Penalties:
        return cls(
            _column([s.repetition_penalty for s in samplings], logits, logits.dtype),
            _column([s.frequency_penalty for s in samplings], logits, logits.dtype),
            _column([s.presence_penalty for s in samplings], logits, logits.dtype),
        )

    def apply(self, logits: Tensor, prompt: Tensor, counts: Tensor) -> Tensor:
        """float32 logits [R, V] as a new tensor: repetition first, then frequency and presence.
        prompt, counts: [R, V], see `TokenCounts.tables`."""
        generated = counts > 0
        repeated = torch.where(logits > 0, logits / self.repetition, logits * self.repetition)
        penalized = torch.where(prompt | generated, repeated, logits)
        return penalized - self.frequency * counts - self.presence * generated


def upload(values: Sequence[float], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Copy values to a device without waiting for its work."""
    if device.type != "cuda":
        return torch.tensor(values, dtype=dtype, device=device)
    pinned = torch.tensor(values, dtype=dtype, device="cpu", pin_memory=True)
    return pinned.to(device, non_blocking=True)


def _column(values: Sequence[float], like: Tensor, dtype: torch.dtype = torch.float64) -> Tensor:
    return upload(values, dtype, like.device)[:, None]
