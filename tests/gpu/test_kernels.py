"""The kernels, compiled, on a GPU: exact against attention by definition in float64."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
import torch
from torch import Tensor

from ragcache.attention.triton.plan import (
    HeadLayout,
    KVBase,
    KVConsumer,
    KVRead,
    KVRun,
    TableCapacity,
    build_plan,
)
from ragcache.attention.triton.squares import attend_square, prepare_squares
from ragcache.attention.triton.tables import AttentionTables, TableViews
from tests.ragcache.attention.triton.steps import (
    LAYERS,
    Asking,
    Scheme,
    Step,
    attend,
    error,
    make_kernels,
    make_step,
    written_as_given,
)

if not torch.cuda.is_available():
    pytest.skip("there is no CUDA device", allow_module_level=True)

pytestmark = pytest.mark.gpu

DOCUMENTS = (1000, 777, 64, 300, 129)
REQUESTS = {
    "mixed": (
        Asking(0, 90, ((0, 0), (1, -7))),
        Asking(70, 3, ((1, 30), (2, 12), (3, -200))),
        Asking(10, 1, ((0, 120),)),
        Asking(200, 65, ((4, 9), (0, 3))),
    ),
    "decode": (
        Asking(0, 1, ((0, 0), (1, -7))),
        Asking(70, 1, ((1, 30), (2, 12), (3, -200))),
        Asking(200, 1, ((0, 120),), early=2),
        Asking(63, 1),
        *(Asking(10 * n, 1, ((0, n), (4, -n))) for n in range(60)),
    ),
}
SCHEMES = {
    "32x1x128": Scheme(32, 1, 128, 128),
    "8x4x128": Scheme(8, 4, 128, 128),
    "4x8x128": Scheme(4, 8, 128, 128),
    "2x7x64": Scheme(2, 7, 64, 64),
    "1x20x64": Scheme(1, 20, 64, 64),
    "1x71x64": Scheme(1, 71, 64, 64),
    "4x2x256": Scheme(4, 2, 256, 256),
    "32x1x80 partial": Scheme(32, 1, 80, 32),
    "8x1x96": Scheme(8, 1, 96, 96),
    "4x1x16": Scheme(4, 1, 16, 16),
    "interleaved": Scheme(4, 4, 128, 128, interleaved=True),
    "interleaved partial 4x1x256": Scheme(4, 1, 256, 64, interleaved=True),
    "alibi": Scheme(4, 4, 128, 0, alibi=True),
    "alibi 16x1x64": Scheme(16, 1, 64, 0, alibi=True),
    "window": Scheme(8, 4, 128, 128, window=200),
    "window 8x1": Scheme(8, 1, 128, 128, window=90),
    "softcap": Scheme(4, 2, 128, 128, softcap=2.0),
    "softcap window 4x2x256": Scheme(4, 2, 256, 256, softcap=5.0, window=500),
    "int8": Scheme(8, 4, 128, 128, int8=True),
    "int8 32x1": Scheme(32, 1, 128, 128, int8=True),
    "int8 interleaved": Scheme(4, 2, 64, 64, int8=True, interleaved=True),
    "int8 80": Scheme(4, 1, 80, 32, int8=True),
    "sinks": Scheme(8, 8, 64, 64, window=128, sinking=True),
    "sinks 16x1": Scheme(16, 1, 64, 64, sinking=True),
    "int8 window": Scheme(8, 4, 128, 128, int8=True, window=300),
    "latents": Scheme(1, 16, 576, 64, interleaved=True, latent=512),
    "latents of 128 heads": Scheme(1, 128, 576, 64, latent=512),
    "latents 40x288": Scheme(1, 40, 288, 32, latent=256),
    "latents 4x40": Scheme(1, 4, 40, 8, latent=32),
    "latents int8": Scheme(1, 16, 576, 64, latent=512, int8=True),
}
ALLOWED = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 1e-5}


def made(name: str, kind: str, dtype: torch.dtype, seed: int = 0) -> Step:
    return make_step(
        SCHEMES[name], kind, DOCUMENTS, REQUESTS[kind], dtype=dtype, device="cuda", seed=seed
    )


@pytest.mark.parametrize("dtype", ALLOWED, ids=str)
@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.parametrize("kind", ["mixed", "decode"])
def test_attention_equals_its_definition(name: str, kind: str, dtype: torch.dtype) -> None:
    step = made(name, kind, dtype)
    before = step.pool[0].clone(), step.pool[1].clone()
    kernels = make_kernels(step, 4000)
    found = attend(step, kernels, step.tables(kernels.shapes[kind].block_rows, 200))
    assert error(step, found) < ALLOWED[dtype]
    assert written_as_given(step, before)


@pytest.mark.parametrize("name", ["32x1x128", "8x4x128", "int8", "window", "latents"])
@pytest.mark.parametrize("kind", ["mixed", "decode"])
def test_replay_with_other_tables_equals_eager(name: str, kind: str) -> None:
    """A graph captured over one step's tables computes whatever they hold later."""
    step = made(name, kind, torch.bfloat16)
    kernels = make_kernels(step, 4000)
    static = padded(step.tables(kernels.shapes[kind].block_rows, 200))
    attend(step, kernels, static)  # compiles
    out = torch.empty(step.rows, *step.scheme.out_shape, dtype=step.dtype, device="cuda")
    inputs = [step.query.clone(), step.key.clone(), step.value.clone()]
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        kernels.attend(static, kind, step.rows, 1, *inputs, step.scale, out)
    for seed in (1, 2, 3):
        other = made(name, kind, torch.bfloat16, seed)
        tables = other.tables(kernels.shapes[kind].block_rows, 100 * seed)
        pool = other.pool[0].clone(), other.pool[1].clone()
        for into, each in zip(inputs, (other.query, other.key, other.value), strict=True):
            into.copy_(each)
        copy_tables(static, tables)
        kernels.out.fill_(torch.nan)
        kernels.lse.fill_(torch.nan)
        out.fill_(torch.nan)
        graph.replay()
        replayed = out.clone()
        assert error(other, replayed) < 1e-2
        assert written_as_given(other, pool)
        assert torch.equal(replayed, attend(other, kernels, tables))


