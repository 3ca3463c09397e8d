"""A step of the device for tests: rows attend to their own tokens, by PyTorch."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


class OwnTokens:
    """One request of new tokens alone. Remembers the layers that asked."""

    def __init__(self) -> None:
        self.layers: list[int] = []

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float,
        sinks: Tensor | None = None,
    ) -> Tensor:
        assert sinks is None
        self.layers.append(layer)
        states = (each.contiguous() for each in (query, key, value))  # the same sums at any strides
        out = scaled_dot_product_attention(*states, is_causal=True, scale=scale, enable_gqa=True)
        return out.transpose(1, 2).contiguous()
