"""Sums over the memory of several GPUs, of which none is here: processes interpret the kernels, and
they compile. `tests/gpu` runs them."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.ragcache.attention.triton.compiled import run_compiling

pytest.importorskip("triton", reason="triton is not installed")

from ragcache.models.parallel.one_shot import PUSH_BYTES, SUM_BYTES, OneShot, most_pushed

COMPILE = """
import inspect
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from ragcache.models.parallel.one_shot import _EMPTY, push_kernel, sum_kernel

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

names = inspect.signature(push_kernel.fn).parameters
for ranks in (2, 4, 8):
    for (word, kind), empty in zip((("*i16", "*bf16"), ("*i32", "*fp32")), _EMPTY.values()):
        for add in (False, True):
            given = {"RANK": 1, "RANKS": ranks, "BLOCK": 1024, "EMPTY": empty, "ADD": add}
            types = TYPES | {"local": word, "residual": kind, "out": kind}
            signature = {n: "constexpr" if n in given else types.get(n, "i32") for n in names}
            free = [i for i, name in enumerate(names) if name not in given]
            aligned = {(i,): [["tt.divisibility", 16]] for i in free}
            source = ASTSource(push_kernel, signature, given, aligned)
            asm = triton.compile(source, target=target, options={"num_warps": 4}).asm
            found = asm["ptx"].count("ld.volatile.global.v4.b32")
            loads = ranks - 1 if word == "*i16" else 2 * (ranks - 1)
            assert found == loads, (found, loads)  # each place once: what is checked is summed
"""

MEET = """
import os, sys
import torch
from ragcache.models.parallel.one_shot import (
    _EMPTY, _WORDS, broadcast_kernel, gather_kernel, push_kernel, sum_kernel
)

RANKS, BLOCK, PROGRAMS, SLOT = int(sys.argv[1]), 16, 2, 256
torch.set_num_threads(1)
shared = [torch.zeros(2 * SLOT + 256).share_memory_() for _ in range(RANKS)]
flags = [torch.zeros(PROGRAMS * RANKS, dtype=torch.int32).share_memory_() for _ in range(RANKS)]
PUSHED = RANKS * SLOT  # of four bytes
empty = torch.full((2 * PUSHED,), _EMPTY[torch.int32], dtype=torch.int32)
pushed = [empty.clone().share_memory_() for _ in range(RANKS)]
buffers, signals, areas = (
    torch.tensor([each.data_ptr() for each in many]) for many in (shared, flags, pushed)
)
parts = [torch.randn(197, generator=torch.Generator().manual_seed(rank)) for rank in range(RANKS)]
total = torch.zeros(197)
for part in parts:
    total += part  # in the order of ranks

def hard_part(numel, dtype, seed):
    # among them zeros, subnormal elements, and those that empty places look like
    generator = torch.Generator().manual_seed(seed)
    part, lots = (torch.randn(numel, generator=generator) for _ in range(2))
    if dtype == torch.bfloat16:  # which the interpreter cuts off instead of rounding it
        part = part.mul(4).round()
    part = part.to(dtype)
    bits = part.view(_WORDS[dtype.itemsize])
    part[lots < 0] = -0.0
    part[lots < -0.5] = 0.0
    bits[lots > 1] = _EMPTY[bits.dtype]
    if dtype != torch.bfloat16:
        bits[lots > 1.5] = _EMPTY[bits.dtype] + 1
    return part

def push(rank, numel, dtype, seed, slot, add):
    parts = [hard_part(numel, dtype, 1000 * seed + each) for each in range(RANKS)]
    expected = torch.zeros(numel)
    for part in parts:
        expected += part.float()
    expected, word = expected.to(dtype), _WORDS[dtype.itemsize]
    if add:
        expected = (expected.float() + parts[0].float()).to(dtype)
    out = torch.empty(numel, dtype=dtype)
    push_kernel[PROGRAMS,](parts[rank].view(word), parts[0], areas, signals, out, numel,
                           slot * PUSHED * 4 // dtype.itemsize, SLOT * 4 // dtype.itemsize,
                           RANK=rank, RANKS=RANKS, BLOCK=BLOCK, EMPTY=_EMPTY[word], ADD=add)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-39)

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
            dtype = (torch.bfloat16, torch.float16, torch.float32)[number]
            for turn, numel in enumerate((197, 1, 64)):  # between other sums, and after each other
                push(rank, numel, dtype, number + turn, turn % 2, add=turn == 0)
            push(rank, 30, torch.float32, number, 1, add=True)
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
assert all(torch.equal(each, empty) for each in pushed)

flags[0].fill_(2**24)  # a release: the sum ends, although no other rank joins it
out = torch.empty(100)
push_kernel[PROGRAMS,](parts[0][:100].view(torch.int32), out, areas, signals, out, 100, 0, SLOT,
                       RANK=0, RANKS=RANKS, BLOCK=BLOCK, EMPTY=_EMPTY[torch.int32], ADD=False)
"""


@pytest.mark.slow
def test_sums_compile_for_a_gpu() -> None:
    run_compiling(COMPILE)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4, pytest.param(8, marks=pytest.mark.nightly)])
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


@pytest.mark.parametrize(
    ("ranks", "ways"),
    [
        (2, ["push", "push", "one-shot", "one-shot", "one-shot"]),
        (4, ["push", "push", "two-shot", "two-shot", "nccl"]),
        (8, ["push", "two-shot", "two-shot", "two-shot", "nccl"]),
    ],
)
def test_the_size_decides_how_a_sum_is_made(ranks: int, ways: list[str]) -> None:
    shared = OneShot.__new__(OneShot)  # without the memory of GPUs
    shared.ranks, shared._sum_bytes = ranks, SUM_BYTES
    shared._pushed_bytes = most_pushed(PUSH_BYTES, ranks)
    rows = (128, 256, 1024, 2048, 4096)
    sizes = [(each, each * 4096 * 2) for each in rows]
    found = [shared.way(size[1]) if shared.holds(*size) else "nccl" for size in sizes]
    assert found == ways
