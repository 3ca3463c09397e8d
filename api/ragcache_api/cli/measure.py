"""Measuring commands: `ragcache bench` the speed, `ragcache plan` what caching a corpus takes."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from ragcache.errors import ConfigurationError, UnreadableDocument
from ragcache_api.cli import console as ui

if TYPE_CHECKING:
    from ragcache.bench.harness import LlamaShape
    from ragcache.models import LoadedModel
    from ragcache.planning import CachePlan, Corpus

bench_app = typer.Typer(
    help="Measure, as ratios of things run side by side in one process.", no_args_is_help=True
)

_PLOTS = (".png", ".svg", ".pdf")


def output_file(file: Path | None) -> Path | None:
    """The file that is written at the end. Raises `ConfigurationError`, at the beginning, where
    that is not possible."""
    if file is not None and (file.is_dir() or not file.absolute().parent.is_dir()):
        what = "it is a folder" if file.is_dir() else f"there is no folder {file.parent}"
        raise ConfigurationError(f"{file} cannot be written: {what}")
    return file


def _plot_file(file: Path | None) -> Path | None:
    if file is not None and file.suffix.lower() not in _PLOTS:
        raise ConfigurationError(f"{file} is no plot; its name ends with {', '.join(_PLOTS)}")
    return output_file(file)


JsonFile = Annotated[
    Path | None,
    typer.Option("--json", metavar="FILE", callback=output_file,
                 help="Write the figures here, as JSON."),
]  # fmt: skip
PlotFile = Annotated[
    Path | None,
    typer.Option("--plot", metavar="FILE", callback=_plot_file,
                 help="Draw a plot: .png, .svg or .pdf."),
]  # fmt: skip
DeviceOption = Annotated[
    str, typer.Option(help="cpu, or cuda: the table of the GPU backend (docs/gpu.md).")
]
ShapeOption = Annotated[str, typer.Option(help="On cuda: 7b, 8b, or both with a comma.")]
BenchDTypeOption = Annotated[
    str, typer.Option("--dtype", help="On cpu: what the model computes in; `auto` is the faster.")
]
CheckOption = Annotated[
    bool, typer.Option("--check", help="On cuda: exit 1 where a figure misses what it must be.")
]

Benchmark = Callable[[Callable[[str], None]], dict[str, Any]]
_KV_DTYPES = ("model", "fp8", "int8")


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


def print_gpu_table(
    parts: Sequence[str], device: str, shape: str, json_file: Path | None, check: bool
) -> None:
    """Runs parts of the GPU backend's table and prints it; see `print_table`."""
    from ragcache.bench.gpu.suite import SuiteRun
    from ragcache.bench.gpu.table import GpuWorkload

    shapes = named_shapes(shape)

    def run(progress: Callable[[str], None]) -> dict[str, Any]:
        return SuiteRun(shapes, parts, GpuWorkload(), device, progress).run()

    print_table(run_benchmark(run), json_file, check=check)


def named_shapes(names: str) -> dict[str, LlamaShape]:
    """Shapes by their names, with commas between. Raises `BadParameter` for one that is none."""
    from ragcache.bench.gpu.suite import shapes_named

    try:
        return shapes_named(names.split(","))
    except KeyError as error:
        raise typer.BadParameter(f"there is no shape {error}; give 7b or 8b") from error


def print_table(document: dict[str, Any], json_file: Path | None, *, check: bool) -> None:
    """Prints the GPU backend's table. Ends with 1 where a part failed, or with `check` where a must
    is missed."""
    from ragcache.bench.gpu.table import missed, render_text

    ui.console.print(render_text(document), markup=False, highlight=False, soft_wrap=True)
    print_figures([], document, json_file)
    if document["errors"] or (check and missed(document)):
        raise typer.Exit(1)


