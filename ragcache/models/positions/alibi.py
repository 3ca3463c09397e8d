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
    """[Hq] float32, as BLOOM and Falcon have them, to the bit."""
    below = 2 ** math.floor(math.log2(num_heads))
    between = _powers(2 * below, torch.arange(1, 2 * (num_heads - below) + 1, 2))
    return torch.cat([_powers(below, torch.arange(1, below + 1)), between])


def interleaved_slopes(num_heads: int, bias_max: float) -> Tensor:
    """[Hq] float32, as MPT has them, to the bit. bias_max: the last slope's negative exponent."""
    above = 2 ** math.ceil(math.log2(num_heads))
    exponents = torch.arange(1, above + 1, dtype=torch.float32) * (bias_max / above)
    slopes = 1.0 / torch.pow(2, exponents)
    if above == num_heads:
        return slopes
    return torch.cat([slopes[1::2], slopes[::2]])[:num_heads]


def _powers(count: int, exponents: Tensor) -> Tensor:
    """The slopes of a series for `count` heads, a power of two, at exponents 1 and above. The base
    is rounded to float32 before it is raised, as in the models' own code."""
    base = torch.tensor(2.0 ** -(8.0 / count), dtype=torch.float32)
    return torch.pow(base, exponents.to(torch.int32))
