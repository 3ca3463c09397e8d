"""`ragcache bench http`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from ragcache_api.cli.console import console, errors, plain_table


def http(
    runs: Annotated[int, typer.Option(min=2, help="First tokens of each side.")] = 60,
    streams: Annotated[int, typer.Option(min=1, help="Streams at once.")] = 32,
    rounds: Annotated[int, typer.Option(min=1, help="Of streams, four runs each.")] = 8,
    modules: Annotated[int, typer.Option(min=100, help="Modules to list.")] = 100_000,
    json_file: Annotated[
        Path | None,
        typer.Option("--json", metavar="FILE", help="Write the figures here, as JSON."),
    ] = None,
) -> None:
    """The service beside calls of the engine: first tokens, streams, and a long listing."""
    from ragcache_api.bench.http import HttpSetting, bench_http

    setting = HttpSetting(runs=runs, streams=streams, rounds=rounds, modules=modules)
    with errors.status("starting") as status:
        result = bench_http(setting, status.update)
    table = plain_table("over HTTP", "", "of the calls")
    table.add_row(
        "to the first token, more", f"{result['ttft_overhead_ms_p50']:.2f} ms",
        f"{result['ttft_called_ms_p50']:.1f} ms",
    )  # fmt: skip
    for model, suffix in (("six layers", ""), ("reader", "_reader")):
        low, high = result[f"throughput_share_interval{suffix}"]
        table.add_row(
            f"tokens a second, {streams} streams, {model}",
            f"{100 * result[f'throughput_share{suffix}']:.1f}% "
            f"({100 * low:.1f}% to {100 * high:.1f}%)",
            f"{result[f'called_tokens_per_second{suffix}']:.0f}",
        )
    table.add_row(f"a page of {modules:,} modules", f"{result['list_ms_p50']:.1f} ms", "")
    table.add_row(
        "first token of a text that another namespace has ingested",
        f"{result['foreign_ttft_ratio']:.2f}x", "of one that nobody has",
    )  # fmt: skip
    console.print(table)
    if json_file is not None:
        json_file.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
