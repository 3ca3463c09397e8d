"""What one forward pass attends to, as flat tensors.

A step flattens the new tokens of all requests to rows 0..T-1. The metadata says which rows read
which shared states, and how their queries turn for them, so that states are read once however many
requests share them (RelayAttention, Hydragen), in whatever order the prompts hold them. A backend
needs nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from torch import Tensor

from ragcache.attention.ops import Rotation, rotate


@dataclass(frozen=True, slots=True, eq=False)
class SharedQueries:
    """The query rows that read shared states, in the order of `AttentionMetadata.shared_kv`. A row
    appears once for each of the states that it reads; M entries in all.

    rows: [M] int64. rotation: how each query turns, cos and sin [M, 1, R/2], one for each layer
    where layers differ; None where no states were moved. distance: [M] float32, from the row's
    position to the first key that it reads, where the position scheme is a bias (ALiBi) or a layer
    has a window.
    """

    rows: Tensor
    rotation: Rotation | tuple[Rotation, ...] | None = None
    distance: Tensor | None = None

    def turn_rows(self, rows: Tensor, layer: int) -> Tensor:
        """The queries of one layer, turned for the states that they read: [Hkv, M, G, D]. rows:
        [Hkv, T, G, D]."""
        picked = rows.index_select(1, self.rows)
        if self.rotation is None:
            return picked
        turning = self.rotation[layer] if isinstance(self.rotation, tuple) else self.rotation
        return rotate(picked, turning)

    def part(self, begin: int, end: int) -> SharedQueries:
        """Entries begin:end."""
        rotation = self.rotation
        if isinstance(rotation, tuple):
            once = {id(each): each.part(begin, end) for each in rotation}
            rotation = tuple(once[id(each)] for each in rotation)
        elif rotation is not None:
            rotation = rotation.part(begin, end)
        distance = None if self.distance is None else self.distance[begin:end]
        return SharedQueries(self.rows[begin:end], rotation, distance)


@dataclass(frozen=True, slots=True, eq=False)
class SharedKV:
    """Contiguous states that entries begin:end of the `SharedQueries` attend to, all of them.

    keys, values: [L, Hkv, S, D].
    """

    keys: Tensor
    values: Tensor
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class CausalBlock:
    """New tokens of one request: rows begin:end see each other causally."""

    begin: int
    end: int


@dataclass(frozen=True, slots=True, eq=False)
class PagedQueries:
    """Rows that each attend to blocks of their own, all in one product (paged attention).

    keys, values: [L, Hkv, num_blocks * block_size, D], the block pool; rows: [B] int64; blocks:
    [B, P] int64, where a row has fewer one of its own is repeated; mask: [B, P * block_size], 0 or
    minus infinity, in the dtype of the states; distance: [B, P * block_size] float32, from the
    row's position to the key, for ALiBi and windows.
    """

    keys: Tensor
    values: Tensor
    block_size: int
    rows: Tensor
    blocks: Tensor
    mask: Tensor
    distance: Tensor | None = None

    def part(self, here: slice) -> PagedQueries:
        """Some of the rows."""
        distance = None if self.distance is None else self.distance[here]
        rows, blocks, mask = self.rows[here], self.blocks[here], self.mask[here]
        return replace(self, rows=rows, blocks=blocks, mask=mask, distance=distance)

    def gather_blocks(self, states: Tensor) -> Tensor:
        """The blocks of one layer's states, row by row: [Hkv, B, P * block_size, D]."""
        heads, tokens, dim = states.shape
        blocks = states.view(heads, tokens // self.block_size, self.block_size * dim)
        picked = blocks.index_select(1, self.blocks.flatten())
        return picked.view(heads, len(self.rows), -1, dim)


def read_values(keys: Tensor, values: Tensor) -> Tensor:
    """The values that attention reads: kept ones, or the keys where values have no width, because
    one latent serves as both."""
    return values if values.shape[-1] else keys


class LayersComputed(Exception):
    """Ends a pass of which only the states of the first layers are wanted: they are written."""


class KVWrite(Protocol):
    """Where new keys and values go."""

    def write_states(self, layer: int, key: Tensor, value: Tensor) -> None:
        """key, value: [Hkv, T, D], of all rows of the step; the value as wide as it is kept."""


@dataclass(frozen=True, slots=True, eq=False)
class PagedWrite:
    """Into blocks: row rows[i] goes to token slots[i] of the pool. `rows` is None for all rows."""

    keys: Tensor
    values: Tensor
    slots: Tensor
    rows: Tensor | None = None

    def write_states(self, layer: int, key: Tensor, value: Tensor) -> None:
        if self.rows is not None:
            key, value = key.index_select(1, self.rows), value.index_select(1, self.rows)
        self.keys[layer].index_copy_(1, self.slots, key)
        self.values[layer].index_copy_(1, self.slots, value)


@dataclass(frozen=True, slots=True, eq=False)
class ContiguousWrite:
    """Into contiguous memory: rows begin:end go to the tokens from `past` on."""

    keys: Tensor
    values: Tensor
    past: int
    begin: int
    end: int

    def write_states(self, layer: int, key: Tensor, value: Tensor) -> None:
        until = self.past + self.end - self.begin
        self.keys[layer, :, self.past : until] = key[:, self.begin : self.end]
        self.values[layer, :, self.past : until] = value[:, self.begin : self.end]


@dataclass(frozen=True, slots=True, eq=False)
class AttentionMetadata:
    """All that attention needs for one step over T rows.

    Every row has one partial result over its request's own tokens, from a causal block or a paged
    query. own_index: [T] int64, its place among the results of the causal blocks and then of the
    paged queries; None where that is the order of the rows. shared_index: [slots, T] int64, the
    row's entries in the `SharedQueries`, M where it has no more. slopes: [Hq] float32 where the
    position scheme is a bias (ALiBi). windows: of each layer, how many positions up to its own a
    row sees, or None for all; empty where no layer has one. positions: [T] float32, with slopes or
    windows. softcap: scores are cap * tanh(score / cap). layers: how many layers' states alone are
    wanted; None for a whole pass.
    """

    shared_queries: SharedQueries | None
    shared_kv: tuple[SharedKV, ...]
    causal_blocks: tuple[CausalBlock, ...]
    paged_queries: PagedQueries | None
    writes: tuple[KVWrite, ...]
    shared_index: Tensor
    own_index: Tensor | None = None
    slopes: Tensor | None = None
    positions: Tensor | None = None
    windows: tuple[int | None, ...] = ()
    softcap: float | None = None
    layers: int | None = None

    def window_of(self, layer: int) -> int | None:
        """How many positions up to its own a row of this layer sees; None for all."""
        return self.windows[layer] if self.windows else None

    def write_states(self, layer: int, key: Tensor, value: Tensor) -> None:
        """Writes the step's own states of a layer. key, value: as in `KVWrite`. Raises
        `LayersComputed` behind the last layer that is wanted."""
        for write in self.writes:
            write.write_states(layer, key, value)
        if self.layers == layer + 1:
            raise LayersComputed

    def shared_parts(self, most: int) -> Iterator[AttentionMetadata]:
        """This metadata with some of the shared states at a time: as many as have at most `most`
        shared queries, or one. Itself where that is all of them; nothing where there are none."""
        queries = self.shared_queries
        if queries is None:
            return
        if len(queries.rows) <= most:
            yield self
            return
        for states in _grouped_kv(self.shared_kv, most):
            begin, end = states[0].begin, states[-1].end
            inside = (self.shared_index >= begin) & (self.shared_index < end)
            index = (self.shared_index - begin).masked_fill_(~inside, end - begin)
            yield replace(
                self,
                shared_queries=queries.part(begin, end),
                shared_kv=tuple(
                    replace(kv, begin=kv.begin - begin, end=kv.end - begin) for kv in states
                ),
                shared_index=index[inside.any(1)],
            )


def _grouped_kv(states: Sequence[SharedKV], most: int) -> Iterator[list[SharedKV]]:
    """Consecutive states that have at most `most` queries, or one each."""
    group: list[SharedKV] = []
    for kv in states:
        if group and kv.end - group[0].begin > most:
            yield group
            group = []
        group.append(kv)
    if group:
        yield group


class AttentionBackend(Protocol):
    """Computes attention from its metadata. The code above it is the same on every device."""

    def attend(
        self,
        metadata: AttentionMetadata,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        scale: float,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Attention of one layer over shared states, blocks and the step's own tokens.

        query: [Hq, T, D], rotated to the rows' positions; key, value: [Hkv, T, D], the step's own,
        already written where the metadata wants them; scale: of the scores; sinks: [Hq], the scores
        of one more key a head, whose value is zero. Returns [T, Hq, D].
        """
