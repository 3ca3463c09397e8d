"""The attention metadata of one forward pass, as flat tensors.

A step flattens the new tokens of all requests to rows 0..T-1. The metadata lists the shared states,
the rows that read them, and how their queries turn for them. States are thus read once, however
many requests share them (RelayAttention, Hydragen) and in whatever order the prompts hold them. A
backend needs nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from ragcache.attention.layout import StateLayout
from ragcache.attention.ops import Rotation, rotate


@dataclass(frozen=True, slots=True, eq=False)
class SharedQueries:
    """The query rows that read shared states, in the order of `AttentionMetadata.shared_kv`. A row
    appears once for each state that it reads; M entries in all."""

    rows: Tensor
    """[M] int64."""
    rotation: Rotation | tuple[Rotation, ...] | None = None
    """How each query turns, cos and sin [M, 1, R/2], one for each layer if layers differ. Not set
    if no states were moved."""
    distance: Tensor | None = None
    """[M] float32, from the row's position to the first key that it reads. Set for ALiBi and
    windows."""

    def turn_rows(self, rows: Tensor, layer: int) -> Tensor:
        """Queries of one layer, turned for the states that they read: [Hkv, T, G, D] to [Hkv, M, G,
        D]."""
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
    """Contiguous states [L, Hkv, S, D] that the entries begin:end of the `SharedQueries` attend
    to."""

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
    """Rows that each attend to blocks of their own, all in one product (paged attention)."""

    keys: Tensor
    """[L, Hkv, num_blocks * block_size, D], the block pool."""
    values: Tensor
    """The same shape."""
    block_size: int
    rows: Tensor
    """[B] int64."""
    blocks: Tensor
    """[B, P] int64. A row with fewer blocks repeats one of its own."""
    mask: Tensor
    """[B, P * block_size], 0 or minus infinity, in the dtype of the states."""
    distance: Tensor | None = None
    """[B, P * block_size] float32, from the row's position to the key. Set for ALiBi and
    windows."""

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

    def of_layer(self, layout: StateLayout, layer: int) -> PagedQueries:
        """The same rows over one layer's states with whole heads. Blocks are gathered before their
        heads are joined: a pool is larger than the blocks of a step."""
        if layout.layers[layer].size == layout.head_dim:
            keys, values = (layout.of_layer(layer, each)[None] for each in (self.keys, self.values))
            return replace(self, keys=keys, values=values)
        used, blocks = torch.unique(self.blocks, return_inverse=True)
        tokens = torch.arange(self.block_size, device=used.device)
        slots = (used[:, None] * self.block_size + tokens).flatten()
        here = layout.planes(layer)
        keys, values = (
            layout.join(layer, each[here.start : here.stop].index_select(2, slots))[None]
            for each in (self.keys, self.values)
        )
        return replace(self, keys=keys, values=values, blocks=blocks)


def read_values(keys: Tensor, values: Tensor) -> Tensor:
    """The values that attention reads: the kept ones, or the keys if one latent serves as both."""
    return values if values.shape[-1] else keys


class KVWrite(Protocol):
    """The destination of new keys and values."""

    def write_states(self, layer: int, key: Tensor, value: Tensor) -> None:
        """Write the states of all rows: key, value [Hkv, T, D]; the value is as wide as it is
        kept."""


@dataclass(frozen=True, slots=True, eq=False)
class PagedWrite:
    """A write to blocks: row rows[i], or row i without `rows`, goes to slot slots[i] of the
    pool."""

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
    """A write to contiguous memory: rows begin:end go to the tokens from `past` on."""

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
    """All inputs of attention in one step over T rows, besides queries, keys and values.

    Every row has one partial result over its request's own tokens, from a causal block or a paged
    query.
    """

    shared_queries: SharedQueries | None
    shared_kv: tuple[SharedKV, ...]
    causal_blocks: tuple[CausalBlock, ...]
    paged_queries: PagedQueries | None
    writes: tuple[KVWrite, ...]
    shared_index: Tensor
    """[slots, T] int64: each row's entries in the `SharedQueries`; M in unused slots."""
    own_index: Tensor | None = None
    """[T] int64: each row's place among the results of the causal blocks and then of the paged
    queries. Not set if that is the order of the rows."""
    slopes: Tensor | None = None
    """[Hq] float32, for ALiBi."""
    positions: Tensor | None = None
    """[T] float32, with slopes or windows."""
    windows: tuple[int | None, ...] = ()
    """Number of positions up to its own that a row sees, for each layer with a window. Empty if no
    layer has one."""
    softcap: float | None = None
    """Bound of the scores: softcap * tanh(score / softcap)."""
    layout: StateLayout | None = None
    """The planes of each layer, if layers have heads of different shapes."""

    def of_layer(self, layer: int) -> tuple[AttentionMetadata, int]:
        """Return metadata whose states have the heads of a layer, and the number of the layer in
        them."""
        layout, queries, paged = self.layout, self.shared_queries, self.paged_queries
        if layout is None:
            return self, layer
        if queries is not None and isinstance(queries.rotation, tuple):
            queries = replace(queries, rotation=queries.rotation[layer])
        shared = []
        for kv in self.shared_kv:
            keys, values = (layout.of_layer(layer, each)[None] for each in (kv.keys, kv.values))
            shared.append(replace(kv, keys=keys, values=values))
        own = replace(
            self,
            shared_queries=queries,
            shared_kv=tuple(shared),
            paged_queries=None if paged is None else paged.of_layer(layout, layer),
            windows=self.windows[layer : layer + 1],
            layout=None,
        )
        return own, 0

    def window_of(self, layer: int) -> int | None:
        """Number of positions up to its own that a row of this layer sees, if limited."""
        return self.windows[layer] if self.windows else None

    def write_states(self, layer: int, key: Tensor, value: Tensor) -> None:
        """Write the step's own states of a layer (`KVWrite`)."""
        if self.layout is None:
            self._write(layer, key, value)
            return
        split = (self.layout.split(each) for each in (key, value))
        for plane, keys, values in zip(self.layout.planes(layer), *split, strict=True):
            self._write(plane, keys, values)

    def _write(self, plane: int, key: Tensor, value: Tensor) -> None:
        for write in self.writes:
            write.write_states(plane, key, value)

    def shared_parts(self, most: int) -> Iterator[AttentionMetadata]:
        """Yield the metadata with some shared states at a time.

        Each part has up to `most` shared queries, or a single state. Yields itself if all fit, and
        nothing without shared states.
        """
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
    """Consecutive states with up to `most` queries together, or one each."""
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
        """Compute the attention of one layer over shared states, blocks and the step's own tokens.

        Args:
            metadata: The metadata of the step.
            layer: Index of the layer.
            query: [Hq, T, D], rotated to the positions of the rows.
            key: [Hkv, T, D], of the step's own tokens, already written.
            value: [Hkv, T, D], likewise.
            scale: Factor of the scores.
            sinks: [Hq], the score of one more key per head, whose value is zero.

        Returns:
            [T, Hq, D].
        """
