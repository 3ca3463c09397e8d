"""Ragged batches: the new tokens of all requests in one row, and the states that each row reads.

`lay_out_batch` groups the rows of a step by the states that they read. A group shares a segment, or
private blocks that the same requests hold (the tree of Hydragen §3.3 and of ChunkAttention §3.1),
or is a long span of blocks of one request. The last blocks of all decoding requests are read in one
product, as in paged attention.

`BatchBuilder` turns the layout into a `ForwardBatch`. A layout is kept until a request joins or
leaves or a block fills (ChunkAttention's lazy context copy, §3.3).
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ragcache.attention import (
    AttentionMetadata,
    CausalBlock,
    KVWrite,
    PagedQueries,
    PagedWrite,
    SharedKV,
    SharedQueries,
    over_heads,
    read_values,
)
from ragcache.attention.recurrent import RecurrentBatch, RecurrentRun
from ragcache.engine.contiguous_kv import EncodedKV, KVSpan
from ragcache.engine.kv_cache import BlockTable, RequestKV
from ragcache.engine.recurrent import RecurrentTable
from ragcache.engine.request import Segment
from ragcache.models import CausalLM, ForwardBatch

Ints = NDArray[np.int64]
Rows = tuple[int, int]
"""Rows begin:end of a step."""

LONG_SPAN = 4
"""Length in blocks from which a single reader's span becomes a group of its own."""


@dataclass(slots=True, eq=False)  # not frozen: every sequence has a new one in every step
class ScheduledChunk:
    """One request's part of a step: its next tokens, which follow its private states.

    A token attends to the segments that start at or before its position.
    """

    segments: tuple[Segment, ...]
    private: RequestKV
    token_ids: Sequence[int]
    position_ids: Sequence[int]
    """Ascending positions of the tokens."""
    wants_logits: bool = True
    scored: Rows = (0, 0)
    """Rows begin:end, counted from the chunk's first, whose logits are wanted in addition."""
    drafted: int = 0
    """Number of last tokens that are drafts. A token is sampled before each of them too."""

    def logit_rows(self, end: int) -> list[int]:
        """Rows whose logits are wanted, ascending. `end` is the row after the last of the chunk."""
        if not (self.drafted or self.scored[1]):
            return [end - 1] if self.wants_logits else []
        begin = end - len(self.position_ids)
        rows = [begin + row for row in range(*self.scored)]
        return [*rows, *range(end - 1 - self.drafted, end)] if self.wants_logits else rows


def await_segments(chunks: Sequence[ScheduledChunk], device: torch.device) -> None:
    """Make the current stream wait for segments that are still being copied to the device."""
    if device.type != "cuda":
        return
    stream = torch.cuda.current_stream(device)
    for chunk in chunks:
        for segment in chunk.segments:
            if segment.states.arrival is not None:
                segment.states.arrival.wait(stream)


@dataclass(slots=True)
class SharedPrefixGroup:
    """Contiguous states [L, Hkv, S, D], and the rows that read them."""

    keys: Tensor
    values: Tensor
    readers: list[Rows] = field(default_factory=list)
    """Rows of each reader."""
    deltas: list[int] = field(default_factory=list)
    """How far the states were moved for each reader."""
    starts: list[int] = field(default_factory=list)
    """Position of the first key for each reader."""

    def add_reader(self, first: int, end: int, delta: int, start: int) -> None:
        if first < end and self.keys.shape[2]:
            self.readers.append((first, end))
            self.deltas.append(delta)
            self.starts.append(start)


@dataclass(frozen=True, slots=True)
class DecodeTail:
    """The last blocks of a decoding request, and the row that reads them."""

    row: int
    private: BlockTable
    blocks: tuple[int, ...]
    """Indices of the blocks among the request's."""


@dataclass(frozen=True, slots=True)
class BatchLayout:
    """The rows of a step, grouped by the states that they read."""

    rows: tuple[Rows, ...]
    """Rows of each chunk."""
    groups: tuple[SharedPrefixGroup, ...]
    causal_blocks: tuple[Rows, ...]
    """Rows of the chunks with several new tokens."""
    tails: tuple[DecodeTail, ...]


