"""`ragcache ask`."""

from __future__ import annotations

from typing import Annotated

import typer

from ragcache.config import DEFAULT_K
from ragcache_api.cli.console import (
    DEFAULT_STATE,
    EmbeddingOption,
    JsonOption,
    KOption,
    MaxTokensOption,
    ModelOption,
    ModeOption,
    SeedOption,
    StateOption,
    StopOption,
    StreamOption,
    TemperatureOption,
    open_existing_rag,
    print_json,
)
from ragcache_api.cli.showing import report


def ask(
    question: Annotated[str, typer.Argument(help="What you want to know.")],
    collection: Annotated[str, typer.Option("--collection", "-c", help="Where to look.")],
    state: StateOption = DEFAULT_STATE,
    k: KOption = DEFAULT_K,
    mode: ModeOption = "rooted",
    max_new_tokens: MaxTokensOption = None,
    temperature: TemperatureOption = None,
    seed: SeedOption = None,
    stop: StopOption = None,
    stream: StreamOption = None,
    model: ModelOption = None,
    embedding: EmbeddingOption = None,
    as_json: JsonOption = False,
) -> None:
    """Answer a question from the documents of a collection."""
    with open_existing_rag(state, model, embedding) as rag:
        from ragcache import Generation

        generation = Generation.of(
            max_new_tokens=max_new_tokens, temperature=temperature, seed=seed, stop=stop
        )
        asked = rag.stream(question, collection=collection, k=k, mode=mode, generation=generation)
        if as_json:
            print_json({**asked.result().to_dict(), "encoded": rag.stats().encoded})
        else:
            report(asked, pieces=stream)
