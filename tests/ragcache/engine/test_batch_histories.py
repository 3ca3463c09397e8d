"""Batches that are kept between steps, and random histories of steps against the definition."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ragcache.attention import ReferenceAttentionBackend, Rotation
from ragcache.attention.cpu import CpuAttentionBackend
from ragcache.engine import Segment
from ragcache.engine.batch import BatchBuilder, ScheduledChunk
from ragcache.engine.contiguous_kv import ContiguousKV
from ragcache.engine.kv_cache import BlockPool, BlockTable
from ragcache.models import CausalLM
from ragcache.states import KVStates
from tests.conftest import scaled
from tests.ragcache.attention.scenes import Seen, definition, frequencies, moved
from tests.ragcache.engine.portioned_requests import (
    PortionedRequest,
    assert_same_alone,
    encoded_module,
    request_in_blocks,
    run_step,
    small_pool,
)
from tests.tiny_models import DEVICE, random_tokens


@pytest.fixture
def pool(causal: CausalLM) -> BlockPool:
    return small_pool(causal)


def decoding(causal: CausalLM, pool: BlockPool, filled: Sequence[int]) -> list[PortionedRequest]:
    segment = Segment(encoded_module(causal, 9, start=3), 0)
    asked = [
        request_in_blocks(causal, pool, 40, seed, [segment] if seed % 2 else [], 9)
        for seed in range(len(filled))
    ]
    run_step(BatchBuilder(causal), asked, filled)
    return asked


def test_batch_is_kept_until_a_block_fills(causal: CausalLM, pool: BlockPool) -> None:
    """Blocks of 4: the second request begins one with its 9th and 13th token, the first at 9."""
    builder, asked = BatchBuilder(causal), decoding(causal, pool, [5, 6])
    rebuilt = []
    for _ in range(8):
        assert_same_alone(run_step(builder, asked), asked)
        rebuilt.append(builder.rebuilt)
    assert rebuilt == [1, 1, 2, 3, 3, 3, 4, 5]


def test_batch_is_rebuilt_when_a_request_joins_or_leaves(causal: CausalLM, pool: BlockPool) -> None:
    builder, (a, b, c) = BatchBuilder(causal), decoding(causal, pool, [4, 4, 4])
    rebuilt = []
    for batch in ([a, b], [a, b], [a, b, c], [a, c], [a], [b, c], [c, b]):
        assert_same_alone(run_step(builder, batch), batch)
        rebuilt.append(builder.rebuilt)
    assert rebuilt == [1, 1, 2, 3, 4, 5, 6]


def test_batch_is_rebuilt_when_other_logits_are_wanted(causal: CausalLM, pool: BlockPool) -> None:
    builder, (a, b) = BatchBuilder(causal), decoding(causal, pool, [4, 4])
    assert builder.build_batch([a.next_chunk(), b.next_chunk()]).logit_rows.tolist() == [0, 1]
    assert builder.build_batch(
        [a.next_chunk(), b.next_chunk(wants_logits=False)]
    ).logit_rows.tolist() == [0]
    assert builder.rebuilt == 2


def test_batch_is_rebuilt_when_a_token_reaches_a_segment(causal: CausalLM, pool: BlockPool) -> None:
    """A prompt's own tokens before and behind a segment, computed one by one."""
    segment = Segment(encoded_module(causal, 5, start=3), 2)
    asked = request_in_blocks(causal, pool, 4, 1, [segment])
    asked.positions = [0, 1, 7, 8]
    builder = BatchBuilder(causal)
    for _ in asked.tokens:
        assert_same_alone(run_step(builder, [asked]), [asked])


def test_batch_is_rebuilt_for_an_equal_request(causal: CausalLM, pool: BlockPool) -> None:
    """And once the batch has been forgotten."""
    builder = BatchBuilder(causal)
    for seed in (1, 2):
        [asked] = decoding(causal, pool, [5])
        asked.tokens = [*asked.tokens[:5], *random_tokens(5, seed=seed)]
        assert_same_alone(run_step(builder, [asked]), [asked])
    builder.forget()
    assert_same_alone(run_step(builder, [asked]), [asked])
    assert builder.rebuilt == 3


