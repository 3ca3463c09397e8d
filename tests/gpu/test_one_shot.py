"""Sums and gathers over the memory of several GPUs, in processes of their own."""

from __future__ import annotations

import faulthandler
import os
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
import torch

RANKS = torch.cuda.device_count()
if RANKS < 2:
    pytest.skip("needs two CUDA devices", allow_module_level=True)

pytestmark = pytest.mark.gpu

SHAPES = ((1, 4096), (3, 4097), (256, 4096), (512, 8192))
CHECKS = ("sums", "sums_in_place", "sums_in_a_graph", "gathers", "broadcasts", "released")


@pytest.mark.parametrize("check", CHECKS)
def test_ranks_agree(check: str, tmp_path: Path) -> None:
    environment = {
        **os.environ,
        "NCCL_NVLS_ENABLE": "0",
        "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
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
    shared = OneShot(torch.distributed.group.WORLD, rank, RANKS, device)
    runs: dict[str, Callable[[tuple[int, int], torch.dtype], None]] = {}

    def sums(shape: tuple[int, int], dtype: torch.dtype) -> None:
        for seed in range(5):  # slots take turns
            parts = parts_of(shape, dtype, seed)
            found = shared.sum_parts(parts[rank], shots=1)
            assert_right(found, parts)
            assert torch.equal(found, shared.sum_parts(parts[rank], shots=2))

    def sums_in_place(shape: tuple[int, int], dtype: torch.dtype) -> None:
        for seed in range(5):
            parts = parts_of(shape, dtype, seed)
            room = shared.room(shape, dtype)
            room.copy_(parts[rank])
            assert_right(shared.sum_parts(room, copy=False), parts)
            residual = parts_of(shape, dtype, 100)[0]  # the same on every rank
            for shots in (1, 2):
                room = shared.room(shape, dtype)
                room.copy_(parts[rank])
                found = shared.sum_parts(room, residual, copy=False, shots=shots)
                assert torch.equal(found, residual + shared.sum_parts(parts[rank]))

    def sums_in_a_graph(shape: tuple[int, int], dtype: torch.dtype) -> None:
        given = torch.empty(shape, dtype=dtype, device=device)
        for shots in (1, 2):
            shared.sum_parts(given.zero_(), shots=shots)  # compiled before the capture
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            once = shared.sum_parts(given, shots=1)
            twice = shared.sum_parts(once, shots=2)  # an even number: the slots stand as before
        for seed in range(3):
            parts = parts_of(shape, dtype, seed)
            given.copy_(parts[rank])
            graph.replay()
            torch.cuda.synchronize()
            assert_right(once, parts)
            assert_right(twice, [once] * RANKS)

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

    def released(shape: tuple[int, int], dtype: torch.dtype) -> None:
        """Sums that no other rank joins end."""
        if rank == 0:
            part = torch.zeros(shape, dtype=dtype, device=device)
            shared.sum_parts(part)
            event = torch.cuda.Event()
            event.record()
            time.sleep(0.2)
            assert not event.query() or waited  # later ones wait no more
            waited.append(True)
            shared.release()
            event.synchronize()
            shared.sum_parts(part)
            torch.cuda.synchronize()

    checks = (sums, sums_in_place, sums_in_a_graph, gathers, broadcasts, released)
    runs = {each.__name__: each for each in checks}
    for shape in SHAPES:
        for dtype in (torch.bfloat16, torch.float32):
            if shared.holds(torch.empty(shape, dtype=dtype, device="meta")):
                runs[check](shape, dtype)
    torch.cuda.synchronize()
    if check != "released":
        torch.distributed.barrier()
    elif rank:
        time.sleep(5)  # the memory that rank 0 raises flags in
    os._exit(0)  # NCCL may hang at the end of a process that captured graphs


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
