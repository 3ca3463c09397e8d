"""`ragcache bench langchain`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from ragcache_api.cli.console import console, errors, plain_table


def langchain(
    handbook: Annotated[
        Path, typer.Option(help="The folder of documents.", show_default=True)
    ] = Path("examples/handbook"),
    modules: Annotated[int, typer.Option(min=16, max=17_000, help="Synthetic modules.")] = 10_000,
    layers: Annotated[int, typer.Option(min=1, help="Layers of the model that reads them.")] = 6,
    runs: Annotated[int, typer.Option(min=1, help="Runs of each question, each way.")] = 3,
    batch: Annotated[int, typer.Option(min=2, help="Conversations of the batch.")] = 16,
    json_file: Annotated[
        Path | None,
        typer.Option("--json", metavar="FILE", help="Write the figures here, as JSON."),
    ] = None,
) -> None:
    """An LCEL chain with recognition and without; recognition alone; a batch and single calls."""
    from ragcache.bench.shapes import LlamaShape
    from ragcache_connectors.langchain.bench import LangChainSetting, bench_langchain

    shape = LlamaShape(num_layers=layers)
    setting = LangChainSetting(
        handbook=handbook, shape=shape, modules=modules, runs=runs, batch=batch
    )
    with errors.status("starting") as status:
        result = bench_langchain(setting, status.update)
    _show_chains(result, modules, layers)
    console.print()
    _show_recognition(result)
    console.print()
    _show_batch(result)
    if json_file is not None:
        json_file.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


def _show_chains(result: dict[str, Any], modules: int, layers: int) -> None:
    table = plain_table(
        "retriever | prompt | model", "prompt", "from the cache", "plain", "recognised", "sooner"
    )
    for name, key in (
        ("handbook, embedded reader", "handbook"),
        (f"{modules:,} modules, {layers} layers of the shape", "synthetic"),
    ):
        row = result[key]
        seconds = row["seconds"]
        table.add_row(
            name, f"{row['prompt_tokens']:.0f}", f"{row['cached_tokens']:.0f}",
            f"{seconds['plain']:.3f} s", f"{seconds['recognised']:.3f} s", f"{row['ratio']:.1f}x",
        )  # fmt: skip
    console.print(table)


def _show_recognition(result: dict[str, Any]) -> None:
    lengths = sorted({row["characters"] for row in result["recognition"]})
    table = plain_table("recognition among", *(f"{length:,} characters" for length in lengths))
    for key, name in (
        ("recognition", "modules"),
        ("recognition_common_header", "modules under one header"),
    ):
        for modules in sorted({row["modules"] for row in result[key]}):
            cells = [f"{row['ms']:.2f} ms" for row in result[key] if row["modules"] == modules]
            table.add_row(f"{modules:,} {name}", *cells)
    console.print(table)


def _show_batch(result: dict[str, Any]) -> None:
    batch = result["batch"]
    rates = batch["tokens_per_second"]
    console.print(
        f"a batch: {rates['batch']:.0f} tokens a second, {batch['ratio']:.1f}x of "
        f"{rates['single']:.0f} by single calls"
    )
