"""A runner whose steps are computed late: what is launched waits in a queue, as on a device."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from ragcache.engine import EngineConfig, Segment
from ragcache.engine.batch import ScheduledChunk
from ragcache.engine.decode_batch import DecodeBatch
from ragcache.engine.kv_cache import BlockPool, BlockTable
from ragcache.engine.runner import RaggedModelRunner
from ragcache.engine.sampler import PendingTokens, SampledToken, Sampler, SamplerState
from ragcache.errors import UnusableLogits
from ragcache.models import CausalLM
from ragcache.states import KVStates
from tests.ragcache.engine.stepped_engine import BLOCK_SIZE, ManualClock, SteppedCore

Work = Callable[[], None]
Result = SampledToken | UnusableLogits


class Stream:
    """Work of a device, computed in the order of its launches, and not before it is waited for."""

    def __init__(self) -> None:
        self._queue: deque[Work] = deque()
        self.computed = 0

    def launch(self, work: Work) -> None:
        self._queue.append(work)

    def synchronize(self) -> None:
        self.run_until(lambda: not self._queue)

    def run_until(self, done: Callable[[], bool]) -> None:
        while not done():
            self._queue.popleft()()
            self.computed += 1


class DelayedPool(BlockPool):
    """Blocks that are cleared and copied late. Freed ones are filled with what is no number."""

    stream: Stream

    def clear_blocks(self, block_ids: Iterable[int]) -> None:
        taken = list(block_ids)
        self.stream.launch(lambda: super(DelayedPool, self).clear_blocks(taken))

    def copy_block(self, source: int, target: int) -> None:
        self.stream.launch(lambda: super(DelayedPool, self).copy_block(source, target))

    def free_blocks(self, block_ids: Iterable[int]) -> None:
        freed = list(block_ids)
        super().free_blocks(freed)
        self.stream.launch(lambda: self._spoil(freed))

    def _spoil(self, block_ids: Iterable[int]) -> None:
        for block_id in block_ids:
            here = slice(block_id * self.block_size, (block_id + 1) * self.block_size)
            self.keys[:, :, here] = torch.nan
            self.values[:, :, here] = torch.nan


@dataclass(eq=False)
class DelayedTokens:
    """Tokens that are sampled when the stream comes to them."""

    stream: Stream
    inputs: Tensor
    results: list[Result] | None = None

    def wait(self) -> list[Result]:
        self.stream.run_until(lambda: self.results is not None)
        assert self.results is not None
        return self.results


@dataclass
class DelayedTimestamp:
    """A place in a stream, by how much work comes before it."""

    at: int | None = None

    def elapsed_time(self, end: DelayedTimestamp, /) -> float:
        assert self.at is not None, "the timestamp was not reached"
        assert end.at is not None, "the timestamp was not reached"
        return end.at - self.at


class DelayedSampler(Sampler):
    """Samples when the stream comes to it."""

    def __init__(self, stream: Stream, device: torch.device) -> None:
        super().__init__(device)
        self.stream = stream

    def timestamp(self) -> DelayedTimestamp:
        timestamp = DelayedTimestamp()

        def reach() -> None:
            timestamp.at = self.stream.computed

        self.stream.launch(reach)
        return timestamp

    def launch(
        self, logits: Tensor, states: Sequence[SamplerState],
        forbidden: Sequence[Collection[int]] | None = None,
        masks: Sequence[Tensor | None] | None = None,
    ) -> PendingTokens:  # fmt: skip
        pending = DelayedTokens(self.stream, torch.full((len(states),), -1))
        bans = [frozenset(each) for each in forbidden or [()] * len(states)]
        # a constraint may use one buffer for all of its masks
        copies = [None if mask is None else mask.clone() for mask in masks or [None] * len(states)]

        def sample() -> None:
            results = super(DelayedSampler, self).launch(logits, states, bans, copies).wait()
            for row, result in enumerate(results):
                pending.inputs[row] = getattr(result, "token", 0)
            pending.results = results

        self.stream.launch(sample)
        return pending


@dataclass
class DelayedRunner(RaggedModelRunner):
    """Computes what is launched when its tokens are waited for, with `previous` as it is then.

    A step checks that nobody has given back the memory of the segments that it reads. prepared,
    continued: how often each kind of step was planned. pending: steps that are not computed; ahead:
    how often one was launched while another was pending. failures: raised by the next launches,
    where they are not None.
    """

    model: CausalLM
    late: Stream = field(default_factory=Stream)
    prepared: int = 0
    continued: int = 0
    ahead: int = 0
    pending: int = 0
    failures: deque[Exception | None] = field(default_factory=deque)

    asynchronous = True

    def __post_init__(self) -> None:
        super().__init__(self.model)
        self._chunks: list[ScheduledChunk] = []
        self._follows: list[int] = []
        self._version = -1  # of the last step's decode batch, if it computed nothing else
        self._read: list[weakref.ref[Tensor]] = []
        self._blocks: list[list[int]] = []

    def create_pool(self, nbytes: int) -> BlockPool:
        pool = DelayedPool.create(self.model, nbytes, BLOCK_SIZE)
        pool.stream = self.late
        return pool

    def create_sampler(self) -> Sampler:
        return DelayedSampler(self.late, self.model.device)

    def prepare_batch(
        self,
        chunks: Sequence[ScheduledChunk],
        previous: Tensor | None = None,
        decoding: DecodeBatch | None = None,
    ) -> Callable[[], Tensor]:
        own = [] if decoding is None else decoding.chunks()
        self._follows = [] if decoding is None else decoding.follows.tolist()
        if decoding is not None and decoding.rows:
            assert_arrays_follow_tables(decoding)
            if not chunks and decoding.version == self._version:
                return self._continued(own, previous)
        self._version = -1 if decoding is None or chunks else decoding.version
        self.prepared += 1
        self._read, self._chunks = _copied([*own, *chunks])
        self._blocks = [_blocks(chunk) for chunk in self._chunks]
        return self._planned(previous)

    def _continued(
        self, own: Sequence[ScheduledChunk], previous: Tensor | None
    ) -> Callable[[], Tensor]:
        self.continued += 1
        assert previous is not None
        assert len(previous) == len(self._chunks) == len(own)
        assert [each.private for each in own] == [each.private for each in self._chunks]
        assert self._follows == [*range(len(own))]
        chunks = []
        for row, chunk in enumerate(self._chunks):
            assert (len(chunk.token_ids), chunk.wants_logits) == (1, True)
            [before] = chunk.position_ids
            assert chunk.private.positions[-1] == before
            known, self._blocks[row] = self._blocks[row], _blocks(chunk)
            assert self._blocks[row][: len(known)] == known, "a device's tables have the old block"
            chunks.append(replace(chunk, position_ids=(before + 1,)))
        self._chunks = chunks
        return self._planned(previous)

    def _planned(self, previous: Tensor | None) -> Callable[[], Tensor]:
        chunks, read, follows = self._chunks, self._read, self._follows
        self.builder.forget()
        step = self.builder.build_batch(chunks)
        wanted = sum(len(chunk.logit_rows(0)) for chunk in chunks)
        logits = torch.full((wanted, self.model.model.config.vocab_size), torch.nan)

        def compute() -> None:
            assert all(each() is not None for each in read), "a segment was given back too early"
            tokens = step.token_ids.clone()
            for row, source in enumerate(follows):
                assert previous is not None
                assert previous[source] >= 0, "the token has been sampled"
                tokens[row] = previous[source]
            logits.copy_(self.model.forward(replace(step, token_ids=tokens)))
            self.pending -= 1

        def launch() -> Tensor:
            failure = self.failures.popleft() if self.failures else None
            if failure is not None:
                raise failure
            self.ahead += bool(self.pending)
            self.pending += 1
            self.late.launch(compute)
            return logits

        return launch


def assert_arrays_follow_tables(batch: DecodeBatch) -> None:
    """Each row is where its sequence's blocks say."""
    assert (np.diff(batch.serials) > 0).all()
    for row, (sequence, table) in enumerate(zip(batch.sequences, batch.tables, strict=True)):
        assert sequence.private is table
        assert not sequence.finished
        assert batch.length[row] == table.length < table.capacity
        assert batch.blocks[row, : len(table.block_ids)].tolist() == table.block_ids


def _blocks(chunk: ScheduledChunk) -> list[int]:
    return list(chunk.private.block_ids) if isinstance(chunk.private, BlockTable) else []


def _copied(
    chunks: Sequence[ScheduledChunk],
) -> tuple[list[weakref.ref[Tensor]], list[ScheduledChunk]]:
    """The chunks over copies of their segments, and weak references to what was copied: work in the
    queue keeps no memory, as on a device."""
    copies: dict[int, KVStates] = {}
    read, found = [], []
    for chunk in chunks:
        segments = []
        for segment in chunk.segments:
            states = segment.states
            read.append(weakref.ref(states.keys))
            if id(states) not in copies:
                keys, values = states.keys.clone(), states.values.clone()
                copies[id(states)] = KVStates(keys, values, states.start)
            segments.append(Segment(copies[id(states)], segment.start, segment.name))
        found.append(replace(chunk, segments=tuple(segments)))
    return read, found


def delayed_core(
    causal: CausalLM, settings: EngineConfig | None = None, clock: ManualClock | None = None
) -> SteppedCore:
    return SteppedCore(DelayedRunner(causal), settings, clock)
