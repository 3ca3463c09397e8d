"""The KV cache manager: which blocks sequences hold, and what they contain."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence as Tokens

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from ragcache.engine.kv_cache import BlockPool, RadixCache
from ragcache.engine.kv_cache_manager import KVCacheManager
from ragcache.engine.queues import AnswerChannel
from ragcache.engine.request import Request
from ragcache.engine.sequence import Sequence, SequenceGroup
from tests.conftest import scaled
from tests.ragcache.engine.stepped_engine import BLOCK_SIZE, plain_context


def memory_of(blocks: int, budget: int) -> KVCacheManager:
    """A pool of one layer, head and dimension, in which a state is its token or its position."""
    shape = (1, 1, blocks * BLOCK_SIZE, 1)
    pool = BlockPool(torch.full(shape, -1.0), torch.full(shape, -1.0), BLOCK_SIZE)
    return KVCacheManager(pool, RadixCache(BLOCK_SIZE, budget))


@pytest.fixture
def memory() -> KVCacheManager:
    return memory_of(blocks=16, budget=16)


def sequence_of(tokens: Tokens[int], tenant: str | None = "a", n: int = 1) -> Sequence:
    request = Request(plain_context(tokens), 50, tenant=tenant, n=n)
    return Sequence(SequenceGroup(request, AnswerChannel(lambda: None), 0.0), 0, 0)


def compute(memory: KVCacheManager, sequence: Sequence, count: int | None = None) -> None:
    """Play a step: make room, write the states, keep the books."""
    count = len(sequence.tokens) - sequence.computed if count is None else count
    memory.allocate_slots(sequence, count)
    private, begin = sequence.private, sequence.computed
    assert private is not None
    for slot, at in zip(private.slots(count), range(begin, begin + count), strict=True):
        memory.pool.keys[:, :, slot] = sequence.tokens[at]
        memory.pool.values[:, :, slot] = sequence.positions[at]
    private.advance(sequence.positions[begin : begin + count])
    memory.share_blocks(sequence, begin + count)


def answer(sequence: Sequence, token: int) -> None:
    sequence.positions.append(len(sequence.tokens))
    sequence.tokens.append(token)


def standing(memory: KVCacheManager, tokens: Tokens[int], tenant: str | None = "a") -> Sequence:
    """A running request whose prompt is computed."""
    sequence = sequence_of(tokens, tenant)
    memory.admit_sequence(sequence)
    compute(memory, sequence)
    return sequence


def ids(sequence: Sequence) -> list[int]:
    assert sequence.private is not None
    return sequence.private.block_ids


def check_states(memory: KVCacheManager, sequence: Sequence) -> None:
    """Its blocks hold its tokens at its positions."""
    private = sequence.private
    assert private is not None
    slots = [block * BLOCK_SIZE + at for block in private.block_ids for at in range(BLOCK_SIZE)]
    here = slots[: private.length]
    assert memory.pool.keys[0, 0, here, 0].tolist() == sequence.tokens[: private.length]
    assert memory.pool.values[0, 0, here, 0].tolist() == sequence.positions[: private.length]


def test_can_hold_up_to_the_pool_size() -> None:
    memory = memory_of(blocks=3, budget=0)
    assert memory.can_hold(3 * BLOCK_SIZE)
    assert not memory.can_hold(3 * BLOCK_SIZE + 1)


def test_full_blocks_of_a_running_request_are_shared(memory: KVCacheManager) -> None:
    first, second = standing(memory, range(11)), sequence_of(range(9))
    assert memory.admit_sequence(second) == 2 * BLOCK_SIZE
    assert ids(second)[:2] == ids(first)[:2]
    assert memory.pool.used_count == 3 + 1
    compute(memory, second)
    check_states(memory, second)


def test_the_last_token_is_always_computed(memory: KVCacheManager) -> None:
    first, second = standing(memory, range(8)), sequence_of(range(8))
    assert memory.admit_sequence(second) == BLOCK_SIZE, (
        "the answer continues from the last token's logits"
    )
    compute(memory, second)
    assert ids(second) == ids(first), "and its block, filled again, is the one that stood"
    assert memory.pool.used_count == 2


def test_equal_blocks_filled_beside_each_other_become_one(memory: KVCacheManager) -> None:
    first, second = sequence_of(range(9)), sequence_of(range(9))
    for each in (first, second):
        assert memory.admit_sequence(each) == 0
    assert memory.pool.used_count == 6
    for each in (first, second):
        compute(memory, each)
    assert ids(first)[:2] == ids(second)[:2]
    assert memory.pool.used_count == 4


@pytest.mark.parametrize("tenants", [("a", "b"), ("a", None), (None, None)])
def test_nothing_is_shared_between_tenants(
    memory: KVCacheManager, tenants: tuple[str | None, str | None]
) -> None:
    first, second = (standing(memory, range(9), tenant) for tenant in tenants)
    assert not set(ids(first)) & set(ids(second))
    memory.release_sequence(first)
    memory.release_sequence(second)
    named = sum(tenant is not None for tenant in tenants)
    assert memory.radix_cache.retained == memory.pool.used_count == 2 * named


def test_released_blocks_are_found_by_the_next_request(memory: KVCacheManager) -> None:
    first = standing(memory, range(9))
    kept = ids(first)[:2]
    memory.release_sequence(first)
    assert (first.private, first.path) == (None, None)
    assert memory.pool.used_count == memory.radix_cache.retained == 2
    assert memory.available_blocks == 16
    second = sequence_of(range(20))
    assert memory.admit_sequence(second) == 2 * BLOCK_SIZE
    assert ids(second)[:2] == kept
    check_states(memory, second)


def test_retained_blocks_are_evicted_for_running_requests() -> None:
    memory = memory_of(blocks=6, budget=6)
    first = standing(memory, range(16))
    memory.release_sequence(first)
    assert (memory.pool.free_count, memory.available_blocks) == (2, 6)
    second = standing(memory, range(50, 70))
    assert len(ids(second)) == 5
    assert (memory.pool.free_count, memory.radix_cache.retained) == (0, 1)
    check_states(memory, second)
    found = memory.radix_cache.match_prefix(first.group.root, range(16), range(16))
    assert len(found.nodes) == 1, "the front of a path goes last"


@pytest.mark.parametrize("length", [BLOCK_SIZE, BLOCK_SIZE + 1, 2 * BLOCK_SIZE, 1])
def test_a_fork_at_any_place_in_a_block(memory: KVCacheManager, length: int) -> None:
    leader = sequence_of(range(length), tenant=None, n=2)
    memory.admit_sequence(leader)
    compute(memory, leader)
    other = Sequence(leader.group, 1, 1)
    assert memory.fork_sequence(leader, other)
    assert other.computed == length - 1
    compute(memory, other)
    check_states(memory, other)
    memory.release_sequence(leader)
    memory.release_sequence(other)
    assert memory.pool.used_count == memory.radix_cache.retained == 0, "nobody can find them again"


def test_no_fork_without_a_free_block() -> None:
    memory = memory_of(blocks=2, budget=2)
    leader = sequence_of(range(7), n=2)
    memory.admit_sequence(leader)
    compute(memory, leader)
    other = Sequence(leader.group, 1, 1)
    assert not memory.fork_sequence(leader, other)
    assert (other.private, other.path, memory.pool.used_count) == (None, None, 2)


class Requests(RuleBasedStateMachine):
    """Requests that come, compute, fork, pause and leave in any order, in a small pool."""

    def __init__(self) -> None:
        super().__init__()
        self.memory = memory_of(blocks=12, budget=5)
        self.running: list[Sequence] = []
        self.paused: list[Sequence] = []

    def fits(self, tokens: int) -> bool:
        return -(-tokens // BLOCK_SIZE) <= self.memory.available_blocks

    def some(self, at: int) -> Sequence:
        return self.running[at % len(self.running)]

    def enter(self, sequence: Sequence) -> None:
        if self.fits(len(sequence.tokens)):
            self.memory.admit_sequence(sequence)
            self.running.append(sequence)

    @rule(
        length=st.integers(1, 24),
        branch=st.integers(0, 2),
        fork=st.integers(0, 12),
        tenant=st.sampled_from(["a", "a", "b", None]),
        n=st.integers(1, 3),
    )
    def join(self, length: int, branch: int, fork: int, tenant: str | None, n: int) -> None:
        """Prompts that are equal up to some token."""
        tokens = [at if at < fork else 100 * branch + at for at in range(length)]
        self.enter(sequence_of(tokens, tenant, n))

    @precondition(lambda self: self.running)
    @rule(at=st.integers(0, 20), count=st.integers(1, 9))
    def go_on(self, at: int, count: int) -> None:
        sequence = self.some(at)
        pending = len(sequence.tokens) - sequence.computed
        if not pending:
            answer(sequence, 7)
            pending = 1
        count = min(count, pending)
        if self.fits(count):
            compute(self.memory, sequence, count)

    @precondition(lambda self: self.running)
    @rule(at=st.integers(0, 20))
    def fork(self, at: int) -> None:
        leader = self.some(at)
        compute_all = len(leader.tokens) - leader.computed
        if leader.request.n == 1 or leader.generated or not self.fits(compute_all):
            return
        if compute_all:
            compute(self.memory, leader)
        other = Sequence(leader.group, 1, 0)
        none_left = self.memory.available_blocks == 0
        assert self.memory.fork_sequence(leader, other) != none_left
        if not none_left:
            assert len(other.tokens) - other.computed == 1
            self.running.append(other)

    @precondition(lambda self: self.running)
    @rule(at=st.integers(0, 20), pause=st.booleans())
    def leave(self, at: int, pause: bool) -> None:
        sequence = self.some(at)
        self.running.remove(sequence)
        self.memory.release_sequence(sequence)
        assert self.memory.radix_cache.retained <= self.memory.radix_cache.budget
        if pause:
            self.paused.append(sequence)

    @precondition(lambda self: self.paused)
    @rule()
    def come_back(self) -> None:
        self.enter(self.paused.pop())

    @invariant()
    def every_block_is_accounted_for(self) -> None:
        pool, tree = self.memory.pool, self.memory.radix_cache
        assert pool.used_count + pool.free_count == pool.num_blocks
        assert self.memory.available_blocks == pool.free_count + tree.retained
        owners = Counter(block for sequence in self.running for block in ids(sequence))
        assert len(owners) + tree.retained == pool.used_count
        for sequence in self.running:
            assert sequence.path is not None
            nodes = sequence.path.nodes
            assert [node.block_id for node in nodes] == ids(sequence)[: len(nodes)]
            assert len(nodes) == sequence.computed // BLOCK_SIZE
            assert all(owners[block] == 1 for block in ids(sequence)[len(nodes) :])
            assert all(owners[node.block_id] == node.references for node in nodes)
            check_states(self.memory, sequence)

    def teardown(self) -> None:
        for sequence in self.running:
            self.memory.release_sequence(sequence)
        memory = self.memory
        assert memory.pool.used_count == memory.radix_cache.retained
        memory.pool.free_blocks(memory.radix_cache.evict_blocks(memory.radix_cache.retained))
        assert memory.pool.allocate_blocks(memory.pool.num_blocks) == list(
            range(memory.pool.num_blocks)
        )


TestRequests = Requests.TestCase
TestRequests.settings = settings(max_examples=scaled(60), stateful_step_count=40)