def test_batch_is_rebuilt_for_prefills_and_contiguous_memory(
    causal: CausalLM, pool: BlockPool
) -> None:
    builder, [asked] = BatchBuilder(causal), decoding(causal, pool, [4])
    prefilling = request_in_blocks(causal, pool, 40, seed=5)
    for _ in range(2):
        run_step(builder, [asked, prefilling], [1, 2])
    assert builder.rebuilt == 2
    room = PortionedRequest(causal, ContiguousKV.allocate(causal, 9), random_tokens(9))
    [asked] = decoding(causal, pool, [4])
    for _ in range(2):
        run_step(builder, [asked, room])
    assert builder.rebuilt == 4


BACKENDS = (
    (ReferenceAttentionBackend(), CpuAttentionBackend())
    if DEVICE == "cpu"
    else (ReferenceAttentionBackend(),)
)
HEADS, KV_HEADS, DIM, SMALL, SCALE = 4, 2, 6, 2, 0.4


class Exact:
    """Rotary positions in float64. window: how many positions up to its own a row sees."""

    slopes = None

    def __init__(self, window: int | None = None) -> None:
        self.window = window

    def relocation(self, delta: Tensor) -> Rotation:
        angle = -delta.double()[:, None] * frequencies(DIM)
        return Rotation(angle.cos(), angle.sin())


