"""The KV cache of requests: a pool of blocks, the radix cache over it, and tables of blocks.

ChunkAttention §3.1: memory for a sequence's keys and values comes from a pool of equal blocks, so
that at most block_size - 1 tokens of a sequence stay unused. A sequence is a path of blocks.
Sequences whose first tokens are equal share the front of their paths. Beyond the paper, blocks
without users are retained up to a budget and evicted least recently used first.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice, zip_longest
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from ragcache.engine.contiguous_kv import ContiguousKV, KVSpan
from ragcache.errors import ConfigurationError
from ragcache.models import CausalLM

BLOCK_SIZE = 64
"""Tokens per block (ChunkAttention §4)."""

FEWEST_ALIKE = 8
"""Fewest first tokens of a block that are copied to one that begins alike."""

MOST_ALIKE = 8
"""Blocks that are compared with one that may begin alike."""


class BlockPool:
    """Blocks of tokens, allocated once and handed out by number. Not thread-safe.

    Args:
        keys: [L, Hkv, N * block_size, D], from `CausalLM.new_states`. Block n holds the tokens
            n * block_size to (n + 1) * block_size of every layer, so consecutive blocks are
            contiguous.
        values: The same shape.
        block_size: Tokens per block.
        clears: Whether to clear blocks at allocation, for readers that multiply unused slots by
            zero instead of skipping them.
        model: The model whose states the blocks hold, if its processes copy states together.
    """

    def __init__(
        self,
        keys: Tensor,
        values: Tensor,
        block_size: int = BLOCK_SIZE,
        *,
        clears: bool = True,
        model: CausalLM | None = None,
    ) -> None:
        assert keys.shape[:3] == values.shape[:3]
        assert keys.shape[2] % block_size == 0
        self.keys, self.values, self.block_size = keys, values, block_size
        self.model = model
        self._clears = clears
        self.num_blocks = keys.shape[2] // block_size
        self.peak_count = 0  # the most blocks that were allocated at once
        self._free = _FreeRuns(self.num_blocks)
        # free blocks reserved behind a block in use, by that block: see `ahead`
        self._kept: dict[int, range] = {}
        self._kept_count = 0

    @classmethod
    def create(
        cls, model: CausalLM, nbytes: int, block_size: int = BLOCK_SIZE, *, clears: bool = True
    ) -> BlockPool:
        """Create a pool of as many blocks as fit into `nbytes`, in the model's shape and dtype.
        Raises `ConfigurationError` if not even one fits."""
        bytes_per_block = block_size * model.computed_bytes_per_token
        num_blocks = nbytes // bytes_per_block
        if num_blocks < 1:
            raise ConfigurationError(
                f"a pool of {nbytes} bytes for requests' own states holds no block; one block of "
                f"{block_size} tokens takes {bytes_per_block} bytes with this model"
            )
        states = model.new_states(num_blocks * block_size)
        return cls(*states, block_size, clears=clears, model=model)

    @property
    def free_count(self) -> int:
        """Number of blocks that can be allocated."""
        return self._free.count + self._kept_count

    @property
    def used_count(self) -> int:
        """Number of allocated blocks."""
        return self.num_blocks - self.free_count

    @property
    def bytes_per_block(self) -> int:
        """Bytes of a block's keys and values over all layers."""
        return (self.keys.nbytes + self.values.nbytes) // self.num_blocks

    def allocate_blocks(
        self, count: int, after: int | None = None, ahead: int = 0
    ) -> list[int] | None:
        """Allocate blocks.

        Args:
            count: Number of blocks.
            after: A block in use that the new ones continue. Free blocks that directly follow
                it come first; the rest is one consecutive run if possible, else the lowest
                numbers.
            ahead: Number of blocks behind the new ones to reserve: others get them only when no
                more are free.

        Returns:
            The block numbers, or None without any allocation if fewer are free.
        """
        assert count >= 0
        if count > self.free_count:
            return None
        taken = [] if after is None else self._take_after(after, count)
        missing = count - len(taken)
        if missing and ahead:
            run = self._free.take_run(missing + ahead)
            taken += run[:missing]
            if run:
                self._keep(range(taken[-1] + 1, taken[-1] + 1 + ahead))
                missing = 0
        if missing > self._free.count:
            self._give_up(list(self._kept))
        taken += self._free.take_run(missing)
        taken += self._free.take_lowest(count - len(taken))
        self.peak_count = max(self.peak_count, self.used_count)
        if self._clears:
            self.clear_blocks(taken)
        return taken

    def _take_after(self, after: int, count: int) -> list[int]:
        """Up to `count` free blocks that directly follow a block in use."""
        kept = self._kept.pop(after, range(0))
        self._kept_count -= len(kept)
        taken = list(kept[:count])
        self._keep(kept[count:])
        return taken + self._free.take_at(after + len(taken) + 1, count - len(taken))

    def _keep(self, numbers: range) -> None:
        if numbers:
            self._kept[numbers[0] - 1] = numbers
            self._kept_count += len(numbers)

    def _give_up(self, block_ids: Iterable[int]) -> None:
        """Release the blocks reserved behind these blocks."""
        for block_id in block_ids:
            for number in self._kept.pop(block_id, ()):
                self._kept_count -= 1
                self._free.give_back(number)

    def clear_blocks(self, block_ids: Iterable[int]) -> None:
        """Fill blocks with zeros, so that unused slots are finite."""
        for begin, end in _runs(block_ids):
            here = slice(begin * self.block_size, end * self.block_size)
            self.keys[:, :, here] = 0
            self.values[:, :, here] = 0

    def free_blocks(self, block_ids: Iterable[int]) -> None:
        """Free blocks, each of which must be in use."""
        for block_id in block_ids:
            assert 0 <= block_id < self.num_blocks, f"the pool has no block {block_id}"
            self._give_up([block_id])
            self._free.give_back(block_id)

    def copy_block(self, source: int, target: int) -> None:
        """Copy the states of block `source` to block `target`, in all layers."""
        begin, into = source * self.block_size, target * self.block_size
        for states in (self.keys, self.values):
            copied = states[:, :, begin : begin + self.block_size]  # [L, Hkv, block_size, D]
            place = states[:, :, into : into + self.block_size]
            if self.model is None:
                place.copy_(copied)
            else:
                self.model.copy_states(place, copied)


