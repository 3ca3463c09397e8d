"""Attention by definition, in float64, and random metadata with what each row sees."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from hypothesis import strategies as st
from torch import Tensor

from ragcache.attention import (
    AttentionMetadata,
    CausalBlock,
    PagedQueries,
    Rotation,
    SharedKV,
    SharedQueries,
)

LAYERS, KV_HEADS, BLOCK_SIZE = 2, 2, 4
LAYER = 1  # the one that tests compute; the other holds other numbers

Reader = tuple[int, int, int]


@dataclass(frozen=True, slots=True, eq=False)
class Seen:
    """Some of what a row sees. keys, values: [Hkv, S, D] float64; positions: [S]."""

    keys: Tensor
    values: Tensor
    positions: Tensor

    def until(self, end: int) -> Seen:
        return Seen(self.keys[:, :end], self.values[:, :end], self.positions[:end])


def definition(
    query: Tensor, seen: Sequence[Seen], scale: float, slopes: Tensor | None, position: float,
    *, window: int | None = None, softcap: float | None = None, sinks: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Softmax attention of one row [Hq, D] at `position` over all that it sees. sinks: [Hq], the
    score of one more key whose value is zero."""
    keys = torch.cat([each.keys for each in seen], 1)
    values = torch.cat([each.values for each in seen], 1)
    distance = torch.cat([each.positions for each in seen]) - position
    grouped = query.double().unflatten(0, (len(keys), -1))  # [Hkv, G, D]
    scores = (grouped @ keys.mT).flatten(0, 1) * scale  # [Hq, S]
    if softcap is not None:
        scores = softcap * (scores / softcap).tanh()
    if slopes is not None:
        scores = scores + slopes[:, None].to(scores) * distance
    if window is not None:
        scores = scores.masked_fill(distance <= -window, -torch.inf)
    count = scores.shape[1]
    if sinks is not None:
        scores = torch.cat([scores, sinks[:, None].to(scores)], 1)
    return (scores.softmax(-1)[:, :count].unflatten(0, (len(keys), -1)) @ values).flatten(0, 1)


def frequencies(rotated: int) -> Tensor:
    """[R/2] radians a position."""
    return 1000.0 ** (-torch.arange(0, rotated, 2, dtype=torch.float64) / rotated)


def moved(keys: Tensor, delta: float, rotated: int, *, interleaved: bool = False) -> Tensor:
    """Rotary keys [..., D] moved by `delta` positions: products of complex numbers."""
    half = rotated // 2
    left, right = slice(0, half), slice(half, rotated)
    if interleaved:
        left, right = slice(0, rotated, 2), slice(1, rotated, 2)
    pairs = torch.complex(keys[..., left], keys[..., right])
    pairs = pairs * torch.exp(1j * delta * frequencies(rotated).to(keys.device))
    turned = keys.double().clone()
    turned[..., left], turned[..., right] = pairs.real, pairs.imag
    return turned


@dataclass(frozen=True, slots=True)
class Shape:
    """The shape of a step's attention.

    requests: n new tokens that see each other, or, as -n, one row over n tokens in blocks.
    runs: the length of each, and its readers: rows first:end, and by how much it was moved for
    them, or where it starts under ALiBi.
    """

    requests: tuple[int, ...]
    runs: tuple[tuple[int, tuple[Reader, ...]], ...]
    seed: int = 0
    group: int = 2
    dim: int = 10
    loudness: float = 1.0  # of the runs' keys
    apart: float = 0.0  # how far the scores of own tokens lie below those of the runs

    @property
    def rows(self) -> list[tuple[int, int]]:
        ends = list(accumulate(max(n, 1) for n in self.requests))
        return list(zip([0, *ends], ends, strict=False))

    @property
    def rotated(self) -> int:
        return self.dim - 2