@bench_app.command("ttft")
def ttft(
    runs: Annotated[int, typer.Option(help="On cpu: runs of the cached sides.")] = 9,
    device: DeviceOption = "cpu",
    dtype: BenchDTypeOption = "auto",
    shape: ShapeOption = "7b,8b",
    check: CheckOption = False,
    json_file: JsonFile = None,
) -> None:
    """Time to first token: ordinary prefill, concatenated states, segments."""
    if device != "cpu":
        print_gpu_table(["ttft"], device, shape, json_file, check)
        return
    from ragcache.bench.ttft import TtftSetting, bench_ttft

    setting = TtftSetting(cached_runs=runs, device=device, dtype=dtype)
    result = run_benchmark(lambda progress: bench_ttft(setting, progress))
    seconds, processor = result["seconds"], result["processor"]["seconds"]
    ways = (
        ("ordinary prefill", "prefill", f"{result['ratio_to_prefill']:.1f}x sooner"),
        ("states concatenated", "concat", f"{result['ratio_to_concat']:.2f}x sooner"),
        ("segments", "cached", ""),
        ("arithmetic limit", "limit", f"at {100 * result['share_of_limit']:.0f}% of it"),
    )
    rows = [
        (way, f"{seconds[key]:.3f}", f"{processor[key]:.3f}", comparison)
        for way, key, comparison in ways
    ]
    columns = ("way", "seconds to first token", "of the processor", "segments are")
    table = ui.plain_table(*columns, rows=rows)
    print_figures([table], result, json_file)


@bench_app.command("decode")
def decode(
    requests: Annotated[int, typer.Option(min=1, help="On cpu: requests decoding together.")] = 16,
    device: DeviceOption = "cpu",
    dtype: BenchDTypeOption = "auto",
    shape: ShapeOption = "7b,8b",
    check: CheckOption = False,
    json_file: JsonFile = None,
    plot: PlotFile = None,
) -> None:
    """Decoding over shared documents: segments, copies, and with the attention left out."""
    if device != "cpu":
        print_gpu_table(["decode", "order", "attention"], device, shape, json_file, check)
        return
    from ragcache.bench.decode import DecodeSetting, bench_decode, plot_decode

    setting = DecodeSetting(requests=requests, device=device, dtype=dtype)
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


@bench_app.command("serve")
def serve(
    requests: Annotated[int, typer.Option(min=4, help="On cpu: requests a rate, at least.")] = 24,
    device: DeviceOption = "cpu",
    dtype: BenchDTypeOption = "auto",
    shape: ShapeOption = "7b,8b",
    check: CheckOption = False,
    json_file: JsonFile = None,
    plot: PlotFile = None,
) -> None:
    """Poisson arrivals over 64 documents, at growing rates, cached and in mode exact."""
    if device != "cpu":
        print_gpu_table(["encode", "serve"], device, shape, json_file, check)
        return
    from ragcache.bench.serve import ServeSetting, bench_serve, plot_serve

    setting = ServeSetting(requests=requests, device=device, dtype=dtype)
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


@bench_app.command("routing")
def routing(
    replicas: Annotated[int, typer.Option(min=2, help="Simulated replicas.")] = 8,
    zipf: Annotated[float, typer.Option(min=0, help="How skewed requests are.")] = 0.9,
    requests: Annotated[int, typer.Option(min=30, help="Requests of each replica.")] = 6000,
    documents: Annotated[
        Path | None, typer.Option(help="A folder of texts: simulate the questions over it instead.")
    ] = None,
    questions: Annotated[
        Path | None, typer.Option(help="Its questions, as for `ragcache eval`: JSON lines.")
    ] = None,
    json_file: JsonFile = None,
    plot: PlotFile = None,
) -> None:
    """Simulated replicas: memory hits and first tokens by the policy that routes requests."""
    from ragcache.bench.routing import (
        HALVES,
        bench_routing,
        plot_routing,
        question_workload,
        standard_workloads,
    )

    texts, asked = _texts_and_questions(documents, questions)
    if questions is None:
        workloads = standard_workloads(replicas, zipf, requests)
    else:
        workloads = {f"{questions.name}, 3 replicas": (question_workload(texts, asked), HALVES)}
    result = run_benchmark(lambda progress: bench_routing(workloads, progress))
    columns = ("policy", "device", "of ideal", "memory", "of ideal", "TTFT p50", "TTFT p99")
    parts: list[Table | str] = []
    for name, run in result["runs"].items():
        table = ui.plain_table(*columns)
        for policy, row in run["policies"].items():
            table.add_row(
                policy, f"{row['device']:.1%}", f"{row['device_of_ideal']:.2f}",
                f"{row['memory']:.1%}", f"{row['memory_of_ideal']:.2f}",
                f"{row['first_token_p50']:.3f} s", f"{row['first_token_p99']:.3f} s",
            )  # fmt: skip
        parts += [f"[bold]{name}[/]", table]
    print_figures(parts, result, json_file)
    if plot is not None:
        plot_routing(result, plot)


