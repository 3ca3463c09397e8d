"""Wordings of the default instruction, by the answers and refusals of a model.

    python benchmarks/wordings.py MODEL --data DATA --json FILE

Each wording is asked the same questions of the example handbook and of XQuAD (DATA/xquad.en.json),
with and without their document. F1 is of the questions with it, with the paired difference from the
default wording. Refusals are those of a calibration with five folds. The table is printed as
Markdown.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any

import typer
from harness import (
    DeviceOption,
    JsonFile,
    Progress,
    describe_machine,
    print_figures,
    run_benchmark,
)
from quality import handbook_set, load_set, open_for_questions

from ragcache import RagCache
from ragcache.calibration import CalibrationExample, collect_examples, cross_validate
from ragcache.errors import ConfigurationError
from ragcache.evaluation import Dataset, exact_match, f1, paired_bootstrap
from ragcache.models import INSTRUCTION, READER_INSTRUCTION

WORDINGS = (
    INSTRUCTION,
    READER_INSTRUCTION,
    "Read the documents and answer the question at the end with a short phrase copied from them.",
    f"{READER_INSTRUCTION} If the documents do not answer it, say \"not in the documents\".",
    "Extract the answer to the question from the documents below. Reply with the exact words of "
    "the answer and nothing else.",
    "Below are documents and a question. Reply with the answer only: a name, a number, a date or a "
    "few words from the documents. No sentence, no explanation.",
    "You answer questions about documents. Quote the few words of the documents that answer the "
    "question. Write nothing else.",
    "Answer from the documents. Short answer only. Do not use other knowledge.",
    "Documents:",
)  # fmt: skip
OTHERS = 16  # documents of a set beyond those of the questions


def drawn(dataset: Dataset, count: int) -> Dataset:
    """Some questions, over their documents and a few others."""
    questions = dataset.sample(count).questions
    asked = {each.document for each in questions}
    own = [each for each in dataset.documents if each.id in asked]
    others = [each for each in dataset.documents if each.id not in asked]
    return Dataset(dataset.name, dataset.format, questions, (*own, *others[:OTHERS]))


def ask_wording(rag: RagCache, wording: str, sets: Sequence[Dataset]) -> dict[str, Any]:
    """Marks of the answers to all questions, and the refusals of a calibration."""
    examples: list[CalibrationExample] = []
    marks: dict[str, list[float]] = {"f1": [], "exact_match": []}
    for each in sets:
        rag.collections.set_instruction(each.name, wording)
        found = collect_examples(rag, each.name, each.questions, extractive=False)
        examples += found
        for question, example in zip(each.questions, found, strict=False):  # with the document
            marks["f1"].append(f1(example.answer, question.answers))
            marks["exact_match"].append(exact_match(example.answer, question.answers))
    return {"wording": wording, **marks, **_refusals(examples)}


def _refusals(examples: Sequence[CalibrationExample]) -> dict[str, Any]:
    right = sum(each.right for each in examples)
    try:
        report = cross_validate(examples)
    except ConfigurationError:  # too few right answers
        return {"right": right, "refused_unanswerable": None, "refused_right": None}
    return {
        "right": right, "refused_unanswerable": report.refused_unanswerable,
        "refused_right": report.refused_right,
    }  # fmt: skip


def bench_wordings(
    model: str | None, data: Path | None, count: int, device: str = "cpu",
    keep: Callable[[dict[str, Any]], object] = lambda _: None,
    progress: Progress = lambda _: None,
) -> dict[str, Any]:  # fmt: skip
    """Marks and refusals of every wording. count: questions of each set; keep: called with the
    result after each wording."""
    sets = [handbook_set()]
    if data is not None:
        sets.append(load_set(data / "xquad.en.json"))
    sets = [drawn(each, count) for each in sets]
    rows: list[dict[str, Any]] = []
    result = {
        "machine": describe_machine(), "model": model, "questions": count, "wordings": rows,
    }  # fmt: skip
    with (
        tempfile.TemporaryDirectory() as state,
        open_for_questions(state, model, device) as rag,
    ):
        for each in sets:
            rag.ingest(each.name, each.documents)
        for number, wording in enumerate(WORDINGS):
            progress(f"wording {number + 1} of {len(WORDINGS)}")
            rows.append(ask_wording(rag, wording, sets))
            keep(result)
    return result


def lines_of(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """The table, with the first wording as the one that others are compared with."""
    yield "| wording | EM | F1 | less the default | right | without: refused | right: refused |"
    yield "|---|---|---|---|---|---|---|"
    for row in rows:
        difference, _ = paired_bootstrap(row["f1"], rows[0]["f1"])
        refused = (
            "" if row[name] is None else f"{100 * row[name]:.0f} %"
            for name in ("refused_unanswerable", "refused_right")
        )  # fmt: skip
        shown = (
            row["wording"], f"{100 * fmean(row['exact_match']):.1f}",
            f"{100 * fmean(row['f1']):.1f}",
            f"{100 * (fmean(row['f1']) - fmean(rows[0]['f1'])):+.1f} "
            f"({100 * difference.low:+.1f} to {100 * difference.high:+.1f})",
            f"{row['right']} of {len(row['f1'])}", *refused,
        )  # fmt: skip
        yield f"| {' | '.join(shown)} |"


def main(
    model: Annotated[str, typer.Argument(help="A folder, a hub name or a GGUF file.")],
    data: Annotated[Path | None, typer.Option(help="The folder with xquad.en.json.")] = None,
    questions: Annotated[int, typer.Option(min=1, help="Of each set.")] = 48,
    device: DeviceOption = "cpu",
    json_file: JsonFile = None,
) -> None:
    """Compare wordings of the default instruction."""

    def keep(figures: dict[str, Any]) -> None:
        print_figures([], figures, json_file)

    result = run_benchmark(
        lambda progress: bench_wordings(model, data, questions, device, keep, progress)
    )
    print_figures([], result, json_file)
    typer.echo("\n".join(lines_of(result["wordings"])))


if __name__ == "__main__":
    typer.run(main)
