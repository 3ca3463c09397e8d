"""What a device reaches: reading its memory, copying from the host, a product in bfloat16."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

from ragcache.bench.gpu.attention import device_microseconds
from ragcache.bench.gpu.table import Ceilings


def measure_ceilings(device: str, nbytes: int = 2**32, side: int = 8192) -> Ceilings:
    """The best of two ways to read memory, a copy from pinned memory, and a square product. On a
    CPU everything is a thousandth of the size."""
    if device == "cpu":
        nbytes, side = nbytes >> 10, side >> 5
    a, b = (torch.randn(side, side, dtype=torch.bfloat16, device=device) for _ in range(2))
    product = _seconds(lambda: a @ b, device)
    memory = torch.zeros(nbytes // 4, device=device)
    vector = torch.zeros(4096, device=device)
    by_product = _seconds(lambda: memory.view(-1, 4096) @ vector, device)
    read = min(_seconds(memory.sum, device), by_product)
    host = torch.zeros(nbytes // 16, pin_memory=device != "cpu")
    room = memory[: host.numel()]
    copied = _seconds(lambda: room.copy_(host, non_blocking=True), device)
    return Ceilings(nbytes / read / 1e9, host.nbytes / copied / 1e9, 2 * side**3 / product / 1e12)


def _seconds(run: Callable[[], object], device: str, runs: int = 10) -> float:
    """The median of a call's time, by the device's clock where there is one."""
    if device != "cpu":
        return device_microseconds(run, runs) / 1e6
    times = []
    for _ in range(runs):
        begin = time.perf_counter()
        run()
        times.append(time.perf_counter() - begin)
    return statistics.median(times)
