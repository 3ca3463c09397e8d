"""`ragcache ask`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape
from rich.table import Table

from ragcache.config import DEFAULT_K
from ragcache_api.cli.console import (
    DEFAULT_STATE,
    EmbeddingOption,
    JsonOption,
    KOption,
    ModelOption,
    ModeOption,
    StateOption,
    console,
    milliseconds,
    open_existing_rag,
    print_json,
)

if TYPE_CHECKING:
    from ragcache import Answer


def ask(
    question: Annotated[str, typer.Argument(help="What you want to know.")],
    collection: Annotated[str, typer.Option("--collection", "-c", help="Where to look.")],
    state: StateOption = DEFAULT_STATE,
    k: KOption = DEFAULT_K,
    mode: ModeOption = "rooted",
    model: ModelOption = None,
    embedding: EmbeddingOption = None,
    as_json: JsonOption = False,
) -> None:
    """Answer a question from the documents of a collection."""
    with open_existing_rag(state, model, embedding) as rag:
        answer = rag.ask(question, collection=collection, k=k, mode=mode)
        encoded = rag.stats().encoded
    if as_json:
        print_json({**answer.to_dict(), "encoded": encoded})
    else:
        show(answer)


def show(answer: Answer) -> None:
    """Prints an answer with its sources and what it cost."""
    text = answer.text
    if answer.finish_reason == "no_documents":
        text = "nothing in this collection shares a word with the question"
    console.print(text, style="bold", markup=False, highlight=False)
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    for source in answer.sources:
        score = f"{source.score:.3f}" if source.score else ""
        table.add_row(escape(source.module), score, source.tier, style="dim")
    console.print(table)
    reuse, timings = answer.reuse, answer.timings
    console.print(
        f"mode {answer.mode} · prompt {reuse.prompt_tokens} tokens = {reuse.cached_tokens} cached "
        f"+ {reuse.computed_tokens} computed · first token {milliseconds(timings.first_token)} · "
        f"total {milliseconds(timings.total)}",
        highlight=False,
    )
