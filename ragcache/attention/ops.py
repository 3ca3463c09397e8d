"""Partial attention and its exact fusion.

Attention over a context that is split into disjoint key sets equals the sum of the partial outputs
weighted by their shares of the softmax denominator (RelayAttention §3.2 and eq. 7, Hydragen §3.1).
Every partial result therefore carries the natural logarithm of its denominator, `lse`, in float32.

Query heads are grouped: [Hkv, N, G, D] holds, for each key head, N query rows of the G heads that
read it (Hq = Hkv * G). The rows and heads of a group are rows of one product over the same keys, so
that no key is ever repeated.

Segments are moved without touching their keys. Rotary keys carry their rotation at the position
where they were encoded. Moving a segment by `delta` multiplies its keys by R(delta), and
q·R(delta)k = (R(-delta)q)·k: the query turns back. Rotations compose by adding angles (RoFormer
eq. 16), so this is exact.

ALiBi adds slope*(key position - query position) to a score, head by head (Press et al., 2022, §3),
so that moving a segment changes nothing but distances.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Partial:
    """Attention of some query rows over some of their keys. Any strides."""

    out: Tensor
    """[N, Hkv, G, D] in the query's dtype, rows first."""
    lse: Tensor
    """[N, Hkv, G], natural logarithm, float32 (float64 if the inputs are)."""


def grouped(query: Tensor, num_kv_heads: int) -> Tensor:
    """A view of [Hq, N, D] as [Hkv, N, G, D]: query head h reads key head h // G."""
    heads, rows, dim = query.shape
    return query.view(num_kv_heads, heads // num_kv_heads, rows, dim).transpose(1, 2)


def partial_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scale: float,
    bias: Tensor | None = None,
    softcap: float | None = None,
) -> Partial:
    """Attention by definition: plain products and a softmax in float32, on any device and dtype.

    query: [Hkv, N, G, D]; key, value: [Hkv, S, D], or [Hkv, N, S, D] where every row has its own
    keys; bias: added to the scores, broadcast to [Hkv, N, G, S]; minus infinity hides a key. A row
    that sees none has an output of zero and an `lse` of minus infinity. softcap: scores are
    cap * tanh(score / cap) before the bias.
    """
    exact = torch.promote_types(query.dtype, torch.float32)
    heads, count, group, _ = query.shape
    together = key.dim() == 3  # rows that share keys are one product: no key is repeated for them
    rows = query.to(exact).flatten(1, 2) if together else query.to(exact)
    scores = (rows @ key.to(exact).transpose(-1, -2)).mul_(scale)
    scores = scores.view(heads, count, group, -1)
    if softcap is not None:
        scores.div_(softcap).tanh_().mul_(softcap)
    if bias is not None:
        scores += bias
    lse = scores.logsumexp(dim=-1)  # [Hkv, N, G]
    shift = lse.masked_fill(lse == -torch.inf, 0)  # where a row sees no key
    weights = scores.sub_(shift[..., None]).exp_()
    out = (weights.flatten(1, 2) if together else weights) @ value.to(exact)
    out = out.view(heads, count, group, -1).to(query.dtype)
    return Partial(out.transpose(0, 1), lse.transpose(0, 1))


def causal_bias(rows: slice, device: torch.device) -> Tensor:
    """[N, 1, S]: of new tokens 0...S-1, row t of `rows` sees those up to t. N: of the rows, which
    end at S."""
    size = (rows.stop - rows.start, rows.stop)
    hidden = torch.ones(size, dtype=torch.bool, device=device).triu(1 + rows.start)
    return torch.zeros(size, device=device).masked_fill_(hidden, -torch.inf)[:, None]


def window_bias(distance: Tensor, window: int) -> Tensor:
    """[N, 1, S]: 0 where a row sees a key, else minus infinity. distance: [N, S], from the row's
    position to the key's; a window of W shows the W positions up to the row's own."""
    hidden = torch.zeros_like(distance).masked_fill_(distance <= -window, -torch.inf)
    return hidden[:, None]


def add_sinks(part: Partial, sinks: Tensor) -> Partial:
    """The result with one more key a head, whose score is given and whose value is zero (attention
    sinks: Xiao et al., 2024; gpt-oss). sinks: [Hq]."""
    scores = sinks.to(part.lse.dtype).view(part.lse.shape[1:])
    share = (part.lse - scores).sigmoid()[..., None]
    return Partial((part.out * share).to(part.out.dtype), torch.logaddexp(part.lse, scores))


