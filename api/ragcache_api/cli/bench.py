"""`ragcache bench`."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.table import Table

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
