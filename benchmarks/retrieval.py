"""Quality of retrieval and of the answers from it.

By words, by meaning and by both, with and without modules far below the best one.

    python benchmarks/retrieval.py --data DATA --json FILE

DATA holds `xquad.en.json` (Artetxe et al., 2020) and `qed.jsonl` (Lamm et al., 2021); the example
handbook is always there. The extra `minilm` adds retrieval by meaning. Of a larger set the same
sample of questions with their documents is taken in every run, and a smaller one is answered:
encoding a paragraph costs as much as a hundred searches, and an answer as much as forty.
"""

from __future__ import annotations

import math
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from harness import JsonFile, Progress, describe_machine, plain_table, print_figures, run_benchmark
from langchain_core.embeddings import Embeddings
from quality import handbook_set, load_set

from ragcache import RagCache
from ragcache.db import ModuleRow
from ragcache.documents import SourceDocument
from ragcache.evaluation import Dataset, Question, evaluate_modes
from ragcache.retrieval.embeddings import MiniLM
from ragcache.retrieval.resolve import has_minilm


@dataclass(frozen=True, slots=True)
class RetrievalSetting:
    """k: modules of a prompt; shares: relative thresholds, 0 for none; answered: those whose
    answers are marked; questions, answers: the most of a set that are searched for, among the
    documents of these, and answered, drawn with `seed`."""

    k: int = 4
    shares: tuple[float, ...] = (0.0, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7)
    answered: tuple[float, ...] = (0.0, 0.4, 0.5, 0.6, 0.8)
    questions: int = 200
    answers: int = 100
    seed: int = 7


def bench_retrieval(
    sets: Iterable[Dataset], embedder: Embeddings | None,
    setting: RetrievalSetting | None = None, progress: Progress = lambda _: None,
) -> dict[str, Any]:  # fmt: skip
    """Rows of what was found, and of answers that were marked.

    ndcg: mean of the discounted cumulative gain over that of the ideal ranking, of the first `k`
    modules; a module counts if it is of the question's document and contains an accepted answer.
    recalled: the share of questions with one such module; modules: their mean number in a prompt.
    exact_match, f1: of answers in mode `rooted`, after SQuAD's normalization.
    """
    setting = setting or RetrievalSetting()
    found, answered = [], []
    for each in sets:
        drawn = each.sample(setting.questions, setting.seed)
        asked, marked = drawn.questions, drawn.sample(setting.answers, setting.seed).questions
        documents = drawn.documents if drawn is each else _asked_for(drawn)
        with tempfile.TemporaryDirectory() as state:
            for by, rag in _opened(state, embedder):
                with rag:
                    progress(f"{each.name}, {by}: ingesting")
                    rag.ingest(each.name, documents)
                    progress(f"{each.name}, {by}: {len(asked)} questions, {len(marked)} answers")
                    searches = ("sparse",) if by == "words" else ("dense", "hybrid")
                    found += [
                        {"set": each.name, "search": search, **row}
                        for search in searches
                        for row in _found(rag, each.name, asked, search, setting)
                    ]
                    answered += [
                        {"set": each.name, "search": searches[-1], **row}
                        for row in _answered(rag, each.name, marked, setting)
                    ]
    return {"setting": asdict(setting), "found": found, "answered": answered}


def _asked_for(drawn: Dataset) -> list[SourceDocument]:
    """The documents of a sample's questions."""
    named = {question.document for question in drawn.questions}
    return [each for each in drawn.documents if each.id in named]


class QueriesOnce(Embeddings):
    """Embeds every query once, however many searches it serves."""

    def __init__(self, embedder: Embeddings) -> None:
        self._embedder = embedder
        self._vectors: dict[str, list[float]] = {}

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        return self._embedder.embed_documents(texts)

    def embed_query(self, text: str) -> list[float]:
        if text not in self._vectors:
            self._vectors[text] = self._embedder.embed_query(text)
        return self._vectors[text]


def _opened(state: str, embedder: Embeddings | None) -> Iterator[tuple[str, RagCache]]:
    yield "words", RagCache.open(state, embedding="none")
    if embedder is not None:
        yield "meaning", RagCache.open(state, embedding=QueriesOnce(embedder))


