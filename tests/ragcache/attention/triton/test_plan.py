"""Tables of a step: the plan covers what is visible exactly once, and reaches the device."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ragcache.attention.triton.array_plan import ReadArrays, plan_arrays
from ragcache.attention.triton.plan import (
    ALL_TOKENS,
    PIECE_TOKENS,
    AttentionPlan,
    HeadLayout,
    KVBase,
    KVConsumer,
    KVRead,
    KVRun,
    TableCapacity,
    TableOverflow,
    build_plan,
)
from ragcache.attention.triton.tables import AttentionTables
from tests.ragcache.attention.tabled_reads import (
    SeenKey,
    assert_partials_reach_their_rows,
    items_of,
    keys_of_rows,
)

ROWS, TOKENS = 12, 1600
CAPACITY = TableCapacity(rows=16, entries=2048, items=1024, bases=8, pages_per_row=4)
HEADS = HeadLayout(num_kv_heads=2, group=3, head_dim=1)
BASES = [(torch.zeros(1, 2, TOKENS, 1), torch.zeros(1, 2, TOKENS, 1)) for _ in range(4)]
SCALES = (torch.zeros(1, 2, 1, 1), torch.zeros(1, 2, TOKENS, 1))


def uploaded(plan: AttentionPlan) -> AttentionTables:
    tables = AttentionTables(CAPACITY, "cpu")
    for memory in (tables.views.items, tables.views.row_ptr, tables.views.entry_row):
        memory.fill_(77)  # of the plan before
    tables.set_plan(plan)
    tables.upload()
    return tables


def run_of(base: int, begin: int, end: int) -> KVRun:
    scales = SCALES if base == 3 else (None, None)
    return KVRun(KVBase(*BASES[base], *scales), begin, end)


@st.composite
def sets_of_reads(draw: st.DrawFn) -> list[KVRead]:
    """Reads whose ranges of one base do not overlap, so that no row reads a token twice."""
    reads = []
    for base in range(len(BASES)):
        cuts = sorted(draw(st.sets(st.integers(0, TOKENS), max_size=4)))
        for begin, end in pairwise(cuts):
            read = KVRead(run_of(base, begin, end))
            rows = sorted(draw(st.sets(st.integers(0, ROWS), max_size=5)))
            for first, last in zip(rows[::2], rows[1::2], strict=False):
                limit = draw(st.just(ALL_TOKENS) | st.integers(0, TOKENS))
                moved, origin = draw(st.integers(-9, 9)), draw(st.integers(0, 99))
                read.readers.append(KVConsumer(first, last, moved, origin, limit))
            reads.append(read)
    return reads


def defined_keys(reads: list[KVRead]) -> list[Counter[SeenKey]]:
    seen: list[Counter[SeenKey]] = [Counter() for _ in range(ROWS)]
    for read in reads:
        run = read.run
        for reader in read.readers:
            for number, row in enumerate(range(reader.first_row, reader.end_row)):
                everything = reader.limit == ALL_TOKENS
                limit = run.end if everything else min(run.end, reader.limit + number)
                for token in range(run.begin, limit):
                    at = reader.origin + token
                    seen[row][SeenKey(run.base.memory[0], token, reader.delta, at)] += 1
    return seen


@given(
    sets_of_reads(), st.sampled_from([1, 3, 9, 64]), st.sampled_from([1, 8, 264]),
    st.sampled_from([1, 256]), st.booleans(),
)  # fmt: skip
def test_visible_keys_are_covered_once(
    reads: list[KVRead], block_rows: int, programs: int, min_keys: int, arrays: bool
) -> None:
    options: dict[str, Any] = {
        "rows": ROWS, "heads": HEADS, "capacity": CAPACITY, "block_rows": block_rows,
        "programs": programs, "min_keys": min_keys,
    }  # fmt: skip
    plan = plan_arrays(ReadArrays.of(reads), **options) if arrays else build_plan(reads, **options)
    tables = uploaded(plan)
    assert keys_of_rows(tables.views, ROWS) == defined_keys(reads)
    assert_partials_reach_their_rows(tables.views, ROWS)
    limits = tables.views.entry_limit.tolist()
    for _, begin, end, first, count, *_ in items_of(tables.views):
        assert 1 <= count <= max(1, block_rows // HEADS.group)
        assert begin < end <= max(limits[first : first + count]), "no longer than needed"


TWO_READS = [KVRead(run_of(base, 0, 1600), [KVConsumer(0, 4)]) for base in (0, 1)]


def lengths(plan: AttentionPlan) -> list[int]:
    return [end - begin for _, begin, end, *_ in plan.items.tolist()]


@pytest.mark.parametrize(
    ("heads", "parts", "group"), [(16, 1, 16), (20, 1, 20), (40, 2, 20), (128, 4, 32), (7, 1, 7)]
)
def test_heads_over_latents_are_divided(heads: int, parts: int, group: int) -> None:
    layout = HeadLayout.of(heads, 1, 576, 512)
    assert layout == HeadLayout(parts, group, 576, 512)
    assert layout.value_dim == 512
    assert HeadLayout.of(32, 8, 128) == HeadLayout(8, 4, 128)


def test_a_base_of_latents_has_the_address_of_its_keys() -> None:
    keys = torch.zeros(2, 1, 10, 48)
    assert KVBase(keys, keys[..., :0]).addresses == (keys.data_ptr(), keys.data_ptr(), 480, 480)


def test_long_items_come_first_and_those_in_eight_bits_last() -> None:
    reads = [
        KVRead(run_of(3, 0, 1500), [KVConsumer(0, 2)]),
        KVRead(run_of(0, 0, 10), [KVConsumer(0, 2)]),
        KVRead(run_of(1, 0, 700), [KVConsumer(0, 2)]),
        KVRead(run_of(3, 1500, 1600), [KVConsumer(0, 2)]),
    ]
    plan = build_plan(reads, rows=2, heads=HEADS, capacity=CAPACITY, min_keys=2000)
    assert lengths(plan) == [700, 10, 1500, 100]
    assert (plan.plain_items, plan.quantized_items) == (2, 2)
    number = plan.base_number(BASES[3][0])
    addresses = [SCALES[0].data_ptr(), SCALES[1].data_ptr()]
    assert plan.scales[number].tolist() == [*addresses, 2, 1, 2 * TOKENS, TOKENS]
    assert plan.scales[plan.base_number(BASES[1][0])].tolist() == [0] * 6


def test_runs_are_cut_evenly_for_the_programs() -> None:
    cut = build_plan(TWO_READS, rows=4, heads=HEADS, capacity=CAPACITY, programs=16, min_keys=128)
    assert lengths(cut) == [512] * 6 + [64] * 2, "3,200 keys x 2 heads / 16 programs = 400"
    assert [item[:3] for item in cut.items.tolist()] == [
        [base, begin, begin + length]
        for begin, length in ((0, 512), (512, 512), (1024, 512), (1536, 64))
        for base in (0, 1)
    ]
    assert all(begin % PIECE_TOKENS == 0 for begin in cut.items[:, 1].tolist())
    least = build_plan(TWO_READS, rows=4, heads=HEADS, capacity=CAPACITY, min_keys=1600)
    assert lengths(least) == [1664 - 64] * 2


def test_blocks_of_a_causal_run_end_with_their_last_row() -> None:
    own = KVRead(run_of(0, 100, 112), [KVConsumer(0, 12, limit=101)])
    plan = build_plan([own], rows=12, heads=HEADS, capacity=CAPACITY, block_rows=12)
    assert [item[1:5] for item in plan.items.tolist()] == [
        [100, 112, 0, 4],
        [100, 108, 4, 4],
        [100, 104, 8, 4],
    ]
    assert plan.entry_fields[0].tolist() == [8, 9, 10, 11, 4, 5, 6, 7, 0, 1, 2, 3]


def test_the_pool_is_base_zero_and_views_share_a_base() -> None:
    keys, values = BASES[1]
    part = KVRun(KVBase(keys[:, :, :50], values[:, :, :50]), 0, 50)
    reads = [KVRead(part, [KVConsumer(0, 1)]), KVRead(run_of(1, 50, 60), [KVConsumer(0, 1)])]
    plan = build_plan(reads, rows=1, heads=HEADS, capacity=CAPACITY, pool=KVBase(*BASES[2]))
    assert plan.bases[:, 0].tolist() == [BASES[2][0].data_ptr(), keys.data_ptr()]
    assert plan.bases[:, 2:].tolist() == [[2 * TOKENS, TOKENS]] * 2
    assert plan.items[:, 0].tolist() == [1, 1]
    assert plan.base_number(BASES[2][0]) == 0


@pytest.mark.parametrize("small", [
    TableCapacity(rows=3, entries=999, items=999, bases=9, pages_per_row=1),
    TableCapacity(rows=9, entries=7, items=999, bases=9, pages_per_row=1),
    TableCapacity(rows=9, entries=999, items=1, bases=9, pages_per_row=1),
    TableCapacity(rows=9, entries=999, items=999, bases=1, pages_per_row=1),
])  # fmt: skip
def test_what_does_not_fit_raises(small: TableCapacity) -> None:
    with pytest.raises(TableOverflow, match=r"4 rows, 2 bases, . items and . entries"):
        build_plan(TWO_READS, rows=4, heads=HEADS, capacity=small, programs=4)


def test_runs_are_cut_less_where_pieces_would_not_fit() -> None:
    room = TableCapacity(rows=4, entries=16, items=1024, bases=2, pages_per_row=1)
    plan = build_plan(TWO_READS, rows=4, heads=HEADS, capacity=room, programs=999, min_keys=128)
    assert lengths(plan) == [896, 896, 704, 704]
    assert plan.entries == 16


def test_step_arrays_reach_the_device_and_stay() -> None:
    tables = AttentionTables(CAPACITY, "cpu")
    tables.upload()
    assert tables.views.write_slot.tolist() == [-1] * CAPACITY.rows, "at first all is padding"
    assert tables.views.tail_length.tolist() == [-1] * CAPACITY.rows
    tables.step.position_ids[:2] = 2**40, 5
    tables.step.pages[1] = (1, 2, 3, 4)
    tables.upload()
    tables.step.position_ids[:] += 1
    assert tables.views.position_ids.tolist()[:2] == [2**40, 5]
    tables.upload()
    assert tables.views.position_ids.tolist()[:2] == [2**40 + 1, 6]
    assert tables.views.pages[1].tolist() == [1, 2, 3, 4]
    assert tables.views.logit_rows.dtype == torch.int64
    assert tables.views.pages.dtype == torch.int32


def test_uploads_leave_no_rows_of_the_steps_before() -> None:
    tables = AttentionTables(TableCapacity(200, 8, 8, 8, pages_per_row=2), "cpu")
    for rows, is_uploaded in ((150, True), (70, False), (3, True), (33, True)):
        tables.begin_step(rows)
        tables.step.write_slot[:rows] = tables.step.tail_length[:rows] = range(rows)
        tables.step.logit_rows[:rows] = range(rows)
        if is_uploaded:
            tables.upload()
            padding = [-1] * (200 - rows)
            assert tables.views.write_slot.tolist() == [*range(rows), *padding]
            assert tables.views.tail_length.tolist() == [*range(rows), *padding]
            assert tables.views.logit_rows.tolist() == [*range(rows), *[0] * (200 - rows)]


def test_sections_do_not_overlap_and_keep_their_addresses() -> None:
    tables = AttentionTables(CAPACITY, "cpu")
    names = tables.views.__slots__
    views = [getattr(tables.views, name) for name in names]
    before = [view.data_ptr() for view in views]
    spans = sorted((view.data_ptr(), view.data_ptr() + view.nbytes) for view in views)
    assert all(end <= begin for (_, end), (begin, _) in pairwise(spans))
    reads = [KVRead(run_of(0, 0, 40), [KVConsumer(0, 4)])]
    tables.set_plan(build_plan(reads, rows=4, heads=HEADS, capacity=CAPACITY))
    tables.upload()
    assert [getattr(tables.views, name).data_ptr() for name in names] == before
    assert np.array_equal(tables.views.entry_limit[:4].numpy(), [ALL_TOKENS] * 4)
