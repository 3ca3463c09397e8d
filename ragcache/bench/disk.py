"""From disk to ready states, beside reading the same bytes plainly."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ragcache.planning import drop_pages, fill_pages
from ragcache.states import KVKey, KVStates
from ragcache.store.tiers import DiskTier, HostTier


def bench_disk(
    folder: Path, blobs: int, shape: tuple[int, int, int, int], runs: int
) -> dict[str, Any]:
    """Medians in bytes a second over `blobs` modules of [L, Hkv, S, D] in bfloat16.

    plain: a loop of reads into one buffer. mapped: verified where the page cache has them. host:
    loaded into memory of the host tier, and verified there. Once with the files in the page cache
    (`warm`) and once after the system was asked to drop them (`cold`; `dropped` tells whether it
    did, since some file systems do not).
    """
    tier = DiskTier(folder)
    keys = _fill(tier, blobs, shape)
    host = HostTier(4 * 2 * 2 * torch.Size(shape).numel() + 2**20)
    nbytes = sum(tier.path(key).stat().st_size for key in keys)
    ways: dict[str, Callable[[KVKey], object]] = {
        "plain": _plainly(tier),
        "mapped": tier.get,
        "host": lambda key: tier.load(key, host.allocate),
    }
    warm = _compared(_seconds(ways, tier, keys, runs, cold=False), nbytes)
    cold = _compared(_seconds(ways, tier, keys, runs, cold=True), nbytes)
    dropped = cold["plain"] < 0.8 * warm["plain"]
    return {"nbytes": nbytes, "warm": warm, "cold": cold, "dropped": dropped}


def _compared(times: dict[str, list[float]], nbytes: int) -> dict[str, float]:
    """Bandwidths, and shares of the plain one: medians over rounds of what ran side by side."""
    speeds = {way: nbytes / statistics.median(seconds) for way, seconds in times.items()}
    for way in ("mapped", "host"):
        pairs = zip(times["plain"], times[way], strict=True)
        speeds[f"{way}_share"] = statistics.median(plain / seconds for plain, seconds in pairs)
    return speeds


def _fill(tier: DiskTier, blobs: int, shape: tuple[int, int, int, int]) -> list[KVKey]:
    keys = [KVKey(f"{number:02x}" * 32) for number in range(blobs)]
    for number, key in enumerate(keys):
        torch.manual_seed(number)
        keys_and_values = torch.randn(2, *shape).bfloat16()
        tier.put(key, KVStates(keys_and_values[0], keys_and_values[1], 0))
    return keys


def _plainly(tier: DiskTier) -> Callable[[KVKey], object]:
    buffer = bytearray(1 << 20)

    def read(key: KVKey) -> None:
        with tier.path(key).open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass

    return read


def _seconds(
    ways: dict[str, Callable[[KVKey], object]],
    tier: DiskTier, keys: list[KVKey], runs: int, *, cold: bool,
) -> dict[str, list[float]]:  # fmt: skip
    """Each way in turn, so that what else the machine does meets all of them, and each as often
    first, because a disk may have a cache of its own."""
    times: dict[str, list[float]] = {way: [] for way in ways}
    names, prepare = list(ways), drop_pages if cold else fill_pages
    for run in range(runs * len(ways)):
        way = names[(run + run // len(ways)) % len(ways)]
        for key in keys:
            prepare(tier.path(key))
        begin = time.perf_counter()
        for key in keys:
            ways[way](key)
        times[way].append(time.perf_counter() - begin)
    return times
