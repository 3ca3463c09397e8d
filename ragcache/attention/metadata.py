"""What one forward pass attends to, as flat tensors.

A step flattens the new tokens of all requests to rows 0..T-1. The plan says which rows ask each run
of states, and how their queries turn for it, so that a run is read once however many requests share
it (RelayAttention, Hydragen), in whatever order they hold it. A backend needs nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from ragcache.attention.ops import Rotation


@dataclass(frozen=True, slots=True, eq=False)
class SharedQueries:
    """The rows that ask the runs, one run after another.

    rows: [M] int64. rotation: how each query turns, cos and sin [M, 1, R/2]; None where no run was
    moved. distance: [M] float32, from the row's position to the run's first key, where the
    position scheme is a bias (ALiBi).
    """

    rows: Tensor
    rotation: Rotation | None = None
    distance: Tensor | None = None


@dataclass(frozen=True, slots=True, eq=False)
class RunRows:
    """A contiguous run of states that the asking rows begin:end attend to, all of it.

    keys, values: [L, Hkv, S, D].
    """

    keys: Tensor
    values: Tensor
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class CausalBlock:
    """New tokens of one request: the step's rows begin:end see each other causally."""

    begin: int
    end: int


@dataclass(frozen=True, slots=True, eq=False)
class PageRows:
    """Rows that each attend to pages of their own, all in one product.

    keys, values: [L, Hkv, pages * chunk, D], the pool; rows: [B] int64; pages: [B, P] int64, one
    of its own again where a row has fewer; mask: [B, P * chunk], 0 or minus infinity, in the dtype
    of the states; distance: [B, P * chunk] float32, from the row's position to the key, for ALiBi.
    """

    keys: Tensor
    values: Tensor
    chunk: int
    rows: Tensor
    pages: Tensor
    mask: Tensor
    distance: Tensor | None = None

    def gather(self, states: Tensor) -> Tensor:
        """The pages of one layer's states, row by row: [Hkv, B, P * chunk, D]."""
        heads, tokens, dim = states.shape
        pages = states.view(heads, tokens // self.chunk, self.chunk * dim)
        picked = pages.index_select(1, self.pages.flatten())
        return picked.view(heads, len(self.rows), -1, dim)


class Write(Protocol):
    """Where new keys and values go."""

    def write(self, layer: int, key: Tensor, value: Tensor) -> None:
        """key, value: [Hkv, T, D], of all rows of the step."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class PageWrite:
    """Into pages: row rows[i] goes to token index[i] of the pool. `rows` is None for all rows."""

    keys: Tensor
    values: Tensor
    index: Tensor
    rows: Tensor | None = None

    def write(self, layer: int, key: Tensor, value: Tensor) -> None:
        if self.rows is not None:
            key, value = key.index_select(1, self.rows), value.index_select(1, self.rows)
        self.keys[layer].index_copy_(1, self.index, key)
        self.values[layer].index_copy_(1, self.index, value)


@dataclass(frozen=True, slots=True, eq=False)
class RunWrite:
    """Into a contiguous run: rows begin:end go to the tokens from `past` on."""

    keys: Tensor
    values: Tensor
    past: int
    begin: int
    end: int

    def write(self, layer: int, key: Tensor, value: Tensor) -> None:
        until = self.past + self.end - self.begin
        self.keys[layer, :, self.past : until] = key[:, self.begin : self.end]
        self.values[layer, :, self.past : until] = value[:, self.begin : self.end]


@dataclass(frozen=True, slots=True, eq=False)
class AttentionMetadata:
    """All that attention needs for one step over T rows.

    Every row has one partial result over its request's own tokens, from a square or from the
    pages; `own` ([T] int64) says where it stands among those of the squares and then the pages,
    None where that is the order of the rows. table: [slots, T] int64, where the row's partial
    results over runs stand among the M asking rows, M for none. slopes: [Hq] float32 and positions:
    [T] float32 where the position scheme is a bias (ALiBi).
    """

    asking: SharedQueries | None
    runs: tuple[RunRows, ...]
    squares: tuple[CausalBlock, ...]
    pages: PageRows | None
    writes: tuple[Write, ...]
    table: Tensor
    own: Tensor | None = None
    slopes: Tensor | None = None
    positions: Tensor | None = None

    def write(self, layer: int, key: Tensor, value: Tensor) -> None:
        """Keeps the step's own states of a layer. key, value: [Hkv, T, D]."""
        for write in self.writes:
            write.write(layer, key, value)
