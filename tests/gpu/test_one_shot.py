"""Sums and gathers over the memory of several GPUs, in processes of their own."""

from __future__ import annotations

import faulthandler
import math
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from itertools import pairwise
from pathlib import Path

import pytest
import torch

RANKS = torch.cuda.device_count()
if RANKS < 2:
    pytest.skip("needs two CUDA devices", allow_module_level=True)

pytestmark = pytest.mark.gpu

SHAPES = ((1, 4096), (3, 4097), (256, 4096), (512, 8192))
WAYS = ("push", "one-shot", "two-shot")
CHECKS = (
    "sums",
    "zeros_and_subnormal_elements",
    "sums_in_place",
    "sums_in_a_graph",
    "kinds_in_turn",
    "gathers",
    "broadcasts",
    "released",
    "released_pushes",
)


@pytest.mark.parametrize("check", CHECKS)
def test_ranks_agree(check: str, tmp_path: Path) -> None:
    environment = {
        **os.environ,
        "NCCL_NVLS_ENABLE": "0",
        "PYTHONPATH": os.pathsep.join(each or "." for each in sys.path),
    }
    ranks = [
        subprocess.Popen(
            [sys.executable, __file__, check, str(rank), str(tmp_path / "store")], env=environment
        )
        for rank in range(RANKS)
    ]
    try:
        assert [each.wait(120) for each in ranks] == [0] * RANKS
    finally:
        for each in ranks:
            each.kill()


def parts_of(shape: tuple[int, int], dtype: torch.dtype, seed: int) -> list[torch.Tensor]:
    """The parts of all ranks, which every rank draws alike."""
    generator = torch.Generator("cuda").manual_seed(seed)
    return [torch.randn(shape, generator=generator, device="cuda").to(dtype) for _ in range(RANKS)]


def assert_right(found: torch.Tensor, parts: list[torch.Tensor]) -> None:
    """The sum is right, and its bits are those of every other rank."""
    expected = torch.stack([each.double() for each in parts]).sum(0)
    tolerance = 1e-5 if found.dtype == torch.float32 else 2e-2
    torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=tolerance)
    bits = found.contiguous().view(torch.uint8)
    first = bits.clone()
    torch.distributed.broadcast(first, 0)
    assert torch.equal(first, bits)


