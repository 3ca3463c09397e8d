"""`ragcache prompt`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ragcache_api.cli.ask import show
from ragcache_api.cli.console import (
    DEFAULT_STATE,
    JsonOption,
    ModelOption,
    StateOption,
    open_existing_rag,
    print_json,
    read_text,
)


def prompt(
    file: Annotated[Path, typer.Argument(help="A PML prompt.")],
    state: StateOption = DEFAULT_STATE,
    mode: Annotated[str, typer.Option("--mode", help="isolated or exact.")] = "isolated",
    model: ModelOption = None,
    as_json: JsonOption = False,
) -> None:
    """Answer a PML prompt over a schema that was added before."""
    text = read_text(file)
    with open_existing_rag(state, model) as rag:
        answer = rag.prompt(text, mode=mode, source=str(file))
    if as_json:
        print_json(answer.to_dict())
    else:
        show(answer)
