"""`ragcache bench`: measurements as tables, and as JSON and plots in files."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from ragcache_api.cli import console as ui

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

Benchmark = Callable[[Callable[[str], None]], dict[str, Any]]


def run_benchmark(run: Benchmark) -> dict[str, Any]:
    """Runs a benchmark with its progress on standard error."""
    with ui.errors.status("starting") as status:
        return run(status.update)


def print_figures(
    parts: Sequence[Table | str], result: dict[str, Any], json_file: Path | None
) -> None:
    """Prints tables and sentences, and writes the figures if a file is given."""
    for number, each in enumerate(parts):
        if number:
            ui.console.print()
        ui.console.print(each)
    if json_file is not None:
        text = json.dumps(result, indent=2, default=str) + "\n"
        json_file.write_text(text, encoding="utf-8")


@app.command("ttft")
def ttft(
    runs: Annotated[int, typer.Option(help="Runs of the cached sides.")] = 9,
    device: DeviceOption = "cpu",
    json_file: JsonFile = None,
) -> None:
    """Time to first token: ordinary prefill, concatenated states, segments."""
    from ragcache.bench.ttft import TtftSetting, bench_ttft

    setting = TtftSetting(cached_runs=runs, device=device)
    result = run_benchmark(lambda progress: bench_ttft(setting, progress))
    seconds = result["seconds"]
    ways = (
        ("ordinary prefill", "prefill", f"{result['ratio_to_prefill']:.1f}x sooner"),
        ("states concatenated", "concat", f"{result['ratio_to_concat']:.2f}x sooner"),
        ("segments", "cached", ""),
        ("arithmetic limit", "limit", f"at {100 * result['share_of_limit']:.0f}% of it"),
    )
    rows = [(way, f"{seconds[key]:.3f}", comparison) for way, key, comparison in ways]
    table = ui.plain_table("way", "seconds to first token", "segments are", rows=rows)
    print_figures([table], result, json_file)


@app.command("decode")
def decode(
    requests: Annotated[int, typer.Option(min=1, help="Requests that decode together.")] = 16,
    device: DeviceOption = "cpu",
    json_file: JsonFile = None,
    plot: PlotFile = None,
) -> None:
    """Decoding over shared documents: segments, copies, and with the attention left out."""
    from ragcache.bench.decode import DecodeSetting, bench_decode, plot_decode

    setting = DecodeSetting(requests=requests, device=device)
    result = run_benchmark(lambda progress: bench_decode(setting, progress))
    rows = [
        ("of `generate` with copies", f"{result['ratio_to_copies']:.1f}x"),
        ("the same, every query head with its key head", f"{result['ratio_to_copies_mha']:.1f}x"),
        ("of the rate with the attention left out", f"{result['share_of_ceiling']:.2f}"),
        ("of `generate` where nothing is shared", f"{result['ratio_unshared']:.2f}x"),
        ("KV bytes over one copy and private tokens", f"{result['kv_bytes_ratio']:.2f}"),
        ("scheduling, of a step", f"{100 * result['scheduler_share']:.1f}%"),
    ]
    rate = result["shared"]["tokens_per_second"]
    table = ui.plain_table(f"{requests} requests, {rate:.0f} tokens a second", "", rows=rows)
    print_figures([table], result, json_file)
    if plot is not None:
        plot_decode(result, plot)


@app.command("serve")
def serve(
    requests: Annotated[int, typer.Option(min=4, help="Requests a rate, at least.")] = 24,
    device: DeviceOption = "cpu",
    json_file: JsonFile = None,
    plot: PlotFile = None,
) -> None:
    """Poisson arrivals over 64 documents, at growing rates, cached and in mode exact."""
    from ragcache.bench.serve import ServeSetting, bench_serve, plot_serve

    setting = ServeSetting(requests=requests, device=device)
    result = run_benchmark(lambda progress: bench_serve(setting, progress))
    table = ui.plain_table("mode", "requests/s", "served/s", "TTFT p50", "TTFT p99", "s a token")
    for mode, loads in result["loads"].items():
        for load in loads:
            table.add_row(
                mode, f"{load['rate']:.2f}", f"{load['throughput']:.2f}",
                f"{load['ttft_p50']:.3f} s", f"{load['ttft_p99']:.3f} s",
                f"{load['normalized']:.4f}",
            )  # fmt: skip
    knee, ratio = result["knee"], f"{result['knee_ratio_to_exact']:.1f}x"
    said = f"knee: {knee['cached']:.2f} requests a second, {ratio} of exact's {knee['exact']:.2f}"
    print_figures([table, said], result, json_file)
    if plot is not None:
        plot_serve(result, plot)


@app.command("tiers")
def tiers(
    entries: Annotated[int, typer.Option(min=1, help="Modules in the ledger.")] = 100_000,
    blobs: Annotated[int, typer.Option(min=1, help="Modules of 1,024 tokens on disk.")] = 16,
    folder: Annotated[Path | None, typer.Option(help="A folder on the disk to measure.")] = None,
    json_file: JsonFile = None,
    plot: PlotFile = None,
) -> None:
    """The store: disk to ready states, first tokens by tier, the ledger."""
    from ragcache.bench.tiers import TiersSetting, bench_tiers, plot_tiers

    setting = TiersSetting(blobs=blobs, entries=entries, folder=folder)
    result = run_benchmark(lambda progress: bench_tiers(setting, progress))
    parts = (_disk_table, _first_token_table, _break_even_table, _ledger_sentence)
    print_figures([part(result) for part in parts], result, json_file)
    if not result["disk"]["dropped"]:
        ui.console.print("[dim]the system did not drop its page cache: cold is warm here[/]")
    if plot is not None:
        plot_tiers(result, plot)


def _disk_table(result: dict[str, Any]) -> Table:
    disk = result["disk"]
    table = ui.plain_table("from disk", "page cache cold", "of plain", "warm", "of plain")
    for way in ("plain", "mapped", "host"):
        cells = []
        for state in ("cold", "warm"):
            share = disk[state].get(f"{way}_share")
            cells.append(f"{disk[state][way] / 1e9:.2f} GB/s")
            cells.append("" if share is None else f"{100 * share:.0f}%")
        table.add_row(way, *cells)
    return table


def _first_token_table(result: dict[str, Any]) -> Table:
    from ragcache.planning import format_seconds

    ttft, ready = result["ttft_by_tier"], result["by_tier"]["ready_s"]
    table = ui.plain_table("modules in", "ready in", "first token in", "sooner than computed")
    for tier, seconds in ttft.items():
        states = format_seconds(ready[tier]) if tier in ready else ""
        sooner = f"{ttft['computed'] / seconds:.1f}x" if tier in ready else ""
        table.add_row(tier if tier in ready else "no tier", states, format_seconds(seconds), sooner)
    return table


def _break_even_table(result: dict[str, Any]) -> Table:
    from ragcache.planning import format_bandwidth, format_seconds

    details = result["by_tier"]
    even = details["break_even_tokens"]
    table = ui.plain_table("a module of", "bytes", "computed", *even, "break-even")
    for row in details["lengths"]:
        times = [format_seconds(row[way]) for way in ("computed", *even)]
        speed = format_bandwidth(row["break_even_bandwidth"])
        table.add_row(f"{row['tokens']} tokens", ui.format_bytes(row["nbytes"]), *times, speed)
    shortest = details["lengths"][0]["tokens"]
    lengths = [ui.format_break_even(tokens, shortest) for tokens in even.values()]
    table.add_row("quicker", "", "", *lengths, "", style="dim")
    return table


def _ledger_sentence(result: dict[str, Any]) -> str:
    return (
        f"a store of {result['setting']['entries']:,} modules opens in {result['open_s']:.1f} s; "
        f"its ledger takes {result['ledger_ms_p50']:.2f} ms of a request"
    )
