"""`ragcache bench`."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from ragcache_api.cli import bench_http, bench_langchain, bench_tiers
from ragcache_api.cli.console import console, errors

app = typer.Typer(
    help="Measure, as ratios of things run side by side in one process.", no_args_is_help=True
)

JsonFile = Annotated[
    Path | None, typer.Option("--json", metavar="FILE", help="Write the figures here, as JSON.")
]
PlotFile = Annotated[
    Path | None, typer.Option("--plot", metavar="FILE", help="Draw a plot: .png, .svg or .pdf.")
]
DeviceOption = Annotated[str, typer.Option(help="cpu, or cuda.")]

Run = Callable[[Callable[[str], None]], dict[str, Any]]


@app.callback()
def bench() -> None:
    """Measure, as ratios of things run side by side in one process."""


@app.command("ttft")
def ttft(
    runs: Annotated[int, typer.Option(help="Runs of the cached sides.")] = 9,
    device: DeviceOption = "cpu",
    json_file: JsonFile = None,
) -> None:
    """Time to first token: ordinary prefill, concatenated states, segments."""
    from ragcache.bench.ttft import TtftSetting, bench_ttft

    result = _measured(
        lambda report: bench_ttft(TtftSetting(cached_runs=runs, device=device), report)
    )
    seconds = result["seconds"]
    rows = (
        ("ordinary prefill", "prefill", f"{result['ratio_to_prefill']:.1f}x sooner"),
        ("states concatenated", "concat", f"{result['ratio_to_concat']:.2f}x sooner"),
        ("segments", "cached", ""),
        ("arithmetic limit", "limit", f"at {100 * result['share_of_limit']:.0f}% of it"),
    )
    _print_table(
        ("way", "seconds to first token", "segments are"),
        [(way, f"{seconds[key]:.3f}", comparison) for way, key, comparison in rows],
    )
    _write(result, json_file)


@app.command("decode")
def decode(
    requests: Annotated[int, typer.Option(min=1, help="Requests that decode together.")] = 16,
    device: DeviceOption = "cpu",
    json_file: JsonFile = None,
    plot: PlotFile = None,
) -> None:
    """Decoding over shared documents: segments, copies, and with the attention left out."""
    from ragcache.bench.decode import DecodeSetting, bench_decode

    setting = DecodeSetting(requests=requests, device=device)
    result = _measured(lambda report: bench_decode(setting, report))
    rows = [
        ("of `generate` with copies", f"{result['ratio_to_copies']:.1f}x"),
        ("the same, every query head with its key head", f"{result['ratio_to_copies_mha']:.1f}x"),
        ("of the rate with the attention left out", f"{result['share_of_ceiling']:.2f}"),
        ("of `generate` where nothing is shared", f"{result['ratio_unshared']:.2f}x"),
        ("KV bytes over one copy and private tokens", f"{result['kv_bytes_ratio']:.2f}"),
        ("scheduling, of a step", f"{100 * result['scheduler_share']:.1f}%"),
    ]
    rate = result["shared"]["tokens_per_second"]
    _print_table((f"{requests} requests, {rate:.0f} tokens a second", ""), rows)
    _print_table(
        ("attention alone: batch", "shared", "speedup", "theory", "measured over theory"),
        [
            (
                str(row["batch"]),
                str(row["shared"]),
                f"{row['speedup']:.1f}x",
                f"{row['theory']:.1f}x",
                f"{row['measured_over_theory']:.2f}",
            )
            for row in result["relay"]
        ],
    )
    _write(result, json_file)
    if plot is not None:
        from ragcache.bench.plot import plot_decode

        plot_decode(result, plot)


@app.command("serve")
def serve(
    requests: Annotated[int, typer.Option(min=4, help="Requests a rate, at least.")] = 24,
    device: DeviceOption = "cpu",
    json_file: JsonFile = None,
    plot: PlotFile = None,
) -> None:
    """Poisson arrivals over 64 documents, at growing rates, cached and in mode exact."""
    from ragcache.bench.serve import ServeSetting, bench_serve

    setting = ServeSetting(requests=requests, device=device)
    result = _measured(lambda report: bench_serve(setting, report))
    columns = ("mode", "requests/s", "served/s", "TTFT p50", "TTFT p99", "s a token")
    rows = [
        (
            mode,
            f"{load['rate']:.2f}",
            f"{load['throughput']:.2f}",
            f"{load['ttft_p50']:.3f} s",
            f"{load['ttft_p99']:.3f} s",
            f"{load['normalised']:.4f}",
        )
        for mode, loads in result["loads"].items()
        for load in loads
    ]
    _print_table(columns, rows)
    knee = result["knee"]
    console.print(
        f"knee: {knee['cached']:.2f} requests a second, {result['knee_ratio_to_exact']:.1f}x of "
        f"exact's {knee['exact']:.2f}"
    )
    _write(result, json_file)
    if plot is not None:
        from ragcache.bench.plot import plot_serve

        plot_serve(result, plot)


@app.command("pml")
def pml(
    modules: Annotated[int, typer.Option(min=200, help="Modules of 500 characters.")] = 10_000,
    json_file: JsonFile = None,
) -> None:
    """The language: parsing and laying out a large schema, resolving prompts against it."""
    from ragcache.bench.pml import PmlSetting, bench_pml

    result = _measured(lambda report: bench_pml(PmlSetting(modules=modules), report))
    _print_table(
        (f"{modules:,} modules, {result['characters']:,} characters", "time"),
        [
            ("schema: parse and lay out", f"{result['parse_layout_s']:.2f} s"),
            ("half of it", f"{result['parse_layout_half_s']:.2f} s"),
            ("prompt: parse", f"{result['parse_prompt_ms']:.2f} ms"),
            ("prompt: resolve", f"{result['resolve_ms']:.2f} ms"),
            ("the slowest of them", f"{result['resolve_worst_ms']:.2f} ms"),
        ],
    )
    _write(result, json_file)


def _measured(run: Run) -> dict[str, Any]:
    with errors.status("starting") as status:
        return run(status.update)


def _print_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    table = Table(box=None, header_style="bold", padding=(0, 2, 0, 0))
    for column in columns:
        table.add_column(column)
    for row in rows:
        table.add_row(*row)
    console.print(table)


def _write(result: dict[str, Any], file: Path | None) -> None:
    if file is not None:
        file.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


app.command("tiers")(bench_tiers.tiers)
app.command("langchain")(bench_langchain.langchain)
app.command("http")(bench_http.http)
