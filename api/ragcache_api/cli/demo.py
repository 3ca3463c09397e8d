"""`ragcache demo`: the example handbook, asked with and without the cache."""

from __future__ import annotations

import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape
from rich.table import Table

from ragcache.errors import NoDocuments
from ragcache_api.cli.console import (
    JsonOption,
    console,
    errors,
    milliseconds,
    print_json,
    progress_bar,
)
from ragcache_api.cli.showing import tokens

if TYPE_CHECKING:
    from ragcache import Answer, RagCache

QUESTIONS = (
    "Who do I ring first if the cold store alarm goes off?",
    "How long may I stay inside the freezer at most?",
    "Where does the key of the pool car hang?",
    "By what time on the day before do I have to order a packed lunch?",
    "What are fires in the boat hall fought with?",
)
RUNS = 5  # of each mode, in turn; the medians are shown


@dataclass(frozen=True, slots=True)
class Compared:
    """An answer from cached modules, and its median times to first token beside `exact`."""

    answer: Answer
    cached_seconds: float
    exact_seconds: float

    @property
    def ratio(self) -> float:
        return self.exact_seconds / self.cached_seconds


def demo(
    handbook: Annotated[
        Path, typer.Option(help="The folder of documents.", show_default=True)
    ] = Path("examples/handbook"),
    as_json: JsonOption = False,
) -> None:
    """Ingest the example handbook and answer five questions, cached and ordinary side by side."""
    if not handbook.is_dir():
        raise NoDocuments(
            f"there is no folder {handbook}; run the demo where ragcache was cloned, or give one "
            "with --handbook"
        )
    with errors.status("loading the model"):
        from ragcache import RagCache
    with (
        tempfile.TemporaryDirectory(prefix="ragcache-demo-") as state,
        RagCache.open(state) as rag,
    ):
        with progress_bar("encoding modules") as report:
            done = rag.ingest("handbook", [handbook], progress=report)
        with progress_bar("asking") as report:
            compared = []
            for number, question in enumerate(QUESTIONS, start=1):
                compared.append(compare(rag, question))
                report(number, len(QUESTIONS))
        together = batched(rag)
    if as_json:
        print_json([_plain(each) for each in compared])
        return
    console.print(
        f"{done.added} documents, {done.modules} modules, {done.tokens:,} tokens encoded once\n"
    )
    for each in compared:
        _show(each)
    apart = sum(each.answer.timings.total for each in compared)
    console.print(
        f"all {len(QUESTIONS)} questions together: {milliseconds(together)} to the last answer; "
        f"one after another: {milliseconds(apart)}",
        highlight=False,
    )


def batched(rag: RagCache) -> float:
    """Seconds for all questions at once: each document is read once a step for all of them."""
    begin = time.perf_counter()
    rag.ask_batch(QUESTIONS, collection="handbook")
    return time.perf_counter() - begin


def compare(rag: RagCache, question: str) -> Compared:
    """Asks in turn from cached modules and by an ordinary prefill."""
    from ragcache import Generation

    times: dict[str, list[float]] = {"rooted": [], "exact": []}
    answers = {}
    alone = Generation(share=False)  # else a run may find the question's states of the one before
    for _ in range(RUNS):
        for mode, seconds in times.items():
            answers[mode] = rag.ask(question, collection="handbook", mode=mode, generation=alone)
            seconds.append(answers[mode].timings.first_token)
    return Compared(answers["rooted"], *(statistics.median(s) for s in times.values()))


def _show(compared: Compared) -> None:
    answer = compared.answer
    console.print(answer.question, style="cyan", markup=False, highlight=False)
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_row("answer", f"[bold]{escape(answer.text)}[/]")
    table.add_row("sources", ", ".join(escape(source.module) for source in answer.sources))
    table.add_row("mode", answer.mode)
    table.add_row("prompt", tokens(answer))
    table.add_row(
        "first token",
        f"{milliseconds(compared.cached_seconds)} cached, "
        f"{milliseconds(compared.exact_seconds)} exact: [green]{compared.ratio:.1f}x[/]",
    )
    console.print(table)
    console.print()


def _plain(compared: Compared) -> dict[str, object]:
    return {
        **compared.answer.to_dict(),
        "first_token_cached": compared.cached_seconds,
        "first_token_exact": compared.exact_seconds,
        "ratio": compared.ratio,
    }
