"""Indexes: what a question waits for retrieval after changes of a large collection, beside building
the whole BM25 index, which it would have to wait for if that were not built aside.

    python benchmarks/indexes.py --modules 10000 --json FILE
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from itertools import count, islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import numpy as np
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
from ragcache.retrieval import Retriever, SearchParams
from ragcache.retrieval.words import WordIndex

_COLLECTION, _DOCUMENT = "bench", 10  # modules of a document
_WORDS, _VOCABULARY = 250, 20_000  # of a module; of all
_AT_ONCE = 500  # documents that are stored in one transaction


class Corpus:
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
    """Seconds of each question, and those of the processor in its own thread."""
    corpus, waits = Corpus(), {}
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
        index = WordIndex(np.array([row.id for row in rows]), [row.text for row in rows])
        waits["the whole index is built"] = _timed(index.build)

        def ask(name: str) -> None:
            query = corpus.text(5)
            waits[name] = _timed(lambda: retriever.retrieve(query, _COLLECTION, SearchParams(4)))

        retriever.prepare_index(_COLLECTION)
        _settle()
        ask("the first question, its index built aside")
        for name, new in (("10 new modules", 10), (f"{modules // 5:,} new modules", modules // 5)):
            other.replace_documents(_COLLECTION, list(corpus.documents(new)))
            ask(f"after {name}")
            _settle()
        other.replace_documents(_COLLECTION, list(corpus.documents(modules // 5, count())))
        ask(f"after {modules // 5:,} modules were replaced")
        _settle()
        other.delete_documents(_COLLECTION, ["0"])
        ask("after a document was deleted")
        _settle()
    return {"modules": modules, "waits": waits}


def _timed(call: Callable[[], object]) -> dict[str, float]:
    began, processor = time.perf_counter(), time.thread_time()
    call()
    return {"wall_s": time.perf_counter() - began, "cpu_s": time.thread_time() - processor}


def _settle() -> None:
    for thread in threading.enumerate():
        if thread.name == "ragcache-index":
            thread.join()


def main(
    modules: Annotated[int, typer.Option(min=500, help="Modules of the collection.")] = 10_000,
    json_file: JsonFile = None,
) -> None:
    """What questions wait for retrieval after changes of a large collection."""
    result = run_benchmark(lambda _: bench_indexes(modules)) | {"machine": describe_machine()}
    table = plain_table("at a question", "seconds", "of the processor")
    for name, wait in result["waits"].items():
        table.add_row(name, f"{wait['wall_s']:.2f}", f"{wait['cpu_s']:.2f}")
    print_figures([f"{modules:,} modules", table], result, json_file)


if __name__ == "__main__":
    typer.run(main)
