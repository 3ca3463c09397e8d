"""The block pool, the radix cache over it, and the private states of requests."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule

from ragcache.attention import PagedWrite
from ragcache.engine import kv_cache as module
from ragcache.engine.contiguous_kv import ContiguousKV
from ragcache.engine.kv_cache import (
    BLOCK_SIZE,
    BlockPool,
    BlockTable,
    EphemeralRoot,
    NodePath,
    PlacedRoot,
    RadixCache,
    RequestKV,
)
from ragcache.errors import ConfigurationError
from ragcache.models import CausalLM
from tests.conftest import scaled


def make_pool(total: int, block_size: int = 2) -> BlockPool:
    states = torch.zeros(1, 1, total * block_size, 1)
    return BlockPool(states, states.clone(), block_size)


def some_of(pool: BlockPool, count: int, after: int | None = None) -> list[int]:
    blocks = pool.allocate_blocks(count, after)
    assert blocks is not None
    return blocks


def pool_with_free(total: int, free: list[int]) -> BlockPool:
    pool = make_pool(total)
    some_of(pool, total)
    pool.free_blocks(free)
    return pool


def test_a_pool_is_as_large_as_its_bytes_allow(causal: CausalLM) -> None:
    per_block = BLOCK_SIZE * causal.bytes_per_token
    pool = BlockPool.create(causal, 3 * per_block + per_block // 2)
    assert (pool.num_blocks, pool.free_count, pool.used_count) == (3, 3, 0)
    assert pool.block_size == BLOCK_SIZE
    assert pool.bytes_per_block == per_block
    assert pool.keys.shape == pool.values.shape == (2, 2, 3 * BLOCK_SIZE, 16)
    assert (pool.keys.dtype, pool.keys.device) == (causal.dtype, causal.device)


def test_a_pool_for_less_than_one_block_is_refused(causal: CausalLM) -> None:
    per_block = 8 * causal.bytes_per_token
    assert BlockPool.create(causal, per_block, block_size=8).num_blocks == 1
    with pytest.raises(ConfigurationError, match=f"{per_block} bytes"):
        BlockPool.create(causal, per_block - 1, block_size=8)


def test_the_shortest_free_run_that_fits_is_taken() -> None:
    pool = pool_with_free(12, [0, 2, 3, 4, 5, 8, 9, 11])
    assert some_of(pool, 2) == [8, 9]
    assert some_of(pool, 3) == [2, 3, 4]


@pytest.mark.parametrize(
    ("block_id", "message"), [(1, "twice"), (2, "twice"), (3, "twice"), (-1, "no"), (6, "no")]
)
def test_freeing_what_is_not_in_use_raises(block_id: int, message: str) -> None:
    pool = pool_with_free(6, [1, 2, 3])
    with pytest.raises(AssertionError, match=message):
        pool.free_blocks([block_id])


def test_a_copy_is_of_one_block_in_all_layers(causal: CausalLM) -> None:
    pool = BlockPool.create(causal, 4 * 8 * causal.bytes_per_token, block_size=8)
    keys, values = torch.randn_like(pool.keys), torch.randn_like(pool.values)
    pool.keys.copy_(keys)
    pool.values.copy_(values)
    pool.copy_block(3, 1)
    keys[:, :, 8:16], values[:, :, 8:16] = keys[:, :, 24:32], values[:, :, 24:32]
    assert torch.equal(pool.keys, keys)
    assert torch.equal(pool.values, values)


def longest_run(numbers: set[int]) -> int:
    longest = length = 0
    for number in range(max(numbers, default=-1) + 1):
        length = length + 1 if number in numbers else 0
        longest = max(longest, length)
    return longest


def expected(free: set[int], count: int, after: int | None) -> tuple[list[int], int]:
    """Return the free numbers that must follow `after`, and how many more are wanted."""
    front = []
    while after is not None and len(front) < count and after + 1 in free:
        after += 1
        front.append(after)
    return front, count - len(front)


@pytest.mark.parametrize("most_ahead", [0, 5])
@given(total=st.integers(1, 24), data=st.data())
def test_no_block_is_lost_refused_or_given_out_twice(
    most_ahead: int, total: int, data: st.DataObject
) -> None:
    pool, used = make_pool(total), list[int]()
    for _ in range(data.draw(st.integers(1, 20))):
        free = set(range(total)) - set(used)
        if used and data.draw(st.booleans()):
            back = data.draw(st.lists(st.sampled_from(used), unique=True))
            pool.free_blocks(back)
            used = [block_id for block_id in used if block_id not in back]
        else:
            count = data.draw(st.integers(0, total))
            after = data.draw(st.none() | st.sampled_from(used)) if used else None
            taken = pool.allocate_blocks(count, after, data.draw(st.integers(0, most_ahead)))
            assert (taken is None) == (count > len(free))
            if taken is not None:
                assert set(taken) <= free
                assert len(set(taken)) == count
                if not most_ahead:
                    check_preferences(taken, free, after)
                used += taken
        assert pool.used_count == len(used)
        assert pool.free_count + pool.used_count == total
    pool.free_blocks(used)
    assert pool.allocate_blocks(total) == list(range(total))


def check_preferences(taken: list[int], free: set[int], after: int | None) -> None:
    front, more = expected(free, len(taken), after)
    assert taken[: len(front)] == front
    rest, left = taken[len(front) :], free - set(front)
    if more and longest_run(left) >= more:
        assert rest == list(range(rest[0], rest[0] + more)), "consecutive where possible"
    else:
        assert rest == sorted(left)[:more], "else the lowest"


def test_sequences_that_grow_side_by_side_stay_consecutive() -> None:
    pool = make_pool(20)
    ends = [pool.allocate_blocks(2, ahead=3) for _ in range(4)]
    assert ends == [[0, 1], [5, 6], [10, 11], [15, 16]]
    for step in range(3):
        grown = [pool.allocate_blocks(1, 5 * number + 1 + step) for number in range(4)]
        assert grown == [[5 * number + 2 + step] for number in range(4)]
    assert pool.free_count == 0


def test_kept_blocks_go_to_whoever_needs_them() -> None:
    pool = make_pool(10)
    assert pool.allocate_blocks(2, ahead=6) == [0, 1]
    assert pool.allocate_blocks(2) == [8, 9]
    assert pool.free_count == 6
    assert pool.allocate_blocks(4) == [2, 3, 4, 5]
    assert pool.allocate_blocks(1, after=1) == [6]


SMALL_BLOCK = 2
Block = tuple[tuple[int, ...], tuple[int, ...]]  # token ids, position ids


@pytest.fixture
def tree() -> RadixCache:
    return RadixCache(SMALL_BLOCK, budget=100)


def blocks_of(tokens: Sequence[int], start: int = 0) -> list[Block]:
    """Full blocks at consecutive positions."""
    ends = range(SMALL_BLOCK, len(tokens) + 1, SMALL_BLOCK)
    return [
        (tuple(tokens[e - SMALL_BLOCK : e]), tuple(range(start + e - SMALL_BLOCK, start + e)))
        for e in ends
    ]


def fill_path(tree: RadixCache, root: Hashable, tokens: Sequence[int], first_id: int) -> NodePath:
    """A request that finds what stands, fills the rest under ids from `first_id`, still runs."""
    path = tree.match_prefix(root, tokens, range(len(tokens)))
    for offset, block in enumerate(blocks_of(tokens)[len(path.nodes) :]):
        assert tree.append_block(path, *block, first_id + offset)
    return path


def ids(path: NodePath) -> list[int]:
    return [node.block_id for node in path.nodes]


def found(tree: RadixCache, root: Hashable, tokens: Sequence[int], start: int = 0) -> list[int]:
    path = tree.match_prefix(root, tokens, range(start, start + len(tokens)))
    numbers = ids(path)
    tree.release_path(path)
    return numbers


def test_root_none_shares_nothing_and_frees_its_blocks(tree: RadixCache) -> None:
    first, second = fill_path(tree, None, [1, 2, 3, 4], 10), fill_path(tree, None, [1, 2, 3, 4], 20)
    assert (ids(first), ids(second)) == ([10, 11], [20, 21])
    assert tree.release_path(first) == [10, 11]
    assert tree.release_path(second) == [20, 21]
    assert tree.retained == 0
    assert found(tree, None, [1, 2]) == []


@pytest.mark.parametrize(
    ("tokens", "positions", "segments", "count"),
    [
        ([1, 2, 3, 9], [0, 1, 2, 3], [], 3),
        ([1, 2, 3, 4], [0, 1, 2, 4], [], 3),
        ([9, 2, 3, 4], [0, 1, 2, 3], [], 0),
        ([1, 2, 3, 9], [0, 1, 2, 3], [(2, "a")], 3),
        ([1, 2, 3, 9], [0, 1, 2, 3], [(1, "a")], 2),
        ([1, 2, 9, 9], [0, 1, 2, 3], [(3, "a")], 2),
        ([1], [0], [], 1),
    ],
)
def test_a_block_is_found_by_the_tokens_that_it_begins_with(
    monkeypatch: pytest.MonkeyPatch,
    tokens: list[int],
    positions: list[int],
    segments: list[tuple[int, str]],
    count: int,
) -> None:
    monkeypatch.setattr(module, "FEWEST_ALIKE", 1)
    tree = RadixCache(4, budget=9)
    first = tree.match_prefix(PlacedRoot("a"), [], [])
    assert tree.append_block(first, [1, 2, 3, 4], range(4), 0)
    path = tree.match_prefix(PlacedRoot("a", tuple(segments)), [], [])
    alike = tree.find_alike(path, tokens, positions)
    assert alike == ((first.nodes[0], count) if count else None)
    other = tree.match_prefix(PlacedRoot("b", tuple(segments)), [], [])
    assert tree.find_alike(other, tokens, positions) is None, "of another owner"
    tree.release_path(first)
    tree.evict_blocks(1)
    assert tree.find_alike(path, tokens, positions) is None


def test_of_blocks_that_begin_alike_the_longest_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FEWEST_ALIKE", 2)
    tree = RadixCache(4, budget=9)
    for number, block in enumerate(([1, 2, 5, 6], [1, 2, 3, 6], [1, 5, 6, 7])):
        assert tree.append_block(tree.match_prefix("a", [], []), block, range(4), number)
    path = tree.match_prefix("a", [], [])
    for tokens, expected in (([1, 2, 3, 4], (1, 3)), ([1, 2, 5, 5], (0, 3)), ([1, 7], None)):
        alike = tree.find_alike(path, tokens, range(len(tokens)))
        assert (alike and (alike[0].block_id, alike[1])) == expected
    tree.disown_path(tree.match_prefix("a", [1, 2, 3, 6], range(4)))
    alike = tree.find_alike(path, [1, 2, 3, 4], range(4))
    assert alike is not None
    assert alike[1] == 2, "its states are not finite"


@dataclass
class Kept:
    block_id: int
    references: int
    last_use: int = 0


Prefix = tuple[Hashable, tuple[Block, ...]]
roots = st.sampled_from(["a", "b"])
block_lists = st.lists(
    st.sampled_from([((t, t), (p, p + 1)) for t in range(2) for p in range(2)]), max_size=4
)


class TreeMachine(RuleBasedStateMachine):
    """The tree against a dictionary of all prefixes."""

    paths = Bundle("paths")

    @initialize(budget=st.integers(0, 4))
    def begin(self, budget: int) -> None:
        self.tree = RadixCache(SMALL_BLOCK, budget)
        self.model: dict[Prefix, Kept] = {}
        self.running: dict[NodePath, list[Block]] = {}
        self.clock = self.next_id = 0

    @rule(target=paths, root=roots, blocks=block_lists, rest=st.integers(0, SMALL_BLOCK - 1))
    def match(self, root: str, blocks: list[Block], rest: int) -> NodePath:
        tokens = [t for block in blocks for t in block[0]] + [0] * rest
        positions = [p for block in blocks for p in block[1]] + [0] * rest
        path = self.tree.match_prefix(root, tokens, positions)
        longest = max(
            n for n in range(len(blocks) + 1) if not n or (root, tuple(blocks[:n])) in self.model
        )
        held = self.running[path] = blocks[:longest]
        assert ids(path) == [entry.block_id for entry in self.entries(root, held)]
        for entry in self.entries(root, held):
            entry.references += 1
        return path

    @rule(path=paths, blocks=block_lists)
    def extend(self, path: NodePath, blocks: list[Block]) -> None:
        for block in blocks:
            self.next_id += 1
            self.running[path].append(block)
            prefix = (path.root, tuple(self.running[path]))
            assert self.tree.append_block(path, *block, self.next_id) == (prefix not in self.model)
            self.model.setdefault(prefix, Kept(self.next_id, 0)).references += 1
            assert ids(path)[-1] == self.model[prefix].block_id

    @rule(path=consumes(paths))
    def release(self, path: NodePath) -> None:
        self.clock += 1
        for entry in self.entries(path.root, self.running.pop(path)):
            entry.references -= 1
            entry.last_use = self.clock
        assert self.tree.release_path(path) == []

    @rule(count=st.integers(0, 5))
    def evict(self, count: int) -> None:
        assert self.tree.evict_blocks(count) == self.naively_evicted(count)

    @rule()
    def trim(self) -> None:
        retained = self.retained()
        assert self.tree.trim_blocks() == self.naively_evicted(retained - self.tree.budget)
        assert self.tree.retained == min(retained, self.tree.budget)

    @invariant()
    def agrees(self) -> None:
        assert self.tree.retained == self.retained()
        for path, blocks in self.running.items():
            entries = self.entries(path.root, blocks)
            assert [(n.block_id, n.references) for n in path.nodes] == [
                (entry.block_id, entry.references) for entry in entries
            ]

    def teardown(self) -> None:
        for path in list(self.running):
            self.release(path)
        left = sorted(entry.block_id for entry in self.model.values())
        assert sorted(self.tree.evict_blocks(len(left) + 1)) == left, (
            "none is lost, none comes twice"
        )
        assert self.tree.retained == 0

    def entries(self, root: Hashable, blocks: list[Block]) -> list[Kept]:
        return [self.model[root, tuple(blocks[: n + 1])] for n in range(len(blocks))]

    def retained(self) -> int:
        return sum(not entry.references for entry in self.model.values())

    def naively_evicted(self, count: int) -> list[int]:
        evicted: list[int] = []
        while len(evicted) < count:
            parents = {(root, blocks[:-1]) for root, blocks in self.model}
            free = [p for p, e in self.model.items() if not e.references and p not in parents]
            if not free:
                break
            evicted.append(self.model.pop(min(free, key=lambda p: self.model[p].last_use)).block_id)
        return evicted


TestTree = TreeMachine.TestCase
TestTree.settings = settings(max_examples=scaled(100), stateful_step_count=30)


def test_blocks_of_an_ephemeral_root_end_with_their_last_user() -> None:
    tree, root = RadixCache(2, budget=8), EphemeralRoot()
    leader = tree.match_prefix(root, [1, 2, 3, 4], range(4))
    for number, begin in enumerate((0, 2)):
        assert tree.append_block(leader, [begin + 1, begin + 2], [begin, begin + 1], number)
    other = tree.match_prefix(root, [1, 2], [0, 1])
    assert tree.release_path(leader) == [1], "the first block has another reader"
    assert tree.release_path(other) == [0]
    assert tree.retained == 0
    assert tree.evict_blocks(9) == []


def make_block_table(
    block_ids: list[int], filled: int = 0, block_size: int = 4, total: int = 8
) -> BlockTable:
    states = torch.zeros(2, 3, total * block_size, 5)
    table = BlockTable(BlockPool(states, states.clone(), block_size))
    table.block_ids += block_ids
    table.advance(range(filled))
    return table


def contiguous_kv(capacity: int, filled: int = 0) -> ContiguousKV:
    room = ContiguousKV(torch.zeros(2, 3, capacity, 5), torch.zeros(2, 3, capacity, 5))
    room.advance(range(filled))
    return room


def bounds(private: RequestKV) -> list[tuple[int, int]]:
    return [(each.begin, each.end) for each in private.spans()]


def step(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """New states of a step: key t of head h holds 10 h + t, and values their negatives."""
    key = 10.0 * torch.arange(3)[:, None] + torch.arange(1, rows + 1)
    key = key[..., None].expand(3, rows, 5)
    return key, -key


def test_contiguous_kv_is_one_span_that_grows(causal: CausalLM) -> None:
    room = ContiguousKV.allocate(causal, 6)
    assert room.keys.shape == room.values.shape == (2, 2, 6, 16)
    assert (room.keys.dtype, room.length, room.spans()) == (causal.dtype, 0, [])
    room.advance(range(3))
    assert bounds(room) == [(0, 3)]
    room.advance([7, 9])
    assert (bounds(room), list(room.positions)) == ([(0, 5)], [0, 1, 2, 7, 9])
    states = room.as_states(40)
    assert (states.start, states.length) == (40, 5)
    [span] = room.spans()
    assert span.keys is room.keys
    assert span.values is room.values
    assert states.keys.data_ptr() == room.keys.data_ptr(), "no copy"
    assert states.values.data_ptr() == room.values.data_ptr()


def test_contiguous_kv_is_written_behind_its_tokens() -> None:
    room = contiguous_kv(8, filled=3)
    key, value = step(6)
    room.write_rows(2, 5).write_states(1, key, value)
    assert torch.equal(room.keys[1, :, 3:6], key[:, 2:5])
    assert torch.equal(room.values[1, :, 3:6], value[:, 2:5])
    room.keys[1, :, 3:6], room.values[1, :, 3:6] = 0, 0
    assert not room.keys.any(), "nothing else is"
    assert not room.values.any()
    room.write_rows(0, 5)
    with pytest.raises(AssertionError):
        room.write_rows(0, 6)


@pytest.mark.parametrize(
    ("filled", "expected"),
    [
        (0, []),
        (1, [(20, 21)]),
        (4, [(20, 24)]),
        (5, [(20, 24), (8, 9)]),
        (12, [(20, 24), (8, 12), (12, 16)]),
    ],
)
def test_block_table_has_one_span_a_block(filled: int, expected: list[tuple[int, int]]) -> None:
    table = make_block_table([5, 2, 3], filled)
    assert bounds(table) == expected
    assert all(each.keys is table.pool.keys for each in table.spans())
    assert all(each.values is table.pool.values for each in table.spans())


def test_slots_follow_the_blocks_in_the_order_of_the_request() -> None:
    table = make_block_table([5, 2, 3], filled=3)
    assert (table.capacity, table.length) == (12, 3)
    assert table.slots(7) == [23, 8, 9, 10, 11, 12, 13]
    assert table.slots(0) == []
    with pytest.raises(AssertionError):
        table.slots(10)
    table.advance(range(3, 8))
    assert table.slots(1) == [12], "the first of a block"


def test_block_table_writes_rows_to_their_slots() -> None:
    table = make_block_table([5, 2, 3], filled=3)
    key, value = step(6)
    keys, values = table.pool.keys, table.pool.values
    slots = torch.tensor(table.slots(3))
    PagedWrite(keys, values, slots, torch.arange(1, 4)).write_states(1, key, value)
    assert torch.equal(keys[1][:, [23, 8, 9]], key[:, 1:4])
    assert torch.equal(values[1][:, [23, 8, 9]], value[:, 1:4])
    keys[1][:, [23, 8, 9]], values[1][:, [23, 8, 9]] = 0, 0
    assert not keys.any(), "nothing else is"
    assert not values.any()
