"""Commands that measure: `ragcache bench` and `ragcache plan`."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from ragcache.config import parse_bytes
from ragcache.errors import ConfigurationError, UnreadableDocument
from ragcache_api.cli import console as ui
from ragcache_api.cli.ingest import print_unread
from ragcache_api.cli.options import Offer, expand_options
from ragcache_api.cli.progress import progress_bar
from ragcache_api.service_options import ServiceOptions

if TYPE_CHECKING:
    from ragcache.models import LoadedModel
    from ragcache.planning import CachePlan, Corpus
    from ragcache_api.settings import ServiceSettings

bench_app = typer.Typer(
    help="Measure, as ratios of things run side by side in one process.", no_args_is_help=True
)


def output_file(file: Path | None) -> Path | None:
    """Check early that a file can be written. Raises `ConfigurationError`."""
    if file is not None and (file.is_dir() or not file.absolute().parent.is_dir()):
        what = "it is a folder" if file.is_dir() else f"there is no folder {file.parent}"
        raise ConfigurationError(f"{file} cannot be written: {what}")
    return file


JsonFile = Annotated[
    Path | None,
    typer.Option(
        "--json", metavar="FILE", callback=output_file, help="Write the figures here, as JSON."
    ),
]
BenchDTypeOption = Annotated[
    str, typer.Option("--dtype", help="Type of the model's computations; `auto` is the faster one.")
]

PLANNING = Offer(
    (
        "model",
        "instruction",
        "module_tokens",
        "device",
        "dtype",
        "host_bytes",
        "device_bytes",
        "disk_bytes",
        "state",
    )
)

Benchmark = Callable[[Callable[[str], None]], dict[str, Any]]
_KV_DTYPES = ("model", "int8")


def run_benchmark(run: Benchmark) -> dict[str, Any]:
    """Run a benchmark with its progress on standard error."""
    with ui.errors.status("starting") as status:
        return run(status.update)


def print_figures(
    parts: Sequence[Table | str], result: dict[str, Any], json_file: Path | None
) -> None:
    """Print tables and sentences, and write the figures if a file is given."""
    for number, each in enumerate(parts):
        if number:
            ui.console.print()
        ui.console.print(each)
    if json_file is not None:
        text = json.dumps(result, indent=2, default=str) + "\n"
        json_file.write_text(text, encoding="utf-8")


@bench_app.command("ttft")
def ttft(
    runs: Annotated[int, typer.Option(help="runs of the cached sides.")] = 9,
    dtype: BenchDTypeOption = "auto",
    json_file: JsonFile = None,
) -> None:
    """Time to first token: ordinary prefill, concatenated states, segments."""
    from ragcache.bench.ttft import TtftSetting, bench_ttft

    setting = TtftSetting(cached_runs=runs, dtype=dtype)
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
    requests: Annotated[int, typer.Option(min=1, help="requests decoding together.")] = 16,
    dtype: BenchDTypeOption = "auto",
    json_file: JsonFile = None,
) -> None:
    """Decoding over shared documents: segments, compared to a copy for each request."""
    from ragcache.bench.decode import DecodeSetting, bench_decode

    setting = DecodeSetting(requests=requests, dtype=dtype)
    result = run_benchmark(lambda progress: bench_decode(setting, progress))
    rows = [
        ("of `generate` with copies", f"{result['ratio_to_copies']:.1f}x"),
        ("KV bytes over one copy and private tokens", f"{result['kv_bytes_ratio']:.2f}"),
        ("scheduling, of a step", f"{100 * result['scheduler_share']:.1f}%"),
    ]
    rate = result["shared"]["tokens_per_second"]
    table = ui.plain_table(f"{requests} requests, {rate:.0f} tokens a second", "", rows=rows)
    print_figures([table], result, json_file)


@bench_app.command("serve")
def serve(
    requests: Annotated[int, typer.Option(min=4, help="requests a rate, at least.")] = 24,
    dtype: BenchDTypeOption = "auto",
    json_file: JsonFile = None,
) -> None:
    """Poisson arrivals over 64 documents, at growing rates, cached and in mode exact."""
    from ragcache.bench.serve import COMPUTED, ServeSetting, bench_serve

    setting = ServeSetting(requests=requests, dtype=dtype)
    result = run_benchmark(lambda progress: bench_serve(setting, progress))
    table = ui.plain_table("mode", "requests/s", "served/s", "TTFT p50", "TTFT p99", "s a token")
    for mode, loads in result["loads"].items():
        for load in loads:
            table.add_row(
                mode,
                f"{load['rate']:.2f}",
                f"{load['throughput']:.2f}",
                f"{load['ttft_p50']:.3f} s",
                f"{load['ttft_p99']:.3f} s",
                f"{load['normalized']:.4f}",
            )
    knee, ratio = result["knee"], f"{result['knee_ratio_to_exact']:.1f}x"
    said = f"knee: {knee['cached']:.2f} requests a second, "
    said += f"{ratio} of {COMPUTED}'s {knee[COMPUTED]:.2f}"
    print_figures([table, said], result, json_file)


@bench_app.command("recurring")
def recurring(
    model: Annotated[str | None, typer.Option(help="Folder or name of a model.")] = None,
    device: Annotated[str, typer.Option(help="Device of the model: cpu, cuda.")] = "cpu",
    reduced: Annotated[bool, typer.Option(help="Few chunks, for a CPU.")] = False,
    conversations: Annotated[int | None, typer.Option(min=1, help="conversations.")] = None,
    turns: Annotated[int | None, typer.Option(min=1, help="turns of a conversation.")] = None,
    chunks: Annotated[
        int | None, typer.Option(min=1, help="chunks that are pasted by Zipf's law.")
    ] = None,
    each: Annotated[int | None, typer.Option(min=1, help="chunks of a turn.")] = None,
    sentences: Annotated[
        int | None, typer.Option(min=1, help="sentences of a chunk, 13 to 14 tokens each.")
    ] = None,
    earlier: Annotated[
        int, typer.Option(min=0, help="conversations that were answered before.")
    ] = 0,
    concurrent: Annotated[
        int, typer.Option(min=1, help="callers at once, for the rate of requests.")
    ] = 1,
    mode: Annotated[
        str | None, typer.Option(help="Mode in which recurring texts are read.")
    ] = None,
    agent: Annotated[
        bool, typer.Option(help="An agent's sessions, which keep the files that they read.")
    ] = False,
    trace: Annotated[
        Path | None, typer.Option(help="A recorded trace, instead of drawn conversations.")
    ] = None,
    json_file: JsonFile = None,
) -> None:
    """Chats whose client pastes chunks, with and without states of recurring texts."""
    from ragcache.bench.recurring import bench_recurring
    from ragcache.bench.recurring_turns import (
        RecurringSetting,
        draw_agent_turns,
        draw_turns,
        read_turns,
    )
    from ragcache.models import load_model

    sizes = {
        "conversations": conversations,
        "turns": turns,
        "chunks": chunks,
        "each": each,
        "sentences": sentences,
    }
    given = {name: size for name, size in sizes.items() if size is not None}
    make = RecurringSetting.reduced if reduced else RecurringSetting
    earlier = 0 if trace else earlier
    setting = make(**given, earlier=earlier, concurrent=concurrent, mode=mode)
    if setting.each > setting.chunks:
        raise ConfigurationError(
            f"a turn cannot have {setting.each} of {setting.chunks} chunks; give --each or --chunks"
        )
    drawn = draw_agent_turns(setting) if agent else draw_turns(setting)
    asked = list(drawn if trace is None else read_turns(trace))
    result = run_benchmark(
        lambda progress: bench_recurring(setting, load_model(model, device=device), progress, asked)
    )
    rows = [
        ("tokens of chunks read from states", f"{100 * result['read_share']:.0f}%"),
        ("in two earlier prompts", f"{100 * result['recurring_share']:.0f}%"),
        ("first token", f"{result['ttft_speedup']:.1f}x sooner"),
        ("requests a second", f"{result['rate_ratio']:.1f}x"),
        ("equal answers", f"{100 * result['equal_answers_share']:.0f}%"),
        ("detection in 32,000 characters", f"{result['detect_ms_32k_100000']:.2f} ms"),
    ]
    table = ui.plain_table(f"{result['turns']} turns in steady state", "", rows=rows)
    print_figures([table], result, json_file)


@bench_app.command("conversations")
def conversations(
    model: Annotated[str | None, typer.Option(help="Folder or name of a model.")] = None,
    device: Annotated[str, typer.Option(help="Device of the model: cpu, cuda.")] = "cpu",
    reduced: Annotated[bool, typer.Option(help="Few sessions, for a CPU.")] = False,
    concurrent: Annotated[int, typer.Option(min=1, help="sessions answered at once.")] = 8,
    tokens: Annotated[int, typer.Option(min=256, help="Tokens of a long conversation.")] = 8192,
    runs: Annotated[int, typer.Option(min=1, help="runs of each timing.")] = 5,
    host_bytes: Annotated[str, typer.Option(help="Budget of the host tier.")] = "2GiB",
    json_file: JsonFile = None,
) -> None:
    """Chats and agents that outlive the engine's pool, with and without kept states."""
    from ragcache.bench.conversations import ConversationsSetting, bench_conversations
    from ragcache.models import load_model

    make = ConversationsSetting.reduced if reduced else ConversationsSetting
    setting = make(concurrent=concurrent, long_tokens=tokens, runs=runs, host_bytes=host_bytes)
    result = run_benchmark(
        lambda progress: bench_conversations(setting, load_model(model, device=device), progress)
    )
    shares = [
        (
            f"{name}: tokens of earlier turns computed again",
            f"{100 * result[f'recomputed_share_{name}']:.1f}%, "
            f"{100 * result[f'pool_share_{name}']:.0f}% by the pool alone",
        )
        for name in ("chats", "agents")
    ]
    rows = [
        *shares,
        ("agents: turns a second", f"{result['agents_rate_ratio']:.1f}x"),
        ("first token from memory", f"{result['resume_host_ms_over_pool']:+.1f} ms over the pool"),
        ("first token from disk", f"{result['resume_disk_speedup']:.1f}x sooner than computed"),
        ("resumed after a restart", f"{100 * result['restart_resumed_share']:.0f}%"),
        ("a stream's steps beside kept chats", f"{result['decode_step_ratio']:.3f}x of their time"),
    ]
    table = ui.plain_table("conversations", "", rows=rows)
    print_figures([table], result, json_file)


