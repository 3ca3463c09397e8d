"""`ragcache ingest`."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from ragcache_api.cli.console import (
    DEFAULT_STATE,
    EmbeddingOption,
    JsonOption,
    ModelOption,
    StateOption,
    console,
    open_rag,
    print_json,
    progress_bar,
)


def ingest(
    collection: Annotated[str, typer.Argument(help="The collection to put the documents in.")],
    paths: Annotated[list[Path], typer.Argument(help="Text files, or folders of them.")],
    state: StateOption = DEFAULT_STATE,
    model: ModelOption = None,
    embedding: EmbeddingOption = None,
    module_tokens: Annotated[
        int | None, typer.Option(help="The most tokens of a module; 384 unless set otherwise.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Store documents and encode their attention states, once."""
    with (
        open_rag(state, model, embedding, module_tokens=module_tokens) as rag,
        progress_bar("encoding modules") as report,
    ):
        done = rag.ingest(collection, list(paths), progress=report)
    if as_json:
        print_json(asdict(done))
        return
    console.print(
        f"{done.added} documents added, {done.updated} updated, {done.unchanged} unchanged in "
        f"[bold]{escape(done.collection)}[/]: {done.modules} modules of {done.tokens:,} tokens, "
        f"{done.encoded} states encoded"
    )
    if done.ignored:
        console.print(f"[dim]passed over (not text): {escape(', '.join(done.ignored))}[/]")
