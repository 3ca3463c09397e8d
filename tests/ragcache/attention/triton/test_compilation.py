"""The kernels of recurrent layers compile for a GPU. The interpreter of the other tests does not
tell: it takes a variable that changes its type within a branch."""

from __future__ import annotations

import pytest

from tests.ragcache.attention.triton.compiled import run_compiling

pytest.importorskip("triton", reason="triton is not installed")

COMPILE = """
import inspect
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from ragcache.attention.triton import recurrent_kernels as kernels

TYPES = {
    "*fp32": ("decay", "step", "out", "states", "state", "floats", "rows"),
    "*bf16": ("query", "key", "value", "inputs", "weight", "bias", "windows", "maps",
              "gate", "rate", "offset"),
    "*i32": ("chain", "row_chain", "keep"),
    "*i64": ("places",),
    "fp32": ("scale", "eps"),
}
SIZES = {"DK": 64, "DKP": 64, "DV": 64, "BV": 16, "KEY_STRIDE": 64, "VALUE_STRIDE": 1, "KERNEL": 4,
         "BLOCK": 64, "LAST": 64, "GROUP": 1, "ORDERS": 2, "SILU": True, "BIAS": False,
         "NARROW": True, "GATES": True, "DVP": 64, "HEADS": 4}
NAMES = {name: kind for kind, names in TYPES.items() for name in names}


def compile_for_gpu(kernel, **constants):
    given = {**SIZES, **constants}
    names = inspect.signature(kernel.fn).parameters
    signature = {n: "constexpr" if n in given else NAMES.get(n, "i32") for n in names}
    used = {n: given[n] for n in names if n in given}
    source = ASTSource(kernel, signature, used, {})
    return triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["ptx"]


assert compile_for_gpu(kernels.convolve_kernel)
assert compile_for_gpu(kernels.gated_norm_kernel)
assert compile_for_gpu(kernels.recur_kernel, DELTA=False, CHANNELS=False, GATES=False)
for kernel in (kernels.recur_kernel, kernels.compose_kernel):
    assert compile_for_gpu(kernel, DELTA=True, CHANNELS=False)
"""


@pytest.mark.slow
def test_recurrent_kernels_compile_for_a_gpu() -> None:
    run_compiling(COMPILE)
