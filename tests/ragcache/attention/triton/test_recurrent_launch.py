"""The kernels of recurrent layers, over slots, beside the equations."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor
from torch.nn.functional import conv1d, silu

from ragcache.attention.recurrent_maps import DELTA_RULE, STATE_SPACE, RecurrentInputs
from ragcache.attention.triton.plan import TableCapacity
from ragcache.attention.triton.tables import AttentionTables, TableViews
from ragcache.states.recurrent import LayerState
from tests.interpreted import interpreted

pytestmark = interpreted

HEADS, GROUPS, KEY_DIM, VALUE_DIM, KERNEL, LAYER, ROWS = 4, 2, 12, 24, 4, 1, 10
CHANNELS = 2 * GROUPS * KEY_DIM + HEADS * VALUE_DIM
CHAINS = ((0, 1, 0), (1, 6, -1), (6, 8, 1))
"""First row, row behind the last, and slot before: a decoding request, a new text, a question."""
KEEP = ((0, 2), (3, 3), (5, 4), (7, 5))
"""Rows and the slots for the states behind them: the text is kept in its middle, too."""
CLOSE = {"rtol": 1e-4, "atol": 1e-4}


def placed(*, delta: bool) -> tuple[object, object]:
    """A pool with arbitrary states, and the tables of a step."""
    from ragcache.attention.triton.recurrent_launch import SlotPool

    torch.manual_seed(0)
    shape = (HEADS, KEY_DIM, VALUE_DIM) if delta else (HEADS, VALUE_DIM, KEY_DIM)
    each = LayerState({0: torch.zeros(1, CHANNELS, KERNEL)}, {0: torch.zeros(1, *shape)})
    pool = SlotPool([each, each, each], 8)
    pool.windows.normal_()
    assert pool.states is not None
    pool.states.normal_()
    return pool, uploaded(CHAINS, KEEP, 8).views


def uploaded(
    chains: Sequence[tuple[int, int, int]], keep: Sequence[tuple[int, int]], rows: int
) -> AttentionTables:
    tables = AttentionTables(TableCapacity(128, 8, 8, 8, pages_per_row=2), "cpu")
    tables.set_chains(chains, keep, rows)
    tables.upload()
    return tables


def kept_in(begin: int, end: int) -> list[tuple[int, int]]:
    return [(row + 1, slot) for row, slot in KEEP if begin <= row < end]


@pytest.mark.parametrize("kind", ["delta", "channels", "state space"])
def test_recurrences_are_their_equations(kind: str) -> None:
    from ragcache.attention.triton.recurrent_launch import RecurrentKernels, SlotPool

    delta = kind != "state space"
    pool, tables = placed(delta=delta)
    assert isinstance(pool, SlotPool)
    assert isinstance(tables, TableViews)
    assert pool.states is not None
    query, key = torch.randn(2, 1, ROWS, GROUPS, KEY_DIM)
    value, step = torch.randn(1, ROWS, HEADS, VALUE_DIM), torch.rand(1, ROWS, HEADS)
    decay = -torch.rand(1, ROWS, HEADS, *((KEY_DIM,) if kind == "channels" else ()))
    states = pool.states.clone()
    out = RecurrentKernels(pool).recur(
        *(tables, "mixed", len(CHAINS), LAYER, query, key, value, decay, step),
        delta=delta,
        scale=0.3,
    )
    recurrence = DELTA_RULE if delta else STATE_SPACE
    wide = decay if decay.dim() == 4 else decay[..., None]
    inputs = recurrence.prepared(
        *(each[0].transpose(0, 1) for each in (key, value, wide, step[..., None]))
    )
    for begin, end, slot in CHAINS:
        before = states[slot, LAYER] if slot >= 0 else torch.zeros_like(states[0, 0])
        for behind, place in kept_in(begin, end):
            expected = recurrence.advance(before, inputs.part(begin, behind))
            torch.testing.assert_close(pool.states[place, LAYER], expected, **CLOSE)
        for row in range(begin, end):
            state = recurrence.advance(before, inputs.part(begin, row + 1))
            read = read_by(query[0, row], state, delta=delta)
            torch.testing.assert_close(out[0, row], 0.3 * read, **CLOSE)
    untouched = [number for number in range(8) if number not in dict(KEEP).values()]
    assert torch.equal(pool.states[untouched], states[untouched])
    assert isinstance(inputs, RecurrentInputs)


@pytest.mark.parametrize("chains", [2, 3])
def test_a_recurrence_computes_its_gates(chains: int) -> None:
    from ragcache.attention.triton.recurrent_launch import RecurrentKernels, SlotPool

    found = []
    rate, offset = torch.randn(HEADS), 5 * torch.randn(HEADS) - 9
    projected = torch.randn(1, ROWS, 2 * HEADS + 3)
    step, decay = projected[..., :HEADS], 8 * projected[..., HEADS : 2 * HEADS]
    query, key = torch.randn(2, 1, ROWS, GROUPS, KEY_DIM)
    value = torch.randn(1, ROWS, HEADS, VALUE_DIM)
    computed = -rate.exp() * torch.nn.functional.softplus(decay + offset), step.sigmoid()
    for inputs, gates in (((decay, step), (rate, offset)), (computed, None)):
        pool, tables = placed(delta=True)
        assert isinstance(pool, SlotPool)
        assert isinstance(tables, TableViews)
        out = RecurrentKernels(pool).recur(
            *(tables, "mixed", chains, LAYER, query, key, value, *inputs),
            delta=True,
            scale=0.3,
            gates=gates,
        )
        assert pool.states is not None
        found.append((out[:, : CHAINS[chains - 1][1]], pool.states))
    torch.testing.assert_close(found[0], found[1], rtol=1e-5, atol=1e-6)


def test_norms_behind_recurrences_have_gates() -> None:
    from ragcache.attention.triton.operator import normalize_gated as expected
    from ragcache.attention.triton.recurrent_launch import normalize_gated

    rows, weight = torch.randn(1, ROWS, 6, VALUE_DIM), torch.randn(VALUE_DIM)
    gate = torch.randn(1, ROWS, 6 * VALUE_DIM + 5)[..., 5:].unflatten(-1, (6, VALUE_DIM))
    found = normalize_gated(rows, gate, weight, 1e-6)
    torch.testing.assert_close(found, expected(rows, gate, weight, 1e-6), **CLOSE)


def read_by(query: Tensor, state: Tensor, *, delta: bool) -> Tensor:
    """Outputs [heads, dv] of a state for queries [groups, dk]."""
    query = query.repeat_interleave(HEADS // GROUPS, 0)
    if not delta:
        return (state @ query[..., None])[..., 0]
    query = query * torch.rsqrt(query.square().sum(-1, keepdim=True) + 1e-6)
    return (query[:, None] @ state)[:, 0]


@pytest.mark.parametrize("biased", [False, True])
def test_convolutions_reach_over_the_begin_of_a_request(biased: bool) -> None:
    from ragcache.attention.triton.recurrent_launch import RecurrentKernels, SlotPool

    pool, tables = placed(delta=True)
    assert isinstance(pool, SlotPool)
    assert isinstance(tables, TableViews)
    inputs = torch.randn(1, ROWS, CHANNELS).transpose(1, 2)
    weight, windows = torch.randn(CHANNELS, KERNEL), pool.windows.clone()
    bias = torch.randn(CHANNELS) if biased else None
    out = RecurrentKernels(pool).convolve(tables, LAYER, inputs, weight, bias, silu=biased)
    for begin, end, slot in CHAINS:
        before = windows[slot, LAYER] if slot >= 0 else torch.zeros(CHANNELS, KERNEL)
        whole = torch.cat([before, inputs[0, :, begin:end]], 1)
        found = conv1d(whole[None], weight[:, None], bias, groups=CHANNELS)[0, :, begin - end :]
        expected = (silu(found) if biased else found).mT
        torch.testing.assert_close(out[0, begin:end], expected, **CLOSE)
        for behind, place in kept_in(begin, end):
            last = whole[:, : KERNEL + behind - begin][:, -KERNEL:]
            assert torch.equal(pool.windows[place, LAYER], last)
    assert not out[0, 8:].any(), "rows of padding are zeros"


def test_a_slot_is_free_when_nothing_refers_to_it() -> None:
    from ragcache.attention.triton.recurrent_launch import SlotPool

    layer = LayerState({0: torch.zeros(1, 3, 2)})
    pool = SlotPool([layer], 2)
    first, second = pool.take(), pool.take()
    with pytest.raises(torch.OutOfMemoryError):
        pool.take()
    number = first.index
    del first
    assert pool.take().index == number
    assert second.index != number


def test_an_upload_of_fewer_rows_clears_the_others() -> None:
    tables = uploaded([(n, n + 1, n) for n in range(40)], [(n, n) for n in range(40)], 40)
    tables.set_chains([(0, 3, 5)], [(2, 7)], 3)
    tables.upload()
    views = tables.views
    assert views.row_chain.tolist() == [0] * 3 + [-1] * 125
    assert views.keep.tolist() == [-1, -1, 7] + [-1] * 125
    assert views.chain[0].tolist() == [0, 3, 5, 0]
    assert not views.chain[1:].any()
