"""Plans of a step: which rows read which runs of keys, as items for the kernels. Pure numpy.

`build_plan` cuts reads into work items. An item is a run of tokens of one base and a block of
entries; an entry is one row that reads them, and makes one partial result for each query head, in
the place of its number. Cutting a run into key ranges, as in flash-decoding, makes new entries for
every range.

A *base* is a pair of tensors keys, values [L, Hkv, S, D] of equal strides, of which the last two
are (D, 1). A plan holds its addresses only: whoever plans a step keeps the tensors alive.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from ragcache.attention.metadata import read_values
from ragcache.errors import RagCacheError

Int32s = NDArray[np.int32]
Int64s = NDArray[np.int64]

ALL_TOKENS: Final = 2**30
"""The limit of a row that sees every token of a run."""

PIECE_TOKENS: Final = 128
"""Runs are cut at multiples of so many tokens after their begin."""

MOST_LATENT_HEADS: Final = 32
"""Most query heads of a program that read latents together."""

ITEM_WIDTH, BASE_WIDTH, SCALES_WIDTH = 8, 4, 6
NO_SCALES: Final = (0,) * SCALES_WIDTH


class TableOverflow(RagCacheError):
    """A step needs more entries, items, bases or rows than the tables have room for."""


@dataclass(frozen=True, slots=True)
class TableCapacity:
    """Maximum sizes of one step."""

    rows: int
    entries: int
    items: int
    bases: int
    pages_per_row: int
    """Blocks that the tail of a row may cover."""

    def check_room(self, *needed: int) -> None:
        """Raise `TableOverflow` for more rows, bases, items or entries than there is room for."""
        room = (self.rows, self.bases, self.items, self.entries)
        if any(need > have for need, have in zip(needed, room, strict=True)):
            raise TableOverflow(
                "a step needs {} rows, {} bases, {} items and {} entries".format(*needed)
                + "; the attention tables hold {}, {}, {} and {}".format(*room)
            )


@dataclass(frozen=True, slots=True)
class HeadLayout:
    """The heads of a model."""

    num_kv_heads: int
    """Heads of keys, or parts of the query heads if all share one key that holds a latent."""
    group: int
    """Query heads that share one head of keys and values."""
    head_dim: int
    latent: int = 0
    """Width of the latent at the end of each key, which serves as the value. 0 if values are
    kept."""

    @classmethod
    def of(cls, num_heads: int, num_kv_heads: int, head_dim: int, latent: int = 0) -> HeadLayout:
        """Return the layout of a model's heads. All of them share the key that holds a latent; they
        are divided so that the sums of a program fit its registers."""
        group = num_heads // num_kv_heads
        if latent:
            group = max(n for n in range(1, MOST_LATENT_HEADS + 1) if num_heads % n == 0)
        return cls(num_heads // group, group, head_dim, latent)

    @property
    def value_dim(self) -> int:
        """Width of the values that attention reads."""
        return self.latent or self.head_dim


class ItemShape(NamedTuple):
    """How a kind of step is cut into items: for so many programs, of so many lines of query,
    entries times `HeadLayout.group`, at most."""

    programs: int
    block_rows: int


class KVBase:
    """Keys and values that runs are parts of. In eight bits they come with scales [L, Hkv, 1, D]
    and [L, Hkv, S, 1], float32. Values of no width mean that keys hold them.

    memory: the addresses of keys and values. strides: of a layer and of a head, in elements.
    """

    __slots__ = ("keys", "memory", "scales", "strides", "tokens", "values")

    def __init__(
        self,
        keys: Tensor,
        values: Tensor,
        key_scales: Tensor | None = None,
        value_scales: Tensor | None = None,
    ) -> None:
        values = read_values(keys, values)
        layer, head, token, element = strides = keys.stride()
        self.tokens, width = keys.shape[2:]
        assert values.stride() == strides
        assert (token, element) == (width, 1), "tokens of a head are contiguous"
        self.keys, self.values = keys, values
        self.memory, self.strides = (keys.data_ptr(), values.data_ptr()), (layer, head)
        self.scales: tuple[int, ...] | None = None
        if key_scales is not None and value_scales is not None:
            addresses = (key_scales.data_ptr(), value_scales.data_ptr())
            self.scales = (*addresses, *key_scales.stride()[:2], *value_scales.stride()[:2])

    @property
    def addresses(self) -> tuple[int, ...]:
        """The base's row in the section `bases` of `TableViews`."""
        return (*self.memory, *self.strides)


class KVRun(NamedTuple):
    """Tokens begin:end of a base."""

    base: KVBase
    begin: int
    end: int


