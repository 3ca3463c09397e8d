"""The prefix tree: which full chunks of private states stand ready, and who uses them.

ChunkAttention §3.1: a sequence is a path of chunks; sequences whose first tokens are equal share
the front of their paths. Beyond the paper, chunks that no request uses any longer are retained up
to a budget, and evicted least recently used first. Bookkeeping alone: the states are in the pool.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import TypeAlias

Place: TypeAlias = tuple[Hashable, tuple[int, ...], tuple[int, ...]]
"""Parent node, or root key for a first chunk; token ids and position ids of the chunk."""


class Fleeting:
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
class Path:
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


class PrefixTree:
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

    def match(self, root: Hashable, token_ids: Sequence[int], position_ids: Sequence[int]) -> Path:
        """The longest path of chunks that hold the first of these tokens, acquired.

        It may hold all of the tokens. A request that needs the logits of its last token leaves
        that one out of `token_ids`. The path of root None is empty.
        """
        assert len(token_ids) == len(position_ids)
        path = Path(root)
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
        self, path: Path, token_ids: Sequence[int], position_ids: Sequence[int], chunk_id: int
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

    def release(self, path: Path) -> list[int]:
        """Ends a request's use of its path, which is empty then.

        Chunks that no other request uses are retained. Returns the chunk ids to free: those of a
        path of root None or of a fleeting root, which are not retained.
        """
        nodes, path.nodes = path.nodes, []
        if path.root is None:
            return [node.chunk_id for node in nodes]
        if isinstance(path.root, Fleeting):
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
