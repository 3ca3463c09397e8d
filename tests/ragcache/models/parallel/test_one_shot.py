"""Sums over the memory of several GPUs compile, also where no GPU is. `tests/gpu` runs them."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton", reason="triton is not installed")

COMPILE = """
import inspect
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from ragcache.models.parallel.one_shot import sum_kernel

TYPES = {"local": "*bf16", "residual": "*bf16", "out": "*bf16", "fetched": "*bf16",
         "buffers": "*i64", "signals": "*i64"}
TYPES |= {"gain": "*bf16", "normed": "*bf16", "epsilon": "fp32"}
for fetch, width in ((0, 2048), (256, 3584)):
    given = {"RANK": 1, "RANKS": 2, "WIDTH": width, "BLOCK": triton.next_power_of_2(width),
             "COPY": True, "ADD": True, "NORM": width == 3584, "FETCH": fetch}
    names = inspect.signature(sum_kernel.fn).parameters
    signature = {n: "constexpr" if n in given else TYPES.get(n, "i32") for n in names}
    source = ASTSource(sum_kernel, signature, given, {})
    code = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 8}).asm
    assert ("cp.async.bulk.prefetch.L2" in code["ptx"]) == bool(fetch)
    assert code["cubin"]
"""


@pytest.mark.slow
def test_sums_compile_for_a_gpu() -> None:
    environment = {name: v for name, v in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", COMPILE],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
