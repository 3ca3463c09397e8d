"""The pool of private states: fixed chunks of tokens, allocated once and handed out by number.

ChunkAttention §3.1: memory for a sequence's keys and values comes from a pool of equal chunks and
goes back to it, so that at most chunk - 1 tokens of a sequence's room stay unused.
"""

# MERGED ragcache.engine.prefix: The prefix tree: which full chunks of private states stand
#   ready, and who uses them. ChunkAttention §3.1: a sequence is a path of chunks; sequences
#   whose first tokens are equal share the front of their paths. Beyond the paper, chunks that
#   no request uses any longer are retained up to a budget, and evicted least recently used
#   first. Bookkeeping alone: the states are in the pool.
# MERGED ragcache.engine.private: Where a request's own states stand: in one contiguous room,
#   or in chunks of the pool.

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

from ragcache.attention import PageWrite, RunWrite, Write
from ragcache.errors import ConfigurationError
from ragcache.models import LanguageModel
from ragcache.states import KVStates

CHUNK = 64
"""Tokens of a chunk (ChunkAttention §4)."""


class BlockPool:
    """keys, values: [L, Hkv, N·chunk, D]. Chunk c is tokens c·chunk to (c+1)·chunk of every layer.

    Chunks of consecutive numbers are therefore one contiguous run of tokens. Not thread-safe: it
    belongs to the engine's thread.
    """

    def __init__(self, keys: Tensor, values: Tensor, chunk: int = CHUNK) -> None:
        assert keys.shape == values.shape
        assert keys.shape[2] % chunk == 0
        self.keys, self.values, self.chunk = keys, values, chunk
        self.total = keys.shape[2] // chunk
        self._free = _FreeRuns(self.total)

    @classmethod
    def create(
        cls,
        model: LanguageModel,
        nbytes: int,
        chunk: int = CHUNK,
        device: torch.device | None = None,
    ) -> BlockPool:
        """A pool of as many chunks as `nbytes` hold, in the model's shape and dtype.

        device: None is the model's; on `meta` the chunks are only counted.

        Raises `ConfigurationError` where that is not even one.
        """
        bytes_per_chunk = chunk * model.bytes_per_token
        total = nbytes // bytes_per_chunk
        if total < 1:
            raise ConfigurationError(
                f"a pool of {nbytes} bytes for requests' own states holds no chunk; one chunk of "
                f"{chunk} tokens takes {bytes_per_chunk} bytes with this model"
            )
        return cls(*model.new_states(total * chunk, device), chunk)

    @property
    def free_count(self) -> int:
        """How many chunks can be allocated."""
        return self._free.count

    @property
    def used_count(self) -> int:
        """How many chunks are allocated."""
        return self.total - self._free.count

    @property
    def bytes_per_chunk(self) -> int:
        """Bytes of one chunk's keys and values over all layers."""
        return (self.keys.nbytes + self.values.nbytes) // self.total

    def allocate(self, count: int, after: int | None = None) -> list[int] | None:
        """Numbers of `count` free chunks, or None where fewer are free (then none is taken).

        after: a chunk in use that the new ones shall continue. Those that directly follow it come
        first; the rest is one consecutive run where there is one, else the lowest numbers.
        """
        assert count >= 0
        if count > self._free.count:
            return None
        taken = [] if after is None else self._free.take_at(after + 1, count)
        taken += self._free.take_run(count - len(taken))
        taken += self._free.take_lowest(count - len(taken))
        for chunk_id in taken:
            self._clear(chunk_id)
        return taken

    def free(self, chunk_ids: Iterable[int]) -> None:
        """Gives chunks back. Each must be in use."""
        for chunk_id in chunk_ids:
            assert 0 <= chunk_id < self.total, f"the pool has no chunk {chunk_id}"
            self._free.give_back(chunk_id)

    def _clear(self, chunk_id: int) -> None:
        """What a chunk holds beyond its tokens is masked, but must be finite for that."""
        here = slice(chunk_id * self.chunk, (chunk_id + 1) * self.chunk)
        self.keys[:, :, here] = 0
        self.values[:, :, here] = 0

    def copy(self, source: int, target: int) -> None:
        """Writes the states of chunk `source` to chunk `target`, in all layers."""
        begin, into = source * self.chunk, target * self.chunk
        for states in (self.keys, self.values):
            chunk = states[:, :, begin : begin + self.chunk]  # [L, Hkv, chunk, D]
            states[:, :, into : into + self.chunk] = chunk


