"""Recurrent states beside the KV cache: of running sequences, and snapshots to resume from.

Keys and values of a text can be cut after any block. A recurrent state cannot: it is a sum over the
text. A sequence therefore resumes only from blocks behind which a snapshot of the recurrent states
is kept. Snapshots are taken where later prompts are likely to continue: where a prompt leaves a
path that others took (Marconi, Pan et al., 2024), at the last block of a prompt, and at the last
block of an answer so far. Behind a list of documents that begins several prompts, the composed
states are kept, too, for questions that have no block in common.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict, defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Self

from ragcache.attention.recurrent import RecurrentRun
from ragcache.engine.kv_cache import BlockPool, BlockTable, NodePath, RadixCache, RadixNode
from ragcache.engine.request import Context
from ragcache.states.recurrent import RecurrentSnapshot, RecurrentStates


@dataclass(frozen=True, slots=True)
class PlacedDocuments:
    """The documents of a prompt, as recurrent layers read them: between its own tokens."""

    before: Mapping[int, tuple[RecurrentStates, ...]] = field(default_factory=dict)
    """Maps of the documents right before an own token, in order, by the number of the token."""
    both: bool = False
    """Whether states behind documents are means over their order and its reverse."""

    @classmethod
    def of(cls, context: Context) -> Self:
        """Find the place of each segment of a context."""
        before = defaultdict[int, tuple[RecurrentStates, ...]](tuple)
        for segment in sorted(context.segments, key=attrgetter("start")):
            if segment.states.recurrent is not None:
                token = bisect_left(context.position_ids, segment.start)
                before[token] += (segment.states.recurrent,)
        return cls(before, context.compose == "both")

    def behind_the_first(self) -> Self:
        """Return the documents that stand behind some own token."""
        rest = {token: documents for token, documents in self.before.items() if token}
        return replace(self, before=rest)


NO_DOCUMENTS = PlacedDocuments()


class RecurrentTable(BlockTable):
    """Blocks of a sequence, and the recurrent states behind its tokens.

    A step writes new states, which `advance` takes over. A step that fails changes nothing.

    Attributes:
        states: States behind the filled tokens. Before the first token, the states behind the
            documents that begin the prompt, if these were kept, or None.
        taken: States behind some lengths that were passed, by length in tokens.
        composed: States behind the documents that begin the prompt, if they are to be kept and
            have been computed.
    """

    def __init__(
        self,
        pool: BlockPool,
        states: RecurrentSnapshot | None,
        stops: frozenset[int],
        every_block_from: int,
        documents: PlacedDocuments = NO_DOCUMENTS,
        *,
        keeps_list: bool = False,
    ) -> None:
        """Create the table of a sequence.

        Args:
            pool: The pool of blocks.
            states: States behind the tokens with which the sequence starts.
            stops: Lengths in tokens at which states are taken.
            every_block_from: Length from which states are taken at the end of every block.
            documents: The documents between the tokens, without those of which `states` are.
            keeps_list: Whether states behind the documents that begin the prompt are kept.
        """
        super().__init__(pool)
        self._documents, self._keeps_list = documents, keeps_list
        self.composed: RecurrentSnapshot | None = None
        self.states, self.taken = states, dict[int, RecurrentSnapshot]()
        self.last_node: RadixNode | None = None  # block of the answer with the last snapshot
        self.every_block_from = every_block_from
        self._stops = stops
        self._launched: list[tuple[int, RecurrentSnapshot]] = []
        self._composing: RecurrentSnapshot | None = None

    def runs(self, begin: int, end: int) -> list[RecurrentRun]:
        """Runs of the step's rows begin:end, cut where states are taken and before documents."""
        before, runs, placed = self.states, list[RecurrentRun](), self._documents
        self._launched, self._composing = [], None
        first, done = begin - self.length, self.length
        for length in self._cuts(self.length, self.length + end - begin):
            after, documents = RecurrentSnapshot(), placed.before.get(done, ())
            rows = first + done, first + length
            if documents and not done and self._keeps_list:
                self._composing = RecurrentSnapshot()
            composed = None if done else self._composing
            run = RecurrentRun(*rows, before, after, documents, placed.both, composed=composed)
            runs.append(run)
            self._launched.append((length, after))
            done, before = length, after
        return runs

    def step(self) -> tuple[RecurrentSnapshot, RecurrentSnapshot]:
        """The states before and behind the next token, in a step of one token."""
        assert self.states is not None
        after = RecurrentSnapshot()
        self._launched, self._composing = [(self.length + 1, after)], None
        return self.states, after

    def tokens_before_documents(self) -> int | None:
        """Number of tokens before the next documents, or None if none follow. Documents right
        behind the filled tokens do not count."""
        return min(
            (t - self.length for t in self._documents.before if t > self.length), default=None
        )

    def append(self, position: int) -> None:
        """See `BlockTable.append`."""
        super().append(position)
        self._take_over()

    def advance(self, positions: Sequence[int]) -> None:
        super().advance(positions)
        self._take_over()

    def _take_over(self) -> None:
        """Take over the states of the step that was launched."""
        for length, states in self._launched:
            self.states = states
            if self._is_stop(length):
                self.taken[length] = states.compact()
        if self._composing is not None:
            self.composed = self._composing
        self._launched, self._composing = [], None

    def _cuts(self, begin: int, end: int) -> list[int]:
        """Lengths in begin + 1:end at which a run ends, and `end`."""
        size = self.pool.block_size
        blocks = range((begin // size + 1) * size, end, size)
        cuts = {length for length in blocks if self._is_stop(length)}
        inner = (*self._stops, *self._documents.before)
        cuts |= {length for length in inner if begin < length < end}
        return [*sorted(cuts), end]

    def _is_stop(self, length: int) -> bool:
        if length in self._stops:
            return True
        return length >= self.every_block_from and length % self.pool.block_size == 0


SEEN_LISTS = 4096
"""Most lists of documents that are remembered because they began a prompt."""


@dataclass(frozen=True, slots=True)
class _DocumentList:
    """The documents that begin a prompt, as the key of a snapshot."""

    root: Hashable


class SnapshotCache(RadixCache):
    """A radix cache with snapshots of the recurrent states behind some of its blocks, and behind
    lists of documents that begin prompts.

    Keeps at most `capacity` snapshots, and drops the least recently used one first. A block that
    lost its snapshot still tells where prompts part. A list is an ordered one: its key is the root
    of the paths that begin behind it.
    """

    def __init__(self, block_size: int, budget: int, capacity: int) -> None:
        super().__init__(block_size, budget)
        self.capacity = capacity
        self._snapshots = OrderedDict[RadixNode | _DocumentList, RecurrentSnapshot]()
        self._seen = OrderedDict[Hashable, None]()  # lists that began one prompt

    @property
    def snapshot_count(self) -> int:
        """Number of kept snapshots."""
        return len(self._snapshots)

    def resume_path(self, path: NodePath) -> tuple[RecurrentSnapshot | None, list[int]]:
        """Shorten an acquired path to its last block with a snapshot.

        Returns:
            The snapshot, None if the path has become empty, and the block ids to free.
        """
        kept = len(path.nodes)
        while kept and path.nodes[kept - 1] not in self._snapshots:
            kept -= 1
        rest = NodePath(path.root, path.nodes[kept:])
        del path.nodes[kept:]
        freed = self.release_path(rest)
        if not kept:
            return None, freed
        self._snapshots.move_to_end(path.nodes[-1])
        return self._snapshots[path.nodes[-1]], freed

    def find_list(self, root: Hashable) -> RecurrentSnapshot | None:
        """Return the states behind the documents of a root, if they are kept."""
        key = _DocumentList(root)
        if key in self._snapshots:
            self._snapshots.move_to_end(key)
        return self._snapshots.get(key)

    def recurs(self, root: Hashable) -> bool:
        """Tell whether the documents of a root began a prompt before, and note that they do."""
        found = root in self._seen
        self._seen[root] = None
        self._seen.move_to_end(root)
        while len(self._seen) > SEEN_LISTS:
            self._seen.popitem(last=False)
        return found

    def keep_list(self, root: Hashable, snapshot: RecurrentSnapshot) -> None:
        """Keep the states behind the documents of a root."""
        self._keep(_DocumentList(root), snapshot)

    def drop_list(self, root: Hashable) -> None:
        """Drop the states behind the documents of a root, if there are any."""
        self._snapshots.pop(_DocumentList(root), None)

    def drop_lists(self) -> None:
        """Drop the states behind all documents."""
        for key in [each for each in self._snapshots if isinstance(each, _DocumentList)]:
            del self._snapshots[key]

    def keep_snapshot(self, node: RadixNode, snapshot: RecurrentSnapshot) -> None:
        """Keep the states behind a block that a running request holds."""
        self._keep(node, snapshot)

    def _keep(self, key: RadixNode | _DocumentList, snapshot: RecurrentSnapshot) -> None:
        self._snapshots[key] = snapshot
        self._snapshots.move_to_end(key)
        while len(self._snapshots) > self.capacity:
            self._snapshots.popitem(last=False)

    def drop_snapshot(self, node: RadixNode) -> None:
        """Drop the states behind a block, if there are any."""
        self._snapshots.pop(node, None)

    def _evict(self, node: RadixNode) -> int:
        self.drop_snapshot(node)
        return super()._evict(node)
