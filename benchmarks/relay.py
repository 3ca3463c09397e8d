"""Attention over a shared run, beside what RelayAttention's arithmetic promises.

python benchmarks/relay.py --json FILE --plot FILE
"""

from __future__ import annotations

import statistics
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import typer
from harness import (
    BenchDTypeOption,
    JsonFile,
    PlotFile,
    describe_machine,
    new_figure,
    plain_table,
    print_figures,
    seconds,
)
from torch import Tensor
from torch.nn import functional as F

from ragcache.attention import AttentionMetadata, PagedQueries, SharedKV, SharedQueries, backend_for
from ragcache.machine import product_dtype
from ragcache.models.dtype import parse_dtype


@dataclass(frozen=True, slots=True)
class RelaySetting:
    """One layer: batches over a shared run, each request with `own` tokens besides."""

    batches: tuple[int, ...] = (4, 16, 32)
    shared: tuple[int, ...] = (512, 1024, 2048, 4096)
    own: int = 128
    num_heads: int = 14
    num_kv_heads: int = 14
    head_dim: int = 64
    runs: int = 15
    dtype: str = "auto"

    @property
    def computes_in(self) -> torch.dtype:
        """`auto` is bfloat16, or float32 where products in bfloat16 are slow."""
        return parse_dtype(self.dtype) or product_dtype(torch.bfloat16)


def bench_relay(setting: RelaySetting) -> list[dict[str, Any]]:
    """For every batch b and shared length s: the speedup over attention in which every request
    reads its own copy, and that over the theory (s+c+2)/(s/b+c+7) (RelayAttention §3.3, eq. 9)."""
    rows = []
    for batch in setting.batches:
        for shared in setting.shared:
            metadata, copies = _plan(setting, batch, shared)
            ours, own = _times(setting, metadata, copies, batch)
            theory = (shared + setting.own + 2) / (shared / batch + setting.own + 7)
            rows.append(
                {
                    "batch": batch,
                    "shared": shared,
                    "speedup": own / ours,
                    "theory": theory,
                    "measured_over_theory": own / ours / theory,
                    "seconds": {"segments": ours, "copies": own},
                }
            )
    return rows


def _plan(
    setting: RelaySetting, batch: int, shared: int
) -> tuple[AttentionMetadata, tuple[Tensor, Tensor]]:
    """Metadata of a decoding step over shared states, and [B, Hkv, S, D] copies of them."""
    torch.manual_seed(0)
    heads, dim, own = setting.num_kv_heads, setting.head_dim, setting.own

    def random(*shape: int) -> Tensor:
        return torch.randn(shape).to(setting.computes_in)

    run, pool = (random(1, heads, shared, dim) for _ in range(2)), batch * own
    keys, values = run
    rows = torch.arange(batch)
    pages = PagedQueries(
        random(1, heads, pool, dim),
        random(1, heads, pool, dim),
        own,
        rows,
        rows[:, None],
        torch.zeros(batch, own, dtype=setting.computes_in),
    )
    metadata = AttentionMetadata(
        SharedQueries(rows), (SharedKV(keys, values, 0, batch),), (), pages, (), rows[None]
    )
    whole = (batch, heads, shared + own, dim)
    return metadata, (random(*whole), random(*whole))


def _times(
    setting: RelaySetting,
    metadata: AttentionMetadata,
    copies: tuple[Tensor, Tensor],
    batch: int,
) -> tuple[float, float]:
    """Median seconds of the metadata and of attention over copies, in turn."""
    torch.manual_seed(1)
    heads, dim = setting.num_heads, setting.head_dim
    dtype = setting.computes_in
    query = torch.randn(heads, batch, dim).to(dtype)
    new = torch.randn(setting.num_kv_heads, batch, dim).to(dtype)
    backend = backend_for(torch.device("cpu"))
    scale = dim**-0.5

    def ours() -> None:
        backend.attend(metadata, 0, query, new, new, scale=scale)

    def own() -> None:
        F.scaled_dot_product_attention(
            query.transpose(0, 1)[:, :, None], *copies, scale=scale, enable_gqa=True
        )

    times: tuple[list[float], list[float]] = ([], [])
    with torch.inference_mode():
        ours()
        own()
        for _ in range(setting.runs):
            times[0].append(seconds(ours))
            times[1].append(seconds(own))
    return statistics.median(times[0]), statistics.median(times[1])


def plot_relay(result: dict[str, Any], file: Path) -> None:
    """Speedup against the length of the run."""
    figure, [axes] = new_figure(1)
    by_batch: dict[int, list[dict[str, Any]]] = {}
    for row in result["relay"]:
        by_batch.setdefault(row["batch"], []).append(row)
    for batch, rows in by_batch.items():
        shared = [row["shared"] for row in rows]
        [line] = axes.plot(shared, [row["speedup"] for row in rows], "o-", label=f"batch {batch}")
        theory = [row["theory"] for row in rows]
        axes.plot(shared, theory, "--", color=line.get_color(), alpha=0.6)
    axes.set_xlabel("shared tokens")
    axes.set_ylabel("speedup of attention (dashed: theory)")
    axes.legend(frameon=False)
    figure.savefig(file)


def main(
    dtype: BenchDTypeOption = "auto", json_file: JsonFile = None, plot: PlotFile = None
) -> None:
    """Attention of a decoding step over a shared run, beside attention over copies."""
    setting = RelaySetting(dtype=dtype)
    result: dict[str, Any] = {
        "relay": bench_relay(setting),
        "setting": asdict(setting),
        "machine": describe_machine(),
    }
    table = plain_table("batch", "shared", "speedup", "theory", "measured over theory")
    for row in result["relay"]:
        table.add_row(
            str(row["batch"]), str(row["shared"]), f"{row['speedup']:.1f}x",
            f"{row['theory']:.1f}x", f"{row['measured_over_theory']:.2f}",
        )  # fmt: skip
    print_figures([table], result, json_file)
    if plot is not None:
        plot_relay(result, plot)


if __name__ == "__main__":
    typer.run(main)
