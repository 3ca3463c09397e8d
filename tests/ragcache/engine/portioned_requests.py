"""Requests on the tiny model, computed in portions and beside others."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ragcache.engine import EncodeJob, Segment, encode
from ragcache.engine.batch import BatchBuilder, ScheduledChunk
from ragcache.engine.contiguous_kv import ContiguousKV
from ragcache.engine.kv_cache import BlockPool, BlockTable, RequestKV
from ragcache.models import CausalLM
from ragcache.states import KVStates
from tests.tiny_models import random_tokens

BLOCK_SIZE = 4
CLOSE = {"rtol": 1e-4, "atol": 1e-5}


def small_pool(causal: CausalLM) -> BlockPool:
    return BlockPool.create(causal, 40 * BLOCK_SIZE * causal.bytes_per_token, BLOCK_SIZE)


def encoded_module(causal: CausalLM, length: int, start: int = 0) -> KVStates:
    [states] = encode(causal, [EncodeJob(random_tokens(length, seed=length), start)])
    return states


def contiguous_chunk(
    causal: CausalLM,
    segments: Sequence[Segment],
    positions: Sequence[int],
    *,
    wants_logits: bool = True,
) -> ScheduledChunk:
    private = ContiguousKV.allocate(causal, len(positions))
    tokens = random_tokens(len(positions), seed=3)
    return ScheduledChunk(tuple(segments), private, tokens, positions, wants_logits)


class PortionedRequest:
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

    def next_chunk(self, count: int = 1, *, wants_logits: bool = True) -> ScheduledChunk:
        begin = self.private.length
        here = slice(begin, begin + count)
        tokens, positions = self.tokens[here], self.positions[here]
        return ScheduledChunk(self.segments, self.private, tokens, positions, wants_logits)

    def computed(self, count: int = 1) -> None:
        begin = self.private.length
        self.private.advance(self.positions[begin : begin + count])

    def run_alone(self, end: int) -> tuple[Tensor, ContiguousKV]:
        """Logits of token end - 1 and all states, in one pass with nobody else."""
        room = ContiguousKV.allocate(self.causal, end)
        given = ScheduledChunk(self.segments, room, self.tokens[:end], self.positions[:end])
        [logits] = self.causal.forward(BatchBuilder(self.causal).build_batch([given]))
        room.advance(self.positions[:end])
        return logits, room


def request_in_blocks(
    causal: CausalLM,
    pool: BlockPool,
    count: int,
    seed: int,
    segments: Sequence[Segment] = (),
    start: int = 0,
) -> PortionedRequest:
    """Room for `count` tokens in blocks that nobody else has."""
    private = BlockTable(pool)
    blocks = pool.allocate_blocks(-(-count // BLOCK_SIZE))
    assert blocks is not None
    private.block_ids += blocks
    return PortionedRequest(causal, private, random_tokens(count, seed=seed), segments, start)


def run_step(
    builder: BatchBuilder, asked: Sequence[PortionedRequest], counts: Sequence[int] | None = None
) -> Tensor:
    """One step of all, [R, vocabulary]."""
    counts = counts or [1] * len(asked)
    chunks = [each.next_chunk(count) for each, count in zip(asked, counts, strict=True)]
    logits = builder.model.forward(builder.build_batch(chunks))
    for each, count in zip(asked, counts, strict=True):
        each.computed(count)
    return logits


def assert_same_alone(logits: Tensor, asked: Sequence[PortionedRequest]) -> None:
    """Every request has the logits that it has with nobody else."""
    for row, each in zip(logits, asked, strict=True):
        torch.testing.assert_close(row, each.run_alone(each.private.length)[0], **CLOSE)
