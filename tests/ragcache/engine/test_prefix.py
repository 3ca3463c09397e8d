"""The prefix tree: who shares which chunk, and which chunks go first."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    rule,
)

from ragcache.engine.prefix import Fleeting, Path, PrefixTree

CHUNK = 2
Chunk = tuple[tuple[int, ...], tuple[int, ...]]  # token ids, position ids


@pytest.fixture
def tree() -> PrefixTree:
    return PrefixTree(CHUNK, budget=100)


def chunks_of(tokens: Sequence[int], start: int = 0) -> list[Chunk]:
    """Full chunks at consecutive positions."""
    ends = range(CHUNK, len(tokens) + 1, CHUNK)
    return [
        (tuple(tokens[e - CHUNK : e]), tuple(range(start + e - CHUNK, start + e))) for e in ends
    ]


def run(tree: PrefixTree, root: Hashable, tokens: Sequence[int], first_id: int) -> Path:
    """A request that finds what stands, fills the rest under ids from `first_id`, still runs."""
    path = tree.match(root, tokens, range(len(tokens)))
    for offset, chunk in enumerate(chunks_of(tokens)[len(path.nodes) :]):
        assert tree.extend(path, *chunk, first_id + offset)
    return path


def keep(tree: PrefixTree, root: Hashable, tokens: Sequence[int], first_id: int) -> None:
    assert tree.release(run(tree, root, tokens, first_id)) == []


def ids(path: Path) -> list[int]:
    return [node.chunk_id for node in path.nodes]


def found(tree: PrefixTree, root: Hashable, tokens: Sequence[int], start: int = 0) -> list[int]:
    path = tree.match(root, tokens, range(start, start + len(tokens)))
    numbers = ids(path)
    tree.release(path)
    return numbers


def test_an_empty_tree_matches_nothing(tree: PrefixTree) -> None:
    assert found(tree, "root", [1, 2, 3]) == []
    assert tree.evict(1) == []


def test_the_longest_path_of_full_chunks_matches(tree: PrefixTree) -> None:
    run(tree, "root", [1, 2, 3, 4, 5, 6], 10)
    assert found(tree, "root", [1, 2, 3, 4, 5, 6, 7]) == [10, 11, 12]
    assert found(tree, "root", [1, 2, 3, 4, 5]) == [10, 11], "half a chunk does not count"
    assert found(tree, "root", [1, 2, 9, 9, 5, 6]) == [10]
    assert found(tree, "root", [9, 9, 3, 4]) == []


def test_a_match_depends_on_root_and_positions(tree: PrefixTree) -> None:
    run(tree, "root", [1, 2, 3, 4], 10)
    assert found(tree, "other", [1, 2, 3, 4]) == []
    assert found(tree, "root", [1, 2, 3, 4], start=1) == []


def test_requests_that_match_hold_the_same_nodes(tree: PrefixTree) -> None:
    first = run(tree, "root", [1, 2, 3, 4], 10)
    second = tree.match("root", [1, 2, 3, 4], range(4))
    assert [a is b for a, b in zip(first.nodes, second.nodes, strict=True)] == [True, True]
    assert [node.references for node in first.nodes] == [2, 2]


def test_an_equal_chunk_filled_at_the_same_time_is_shared(tree: PrefixTree) -> None:
    paths = [tree.match("root", [1, 2], range(2)) for _ in range(2)]
    [chunk] = chunks_of([1, 2])
    assert tree.extend(paths[0], *chunk, 10)
    assert not tree.extend(paths[1], *chunk, 11), "the second copy stays with the caller"
    assert paths[0].nodes == paths[1].nodes
    assert ids(paths[1]) == [10]


def test_released_chunks_are_retained_and_found_again(tree: PrefixTree) -> None:
    path = run(tree, "root", [1, 2, 3, 4], 10)
    assert tree.retained == 0
    assert tree.release(path) == []
    assert (tree.retained, path.nodes) == (2, [])
    assert ids(tree.match("root", [1, 2], range(2))) == [10]
    assert tree.retained == 1


def test_a_root_of_none_shares_nothing_and_gives_its_chunks_back(tree: PrefixTree) -> None:
    first, second = run(tree, None, [1, 2, 3, 4], 10), run(tree, None, [1, 2, 3, 4], 20)
    assert (ids(first), ids(second)) == ([10, 11], [20, 21])
    assert tree.release(first) == [10, 11]
    assert tree.release(second) == [20, 21]
    assert tree.retained == 0
    assert found(tree, None, [1, 2]) == []


def test_the_end_of_a_path_is_evicted_before_its_front(tree: PrefixTree) -> None:
    keep(tree, "root", [1, 2, 3, 4, 5, 6], 10)
    assert tree.evict(2) == [12, 11]
    assert found(tree, "root", [1, 2, 3, 4]) == [10]


def test_the_least_recently_used_path_is_evicted_first(tree: PrefixTree) -> None:
    keep(tree, "root", [1, 2], 10)
    keep(tree, "other", [3, 4], 20)
    keep(tree, "root", [5, 6], 30)
    assert found(tree, "root", [1, 2]) == [10], "a use"
    assert tree.evict(9) == [20, 30, 10]
    assert tree.retained == 0


def test_a_shared_front_is_as_recent_as_its_last_use(tree: PrefixTree) -> None:
    keep(tree, "root", [1, 2, 3, 4], 10)
    keep(tree, "root", [7, 8], 20)
    keep(tree, "root", [1, 2, 5, 6], 30)
    assert tree.evict(4) == [11, 20, 30, 10]


def test_what_a_request_uses_is_not_evicted(tree: PrefixTree) -> None:
    keep(tree, "root", [1, 2, 3, 4], 10)
    path = tree.match("root", [1, 2], range(2))
    assert tree.evict(9) == [11]
    assert ids(path) == [10]
    tree.release(path)
    assert tree.evict(9) == [10]


def test_trimming_leaves_the_budget() -> None:
    tree = PrefixTree(CHUNK, budget=1)
    keep(tree, "root", [1, 2, 3, 4, 5, 6], 10)
    running = run(tree, "root", [7, 8], 20)
    assert tree.trim() == [12, 11]
    assert tree.trim() == []
    assert (tree.retained, ids(running)) == (1, [20])


def test_using_a_path_again_and_again_does_not_grow_the_queue(tree: PrefixTree) -> None:
    keep(tree, "root", [1, 2, 3, 4], 10)
    for _ in range(50):
        found(tree, "root", [1, 2, 3, 4])
    assert len(tree._queue) <= tree.retained


@dataclass
class Kept:
    chunk_id: int
    references: int
    last_use: int = 0


Prefix = tuple[Hashable, tuple[Chunk, ...]]
roots = st.sampled_from(["a", "b"])
chunk_lists = st.lists(
    st.sampled_from([((t, t), (p, p + 1)) for t in range(2) for p in range(2)]), max_size=4
)


class TreeMachine(RuleBasedStateMachine):
    """The tree against a dictionary of all prefixes."""

    paths = Bundle("paths")

    @initialize(budget=st.integers(0, 4))
    def begin(self, budget: int) -> None:
        self.tree = PrefixTree(CHUNK, budget)
        self.model: dict[Prefix, Kept] = {}
        self.running: dict[Path, list[Chunk]] = {}
        self.clock = self.next_id = 0

    @rule(target=paths, root=roots, chunks=chunk_lists, rest=st.integers(0, CHUNK - 1))
    def match(self, root: str, chunks: list[Chunk], rest: int) -> Path:
        tokens = [t for chunk in chunks for t in chunk[0]] + [0] * rest
        positions = [p for chunk in chunks for p in chunk[1]] + [0] * rest
        path = self.tree.match(root, tokens, positions)
        longest = max(
            n for n in range(len(chunks) + 1) if not n or (root, tuple(chunks[:n])) in self.model
        )
        held = self.running[path] = chunks[:longest]
        assert ids(path) == [entry.chunk_id for entry in self.entries(root, held)]
        for entry in self.entries(root, held):
            entry.references += 1
        return path

    @rule(path=paths, chunks=chunk_lists)
    def extend(self, path: Path, chunks: list[Chunk]) -> None:
        for chunk in chunks:
            self.next_id += 1
            self.running[path].append(chunk)
            prefix = (path.root, tuple(self.running[path]))
            assert self.tree.extend(path, *chunk, self.next_id) == (prefix not in self.model)
            self.model.setdefault(prefix, Kept(self.next_id, 0)).references += 1
            assert ids(path)[-1] == self.model[prefix].chunk_id

    @rule(path=consumes(paths))
    def release(self, path: Path) -> None:
        self.clock += 1
        for entry in self.entries(path.root, self.running.pop(path)):
            entry.references -= 1
            entry.last_use = self.clock
        assert self.tree.release(path) == []

    @rule(count=st.integers(0, 5))
    def evict(self, count: int) -> None:
        assert self.tree.evict(count) == self.naively_evicted(count)

    @rule()
    def trim(self) -> None:
        retained = self.retained()
        assert self.tree.trim() == self.naively_evicted(retained - self.tree.budget)
        assert self.tree.retained == min(retained, self.tree.budget)

    @invariant()
    def agrees(self) -> None:
        assert self.tree.retained == self.retained()
        for path, chunks in self.running.items():
            entries = self.entries(path.root, chunks)
            assert [(n.chunk_id, n.references) for n in path.nodes] == [
                (entry.chunk_id, entry.references) for entry in entries
            ]

    def teardown(self) -> None:
        for path in list(self.running):
            self.release(path)
        left = sorted(entry.chunk_id for entry in self.model.values())
        assert sorted(self.tree.evict(len(left) + 1)) == left, "none is lost, none comes twice"
        assert self.tree.retained == 0

    def entries(self, root: Hashable, chunks: list[Chunk]) -> list[Kept]:
        return [self.model[root, tuple(chunks[: n + 1])] for n in range(len(chunks))]

    def retained(self) -> int:
        return sum(not entry.references for entry in self.model.values())

    def naively_evicted(self, count: int) -> list[int]:
        evicted: list[int] = []
        while len(evicted) < count:
            parents = {(root, chunks[:-1]) for root, chunks in self.model}
            free = [p for p, e in self.model.items() if not e.references and p not in parents]
            if not free:
                break
            evicted.append(self.model.pop(min(free, key=lambda p: self.model[p].last_use)).chunk_id)
        return evicted


TestTree = TreeMachine.TestCase
TestTree.settings = settings(max_examples=100, stateful_step_count=30)


def test_chunks_under_a_fleeting_root_go_with_their_last_reader() -> None:
    tree, root = PrefixTree(2, budget=8), Fleeting()
    leader = tree.match(root, [1, 2, 3, 4], range(4))
    for number, begin in enumerate((0, 2)):
        assert tree.extend(leader, [begin + 1, begin + 2], [begin, begin + 1], number)
    other = tree.match(root, [1, 2], [0, 1])
    assert tree.release(leader) == [1], "the first chunk has another reader"
    assert tree.release(other) == [0]
    assert tree.retained == 0
    assert tree.evict(9) == []
