"""Private states of running requests: chunks of the pool, shared through the prefix tree."""

from __future__ import annotations

from ragcache.engine.kv_cache import BlockPool, BlockTable, RadixCache
from ragcache.engine.sequence import Sequence


class KVCacheManager:
    """Gives chunks to sequences and takes them back.

    What no request uses any longer is retained in the tree within its budget, and evicted first
    when the pool runs out.
    """

    def __init__(self, pool: BlockPool, tree: RadixCache) -> None:
        self.pool, self.tree = pool, tree

    @property
    def available(self) -> int:
        """Chunks that are free or can be made so at once."""
        return self.pool.free_count + self.tree.retained

    def holds(self, tokens: int) -> bool:
        """Whether a request of so many private tokens can ever run."""
        return -(-tokens // self.pool.chunk) <= self.pool.total

    def enter(self, sequence: Sequence) -> int:
        """Starts a sequence from the chunks that stand in the tree, and takes room for all of its
        pending tokens. Returns how many tokens it found."""
        # the last token is computed in any case: the answer continues from its logits
        tokens, positions = sequence.tokens[:-1], sequence.positions[:-1]
        path = self.tree.match(sequence.group.root, tokens, positions)
        private = BlockTable(self.pool)
        private.chunk_ids = [node.chunk_id for node in path.nodes]
        found = len(path.nodes) * self.pool.chunk
        private.advance(positions[:found])
        sequence.path, sequence.private = path, private
        self.make_room(sequence, len(sequence.tokens) - found)
        return found

    def fork(self, leader: Sequence, sequence: Sequence) -> bool:
        """Starts another answer to the leader's prompt, whose states have just been computed: full
        chunks are shared, and the one that still fills is copied. False where no chunk is free."""
        assert leader.private is not None
        if self.available == 0:
            return False
        found = self.enter(sequence)
        private = sequence.private
        assert private is not None
        behind = len(sequence.tokens) - 1 - found
        number = found // self.pool.chunk
        if 0 < behind < self.pool.chunk:
            self.pool.copy(leader.private.chunk_ids[number], private.chunk_ids[number])
            private.advance(sequence.positions[found:-1])
        return True

    def make_room(self, sequence: Sequence, tokens: int) -> None:
        """Takes chunks for the next `tokens`. The scheduler has seen to it that there are any."""
        private = sequence.private
        assert private is not None
        needed = -(-(private.length + tokens - private.capacity) // self.pool.chunk)
        if needed <= 0:
            return
        after = private.chunk_ids[-1] if private.chunk_ids else None
        if needed > self.pool.free_count:
            self.pool.free(self.tree.evict(needed - self.pool.free_count))
        chunks = self.pool.allocate(needed, after)
        assert chunks is not None
        private.chunk_ids += chunks

    def computed(self, sequence: Sequence, count: int) -> None:
        """The next `count` tokens stand. Chunks that are full now can be shared."""
        private, path = sequence.private, sequence.path
        assert private is not None
        assert path is not None
        begin = private.length
        private.advance(sequence.positions[begin : begin + count])
        size = self.pool.chunk
        for number in range(len(path.nodes), private.length // size):
            here = slice(number * size, (number + 1) * size)
            own = private.chunk_ids[number]
            taken = self.tree.extend(path, sequence.tokens[here], sequence.positions[here], own)
            if not taken:
                self.pool.free([own])
                private.chunk_ids[number] = path.nodes[-1].chunk_id

    def leave(self, sequence: Sequence) -> None:
        """Takes a sequence's chunks back; it may enter again."""
        private, path = sequence.private, sequence.path
        if private is None or path is None:
            return
        filling = private.chunk_ids[len(path.nodes) :]
        self.pool.free([*filling, *self.tree.release(path)])
        self.pool.free(self.tree.trim())
        sequence.private = sequence.path = None