class KVConsumer(NamedTuple):
    """Rows first_row:end_row that read a run."""

    first_row: int
    end_row: int
    delta: int = 0
    """Positions by which the states were moved. Queries turn by -delta."""
    origin: int = 0
    """Position of the base's token 0 for these rows: token i is at origin + i."""
    limit: int = ALL_TOKENS
    """The first row sees the base's tokens below it, and each further row one more. `ALL_TOKENS`
    hides none."""


@dataclass(slots=True, eq=False)
class KVRead:
    """A run, and who reads it. A row reads a token at most once in a step."""

    run: KVRun
    readers: list[KVConsumer] = field(default_factory=list)


class Square(NamedTuple):
    """Rows of new tokens that read each other by a product of their own (`attend_square`). No item
    has its partial results."""

    first_row: int
    end_row: int


@dataclass(slots=True, eq=False)
class AttentionPlan:
    """The arrays of `TableViews` up to `row_entries`, without their padding. Items of runs in eight
    bits come after all others. entry_fields [4, entries]: row, delta, limit and origin."""

    rows: int
    plain_items: int
    quantized_items: int
    bases: Int64s
    scales: Int64s
    items: Int32s
    entry_fields: Int32s
    row_ptr: Int32s
    row_entries: Int64s
    squares: Sequence[Square] = ()
    """Squares, ascending."""

    @property
    def entries(self) -> int:
        """Partial results of every query head."""
        return len(self.row_entries)

    def base_number(self, keys: Tensor) -> int:
        """The number of a base that the plan reads, by its keys."""
        return int(np.flatnonzero(self.bases[:, 0] == keys.data_ptr())[0])