class _FreeRuns:
    """Free numbers as maximal runs begin:end, sorted by begin and by length.

    Finding a run is a binary search; the lists that shift hold one entry a run, not a chunk.
    """

    def __init__(self, total: int) -> None:
        self.count = 0
        self._begins: list[int] = []
        self._ends: dict[int, int] = {}
        self._by_length: list[tuple[int, int]] = []  # (length, begin)
        self._add(0, total)

    def take_at(self, begin: int, limit: int) -> list[int]:
        """Up to `limit` numbers from `begin` on. Nothing where no free run begins there."""
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
            assert self._ends[before] <= number, f"chunk {number} is freed twice"
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


Place: TypeAlias = tuple[Hashable, tuple[int, ...], tuple[int, ...]]
"""Parent node, or root key for a first chunk; token ids and position ids of the chunk."""


class EphemeralRoot:
    """A root that nobody can find again: its chunks go when nobody uses them any longer."""


@dataclass(slots=True, eq=False)
class Node:
    """One full chunk. Requests share it if and only if they hold the same node.

    references: running requests whose path holds it. children: chunks that stand behind it.
    last_use: when a request last released it, by the tree's logical clock.
    """

    place: Place
    chunk_id: int
    references: int = 1
    children: int = 0
    last_use: int = 0
    queued: bool = False


@dataclass(slots=True, eq=False)
class NodePath:
    """The full chunks of one running request, first to last.

    root: everything that their states depend on besides their tokens and positions, such as the
    segments with their placements and the tenant. None shares nothing.
    """

    root: Hashable
    nodes: list[Node] = field(default_factory=list)

    def place(self, token_ids: Sequence[int], position_ids: Sequence[int]) -> Place:
        """Where a chunk behind the last one stands."""
        parent = self.nodes[-1] if self.nodes else self.root
        return parent, tuple(token_ids), tuple(position_ids)


class RadixCache:
    """A radix tree of chunks of `chunk` tokens each. Not thread-safe.

    A request holds all nodes of its path or none, so a node without references has no descendant
    with any: every retained chunk can be evicted, the last ones of a path first.

    budget: how many chunks without references `trim` leaves.
    """

    def __init__(self, chunk: int, budget: int) -> None:
        self.chunk, self.budget = chunk, budget
        self._nodes: dict[Place, Node] = {}
        self._retained = 0
        self._clock = 0
        # (last use, chunk id, node): every node that can be evicted, at most once, under a last
        # use that may be out of date. What a later use changed is set right when it is popped.
        self._queue: list[tuple[int, int, Node]] = []

    @property
    def retained(self) -> int:
        """How many chunks no request uses."""
        return self._retained

    def match(
        self, root: Hashable, token_ids: Sequence[int], position_ids: Sequence[int]
    ) -> NodePath:
        """The longest path of chunks that hold the first of these tokens, acquired.

        It may hold all of the tokens. A request that needs the logits of its last token leaves
        that one out of `token_ids`. The path of root None is empty.
        """
        assert len(token_ids) == len(position_ids)
        path = NodePath(root)
        if root is None:
            return path
        for end in range(self.chunk, len(token_ids) + 1, self.chunk):
            here = slice(end - self.chunk, end)
            node = self._nodes.get(path.place(token_ids[here], position_ids[here]))
            if node is None:
                break
            self._acquire(node)
            path.nodes.append(node)
        return path

    def extend(
        self, path: NodePath, token_ids: Sequence[int], position_ids: Sequence[int], chunk_id: int
    ) -> bool:
        """Appends the chunk that a running request has just filled to its path; acquires it.

        Returns whether the tree took over `chunk_id`. Where an equal chunk stands already, the
        path takes that one and `chunk_id` stays with the caller, who frees it.
        """
        assert len(token_ids) == len(position_ids) == self.chunk
        place = path.place(token_ids, position_ids)
        node = None if path.root is None else self._nodes.get(place)
        if node is not None:
            self._acquire(node)
            path.nodes.append(node)
            return False
        node = Node(place, chunk_id)
        if path.root is not None:
            self._nodes[place] = node
            if path.nodes:
                path.nodes[-1].children += 1
        path.nodes.append(node)
        return True

    def release(self, path: NodePath) -> list[int]:
        """Ends a request's use of its path, which is empty then.

        Chunks that no other request uses are retained. Returns the chunk ids to free: those of a
        path of root None or of a fleeting root, which are not retained.
        """
        nodes, path.nodes = path.nodes, []
        if path.root is None:
            return [node.chunk_id for node in nodes]
        if isinstance(path.root, EphemeralRoot):
            return self._drop(nodes)
        self._clock += 1
        for node in nodes:
            assert node.references > 0
            node.references -= 1
            node.last_use = self._clock
            if node.references == 0:
                self._retained += 1
                self._enqueue(node)
        return []

    def evict(self, count: int) -> list[int]:
        """Gives up to `count` retained chunks up; returns their ids, to be freed.

        Least recently used first, of those that no other chunk stands behind.
        """
        evicted: list[int] = []
        while self._queue and len(evicted) < count:
            last_use, _, node = heappop(self._queue)
            node.queued = False
            if node.last_use == last_use and not node.references and not node.children:
                self._remove(node)
                evicted.append(node.chunk_id)
            else:
                self._enqueue(node)
        return evicted

    def trim(self) -> list[int]:
        """Evicts down to the budget; returns the chunk ids to free."""
        return self.evict(self._retained - self.budget)

    def _drop(self, nodes: list[Node]) -> list[int]:
        freed = []
        for node in reversed(nodes):  # nobody uses what stands behind one that nobody uses
            node.references -= 1
            if node.references == 0:
                self._retained += 1
                self._remove(node)
                freed.append(node.chunk_id)
        return freed

    def _acquire(self, node: Node) -> None:
        if node.references == 0:
            self._retained -= 1
        node.references += 1

    def _enqueue(self, node: Node) -> None:
        if not (node.queued or node.references or node.children):
            heappush(self._queue, (node.last_use, node.chunk_id, node))
            node.queued = True

    def _remove(self, node: Node) -> None:
        del self._nodes[node.place]
        self._retained -= 1
        parent = node.place[0]
        if isinstance(parent, Node):
            parent.children -= 1
            self._enqueue(parent)