@bench_app.command("cluster")
def cluster(
    ledger: Annotated[str, typer.Option(help="A PostgreSQL database; schemas of it are used.")],
    part: Annotated[
        list[str] | None,
        typer.Option(help="Only this: encodings, topics, questions, kill, upgrade, throughput, "
                     "front; repeatable."),
    ] = None,
    replicas: Annotated[int, typer.Option(min=2, help="Replicas.")] = 3,
    seconds: Annotated[float, typer.Option(min=1, help="Of each load.")] = 45.0,
    requests: Annotated[int, typer.Option(min=30, help="For each rate of hits.")] = 600,
    documents: Annotated[
        Path | None, typer.Option(help="A folder of texts; else made-up ones.")
    ] = None,
    questions: Annotated[
        Path | None, typer.Option(help="Questions over it, as for `ragcache eval`: JSON lines.")
    ] = None,
    json_file: JsonFile = None,
) -> None:  # fmt: skip
    """Replicas on this machine behind their front: hits, lost replicas, upgrades, throughput."""
    from ragcache_api.cli.admin import check_ray

    check_ray()
    from ragcache_api.cluster.bench import PARTS, ClusterSetting, bench_cluster

    if unknown := set(part or ()) - set(PARTS):
        raise typer.BadParameter(f"no part {sorted(unknown)}; parts: {', '.join(PARTS)}")
    texts, asked = _texts_and_questions(documents, questions)
    setting = ClusterSetting(
        replicas, seconds=seconds, requests=requests, documents=texts, questions=asked
    )
    result = run_benchmark(
        lambda progress: bench_cluster(ledger, part or tuple(PARTS), setting, progress)
    )
    parts: list[Table | str] = []
    for name in filter(result.__contains__, PARTS):
        table = ui.plain_table(name, "")
        for figure, value in result[name].items():
            table.add_row(figure.replace("_", " "), _figure(value))
        parts.append(table)
    print_figures(parts, result, json_file)


def _figure(value: object) -> str:
    """A figure, or several with their names, as text."""
    if isinstance(value, dict):
        return ", ".join(f"{name} {_figure(each)}" for name, each in value.items())
    if isinstance(value, list):
        return ", ".join(map(_figure, value))
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def _texts_and_questions(
    documents: Path | None, questions: Path | None
) -> tuple[list[str], list[str]]:  # fmt: skip
    """The texts of a folder and what is asked about them; none where neither is given."""
    if (documents is None) != (questions is None):
        raise typer.BadParameter("give --documents and --questions, or neither")
    if documents is None or questions is None:
        return [], []
    from ragcache.documents import load_sources
    from ragcache.evaluation import load_dataset

    texts = [each.text for each in load_sources([documents]).documents]
    return texts, [each.question for each in load_dataset(questions).questions]


@bench_app.command("tiers")
def tiers(
    entries: Annotated[int, typer.Option(min=1, help="Modules in the ledger.")] = 100_000,
    blobs: Annotated[int, typer.Option(min=1, help="Modules of 1,024 tokens on disk.")] = 16,
    folder: Annotated[Path | None, typer.Option(help="A folder on the disk to measure.")] = None,
    device: DeviceOption = "cpu",
    dtype: BenchDTypeOption = "auto",
    shape: ShapeOption = "7b,8b",
    check: CheckOption = False,
    json_file: JsonFile = None,
    plot: PlotFile = None,
) -> None:
    """The store: disk to ready states, first tokens by tier, the ledger."""
    if device != "cpu":
        print_gpu_table(["tiers"], device, shape, json_file, check)
        return
    from ragcache.bench.tiers import ByTierSetting, TiersSetting, bench_tiers, plot_tiers

    by_tier = ByTierSetting(dtype=dtype)
    setting = TiersSetting(blobs=blobs, entries=entries, folder=folder, by_tier=by_tier)
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


