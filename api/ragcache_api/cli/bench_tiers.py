"""`ragcache bench tiers`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from ragcache_api.cli.console import binary_size, console, errors, plain_table


def tiers(
    handbook: Annotated[
        Path, typer.Option(help="Documents with questions.jsonl.", show_default=True)
    ] = Path("examples/handbook"),
    entries: Annotated[
        int, typer.Option(min=1, help="Modules in the ledger, and entries to choose victims among.")
    ] = 100_000,
    prompts: Annotated[int, typer.Option(min=1, help="Prompts of the Zipf workload.")] = 10_000,
    questions: Annotated[int, typer.Option(min=1, help="Questions to quantised states.")] = 48,
    blobs: Annotated[int, typer.Option(min=1, help="Modules of 1,024 tokens on disk.")] = 16,
    folder: Annotated[Path | None, typer.Option(help="A folder on the disk to measure.")] = None,
    json_file: Annotated[
        Path | None,
        typer.Option("--json", metavar="FILE", help="Write the figures here, as JSON."),
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option("--plot", metavar="FILE", help="Draw a plot: .png, .svg or .pdf."),
    ] = None,
) -> None:
    """The store: disk to ready, first tokens by tier, ledger, victims, hit rates, eight bits."""
    from ragcache.bench.tiers import TiersSetting, bench_tiers
    from ragcache.bench.workload import ZipfWorkload

    setting = TiersSetting(
        blobs=blobs, entries=entries, workload=ZipfWorkload(prompts=prompts),
        questions=questions, handbook=handbook, folder=folder,
    )  # fmt: skip
    with errors.status("starting") as status:
        result = bench_tiers(setting, status.update)
    for show in (_show_disk, _show_first_tokens, _show_break_even, _show_ledger):
        show(result)
        console.print()
    _show_policies(result)
    console.print()
    _show_quantised(result)
    if json_file is not None:
        json_file.write_text(json.dumps(result, indent=2, default=str) + "\n", encoding="utf-8")
    if plot is not None:
        from ragcache.bench.plot import plot_tiers

        plot_tiers(result, plot)


def _show_disk(result: dict[str, Any]) -> None:
    disk = result["disk"]
    table = plain_table("from disk", "page cache cold", "of plain", "warm", "of plain")
    for way in ("plain", "mapped", "host"):
        cells = []
        for state in ("cold", "warm"):
            share = disk[state].get(f"{way}_share")
            cells.append(f"{disk[state][way] / 1e9:.2f} GB/s")
            cells.append("" if share is None else f"{100 * share:.0f}%")
        table.add_row(way, *cells)
    console.print(table)
    if not disk["dropped"]:
        console.print("[dim]the system did not drop its page cache: cold is warm here[/]")


def _show_first_tokens(result: dict[str, Any]) -> None:
    from ragcache.planning import format_seconds

    ttft, ready = result["ttft_by_tier"], result["by_tier"]["ready_s"]
    table = plain_table("modules in", "ready in", "first token in", "sooner than computed")
    for tier, seconds in ttft.items():
        states = format_seconds(ready[tier]) if tier in ready else ""
        sooner = f"{ttft['computed'] / seconds:.1f}x" if tier in ready else ""
        table.add_row(tier if tier in ready else "no tier", states, format_seconds(seconds), sooner)
    console.print(table)


def _show_break_even(result: dict[str, Any]) -> None:
    from ragcache.planning import format_bandwidth, format_seconds

    details = result["by_tier"]
    even = details["break_even_tokens"]
    columns = ("a module of", "bytes", "computed", *even, "break-even")
    table = plain_table(*columns)
    for row in details["lengths"]:
        times = [format_seconds(row[way]) for way in ("computed", *even)]
        speed = format_bandwidth(row["break_even_bandwidth"])
        table.add_row(f"{row['tokens']} tokens", binary_size(row["nbytes"]), *times, speed)
    shortest = details["lengths"][0]["tokens"]
    froms = [_from(tokens, shortest) for tokens in even.values()]
    table.add_row("quicker", "", "", *froms, "", style="dim")
    console.print(table)


def _from(tokens: float | None, shortest: int) -> str:
    if tokens is None:
        return "at no length"
    return "at each" if tokens <= shortest else f"from {tokens:.0f}"


def _show_ledger(result: dict[str, Any]) -> None:
    console.print(
        f"a store of {result['setting']['entries']:,} modules opens in {result['open_s']:.1f} s; "
        f"its ledger takes {result['ledger_ms_p50']:.2f} ms of a request"
    )


def _show_policies(result: dict[str, Any]) -> None:
    table = plain_table("cache", "documents found", "encoding saved", "victims chosen in")
    for policy, rate in result["hit_rate"].items():
        saved, chosen = result["seconds_saved"].get(policy), result["victims"].get(policy)
        table.add_row(
            policy.replace("_", ", "),
            f"{100 * rate:.1f}%",
            "" if saved is None else f"{100 * saved:.1f}%",
            "" if chosen is None else f"{chosen:.1f} ms",
        )
    console.print(table)


def _show_quantised(result: dict[str, Any]) -> None:
    table = plain_table("kept as", "bytes", "error of keys", "of values", "answers begin alike")
    for kind in ("int8", "fp8"):
        row = result["quantised"][kind]
        shares = ("bytes_share", "keys_error", "values_error", "first_token_agreement")
        table.add_row(kind, *(f"{100 * row[share]:.2f}%" for share in shares))
    console.print(table)