def lay_out_batch(chunks: Sequence[ScheduledChunk], *, gapless: bool = False) -> BatchLayout:
    """Group the rows of some chunks by the states that they read. `gapless`: positions within a
    group must be consecutive, as ALiBi and windows need."""
    rows, begin = [], 0
    for chunk in chunks:
        rows.append((begin, begin + len(chunk.token_ids)))
        begin = rows[-1][1]
    groups = _segment_groups(chunks, rows)
    tails, causal = [], []
    readers_of = _span_readers(chunks)
    for index, chunk in enumerate(chunks):
        decodes = len(chunk.token_ids) == 1 and isinstance(chunk.private, BlockTable)
        short: list[int] = []
        for joined in _joined_spans(chunk.private, readers_of, gapless, full_only=decodes):
            readers = joined.readers
            if decodes and len(readers) == 1 and (gapless or len(joined.blocks) < LONG_SPAN):
                short += joined.blocks
            elif readers[0] == index:
                groups.append(_private_group(joined, [rows[reader] for reader in readers]))
        if decodes:
            assert isinstance(chunk.private, BlockTable)
            # the last is the block that the step writes to
            last = chunk.private.length // chunk.private.pool.block_size
            blocks = tuple(dict.fromkeys((*short, last)))
            tails.append(DecodeTail(rows[index][0], chunk.private, blocks))
        else:
            causal.append(rows[index])
    kept = tuple(group for group in groups if group.readers)
    return BatchLayout(tuple(rows), kept, tuple(causal), tuple(tails))


def _segment_groups(
    chunks: Sequence[ScheduledChunk], rows: Sequence[Rows]
) -> list[SharedPrefixGroup]:
    """Group segments by memory, so that views of one module form one group."""
    groups: dict[tuple[int, int], SharedPrefixGroup] = {}
    for chunk, (begin, end) in zip(chunks, rows, strict=True):
        for segment in chunk.segments:
            memory = (segment.states.keys.data_ptr(), segment.states.length)
            group = groups.get(memory)
            if group is None:
                states = segment.states.restore()
                group = groups[memory] = SharedPrefixGroup(states.keys, states.values)
            first = begin + bisect_left(chunk.position_ids, segment.start)
            group.add_reader(first, end, segment.delta, segment.start)
    return list(groups.values())


def _span_readers(chunks: Sequence[ScheduledChunk]) -> dict[tuple[int, int, int], list[int]]:
    """The indices of the chunks that read each span of private memory."""
    readers: dict[tuple[int, int, int], list[int]] = defaultdict(list)
    for index, chunk in enumerate(chunks):
        for span in chunk.private.spans():
            readers[span.memory].append(index)
    return readers


@dataclass(frozen=True, slots=True)
class _JoinedSpan:
    """Adjacent spans of one request with the same readers."""

    span: KVSpan
    blocks: tuple[int, ...]
    """Indices of the blocks among the request's."""
    readers: tuple[int, ...]
    start: int
    """Position of the first token."""

    def continues_with(
        self, part: KVSpan, readers: tuple[int, ...], start: int, gapless: bool
    ) -> bool:
        adjacent = self.span.end == part.begin and self.readers == readers
        return adjacent and (not gapless or self.start + self.span.length == start)


def _joined_spans(
    private: RequestKV,
    readers_of: dict[tuple[int, int, int], list[int]],
    gapless: bool,
    *,
    full_only: bool,
) -> Iterator[_JoinedSpan]:
    """Join adjacent spans. `full_only` leaves out the last block while it fills."""
    current: _JoinedSpan | None = None
    at = 0  # tokens before the span
    for number, span in enumerate(private.spans()):
        readers = tuple(readers_of[span.memory])
        if full_only and isinstance(private, BlockTable) and span.length < private.pool.block_size:
            break
        positions = private.positions[at : at + span.length]
        for part in _gapless_parts(span, positions) if gapless else [span]:
            start = positions[part.begin - span.begin]
            if current is not None and current.continues_with(part, readers, start, gapless):
                whole = KVSpan(part.keys, part.values, current.span.begin, part.end)
                blocks = tuple(dict.fromkeys((*current.blocks, number)))
                current = _JoinedSpan(whole, blocks, readers, current.start)
                continue
            if current is not None:
                yield current
            current = _JoinedSpan(part, (number,), readers, start)
        at += span.length
    if current is not None:
        yield current


def _gapless_parts(span: KVSpan, positions: Sequence[int]) -> Iterator[KVSpan]:
    """The span, cut at gaps between its positions."""
    begin = 0
    for at in range(1, len(positions) + 1):
        if at == len(positions) or positions[at] != positions[at - 1] + 1:
            yield KVSpan(span.keys, span.values, span.begin + begin, span.begin + at)
            begin = at


def _private_group(joined: _JoinedSpan, readers: Sequence[Rows]) -> SharedPrefixGroup:
    span = joined.span
    here = slice(span.begin, span.end)
    group = SharedPrefixGroup(span.keys[:, :, here], span.values[:, :, here])
    for first, end in readers:
        group.add_reader(first, end, 0, joined.start)
    return group