def merge_states(own: Partial, shared: Sequence[Partial], shared_index: Tensor) -> Partial:
    """Joins every row's partial result over its own tokens with those over shared states, which are
    disjoint key sets (RelayAttention eq. 7).

    own: of all T rows; shared: M rows in all. shared_index: [slots, T] int64, the places of a row's
    results among the M, M for an empty slot.
    """
    # an empty slot weighs nothing, and 0 * NaN would be NaN: it reads zeros, not another row
    zeros = shared[0].out.new_zeros(1, *shared[0].out.shape[1:])
    out = torch.cat([*(part.out for part in shared), zeros])  # [M + 1, Hkv, G, D]
    empty = own.lse.new_full((1, *own.lse.shape[1:]), -torch.inf)
    lse = torch.cat([*(part.lse for part in shared), empty])  # [M + 1, Hkv, G]
    every = torch.cat([own.lse[None], lse[shared_index]])  # [1 + slots, T, Hkv, G]
    weights = every.softmax(dim=0)[..., None]
    joined = own.out * weights[0]
    for row, weight in zip(shared_index, weights[1:], strict=True):
        joined.addcmul_(out[row].to(weight.dtype), weight)
    return Partial(joined.to(own.out.dtype), every.logsumexp(dim=0))


@dataclass(frozen=True, slots=True, eq=False)
class Rotation:
    """Cosines and sines of the angles by which rows turn."""

    cos: Tensor
    """[T or 1, R/2], R the rotated width, or any shape that broadcasts over the rows."""
    sin: Tensor
    interleaved: bool = False
    """Whether dimensions 2i and 2i+1 turn together (GPT-J layout), not i and i + R/2 (GPT-NeoX)."""

    @classmethod
    def by(cls, delta: Tensor, inverse_frequency: Tensor, *, interleaved: bool = False) -> Rotation:
        """R(delta). delta: [T or 1], in positions; inverse_frequency: [R/2], radians a position."""
        angle = delta.to(torch.float32)[:, None] * inverse_frequency.to(torch.float32)
        return cls(angle.cos(), angle.sin(), interleaved)

    def part(self, begin: int, end: int) -> Rotation:
        """Rows begin:end."""
        return Rotation(self.cos[begin:end], self.sin[begin:end], self.interleaved)


def over_heads(
    rotation: Rotation | tuple[Rotation, ...] | None,
) -> Rotation | tuple[Rotation, ...] | None:
    """Broadcast a rotation, or one rotation per layer, over the heads of each row: [T, 1, R/2]."""
    if isinstance(rotation, tuple):
        once = {id(each): _over_heads(each) for each in rotation}
        return tuple(once[id(each)] for each in rotation)
    return None if rotation is None else _over_heads(rotation)


def _over_heads(rotation: Rotation) -> Rotation:
    return Rotation(rotation.cos[:, None], rotation.sin[:, None], rotation.interleaved)


def rotate(x: Tensor, rotation: Rotation) -> Tensor:
    """Turns the rows of x, [..., D], by `rotation`, in float32 or wider if x is. Returns the shape
    of x, contiguous. Dimensions beyond the rotated width pass through."""
    cos, sin = rotation.cos, rotation.sin
    half = cos.shape[-1]
    if rotation.interleaved:
        first, second = slice(0, 2 * half, 2), slice(1, 2 * half, 2)
    else:
        first, second = slice(0, half), slice(half, 2 * half)
    exact = torch.promote_types(x.dtype, torch.float32)
    left, right = x[..., first].to(exact), x[..., second].to(exact)
    turned = x.new_empty(x.shape)
    turned[..., first] = torch.addcmul(left * cos, right, sin, value=-1)
    turned[..., second] = torch.addcmul(right * cos, left, sin)
    turned[..., 2 * half :] = x[..., 2 * half :]
    return turned


def alibi_bias(slopes: Tensor, distance: Tensor, kv_heads: int) -> Tensor:
    """[Hkv, N, G, S] for rows whose keys are at the distances [N, S], key less query."""
    return slopes.view(kv_heads, 1, -1, 1) * distance[:, None]
