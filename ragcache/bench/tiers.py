"""The store: disk to ready, first tokens by tier, ledger, victims, hit rates, eight bits."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ragcache.bench.by_tier import ByTierSetting, bench_by_tier
from ragcache.bench.disk import bench_disk
from ragcache.bench.hit_rate import bench_hit_rate
from ragcache.bench.ledger import bench_ledger
from ragcache.bench.machine import describe_machine
from ragcache.bench.quantised import bench_quantised
from ragcache.bench.shapes import LlamaShape
from ragcache.bench.victims import bench_victims
from ragcache.bench.workload import ZipfWorkload
from ragcache.models import load_model

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class TiersSetting:
    """folder: where blobs are written for a while; None for the system's temporary folder.
    handbook: documents with questions, for the answers from quantised states."""

    shape: LlamaShape = LlamaShape()
    module_tokens: int = 1024
    blobs: int = 16
    disk_runs: int = 9
    by_tier: ByTierSetting = ByTierSetting()
    entries: int = 100_000
    workload: ZipfWorkload = ZipfWorkload()
    questions: int = 48
    handbook: Path = Path("examples/handbook")
    folder: Path | None = None

    @property
    def module(self) -> tuple[int, int, int, int]:
        """[L, Hkv, S, D] of a module's keys."""
        shape = self.shape
        return (shape.num_layers, shape.num_kv_heads, self.module_tokens, shape.head_dim)


def bench_tiers(
    setting: TiersSetting | None = None, progress: Progress = lambda _: None
) -> dict[str, Any]:
    """Runs every part in turn and returns what each reports, flat, with its details.

    disk_bandwidth_share: states read from disk into the host tier and verified, against reading the
    same bytes plainly, with a cold page cache where the system drops it.
    ttft_by_tier: seconds to the first token with the modules in each tier, and `computed`.
    ledger_ms_p50: the ledger's part of a request, with as many modules as entries; open_s: opening
    such a store. victims_ms: choosing victims among all entries, under the slowest policy.
    hit_rate: by policy.
    """
    setting = setting or TiersSetting()
    result: dict[str, Any] = {}
    for part in (_disk, _by_tier, _victims, _ledger, _hit_rate, _quantised):
        result |= part(setting, progress)
    return result | {"setting": asdict(setting), "machine": describe_machine()}


def _disk(setting: TiersSetting, progress: Progress) -> dict[str, Any]:
    progress("reading blobs from disk")
    with tempfile.TemporaryDirectory(prefix="ragcache-bench-", dir=setting.folder) as folder:
        disk = bench_disk(Path(folder), setting.blobs, setting.module, setting.disk_runs)
    state = disk["cold"] if disk["dropped"] else disk["warm"]
    return {"disk_bandwidth_share": state["host_share"], "disk": disk}


def _by_tier(setting: TiersSetting, progress: Progress) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="ragcache-bench-", dir=setting.folder) as folder:
        return bench_by_tier(Path(folder), setting.shape, setting.by_tier, progress)


def _victims(setting: TiersSetting, progress: Progress) -> dict[str, Any]:
    progress(f"choosing victims among {setting.entries:,} entries")
    medians = bench_victims(setting.entries)
    return {"victims_ms": max(medians.values()), "victims": medians}


def _ledger(setting: TiersSetting, progress: Progress) -> dict[str, Any]:
    progress(f"opening a store of {setting.entries:,} modules")
    with tempfile.TemporaryDirectory(prefix="ragcache-bench-", dir=setting.folder) as folder:
        return bench_ledger(Path(folder), setting.entries)


def _hit_rate(setting: TiersSetting, progress: Progress) -> dict[str, Any]:
    progress(f"{setting.workload.prompts:,} prompts over {setting.workload.documents:,} documents")
    return bench_hit_rate(setting.workload)


def _quantised(setting: TiersSetting, progress: Progress) -> dict[str, Any]:
    return {
        "quantised": bench_quantised(load_model(), setting.handbook, setting.questions, progress)
    }
