"""The kernels, interpreted, compute attention by definition."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch

from ragcache.attention.triton.plan import (
    KVBase,
    KVConsumer,
    KVRead,
    KVRun,
    TableCapacity,
    build_plan,
)
from ragcache.attention.triton.tables import AttentionTables
from tests.interpreted import interpreted
from tests.ragcache.attention.triton.steps import (
    Asking,
    Scheme,
    Step,
    attend,
    error,
    make_kernels,
    make_step,
    written_as_given,
)

pytestmark = interpreted

DOCUMENTS = (100, 65, 37)
REQUESTS = {
    "mixed": (
        Asking(0, 5, ((0, 0), (1, -7))),
        Asking(70, 3, ((1, 30), (2, 12))),
        Asking(10, 1, ((0, 120),)),
        Asking(63, 1),
    ),
    "decode": (
        Asking(0, 1, ((0, 0), (1, -7))),
        Asking(70, 1, ((1, 30), (2, 12))),
        Asking(200, 1, ((0, 120),), early=2),
        Asking(63, 1),
    ),
}
SCHEMES = {
    "half": Scheme(),
    "interleaved": Scheme(interleaved=True),
    "partial": Scheme(rotated=24),
    "partial interleaved": Scheme(rotated=24, interleaved=True),
    "dim 64": Scheme(dim=64, rotated=64),
    "dim 80": Scheme(kv_heads=1, dim=80, rotated=80),
    "dim 20": Scheme(kv_heads=1, dim=20, rotated=12),
    "heads 2x4": Scheme(group=4),
    "heads 2x7": Scheme(group=7),
    "heads 1x20": Scheme(kv_heads=1, group=20),
    "heads 3x1": Scheme(kv_heads=3, group=1),
    "alibi": Scheme(rotated=0, alibi=True),
    "alibi 3x1": Scheme(kv_heads=3, group=1, rotated=0, alibi=True),
    "window": Scheme(window=40),
    "window 3x1": Scheme(kv_heads=3, group=1, window=90),
    "softcap": Scheme(softcap=2.0),
    "softcap 3x1": Scheme(kv_heads=3, group=1, softcap=2.0),
    "int8": Scheme(int8=True),
    "int8 partial": Scheme(rotated=24, int8=True),
    "int8 interleaved": Scheme(int8=True, interleaved=True),
    "int8 window": Scheme(int8=True, window=40),
    "sinks": Scheme(sinking=True, window=40),
    "sinks 3x1": Scheme(kv_heads=3, group=1, sinking=True),
    "latents": Scheme(1, 4, 80, 16, interleaved=True, latent=64),
    "latents of two parts": Scheme(1, 40, 60, 20, latent=40),
    "latents int8": Scheme(1, 5, 48, 16, latent=32, int8=True),
    "much": Scheme(3, 2, 20, 12, interleaved=True, window=40, softcap=2.0, int8=True),
}


def schemes(*quick: str, names: Iterable[str] = SCHEMES) -> pytest.MarkDecorator:
    """The tests of all but some names are slow: each program is interpreted."""
    slow = (pytest.param(name, marks=pytest.mark.slow) for name in names if name not in quick)
    return pytest.mark.parametrize("name", [*quick, *slow])


@schemes("much", "sinks", "sinks 3x1", "latents", "latents of two parts", "latents int8")
@pytest.mark.parametrize("kind", ["mixed", "decode"])
def test_attention_equals_its_definition(name: str, kind: str) -> None:
    step = make_step(SCHEMES[name], kind, DOCUMENTS, REQUESTS[kind])
    before = step.pool[0].clone(), step.pool[1].clone()
    kernels = make_kernels(step)
    found = attend(step, kernels, step.tables(kernels.shapes[kind].block_rows))
    assert error(step, found) < 1e-6
    assert written_as_given(step, before)


@schemes("int8", names=["half", "interleaved", "heads 3x1"])
@pytest.mark.parametrize("kind", ["mixed", "decode"])
def test_float16_is_as_exact_as_its_rounding(name: str, kind: str) -> None:
    step = make_step(SCHEMES[name], kind, DOCUMENTS, REQUESTS[kind], dtype=torch.float16)
    kernels = make_kernels(step)
    assert error(step, attend(step, kernels, step.tables(kernels.shapes[kind].block_rows))) < 1e-3


@pytest.mark.parametrize(
    "piece", [64, *(pytest.param(piece, marks=pytest.mark.slow) for piece in (17, 1000))]
)
def test_cutting_runs_changes_nothing(piece: int) -> None:
    step = make_step(Scheme(window=70), "mixed", DOCUMENTS, REQUESTS["mixed"])
    kernels = make_kernels(step)
    tables = step.tables(kernels.shapes["mixed"].block_rows, piece)
    assert error(step, attend(step, kernels, tables)) < 1e-6


def test_steps_without_requests_are_zeros() -> None:
    for kind in ("mixed", "decode"):
        step = make_step(Scheme(), kind, (), (), padding=3)
        kernels = make_kernels(step)
        assert not attend(step, kernels, step.tables(kernels.shapes[kind].block_rows)).any()


def planned(step: Step, block_rows: int) -> AttentionTables:
    """The step's tables as the engine makes them."""
    capacity = TableCapacity(step.rows, 400, 100, 8, len(step.pages[0]))
    tables = AttentionTables(capacity, step.device)
    reads = []
    for read in step.reads:
        run = KVRun(KVBase(*step.pool), read.begin, read.end)
        if read.base:
            states = step.documents[read.base - 1]
            scales = getattr(states, "key_scales", None), getattr(states, "value_scales", None)
            base = KVBase(states.keys, states.values, *scales)
            run = KVRun(base, read.begin, read.end)
        readers = [KVConsumer(row, row + 1, *rest) for row, *rest in read.entries]
        reads.append(KVRead(run, readers))
    plan = build_plan(
        reads, rows=step.rows, heads=step.scheme.heads, capacity=capacity, pool=KVBase(*step.pool),
        programs=8, block_rows=block_rows, min_keys=40,
    )  # fmt: skip
    tables.set_plan(plan)
    tables.step.position_ids[:], tables.step.write_slot[:] = step.position_ids, step.slots
    tables.step.tail_length[:], tables.step.pages[:] = step.tails, step.pages
    tables.upload()
    return tables


@schemes("int8", names=["half", "heads 2x7", "alibi", "window"])
@pytest.mark.parametrize("kind", ["mixed", "decode"])
def test_planned_steps_equal_the_definition(name: str, kind: str) -> None:
    step = make_step(SCHEMES[name], kind, DOCUMENTS, REQUESTS[kind], seed=5)
    kernels = make_kernels(step)
    tables = planned(step, kernels.shapes[kind].block_rows)
    assert error(step, attend(step, kernels, tables.views)) < 1e-6


def test_upload_copies_the_lines_wanted_of_every_section() -> None:
    from ragcache.attention.triton.kernels import upload_kernel

    words, sections = 8, [(1, 3), (4, 0), (6, 1), (9, 5)]
    host = torch.arange(1000, 1000 + 15 * words, dtype=torch.int32).view(15, words)
    host[0] = torch.tensor([number for section in sections for number in section])
    tables = torch.zeros_like(host)
    upload_kernel[len(sections), 3](host, tables, WORDS=words, LINES=2)
    expected = torch.zeros_like(host)
    for first, lines in sections:
        expected[first : first + lines] = host[first : first + lines]
    assert torch.equal(tables, expected)
