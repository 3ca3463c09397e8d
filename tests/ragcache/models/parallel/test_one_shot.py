"""Sums over the memory of several GPUs compile, also where no GPU is. `tests/gpu` runs them."""

from __future__ import annotations

import pytest

from tests.ragcache.attention.triton.compiled import run_compiling

pytest.importorskip("triton", reason="triton is not installed")

COMPILE = """
import inspect
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from ragcache.models.parallel.one_shot import sum_kernel

TYPES = {"local": "*bf16", "residual": "*bf16", "out": "*bf16", "buffers": "*i64",
         "signals": "*i64"}
names = inspect.signature(sum_kernel.fn).parameters
for copy, add in ((True, False), (False, True)):
    given = {"RANK": 1, "RANKS": 2, "BLOCK": 2048, "COPY": copy, "ADD": add}
    signature = {n: "constexpr" if n in given else TYPES.get(n, "i32") for n in names}
    source = ASTSource(sum_kernel, signature, given, {})
    target = GPUTarget("cuda", 90, 32)
    assert triton.compile(source, target=target, options={"num_warps": 8}).asm["cubin"]
"""


@pytest.mark.slow
def test_sums_compile_for_a_gpu() -> None:
    run_compiling(COMPILE)
