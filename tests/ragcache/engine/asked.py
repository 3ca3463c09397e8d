"""Requests on the tiny model, computed in portions and beside others."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ragcache.engine import EncodeJob, Segment, encode
from ragcache.engine.batch import ScheduledChunk, StepBuilder
from ragcache.engine.kv_cache import BlockPool, BlockTable, ContiguousKV, RequestKV
from ragcache.models import CausalLM
from ragcache.states import KVStates
from tests.conftest import random_tokens

CHUNK = 4
CLOSE = {"rtol": 1e-4, "atol": 1e-5}


def small_pool(causal: CausalLM) -> BlockPool:
    return BlockPool.create(causal, 40 * CHUNK * causal.bytes_per_token, CHUNK)


def module(causal: CausalLM, length: int, start: int = 0) -> KVStates:
    [states] = encode(causal, [EncodeJob(random_tokens(length, seed=length), start)])
    return states


def in_room(
    causal: CausalLM,
    segments: Sequence[Segment],
    positions: Sequence[int],
    *,
    wants_logits: bool = True,
) -> ScheduledChunk:
    private = ContiguousKV.allocate(causal, len(positions))
    tokens = random_tokens(len(positions), seed=3)
    return ScheduledChunk(tuple(segments), private, tokens, positions, wants_logits)


class Asked:
    """A request on the tiny model, computed in portions. tokens: all of it, from `start` on."""

    def __init__(
        self,
        causal: CausalLM,
        private: RequestKV,
        tokens: Sequence[int],
        segments: Sequence[Segment] = (),
        start: int = 0,
    ) -> None:
        self.causal, self.private, self.segments = causal, private, tuple(segments)
        self.tokens = tokens
        self.positions: Sequence[int] = range(start, start + len(tokens))

    def work(self, count: int = 1, *, wants_logits: bool = True) -> ScheduledChunk:
        begin = self.private.length
        here = slice(begin, begin + count)
        tokens, positions = self.tokens[here], self.positions[here]
        return ScheduledChunk(self.segments, self.private, tokens, positions, wants_logits)

    def computed(self, count: int = 1) -> None:
        begin = self.private.length
        self.private.advance(self.positions[begin : begin + count])

    def alone(self, end: int) -> tuple[Tensor, ContiguousKV]:
        """Logits of token end - 1 and all states, in one pass with nobody else."""
        room = ContiguousKV.allocate(self.causal, end)
        given = ScheduledChunk(self.segments, room, self.tokens[:end], self.positions[:end])
        [logits] = self.causal.forward(StepBuilder(self.causal).build([given]))
        room.advance(self.positions[:end])
        return logits, room


def in_pages(
    causal: CausalLM,
    pool: BlockPool,
    count: int,
    seed: int,
    segments: Sequence[Segment] = (),
    start: int = 0,
) -> Asked:
    """Room for `count` tokens in chunks that nobody else has."""
    private = BlockTable(pool)
    chunks = pool.allocate(-(-count // CHUNK))
    assert chunks is not None
    private.chunk_ids += chunks
    return Asked(causal, private, random_tokens(count, seed=seed), segments, start)


def together(
    builder: StepBuilder, asked: Sequence[Asked], counts: Sequence[int] | None = None
) -> Tensor:
    """One step of all, [R, vocabulary]."""
    counts = counts or [1] * len(asked)
    works = [each.work(count) for each, count in zip(asked, counts, strict=True)]
    logits = builder.model.forward(builder.build(works))
    for each, count in zip(asked, counts, strict=True):
        each.computed(count)
    return logits


def as_alone(logits: Tensor, asked: Sequence[Asked]) -> None:
    """Every request has the logits that it has with nobody else."""
    for row, each in zip(logits, asked, strict=True):
        torch.testing.assert_close(row, each.alone(each.private.length)[0], **CLOSE)
