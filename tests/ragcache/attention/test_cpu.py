"""The CPU backend computes the definition: how exactly, and where it hands over to it."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.models.llama.modeling_llama import eager_attention_forward

from ragcache import machine
from ragcache.attention import (
    AttentionMetadata,
    ReferenceAttentionBackend,
    backend_for,
    cpu,
    reference,
)
from ragcache.attention.cpu import SAMPLE_STRIDE, CpuAttentionBackend
from tests.conftest import scaled
from tests.peak_memory import peak_bytes
from tests.ragcache.attention.scenes import KV_HEADS, LAYER, Scene, Shape, make_scene, shapes

MIXED = Shape(
    (3, -6, 1, -9, 2),
    ((7, ((0, 8, 0),)), (12, ((3, 6, 40), (0, 2, -9))), (5, ((4, 5, 3), (4, 5, 90)))),
)
ROUNDING = 2**-8  # of bfloat16, relative


def attend(
    scene: Scene, backend: CpuAttentionBackend | ReferenceAttentionBackend | None = None
) -> Tensor:
    return (backend or CpuAttentionBackend()).attend(*scene.inputs, scale=scene.scale)


@pytest.fixture
def handed_over(monkeypatch: pytest.MonkeyPatch) -> list[AttentionMetadata]:
    """The metadata that went to the definition."""
    handed: list[AttentionMetadata] = []
    define = ReferenceAttentionBackend.attend

    def counted(
        self: ReferenceAttentionBackend, metadata: AttentionMetadata, *rest: Any, **options: Any
    ) -> Tensor:
        handed.append(metadata)
        return define(self, metadata, *rest, **options)

    monkeypatch.setattr(ReferenceAttentionBackend, "attend", counted)
    return handed


def test_every_device_has_a_backend() -> None:
    assert isinstance(backend_for(torch.device("cpu")), CpuAttentionBackend)
    assert isinstance(backend_for(torch.device("meta")), ReferenceAttentionBackend)


@pytest.mark.parametrize(
    ("dtype", "near"),
    [(torch.float64, 1e-10), (torch.float32, 1e-5), (torch.bfloat16, 8 * ROUNDING)],
)
@given(shape=shapes())
@settings(max_examples=scaled(60))
def test_every_row_equals_the_definition(shape: Shape, dtype: torch.dtype, near: float) -> None:
    """In bfloat16 queries turn, scores, weights and numerators round once each, relative to values
    of 3."""
    scene = make_scene(shape, dtype)
    out = attend(scene)
    assert out.dtype == dtype
    torch.testing.assert_close(out.double(), scene.expected(), rtol=near, atol=near)


def eager(scene: Scene) -> Tensor:
    """Hugging Face's eager attention in bfloat16, row by row over the same keys: [T, Hq, D]."""
    module = SimpleNamespace(num_key_value_groups=scene.query.shape[0] // KV_HEADS, training=False)
    rows = []
    for row, seen in enumerate(scene.seen):
        query = scene.query[None, :, row : row + 1]
        keys = torch.cat([each.keys for each in seen], 1).to(query.dtype)[None]
        values = torch.cat([each.values for each in seen], 1).to(query.dtype)[None]
        out, _ = eager_attention_forward(module, query, keys, values, None, scaling=scene.scale)
        rows.append(out[0, 0])
    return torch.stack(rows)


LARGE = {
    "questions over documents": Shape(
        (30, 20, 25), ((180, ((0, 75, 0),)), (250, ((0, 30, 0), (50, 75, 0))), (90, ((30, 50, 0),)))
    ),
    "moved documents": Shape(
        (30, 20, 25), ((180, ((0, 75, 9),)), (250, ((0, 30, -70), (50, 75, 300))))
    ),
    "decoding": Shape((-70, -5, -130), ((200, ((0, 3, 0),)), (300, ((0, 1, 0), (2, 3, 0))))),
    "a long answer": Shape((-600, -500, -550), ((200, ((0, 3, 0),)), (100, ((1, 3, 0),)))),
    "a long own prompt": Shape((150,), ((100, ((0, 150, 0),)),)),
}
BRIEF = ("moved documents", "decoding", "a long answer")
LARGE_PARAMS = [pytest.param(n, marks=() if n in BRIEF else pytest.mark.slow) for n in LARGE]


def assert_errs_as_eager(shape: Shape) -> None:
    scene = make_scene(replace(shape, dim=64, group=7), torch.bfloat16)
    expected = scene.expected()
    ours, theirs = (
        float((each - expected).square().mean().sqrt()) for each in (attend(scene), eager(scene))
    )
    assert ours <= 1.6 * theirs


@pytest.mark.parametrize("loudness", [1.0, pytest.param(4.0, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", LARGE_PARAMS)
def test_bfloat16_errs_hardly_more_than_eager_attention(name: str, loudness: float) -> None:
    assert_errs_as_eager(replace(LARGE[name], loudness=loudness))


ONE_ROW = Shape((-70,), ((200, ((0, 1, 0),)), (90, ((0, 1, -20),)), (300, ((0, 1, 7),))))


@pytest.mark.parametrize("loudness", [1.0, 40.0])
def test_one_row_rounds_less_than_many(loudness: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its scores and weights are float32, however large they are."""
    scene = make_scene(replace(ONE_ROW, dim=64, group=7, loudness=loudness), torch.bfloat16)
    errors = []
    for most in (cpu.ONE_ROW, 0):
        monkeypatch.setattr(cpu, "ONE_ROW", most)
        errors.append(float((attend(scene) - scene.expected()).abs().mean()))
    assert errors[0] < errors[1]


def test_a_long_state_is_not_copied_for_one_row() -> None:
    length = 2 * cpu.ONE_ROW // (KV_HEADS * 16)
    scene = make_scene(replace(ONE_ROW, dim=16, runs=((length, ((0, 1, 7),)),)), torch.bfloat16)
    copies = 2 * scene.metadata.shared_kv[0].keys[LAYER].numel() * torch.float32.itemsize
    assert allocated(scene) < copies


@pytest.mark.parametrize("apart", [10.0, 40.0])
@pytest.mark.parametrize("requests", [(-2, -3), (12,)])
def test_bfloat16_errs_no_more_where_own_tokens_weigh_little(
    requests: tuple[int, ...], apart: float
) -> None:
    """Scores are rounded relative to a value that must not lie far from them."""
    count = 2 if len(requests) == 2 else 12
    assert_errs_as_eager(Shape(requests, ((300, ((0, count, 0),)),), apart=apart))


def surprising(excess: float, value: float, dtype: torch.dtype, at: int = 1) -> Scene:
    """One row whose own score is 0, over a run of 80 keys whose scores are 0, too, but for that of
    key `at`, which is `excess`. The run's values are `value`; so is the result for a large excess.
    """
    scene = make_scene(Shape((1,), ((80, ((0, 1, 0),)),), group=1, dim=4), dtype)
    query, key = torch.zeros_like(scene.query), torch.zeros_like(scene.key)
    query[..., 0] = 2.0
    [run] = scene.metadata.shared_kv
    run.keys.zero_()
    run.keys[:, :, at, 0] = excess
    run.values.fill_(value)
    return replace(scene, query=query, key=key)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("excess", [60.0, 80.0, 90.0, 200.0])
def test_scores_far_above_the_base_fall_back_to_the_reference(
    dtype: torch.dtype, excess: float, handed_over: list[AttentionMetadata]
) -> None:
    scene = surprising(excess, 3.0, dtype)
    torch.testing.assert_close(attend(scene), torch.full_like(scene.query.transpose(0, 1), 3.0))
    assert len(handed_over) == (excess > 70)


def test_attention_sinks_do_not_fall_back(handed_over: list[AttentionMetadata]) -> None:
    for at in (0, SAMPLE_STRIDE):
        scene = surprising(200.0, 3.0, torch.float32, at)
        expected = torch.full_like(scene.query.transpose(0, 1), 3.0)
        torch.testing.assert_close(attend(scene), expected)
    assert handed_over == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("value", [-1e4, 50.0])
def test_overflowing_numerators_are_computed_again(dtype: torch.dtype, value: float) -> None:
    """exp(88) is finite; times a value above 2 it is not."""
    scene = surprising(88.0, value, dtype)
    expected = torch.full_like(scene.query.transpose(0, 1), value)
    torch.testing.assert_close(attend(scene), expected, rtol=ROUNDING, atol=0)


def test_one_overflowing_row_leaves_the_others_right(handed_over: list[AttentionMetadata]) -> None:
    scene = make_scene(MIXED, torch.float32)
    scene.query[:, 4] *= 200
    attend(scene)
    assert handed_over, "the case that this is about"
    torch.testing.assert_close(attend(scene).double(), scene.expected(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scores_far_below_the_rows_own_weigh_nothing(dtype: torch.dtype) -> None:
    scene = surprising(0.0, 3.0, dtype)
    scene.metadata.shared_kv[0].keys[..., 0] = -300
    torch.testing.assert_close(attend(scene)[0], scene.value[:, 0], rtol=0, atol=0)


def test_large_scores_in_a_causal_block_do_not_fall_back(
    handed_over: list[AttentionMetadata],
) -> None:
    """Scores that are large everywhere are no reason to fall back: only the difference counts."""
    scene = make_scene(Shape((2,), ((3, ((0, 2, 0),)),), group=1), torch.float32)
    scene.query.copy_(torch.ones_like(scene.query) * 100)
    scene.key.copy_(torch.ones_like(scene.key))
    scene.metadata.shared_kv[0].keys[LAYER].fill_(1.0)
    out = attend(scene)
    assert handed_over == []
    values = torch.cat([scene.metadata.shared_kv[0].values[LAYER], scene.value], 1)
    torch.testing.assert_close(out[1], values.mean(1), rtol=1e-4, atol=1e-5)


def test_only_alibi_uses_the_reference(handed_over: list[AttentionMetadata]) -> None:
    biased = make_scene(MIXED, torch.float32, alibi=True)
    out = attend(biased)
    assert [metadata is biased.metadata for metadata in handed_over] == [True]
    torch.testing.assert_close(out.double(), biased.expected(), rtol=1e-5, atol=1e-5)
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        attend(make_scene(MIXED, dtype))
    assert len(handed_over) == 1, "nothing else does"


class _Products(TorchDispatchMode):
    """Notes the dtypes of the first inputs of all matrix products."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: set[torch.dtype] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ in ("bmm", "baddbmm", "mm", "addmm"):
            self.dtypes.add(args[-1].dtype)
        return func(*args, **(kwargs or {}))


SLOW = {torch.bfloat16: 1.0, torch.float32: 0.01}
QUICK = {torch.bfloat16: 0.01, torch.float32: 0.01}


@pytest.mark.parametrize(
    ("dtype", "seconds", "multiplied"),
    [
        (torch.bfloat16, SLOW, torch.float32),
        (torch.bfloat16, QUICK, torch.bfloat16),
        (torch.float16, QUICK, torch.float32),
        (torch.float32, QUICK, torch.float32),
        (torch.float64, SLOW, torch.float64),
    ],
)
def test_nothing_is_multiplied_in_a_dtype_that_is_slow(
    dtype: torch.dtype, seconds: dict[torch.dtype, float], multiplied: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(machine, "product_seconds", seconds.__getitem__)
    scene = make_scene(MIXED, dtype)
    with _Products() as products:
        out = attend(scene)
    assert products.dtypes == {multiplied}
    assert out.dtype == dtype
    bound = 8 * ROUNDING if multiplied == torch.bfloat16 else ROUNDING
    torch.testing.assert_close(out.double(), scene.expected(), rtol=bound, atol=bound)


@pytest.mark.parametrize("backend", [CpuAttentionBackend(), ReferenceAttentionBackend()])
@pytest.mark.parametrize("size", [1, 30, cpu.CONVERTED])
def test_states_may_be_kept_in_another_dtype(
    size: int, backend: CpuAttentionBackend | ReferenceAttentionBackend,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Whatever is converted at a time, only the kept numbers are rounded."""
    monkeypatch.setattr(cpu, "CONVERTED", size)
    exact = make_scene(MIXED, torch.bfloat16)
    scene = make_scene(MIXED, torch.float32)
    for kv, rounded in zip(scene.metadata.shared_kv, exact.metadata.shared_kv, strict=True):
        kv.keys.copy_(rounded.keys)
        kv.values.copy_(rounded.values)
    expected = attend(scene, backend)
    halves = tuple(
        replace(kv, keys=kv.keys.bfloat16(), values=kv.values.bfloat16())
        for kv in scene.metadata.shared_kv
    )
    kept = replace(scene, metadata=replace(scene.metadata, shared_kv=halves))
    torch.testing.assert_close(attend(kept, backend), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("alibi", [False, True])
@pytest.mark.parametrize("most", [1, 60, 200, 400])
def test_parts_of_the_shared_states_change_nothing(
    most: int, alibi: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = make_scene(MIXED, torch.float64, alibi=alibi)
    whole = attend(scene)
    parts = list(scene.metadata.shared_parts(most // 20))
    assert len(parts) == {1: 3, 60: 3, 200: 2, 400: 1}[most]
    monkeypatch.setattr(cpu, "MOST_RESULTS", most)
    monkeypatch.setattr(reference, "MOST_RESULTS", most)
    torch.testing.assert_close(attend(scene), whole, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(
        attend(scene, ReferenceAttentionBackend()), whole, rtol=1e-12, atol=1e-12
    )


@pytest.mark.parametrize("alibi", [False, True])
@pytest.mark.parametrize("most", [1, 7, 64])
@given(shape=shapes())
@settings(max_examples=scaled(20))
def test_scores_in_blocks_of_rows_change_nothing(shape: Shape, most: int, alibi: bool) -> None:
    scene = make_scene(shape, torch.float64, alibi=alibi)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reference, "MOST_SCORES", most)
        out = attend(scene, ReferenceAttentionBackend())
    torch.testing.assert_close(out, scene.expected(), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("workspace", [1, 64, 2000])
def test_one_workspace_serves_any_size_and_dtype(
    workspace: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Queries that do not fit go to the fused kernel."""
    monkeypatch.setattr(cpu, "WORKSPACE", workspace)
    backend = CpuAttentionBackend()
    small = Shape((1, -3), ((2, ((0, 2, 5),)),))
    large, larger = (Shape((9, -3), ((n, ((0, 10, 5),)),)) for n in (45, 300))
    for shape in (small, large, larger, MIXED, small):
        for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 8 * ROUNDING)):
            scene = make_scene(shape, dtype)
            out, expected = attend(scene, backend).double(), scene.expected()
            torch.testing.assert_close(out, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("alibi", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.slow
def test_memory_does_not_grow_with_the_product_of_rows_and_keys(
    alibi: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """New tokens over themselves and over eight runs: their scores would take 24 MiB and more."""
    monkeypatch.setattr(cpu, "MOST_RESULTS", 2**17)
    monkeypatch.setattr(reference, "MOST_RESULTS", 2**17)
    monkeypatch.setattr(reference, "MOST_SCORES", 2**17)
    runs = tuple((1000, ((0, 1000, 7),)) for _ in range(8))
    scene = make_scene(Shape((1000,), runs, group=2, dim=8), torch.float32, alibi=alibi)
    result = scene.query.nbytes
    limit = 12 * result + 6 * 4 * 2**17
    for backend in (CpuAttentionBackend(), ReferenceAttentionBackend()):
        attend(scene, backend)  # its workspace stays
        assert peak_bytes(partial(attend, scene, backend)) < limit


def allocated(scene: Scene) -> int:
    """Bytes allocated in one layer, once the workspace stands."""
    backend = CpuAttentionBackend()
    attend(scene, backend)
    with torch.profiler.profile(profile_memory=True) as profile:
        attend(scene, backend)
    return sum(max(0, event.self_cpu_memory_usage) for event in profile.events())


def test_no_shared_key_is_copied() -> None:
    """Fourteen query heads over two key heads: memory stays far under even one copy."""
    scene = make_scene(Shape((1, -3), ((4096, ((0, 2, 7),)),), group=7, dim=16), torch.float32)
    assert allocated(scene) < scene.metadata.shared_kv[0].keys[LAYER].nbytes / 4


@pytest.mark.slow
def test_no_new_key_is_copied_per_head() -> None:
    """A square's output is as large as its queries, twice: in the kernel, and rows first."""
    scene = make_scene(Shape((1024,), (), group=7, dim=16), torch.float32)
    per_head = 2 * scene.query.nbytes  # keys and values
    assert allocated(scene) < 2 * scene.query.nbytes + per_head / 2


def test_blocks_are_gathered_once_for_all_heads() -> None:
    scene = make_scene(Shape((-2048, -2000), (), group=7, dim=16), torch.float32)
    pages = scene.metadata.paged_queries
    assert pages is not None
    gathered = 2 * pages.gather_blocks(pages.keys[LAYER]).nbytes
    scores = 2 * scene.query.shape[0] * 2048 * 4  # two rows
    assert allocated(scene) < 2 * gathered + 2 * scores
