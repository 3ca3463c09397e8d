"""`ragcache plan`: the size and times of a corpus before it is ingested."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from ragcache.errors import ConfigurationError
from ragcache_api.cli import console as ui

if TYPE_CHECKING:
    from ragcache.models import LoadedModel
    from ragcache.planning import CachePlan, Corpus

_KV_DTYPES = ("model", "fp8", "int8")


def plan(
    paths: Annotated[
        list[Path] | None, typer.Argument(help="Text files, or folders of them.")
    ] = None,
    collection: Annotated[
        str | None, typer.Option("-c", "--collection", help="A collection of the state folder.")
    ] = None,
    state: ui.StateOption = ui.DEFAULT_STATE,
    model: ui.ModelOption = None,
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
    import psutil

    from ragcache.planning import Budgets, advise, make_plan

    if bool(paths) == (collection is not None):
        raise ConfigurationError("give either files and folders or --collection")
    budgets = Budgets.parse(host_bytes, device_bytes, disk_bytes)
    with ui.errors.status("loading the model"):
        from ragcache.models import load_model

        loaded = load_model(model, device=device)
    corpus = _corpus(loaded, paths or [], collection, state, module_tokens)
    with ui.errors.status("measuring") as status:
        made = make_plan(loaded, corpus, budgets, state, sample=sample, progress=status.update)
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
