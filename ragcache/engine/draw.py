"""Drawing a token from a row of logits, in exact arithmetic.

Probabilities are turned into whole numbers of shares. Sums of integers do not depend on the order
in which they are added, so neither the rows beside a row nor the device's way of summing can change
what is drawn; and tokens are kept or dropped by their shares alone, never by how a device happens
to order equal ones.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ragcache.engine.sampling import Sampling

# A float32 probability times a power of two is exact. Below 2**-40 a token is never drawn.
SHARES = 2**40
# A nucleus is mostly this small; sorting 150,000 tokens takes twenty times as long as finding it.
HEAD = 1024


def shares_of(logits: Tensor, temperatures: Sequence[float]) -> Tensor:
    """softmax(logits / temperature) in units of 2**-40.

    logits: float32 [R, V], the largest of each row finite. Returns int64 [R, V].
    """
    divisors = torch.tensor(temperatures, dtype=torch.float32, device=logits.device)[:, None]
    # The largest logit becomes 0 first, so that a small temperature cannot make it infinite.
    scaled = (logits - logits.amax(dim=-1, keepdim=True)).div_(divisors)
    return scaled.softmax(dim=-1).mul_(SHARES).to(torch.int64)


def keep_likeliest(shares: Tensor, samplings: Sequence[Sampling], head: int = HEAD) -> Tensor:
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
    """Inverts each row's distribution function at its uniform number in [0, 1 - 2**-48].

    shares: int64 [R, V], no row all zero. Returns token ids [R].
    """
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
    """The last share that stands before the mass is reached. [R, 1]."""
    before = descending.cumsum(dim=-1) - descending
    count = (before < mass).sum(dim=-1, keepdim=True)
    return descending.gather(-1, (count - 1).clamp(min=0))


def _column(values: Sequence[float], like: Tensor) -> Tensor:
    return torch.tensor(values, dtype=torch.float64, device=like.device)[:, None]