class BatchBuilder:
    """Builds forward batches. Keeps the layout while the same requests decode; `rebuilt` counts
    layouts."""

    def __init__(self, model: CausalLM) -> None:
        self.model = model
        self.rebuilt = 0
        self._signature: object = None
        self._frame: _Frame | None = None

    def build_batch(self, chunks: Sequence[ScheduledChunk]) -> ForwardBatch:
        """Flatten chunks to rows 0..T-1."""
        signature = tuple(_signature(chunk) for chunk in chunks)
        if self._frame is None or None in signature or signature != self._signature:
            self._frame = _Frame.of(self.model, chunks)
            self._signature = signature
            self.rebuilt += 1
        return self._frame.batch(chunks)

    def forget(self) -> None:
        """Release the states that the last batch read."""
        self._frame = None


def _signature(chunk: ScheduledChunk) -> object:
    """Equal for steps of a request that read the same states. Without one, every step needs a new
    layout."""
    private = chunk.private
    if len(chunk.token_ids) != 1 or not isinstance(private, BlockTable):
        return None
    seen = sum(segment.start <= chunk.position_ids[0] for segment in chunk.segments)
    return (
        private,
        chunk.wants_logits,
        chunk.scored,
        private.length // private.pool.block_size,
        seen,
    )


@dataclass(frozen=True, slots=True, eq=False)
class _Frame:
    """The part of a batch that stays while its requests decode: all but writes and mask."""

    model: CausalLM
    layout: BatchLayout
    metadata: AttentionMetadata
    starts: Ints
    """[M], the first position of the states that each shared query reads."""
    logit_rows: Tensor

    @classmethod
    def of(cls, model: CausalLM, chunks: Sequence[ScheduledChunk]) -> _Frame:
        layout = lay_out_batch(chunks, gapless=model.by_position)
        queries, starts = _shared_queries(model, layout)
        own = _own_index(layout)
        metadata = AttentionMetadata(
            shared_queries=queries,
            shared_kv=_shared_kv(layout),
            causal_blocks=tuple(CausalBlock(begin, end) for begin, end in layout.causal_blocks),
            paged_queries=_paged_queries(model, layout.tails),
            writes=(),
            shared_index=_device(model, _shared_index(layout)),
            own_index=None if own is None else _device(model, own),
            slopes=model.scheme.slopes,
            windows=model.windows,
            softcap=model.softcap,
            layout=model.layout,
        )
        ends = [end for _, end in layout.rows]
        wanted = [
            row for chunk, end in zip(chunks, ends, strict=True) for row in chunk.logit_rows(end)
        ]
        return cls(model, layout, metadata, starts, _device(model, _ints(wanted)))

    def batch(self, chunks: Sequence[ScheduledChunk]) -> ForwardBatch:
        tokens = _ints([token for chunk in chunks for token in chunk.token_ids])
        positions = _ints([position for chunk in chunks for position in chunk.position_ids])
        metadata = replace(
            self.metadata, writes=self._writes(chunks), paged_queries=self._masked_queries()
        )
        if self.model.by_position:
            metadata = self._with_distances(metadata, positions)
        return ForwardBatch(
            _device(self.model, tokens),
            _device(self.model, positions),
            self.logit_rows,
            metadata,
            self._recurrent_batch(chunks) if self.model.recurrent_bytes else None,
        )

    def _recurrent_batch(self, chunks: Sequence[ScheduledChunk]) -> RecurrentBatch:
        """The rows of each request, which recurrent layers read one by one."""
        runs: list[RecurrentRun] = []
        for chunk, rows in zip(chunks, self.layout.rows, strict=True):
            assert isinstance(chunk.private, EncodedKV | RecurrentTable)
            runs += chunk.private.runs(*rows)
        return RecurrentBatch(runs, self.model.device)

    def _writes(self, chunks: Sequence[ScheduledChunk]) -> tuple[KVWrite, ...]:
        """One write for the rows of all requests with blocks, and one for each other request."""
        writes: list[KVWrite] = []
        slots: list[int] = []
        rows: list[int] = []
        pool = None
        for chunk, (begin, end) in zip(chunks, self.layout.rows, strict=True):
            if isinstance(chunk.private, BlockTable):
                pool = chunk.private.pool
                slots += chunk.private.slots(end - begin)
                rows += range(begin, end)
            else:
                writes.append(chunk.private.write_rows(begin, end))
        if pool is not None:
            some = _device(self.model, _ints(rows)) if writes else None
            into = _device(self.model, _ints(slots))
            writes.append(PagedWrite(pool.keys, pool.values, into, some))
        return tuple(writes)

    def _masked_queries(self) -> PagedQueries | None:
        """The paged queries, with a mask that hides slots beyond the new tokens."""
        paged = self.metadata.paged_queries
        if paged is None:
            return None
        mask = np.full(paged.mask.shape, -np.inf, dtype=np.float32)
        size = paged.block_size
        for row, tail in enumerate(self.layout.tails):
            length = tail.private.length + 1
            filled = sum(min(size, length - number * size) for number in tail.blocks)
            mask[row, :filled] = 0
        return replace(paged, mask=_device(self.model, mask).to(paged.mask.dtype))

    def _with_distances(self, metadata: AttentionMetadata, positions: Ints) -> AttentionMetadata:
        """Add the distance of each row from its keys, for ALiBi and windows."""
        queries, paged = metadata.shared_queries, metadata.paged_queries
        if queries is not None:
            away = self.starts - positions[queries.rows.cpu().numpy()]
            queries = replace(queries, distance=_floats(self.model, away))
        if paged is not None:
            away = np.zeros(paged.mask.shape, dtype=np.int64)
            size = paged.block_size
            for row, tail in enumerate(self.layout.tails):
                now = positions[tail.row]
                own = (*tail.private.positions, now)
                seen = [p for n in tail.blocks for p in own[n * size : (n + 1) * size]]
                away[row, : len(seen)] = np.asarray(seen) - now
            paged = replace(paged, distance=_floats(self.model, away))
        at = _floats(self.model, positions)
        return replace(metadata, shared_queries=queries, paged_queries=paged, positions=at)