def _runs(numbers: Iterable[int]) -> Iterator[tuple[int, int]]:
    """Runs begin:end of consecutive numbers."""
    begin = end = -1
    for number in numbers:
        if number != end:
            if begin < end:
                yield begin, end
            begin = number
        end = number + 1
    if begin < end:
        yield begin, end


class _FreeRuns:
    """Free numbers as maximal runs begin:end, sorted by begin and by length.

    Finding a run is a binary search. The lists that shift hold one entry per run.
    """

    def __init__(self, total: int) -> None:
        self.count = 0
        self._begins: list[int] = []
        self._ends: dict[int, int] = {}
        self._by_length: list[tuple[int, int]] = []  # (length, begin)
        self._add(0, total)

    def take_at(self, begin: int, limit: int) -> list[int]:
        """Up to `limit` numbers from `begin` on. Empty if no free run begins there."""
        end = min(self._ends.get(begin, begin), begin + limit)
        return self._take(begin, end)

    def take_run(self, count: int) -> list[int]:
        """`count` consecutive numbers of the shortest run that holds them, or nothing."""
        index = bisect_left(self._by_length, (count, 0))
        if not count or index == len(self._by_length):
            return []
        begin = self._by_length[index][1]
        return self._take(begin, begin + count)

    def take_lowest(self, count: int) -> list[int]:
        """The `count` lowest numbers."""
        taken: list[int] = []
        while len(taken) < count:
            taken += self.take_at(self._begins[0], count - len(taken))
        return taken

    def give_back(self, number: int) -> None:
        begin, end = number, number + 1
        index = bisect_right(self._begins, number)
        if index:
            before = self._begins[index - 1]
            assert self._ends[before] <= number, f"block {number} is freed twice"
            if self._ends[before] == begin:
                self._remove(before)
                begin = before
        if end in self._ends:
            following, end = end, self._ends[end]
            self._remove(following)
        self._add(begin, end)

    def _take(self, begin: int, end: int) -> list[int]:
        if begin == end:
            return []
        run_end = self._remove(begin)
        self._add(end, run_end)
        return list(range(begin, end))

    def _add(self, begin: int, end: int) -> None:
        if begin == end:
            return
        insort(self._begins, begin)
        self._ends[begin] = end
        insort(self._by_length, (end - begin, begin))
        self.count += end - begin

    def _remove(self, begin: int) -> int:
        end = self._ends.pop(begin)
        del self._begins[bisect_left(self._begins, begin)]
        del self._by_length[bisect_left(self._by_length, (end - begin, begin))]
        self.count -= end - begin
        return end


