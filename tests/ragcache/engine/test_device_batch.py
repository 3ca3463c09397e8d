"""Batches for a device: what rows read through the tables is what their chunks say."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ragcache.attention.triton.plan import HeadLayout, ItemShape, TableCapacity, TableOverflow
from ragcache.attention.triton.tables import AttentionTables
from ragcache.engine import Context, Request, Segment, device_batch
from ragcache.engine.batch import LONG_SPAN, ScheduledChunk
from ragcache.engine.contiguous_kv import ContiguousKV
from ragcache.engine.decode_batch import DecodeBatch
from ragcache.engine.device_batch import MAX_TAIL_BLOCKS, DeviceBatch, DevicePlanner
from ragcache.engine.handle import RequestChannel
from ragcache.engine.kv_cache import BlockPool, BlockTable, RequestKV
from ragcache.engine.sequence import Sequence as EngineSequence
from ragcache.engine.sequence import SequenceGroup
from ragcache.states import KVStates
from ragcache.states.quantization import quantize
from tests.conftest import scaled
from tests.ragcache.attention.tabled_reads import (
    SeenKey,
    assert_partials_reach_their_rows,
    items_of,
    keys_of_rows,
)

BLOCK_SIZE = 4
HEADS = HeadLayout(num_kv_heads=1, group=2, head_dim=1)
SHAPES = dict.fromkeys(("mixed", "decode"), ItemShape(4, 64))
CAPACITY = TableCapacity(rows=64, entries=4096, items=2048, bases=32, pages_per_row=MAX_TAIL_BLOCKS)
POOL = BlockPool(torch.zeros(1, 1, 2000, 1), torch.zeros(1, 1, 2000, 1), BLOCK_SIZE)
_MODULE = KVStates(torch.zeros(1, 1, 9, 1), torch.zeros(1, 1, 9, 1), 3)
MODULES = [
    KVStates(torch.zeros(1, 1, 6, 1), torch.zeros(1, 1, 6, 1), 0),
    _MODULE,
    _MODULE.part(0, 9, 3),
    _MODULE.part(0, 5, 3),
    _MODULE.part(4, 9, 7),
]


@pytest.fixture(autouse=True, scope="module", params=[-1, 99], ids=["arrays", "one by one"])
def _ways_to_plan(request: pytest.FixtureRequest) -> Iterator[None]:
    """Plan every step of a test as those of many requests, and as those of few."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device_batch, "FEW_SEGMENTS", request.param)
        yield


def block_table(block_ids: Sequence[int], positions: Sequence[int]) -> BlockTable:
    private = BlockTable(POOL)
    private.block_ids += block_ids
    private.advance(positions)
    return private


def chunk(
    private: RequestKV, count: int = 1, segments: Sequence[Segment] = (), start: int | None = None
) -> ScheduledChunk:
    """Its next `count` tokens."""
    if start is None:
        start = private.positions[-1] + 1 if private.length else 100
    tokens = list(range(count))
    return ScheduledChunk(tuple(segments), private, tokens, range(start, start + count))


