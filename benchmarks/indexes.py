"""Indexes: what questions wait for retrieval after changes of a large collection by another
process, beside building the whole BM25 index.

    python benchmarks/indexes.py --modules 5000 --json FILE
"""

from __future__ import annotations

import random
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from itertools import count, islice
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import typer
from harness import (
    JsonFile,
    describe_machine,
    made_up_key,
    plain_table,
    print_figures,
    run_benchmark,
)

from ragcache.db import Catalog, Database, NewDocument, NewModule
from ragcache.params import SearchParams
from ragcache.retrieval import BM25Index, Retriever

_COLLECTION, _DOCUMENT = "bench", 10  # modules of a document
_WORDS, _VOCABULARY = 250, 20_000  # of a module; of all
_AT_ONCE = 500  # documents that are stored in one transaction
_CHANGES = 15  # of which two have tantivy merge segments


class GeneratedCorpus:
    """Documents of made-up words with Zipf's odds."""

    def __init__(self) -> None:
        self.rng = random.Random(1)
        letters = "abcdefghijklmnopqrstuvwxyz"
        self._words = [
            "".join(self.rng.choices(letters, k=self.rng.randint(3, 9))) for _ in range(_VOCABULARY)
        ]
        self._odds = [1 / rank for rank in range(1, _VOCABULARY + 1)]
        self._numbers = count()

    def documents(
        self, modules: int, numbers: Iterator[int] | None = None
    ) -> Iterator[NewDocument]:
        """Documents of so many modules in all, new ones or those of the numbers."""
        for number in islice(numbers or self._numbers, modules // _DOCUMENT):
            rows = [
                NewModule(f"{number}#{n}", self.text(_WORDS), [1], made_up_key(number))
                for n in range(_DOCUMENT)
            ]
            yield NewDocument(str(number), "", "", rows)

    def text(self, words: int) -> str:
        return " ".join(self.rng.choices(self._words, self._odds, k=words))


def bench_indexes(modules: int) -> dict[str, Any]:
    """Seconds of each question, and those of the processor in its own thread, as medians."""
    corpus = GeneratedCorpus()
    waits: dict[str, list[dict[str, float]]] = defaultdict(list)
    with (
        TemporaryDirectory() as folder,
        closing(Database.open(Path(folder) / "ledger")) as database,
    ):
        other = Catalog(database, "tokenizer", None)
        made = list(corpus.documents(modules))
        for start in range(0, len(made), _AT_ONCE):
            other.replace_documents(_COLLECTION, made[start : start + _AT_ONCE])
        catalog = Catalog(database, "tokenizer", None)
        retriever, rows = Retriever(catalog), catalog.modules(_COLLECTION)
        texts = {row.id: row.text for row in rows}
        waits["the whole index is built"].append(_timed(lambda: BM25Index(texts)))

        def ask(name: str) -> None:
            query = corpus.text(5)
            search = partial(retriever.retrieve, query, _COLLECTION, SearchParams(k=4))
            waits[name].append(_timed(search))

        ask("the first question, which builds it")
        ask("another question")
        for _ in range(_CHANGES):
            other.replace_documents(_COLLECTION, list(corpus.documents(_DOCUMENT)))
            ask(f"after {_DOCUMENT} new modules (median of {_CHANGES} changes)")
        other.replace_documents(_COLLECTION, list(corpus.documents(modules // 5)))
        ask(f"after {modules // 5:,} new modules")
        other.replace_documents(_COLLECTION, list(corpus.documents(modules // 5, count())))
        ask(f"after {modules // 5:,} modules were replaced")
        other.delete_documents(_COLLECTION, ["0"])
        ask("after a document was deleted")
    medians = {
        name: {key: median(wait[key] for wait in each) for key in each[0]}
        for name, each in waits.items()
    }
    return {"modules": modules, "waits": medians}


def _timed(call: Callable[[], object]) -> dict[str, float]:
    began, processor = time.perf_counter(), time.thread_time()
    call()
    return {"wall_s": time.perf_counter() - began, "cpu_s": time.thread_time() - processor}


def main(
    modules: Annotated[int, typer.Option(min=500, help="Modules of the collection.")] = 5_000,
    json_file: JsonFile = None,
) -> None:
    """Time that questions wait for retrieval after changes of a large collection."""
    result = run_benchmark(lambda _: bench_indexes(modules)) | {"machine": describe_machine()}
    table = plain_table("at a question", "seconds", "of the processor")
    for name, wait in result["waits"].items():
        table.add_row(name, f"{wait['wall_s']:.4f}", f"{wait['cpu_s']:.4f}")
    print_figures([f"{modules:,} modules", table], result, json_file)


if __name__ == "__main__":
    typer.run(main)
