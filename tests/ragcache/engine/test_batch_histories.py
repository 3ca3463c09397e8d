"""Any history of steps, against attention by definition: rotary positions and ALiBi."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ragcache.attention import Reference, Rotation
from ragcache.attention.cpu import Products
from ragcache.engine import Segment
from ragcache.engine.batch import StepBuilder
from ragcache.engine.layout import Work
from ragcache.engine.pool import ChunkPool
from ragcache.engine.private import Pages, Room
from ragcache.states import KVStates
from tests.conftest import DEVICE
from tests.ragcache.attention.dense import Seen, definition, frequencies, moved

BACKENDS = (Reference(), Products()) if DEVICE == "cpu" else (Reference(),)
HEADS, KV_HEADS, DIM, SMALL, SCALE = 4, 2, 6, 2, 0.4


class Exact:
    """Rotary positions in float64."""

    slopes = None

    def relocation(self, delta: Tensor) -> Rotation:
        angle = -delta.double()[:, None] * frequencies(DIM)
        return Rotation(angle.cos(), angle.sin())


class Alibi:
    slopes = 0.5 ** torch.arange(1, HEADS + 1, dtype=torch.float64)

    def relocation(self, delta: Tensor) -> None:
        return None


class History:
    """Requests over one layer of random states, and beside them all that each has seen."""

    def __init__(self, data: st.DataObject, scheme: Exact | Alibi) -> None:
        self.draw, self.scheme = data.draw, scheme
        self.generator = torch.Generator(torch.get_default_device()).manual_seed(
            self.draw(st.integers(0, 10_000))
        )
        keys, values = self.normal(1, KV_HEADS, 400), self.normal(1, KV_HEADS, 400)
        self.pool = ChunkPool(keys, values, SMALL)
        self.modules = [self.module() for _ in range(3)]
        model: Any = SimpleNamespace(scheme=scheme, device=torch.get_default_device())
        self.builder = StepBuilder(model)
        self.requests = [self.request() for _ in range(self.draw(st.integers(1, 3)))]

    def normal(self, *sizes: int) -> Tensor:
        return torch.randn(*sizes, DIM, generator=self.generator, dtype=torch.float64)

    def module(self) -> KVStates:
        length, start = self.draw(st.integers(1, 6)), self.draw(st.integers(0, 50))
        return KVStates(*self.normal(2, 1, KV_HEADS, length), start)

    def request(self, like: Known | None = None) -> Known:
        private: Pages | Room = Pages(self.pool)
        if like is None and self.draw(st.integers(0, 3)) == 0:
            private = Room(*self.normal(2, 1, KV_HEADS, 60))
        placed = st.tuples(st.sampled_from(self.modules), st.integers(0, 30))
        segments = tuple(Segment(*each) for each in self.draw(st.lists(placed, max_size=3)))
        return Known(segments, private, self.normal(KV_HEADS, 0), self.normal(KV_HEADS, 0))

    def sharer(self, of: Known) -> Known:
        """A request that begins with full chunks of another, under the same segments."""
        assert isinstance(of.private, Pages)
        chunks = self.draw(st.integers(0, of.private.length // SMALL))
        known = self.request(like=of)
        assert isinstance(known.private, Pages)
        known.private.chunk_ids += of.private.chunk_ids[:chunks]
        known.private.advance(of.private.positions[: chunks * SMALL])
        known.segments = of.segments
        known.keys, known.values = (x[:, : chunks * SMALL] for x in (of.keys, of.values))
        return known

    def step(self) -> None:
        active = self.draw(st.lists(st.sampled_from(self.requests), min_size=1, unique=True))
        counts = [self.draw(st.sampled_from([1, 1, 1, 2, 5])) for _ in active]
        works = [self.work(known, count) for known, count in zip(active, counts, strict=True)]
        plan = self.builder.build(works).plan
        rows = sum(counts)
        query, key, value = (self.normal(n, rows) for n in (HEADS, KV_HEADS, KV_HEADS))
        plan.write(0, key, value)
        expected, begin = list[Tensor](), 0
        for known, work in zip(active, works, strict=True):
            here = slice(begin, begin + len(work.token_ids))
            expected += known.sees(self.scheme, work, query[:, here], key[:, here], value[:, here])
            begin = here.stop
        for backend in BACKENDS:
            out = backend.attend(plan, 0, query, key, value, scale=SCALE)
            torch.testing.assert_close(out, torch.stack(expected), rtol=1e-10, atol=1e-10)

    def work(self, known: Known, count: int) -> Work:
        private = known.private
        if isinstance(private, Pages):
            missing = -(-(private.length + count) // SMALL) - len(private.chunk_ids)
            after = private.chunk_ids[-1] if private.chunk_ids else None
            private.chunk_ids += self.pool.allocate(max(missing, 0), after) or []
        positions, last = list[int](), private.positions[-1] if private.length else 3
        for _ in range(count):
            last += self.draw(st.sampled_from([1, 1, 1, 8]))
            positions.append(last)
        return Work(known.segments, private, [0] * count, positions)


class Known:
    """A request, with copies of its own states. keys, values: [Hkv, n, D]."""

    def __init__(
        self, segments: tuple[Segment, ...], private: Pages | Room, keys: Tensor, values: Tensor
    ) -> None:
        self.segments, self.private, self.keys, self.values = segments, private, keys, values

    def sees(
        self, scheme: Exact | Alibi, work: Work, query: Tensor, key: Tensor, value: Tensor
    ) -> list[Tensor]:
        """Every new row by definition; takes the new states."""
        self.keys, self.values = torch.cat([self.keys, key], 1), torch.cat([self.values, value], 1)
        past = self.private.length
        self.private.advance(work.position_ids)
        where = torch.tensor(list(self.private.positions))
        rows = []
        for at, position in enumerate(work.position_ids):
            end = past + at + 1
            seen = [placed(each, scheme) for each in self.segments if each.start <= position]
            seen.append(Seen(self.keys[:, :end], self.values[:, :end], where[:end]))
            rows.append(definition(query[:, at], seen, SCALE, scheme.slopes, position))
        return rows


def placed(segment: Segment, scheme: Exact | Alibi) -> Seen:
    keys, values = segment.states.keys[0], segment.states.values[0]
    if scheme.slopes is None:
        keys = moved(keys, segment.delta, DIM)
    return Seen(keys, values, torch.arange(segment.start, segment.end))


@pytest.mark.parametrize("scheme", [Exact(), Alibi()], ids=["rotary", "alibi"])
@given(data=st.data())
@settings(max_examples=40)
def test_every_row_of_any_step_sees_what_it_should(
    scheme: Exact | Alibi, data: st.DataObject
) -> None:
    history = History(data, scheme)
    for _ in range(data.draw(st.integers(1, 8))):
        history.step()
        paged = [each for each in history.requests if isinstance(each.private, Pages)]
        if paged and len(history.requests) < 5 and data.draw(st.booleans()):
            history.requests.append(history.sharer(data.draw(st.sampled_from(paged))))