@st.composite
def shapes(draw: st.DrawFn) -> Shape:
    requests = draw(st.lists(st.integers(-9, 5).filter(bool), min_size=1, max_size=5))
    count = sum(max(n, 1) for n in requests)
    where = st.tuples(st.integers(0, count - 1), st.integers(1, count), st.integers(-300, 300))
    reader = where.map(lambda r: (r[0], min(r[0] + r[1], count), r[2]))
    readers = st.lists(reader, min_size=1, max_size=3).map(tuple)
    runs = draw(st.lists(st.tuples(st.integers(0, 12), readers), max_size=4))
    group = draw(st.sampled_from([1, 2, 3]))
    return Shape(tuple(requests), tuple(runs), draw(st.integers(0, 10_000)), group)


@dataclass(frozen=True, slots=True, eq=False)
class Scene:
    """Metadata with a layer's inputs, and what each row sees."""

    metadata: AttentionMetadata
    query: Tensor
    key: Tensor
    value: Tensor
    scale: float
    seen: list[list[Seen]]
    positions: Tensor

    @property
    def inputs(self) -> tuple[AttentionMetadata, int, Tensor, Tensor, Tensor]:
        return self.metadata, LAYER, self.query, self.key, self.value

    def expected(self) -> Tensor:
        """[T, Hq, D] float64."""
        rows = zip(self.query.transpose(0, 1), self.seen, self.positions.tolist(), strict=True)
        return torch.stack(
            [definition(q, seen, self.scale, self.metadata.slopes, at) for q, seen, at in rows]
        )


def make_scene(shape: Shape, dtype: torch.dtype = torch.float64, *, alibi: bool = False) -> Scene:
    """Everything random but the shape; in `dtype`, so that the definition sees the same."""
    return _Making(shape, dtype, alibi).scene()


