"""Questions to a folder of one's own after a warm opening: how soon, and which are refused.

    python benchmarks/own_folder.py MODEL --json FILE

The documents and questions of benchmarks/notes.txt, which no calibration was fitted to: ten notes
of a household, with twenty questions that they answer and twenty that they do not answer. They are
encoded once, and asked once. A second process would open the folder as the second part does: each
question is asked again, in the default mode, by the calibration in use.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer
from harness import (
    DeviceOption,
    JsonFile,
    Progress,
    describe_machine,
    plain_table,
    print_figures,
    run_benchmark,
)

from ragcache import Answer, RagCache
from ragcache.evaluation import Question, contains_answer, f1
from ragcache.evaluation.builtin import read_dataset

NOTES = Path(__file__).with_name("notes.txt")
RIGHT = 0.5  # F1 from which an answer is right


def bench_own_folder(
    model: str | None, file: Path, device: str, quantization: str | None,
    progress: Progress = lambda _: None,
) -> dict[str, Any]:  # fmt: skip
    """Seconds of both openings, and of each question in the second, with its answer.

    Args:
        model: Name, folder or file of the model.
        file: Documents and questions, as `read_dataset` reads them.
        device: cpu or cuda.
        quantization: Weights of the model, as `RagCache.open` takes it.
    """
    dataset = read_dataset(file, "notes")
    options: dict[str, Any] = {
        "embedding": "none", "device": device, "quantization": quantization,
    }  # fmt: skip
    openings, rows = [], []
    with tempfile.TemporaryDirectory() as folder:
        for warm in (False, True):
            progress("opening")
            began = time.perf_counter()
            with RagCache.open(folder, model, **options) as rag:
                openings.append(time.perf_counter() - began)
                if not warm:
                    rag.ingest(dataset.name, dataset.documents)
                for number, question in enumerate(dataset.questions):
                    progress(f"question {number} of {len(dataset.questions)}")
                    answer = rag.ask(question.question, collection=dataset.name)
                    if warm:
                        rows.append(_row(question, answer))
    return {
        "model": model, "device": device, "quantization": quantization,
        "first_opening_seconds": openings[0], "opening_seconds": openings[1],
        "questions": rows, "machine": describe_machine(),
    }  # fmt: skip


def _row(question: Question, answer: Answer) -> dict[str, Any]:
    shown = f1(answer.text, question.answers) >= RIGHT or contains_answer(
        answer.text, question.answers
    )
    return {
        "question": question.question, "answer": answer.text, "confidence": answer.confidence,
        "answerable": bool(question.answers), "refused": answer.finish_reason == "no_answer",
        "right": bool(question.answers) and shown, "mode": str(answer.mode),
        "first_token_seconds": answer.timings.first_token, "seconds": answer.timings.total,
    }  # fmt: skip


def _table(result: dict[str, Any]) -> Any:
    headers = ("asked", "right", "refused", "seconds, median", "most", "first token, median")
    table = plain_table("questions", *headers)
    for name, kind in (("with an answer", True), ("without", False)):
        rows = [each for each in result["questions"] if each["answerable"] is kind]
        seconds = [each["seconds"] for each in rows]
        first = [each["first_token_seconds"] for each in rows]
        table.add_row(
            name, str(len(rows)), str(sum(each["right"] for each in rows)),
            str(sum(each["refused"] for each in rows)), f"{median(seconds):.2f}",
            f"{max(seconds):.2f}", f"{median(first):.2f}",
        )  # fmt: skip
    return table


def main(
    model: Annotated[str, typer.Argument(help="Name, folder or file of a model.")],
    file: Annotated[Path, typer.Option(help="Documents and questions.")] = NOTES,
    quantization: Annotated[str, typer.Option(help="auto, int8, int4 or none.")] = "none",
    device: DeviceOption = "cpu",
    json_file: JsonFile = None,
) -> None:
    """Ask a folder of one's own."""
    kind = None if quantization == "none" else quantization
    result = run_benchmark(lambda progress: bench_own_folder(model, file, device, kind, progress))
    print_figures([_table(result)], result, json_file)


if __name__ == "__main__":
    typer.run(main)