def padded(tables: TableViews) -> TableViews:
    """The same, with room for other steps' tables."""
    rooms = {}
    for each in fields(TableViews):
        table = getattr(tables, each.name)
        more = 0 if each.name == "pages" else 4000
        rooms[each.name] = table.new_zeros(table.shape[0] + more, *table.shape[1:])
    static = replace(tables, **rooms)
    copy_tables(static, tables)
    return static


def copy_tables(into: TableViews, tables: TableViews) -> None:
    for each in fields(TableViews):
        table = getattr(tables, each.name)
        getattr(into, each.name)[: len(table)].copy_(table)


def test_nothing_waits_for_the_device() -> None:
    step = made("8x4x128", "mixed", torch.bfloat16)
    kernels = make_kernels(step, 4000)
    tables = step.tables(kernels.shapes["mixed"].block_rows, 200)
    attend(step, kernels, tables)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        attend(step, kernels, tables)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("rows", [1, 600, 5000])
def test_many_rows_of_the_real_tables(rows: int) -> None:
    """An encoding of `rows` tokens behind a preamble, with the planner that the engine uses."""
    heads, generator = HeadLayout(8, 4, 128), torch.Generator("cuda").manual_seed(0)
    scheme = Scheme(8, 4, 128, 128)
    asked = (Asking(0, 1, ((0, 3),)),)
    step = make_step(scheme, "mixed", (64,), asked, dtype=torch.bfloat16, device="cuda")
    kernels = make_kernels(step, 40_000)

    def normal(*sizes: int) -> Tensor:
        drawn = torch.randn(*sizes, 128, generator=generator, device="cuda")
        return drawn.to(torch.bfloat16)

    states = [normal(LAYERS, 8, rows) for _ in range(2)]
    preamble = [normal(LAYERS, 8, 64) for _ in range(2)]
    query, key, value = normal(32, rows), normal(8, rows), normal(8, rows)
    capacity = TableCapacity(rows, 40_000, 8192, 16, 1)
    tables = AttentionTables(capacity, "cuda")
    reads = [
        KVRead(KVRun(KVBase(states[0], states[1]), 0, rows), [KVConsumer(0, rows, limit=1)]),
        KVRead(KVRun(KVBase(preamble[0], preamble[1]), 0, 64), [KVConsumer(0, rows)]),
    ]
    plan = build_plan(
        reads, rows=rows, heads=heads, capacity=capacity, min_keys=1024,
        **kernels.shapes["mixed"]._asdict(),
    )  # fmt: skip
    tables.set_plan(plan)
    tables.step.write_slot[:] = range(rows)
    tables.step.write_base[:] = plan.base_number(states[0])
    tables.upload()
    out = torch.full((rows, 32, 128), torch.nan, dtype=torch.bfloat16, device="cuda")
    kernels.attend(tables.views, "mixed", rows, 1, query, key, value, 128**-0.5, out)
    seen = torch.ones(rows, rows, dtype=torch.bool, device="cuda").tril()
    seen = torch.cat([torch.ones(rows, 64, dtype=torch.bool, device="cuda"), seen], 1)
    expected = torch.nn.functional.scaled_dot_product_attention(
        query[None].float(), torch.cat([preamble[0][1], key], 1)[None].float(),
        torch.cat([preamble[1][1], value], 1)[None].float(), seen, enable_gqa=True,
    )[0].transpose(0, 1)  # fmt: skip
    assert float((out.float() - expected).norm() / expected.norm()) < 1e-2


@pytest.mark.parametrize("rows", [1024, 1500])
@pytest.mark.parametrize("heads", [HeadLayout(8, 4, 128), HeadLayout(2, 7, 64)], ids=str)
def test_squares_equal_the_definition(heads: HeadLayout, rows: int) -> None:
    if torch.cuda.get_device_capability() < (8, 0):
        pytest.skip("cuDNN has no attention for this GPU")
    assert prepare_squares(heads, torch.bfloat16, torch.device("cuda"))
    count, dim = heads.num_kv_heads, heads.head_dim

    def drawn(number: int) -> Tensor:
        size = rows, number, dim
        return torch.randn(size, device="cuda", dtype=torch.bfloat16).transpose(0, 1)

    query, key, value = drawn(count * heads.group), drawn(count), drawn(count)
    out, lse = attend_square(query, key, value, dim**-0.5)
    expected = attend_square(query.cpu(), key.cpu(), value.cpu(), dim**-0.5)
    torch.testing.assert_close(out.cpu(), expected[0], rtol=0.02, atol=0.02)
    torch.testing.assert_close(lse.cpu(), expected[1], rtol=1e-3, atol=1e-3)
