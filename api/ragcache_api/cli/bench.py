"""`ragcache bench`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table
from typer.core import TyperCommand

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


class _JsonFile(TyperCommand):
    """`--json FILE` writes a file, `--json` alone prints."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if "--json" in args:
            place = args.index("--json") + 1
            following = args[place : place + 1]
            if following != ["-"] and (not following or following[0].startswith("-")):
                args.insert(place, "-")
        return super().parse_args(ctx, args)


@app.command("tiers", cls=_JsonFile)
def tiers(
    handbook: Annotated[
        Path, typer.Option(help="Documents with questions.jsonl.", show_default=True)
    ] = Path("examples/handbook"),
    entries: Annotated[int, typer.Option(min=1, help="Entries to choose victims among.")] = 100_000,
    prompts: Annotated[int, typer.Option(min=1, help="Prompts of the Zipf workload.")] = 10_000,
    questions: Annotated[int, typer.Option(min=1, help="Questions to quantised states.")] = 48,
    blobs: Annotated[int, typer.Option(min=1, help="Modules of 1,024 tokens on disk.")] = 16,
    folder: Annotated[Path | None, typer.Option(help="A folder on the disk to measure.")] = None,
    json_file: Annotated[
        str | None, typer.Option("--json", metavar="[FILE]", help="Print JSON, or write it.")
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw a picture into this file.")] = None,
) -> None:
    """The store: disk to ready, choosing victims, hit rates, states in eight bits."""
    from ragcache.bench.tiers import TiersSetting, bench_tiers
    from ragcache.bench.workload import ZipfWorkload

    setting = TiersSetting(
        blobs=blobs, entries=entries, workload=ZipfWorkload(prompts=prompts),
        questions=questions, handbook=handbook, folder=folder,
    )  # fmt: skip
    with errors.status("starting") as status:
        result = bench_tiers(setting, status.update)
    if plot is not None:
        from ragcache.bench.plot import plot_tiers

        plot_tiers(result, plot)
    if json_file == "-":
        print_json(result)
        return
    if json_file is not None:
        text = json.dumps(result, indent=2, ensure_ascii=False, default=str)
        Path(json_file).write_text(text + "\n", encoding="utf-8")
    _show_tiers(result)


def _show_tiers(result: dict[str, Any]) -> None:
    _show_disk(result)
    table = Table(box=None, header_style="bold", padding=(0, 2, 0, 0))
    for column in ("cache", "documents found", "encoding saved", "victims chosen in"):
        table.add_column(column, justify="left" if column == "cache" else "right")
    for policy, rate in result["hit_rate"].items():
        saved, chosen = result["seconds_saved"].get(policy), result["victims"].get(policy)
        table.add_row(
            policy.replace("_", ", "),
            f"{100 * rate:.1f} %",
            "" if saved is None else f"{100 * saved:.1f} %",
            "" if chosen is None else f"{chosen:.1f} ms",
        )
    console.print(table)
    console.print()
    console.print(
        f"a store of {result['setting']['entries']:,} modules opens in {result['open_s']:.1f} s; "
        f"its ledger takes {result['ledger_ms_p50']:.2f} ms of a request"
    )
    console.print()
    table = Table(box=None, header_style="bold", padding=(0, 2, 0, 0))
    for column in ("kept as", "bytes", "error of keys", "of values", "answers begin alike"):
        table.add_column(column, justify="left" if column == "kept as" else "right")
    for kind in ("int8", "fp8"):
        row = result["quantised"][kind]
        shares = ("bytes_share", "keys_error", "values_error", "first_token_agreement")
        table.add_row(kind, *(f"{100 * row[share]:.2f} %" for share in shares))
    console.print(table)


def _show_disk(result: dict[str, Any]) -> None:
    disk = result["disk"]
    table = Table(box=None, header_style="bold", padding=(0, 2, 0, 0))
    for column in ("from disk", "page cache cold", "of plain", "warm", "of plain"):
        table.add_column(column, justify="left" if column == "from disk" else "right")
    for way in ("plain", "mapped", "host"):
        cells = []
        for state in ("cold", "warm"):
            share = disk[state].get(f"{way}_share")
            cells.append(f"{disk[state][way] / 1e9:.2f} GB/s")
            cells.append("" if share is None else f"{100 * share:.0f} %")
        table.add_row(way, *cells)
    console.print(table)
    if not disk["dropped"]:
        console.print("the system did not drop its page cache: cold is warm here")
    console.print()
