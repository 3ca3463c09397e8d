"""`ragcache bench`."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.table import Table

from ragcache_api.cli import bench_tiers
from ragcache_api.cli.console import JsonOption, console, errors, print_json

app = typer.Typer(
    help="Measure, as ratios of things run side by side in one process.", no_args_is_help=True
)


@app.callback()
def bench() -> None:
    """Measure, as ratios of things run side by side in one process."""


@app.command("ttft")
def ttft(
    runs: Annotated[int, typer.Option(help="Runs of the cached sides.")] = 9,
    as_json: JsonOption = False,
) -> None:
    """Time to first token: ordinary prefill, concatenated states, segments."""
    from ragcache.bench.ttft import TtftSetting, bench_ttft

    with errors.status("starting") as status:
        result = bench_ttft(TtftSetting(cached_runs=runs), status.update)
    if as_json:
        print_json(result)
        return
    table = Table(box=None, header_style="bold", padding=(0, 2, 0, 0))
    for column in ("way", "seconds to first token", "segments are"):
        table.add_column(column)
    seconds = result["seconds"]
    rows = (
        ("ordinary prefill", "prefill", f"{result['ratio_to_prefill']:.1f}x sooner"),
        ("states concatenated", "concat", f"{result['ratio_to_concat']:.2f}x sooner"),
        ("segments", "cached", ""),
        ("arithmetic limit", "limit", f"at {100 * result['share_of_limit']:.0f}% of it"),
    )
    for way, key, comparison in rows:
        table.add_row(way, f"{seconds[key]:.3f}", comparison)
    console.print(table)


@app.command("pml")
def pml(
    modules: Annotated[int, typer.Option(min=200, help="Modules of 500 characters.")] = 10_000,
    as_json: JsonOption = False,
) -> None:
    """The language: parsing and laying out a large schema, resolving prompts against it."""
    from ragcache.bench.pml import PmlSetting, bench_pml

    with errors.status("starting") as status:
        result = bench_pml(PmlSetting(modules=modules), status.update)
    if as_json:
        print_json(result)
        return
    table = Table(box=None, header_style="bold", padding=(0, 2, 0, 0))
    for column in (f"{modules:,} modules, {result['characters']:,} characters", "time"):
        table.add_column(column)
    table.add_row("schema: parse and lay out", f"{result['parse_layout_s']:.2f} s")
    table.add_row("half of it", f"{result['parse_layout_half_s']:.2f} s")
    table.add_row("prompt: parse", f"{result['parse_prompt_ms']:.2f} ms")
    table.add_row("prompt: resolve", f"{result['resolve_ms']:.2f} ms")
    table.add_row("the slowest of them", f"{result['resolve_worst_ms']:.2f} ms")
    console.print(table)


app.command("tiers")(bench_tiers.tiers)
