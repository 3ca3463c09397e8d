"""Sums over the memory of several GPUs, of which none is here: processes interpret the kernels, and
they compile. `tests/gpu` runs them."""

from __future__ import annotations

import os
import subprocess
import sys

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
for ranks, shares in ((2, 1), (8, 8)):
    for copy, add in ((True, False), (False, True)):
        given = {"RANK": 1, "RANKS": ranks, "SHARES": shares, "BLOCK": 2048, "COPY": copy,
                 "ADD": add}
        signature = {n: "constexpr" if n in given else TYPES.get(n, "i32") for n in names}
        source = ASTSource(sum_kernel, signature, given, {})
        target = GPUTarget("cuda", 90, 32)
        assert triton.compile(source, target=target, options={"num_warps": 8}).asm["cubin"]
"""

MEET = """
import os, sys
import torch
from ragcache.models.parallel.one_shot import broadcast_kernel, gather_kernel, sum_kernel

RANKS, BLOCK, PROGRAMS, SLOT = int(sys.argv[1]), 16, 2, 256
torch.set_num_threads(1)
shared = [torch.zeros(2 * SLOT + 256).share_memory_() for _ in range(RANKS)]
flags = [torch.zeros(PROGRAMS * RANKS, dtype=torch.int32).share_memory_() for _ in range(RANKS)]
buffers, signals = (torch.tensor([each.data_ptr() for each in many]) for many in (shared, flags))
parts = [torch.randn(197, generator=torch.Generator().manual_seed(rank)) for rank in range(RANKS)]
total = torch.zeros(197)
for part in parts:
    total += part  # in the order of ranks

def run(rank):
    both = {"RANK": rank, "RANKS": RANKS, "BLOCK": BLOCK}
    for number in range(3):  # slots take turns
        slot = SLOT * (number % 2)
        for shares in (1, RANKS):
            out = torch.empty(197)
            sum_kernel[PROGRAMS,](parts[rank], parts[0], buffers, signals, out, 197, slot, **both,
                                  SHARES=shares, COPY=True, ADD=False)
            assert torch.equal(out, total), shares
            slot = SLOT - slot
            shared[rank][slot : slot + 197] = parts[rank]
            sum_kernel[PROGRAMS,](out, parts[0], buffers, signals, out, 197, slot, **both,
                                  SHARES=shares, COPY=False, ADD=True)
            assert torch.equal(out, parts[0] + total), shares
    whole = torch.empty(2, RANKS * 20)
    gather_kernel[PROGRAMS,](parts[rank][:40], buffers, signals, whole, 2, 20, 2 * SLOT, **both)
    if rank == 0:
        assert torch.equal(whole, torch.cat([each[:40].view(2, 20) for each in parts], 1))
    given = parts[rank][:40].clone()
    broadcast_kernel[PROGRAMS,](given, buffers, signals, 40, 2 * SLOT + 128, **both)
    assert torch.equal(given, parts[0][:40])

ranks = []
for rank in range(RANKS):
    if not (child := os.fork()):
        try:
            run(rank)
        except BaseException:
            sys.excepthook(*sys.exc_info())
            os._exit(1)
        os._exit(0)
    ranks.append(child)
ended = [os.waitpid(child, 0)[1] for child in ranks]
assert not any(ended), ended
assert not any(each.any() for each in flags)
"""


@pytest.mark.slow
def test_sums_compile_for_a_gpu() -> None:
    run_compiling(COMPILE)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [4, pytest.param(8, marks=pytest.mark.nightly)])
def test_ranks_meet_in_memory_that_all_of_them_map(ranks: int) -> None:
    done = subprocess.run(
        [sys.executable, "-c", MEET, str(ranks)],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]
