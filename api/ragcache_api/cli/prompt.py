"""`ragcache prompt`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ragcache_api.cli.console import (
    DEFAULT_STATE,
    JsonOption,
    MaxTokensOption,
    ModelOption,
    SeedOption,
    StateOption,
    StopOption,
    StreamOption,
    TemperatureOption,
    open_existing_rag,
    print_json,
    read_text,
)
from ragcache_api.cli.showing import report


def prompt(
    file: Annotated[Path, typer.Argument(help="A PML prompt.")],
    state: StateOption = DEFAULT_STATE,
    mode: Annotated[str, typer.Option("--mode", help="isolated or exact.")] = "isolated",
    max_new_tokens: MaxTokensOption = None,
    temperature: TemperatureOption = None,
    seed: SeedOption = None,
    stop: StopOption = None,
    stream: StreamOption = None,
    model: ModelOption = None,
    as_json: JsonOption = False,
) -> None:
    """Answer a PML prompt over a schema that was added before."""
    text = read_text(file)
    with open_existing_rag(state, model) as rag:
        from ragcache import Generation

        generation = Generation.of(
            max_new_tokens=max_new_tokens, temperature=temperature, seed=seed, stop=stop
        )
        asked = rag.stream_prompt(text, mode=mode, source=str(file), generation=generation)
        if as_json:
            print_json(asked.result().to_dict())
        else:
            report(asked, pieces=stream)
