"""Sampling from logits whose columns several ranks have.

Where every next token is the likeliest one, ranks exchange the largest logit of each row and its
token. All other rows are gathered by the leader, which samples.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import torch
from torch import Tensor

from ragcache.engine.sampler import LIKELIEST_BLOCK, PendingTokens, Sampler, SamplerState

Joined = Callable[[Tensor], Tensor]


def likeliest_pairs(logits: Tensor, first: int, *, kernels: bool) -> Tensor:
    """Return the largest logit of each row, or NaN, and its token, float64 [R, 2].

    Args:
        logits: Some columns of the logits, [R, C].
        first: Token of the first column.
        kernels: Whether a Triton kernel finds them, in one launch.
    """
    if not kernels:
        largest, tokens = logits.max(dim=-1)
        return torch.stack([largest.double(), (tokens + first).double()], 1)
    from ragcache.engine.sampling_kernels import pairs_kernel

    count, columns = logits.shape
    pairs = torch.empty(count, 2, dtype=torch.float64, device=logits.device)
    pairs_kernel[(count,)](
        logits, logits.stride(0), pairs, columns, first, BLOCK=LIKELIEST_BLOCK, num_warps=16
    )
    return pairs


class SplitSampler(Sampler):
    """The leader's sampler.

    Args:
        device: The device of the logits.
        columns: Columns of all logits. Logits with fewer are the leader's part.
        gather: Returns the logits of all ranks, given the leader's part.
        gather_pairs: Returns `likeliest_pairs` of all ranks, float64 [R, ranks * 2].
        kernels: See `Sampler`.
    """

    def __init__(
        self,
        device: torch.device,
        columns: int,
        gather: Joined,
        gather_pairs: Joined,
        *,
        kernels: bool = False,
    ) -> None:
        super().__init__(device, kernels=kernels)
        self._columns, self._gather, self._gather_pairs = columns, gather, gather_pairs
        self._states: Sequence[SamplerState] = ()
        self._plain = False

    @torch.inference_mode()
    def launch(
        self,
        logits: Tensor,
        states: Sequence[SamplerState],
        forbidden: Sequence[Collection[int]] | None = None,
        masks: Sequence[Tensor | None] | None = None,
    ) -> PendingTokens:
        """See `Sampler.launch`. `logits` are the leader's part, or all columns."""
        if not states or logits.shape[1] == self._columns:
            return super().launch(logits, states, forbidden, masks)
        if states is not self._states:
            self._states = states
            self._plain = all(each.plain and not each.sampling.first_logprobs for each in states)
        masked = masks is not None and any(mask is not None for mask in masks)
        if not self._plain or masked or (forbidden is not None and any(forbidden)):
            return super().launch(self._gather(logits), states, forbidden, masks)
        return self.choose(self._gather_pairs(logits), states)

    def choose(self, pairs: Tensor, states: Sequence[SamplerState]) -> PendingTokens:
        """Choose the likeliest token of each row, by the pairs of all ranks."""
        if not self._kernels:
            values, tokens = pairs[:, 0::2].max(dim=-1)
            chosen = pairs[:, 1::2].gather(1, tokens[:, None])[:, 0].long()
            chosen = torch.where(values.isfinite(), chosen, -1)
            return self._pending(states, chosen, chosen.clamp(min=0))
        from ragcache.engine.sampling_kernels import choose_kernel

        count = len(pairs)
        on_gpu = self.device.type == "cuda"
        host = torch.empty(count, dtype=torch.int64, device="cpu", pin_memory=on_gpu)
        inputs = torch.empty(count, dtype=torch.int64, device=self.device)
        choose_kernel[(count,)](pairs, inputs, host, PARTS=pairs.shape[1] // 2, num_warps=1)
        return self._pending(states, host, inputs)
