"""Every kind of tier, made empty with a budget."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ragcache.states.quantization import KVDtype
from ragcache.store.tiers import DeviceTier, DiskTier, HostTier, RemoteTier, RetryPolicy, Tier

QUICK = RetryPolicy(seconds=2.0, attempts=2, pause=0.0, rest=60.0)
Make = Callable[..., Tier]

_made = 0


def _remote(url: str, budget: int, kv_dtype: KVDtype) -> RemoteTier:
    return RemoteTier.open(url, budget, kv_dtype=kv_dtype, retry=QUICK)


def make_tier(kind: str, folder: Path, budget: int, kv_dtype: KVDtype = "model") -> Tier:
    global _made
    _made += 1
    if kind == "device":
        return DeviceTier(budget, "cpu")
    if kind == "host":
        return HostTier(budget, kv_dtype=kv_dtype)
    if kind == "disk":
        return DiskTier.open(folder / "states", budget, kv_dtype=kv_dtype)
    if kind == "memory":
        return _remote(f"memory://states-{_made}", budget, kv_dtype)
    return _remote(f"file://{folder}/remote", budget, kv_dtype)


KINDS = ("device", "host", "disk", "memory", "file")


@pytest.fixture(params=KINDS)
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Make:
    def made(budget: int = 10**7, **options: Any) -> Tier:
        return make_tier(request.param, tmp_path, budget, **options)

    return made
