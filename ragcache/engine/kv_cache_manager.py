"""The KV cache manager: blocks of sequences, shared through the radix cache."""

from __future__ import annotations

import sys
from dataclasses import replace

import torch

from ragcache.engine.config import EngineConfig
from ragcache.engine.kv_cache import BlockPool, BlockTable, NodePath, RadixCache
from ragcache.engine.recurrent import PlacedDocuments, RecurrentTable, SnapshotCache
from ragcache.engine.runner import ModelRunner
from ragcache.engine.sequence import Sequence
from ragcache.states import KVStates

ANSWER_AHEAD = 256
"""Answer tokens for which a GPU's sequence reserves consecutive blocks, if the pool has room."""

SNAPSHOTS_PER_SEQUENCE = 4
"""Snapshots of recurrent states that are kept for each running sequence, if memory allows."""

SPARE_SLOTS = 8
"""Spare slots of recurrent states: a new snapshot is taken before an older one is dropped."""


class KVCacheManager:
    """Allocates the blocks of sequences and frees them.

    Unused blocks are retained in the radix cache within its budget, and evicted first when the pool
    runs out. Consecutive blocks, which are read at once, are reserved for `ahead` tokens of an
    answer while the pool has room.
    """

    def __init__(self, pool: BlockPool, radix_cache: RadixCache, ahead: int = 0) -> None:
        self.pool, self.radix_cache, self.ahead = pool, radix_cache, ahead

    @property
    def available_blocks(self) -> int:
        """Number of blocks that are free or can be evicted at once."""
        return self.pool.free_count + self.radix_cache.retained

    def can_hold(self, tokens: int) -> bool:
        """Whether a request with this many private tokens can ever run."""
        return -(-tokens // self.pool.block_size) <= self.pool.num_blocks

    def admit_sequence(self, sequence: Sequence) -> int:
        """Start a sequence from the blocks in the radix cache; allocate blocks for its pending
        tokens. Returns the number of tokens found."""
        # the last token is computed in any case: the answer continues from its logits
        tokens, positions = sequence.tokens[:-1], sequence.positions[:-1]
        path = self.radix_cache.match_prefix(sequence.group.root, tokens, positions)
        found = len(path.nodes) * self.pool.block_size
        alike = self.radix_cache.find_alike(path, tokens[found:], positions[found:])
        missing = -(-len(sequence.tokens) // self.pool.block_size) - len(path.nodes)
        keeps_all = missing <= self.pool.free_count  # no block is evicted to make room
        private = BlockTable(self.pool)
        self._begin(sequence, path, private)
        if alike is not None and keeps_all:
            node, count = alike
            self.pool.copy_block(node.block_id, private.block_ids[len(path.nodes)])
            private.advance(positions[found : found + count])
        return private.length

    def _begin(self, sequence: Sequence, path: NodePath, private: BlockTable) -> int:
        """Start a sequence from an acquired path. See `admit_sequence`."""
        positions = sequence.positions
        private.block_ids = [node.block_id for node in path.nodes]
        found = len(path.nodes) * self.pool.block_size
        private.advance(positions[:found])
        sequence.path, sequence.private = path, private
        size, end = self.pool.block_size, len(sequence.tokens)
        answer = min(sequence.tokens_left, self.ahead)
        ahead = -(-(end + answer) // size) + -end // size
        self.allocate_slots(sequence, end - found, ahead)
        return found

    def fork_sequence(self, leader: Sequence, sequence: Sequence) -> bool:
        """Start another answer to the leader's prompt, whose states have just been computed.

        Full blocks are shared; the partly filled one is copied. Returns False if no block is free.
        """
        assert leader.private is not None
        if self.available_blocks == 0:
            return False
        found = self.admit_sequence(sequence)
        private = sequence.private
        assert private is not None
        behind = len(sequence.tokens) - 1 - found
        number = found // self.pool.block_size
        if 0 < behind < self.pool.block_size:
            self.pool.copy_block(leader.private.block_ids[number], private.block_ids[number])
            private.advance(sequence.positions[found:-1])
        return True

    def allocate_slots(self, sequence: Sequence, tokens: int, ahead: int = 0) -> None:
        """Allocate blocks for the next `tokens` tokens. The scheduler has made sure that they are
        available. `ahead`: see `BlockPool.allocate_blocks`."""
        private = sequence.private
        assert private is not None
        missing = private.length + tokens - private.capacity
        needed = -(-missing // self.pool.block_size)
        if needed <= 0:
            return
        after = private.block_ids[-1] if private.block_ids else None
        if needed > self.pool.free_count:
            evicted = self.radix_cache.evict_blocks(needed - self.pool.free_count)
            self.pool.free_blocks(evicted)
        blocks = self.pool.allocate_blocks(needed, after, ahead)
        assert blocks is not None
        private.block_ids += blocks

    def limit_tokens(self, sequence: Sequence, tokens: int) -> int:  # noqa: ARG002
        """Return how many of the next tokens of a sequence one step can compute."""
        return tokens

    def share_blocks(self, sequence: Sequence, end: int) -> bool:
        """Offer the blocks that the first `end` tokens fill, whose states are written, to other
        requests.

        Returns whether an equal block of another request has replaced one of the sequence's own.
        """
        private, path = sequence.private, sequence.path
        assert private is not None
        assert path is not None
        size = self.pool.block_size
        exchanged = False
        for number in range(len(path.nodes), end // size):
            here = slice(number * size, (number + 1) * size)
            own = private.block_ids[number]
            tokens, positions = sequence.tokens[here], sequence.positions[here]
            if not self.radix_cache.append_block(path, tokens, positions, own):
                self.pool.free_blocks([own])
                private.block_ids[number] = path.nodes[-1].block_id
                exchanged = True
        return exchanged

    def disown_blocks(self, sequence: Sequence) -> None:
        """Hide the blocks of a sequence from others, because their states are not finite."""
        if sequence.path is not None:
            self.radix_cache.disown_path(sequence.path)

    def release_sequence(self, sequence: Sequence) -> None:
        """Free a sequence's blocks. It may be admitted again."""
        private, path = sequence.private, sequence.path
        if private is None or path is None:
            return
        partial = private.block_ids[len(path.nodes) :]
        self.pool.free_blocks([*partial, *self.radix_cache.release_path(path)])
        self.pool.free_blocks(self.radix_cache.trim_blocks())
        sequence.private = sequence.path = None

    def copy_states(self, sequence: Sequence, begin: int, end: int, dtype: torch.dtype) -> KVStates:
        """Return a copy of the states of a sequence's own tokens begin:end, in `dtype`.

        The tokens must be computed. Their positions may have gaps.
        """
        assert sequence.private is not None
        keys, values = sequence.private.copy_tokens(begin, end)
        return KVStates(keys.to(dtype), values.to(dtype), sequence.positions[begin])

    def forget_retained(self) -> None:
        """Free all blocks that no request uses."""
        retained = self.radix_cache.retained
        self.pool.free_blocks(self.radix_cache.evict_blocks(retained))


class HybridCacheManager(KVCacheManager):
    """The cache manager of a model with recurrent layers.

    A sequence starts from the deepest block behind which recurrent states are kept. Recurrent
    layers compose the documents of a prompt in the steps that compute the tokens behind them.
    """

    def __init__(
        self, pool: BlockPool, radix_cache: SnapshotCache, ahead: int = 0, *, slots: bool = False
    ) -> None:
        """`slots`: whether states are in slots, into which documents are composed before a step."""
        super().__init__(pool, radix_cache, ahead)
        self.snapshots, self._slots = radix_cache, slots

    def limit_tokens(self, sequence: Sequence, tokens: int) -> int:
        """See `KVCacheManager.limit_tokens`. States in slots are composed before a step."""
        if not self._slots:
            return tokens
        assert isinstance(sequence.private, RecurrentTable)
        before = sequence.private.tokens_before_documents()
        return tokens if before is None else min(tokens, before)

    def admit_sequence(self, sequence: Sequence) -> int:
        """See `KVCacheManager.admit_sequence`."""
        size, last = self.pool.block_size, len(sequence.tokens) - 1
        tokens, positions = sequence.tokens[:last], sequence.positions[:last]
        path = self.snapshots.match_prefix(sequence.group.root, tokens, positions)
        parted = len(path.nodes) * size
        states, freed = self.snapshots.resume_path(path)
        self.pool.free_blocks(freed)
        stops, every_block_from = set[int](), sys.maxsize
        if path.root is not None:
            stops |= {parted, last // size * size}
            every_block_from = last + 1
        if sequence.index == 0 and sequence.request.n > 1 and not sequence.generated:
            stops.add(last)  # the other answers continue there
        documents, keeps_list = PlacedDocuments.of(sequence.request.context), False
        if states is None and path.root is not None and 0 in documents.before:
            states = self.snapshots.find_list(path.root)
            keeps_list = self.snapshots.recurs(path.root)
            if states is not None:
                documents = documents.behind_the_first()
        placed = frozenset(stops), every_block_from, documents
        table = RecurrentTable(self.pool, states, *placed, keeps_list=keeps_list)
        return self._begin(sequence, path, table)

    def fork_sequence(self, leader: Sequence, sequence: Sequence) -> bool:
        """See `KVCacheManager.fork_sequence`."""
        if not super().fork_sequence(leader, sequence):
            return False
        taken, private = leader.private, sequence.private
        assert isinstance(taken, RecurrentTable)
        assert isinstance(private, RecurrentTable)
        if private.length in taken.taken:  # the partly filled block was copied
            private.states = taken.taken[private.length]
        return True

    def share_blocks(self, sequence: Sequence, end: int) -> bool:
        """See `KVCacheManager.share_blocks`. Keeps the recurrent states behind these blocks."""
        exchanged = super().share_blocks(sequence, end)
        private, path = sequence.private, sequence.path
        assert isinstance(private, RecurrentTable)
        assert path is not None
        if private.composed is not None:
            self.snapshots.keep_list(path.root, private.composed)
            private.composed = None
        size = self.pool.block_size
        for length in [each for each in private.taken if each % size == 0 and each <= end]:
            states = private.taken.pop(length)
            if path.root is None:
                continue
            node = path.nodes[length // size - 1]
            if length >= private.every_block_from:
                if private.last_node is not None:
                    self.snapshots.drop_snapshot(private.last_node)
                private.last_node = node
            self.snapshots.keep_snapshot(node, states)
        return exchanged

    def disown_blocks(self, sequence: Sequence) -> None:
        """See `KVCacheManager.disown_blocks`. Drops the states behind its documents, too."""
        super().disown_blocks(sequence)
        if sequence.path is not None:
            self.snapshots.drop_list(sequence.path.root)

    def forget_retained(self) -> None:
        """See `KVCacheManager.forget_retained`. Drops the states behind documents, too."""
        super().forget_retained()
        self.snapshots.drop_lists()


def create_cache_manager(
    runner: ModelRunner, config: EngineConfig
) -> tuple[KVCacheManager, EngineConfig]:
    """Create the pool and the cache manager that suit a model.

    Recurrent states take a part of `config.pool_bytes`, up to a half.

    Returns:
        The manager, and the configuration with the number of sequences that memory allows. A
        recurrent state cannot forget a wrong draft, so nothing is drafted.
    """
    ahead = ANSWER_AHEAD if runner.asynchronous else 0
    nbytes, each = config.pool_bytes, runner.model.recurrent_bytes
    if not each:
        pool = runner.create_pool(nbytes)
        cache = RadixCache(pool.block_size, int(config.retained * pool.num_blocks))
        return KVCacheManager(pool, cache, ahead), config
    # a step holds the states before and behind it of every sequence
    wanted = (2 + SNAPSHOTS_PER_SEQUENCE) * config.running
    states = min(wanted, nbytes // (2 * each))
    running = max(1, min(config.running, states // 3))
    pool = runner.create_pool(nbytes - states * each)
    retained = int(config.retained * pool.num_blocks)
    snapshots = SnapshotCache(pool.block_size, retained, max(1, states - 2 * running))
    runner.create_slots(states + running + SPARE_SLOTS)
    config = replace(config, running=running, draft_tokens=0)
    return HybridCacheManager(pool, snapshots, ahead, slots=runner.asynchronous), config