def _found(
    rag: RagCache, collection: str, questions: Sequence[Question], search: Any,
    setting: RetrievalSetting,
) -> Iterator[dict[str, Any]]:  # fmt: skip
    relevant = partial(_relevant, _by_document(rag, collection))
    wanted = [relevant(question) for question in questions]
    for share in setting.shares:
        gains = []
        for question in questions:
            selection = rag.retrieve(
                question.question, collection=collection, k=setting.k, search=search,
                relative_threshold=share,
            )  # fmt: skip
            gains.append([hit.module.id for hit in selection.hits])
        pairs = list(zip(gains, wanted, strict=True))
        yield {
            "relative_threshold": share,
            "ndcg": _mean([ndcg([i in right for i in ids], len(right), setting.k)
                           for ids, right in pairs]),
            "recalled": _mean([not right.isdisjoint(ids) for ids, right in pairs]),
            "modules": _mean([len(ids) for ids, _ in pairs]),
        }  # fmt: skip


def ndcg(gains: Sequence[bool], relevant: int, k: int) -> float:
    """Normalized discounted cumulative gain of a ranking (Järvelin and Kekäläinen, 2002), where
    `relevant` modules could have been found."""
    ideal = sum(1 / math.log2(rank + 2) for rank in range(min(relevant, k)))
    return sum(gain / math.log2(rank + 2) for rank, gain in enumerate(gains[:k])) / ideal


def _by_document(rag: RagCache, collection: str) -> dict[str, list[ModuleRow]]:
    modules = defaultdict(list)
    for module in rag.internals.catalog.modules(collection):
        modules[module.document].append(module)
    return modules


def _relevant(modules: dict[str, list[ModuleRow]], question: Question) -> set[int]:
    """The ids of the modules that answer a question; of all of its document where the answer is
    written otherwise."""
    own = modules[question.document]
    answers = [answer.casefold() for answer in question.answers]
    naming = {m.id for m in own if any(answer in m.text.casefold() for answer in answers)}
    return naming or {module.id for module in own}


def _answered(
    rag: RagCache, collection: str, questions: Sequence[Question], setting: RetrievalSetting
) -> Iterator[dict[str, Any]]:
    for share in setting.answered:
        [report] = evaluate_modes(
            rag, collection, questions, ["rooted"], k=setting.k, relative_threshold=share
        ).reports
        yield {
            "relative_threshold": share, "questions": report.questions,
            "exact_match": report.exact_match, "f1": report.f1,
        }  # fmt: skip


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def main(
    data: Annotated[
        Path | None, typer.Option(help="A folder with xquad.en.json and qed.jsonl, or with one.")
    ] = None,
    handbook: Annotated[bool, typer.Option(help="Whether the handbook is measured, too.")] = True,
    questions: Annotated[int, typer.Option(min=1, help="The most of a set to search.")] = 200,
    answers: Annotated[int, typer.Option(min=1, help="The most of a set to answer.")] = 100,
    seed: Annotated[int, typer.Option(help="Of the samples.")] = 7,
    json_file: JsonFile = None,
) -> None:
    """Measures retrieval and answers, with and without the relative threshold."""
    sets = [handbook_set()] if handbook else []
    for name in ("xquad.en.json", "qed.jsonl"):
        if data is not None and (data / name).is_file():
            sets.append(load_set(data / name))
    embedder = MiniLM() if has_minilm() else None
    setting = RetrievalSetting(questions=questions, answers=answers, seed=seed)
    result = run_benchmark(partial(bench_retrieval, sets, embedder, setting))
    result |= {"machine": describe_machine()}
    found = plain_table("set", "search", "threshold", "nDCG", "recalled", "modules", left=2)
    for row in result["found"]:
        shares = (f"{row[name]:.4f}" for name in ("ndcg", "recalled"))
        threshold = str(row["relative_threshold"])
        found.add_row(row["set"], row["search"], threshold, *shares, f"{row['modules']:.2f}")
    marked = plain_table("set", "search", "threshold", "answers", "exact match", "F1", left=2)
    for row in result["answered"]:
        shares = (f"{100 * row[name]:.1f}%" for name in ("exact_match", "f1"))
        settings = (str(row["relative_threshold"]), str(row["questions"]))
        marked.add_row(row["set"], row["search"], *settings, *shares)
    print_figures([found, marked], result, json_file)


if __name__ == "__main__":
    typer.run(main)
