"""A Llama or Qwen2 of a GGUF file in plain torch, over complete caches of keys and values."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional


@dataclass(frozen=True, slots=True)
class Shape:
    layers: int
    heads: int
    kv_heads: int
    head: int
    epsilon: float
    base: float


class PlainModel:
    """A Llama or Qwen2 in float32, over caches [L, B, Hkv, N, D]."""

    def __init__(
        self, shape: Shape, weights: dict[str, Tensor], device: str, positions: int = 5120
    ) -> None:
        """Take weights by their names in GGUF files, in the layout of Hugging Face's models."""
        self.shape, self.device = shape, device
        self.weights = {name: each.to(device).contiguous() for name, each in weights.items()}
        self.halved = False
        """Whether products are computed in bfloat16."""
        self._halves: dict[str, Tensor] = {}
        half = shape.head // 2
        self.frequencies = shape.base ** (-torch.arange(half, dtype=torch.float64) / half)
        angles = torch.arange(positions)[:, None] * self.frequencies
        self.cos, self.sin = angles.cos().float().to(device), angles.sin().float().to(device)

    @classmethod
    def read(cls, file: Path, device: str) -> PlainModel:
        """Read a GGUF file."""
        from gguf import GGUFReader, dequantize

        reader = GGUFReader(file)
        family = reader.fields["general.architecture"].contents()

        def number(name: str) -> Any:
            return reader.fields[f"{family}.{name}"].contents()

        def weight(tensor: Any) -> tuple[str, Tensor]:
            found = torch.tensor(dequantize(tensor.data, tensor.tensor_type), dtype=torch.float32)
            return tensor.name, found

        heads, width = number("attention.head_count"), number("embedding_length")
        shape = Shape(
            number("block_count"), heads, number("attention.head_count_kv"), width // heads,
            number("attention.layer_norm_rms_epsilon"), number("rope.freq_base"),
        )  # fmt: skip
        with ThreadPoolExecutor(8) as pool:
            weights = dict(pool.map(weight, reader.tensors))
        if family == "llama":  # GGUF stores these rows in the order of interleaved pairs
            for name in [n for n in weights if ".attn_q." in n or ".attn_k." in n]:
                count = heads if ".attn_q." in name else shape.kv_heads
                own = weights[name]
                weights[name] = own.view(count, -1, 2, width).transpose(1, 2).reshape(own.shape)
        return cls(shape, weights, device)

    def cache(self, batch: int, length: int) -> Cache:
        s = self.shape
        empty = torch.zeros(2, s.layers, batch, s.kv_heads, length, s.head, device=self.device)
        return Cache(empty[0], empty[1])

    def _norm(self, x: Tensor, name: str) -> Tensor:
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.shape.epsilon)
        return x * self.weights[f"{name}.weight"]

    def _linear(self, x: Tensor, name: str) -> Tensor:
        bias = self.weights.get(f"{name}.bias")
        found = self._product(x, f"{name}.weight")
        return found if bias is None else found + bias

    def _product(self, x: Tensor, name: str) -> Tensor:
        if not self.halved:
            return functional.linear(x, self.weights[name])
        if name not in self._halves:
            self._halves[name] = self.weights[name].bfloat16()
        return functional.linear(x.bfloat16(), self._halves[name]).float()

    def logits(self, hidden: Tensor) -> Tensor:
        name = "output.weight" if "output.weight" in self.weights else "token_embd.weight"
        return self._product(hidden, name)

    def turned(self, keys: Tensor, delta: int) -> Tensor:
        """Return keys [..., D] moved by `delta` positions."""
        sin = self.sin[abs(delta)]
        return _rotated(keys, self.cos[abs(delta)], sin if delta >= 0 else -sin)

    def rotated(self, keys: Tensor, begin: int) -> Tensor:
        """Return keys [..., S, D] turned to positions `begin` and following."""
        here = slice(begin, begin + keys.shape[-2])
        return _rotated(keys, self.cos[here], self.sin[here])

    def unrotated(self, keys: Tensor, begin: int) -> Tensor:
        """Return keys [..., S, D] of positions `begin` and following, turned to position 0."""
        here = slice(begin, begin + keys.shape[-2])
        return _rotated(keys, self.cos[here], -self.sin[here])

    def forward(
        self,
        tokens: Tensor,
        rows: Tensor,
        cache: Cache,
        bias: Tensor | None = None,
        scale: Tensor | None = None,
        drawn: Tensor | None = None,
    ) -> Tensor:
        """Compute rows [B, R] of caches, and return their final states [B, R, d].

        Row n sees the rows up to n. A row may occur twice with the same token.

        Args:
            tokens: Token ids [B, R].
            rows: Rows of the cache, which are positions, [B, R].
            cache: Receives keys and values.
            bias: Constant [B, N] on the scores of each row.
            scale: Factor [B, N] of the scores of each row.
            drawn: Receives the attention [B, N] of all computed rows, summed over them, heads and
                layers.
        """
        s = self.shape
        batch, count = tokens.shape
        x = self.weights["token_embd.weight"][tokens]
        cos, sin = self.cos[rows][:, :, None], self.sin[rows][:, :, None]
        which = torch.arange(batch, device=x.device)[:, None]
        length = int(rows.max()) + 1
        hidden = torch.arange(length, device=x.device) > rows[..., None]
        mask = torch.zeros(hidden.shape, device=x.device).masked_fill_(hidden, -1e30)
        if bias is not None:
            mask += bias[:, None, :length]
        mask = mask[:, None, None]
        for layer in range(s.layers):
            name = f"blk.{layer}"
            h = self._norm(x, f"{name}.attn_norm")
            q = self._linear(h, f"{name}.attn_q").view(batch, count, s.heads, s.head)
            k = self._linear(h, f"{name}.attn_k").view(batch, count, s.kv_heads, s.head)
            v = self._linear(h, f"{name}.attn_v").view(batch, count, s.kv_heads, s.head)
            cache.keys[layer][which, :, rows] = _rotated(k, cos, sin)
            cache.values[layer][which, :, rows] = v
            keys, values = cache.keys[layer][:, :, :length], cache.values[layer][:, :, :length]
            q = _rotated(q, cos, sin) * s.head**-0.5
            q = q.view(batch, count, s.kv_heads, -1, s.head).permute(0, 2, 3, 1, 4)
            scores = q.flatten(2, 3) @ keys.transpose(-1, -2)
            scores = scores.view(batch, s.kv_heads, -1, count, length)
            if scale is not None:
                scores = scores * scale[:, None, None, None, :length]
            shares = scores.add_(mask).softmax(-1)
            if drawn is not None:
                drawn[:, :length] += shares.sum((1, 2, 3))
            out = shares.flatten(2, 3) @ values
            out = out.view(batch, s.kv_heads, -1, count, s.head).permute(0, 3, 1, 2, 4)
            x = x + self._linear(out.reshape(batch, count, -1), f"{name}.attn_output")
            h = self._norm(x, f"{name}.ffn_norm")
            h = functional.silu(self._linear(h, f"{name}.ffn_gate")) * self._linear(
                h, f"{name}.ffn_up"
            )
            x = x + self._linear(h, f"{name}.ffn_down")
        return self._norm(x, "output_norm")


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    one, other = x.chunk(2, -1)
    return torch.cat([one * cos - other * sin, other * cos + one * sin], -1)


@dataclass(slots=True)
class Cache:
    """Keys and values [L, B, Hkv, N, D]."""

    keys: Tensor
    values: Tensor