NodeKey: TypeAlias = tuple[Hashable, tuple[int, ...], tuple[int, ...], tuple[Hashable, ...]]
"""Parent node (root key for a first block), token ids and position ids of the block, and the placed
segments that its tokens attend to and those of its parent do not."""


class PlacedRoot(NamedTuple):
    """Everything that states depend on besides their tokens and positions."""

    owner: Hashable
    """Requests of other owners share nothing."""
    segments: tuple[tuple[int, str], ...] = ()
    """Position and name of each placed segment, in order. A token attends to those that start
    before it, so that a block in front of them is shared whatever follows it."""


class EphemeralRoot:
    """A root that no other request can match: its blocks are freed with their last user."""


@dataclass(slots=True, eq=False)
class RadixNode:
    """One full block. Requests share a block if and only if they hold the same node."""

    key: NodeKey
    block_id: int
    references: int = 1
    """Number of running requests whose path holds the node."""


@dataclass(slots=True, eq=False)
class NodePath:
    """The full blocks of one running request, first to last."""

    root: Hashable
    """Identity of everything that the states depend on besides their tokens and positions, such as
    a `PlacedRoot`. None shares nothing."""
    nodes: list[RadixNode] = field(default_factory=list)

    def child_key(self, token_ids: Sequence[int], position_ids: Sequence[int]) -> NodeKey:
        """Key of a block that continues the path."""
        segments = self._segments_ahead()
        attended = segments[: bisect_left(segments, (position_ids[-1],))]
        return self.parent, tuple(token_ids), tuple(position_ids), attended

    def count_alike(
        self, node: RadixNode, token_ids: tuple[int, ...], position_ids: tuple[int, ...]
    ) -> int:
        """Return the number of tokens behind the path that a block behind it begins with.

        Tokens count up to the first segment that only one of both prompts has there.
        """
        _, tokens, positions, attended = node.key
        count = min(_common(token_ids, tokens), _common(position_ids, positions))
        for one, other in zip_longest(self._segments_ahead(), attended):
            if one != other:
                first = min(start for start, _ in filter(None, (one, other)))
                return bisect_right(position_ids, first, hi=count)
        return count

    @property
    def parent(self) -> Hashable:
        """Identity of the parent of blocks behind the path."""
        owner = self.root.owner if isinstance(self.root, PlacedRoot) else self.root
        return self.nodes[-1] if self.nodes else owner

    def _segments_ahead(self) -> tuple[tuple[int, str], ...]:
        """The placed segments that the path's blocks do not attend to."""
        if not isinstance(self.root, PlacedRoot):
            return ()
        segments = self.root.segments
        return segments[bisect_left(segments, (self.nodes[-1].key[2][-1],)) if self.nodes else 0 :]


