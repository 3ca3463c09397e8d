"""`ragcache schema`."""

from __future__ import annotations

from typing import Annotated

import typer

from ragcache.config import DEFAULT_K
from ragcache_api.cli.console import (
    DEFAULT_STATE,
    KOption,
    ModelOption,
    StateOption,
    open_rag,
)
from ragcache_schemas import write_schema

app = typer.Typer(help="The PML schemas that collections stand for.", no_args_is_help=True)


@app.callback()
def schema() -> None:
    """The PML schemas that collections stand for."""


@app.command("show")
def show(
    collection: Annotated[str, typer.Argument(help="The collection.")],
    state: StateOption = DEFAULT_STATE,
    k: KOption = DEFAULT_K,
    expand: Annotated[bool, typer.Option("--expand", help="Write the members out.")] = False,
    model: ModelOption = None,
) -> None:
    """Print the generated schema of a collection."""
    with open_rag(state, model, None) as rag:
        typer.echo(write_schema(rag.schema(collection, k=k, expanded=expand)))