@dataclass(frozen=True, slots=True, eq=False)
class KVSpan:
    """Tokens begin:end of keys and values [L, Hkv, tokens, D]: contiguous in every layer."""

    keys: Tensor
    values: Tensor
    begin: int
    end: int

    @property
    def place(self) -> tuple[int, int, int]:
        """Equal for stretches of the same memory."""
        return (self.keys.data_ptr(), self.begin, self.end)


class RequestKV(Protocol):
    """Room for a request's own tokens, filled step by step."""

    @property
    def length(self) -> int:
        """Tokens filled."""
        ...

    @property
    def positions(self) -> Sequence[int]:
        """Where the filled tokens stand."""
        ...

    def stretches(self) -> list[KVSpan]:
        """The filled tokens, chunk by chunk, in order."""
        ...

    def write(self, begin: int, end: int) -> Write:
        """How the step's rows begin:end follow the filled tokens."""
        ...

    def advance(self, positions: Sequence[int]) -> None:
        """A step has written tokens at these positions."""
        ...


class ContiguousKV:
    """One contiguous room. keys, values: [L, Hkv, capacity, D]."""

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        self.keys, self.values = keys, values
        self.positions: list[int] = []

    @classmethod
    def allocate(cls, model: LanguageModel, capacity: int) -> ContiguousKV:
        return cls(*model.new_states(capacity))

    @property
    def length(self) -> int:
        return len(self.positions)

    def stretches(self) -> list[KVSpan]:
        return [KVSpan(self.keys, self.values, 0, self.length)] if self.length else []

    def write(self, begin: int, end: int) -> RunWrite:
        assert self.length + end - begin <= self.keys.shape[2]
        return RunWrite(self.keys, self.values, self.length, begin, end)

    def advance(self, positions: Sequence[int]) -> None:
        self.positions.extend(positions)

    def as_states(self, start: int) -> KVStates:
        """The filled room as states of their own, encoded from position `start` on."""
        return KVStates(self.keys[:, :, : self.length], self.values[:, :, : self.length], start)


class BlockTable:
    """Chunks of the pool (ChunkAttention's PAKV). All but the last are full."""

    def __init__(self, pool: BlockPool) -> None:
        self.pool = pool
        self.chunk_ids: list[int] = []
        self.positions: list[int] = []

    @property
    def length(self) -> int:
        return len(self.positions)

    @property
    def capacity(self) -> int:
        """Tokens that the chunks held now have room for."""
        return len(self.chunk_ids) * self.pool.chunk

    def stretches(self) -> list[KVSpan]:
        size, left = self.pool.chunk, self.length
        found = []
        for chunk in self.chunk_ids[: -(-left // size)]:
            begin = chunk * size
            found.append(KVSpan(self.pool.keys, self.pool.values, begin, begin + min(size, left)))
            left -= size
        return found

    def slots(self, tokens: int) -> list[int]:
        """Where the next tokens go in the pool."""
        size = self.pool.chunk
        assert self.length + tokens <= self.capacity
        return [
            self.chunk_ids[at // size] * size + at % size
            for at in range(self.length, self.length + tokens)
        ]

    def write(self, begin: int, end: int) -> PageWrite:
        device = self.pool.keys.device
        index = torch.tensor(self.slots(end - begin), device=device)
        rows = torch.arange(begin, end, device=device)
        return PageWrite(self.pool.keys, self.pool.values, index, rows)

    def advance(self, positions: Sequence[int]) -> None:
        self.positions.extend(positions)