def slot_of(private: RequestKV, token: int) -> int:
    """The token of its base at which a request's token is."""
    if isinstance(private, ContiguousKV):
        return token
    return private.block_ids[token // BLOCK_SIZE] * BLOCK_SIZE + token % BLOCK_SIZE


def memory_of(private: RequestKV) -> int:
    pool = private.pool if isinstance(private, BlockTable) else private
    return pool.keys.data_ptr()


NOWHERE = -1
"""The position of private keys where nothing depends on it."""


def defined_keys(chunks: Sequence[ScheduledChunk], gapless: bool) -> list[Counter[SeenKey]]:
    """Return the keys that each row sees: segments up to it, its past, new tokens up to its own."""
    found = []
    for each in chunks:
        private = each.private
        positions = [*private.positions, *each.position_ids]
        for number, position in enumerate(each.position_ids):
            seen: Counter[SeenKey] = Counter()
            for segment in each.segments:
                if segment.start <= position:
                    address = segment.states.keys.data_ptr()
                    seen.update(
                        SeenKey(address, token, segment.delta, segment.start + token)
                        for token in range(segment.states.length)
                    )
            for token in range(private.length + number + 1):
                at = positions[token] if gapless else NOWHERE
                seen[SeenKey(memory_of(private), slot_of(private, token), 0, at)] += 1
            found.append(seen)
    return found


def tabled_keys(
    tables: AttentionTables, batch: DeviceBatch, gapless: bool
) -> list[Counter[SeenKey]]:
    """Return the keys that each row sees through the items and its tail."""
    views = tables.views
    pool = POOL.keys.data_ptr()
    private = set(views.bases[:, 0].tolist()) - {each.keys.data_ptr() for each in MODULES}
    found = []
    for row, keys in enumerate(keys_of_rows(views, batch.rows)):
        seen: Counter[SeenKey] = Counter()
        for key, count in keys.items():
            anywhere = not gapless and key.address in private
            seen[key._replace(position=NOWHERE) if anywhere else key] += count
        length, position = int(views.tail_length[row]), int(views.position_ids[row])
        assert (length >= 0) == (batch.kind == "decode")
        for token in range(length + 1):
            page = int(views.pages[row, token // BLOCK_SIZE])
            at = position - length + token if gapless else NOWHERE
            seen[SeenKey(pool, page * BLOCK_SIZE + token % BLOCK_SIZE, 0, at)] += 1
        found.append(seen)
    return found


def assert_rows_follow(
    tables: AttentionTables, batch: DeviceBatch, chunks: Sequence[ScheduledChunk], gapless: bool
) -> None:
    """The tables on the device are those of the chunks."""
    views, rows = tables.views, batch.rows
    assert views.position_ids[:rows].tolist() == [p for each in chunks for p in each.position_ids]
    assert views.token_ids[:rows].tolist() == [t for each in chunks for t in each.token_ids]
    wanted, row, places = [], 0, []
    for each in chunks:
        first, row = row, row + len(each.token_ids)
        wanted += [row - 1] if each.wants_logits else []
        places += [
            (memory_of(each.private), slot_of(each.private, each.private.length + number))
            for number in range(row - first)
        ]
    assert views.logit_rows[: batch.logits].tolist() == wanted
    assert views.bases[0, 0] == POOL.keys.data_ptr(), "the pool is base 0"
    slots, bases = views.write_slot.tolist(), views.write_base.tolist()
    if batch.kind == "mixed":
        written = zip(bases[:rows], slots[:rows], strict=True)
        assert [(int(views.bases[base, 0]), slot) for base, slot in written] == places
    assert set(slots[0 if batch.kind == "decode" else rows :]) == {-1}
    assert set(views.tail_length[rows:].tolist()) == {-1}
    assert tabled_keys(tables, batch, gapless) == defined_keys(chunks, gapless)
    assert_partials_reach_their_rows(views, rows)


def new_tables() -> AttentionTables:
    return AttentionTables(CAPACITY, "cpu")


def planned(
    chunks: Sequence[ScheduledChunk], tables: AttentionTables, *, gapless: bool = False
) -> DeviceBatch:
    batch = DevicePlanner(POOL, HEADS, gapless=gapless, shapes=SHAPES).plan_batch(
        chunks, tables, DecodeBatch()
    )
    tables.upload()
    assert tables.views.live_rows.tolist() == [batch.rows], "the others are padding"
    return batch


@dataclass
class DrawnRequests:
    """Requests whose blocks form a tree, as those of the radix cache."""

    draw: Callable[[st.SearchStrategy[Any]], Any]
    next_block: int = 1
    private: list[BlockTable] = field(default_factory=list)

    def new_blocks(self, count: int) -> list[int]:
        """Neighbors, but for at most one."""
        first = self.next_block + 1
        away = self.draw(st.integers(0, 2 * count))
        self.next_block = first + count
        return [first + number + (number >= away) for number in range(count)]

    def add(self, new: int) -> BlockTable:
        """A request with room for so many new tokens."""
        draw = self.draw
        table = BlockTable(POOL)
        if self.private and draw(st.booleans()):
            parent = draw(st.sampled_from(self.private))
            shared = draw(st.integers(0, parent.length // BLOCK_SIZE))
            table.block_ids += parent.block_ids[:shared]
            table.advance(parent.positions[: shared * BLOCK_SIZE])
        own, gap = draw(st.integers(0, 40)), draw(st.integers(0, 80))
        start = table.positions[-1] + 1 if table.positions else 0
        table.advance([start + number + 5 * (number >= gap) for number in range(own)])
        room = -(-(table.length + new) // BLOCK_SIZE) - len(table.block_ids)
        table.block_ids += self.new_blocks(max(0, room))
        self.private.append(table)
        return table

    def segments(self) -> list[Segment]:
        draw = self.draw
        chosen = draw(st.lists(st.sampled_from(MODULES), max_size=3))
        return [Segment(states, draw(st.integers(0, 20) | st.integers(0, 80))) for states in chosen]

    def chunk(self, private: RequestKV, new: int) -> ScheduledChunk:
        last = private.positions[-1] if private.length else 4
        start = last + self.draw(st.sampled_from([1, 1, 1, 1, 9]))
        wants = self.draw(st.booleans())
        return replace(chunk(private, new, self.segments(), start), wants_logits=wants)


@st.composite
def mixed_chunks(draw: st.DrawFn) -> list[ScheduledChunk]:
    requests, chunks = DrawnRequests(draw), []
    for _ in range(draw(st.integers(1, 5))):
        new = draw(st.sampled_from([1, 1, 2, 5, 9]))
        private: RequestKV = requests.add(new)
        if draw(st.sampled_from([False, False, True])):
            room = torch.zeros(1, 1, private.length + new, 1)
            contiguous = ContiguousKV(room, room.clone())
            contiguous.advance(private.positions)
            private = contiguous
        chunks.append(requests.chunk(private, new))
    return chunks


@given(st.lists(mixed_chunks(), min_size=1, max_size=2), st.booleans())
def test_rows_of_any_step_see_what_their_chunks_say(
    steps: list[list[ScheduledChunk]], gapless: bool
) -> None:
    tables = new_tables()
    for chunks in steps:
        batch = planned(chunks, tables, gapless=gapless)
        assert_rows_follow(tables, batch, chunks, gapless)


@settings(max_examples=scaled(100))
@given(st.data(), st.booleans())
def test_decoding_rows_see_what_their_chunks_say_in_every_step(
    data: st.DataObject, gapless: bool
) -> None:
    """Blocks that just became full may be replaced by equal ones, at once or a step late."""
    requests = DrawnRequests(data.draw)
    chunks = [requests.chunk(requests.add(1), 1) for _ in range(data.draw(st.integers(1, 4)))]
    tables = new_tables()
    batch = planned(chunks, tables, gapless=gapless)
    assert_rows_follow(tables, batch, chunks, gapless)
    late = data.draw(st.sampled_from([0, 1]))
    for _ in range(12):
        following = []
        for each in chunks:
            private = each.private
            assert isinstance(private, BlockTable)
            private.advance(each.position_ids)
            if private.length == private.capacity:
                private.block_ids += requests.new_blocks(1)
            if private.length % BLOCK_SIZE == late and private.length >= BLOCK_SIZE:
                own = private.length // BLOCK_SIZE - 1
                shared = sum(private.block_ids[own] in e.block_ids for e in requests.private) > 1
                if not shared and data.draw(st.booleans()):
                    [private.block_ids[own]] = requests.new_blocks(1)
            position = each.position_ids[0] + 1
            following.append(replace(each, position_ids=[position], token_ids=[position]))
        chunks = following
        if batch.advance():
            tables.step.token_ids[: batch.rows] = [each.token_ids[0] for each in chunks]
            tables.upload()
        else:
            batch = planned(chunks, tables, gapless=gapless)
        assert_rows_follow(tables, batch, chunks, gapless)


@dataclass
class DrawnBatch:
    """A decode batch whose sequences join and leave, with the requests that its blocks are of."""

    requests: DrawnRequests
    batch: DecodeBatch = field(default_factory=DecodeBatch)

    def move_on(self) -> None:
        """The plan of another step: some sequences leave, and some join."""
        draw = self.requests.draw
        for sequence in self.batch.sequences:
            sequence.finished = draw(st.sampled_from([False, False, False, True]))
        self.batch.leave()
        self.batch.join([self.sequence() for _ in range(draw(st.integers(0, 2)))], 0)
        for row in self.batch.full_rows():
            self.batch.tables[row].block_ids += self.requests.new_blocks(1)
            self.batch.put_blocks(row)

    def sequence(self) -> EngineSequence:
        """A sequence whose prompt has just been computed."""
        table = self.requests.add(0)
        last = table.positions[-1] if table.length else 4
        behind = last + self.requests.draw(st.sampled_from([1, 1, 9]))
        segments = tuple(self.requests.segments())
        request = Request(Context(segments, (1,), (last,), behind), 1000)
        group = SequenceGroup(request, RequestChannel(lambda: None), 0.0)
        sequence = EngineSequence(group, 0, 0)
        sequence.private, sequence.sampler = table, sequence.new_sampler()
        return sequence

    def launch(self) -> None:
        """The step runs. A block that it fills may turn out to equal another."""
        for sequence, table, length in self.batch.advance() if self.batch.rows else ():
            own = length // BLOCK_SIZE - 1
            private = self.requests.private
            shared = sum(table.block_ids[own] in each.block_ids for each in private) > 1
            if not shared and self.requests.draw(st.booleans()):
                [table.block_ids[own]] = self.requests.new_blocks(1)
                self.batch.exchange(sequence)

    def beside(self) -> list[ScheduledChunk]:
        """Chunks that the step computes beside the batch."""
        draw = self.requests.draw
        sizes = draw(st.lists(st.sampled_from([1, 3, 9]), max_size=2))
        return [self.requests.chunk(self.requests.add(new), new) for new in sizes]


def reads_of(tables: AttentionTables) -> Counter[tuple[int, int, int, tuple[int, ...]]]:
    """The items as the address of the base, its tokens, and the rows that read them."""
    views = tables.views
    rows, bases = views.entry_row.tolist(), views.bases[:, 0].tolist()
    return Counter(
        (bases[base], begin, end, tuple(rows[first : first + count]))
        for base, begin, end, first, count, *_ in items_of(views)
    )


@settings(max_examples=scaled(100))
@given(st.data(), st.booleans())
def test_a_batch_that_changes_is_planned_as_one_that_is_new(
    data: st.DataObject, gapless: bool
) -> None:
    """Its rows see what their chunks say, by the reads that a planner without a past makes."""
    drawn, tables = DrawnBatch(DrawnRequests(data.draw)), new_tables()
    planner = DevicePlanner(POOL, HEADS, gapless=gapless, shapes=SHAPES)
    for _ in range(data.draw(st.integers(1, 8))):
        drawn.move_on()
        beside = drawn.beside()
        if not (drawn.batch.rows or beside):
            continue
        chunks = [*drawn.batch.chunks(), *beside]
        batch = planner.plan_batch(beside, tables, drawn.batch)
        tables.upload()
        assert_rows_follow(tables, batch, chunks, gapless)
        anew = new_tables()
        again = planned(chunks, anew, gapless=gapless)
        assert (again.kind, again.rows) == (batch.kind, batch.rows)
        assert reads_of(tables) == reads_of(anew)
        drawn.launch()


@settings(max_examples=scaled(100))
@given(st.data())
def test_a_planner_follows_batches_that_it_sees_now_and_then(data: st.DataObject) -> None:
    """Steps that it does not plan lie between, and preemption builds a batch again."""
    draw, tables = data.draw, new_tables()
    requests = DrawnRequests(draw)
    every = [DrawnBatch(requests), DrawnBatch(requests)]
    planner = DevicePlanner(POOL, HEADS, shapes=SHAPES)
    for _ in range(draw(st.integers(1, 8))):
        drawn = draw(st.sampled_from(every))
        if draw(st.sampled_from([False, False, True])):
            sequences = drawn.batch.sequences
            drawn.batch = DecodeBatch()
            drawn.batch.join(draw(st.permutations(sequences)), 0)
        drawn.move_on()
        if drawn.batch.rows and draw(st.booleans()):
            planner.plan_batch([], tables, drawn.batch)
            tables.upload()
            anew = new_tables()
            planned(drawn.batch.chunks(), anew)
            assert reads_of(tables) == reads_of(anew)
        drawn.launch()


@settings(max_examples=scaled(50))
@given(st.data())
def test_a_batch_that_stays_moves_on_without_a_plan(data: st.DataObject) -> None:
    drawn, tables = DrawnBatch(DrawnRequests(data.draw)), new_tables()
    drawn.batch.join([drawn.sequence() for _ in range(data.draw(st.integers(1, 4)))], 0)
    planner, batch, version = DevicePlanner(POOL, HEADS, shapes=SHAPES), None, 0
    for _ in range(12):
        for row in drawn.batch.full_rows():
            drawn.batch.tables[row].block_ids += drawn.requests.new_blocks(1)
            drawn.batch.put_blocks(row)
        if batch is None or drawn.batch.version != version or not batch.advance():
            batch = planner.plan_batch([], tables, drawn.batch)
            version = drawn.batch.version
        tables.upload()
        assert_rows_follow(tables, batch, drawn.batch.chunks(), gapless=False)
        drawn.launch()


def private_reads(batch: DeviceBatch) -> list[tuple[list[int], list[int]]]:
    """The pool's blocks of each read, and the first rows of its readers."""
    rows = batch.plan.entry_fields[0].tolist()
    found = [
        (list(range(begin // BLOCK_SIZE, -(-end // BLOCK_SIZE))), rows[first : first + count])
        for base, begin, end, first, count, *_ in batch.plan.items.tolist()
        if base == 0
    ]
    return sorted(found)


def tails_of(tables: AttentionTables, batch: DeviceBatch) -> list[list[int]]:
    lengths = tables.step.tail_length[: batch.rows].tolist()
    return [
        tables.step.pages[row, : length // BLOCK_SIZE + 1].tolist()
        for row, length in enumerate(lengths)
    ]


def test_shared_blocks_are_read_once_and_tails_follow_them() -> None:
    tables = new_tables()
    chunks = [
        chunk(block_table([1, 2, 3, 9], range(14))),
        chunk(block_table([1, 2, 3, 4, 8], range(17))),
        chunk(block_table([1, 6], range(7))),
    ]
    batch = planned(chunks, tables)
    assert batch.kind == "decode"
    assert private_reads(batch) == [([1], [0, 1, 2]), ([2, 3], [0, 1])]
    assert tails_of(tables, batch) == [[9], [4, 8], [6]]


@pytest.mark.parametrize(
    ("full", "more", "tail"),
    [
        (LONG_SPAN - 1, 1, LONG_SPAN),
        (LONG_SPAN, 1, 1),
        (30, 1, 1),
        pytest.param(LONG_SPAN + 1, 0, 2, id="a block just filled may yet be replaced by an equal"),
    ],
)
def test_long_pasts_are_runs_and_short_ones_tails(full: int, more: int, tail: int) -> None:
    tables = new_tables()
    private = block_table(range(5, 6 + full), range(full * BLOCK_SIZE + more))
    batch = planned([chunk(private)], tables)
    runs = full + 1 - tail
    assert [len(blocks) for blocks, _ in private_reads(batch)] == ([runs] if runs else [])
    assert tails_of(tables, batch) == [private.block_ids[-tail:]]


def test_scattered_blocks_are_runs_of_their_own() -> None:
    tables = new_tables()
    private = block_table([5, 6, 9, 8, 3, 20], range(5 * BLOCK_SIZE + 2))
    batch = planned([chunk(private)], tables)
    assert private_reads(batch) == [([3], [0]), ([5, 6], [0]), ([8], [0]), ([9], [0])]


def test_tails_grow_to_their_most_blocks() -> None:
    tables = new_tables()
    private = block_table(range(3, 40), range(2))
    batch = planned([chunk(private)], tables)
    steps = 0
    while batch.advance():
        steps += 1
    assert 2 + steps == MAX_TAIL_BLOCKS * BLOCK_SIZE - 1
    assert tails_of(tables, batch) == [list(range(3, 3 + MAX_TAIL_BLOCKS))]
    before = tables.step.position_ids.tolist()
    assert not batch.advance()
    assert tables.step.position_ids.tolist() == before, "nothing changed"


def test_advance_stops_before_a_segment_that_was_ahead() -> None:
    tables = new_tables()
    ahead = [Segment(MODULES[0], 12), Segment(MODULES[1], 30)]
    batch = planned([chunk(block_table([1, 2, 3], [9]), segments=ahead)], tables)
    assert (batch.advance(), batch.advance()) == (True, False)
    assert tables.step.position_ids[0] == 11


def test_a_gap_in_the_filling_block_makes_a_gapless_step_mixed() -> None:
    tables = new_tables()
    chunks = [chunk(block_table([1, 2], [0, 1, 2, 3, 4, 9]))]
    assert planned(chunks, tables).kind == "decode"
    batch = planned(chunks, tables, gapless=True)
    assert batch.kind == "mixed"
    assert not batch.advance(), "every step is planned"
    assert_rows_follow(tables, batch, chunks, gapless=True)
    behind = [chunk(block_table([1, 2], [0, 1, 2, 9, 10, 11]))]
    batch = planned(behind, tables, gapless=True)
    assert batch.kind == "decode"
    assert tails_of(tables, batch) == [[2]]


def test_segments_in_eight_bits_come_with_their_scales() -> None:
    tables = new_tables()
    quantized = quantize(KVStates(torch.ones(1, 1, 6, 1), torch.ones(1, 1, 6, 1), 0), "int8")
    segments = [Segment(quantized, 0), Segment(MODULES[0], 6)]
    batch = planned([chunk(block_table([1], []), segments=segments)], tables)
    assert (batch.plan.plain_items, batch.plan.quantized_items) == (1, 1)
    number = batch.plan.base_number(quantized.keys)
    assert batch.plan.items[:, 0].tolist()[1] == number
    assert quantized.key_scales is not None
    assert batch.plan.scales[number, 0] == quantized.key_scales.data_ptr()


def test_overflow_leaves_the_tables_as_they_were() -> None:
    tables = AttentionTables(replace(CAPACITY, entries=20, rows=20), "cpu")
    planned([chunk(block_table([1], [3]))], tables)
    before = tables.step.position_ids.tolist()
    segments = [Segment(MODULES[0], 0), Segment(MODULES[1], 6)]
    with pytest.raises(TableOverflow):
        planned([chunk(block_table(range(9), []), 12, segments)], tables)
    assert tables.step.position_ids.tolist() == before