class _Making:
    def __init__(self, shape: Shape, dtype: torch.dtype, alibi: bool) -> None:
        self.shape, self.dtype, self.alibi = shape, dtype, alibi
        self.generator = torch.Generator(torch.get_default_device()).manual_seed(shape.seed)
        self.count = shape.rows[-1][1]
        steps = torch.randint(1, 4, (self.count,), generator=self.generator)
        self.positions = 40 + steps.cumsum(0)
        self.seen: list[list[Seen]] = [[] for _ in range(self.count)]

    def scene(self) -> Scene:
        shape = self.shape
        heads = KV_HEADS * shape.group
        query, key, value = (self.normal(h, self.count) for h in (heads, KV_HEADS, KV_HEADS))
        shared_kv, queries, shared_index = self.shared()
        if shape.apart:  # by the last dimension, which does not turn
            query[..., -1] = 8
            key[..., -1] = self.below()
        blocks, paged, own_index = self.own(key, value)
        slopes = self.slopes(heads) if self.alibi else None
        positions = self.positions.float() if self.alibi else None
        metadata = AttentionMetadata(
            queries, shared_kv, blocks, paged, (), shared_index, own_index, slopes, positions
        )
        scale = shape.dim**-0.5
        return Scene(metadata, query, key, value, scale, self.seen, self.positions)

    def normal(self, *sizes: int) -> Tensor:
        drawn = torch.randn(*sizes, self.shape.dim, generator=self.generator, dtype=torch.float64)
        return drawn.to(self.dtype)

    def below(self) -> float:
        return -self.shape.apart * math.sqrt(self.shape.dim) / 8

    def slopes(self, heads: int) -> Tensor:
        exact = torch.promote_types(self.dtype, torch.float32)
        return 0.5 ** torch.arange(1, heads + 1, dtype=exact)

    def permutation(self, count: int) -> list[int]:
        return torch.randperm(count, generator=self.generator).tolist()

    def shared(self) -> tuple[tuple[SharedKV, ...], SharedQueries | None, Tensor]:
        found, rows, numbers = list[SharedKV](), list[int](), list[int]()
        for length, readers in self.shape.runs:
            around = self.normal(2, LAYERS, KV_HEADS, length + 5)  # a view, as of a pool
            keys, values = around[:, :, :, 2 : 2 + length]
            keys *= self.shape.loudness
            if self.shape.apart:
                keys[..., -1] = 0
            begin = len(rows)
            for first, end, number in readers:
                rows += range(first, end)
                numbers += [number] * (end - first)
                self.show(keys[LAYER], values[LAYER], range(first, end), number)
            found.append(SharedKV(keys, values, begin, len(rows)))
        return tuple(found), self.queries(rows, numbers), self.index(rows)

    def show(self, keys: Tensor, values: Tensor, rows: Sequence[int], number: int) -> None:
        keys, values = keys.double(), values.double()
        if not self.alibi:
            keys = moved(keys, number, self.shape.rotated)
        where = torch.arange(number, number + keys.shape[1])
        for row in rows:
            self.seen[row].append(Seen(keys, values, where))

    def queries(self, rows: list[int], numbers: list[int]) -> SharedQueries | None:
        if not rows:
            return None
        reading, given = torch.tensor(rows), torch.tensor(numbers)
        if self.alibi:
            return SharedQueries(reading, None, (given - self.positions[reading]).float())
        if not any(numbers):
            return SharedQueries(reading)
        angles = -given[:, None, None] * frequencies(self.shape.rotated)  # [M, 1, R/2]
        return SharedQueries(reading, Rotation(angles.cos(), angles.sin()))

    def index(self, reading: list[int]) -> Tensor:
        """Every row's results in slots of its own choice, with holes between them."""
        places = [[at for at, row in enumerate(reading) if row == t] for t in range(self.count)]
        slots = max(map(len, places)) + (1 if reading else 0)
        index = torch.full((slots, self.count), len(reading))
        for row, found in enumerate(places):
            chosen = self.permutation(slots)[: len(found)]
            index[chosen, row] = torch.tensor(found, dtype=torch.int64)
        return index

    def own(
        self, key: Tensor, value: Tensor
    ) -> tuple[tuple[CausalBlock, ...], PagedQueries | None, Tensor | None]:
        requests = list(zip(self.shape.requests, self.shape.rows, strict=True))
        blocks = [rows for n, rows in requests if n > 0]
        blocks = [blocks[i] for i in self.permutation(len(blocks))]
        for begin, end in blocks:
            for row in range(begin, end):
                here = slice(begin, row + 1)
                keys, values = key[:, here].double(), value[:, here].double()
                self.seen[row].append(Seen(keys, values, self.positions[here]))
        tails = [(begin, -n) for n, (begin, _) in requests if n < 0]
        order = [row for begin, end in blocks for row in range(begin, end)]
        order += [row for row, _ in tails]
        own = None if order == sorted(order) else torch.tensor(order).argsort()
        paged = self.paged(tails) if tails else None
        return tuple(CausalBlock(*rows) for rows in blocks), paged, own

    def paged(self, tails: list[tuple[int, int]]) -> PagedQueries:
        """Blocks in any order; what lies behind the last token is loud, and hidden."""
        needed = [-(-length // BLOCK_SIZE) for _, length in tails]
        keys, values = (self.normal(LAYERS, KV_HEADS, BLOCK_SIZE * sum(needed)) for _ in range(2))
        if self.shape.apart:
            keys[..., -1] = self.below()
        free = self.permutation(sum(needed))
        blocks = torch.randint(sum(needed), (len(tails), max(needed)), generator=self.generator)
        mask = torch.full((len(tails), max(needed) * BLOCK_SIZE), -torch.inf, dtype=self.dtype)
        distance = torch.zeros(mask.shape)
        for at, ((row, length), count) in enumerate(zip(tails, needed, strict=True)):
            taken, free = free[:count], free[count:]
            blocks[at, :count], mask[at, :length] = torch.tensor(taken), 0
            tokens = [block * BLOCK_SIZE + i for block in taken for i in range(BLOCK_SIZE)]
            keys[:, :, tokens[length:]] *= 50
            values[:, :, tokens[length:]] *= 50
            away = 2 * torch.arange(1 - length, 1)  # every second position, up to the row's own
            distance[at, :length] = away.float()
            self.seen[row].append(
                Seen(
                    keys[LAYER, :, tokens[:length]].double(),
                    values[LAYER, :, tokens[:length]].double(),
                    self.positions[row] + away,
                )
            )
        rows = torch.tensor([row for row, _ in tails])
        away_of = distance if self.alibi else None
        return PagedQueries(keys, values, BLOCK_SIZE, rows, blocks, mask, away_of)