def main(check: str, rank: int, store: str) -> None:
    from ragcache.models.parallel.one_shot import OneShot

    faulthandler.dump_traceback_later(90, exit=True)
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    torch.distributed.init_process_group(
        "nccl",
        store=torch.distributed.FileStore(store, RANKS),
        rank=rank,
        world_size=RANKS,
        timeout=timedelta(seconds=60),
        device_id=device,
    )
    shared = OneShot(torch.distributed.group.WORLD, rank, RANKS, device, push_bytes=2**25)
    runs: dict[str, Callable[[tuple[int, int], torch.dtype], None]] = {}

    def sums(shape: tuple[int, int], dtype: torch.dtype) -> None:
        for seed in range(5):  # slots take turns
            parts = parts_of(shape, dtype, seed)
            found = shared.sum_parts(parts[rank], way="one-shot")
            assert_right(found, parts)
            for way in ("push", "push", "two-shot"):
                assert torch.equal(found, shared.sum_parts(parts[rank], way=way)), way

    def zeros_and_subnormal_elements(shape: tuple[int, int], dtype: torch.dtype) -> None:
        """Elements that look like empty places arrive."""
        width = 8 * dtype.itemsize
        empty = {16: 0x8000 - 2**16, 32: 0x80008000 - 2**32}[width]
        for seed in range(4):
            parts = parts_of(shape, dtype, seed)
            for number, part in enumerate(parts):
                bits = part.view(torch.int16 if width == 16 else torch.int32).flatten()
                bits[number % 3 :: 3] = empty
                bits[number % 5 :: 5] = 1 - 2 ** (width - 1)  # the least subnormal one
                bits[::7] = empty  # on every rank
                part.flatten()[::11] = -0.0
            for residual in (None, parts[0]):
                found = shared.sum_parts(parts[rank], residual, way="push")
                expected = shared.sum_parts(parts[rank], residual, way="one-shot")
                allowed = 1e-39 if width == 32 else 0.0  # float32 -4.6e-41 becomes 0
                torch.testing.assert_close(found, expected, rtol=0, atol=allowed)

    def sums_in_place(shape: tuple[int, int], dtype: torch.dtype) -> None:
        residual = parts_of(shape, dtype, 100)[0]  # the same on every rank
        for seed in range(5):
            parts = parts_of(shape, dtype, seed)
            for way in WAYS:
                room = shared.room(shape, dtype, way)
                room.copy_(parts[rank])
                found = shared.sum_parts(room, copy=False, way=way)
                assert_right(found, parts)
                room = shared.room(shape, dtype, way)
                room.copy_(parts[rank])
                added = shared.sum_parts(room, residual, copy=False, way=way)
                assert torch.equal(added, residual + found), way

    def sums_in_a_graph(shape: tuple[int, int], dtype: torch.dtype) -> None:
        given = torch.empty(shape, dtype=dtype, device=device)
        for way in WAYS:
            shared.sum_parts(given.zero_(), way=way)  # compiled before the capture
        torch.cuda.synchronize()
        graph, sums = torch.cuda.CUDAGraph(), list[torch.Tensor]()
        with torch.cuda.graph(graph):
            for way in ("one-shot", "two-shot", "push", "push", "one-shot", "push"):
                last = sums[-1] if sums else given  # an even number: the slots stand as before
                sums.append(shared.sum_parts(last, way=way))
        for seed in range(3):
            parts = [each / RANKS**3 for each in parts_of(shape, dtype, seed)]
            given.copy_(parts[rank])
            for _ in range(5):
                graph.replay()
            torch.cuda.synchronize()
            assert_right(sums[0], parts)
            for last, found in pairwise(sums):
                assert_right(found, [last] * RANKS)
            if seed == 1:  # eager sums between replays
                for way in ("push", "push"):
                    assert torch.equal(shared.sum_parts(given, way=way), sums[0])

    def kinds_in_turn(shape: tuple[int, int], dtype: torch.dtype) -> None:
        """Sums of all kinds and sizes, gathers and broadcasts, in an order that all ranks draw."""
        draw = random.Random(shape[0] + dtype.itemsize)
        parts = parts_of(shape, dtype, 7)
        for number in range(200):
            if number % 20 == 0:
                checks = list[tuple[torch.Tensor, list[torch.Tensor]]]()
            rows, kind = draw.randint(1, shape[0]), draw.choice((*WAYS, "push", "gather", "pass"))
            some = [each[:rows] for each in parts]
            if draw.random() < 0.5:
                some = [each.to(torch.float16) for each in some]
            if draw.random() < 0.2 and rank == number % RANKS:
                torch.cuda._sleep(200_000)  # this rank comes late
            if kind == "gather":
                shared.gather_columns(some[rank])
            elif kind == "pass":
                tokens = torch.full((rows,), number if rank == 0 else -1, device=device)
                shared.broadcast(tokens)
                checks.append((tokens[:1].to(dtype), [torch.full((1,), number, device=device)]))
            else:
                checks.append((shared.sum_parts(some[rank], way=kind), some))
            if kind in ("gather", "pass"):
                shared.sum_parts(some[rank][:1], way="push")
            if number % 20 == 19:  # not before, so that ranks run ahead
                for found, expected in checks:
                    assert_right(found, expected)

    def gathers(shape: tuple[int, int], dtype: torch.dtype) -> None:
        for seed in range(3):
            parts = parts_of(shape, dtype, seed)
            whole = shared.gather_columns(parts[rank])
            assert rank or torch.equal(whole, torch.cat(parts, 1))
            assert_right(shared.sum_parts(parts[rank]), parts)

    def broadcasts(shape: tuple[int, int], dtype: torch.dtype) -> None:
        for seed in range(3):
            tokens = torch.arange(shape[0], device=device) + 1000 * seed
            found = tokens.clone() if rank == 0 else torch.zeros_like(tokens)
            shared.broadcast(found)
            assert torch.equal(found, tokens)
            parts = parts_of(shape, dtype, seed)
            assert_right(shared.sum_parts(parts[rank]), parts)

    waited = list[bool]()

    def end_unjoined(first: str, shape: tuple[int, int], dtype: torch.dtype) -> None:
        if rank == 0:
            part = torch.zeros(shape, dtype=dtype, device=device)
            shared.sum_parts(part, way=first)
            event = torch.cuda.Event()
            event.record()
            time.sleep(0.2)
            assert not event.query() or waited  # later ones wait no more
            waited.append(True)
            shared.release()
            event.synchronize()
            for way in WAYS:
                shared.sum_parts(part, way=way)
            torch.cuda.synchronize()

    def released(shape: tuple[int, int], dtype: torch.dtype) -> None:
        """Sums that no other rank joins end."""
        end_unjoined("one-shot", shape, dtype)

    def released_pushes(shape: tuple[int, int], dtype: torch.dtype) -> None:
        end_unjoined("push", shape, dtype)

    checks = (
        sums,
        zeros_and_subnormal_elements,
        sums_in_place,
        sums_in_a_graph,
        kinds_in_turn,
        gathers,
        broadcasts,
        released,
        released_pushes,
    )
    runs = {each.__name__: each for each in checks}
    for shape in SHAPES:
        for dtype in (torch.bfloat16, torch.float32):
            if shared.holds(shape[0], math.prod(shape) * dtype.itemsize):
                runs[check](shape, dtype)
    torch.cuda.synchronize()
    if not check.startswith("released"):
        torch.distributed.barrier()
    elif rank:
        time.sleep(5)  # the memory that rank 0 raises flags in
    os._exit(0)  # NCCL may hang at the end of a process that captured graphs


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
