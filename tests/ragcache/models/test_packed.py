"""Compiled products of packed weights, beside the same sums in torch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ragcache.errors import ConfigurationError
from ragcache.models import load_model, native, packed
from ragcache.models.native import GROUP, TILE, Kernels, Packed
from ragcache.models.packed import PackedLinear

TARGETS = {"AVX512": ("-march=native", "-march=x86-64-v3", "-march=x86-64"),
           "AVX2": ("-march=native", "-march=x86-64")}.get(
    torch.backends.cpu.get_cpu_capability(), ("-march=native",)
)  # fmt: skip
BITS = (8, 4)


@pytest.fixture(scope="module", params=TARGETS)
def kernels(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Kernels:
    library = tmp_path_factory.mktemp("kernels") / "packed.so"
    native.compile_kernels(library, (request.param,))
    return Kernels(library)


def unpacked(weight: Packed) -> Tensor:
    """The weight [outputs, inputs] of its tiles, by the layout that `packed.c` describes."""
    tiles, groups = weight.numbers.shape[:2]
    words = weight.numbers.view(tiles, groups, weight.bits, TILE, 4).int()
    scales = weight.scales.float()[:, :, :, None, :, None]
    if weight.bits == 4:
        numbers = torch.stack([words & 15, words >> 4], 3)  # [T, G, n, half, TILE, 4]
        values = (numbers - 8) * scales[:, :, :1] + scales[:, :, 1:]
    else:
        values = ((words - 128)[:, :, :, None]) * scales
    rows = values.permute(0, 4, 1, 2, 3, 5).reshape(tiles * TILE, groups * GROUP)
    return rows[: weight.outputs]


def rounded(rows: Tensor) -> Tensor:
    """Activations in 8 bits, with a scale for each group."""
    groups = rows.float().unflatten(1, (-1, GROUP))
    most = groups.abs().amax(2, keepdim=True)
    numbers = (groups * torch.where(most > 0, 127 / most, 0.0)).round()
    return (numbers * (most / 127)).flatten(1)


def spread(rows: int, columns: int) -> Tensor:
    """A weight whose rows differ by six orders of magnitude; one is zero."""
    weight = torch.randn(rows, columns) * torch.logspace(-3, 3, rows)[:, None]
    weight[3] = 0
    return weight


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("shape", [(64, 32), (41, 96), (7, 4096)])
def test_numbers_are_nearest_to_the_weight(
    kernels: Kernels, bits: int, shape: tuple[int, int]
) -> None:
    torch.manual_seed(1)
    weight = spread(*shape)
    small, error = kernels.pack(weight, bits)
    found = unpacked(small)
    whole = torch.empty(-(-shape[0] // TILE) * TILE, shape[1])
    kernels.unpack(small, 0, len(whole) // TILE, whole)
    torch.testing.assert_close(whole[: shape[0]], found, rtol=1e-5, atol=1e-6)
    half = torch.empty_like(whole, dtype=torch.bfloat16)
    kernels.unpack(small, 0, len(whole) // TILE, half)
    assert torch.equal(half, whole.bfloat16())
    groups = weight.unflatten(1, (-1, GROUP))
    if bits == 8:
        step = groups.abs().amax(2, keepdim=True) / 127
        bound = (0.5 + 127 * 2**-8) * step
    else:
        least, most = groups.aminmax(dim=2, keepdim=True)
        step = (most - least) / 12  # of the coarsest grid
        bound = 0.5 * step + 2**-8 * (15 * step + (least + 8 * step).abs())
    assert bool(((found.unflatten(1, (-1, GROUP)) - groups).abs() <= bound * 1.01).all())
    assert bool((found[3].abs() < 1e-20).all())
    assert error == pytest.approx(float((found - weight).double().square().sum()), rel=1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 7, 8, 9, 17])
def test_products_are_sums_of_rounded_activations(
    kernels: Kernels, bits: int, count: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(count)
    small, _ = kernels.pack(spread(41, 160), bits)
    rows = (torch.randn(count, 160) * torch.logspace(-2, 2, 160)).to(dtype)
    rows[0, :GROUP] = 0
    expected = rounded(rows) @ unpacked(small).t()
    scale = rounded(rows).abs() @ unpacked(small).abs().t()
    found = kernels.product(rows, small)
    assert found.dtype == dtype
    bound = (2**-8 if dtype == torch.bfloat16 else 2**-18) * scale + 1e-20
    assert bool(((found.float() - expected).abs() <= bound).all())


@pytest.mark.parametrize("bits", BITS)
def test_rows_do_not_depend_on_each_other_or_on_threads(kernels: Kernels, bits: int) -> None:
    torch.manual_seed(2)
    small, _ = kernels.pack(torch.randn(700, 96), bits)
    rows = torch.randn(11, 96)
    together = kernels.product(rows, small)
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            alone = torch.cat([kernels.product(row[None], small) for row in rows])
            assert torch.equal(alone, together)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), float("-inf")])
def test_a_row_that_is_not_finite_has_no_finite_product(
    kernels: Kernels, bits: int, dtype: torch.dtype, wrong: float
) -> None:
    torch.manual_seed(7)
    weight, _ = kernels.pack(torch.randn(40, 96), bits)
    rows = torch.randn(3, 96, dtype=dtype)
    expected = kernels.product(rows, weight)
    rows[1, 50] = wrong
    found = kernels.product(rows, weight)
    assert not found[1].isfinite().any()
    assert torch.equal(found[[0, 2]], expected[[0, 2]])


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_layer_multiplies_few_and_many_rows_alike(
    bits: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packed, "_PIECE", 2**12)  # several pieces
    torch.manual_seed(3)
    weight, bias = torch.randn(100, 256) * 0.1, torch.randn(100).to(dtype)
    layer = PackedLinear.pack(weight, bits, bias)
    rows = torch.randn(2, 3, 256).to(dtype)
    products = []
    for few in (0, 6):
        layer.few_rows = few
        products.append(layer(rows).float())
        assert layer(rows).dtype == dtype
    exact = rows.float() @ unpacked(layer.packed).t() + bias.float()
    for each, most in zip(products, (0.01, 0.02), strict=True):
        assert float((each - exact).norm() / exact.norm()) < most


def stored_in_four_bits(rows: int, columns: int) -> Tensor:
    """A weight in bfloat16 as Q4_K holds it; many groups lack a first or last step."""
    numbers = torch.randint(0, 16, (rows, columns // GROUP, GROUP))
    scale = torch.rand(rows, columns // GROUP, 1) * 0.01 + 0.001
    least = -8 * scale * torch.rand_like(scale)
    return (numbers * scale + least).view(rows, columns).bfloat16()


def test_weights_of_four_bits_are_found_again(kernels: Kernels) -> None:
    torch.manual_seed(3)
    errors = []
    for weight in (stored_in_four_bits(64, 1024), torch.randn(64, 1024)):
        small, error = kernels.pack(weight, 4)
        errors.append(error**0.5 / float(weight.float().norm()))
        assert small.numbers.nbytes == weight.numel() // 2
    assert errors[0] < 2**-7, "roundings of scales and zeros"
    assert errors[1] > 8 * 2**-7


@pytest.fixture
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A cache folder without a compiled library, and a process that has loaded none."""
    monkeypatch.setattr(native, "kernel_folder", lambda: tmp_path)
    native.load_kernels.cache_clear()
    yield tmp_path
    native.load_kernels.cache_clear()