@bench_app.command("load")
def load(
    shape: Annotated[str, typer.Option(help="Sizes of the model: 7b, 8b.")] = "8b",
    device: Annotated[
        str | None, typer.Option(help="Device of the model: cuda, or cpu for --reduced.")
    ] = None,
    reduced: Annotated[
        bool, typer.Option(help="A tiny model and short documents, for a CPU.")
    ] = False,
    device_bytes: Annotated[str | None, typer.Option(help="Budget of the device tier.")] = None,
    host_bytes: Annotated[str | None, typer.Option(help="Budget of the host tier.")] = None,
    device_kv_dtype: Annotated[
        str, typer.Option(help="Dtype of states on the device: model, int8.")
    ] = "model",
    quantization: Annotated[
        str | None, typer.Option(help="fp8, or leave it out for bfloat16.")
    ] = None,
    documents: Annotated[int | None, typer.Option(min=1, help="documents of the corpus.")] = None,
    rates: Annotated[
        str | None, typer.Option(help="Requests a second, rising, with commas between.")
    ] = None,
    seconds: Annotated[
        float | None, typer.Option(min=0.1, help="of arrivals at each rate.")
    ] = None,
    ingest_at: Annotated[
        float | None, typer.Option(help="Rate beside which new documents are encoded.")
    ] = None,
    max_gap_ms: Annotated[
        float | None, typer.Option(help="Longest gap between tokens that other work may cause.")
    ] = None,
    json_file: JsonFile = None,
    check: Annotated[bool, typer.Option(help="Exit with 1 if a limit is missed.")] = False,
) -> None:
    """A service under load: Poisson arrivals over documents in several tiers, until saturation.

    Limits are known for the 8B on one H200. For every other shape, no request may be refused.
    """
    import torch

    from ragcache.bench.harness import SHAPES
    from ragcache.bench.load import ServiceLoad, bench_load
    from ragcache.models.dtype import FP8, check_quantization
    from ragcache.states.quantization import check_kv_dtype

    if shape not in SHAPES:
        raise ConfigurationError(f"there is no shape {shape!r}; give {' or '.join(SHAPES)}")
    load = ServiceLoad.reduced() if reduced else ServiceLoad(SHAPES[shape])
    setting = load.setting
    load = replace(
        load,
        setting=replace(
            setting,
            documents=documents or setting.documents,
            seconds=seconds or setting.seconds,
        ),
        device_bytes=parse_bytes(device_bytes or load.device_bytes),
        host_bytes=parse_bytes(host_bytes or load.host_bytes),
        device_kv_dtype=check_kv_dtype(device_kv_dtype),
        quantization=quantization,
        rates=load.rates if rates is None else _rising(rates),
        ingest_at=ingest_at,
        max_gap_ms=max_gap_ms,
    )
    device = device or ("cpu" if reduced else "cuda")
    if quantization not in (None, FP8):
        raise ConfigurationError(f"weights are measured in fp8 or bfloat16, not {quantization!r}")
    check_quantization(quantization, torch.device(device))
    result = run_benchmark(lambda progress: bench_load(load, device, progress))
    runs = [*result["runs"], result["at_limits"]]
    said = [f"most answers a second: {result['most_answered']:.1f}; the last run is at 70% of it"]
    if "ingestion" in result:
        runs.append(result["ingestion"]["beside"])
        tokens = result["ingestion"]["tokens_s"]
        said.append(f"the very last run is beside ingestion of {tokens:,.0f} tokens a second")
    said += [f"missed: {each}" for each in result["missed"]]
    print_figures([_load_table(runs), "\n".join(said)], result, json_file)
    if check and result["missed"]:
        raise typer.Exit(1)