def build_plan(
    reads: Sequence[KVRead],
    *,
    rows: int,
    heads: HeadLayout,
    capacity: TableCapacity,
    pool: KVBase | None = None,
    programs: int = 264,
    block_rows: int = 64,
    min_keys: int = 256,
) -> AttentionPlan:
    """Cuts reads into work items. Quick for the reads of a few requests.

    Args:
        reads: Runs and their readers.
        rows: How many rows the step has.
        heads: The heads of the model.
        capacity: The room of the tables.
        pool: The pool of blocks, which becomes base 0.
        programs: Programs of a kernel that run at once. Runs are cut so that each has about one
            piece of keys and a head.
        block_rows: Query lines, rows times `heads.group`, that an item holds at most.
        min_keys: Pieces have about this length at least.

    Raises:
        TableOverflow: There is no room for the plan, even with runs uncut.
    """
    bases = Bases()
    if pool is not None:
        bases.number(pool)
    asked, ends = _asked_entries(reads)
    size = max(1, block_rows // heads.group)
    blocks = _entry_blocks(reads, bases, asked, ends, size)
    cut = _Cut.of(blocks, heads.num_kv_heads, programs, min_keys, capacity)
    capacity.check_room(rows, len(bases), cut.items, cut.entries)
    items, quantized, sources = _items(blocks, cut.tokens, size)
    entries = asked[:, :0]
    if sources:
        entries = np.concatenate([asked[:, first:end] for first, end in sources], axis=1)
    row = entries[0]
    row_ptr = np.zeros(rows + 1, dtype=np.int32)
    row_ptr[1:] = [*accumulate(np.bincount(row, minlength=rows).tolist())]
    return AttentionPlan(
        rows=rows,
        plain_items=cut.items - quantized,
        quantized_items=quantized,
        bases=bases.addresses(),
        scales=bases.scales(),
        items=np.array(items, dtype=np.int32).reshape(-1, ITEM_WIDTH),
        entry_fields=entries,
        row_ptr=row_ptr,
        row_entries=entries_by_row(row, rows),
    )


def entries_by_row(row: Int32s, rows: int) -> Int64s:
    """The section `row_entries`: entries in the order of their rows."""
    # stable sorting of 16 bits is a radix sort
    return (row.astype(np.uint16) if rows < 2**16 else row).argsort(kind="stable")


class Bases:
    """Numbers bases in the order in which they are first met."""

    def __init__(self) -> None:
        self.numbers: dict[tuple[int, int], int] = {}
        self._bases: list[KVBase] = []

    def __len__(self) -> int:
        return len(self._bases)

    def number(self, base: KVBase) -> int:
        bases = self._bases
        number = self.numbers.setdefault(base.memory, len(bases))
        if number == len(bases):
            bases.append(base)
        assert bases[number].strides == base.strides, "one address with two strides"
        return number

    def addresses(self) -> Int64s:
        """The section `bases` of `TableViews`."""
        rows = [base.addresses for base in self._bases]
        return np.array(rows, dtype=np.int64).reshape(-1, BASE_WIDTH)

    def scales(self) -> Int64s:
        """The section `scales`."""
        rows = [base.scales or NO_SCALES for base in self._bases]
        return np.array(rows, dtype=np.int64).reshape(-1, SCALES_WIDTH)


def _asked_entries(reads: Sequence[KVRead]) -> tuple[Int32s, list[int]]:
    """One entry [row, delta, limit, origin] for every row that reads a run, read after read, before
    any run is cut: [4, N]. Also returns where the entries of each read end."""
    readers = [reader for read in reads for reader in read.readers]
    ends = [*accumulate([end - first for first, end, *_ in readers])]
    asked = np.empty((4, ends[-1] if ends else 0), dtype=np.int32)
    row, deltas, limits, origins = asked
    at = 0
    for (first, end, delta, origin, limit), to in zip(readers, ends, strict=True):
        row[at:to] = np.arange(first, end)
        deltas[at:to] = delta
        origins[at:to] = origin
        limits[at:to] = limit if limit == ALL_TOKENS else np.arange(limit, limit + end - first)
        at = to
    totals = [0, *ends]
    return asked, [totals[end] for end in accumulate([len(read.readers) for read in reads])]


class _EntryBlocks(NamedTuple):
    """The entries first:end of one read, in blocks that see its tokens begin:begin + length."""

    quantized: bool
    base: int
    begin: int
    length: int
    first: int
    end: int
    blocks: int


def _entry_blocks(
    reads: Sequence[KVRead], bases: Bases, asked: Int32s, ends: Sequence[int], size: int
) -> list[_EntryBlocks]:
    """All entries. Blocks of rows that do not see the whole run are cut short, each for itself."""
    found, first = [], 0
    for read, end in zip(reads, ends, strict=True):
        run = read.run
        base, scaled = bases.number(run.base), run.base.scales is not None
        if first == end:
            continue
        if min([reader[4] for reader in read.readers]) >= run.end:
            parts = [(first, end, run.end)]
        else:
            edges = [*range(first, end, size), end]
            limits = asked[2]
            parts = [(a, b, min(run.end, max(limits[a:b].tolist()))) for a, b in pairwise(edges)]
        found += [
            _EntryBlocks(scaled, base, run.begin, seen - run.begin, a, b, -(-(b - a) // size))
            for a, b, seen in parts
            if seen > run.begin
        ]
        first = end
    return found


class _Cut(NamedTuple):
    """How many tokens the pieces of each read have, and how many items and entries that makes."""

    tokens: Sequence[int]
    items: int
    entries: int

    @classmethod
    def of(
        cls,
        blocks: Sequence[_EntryBlocks],
        kv_heads: int,
        programs: int,
        min_keys: int,
        capacity: TableCapacity,
    ) -> _Cut:
        """Pieces of about equal length, as many as fit the tables."""
        work = [0, 0]  # of plain runs, and of those in eight bits
        for each in blocks:
            work[each.quantized] += each.length * each.blocks
        targets = [max(min_keys, -(-keys * kv_heads // programs)) for keys in work]
        while True:
            tokens, items, entries, whole = [], 0, 0, True
            for quantized, _, _, length, first, end, count in blocks:
                number = max(1, int(length / targets[quantized] + 0.5))
                piece = -(-length // (number * PIECE_TOKENS)) * PIECE_TOKENS
                number = -(-length // piece)
                tokens.append(piece)
                items += number * count
                entries += number * (end - first)
                whole = whole and number == 1
            if whole or (items <= capacity.items and entries <= capacity.entries):
                return cls(tokens, items, entries)
            targets = [2 * target for target in targets]


def _items(
    blocks: Sequence[_EntryBlocks], tokens: Sequence[int], size: int
) -> tuple[list[int], int, list[tuple[int, int]]]:
    """The fields of all items in the order in which they run, how many are in eight bits, and which
    of the entries asked are theirs, one range after another."""
    # plain ones first, then long ones; blocks that read the same tokens are neighbors
    pieces = sorted(
        (each.quantized, -min(piece, each.length - skipped), skipped, number)
        for number, (each, piece) in enumerate(zip(blocks, tokens, strict=True))
        for skipped in range(0, each.length, piece)
    )
    items: list[int] = []
    sources, at, scaled = [], 0, 0
    for quantized, length, skipped, number in pieces:
        _, base, begin, _, first, end, count = blocks[number]
        begin += skipped
        for left in range(end - first, 0, -size):
            own = min(size, left)
            items += (base, begin, begin - length, at, own, quantized, 0, 0)
            at += own
        scaled += quantized * count
        sources.append((first, end))
    return items, scaled, sources