def plan(
    paths: Annotated[
        list[Path] | None, typer.Argument(help="Text files, or folders of them.")
    ] = None,
    collection: Annotated[
        str | None, typer.Option("-c", "--collection", help="A collection of the state folder.")
    ] = None,
    state: ui.StateOption = ui.DEFAULT_STATE,
    model: ui.ModelOption = None,
    dtype: ui.DTypeOption = "auto",
    instruction: ui.InstructionOption = None,
    device: Annotated[str, typer.Option(help="cpu, or cuda.")] = "cpu",
    module_tokens: Annotated[int, typer.Option(min=1, help="The most tokens of a module.")] = 384,
    host_bytes: Annotated[str, typer.Option(help="The budget of the host tier.")] = "2GiB",
    device_bytes: Annotated[
        str | None, typer.Option(help="The budget of a device tier, if there is to be one.")
    ] = None,
    disk_bytes: Annotated[
        str | None, typer.Option(help="The budget of the disk; without it, what is free.")
    ] = None,
    sample: Annotated[
        int, typer.Option(min=1, max=64, help="How many modules to encode for the times.")
    ] = 6,
    as_json: ui.JsonOption = False,
) -> None:
    """Say what caching a corpus will take and bring, before it is ingested.

    The corpus is PATHS, or a collection that is stored. Nothing is changed.
    """
    if bool(paths) == (collection is not None):
        raise ConfigurationError("give either files and folders or --collection")
    ui.check_model(model)
    for path in paths or []:
        if not path.exists():
            raise UnreadableDocument(f"cannot read {path}: there is no such file or folder")
    import psutil

    from ragcache.planning import Budgets, advise, make_plan

    budgets = Budgets.parse(host_bytes, device_bytes, disk_bytes)
    with ui.errors.status("loading the model"):
        from ragcache.models import load_model

        loaded = load_model(model, device=device, dtype=dtype)
    corpus = _corpus(loaded, paths or [], collection, state, module_tokens)
    with ui.errors.status("measuring") as status:
        made = make_plan(
            loaded, corpus, budgets, state, sample=sample,
            instruction=instruction, progress=status.update,
        )  # fmt: skip
    advice = advise(made, psutil.virtual_memory().total)
    if as_json:
        ui.print_json(made.to_dict() | {"advice": advice})
    else:
        _print_plan(made, advice)


def _corpus(
    model: LoadedModel, paths: list[Path], collection: str | None, state: Path, module_tokens: int
) -> Corpus:
    from ragcache.db import Catalog
    from ragcache.planning import corpus_of_collection, corpus_of_sources

    with ui.progress_bar("reading the corpus") as progress:
        if collection is None:
            return corpus_of_sources(model, paths, module_tokens, progress)
        with ui.open_ledger(state) as database:
            catalog = Catalog(database, model.tokenizer_fingerprint, None)
            return corpus_of_collection(model, catalog, collection, progress)


def _print_plan(plan: CachePlan, advice: list[str]) -> None:
    ui.console.print(
        f"[bold]{escape(plan.model)}[/] ({plan.dtype}), {plan.documents:,} documents: "
        f"{plan.modules:,} modules of {plan.tokens:,} tokens, the longest {plan.longest:,}; "
        f"a preamble of {plan.preamble_tokens}\n"
    )
    _print_sizes(plan)
    _print_times(plan)
    ui.console.print(ui.plain_table(rows=[("•", escape(sentence)) for sentence in advice]))


def _print_sizes(plan: CachePlan) -> None:
    table = ui.plain_table("calculated", "kv_dtype", "budget", "the corpus", "of it fits", left=2)
    for size in plan.tiers:
        budget = "no limit" if size.budget_bytes is None else ui.format_bytes(size.budget_bytes)
        share = f"{100 * size.share:.3g}%"
        table.add_row(size.tier, size.kv_dtype, budget, ui.format_bytes(size.nbytes), share)
    ui.console.print(table)
    per_token = ", ".join(f"{kind} {plan.bytes_per_token[kind]:,}" for kind in _KV_DTYPES)
    ui.console.print(f"[dim]bytes per token: {per_token}[/]\n")


def _print_times(plan: CachePlan) -> None:
    from ragcache.planning import format_bandwidth, format_seconds

    table = ui.plain_table("measured", "computed in", *(f"loaded, {kind}" for kind in _KV_DTYPES))
    for cut in plan.measured.cuts:
        loads = [format_seconds(cut.load_s[kind]) for kind in _KV_DTYPES]
        table.add_row(f"{cut.tokens} tokens", format_seconds(cut.compute_s), *loads)
    shortest = plan.measured.cuts[0].tokens
    even = [ui.format_break_even(plan.break_even_tokens[kind], shortest) for kind in _KV_DTYPES]
    table.add_row("loading is quicker", "", *even, style="dim")
    ui.console.print(table)
    if not plan.measured.cold:
        ui.console.print(
            "[dim]the system did not drop its page cache: loading was timed from it, and a cold "
            "disk may be slower[/]"
        )
    ui.console.print(
        f"[dim]computing a module of {plan.measured.cuts[-1].tokens} tokens takes as long as "
        f"loading it at {format_bandwidth(plan.break_even_bandwidth)}[/]\n"
    )
