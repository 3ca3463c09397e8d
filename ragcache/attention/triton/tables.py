"""The tables of a step: a plan and its rows, as arrays that the kernels walk.

`AttentionTables` holds the arrays at fixed device addresses, so that CUDA graphs can be captured
over them, and uploads them from pinned memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ragcache.attention.triton.plan import (
    BASE_WIDTH,
    ITEM_WIDTH,
    SCALES_WIDTH,
    AttentionPlan,
    Int32s,
    Int64s,
    TableCapacity,
)
from ragcache.machine import new_event

HOST_BUFFERS: Final = 3
"""Uploads that can be in flight at once."""

LINE_WORDS: Final = 32
"""Sections are aligned to lines of so many int32, and copied in whole lines."""

LINE_BYTES: Final = 4 * LINE_WORDS

UPLOAD_LINES: Final = 32
"""Lines that a program of the upload copies."""

COUNTS: Final = 16
"""Numbers of the first section."""

CHAIN_SECTIONS, STEP_SECTIONS = 3, 7
"""Number of sections of recurrent layers, and of sections of `StepArrays`, which come last."""

CHAIN_WIDTH: Final = 4
"""Fields of a chain (`recurrent_kernels`)."""

_ADDRESSES: Final = ((1, "bases", 2 * BASE_WIDTH), (2, "scales", 2 * SCALES_WIDTH))
"""Sections whose rows begin with two addresses: their numbers, names and words of a row."""


@dataclass(frozen=True, slots=True, eq=False)
class TableViews:
    """The tables on the device. int32, except where marked.

    counts [16]: how many plain items there are, how many of runs in eight bits after them, and how
        many rows.
    bases [bases, 4], int64: addresses of keys and values, and their strides of a layer and of a
        head, in elements.
    scales [bases, 6], int64: addresses of key and value scales (0: a plain base), and their strides
        of a layer and of a head, keys first.
    items [items, 8]: base, begin and end token, first entry, number of entries, in eight bits or
        not, 0, 0. Long items first.
    entry_row, entry_delta, entry_limit, entry_origin [entries]: see `KVConsumer`; an entry's row
        sees the tokens of its item that are below entry_limit.
    row_ptr [rows + 1], row_entries [entries]: row t has entries row_entries[row_ptr[t] :
        row_ptr[t + 1]]. Rows of padding have none.
    chain [rows, 4], row_chain, keep [rows]: of recurrent layers, see `recurrent_kernels`.
    position_ids, token_ids [rows], int64: of the new tokens. logit_rows [rows], int64: the rows
        whose logits are wanted.
    write_base, write_slot [rows]: where keys and values of the new tokens go; slot -1: nowhere.
    tail_length [rows]: keys of a row that decodes which its tail reads before the new one; -1 for
        padding.
    pages [rows, pages_per_row]: blocks of the pool. Token j of a tail is in pages[row, j // size],
        where size is the block size, and the new token is token tail_length.
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
    chain: Tensor
    row_chain: Tensor
    keep: Tensor
    position_ids: Tensor
    token_ids: Tensor
    logit_rows: Tensor
    write_base: Tensor
    write_slot: Tensor
    tail_length: Tensor
    pages: Tensor

    @property
    def live_rows(self) -> Tensor:
        """How many rows there are, [1]. The others are padding."""
        return self.counts[2:3]


@dataclass(frozen=True, slots=True, eq=False)
class TableContent:
    """The lines that an upload copies, as they cross to the tables of another rank."""

    lines: Sequence[int]
    """Number of lines of each section."""
    parts: Sequence[memoryview]
    """The lines of all sections, in one part or more."""


@dataclass(frozen=True, slots=True, eq=False)
class StepArrays:
    """The arrays that change in every step, on the host (`TableViews`)."""

    position_ids: Int64s
    token_ids: Int64s
    logit_rows: Int64s
    write_base: Int32s
    write_slot: Int32s
    tail_length: Int32s
    pages: Int32s


class AttentionTables:
    """The tables of one step at fixed addresses of a device.

    An upload is queued on the current stream; the host memory that it reads is used again when it
    has run. Not thread-safe.

    views: on the device. step: on the host; filled by the caller, and kept between steps.

    Example:
        tables.set_plan(build_plan(reads, rows=rows, heads=heads, capacity=tables.capacity))
        tables.begin_step(rows)
        tables.step.position_ids[:rows] = positions
        tables.upload()
    """

    def __init__(self, capacity: TableCapacity, device: torch.device | str) -> None:
        self.capacity, self.device = capacity, torch.device(device)
        self._memory = TableMemory(_sections(capacity), self.device)
        self.views = TableViews(**self._memory.views())
        master = np.zeros_like(self._memory.buffers[0])
        self._step_sections = self._memory.sections[-STEP_SECTIONS:]
        self._master = master
        self.step = StepArrays(**{each.name: each.array(master) for each in self._step_sections})
        self.step.write_slot[:] = -1
        self.step.tail_length[:] = -1
        self._rows = self._uploaded_rows = capacity.rows
        self.views.row_chain.fill_(-1)
        self.views.keep.fill_(-1)
        self._chained_rows = 0

    def set_plan(self, plan: AttentionPlan) -> None:
        """Lay out a plan for the next upload. Rows beyond its own get no entries."""
        host, lines = self._memory.open_host(), self._memory.lines
        host["counts"][:3] = plan.plain_items, plan.quantized_items, plan.rows
        bases, items, entries = len(plan.bases), len(plan.items), plan.entries
        host["bases"][:bases] = plan.bases
        host["scales"][:bases] = plan.scales
        host["items"][:items] = plan.items
        host["entry_fields"][:, :entries] = plan.entry_fields
        host["row_entries"][:entries] = plan.row_entries
        row_ptr = host["row_ptr"]
        row_ptr[: plan.rows + 1] = plan.row_ptr
        row_ptr[plan.rows + 1 :] = entries
        scales = 2 * SCALES_WIDTH * bases if plan.quantized_items else 0  # else nothing reads them
        wide = COUNTS, 2 * BASE_WIDTH * bases, scales, ITEM_WIDTH * items
        words = (*wide, *[entries] * 5, len(row_ptr))  # four fields of entries, row_entries
        lines[: len(words)] = [-(-count // LINE_WORDS) for count in words]

    def set_chains(
        self, chains: Sequence[tuple[int, int, int]], keep: Sequence[tuple[int, int]], rows: int
    ) -> None:
        """Lay out the recurrent states of a step for the next upload.

        Args:
            chains: First row, row behind the last, and slot before (-1: none), in order of rows
                and without gaps between them.
            keep: Rows, and the slots for the states behind them.
            rows: Number of rows.
        """
        host, most = self._memory.open_host(), self.capacity.rows
        # whole lines are copied, so that the rows behind the last one are padding, too
        filled = min(most, -(-max(rows, self._chained_rows) // LINE_WORDS) * LINE_WORDS)
        host["chain"][:filled] = 0
        host["row_chain"][:filled] = host["keep"][:filled] = -1
        if chains:
            placed = np.array(chains, dtype=np.int32)
            host["chain"][: len(placed), :3] = placed
            owners = np.arange(len(placed)).repeat(placed[:, 1] - placed[:, 0])
            first = int(placed[0, 0])
            host["row_chain"][first : first + len(owners)] = owners
        if keep:
            at, slots = np.array(keep, dtype=np.int32).T
            host["keep"][at] = slots
        here = slice(-CHAIN_SECTIONS - STEP_SECTIONS, -STEP_SECTIONS)
        self._memory.lines[here] = [
            -(-each.nbytes * filled // (most * LINE_BYTES)) for each in self._memory.sections[here]
        ]
        self._chained_rows = rows

    def begin_step(self, rows: int) -> None:
        """Turn all rows into padding. Later uploads take the first `rows`."""
        step, filled = self.step, max(rows, self._rows)
        step.write_slot[:filled] = step.tail_length[:filled] = -1
        step.logit_rows[:filled] = 0
        self._rows = rows

    def upload(self, send: Callable[[TableContent], None] | None = None) -> None:
        """Queues the copies of `step`, which may be changed directly afterwards, and of the plan
        where one was set since the last upload.

        Args:
            send: Called with the content before it is copied.
        """
        self._memory.open_host()
        lines, capacity = self._memory.lines, self.capacity.rows
        rows = max(self._rows, self._uploaded_rows)  # those that are padding again too
        lines[-STEP_SECTIONS:] = [
            -(-section.nbytes * rows // (capacity * LINE_BYTES)) for section in self._step_sections
        ]
        for section, count in zip(self._step_sections, lines[-STEP_SECTIONS:], strict=True):
            here = slice(section.first_line, section.first_line + count)
            self._memory.buffer[here] = self._master[here]
        if send is not None:
            send(self._memory.content())
        self._memory.upload()
        self._uploaded_rows = self._rows

    def receive(self, given: TableContent, move: Callable[[Int64s], None]) -> None:
        """Queue the copies of the content of another rank's tables.

        Args:
            given: The content.
            move: Puts addresses of this rank in place of the other's.
        """
        host = self._memory.receive(given)
        for number, name, words in _ADDRESSES:
            if rows := given.lines[number] * LINE_WORDS // words:
                move(host[name][:rows, :2])
        self._memory.upload()


@dataclass(frozen=True, slots=True)
class Section:
    """An array in memory that is counted in lines."""

    name: str
    shape: tuple[int, ...]
    wide: bool
    first_line: int

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * (8 if self.wide else 4)

    @property
    def lines(self) -> int:
        return -(-self.nbytes // LINE_BYTES)

    def array(self, memory: Int32s) -> NDArray[Any]:
        """memory: [lines, words]."""
        words = memory.reshape(-1)[self.first_line * LINE_WORDS :][: self.nbytes // 4]
        return words.view(np.int64 if self.wide else np.int32).reshape(self.shape)

    def tensor(self, memory: Tensor) -> Tensor:
        """memory: [lines, words]."""
        words = memory.view(-1)[self.first_line * LINE_WORDS :][: self.nbytes // 4]
        return words.view(torch.int64 if self.wide else torch.int32).view(self.shape)


def _sections(capacity: TableCapacity) -> list[Section]:
    """Sections of the plan, of recurrent layers, and of the step."""
    entries, rows = (capacity.entries,), (capacity.rows,)
    shapes: list[tuple[str, tuple[int, ...], bool]] = [
        ("counts", (COUNTS,), False),
        ("bases", (capacity.bases, BASE_WIDTH), True),
        ("scales", (capacity.bases, SCALES_WIDTH), True),
        ("items", (capacity.items, ITEM_WIDTH), False),
        *((f"entry_{name}", entries, False) for name in ("row", "delta", "limit", "origin")),
        ("row_entries", entries, False),
        ("row_ptr", (capacity.rows + 1,), False),
        ("chain", (capacity.rows, CHAIN_WIDTH), False),
        *((name, rows, False) for name in ("row_chain", "keep")),
        *((name, rows, True) for name in ("position_ids", "token_ids", "logit_rows")),
        *((name, rows, False) for name in ("write_base", "write_slot", "tail_length")),
        ("pages", (capacity.rows, capacity.pages_per_row), False),
    ]
    return place_sections(shapes)


def place_sections(shapes: Sequence[tuple[str, tuple[int, ...], bool]]) -> list[Section]:
    """Place arrays one after another, behind the places of all.

    Args:
        shapes: Name and shape of each array, and whether it has 64 bits.
    """
    sections: list[Section] = []
    line = -(-2 * len(shapes) // LINE_WORDS)
    for name, shape, wide in shapes:
        sections.append(Section(name, shape, wide, line))
        line += sections[-1].lines
    return sections


def _host_arrays(sections: Sequence[Section], memory: Int32s) -> dict[str, NDArray[Any]]:
    """The sections, and `entry_fields`: four of them at once, if there are entries."""
    arrays = {each.name: each.array(memory) for each in sections}
    found = {each.name: each for each in sections}
    if "entry_row" not in found:
        return arrays
    first, last = found["entry_row"], found["entry_origin"]
    fields = memory[first.first_line : last.first_line + last.lines]
    return {**arrays, "entry_fields": fields.reshape(4, -1)}


class TableMemory:
    """Sections in one device buffer, and the ring of host buffers that they are copied from.

    A buffer begins with the first line of every section, and the number of lines to copy. buffer:
    the host's that is open, [lines, words]. lines: to copy by the next upload.
    """

    def __init__(self, sections: Sequence[Section], device: torch.device) -> None:
        self.sections = sections
        self.lines = [0] * len(sections)
        pinned = device.type == "cuda"
        shape = sections[-1].first_line + sections[-1].lines, LINE_WORDS
        self._device = torch.zeros(shape, dtype=torch.int32, device=device)
        self._ring = [
            torch.zeros(shape, dtype=torch.int32, pin_memory=pinned)
            for _ in range(HOST_BUFFERS if pinned else 1)
        ]
        self.buffers: list[Int32s] = [each.numpy() for each in self._ring]
        self._bytes = [each.reshape(-1).view(np.uint8).data for each in self.buffers]
        self._begins = [LINE_BYTES * each.first_line for each in sections]
        self._arrays = [_host_arrays(sections, memory) for memory in self.buffers]
        self._places = [memory.reshape(-1)[: 2 * len(sections)] for memory in self.buffers]
        for places in self._places:
            places[::2] = [each.first_line for each in sections]
        self._copied = [new_event() for _ in self._ring] if pinned else []
        self._at, self._opened = 0, False

    @property
    def buffer(self) -> Int32s:
        return self.buffers[self._at]

    @cached_property
    def _kernel(self) -> Any:
        """The upload, compiled: launching it as it is takes the host half the time."""
        from ragcache.attention.triton.kernels import upload_kernel

        assert not any(each.data_ptr() % 16 for each in (*self._ring, self._device)), "as compiled"
        return upload_kernel.warmup(
            self._ring[0], self._device, WORDS=LINE_WORDS, LINES=UPLOAD_LINES, grid=(1,)
        )

    def views(self) -> dict[str, Tensor]:
        return {each.name: each.tensor(self._device) for each in self.sections}

    def open_host(self) -> dict[str, NDArray[Any]]:
        """The sections of the next upload, in memory that no copy reads any longer."""
        if not self._opened:
            self._at = (self._at + 1) % len(self._ring)
            if self._copied:
                done = self._copied[self._at].query()  # type: ignore[no-untyped-call]
                if not done:  # asking keeps the interpreter
                    self._copied[self._at].synchronize()
            self._opened = True
        return self._arrays[self._at]

    def content(self) -> TableContent:
        """The lines wanted of all sections."""
        content = self._bytes[self._at]
        parts = [
            content[begin : begin + LINE_BYTES * count]
            for begin, count in zip(self._begins, self.lines, strict=True)
            if count
        ]
        return TableContent(self.lines, parts)

    def receive(self, given: TableContent) -> dict[str, NDArray[Any]]:
        """Fill the sections of the next upload. Returns them."""
        host, (content,) = self.open_host(), given.parts
        into, at = self._bytes[self._at], 0
        for begin, count in zip(self._begins, given.lines, strict=True):
            if count:
                nbytes = LINE_BYTES * count
                into[begin : begin + nbytes] = content[at : at + nbytes]
                at += nbytes
        self.lines[:] = given.lines
        return host

    def upload(self) -> None:
        """Copies the lines wanted of all sections. On a GPU a kernel reads them over the bus: in
        a copy engine they would queue behind whole documents."""
        if self._copied:
            self._places[self._at][1::2] = self.lines
            grid = len(self.sections), -(-max(self.lines) // UPLOAD_LINES), 1
            self._kernel[grid](self._ring[self._at], self._device, LINE_WORDS, UPLOAD_LINES)
            self._copied[self._at].record()
        else:
            device = self._device.numpy()
            for section, lines in zip(self.sections, self.lines, strict=True):
                here = slice(section.first_line, section.first_line + lines)
                device[here] = self.buffer[here]
        self.lines[:] = [0] * len(self.lines)
        self._opened = False