class Alibi:
    window = None
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
        self.pool = BlockPool(keys, values, SMALL)
        self.modules = [self.module() for _ in range(3)]
        model: Any = SimpleNamespace(
            scheme=scheme,
            device=torch.get_default_device(),
            by_position=scheme.slopes is not None or scheme.window is not None,
            windows=() if scheme.window is None else (scheme.window,),
            softcap=None,
            layout=None,
            recurrent_bytes=0,
        )
        self.builder = BatchBuilder(model)
        self.requests = [self.request() for _ in range(self.draw(st.integers(1, 3)))]

    def normal(self, *sizes: int) -> Tensor:
        return torch.randn(*sizes, DIM, generator=self.generator, dtype=torch.float64)

    def module(self) -> KVStates:
        length, start = self.draw(st.integers(1, 6)), self.draw(st.integers(0, 50))
        return KVStates(*self.normal(2, 1, KV_HEADS, length), start)

    def request(self, like: Known | None = None) -> Known:
        private: BlockTable | ContiguousKV = BlockTable(self.pool)
        if like is None and self.draw(st.integers(0, 3)) == 0:
            private = ContiguousKV(*self.normal(2, 1, KV_HEADS, 60))
        placed = st.tuples(st.sampled_from(self.modules), st.integers(0, 30))
        segments = tuple(Segment(*each) for each in self.draw(st.lists(placed, max_size=3)))
        return Known(segments, private, self.normal(KV_HEADS, 0), self.normal(KV_HEADS, 0))

    def sharer(self, of: Known) -> Known:
        """A request that begins with full blocks of another, under the same segments."""
        assert isinstance(of.private, BlockTable)
        blocks = self.draw(st.integers(0, of.private.length // SMALL))
        known = self.request(like=of)
        assert isinstance(known.private, BlockTable)
        known.private.block_ids += of.private.block_ids[:blocks]
        known.private.advance(of.private.positions[: blocks * SMALL])
        known.segments = of.segments
        known.keys, known.values = (x[:, : blocks * SMALL] for x in (of.keys, of.values))
        return known

    def step(self) -> None:
        active = self.draw(st.lists(st.sampled_from(self.requests), min_size=1, unique=True))
        counts = [self.draw(st.sampled_from([1, 1, 1, 2, 5])) for _ in active]
        chunks = [
            self.next_chunk(known, count) for known, count in zip(active, counts, strict=True)
        ]
        metadata = self.builder.build_batch(chunks).metadata
        rows = sum(counts)
        query, key, value = (self.normal(n, rows) for n in (HEADS, KV_HEADS, KV_HEADS))
        metadata.write_states(0, key, value)
        expected, begin = list[Tensor](), 0
        for known, chunk in zip(active, chunks, strict=True):
            here = slice(begin, begin + len(chunk.token_ids))
            expected += known.sees(self.scheme, chunk, query[:, here], key[:, here], value[:, here])
            begin = here.stop
        for backend in BACKENDS:
            out = backend.attend(metadata, 0, query, key, value, scale=SCALE)
            torch.testing.assert_close(out, torch.stack(expected), rtol=1e-10, atol=1e-10)

    def next_chunk(self, known: Known, count: int) -> ScheduledChunk:
        private = known.private
        if isinstance(private, BlockTable):
            missing = -(-(private.length + count) // SMALL) - len(private.block_ids)
            after = private.block_ids[-1] if private.block_ids else None
            private.block_ids += self.pool.allocate_blocks(max(missing, 0), after) or []
        positions, last = list[int](), private.positions[-1] if private.length else 3
        for _ in range(count):
            last += self.draw(st.sampled_from([1, 1, 1, 8]))
            positions.append(last)
        return ScheduledChunk(known.segments, private, [0] * count, positions)


class Known:
    """A request, with copies of its own states. keys, values: [Hkv, n, D]."""

    def __init__(
        self,
        segments: tuple[Segment, ...],
        private: BlockTable | ContiguousKV,
        keys: Tensor,
        values: Tensor,
    ) -> None:
        self.segments, self.private, self.keys, self.values = segments, private, keys, values

    def sees(
        self,
        scheme: Exact | Alibi,
        chunk: ScheduledChunk,
        query: Tensor,
        key: Tensor,
        value: Tensor,
    ) -> list[Tensor]:
        """Every new row by definition; takes the new states."""
        self.keys, self.values = torch.cat([self.keys, key], 1), torch.cat([self.values, value], 1)
        past = self.private.length
        self.private.advance(chunk.position_ids)
        where = torch.tensor(list(self.private.positions))
        rows = []
        for at, position in enumerate(chunk.position_ids):
            end = past + at + 1
            seen = [placed(each, scheme) for each in self.segments if each.start <= position]
            seen.append(Seen(self.keys[:, :end], self.values[:, :end], where[:end]))
            seen = [in_window(each, position, scheme.window) for each in seen]
            rows.append(definition(query[:, at], seen, SCALE, scheme.slopes, position))
        return rows


def in_window(seen: Seen, position: int, window: int | None) -> Seen:
    """The states that a row at a position sees."""
    if window is None:
        return seen
    visible = position - seen.positions < window
    return Seen(seen.keys[:, visible], seen.values[:, visible], seen.positions[visible])


def placed(segment: Segment, scheme: Exact | Alibi) -> Seen:
    keys, values = segment.states.keys[0], segment.states.values[0]
    if scheme.slopes is None:
        keys = moved(keys, segment.delta, DIM)
    return Seen(keys, values, torch.arange(segment.start, segment.end))


@pytest.mark.parametrize(
    "scheme", [Exact(), Exact(window=9), Alibi()], ids=["rotary", "window", "alibi"]
)
@given(data=st.data())
@settings(max_examples=scaled(40, quick=0.1))
def test_rows_of_random_histories_equal_the_definition(
    scheme: Exact | Alibi, data: st.DataObject
) -> None:
    history = History(data, scheme)
    for _ in range(data.draw(st.integers(1, 8))):
        history.step()
        paged = [each for each in history.requests if isinstance(each.private, BlockTable)]
        if paged and len(history.requests) < 5 and data.draw(st.booleans()):
            history.requests.append(history.sharer(data.draw(st.sampled_from(paged))))
