"""ALiBi: a bias of slope times distance, head by head (Press et al., 2022, §3).

States carry no position. Moving a segment changes its distance alone, which a step's plan holds
(`ragcache.attention.alibi`).

The slopes are a geometric series for a power of two heads. For other numbers of heads BLOOM and
Falcon take the series of the power below and fill up from the series of the power above; MPT takes
the series of the power above, every second slope first.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


class Alibi:
    """slopes: [Hq] float32, added to a score for each position that the key stands further on."""

    movable = True
    name = "alibi"  # the slopes follow from the configuration, which the fingerprint holds

    def __init__(self, slopes: Tensor) -> None:
        assert slopes.dtype == torch.float32
        self.slopes = slopes

    def relocation(self, delta: Tensor) -> None:  # noqa: ARG002
        """No query turns: the plan's distances move the segment."""
        return


def geometric_slopes(num_heads: int) -> Tensor:
    """[Hq] float32, as BLOOM and Falcon have them."""
    below = 2 ** math.floor(math.log2(num_heads))
    slopes = _series(below, 8.0)
    if below == num_heads:
        return slopes
    between = _series(2 * below, 8.0)[::2]
    return torch.cat([slopes, between[: num_heads - below]])


def interleaved_slopes(num_heads: int, bias_max: float) -> Tensor:
    """[Hq] float32, as MPT has them. bias_max: the negative exponent of the last slope."""
    above = 2 ** math.ceil(math.log2(num_heads))
    slopes = _series(above, bias_max)
    if above == num_heads:
        return slopes
    return torch.cat([slopes[1::2], slopes[::2]])[:num_heads]


def _series(count: int, bias_max: float) -> Tensor:
    """2^(-bias_max * i / count) for i = 1..count."""
    exponents = torch.arange(1, count + 1, dtype=torch.float64) * (bias_max / count)
    return torch.pow(2.0, -exponents).to(torch.float32)