def _common(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    """Return the length of the common prefix of two tuples, by bisection over slices."""
    most = min(len(one), len(other))
    return bisect_left(range(1, most + 1), True, key=lambda n: one[:n] != other[:n])


class RadixCache:
    """A radix tree of full blocks and their users. Not thread-safe.

    A request holds all nodes of its path or none, so descendants of an unused node are unused too:
    every retained block can be evicted. Paths are retained from their end, so that a node's
    descendants are evicted before it. `trim_blocks` leaves `budget` unused blocks.
    """

    def __init__(self, block_size: int, budget: int) -> None:
        self.block_size, self.budget = block_size, budget
        self._nodes: dict[NodeKey, RadixNode] = {}
        self._beginnings: dict[tuple[Hashable, int], dict[RadixNode, None]] = {}
        self._retained = OrderedDict[RadixNode, None]()  # the least recently used first

    def __len__(self) -> int:
        """Number of nodes."""
        return len(self._nodes)

    @property
    def retained(self) -> int:
        """Number of blocks that no request uses."""
        return len(self._retained)

    def match_prefix(
        self, root: Hashable, token_ids: Sequence[int], position_ids: Sequence[int]
    ) -> NodePath:
        """Acquire the longest path of blocks that hold the first of these tokens.

        A request that needs the logits of its last token leaves it out. Without a root the path is
        empty.
        """
        assert len(token_ids) == len(position_ids)
        path = NodePath(root)
        if root is None:
            return path
        for end in range(self.block_size, len(token_ids) + 1, self.block_size):
            here = slice(end - self.block_size, end)
            node = self._nodes.get(path.child_key(token_ids[here], position_ids[here]))
            if node is None:
                break
            self._acquire(node)
            path.nodes.append(node)
        return path

    def find_alike(
        self, path: NodePath, token_ids: Sequence[int], position_ids: Sequence[int]
    ) -> tuple[RadixNode, int] | None:
        """Return the block behind a path with the longest common beginning with some tokens.

        Looks at the last `MOST_ALIKE` blocks that begin with the first token.

        Returns:
            The block, and the number of equal tokens, at least `FEWEST_ALIKE`.
        """
        if path.root is None or len(token_ids) < FEWEST_ALIKE:
            return None
        tokens, positions = (tuple(each[: self.block_size]) for each in (token_ids, position_ids))
        behind = self._beginnings.get((path.parent, tokens[0]), {})
        found, most = None, FEWEST_ALIKE - 1
        for node in islice(reversed(behind), MOST_ALIKE):
            if node.key[1][: most + 1] != tokens[: most + 1]:  # others of one template, mostly
                continue
            count = path.count_alike(node, tokens, positions)
            if count > most:
                found, most = (node, count), count
        return found

    def append_block(
        self, path: NodePath, token_ids: Sequence[int], position_ids: Sequence[int], block_id: int
    ) -> bool:
        """Append the block that a running request has just filled to its path, and acquire it.

        Returns whether the cache took over `block_id`. If it has an equal block already, the path
        takes that one, and the caller frees `block_id`.
        """
        assert len(token_ids) == len(position_ids) == self.block_size
        key = path.child_key(token_ids, position_ids)
        node = None if path.root is None else self._nodes.get(key)
        if node is not None:
            self._acquire(node)
            path.nodes.append(node)
            return False
        node = RadixNode(key, block_id)
        if path.root is not None:
            self._nodes[key] = node
            self._beginnings.setdefault((key[0], key[1][0]), {})[node] = None
        path.nodes.append(node)
        return True

    def release_path(self, path: NodePath) -> list[int]:
        """End a request's use of its path, which becomes empty. Unused blocks are retained.

        Returns the block ids to free: blocks without a root, and unused blocks of an ephemeral
        root.
        """
        nodes, path.nodes = path.nodes, []
        if path.root is None:
            return [node.block_id for node in nodes]
        unused = []
        for node in reversed(nodes):
            assert node.references > 0
            node.references -= 1
            if node.references == 0:
                self._retained[node] = None
                unused.append(node)
        if isinstance(path.root, EphemeralRoot):
            return [self._evict(node) for node in unused]
        return []

    def disown_path(self, path: NodePath) -> None:
        """Hide the blocks of a path, and all that continue them, from later requests.

        Requests that hold the blocks keep them. Afterwards they are retained and evicted as usual.
        """
        for node in path.nodes:
            self._remove(node)

    def evict_blocks(self, count: int) -> list[int]:
        """Evict up to `count` retained blocks, least recently used first. Returns ids to free."""
        return [self._evict(node) for node in list(islice(self._retained, max(0, count)))]

    def trim_blocks(self) -> list[int]:
        """Evict down to the budget. Returns the block ids to free."""
        return self.evict_blocks(self.retained - self.budget)

    def _acquire(self, node: RadixNode) -> None:
        self._retained.pop(node, None)
        node.references += 1

    def _evict(self, node: RadixNode) -> int:
        del self._retained[node]
        self._remove(node)
        return node.block_id

    def _remove(self, node: RadixNode) -> None:
        """Remove a node from the index, unless it was disowned already."""
        if self._nodes.get(node.key) is not node:
            return
        del self._nodes[node.key]
        behind = node.key[0], node.key[1][0]
        del self._beginnings[behind][node]
        if not self._beginnings[behind]:
            del self._beginnings[behind]


class BlockTable:
    """Blocks of a sequence in the pool, in order (ChunkAttention's PAKV). All but the last are
    full."""

    def __init__(self, pool: BlockPool) -> None:
        self.pool = pool
        self.block_ids: list[int] = []
        self.positions: list[int] = []
        self.length = 0  # of `positions`, which every step asks for several times

    @property
    def capacity(self) -> int:
        """Number of tokens that fit into the blocks."""
        return len(self.block_ids) * self.pool.block_size

    def spans(self) -> list[KVSpan]:
        size, left = self.pool.block_size, self.length
        found = []
        for block_id in self.block_ids[: -(-left // size)]:
            begin = block_id * size
            found.append(KVSpan(self.pool.keys, self.pool.values, begin, begin + min(size, left)))
            left -= size
        return found

    def slots(self, tokens: int) -> list[int]:
        """Slots of the pool for the next `tokens` tokens."""
        assert self.length + tokens <= self.capacity
        return self._slots(self.length, self.length + tokens)

    def _slots(self, begin: int, end: int) -> list[int]:
        size = self.pool.block_size
        return [self.block_ids[at // size] * size + at % size for at in range(begin, end)]

    def copy_tokens(self, begin: int, end: int) -> tuple[Tensor, Tensor]:
        """Copy the keys and values of the filled tokens begin:end, [L, Hkv, end - begin, D]."""
        assert end <= self.length
        pool, runs = self.pool, list(_runs(self._slots(begin, end)))
        if pool.model is not None and pool.model.ranks > 1:
            return self._copy_runs(pool.model, runs)
        keys, values = (
            torch.cat([states[:, :, first:last] for first, last in runs], 2)
            for states in (pool.keys, pool.values)
        )
        return keys, values

    def _copy_runs(self, model: CausalLM, runs: list[tuple[int, int]]) -> tuple[Tensor, Tensor]:
        """Copy runs of slots on all ranks of a model."""
        copied = model.new_states(sum(last - first for first, last in runs))
        at = 0
        for first, last in runs:
            here = slice(at, at + last - first)
            at = here.stop
            for target, states in zip(copied, (self.pool.keys, self.pool.values), strict=True):
                model.copy_states(target[:, :, here], states[:, :, first:last])
        return copied

    def advance(self, positions: Sequence[int]) -> None:
        self.positions.extend(positions)
        self.length = len(self.positions)

    def append(self, position: int) -> None:
        """Count one token as `advance` does, more quickly."""
        self.positions.append(position)
        self.length += 1

    def truncate(self, length: int) -> None:
        """Forget the tokens from `length` on. Their slots are written again."""
        del self.positions[length:]
        self.length = len(self.positions)


RequestKV: TypeAlias = ContiguousKV | BlockTable
"""Memory for the states of a request's own tokens."""