def test_a_library_is_compiled_once(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert native.load_kernels() is not None
    [library] = fresh.iterdir()
    native.load_kernels.cache_clear()
    monkeypatch.setattr(native, "compile_kernels", None)  # called where there is no library
    assert native.load_kernels() is not None
    assert [*fresh.iterdir()] == [library]


def no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(native, "which", lambda _: None)


def a_compiler_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "false")


@pytest.mark.parametrize(
    ("break_it", "reason"),
    [
        (no_compiler, "has no C compiler"),
        (a_compiler_that_fails, "does not compile packed.c, gguf.c"),
    ],
)
def test_without_a_compiler_weights_stay_and_the_reason_is_told(
    break_it: Callable[[pytest.MonkeyPatch], None], reason: str, fresh: Path,
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    break_it(monkeypatch)
    packed.few_rows.cache_clear()
    assert packed.few_rows(8, torch.float32) == 0
    packed.few_rows.cache_clear()
    assert reason in caplog.text
    assert not [*fresh.iterdir()]
    with pytest.raises(ConfigurationError, match="install gcc or clang, or leave quantization out"):
        packed.required_kernels()


def test_torch_and_the_kernels_share_their_threads() -> None:
    native.load_kernels()
    maps = Path("/proc/self/maps")
    if not maps.exists() or not native._openmp_library():
        pytest.skip("no table of libraries, or a torch without OpenMP")
    found = {line.split()[-1] for line in maps.read_text().splitlines() if "omp" in line}
    assert {path for path in found if "/lib" in path and "gomp" in path} == {
        *native._openmp_library()
    }


def test_a_model_is_refused_by_name_without_a_compiler(
    fresh: Path, tmp_path: Path, reader: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.tiny_models import tiny_config

    folder = tmp_path / "model"
    tiny_config("qwen3").save_pretrained(folder)  # and no weights
    reader.tokenizer.save_pretrained(folder)
    no_compiler(monkeypatch)
    with pytest.raises(ConfigurationError, match="install gcc or clang"):
        load_model(folder, quantization="int8")
