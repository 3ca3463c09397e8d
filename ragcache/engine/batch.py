"""Ragged batches: the new tokens of all requests in one row of tokens, and the plan over them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ragcache.attention import (
    Asking,
    PageRows,
    PageWrite,
    RunRows,
    Square,
    StepPlan,
    Write,
)
from ragcache.engine.layout import Layout, Tail, Work, lay_out
from ragcache.engine.private import Pages
from ragcache.models import CausalLM, Step

Ints = NDArray[np.int64]


class StepBuilder:
    """Builds steps, and keeps what does not change while the same requests decode."""

    def __init__(self, model: CausalLM) -> None:
        self.model = model
        self.rebuilt = 0
        self._signature: object = None
        self._frame: _Frame | None = None

    def build(self, works: Sequence[Work]) -> Step:
        """Flattens the works to rows 0..T-1. Logits are wanted of the last row of each that
        asks."""
        signature = tuple(_shape(work) for work in works)
        if self._frame is None or None in signature or signature != self._signature:
            self._frame = _Frame.of(self.model, works)
            self._signature = signature
            self.rebuilt += 1
        return self._frame.step(works)

    def forget(self) -> None:
        """Lets go of the states that the last step read."""
        self._frame = None


def _shape(work: Work) -> object:
    """Equal for two steps of a request between which its reading does not change; None where it
    always does."""
    private = work.private
    if len(work.token_ids) != 1 or not isinstance(private, Pages):
        return None
    seen = sum(segment.start <= work.position_ids[0] for segment in work.segments)
    return (private, work.wants_logits, private.length // private.pool.chunk, seen)


@dataclass(frozen=True, slots=True, eq=False)
class _Frame:
    """The part of a plan that stays while its requests decode."""

    model: CausalLM
    layout: Layout
    plan: StepPlan  # with the pages and writes of the first step
    starts: Ints  # [M]: where each asking row's run begins
    logit_rows: Tensor

    @classmethod
    def of(cls, model: CausalLM, works: Sequence[Work]) -> _Frame:
        layout = lay_out(works, gapless=model.scheme.slopes is not None)
        asking, starts = _asking(model, layout)
        own = _own(layout)
        plan = StepPlan(
            asking=asking,
            runs=_run_rows(layout),
            squares=tuple(Square(begin, end) for begin, end in layout.squares),
            pages=_pages(model, layout.tails),
            writes=(),
            table=_device(model, _table(layout)),
            own=None if own is None else _device(model, own),
            slopes=model.scheme.slopes,
        )
        wanted = [
            end - 1 for work, (_, end) in zip(works, layout.rows, strict=True) if work.wants_logits
        ]
        return cls(model, layout, plan, starts, _device(model, _ints(wanted)))

    def step(self, works: Sequence[Work]) -> Step:
        tokens = _ints([token for work in works for token in work.token_ids])
        positions = _ints([position for work in works for position in work.position_ids])
        plan = replace(self.plan, writes=self._writes(works), pages=self._filled_pages())
        if self.model.scheme.slopes is not None:
            plan = self._with_distances(plan, positions)
        return Step(
            _device(self.model, tokens), _device(self.model, positions), self.logit_rows, plan
        )

    def _writes(self, works: Sequence[Work]) -> tuple[Write, ...]:
        """All rows of paged requests in one write, each room in its own."""
        writes: list[Write] = []
        index: list[int] = []
        rows: list[int] = []
        pool = None
        for work, (begin, end) in zip(works, self.layout.rows, strict=True):
            if isinstance(work.private, Pages):
                pool = work.private.pool
                index += work.private.slots(end - begin)
                rows += range(begin, end)
            else:
                writes.append(work.private.write(begin, end))
        if pool is not None:
            everyone = not writes
            writes.append(
                PageWrite(
                    pool.keys,
                    pool.values,
                    _device(self.model, _ints(index)),
                    None if everyone else _device(self.model, _ints(rows)),
                )
            )
        return tuple(writes)

    def _filled_pages(self) -> PageRows | None:
        """The pages with a mask over what this step fills."""
        pages = self.plan.pages
        if pages is None:
            return None
        mask = np.full(pages.mask.shape, -np.inf, dtype=np.float32)
        chunk = pages.chunk
        for row, tail in enumerate(self.layout.tails):
            length = tail.private.length + 1
            filled = sum(min(chunk, length - number * chunk) for number in tail.chunks)
            mask[row, :filled] = 0
        return replace(pages, mask=_device(self.model, mask).to(pages.mask.dtype))

    def _with_distances(self, plan: StepPlan, positions: Ints) -> StepPlan:
        """ALiBi: how far each row is from what it reads."""
        asking, pages = plan.asking, plan.pages
        if asking is not None:
            away = self.starts - positions[asking.rows.cpu().numpy()]
            asking = replace(asking, distance=_floats(self.model, away))
        if pages is not None:
            away = np.zeros(pages.mask.shape, dtype=np.int64)
            for row, tail in enumerate(self.layout.tails):
                now = positions[tail.row]
                own = (*tail.private.positions, now)
                chunk = pages.chunk
                seen = [p for n in tail.chunks for p in own[n * chunk : (n + 1) * chunk]]
                away[row, : len(seen)] = np.asarray(seen) - now
            pages = replace(pages, distance=_floats(self.model, away))
        return replace(plan, asking=asking, pages=pages, positions=_floats(self.model, positions))


def _asking(model: CausalLM, layout: Layout) -> tuple[Asking | None, Ints]:
    rows: list[int] = []
    deltas: list[int] = []
    starts: list[int] = []
    for run in layout.runs:
        for (first, end), delta, start in zip(run.readers, run.deltas, run.starts, strict=True):
            rows += range(first, end)
            deltas += [delta] * (end - first)
            starts += [start] * (end - first)
    if not rows:
        return None, _ints([])
    rotation = None
    if any(deltas):
        rotation = model.scheme.relocation(_device(model, _ints(deltas)))
    if rotation is not None:
        cos, sin = rotation.cos[:, None], rotation.sin[:, None]  # [M, 1, R/2]
        rotation = replace(rotation, cos=cos, sin=sin)
    return Asking(_device(model, _ints(rows)), rotation), _ints(starts)


def _run_rows(layout: Layout) -> tuple[RunRows, ...]:
    found, begin = [], 0
    for run in layout.runs:
        end = begin + sum(until - first for first, until in run.readers)
        found.append(RunRows(run.keys, run.values, begin, end))
        begin = end
    return tuple(found)


def _pages(model: CausalLM, tails: Sequence[Tail]) -> PageRows | None:
    if not tails:
        return None
    pool = tails[0].private.pool
    pages = np.zeros((len(tails), max(len(tail.chunks) for tail in tails)), dtype=np.int64)
    for row, tail in enumerate(tails):
        own = [tail.private.chunk_ids[n] for n in tail.chunks]
        pages[row] = own[0]  # where a row has fewer, nothing of another request is read
        pages[row, : len(own)] = own
    mask = pool.keys.new_zeros(len(tails), pages.shape[1] * pool.chunk)
    rows = _device(model, _ints([tail.row for tail in tails]))
    return PageRows(pool.keys, pool.values, pool.chunk, rows, _device(model, pages), mask)


def _table(layout: Layout) -> Ints:
    """Where each row's partial results over runs stand: [slots, T], M for none."""
    found: list[list[int]] = [[] for _ in range(layout.rows[-1][1])]
    at = 0
    for run in layout.runs:
        for first, end in run.readers:
            for row in range(first, end):
                found[row].append(at)
                at += 1
    table = np.full((max(map(len, found)), len(found)), at, dtype=np.int64)
    for row, places in enumerate(found):
        table[: len(places), row] = places
    return table


def _own(layout: Layout) -> Ints | None:
    """Where each row's result over its own tokens stands, None where in the order of the rows."""
    order = [row for begin, end in layout.squares for row in range(begin, end)]
    order += [tail.row for tail in layout.tails]
    if order == sorted(order):
        return None
    return np.argsort(_ints(order))


def _ints(values: Sequence[int]) -> Ints:
    return np.asarray(values, dtype=np.int64)


def _floats(model: CausalLM, values: Ints) -> Tensor:
    return _device(model, values.astype(np.float32))


def _device(model: CausalLM, values: NDArray[np.generic]) -> Tensor:
    return torch.from_numpy(values).to(model.device)
