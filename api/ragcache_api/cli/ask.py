"""`ragcache ask`."""

# MERGED ragcache_api.cli.ingest: `ragcache ingest`.
# MERGED ragcache_api.cli.prompt: `ragcache prompt`.
# MERGED ragcache_api.cli.demo: `ragcache demo`: the example handbook, asked with and without
#   the cache.

from __future__ import annotations

import statistics
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape
from rich.table import Table

from ragcache.config import DEFAULT_K
from ragcache.errors import NoDocuments
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
    console,
    errors,
    milliseconds,
    open_existing_rag,
    open_rag,
    print_json,
    progress_bar,
    read_text,
    report,
    tokens,
)

if TYPE_CHECKING:
    from ragcache import Answer, RagCache


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