def _rising(rates: str) -> tuple[float, ...]:
    try:
        found = tuple(float(rate) for rate in rates.split(","))
    except ValueError:
        found = ()
    if not found or found[0] <= 0 or any(b <= a for a, b in pairwise(found)):
        raise ConfigurationError(
            f"--rates is {rates!r}; give rising requests a second, for example 10,20,30"
        )
    return found


def _load_table(runs: Sequence[dict[str, Any]]) -> Table:
    """Runs of `bench load`, one a row."""
    table = ui.plain_table(
        "requests/s", "answered/s", "refused", "TTFT p50/p99, ms", "gap p50/p99/longest, ms",
        "documents from", left=0,
    )  # fmt: skip
    for run in runs:
        table.add_row(
            f"{run['rate']:.1f}",
            f"{run['answered']:.1f}",
            str(run["refused"]),
            "/".join(f"{run['ttft_ms'][name]:.0f}" for name in ("p50", "p99") if run["ttft_ms"]),
            "/".join(f"{each:.0f}" for each in run["gap_ms"].values()),
            ", ".join(f"{name} {share:.0%}" for name, share in run["sources"].items()),
        )
    return table


@expand_options
def plan(
    options: Annotated[ServiceOptions, PLANNING],
    paths: Annotated[
        list[Path] | None, typer.Argument(help="Text files, or folders of them.")
    ] = None,
    collection: Annotated[
        str | None, typer.Option("-c", "--collection", help="A collection of the state folder.")
    ] = None,
    sample: Annotated[
        int, typer.Option(min=1, max=64, help="How many modules to encode for the times.")
    ] = 6,
    as_json: ui.JsonOption = False,
) -> None:
    """Estimate the costs and gains of caching a corpus, before it is ingested.

    The corpus is PATHS, or a stored collection. Nothing is changed.
    """
    if bool(paths) == (collection is not None):
        raise ConfigurationError("give either files and folders or --collection")
    settings = ui.read_settings(options)
    ui.check_model(settings.model)
    for path in paths or []:
        if not path.exists():
            raise UnreadableDocument(f"cannot read {path}: there is no such file or folder")
    from ragcache.planning import Budgets, advise, make_plan

    budgets = Budgets.parse(settings.host_bytes, settings.device_bytes, settings.disk_bytes)
    with ui.loading_model():
        from ragcache.models import load_model

        loaded = load_model(settings.model, device=settings.device, dtype=settings.dtype)
    corpus = _corpus(loaded, paths or [], collection, settings)
    with ui.errors.status("measuring") as status:
        made = make_plan(
            loaded,
            corpus,
            budgets,
            settings.state,
            sample=sample,
            instruction=settings.instruction,
            progress=status.update,
        )
    advice = advise(made)
    if as_json:
        unread = {"skipped": corpus.skipped, "omitted": corpus.omitted}
        ui.print_json(made.to_dict() | {"advice": advice} | unread)
    else:
        _print_plan(made, advice)
        print_unread(corpus.skipped, corpus.omitted)


def _corpus(
    model: LoadedModel, paths: list[Path], collection: str | None, settings: ServiceSettings
) -> Corpus:
    from ragcache.db import Catalog
    from ragcache.planning import corpus_of_collection, corpus_of_sources

    with progress_bar("reading the corpus") as progress:
        if collection is None:
            limit = model.causal.module_limit(settings.module_tokens)
            return corpus_of_sources(model, paths, limit, progress)
        with ui.open_ledger(settings) as database:
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
