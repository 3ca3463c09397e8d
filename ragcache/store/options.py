"""The options that choose a store's tiers."""

from __future__ import annotations

from typing import Any, TypedDict

import torch

from ragcache.config import check_options, parse_bytes, parse_optional_bytes
from ragcache.states.quantization import check_kv_dtype
from ragcache.store.eviction import check_policy
from ragcache.store.tiers import DeviceTier, RemoteTier, Tier


class TierOptions(TypedDict, total=False):
    """All optional. Sizes are bytes, or texts such as `8GiB`.

    device_bytes: of a tier in the memory of the model's GPU. disk_bytes: without it, no limit.
    remote: an fsspec URL (`s3://BUCKET/PATH`, `file:///MOUNT`), and remote_bytes. kv_dtype: how the
    host, the disk and the remote keep states: `model`, `fp8` or `int8`. policy: `lru`, `gdsf` or
    `lfu`. ledger: a database URL in place of the file in the state folder.
    """

    device_bytes: int | str
    disk_bytes: int | str
    remote: str
    remote_bytes: int | str
    kv_dtype: str
    policy: str
    ledger: str


def open_tiers(options: TierOptions, device: torch.device) -> dict[str, Any]:
    """Arguments for `KVStore.open`. Raises `ConfigurationError`."""
    check_options(options, TierOptions, "tiers")
    kv_dtype = check_kv_dtype(options.get("kv_dtype", "model"))
    on_device: Tier | None = None
    if "device_bytes" in options:
        on_device = DeviceTier(parse_bytes(options["device_bytes"]), device)
    remote: Tier | None = None
    if "remote" in options:
        budget = parse_optional_bytes(options.get("remote_bytes"))
        remote = RemoteTier.open(options["remote"], budget, kv_dtype=kv_dtype)
    return {
        "disk_bytes": parse_optional_bytes(options.get("disk_bytes")),
        "kv_dtype": kv_dtype,
        "policy": check_policy(options.get("policy", "lru")),
        "device": on_device,
        "remote": remote,
    }
