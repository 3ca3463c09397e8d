"""The tables of a step: which rows read which runs of keys, as arrays that the kernels walk.

`build_plan` cuts reads into work items. An item is a run of tokens of one base and a block of
entries; an entry is one row that reads them, and makes one partial result for each query head, in
the place of its number. Cutting a run into key ranges, as in flash-decoding, makes new entries for
every range. `AttentionTables` holds the arrays at fixed device addresses, so that CUDA graphs can
be captured over them, and uploads them from pinned memory.

A *base* is a pair of tensors keys, values [L, Hkv, S, D] of equal strides, of which the last two
are (D, 1). Tables hold its addresses only: whoever plans a step keeps the tensors alive.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ragcache.errors import RagCacheError

Int32s = NDArray[np.int32]
Int64s = NDArray[np.int64]

ALL_TOKENS: Final = 2**30
"""The limit of a row that sees every token of a run."""

PIECE_TOKENS: Final = 128
"""Runs are cut at multiples of so many tokens after their begin."""

HOST_BUFFERS: Final = 3
"""Uploads of a region that can be under way at once."""

ITEM_WIDTH, COUNTS, BASE_WIDTH, SCALES_WIDTH = 8, 16, 4, 6


class TableOverflow(RagCacheError):
    """A step needs more entries, items, bases or rows than the tables have room for."""


@dataclass(frozen=True, slots=True)
class TableCapacity:
    """The most that one step may have. pages_per_row: blocks that the tail of a row may cover."""

    rows: int
    entries: int
    items: int
    bases: int
    pages_per_row: int


@dataclass(frozen=True, slots=True)
class HeadLayout:
    """group: query heads that share one head of keys and values."""

    num_kv_heads: int
    group: int
    head_dim: int


@dataclass(frozen=True, slots=True, eq=False)
class KVRun:
    """Tokens begin:end of a base. Keys and values in eight bits come with scales [L, Hkv, 1, D]
    and [L, Hkv, S, 1], float32."""

    keys: Tensor
    values: Tensor
    begin: int
    end: int
    key_scales: Tensor | None = None
    value_scales: Tensor | None = None


class Reader(NamedTuple):
    """Rows first_row:end_row that read a run.

    delta: by how many positions its states were moved; queries turn by -delta. origin: the position
    of the base's token 0, as these rows see it: token i is at origin + i. limit: the first row sees
    the base's tokens below it, and each further row one more; `ALL_TOKENS` for all of them.
    """

    first_row: int
    end_row: int
    delta: int = 0
    origin: int = 0
    limit: int = ALL_TOKENS


@dataclass(frozen=True, slots=True, eq=False)
class KVRead:
    """A run, and who reads it. A row reads a token at most once in a step."""

    run: KVRun
    readers: list[Reader] = field(default_factory=list)


@dataclass(frozen=True, slots=True, eq=False)
class AttentionPlan:
    """The arrays of `TableViews` up to `row_entries`, without their padding. Items of runs in eight
    bits come after all others; the kernels launch a second grid over them."""

    rows: int
    plain_items: int
    quantized_items: int
    bases: Int64s
    scales: Int64s
    items: Int32s
    entry_row: Int32s
    entry_delta: Int32s
    entry_limit: Int32s
    entry_origin: Int32s
    row_ptr: Int32s
    row_entries: Int32s
    base_numbers: Mapping[tuple[int, int], int]

    @property
    def entries(self) -> int:
        """Partial results of every query head."""
        return len(self.entry_row)

    def base_number(self, keys: Tensor, values: Tensor) -> int:
        """The number of a base that the plan reads."""
        return self.base_numbers[keys.data_ptr(), values.data_ptr()]


@dataclass(frozen=True, slots=True, eq=False)
class TableViews:
    """The tables on the device. int32, except where marked.

    counts [16]: how many plain items there are, and how many of runs in eight bits after them.
    bases [bases, 4], int64: addresses of keys and values, and their strides of a layer and of a
        head, in elements.
    scales [bases, 6], int64: addresses of key and value scales (0: a plain base), and their strides
        of a layer and of a head, keys first.
    items [items, 8]: base, begin and end token, first entry, number of entries, in eight bits or
        not, 0, 0. Long items first.
    entry_row, entry_delta, entry_limit, entry_origin [entries]: see `Reader`; an entry's row sees
        the tokens of its item that are below entry_limit.
    row_ptr [rows + 1], row_entries [entries]: row t has entries row_entries[row_ptr[t] :
        row_ptr[t + 1]]. Rows of padding have none.
    position_ids, token_ids [rows], int64: of the new tokens. logit_rows [rows], int64: the rows
        whose logits are wanted.
    write_base, write_slot [rows]: where keys and values of the new tokens go; slot -1: nowhere.
    tail_length [rows]: keys of a row that decodes which its tail reads before the new one; -1 for
        padding.
    pages [rows, pages_per_row]: blocks of the pool. Token j of a tail is in pages[row, j // size],
        where size is that of a block, and the new token is token tail_length.
    """

    counts: Tensor
    bases: Tensor
    scales: Tensor
    items: Tensor
    entry_row: Tensor
    entry_delta: Tensor
    entry_limit: Tensor
    entry_origin: Tensor
    row_ptr: Tensor
    row_entries: Tensor
    position_ids: Tensor
    token_ids: Tensor
    logit_rows: Tensor
    write_base: Tensor
    write_slot: Tensor
    tail_length: Tensor
    pages: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class StepArrays:
    """What changes in every step, on the host; see `TableViews`."""

    position_ids: Int64s
    token_ids: Int64s
    logit_rows: Int64s
    write_base: Int32s
    write_slot: Int32s
    tail_length: Int32s
    pages: Int32s


class AttentionTables:
    """The tables of one step at fixed addresses of a device.

    A plan region, uploaded where the plan changes, and a step region, uploaded in every step. An
    upload is queued on the current stream; a region's host memory is used again when its copy has
    run. Not thread-safe.

    views: on the device. step: on the host; filled by the caller, and kept between steps.

    Example:
        tables.set_plan(build_plan(reads, rows=rows, heads=heads, capacity=tables.capacity))
        tables.upload_plan()
        tables.step.position_ids[:rows] = positions
        tables.upload_step()
    """

    def __init__(self, capacity: TableCapacity, device: torch.device | str) -> None:
        self.capacity, self.device = capacity, torch.device(device)
        plan, step = _plan_sections(capacity), _step_sections(capacity)
        self._plan = _Region(plan, self.device)
        self._step = _Region(step, self.device)
        self.views = TableViews(**self._plan.views(), **self._step.views())
        self._master = np.zeros(self._step.nbytes, dtype=np.uint8)
        self.step = StepArrays(**_arrays(self._master, step))
        self.step.write_slot[:] = -1
        self.step.tail_length[:] = -1

    def set_plan(self, plan: AttentionPlan) -> None:
        """Lays a plan out in host memory. Rows beyond its own get no entries."""
        host = self._plan.next_host()
        host["counts"][:] = 0
        host["counts"][:2] = plan.plain_items, plan.quantized_items
        for name in ("bases", "scales", "items", "entry_row", "entry_delta", "entry_limit",
                     "entry_origin", "row_entries"):  # fmt: skip
            array = getattr(plan, name)
            host[name][: len(array)] = array
        host["row_ptr"][: plan.rows + 1] = plan.row_ptr
        host["row_ptr"][plan.rows + 1 :] = plan.entries

    def upload_plan(self) -> None:
        """Queues the copy of the plan that was set last."""
        self._plan.upload()

    def upload_step(self) -> None:
        """Queues the copy of `step`, which may be changed directly afterwards."""
        self._step.next_buffer()[:] = self._master
        self._step.upload()


@dataclass(frozen=True, slots=True)
class _Section:
    name: str
    shape: tuple[int, ...]
    wide: bool = False

    @property
    def nbytes(self) -> int:
        return int(np.prod(self.shape)) * (8 if self.wide else 4)


def _plan_sections(capacity: TableCapacity) -> list[_Section]:
    entries = (capacity.entries,)
    return [
        _Section("counts", (COUNTS,)),
        _Section("bases", (capacity.bases, BASE_WIDTH), wide=True),
        _Section("scales", (capacity.bases, SCALES_WIDTH), wide=True),
        _Section("items", (capacity.items, ITEM_WIDTH)),
        *(_Section(f"entry_{name}", entries) for name in ("row", "delta", "limit", "origin")),
        _Section("row_ptr", (capacity.rows + 1,)),
        _Section("row_entries", entries),
    ]


def _step_sections(capacity: TableCapacity) -> list[_Section]:
    rows = (capacity.rows,)
    return [
        *(_Section(name, rows, wide=True) for name in ("position_ids", "token_ids", "logit_rows")),
        *(_Section(name, rows) for name in ("write_base", "write_slot", "tail_length")),
        _Section("pages", (capacity.rows, capacity.pages_per_row)),
    ]


def _offsets(sections: Sequence[_Section]) -> list[int]:
    """Where each section begins, at a multiple of 128 bytes, and where the last one ends."""
    return [0, *np.cumsum([-(-section.nbytes // 128) * 128 for section in sections]).tolist()]


def _arrays(buffer: NDArray[np.uint8], sections: Sequence[_Section]) -> dict[str, NDArray[Any]]:
    return {
        each.name: buffer[at : at + each.nbytes]
        .view(np.int64 if each.wide else np.int32)
        .reshape(each.shape)
        for each, at in zip(sections, _offsets(sections), strict=False)
    }


def _new_event() -> torch.cuda.Event:
    return torch.cuda.Event()  # type: ignore[no-untyped-call]


class _Region:
    """Sections in one device buffer, and the ring of host buffers that they are copied from."""

    def __init__(self, sections: Sequence[_Section], device: torch.device) -> None:
        self.sections = sections
        self.nbytes = _offsets(sections)[-1]
        pinned = device.type == "cuda"
        self.memory = torch.zeros(self.nbytes, dtype=torch.uint8, device=device)
        self._ring = [
            torch.zeros(self.nbytes, dtype=torch.uint8, pin_memory=pinned)
            for _ in range(HOST_BUFFERS if pinned else 1)
        ]
        self._buffers = [each.numpy() for each in self._ring]
        self._hosts = [_arrays(buffer, sections) for buffer in self._buffers]
        self._copied = [_new_event() for _ in self._ring] if pinned else []
        self._at = 0

    def views(self) -> dict[str, Tensor]:
        return {
            each.name: self.memory[at : at + each.nbytes]
            .view(torch.int64 if each.wide else torch.int32)
            .view(each.shape)
            for each, at in zip(self.sections, _offsets(self.sections), strict=False)
        }

    def next_buffer(self) -> NDArray[np.uint8]:
        """Host memory that no copy reads any longer, for the next upload."""
        self._at = (self._at + 1) % len(self._ring)
        if self._copied:
            self._copied[self._at].synchronize()
        return self._buffers[self._at]

    def next_host(self) -> dict[str, NDArray[Any]]:
        """The sections of `next_buffer`."""
        self.next_buffer()
        return self._hosts[self._at]

    def upload(self) -> None:
        self.memory.copy_(self._ring[self._at], non_blocking=True)
        if self._copied:
            self._copied[self._at].record()


def build_plan(
    reads: Sequence[KVRead], *, rows: int, heads: HeadLayout, capacity: TableCapacity,
    pool: tuple[Tensor, Tensor] | None = None, programs: int = 264, block_rows: int = 64,
    min_keys: int = 256,
) -> AttentionPlan:  # fmt: skip
    """Cuts reads into work items.

    Args:
        reads: Runs and their readers.
        rows: How many rows the step has.
        heads: The heads of the model.
        capacity: The room of the tables.
        pool: Keys and values of the pool of blocks, which become base 0.
        programs: Programs of a kernel that run at once. Runs are cut so that each has about one
            piece of keys and a head.
        block_rows: Query lines, rows times `heads.group`, that an item holds at most.
        min_keys: Pieces have about this length at least.

    Raises:
        TableOverflow: There is no room for the plan, even with runs uncut.
    """
    bases = _Bases()
    if pool is not None:
        bases.number(KVRun(*pool, 0, 0))
    asked = _asked_entries(reads)
    blocks = _entry_blocks(reads, bases, asked, max(1, block_rows // heads.group))
    pieces = _Pieces.cut(blocks, heads.num_kv_heads, programs, min_keys, capacity)
    items, source = _items(blocks, pieces)
    row = asked.row[source]
    room = (capacity.rows, capacity.bases, capacity.items, capacity.entries)
    needed = (rows, len(bases.rows), len(items), len(source))
    if any(need > have for need, have in zip(needed, room, strict=True)):
        raise TableOverflow(
            "a step needs {} rows, {} bases, {} items and {} entries".format(*needed)
            + "; the attention tables hold {}, {}, {} and {}".format(*room)
        )
    row_ptr = np.zeros(rows + 1, dtype=np.int32)
    np.cumsum(np.bincount(row, minlength=rows), out=row_ptr[1:])
    quantized = int(np.count_nonzero(items[:, 5]))
    return AttentionPlan(
        rows=rows,
        plain_items=len(items) - quantized,
        quantized_items=quantized,
        bases=np.asarray(bases.rows, dtype=np.int64).reshape(-1, BASE_WIDTH),
        scales=np.asarray(bases.scales, dtype=np.int64).reshape(-1, SCALES_WIDTH),
        items=items,
        entry_row=row,
        entry_delta=asked.delta[source],
        entry_limit=asked.limit[source],
        entry_origin=asked.origin[source],
        row_ptr=row_ptr,
        # stable sorting of 16 bits is a radix sort
        row_entries=np.argsort(row.astype(np.uint16) if rows < 2**16 else row, kind="stable")
        .astype(np.int32),
        base_numbers=bases.numbers,
    )  # fmt: skip


class _Bases:
    """Numbers bases in the order in which they are first met."""

    def __init__(self) -> None:
        self.rows: list[tuple[int, ...]] = []
        self.scales: list[tuple[int, ...]] = []
        self.numbers: dict[tuple[int, int], int] = {}
        self._objects: dict[tuple[int, int], int] = {}

    def number(self, run: KVRun) -> int:
        objects = (id(run.keys), id(run.values))  # alive while a plan is built
        number = self._objects.get(objects)
        if number is None:
            memory = (run.keys.data_ptr(), run.values.data_ptr())
            number = self.numbers.setdefault(memory, len(self.rows))
            if number == len(self.rows):
                self._add(run, memory)
            layer, head = run.keys.stride()[:2]
            assert self.rows[number][2:] == (layer, head), "one address with two strides"
            self._objects[objects] = number
        return number

    def _add(self, run: KVRun, memory: tuple[int, int]) -> None:
        layer, head, token, element = run.keys.stride()
        assert run.values.stride() == (layer, head, token, element)
        assert (token, element) == (run.keys.shape[3], 1), "tokens of a head are contiguous"
        self.rows.append((*memory, layer, head))
        if run.key_scales is None or run.value_scales is None:
            self.scales.append((0,) * SCALES_WIDTH)
            return
        addresses = (run.key_scales.data_ptr(), run.value_scales.data_ptr())
        strides = (*run.key_scales.stride()[:2], *run.value_scales.stride()[:2])
        self.scales.append((*addresses, *strides))


@dataclass(frozen=True, slots=True, eq=False)
class _AskedEntries:
    """Before any run is cut: one entry for every row that reads it, read after read. counts: of
    each read."""

    counts: Int64s
    row: Int32s
    delta: Int32s
    limit: Int32s
    origin: Int32s


def _asked_entries(reads: Sequence[KVRead]) -> _AskedEntries:
    numbers = chain.from_iterable(chain.from_iterable(read.readers for read in reads))
    table = np.fromiter(numbers, dtype=np.int64).reshape(-1, 5)
    first, end, delta, origin, limit = table.T.astype(np.int32)
    counts = (end - first).astype(np.int64)
    within = (np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)).astype(
        np.int32
    )
    limits = np.repeat(limit, counts)
    limits += np.where(limits < ALL_TOKENS, within, 0)
    per_read = np.fromiter((len(read.readers) for read in reads), np.int64, len(reads))
    total = np.concatenate([[0], np.cumsum(counts)])[np.concatenate([[0], np.cumsum(per_read)])]
    return _AskedEntries(
        np.diff(total), np.repeat(first, counts) + within, np.repeat(delta, counts), limits,
        np.repeat(origin, counts),
    )  # fmt: skip


@dataclass(frozen=True, slots=True, eq=False)
class _EntryBlocks:
    """Blocks of adjacent entries of one read, and the tokens begin:begin + length that at least one
    of them sees. quantized: 0 or 1."""

    base: Int64s
    begin: Int64s
    length: Int64s
    first: Int64s
    count: Int64s
    quantized: Int64s


def _entry_blocks(
    reads: Sequence[KVRead], bases: _Bases, asked: _AskedEntries, size: int
) -> _EntryBlocks:
    runs = [
        (bases.number(run), run.begin, run.end, run.key_scales is not None)
        for run in (read.run for read in reads)
    ]
    per_read = -(-asked.counts // size)
    table = np.repeat(np.asarray(runs, dtype=np.int64).reshape(-1, 4), per_read, axis=0)
    base, begin, end, quantized = table.T
    within = np.arange(len(table)) - np.repeat(np.cumsum(per_read) - per_read, per_read)
    counts = np.repeat(asked.counts, per_read)
    first = np.repeat(np.cumsum(asked.counts) - asked.counts, per_read) + within * size
    count = np.minimum(size, counts - within * size)
    seen = np.maximum.reduceat(asked.limit, first) if len(first) else first
    length = np.minimum(end, seen) - begin
    some = length > 0
    return _EntryBlocks(
        base[some], begin[some], length[some], first[some], count[some], quantized[some]
    )


@dataclass(frozen=True, slots=True, eq=False)
class _Pieces:
    """How many pieces the tokens of each block are cut into, and of how many tokens each."""

    number: Int64s
    tokens: Int64s

    @classmethod
    def cut(
        cls, blocks: _EntryBlocks, kv_heads: int, programs: int, min_keys: int,
        capacity: TableCapacity,
    ) -> _Pieces:  # fmt: skip
        """Pieces of about equal length, as many as fit the tables."""
        plain = blocks.length[blocks.quantized == 0].sum()
        work = np.where(blocks.quantized, blocks.length.sum() - plain, plain) * kv_heads
        target = np.maximum(min_keys, -(-work // programs))
        while True:
            number = np.maximum(1, (blocks.length / target + 0.5).astype(np.int64))
            tokens = -(-blocks.length // (number * PIECE_TOKENS)) * PIECE_TOKENS
            number = -(-blocks.length // tokens)
            fits = number.sum() <= capacity.items
            if (fits and number @ blocks.count <= capacity.entries) or (number == 1).all():
                return cls(number, tokens)
            target *= 2


def _items(blocks: _EntryBlocks, pieces: _Pieces) -> tuple[Int32s, Int64s]:
    """The items in the order in which they run, and for each of their entries its number among
    those asked."""
    number = pieces.number
    block = np.repeat(np.arange(len(number)), number)
    piece = np.arange(len(block)) - np.repeat(np.cumsum(number) - number, number)
    skipped = piece * pieces.tokens[block]
    length = np.minimum(pieces.tokens[block], blocks.length[block] - skipped)
    # plain ones first, then long ones; blocks that read the same tokens are neighbors
    order = np.lexsort((skipped, -length, blocks.quantized[block]))
    block, skipped, length = block[order], skipped[order], length[order]
    count = blocks.count[block]
    first = np.cumsum(count) - count
    items = np.zeros((len(block), ITEM_WIDTH), dtype=np.int32)
    begin = blocks.begin[block] + skipped
    for column, values in enumerate(
        (blocks.base[block], begin, begin + length, first, count, blocks.quantized[block])
    ):
        items[:, column] = values
    source = np.arange(count.sum()) + np.repeat(blocks.first[block] - first, count)
    return items, source