def _shared_queries(model: CausalLM, layout: BatchLayout) -> tuple[SharedQueries | None, Ints]:
    rows: list[int] = []
    deltas: list[int] = []
    starts: list[int] = []
    for group in layout.groups:
        reads = zip(group.readers, group.deltas, group.starts, strict=True)
        for (first, end), delta, start in reads:
            rows += range(first, end)
            deltas += [delta] * (end - first)
            starts += [start] * (end - first)
    if not rows:
        return None, _ints([])
    turning = model.scheme.relocation(_device(model, _ints(deltas))) if any(deltas) else None
    return SharedQueries(_device(model, _ints(rows)), over_heads(turning)), _ints(starts)


def _shared_kv(layout: BatchLayout) -> tuple[SharedKV, ...]:
    found, begin = [], 0
    for group in layout.groups:
        end = begin + sum(until - first for first, until in group.readers)
        values = read_values(group.keys, group.values)
        found.append(SharedKV(group.keys, values, begin, end))
        begin = end
    return tuple(found)


def _paged_queries(model: CausalLM, tails: Sequence[DecodeTail]) -> PagedQueries | None:
    if not tails:
        return None
    pool = tails[0].private.pool
    blocks = np.zeros((len(tails), max(len(tail.blocks) for tail in tails)), dtype=np.int64)
    for row, tail in enumerate(tails):
        own = [tail.private.block_ids[n] for n in tail.blocks]
        blocks[row] = own[0]  # where a row has fewer, nothing of another request is read
        blocks[row, : len(own)] = own
    mask = pool.keys.new_zeros(len(tails), blocks.shape[1] * pool.block_size)
    rows = _device(model, _ints([tail.row for tail in tails]))
    states = pool.keys, read_values(pool.keys, pool.values)
    return PagedQueries(*states, pool.block_size, rows, _device(model, blocks), mask)


def _shared_index(layout: BatchLayout) -> Ints:
    """Compute `AttentionMetadata.shared_index`."""
    found: list[list[int]] = [[] for _ in range(layout.rows[-1][1])]
    at = 0
    for group in layout.groups:
        for first, end in group.readers:
            for row in range(first, end):
                found[row].append(at)
                at += 1
    index = np.full((max(map(len, found)), len(found)), at, dtype=np.int64)
    for row, places in enumerate(found):
        index[: len(places), row] = places
    return index


def _own_index(layout: BatchLayout) -> Ints | None:
    """Compute `AttentionMetadata.own_index`."""
    order = [row for begin, end in layout.causal_blocks for row in range(begin, end)]
    order += [tail.row for tail in layout.tails]
    return None if order == sorted(order) else np.argsort(_ints(order))


def _ints(values: Sequence[int]) -> Ints:
    return np.asarray(values, dtype=np.int64)


def _floats(model: CausalLM, values: Ints) -> Tensor:
    return _device(model, values.astype(np.float32))


def _device(model: CausalLM, values: NDArray[np.generic]) -> Tensor:
    return torch.from_numpy(values).to(model.device)
