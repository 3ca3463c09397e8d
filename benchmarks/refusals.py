"""Refusals of a model by its calibration, on built-in questions that it was not fitted on.

    python benchmarks/refusals.py MODEL [--handbook 40] [--mode exact] [--examples FILE]

The built-in questions are asked once. Ten times, the calibration is fitted to the questions over
one half of the documents, drawn, and judged on the other half, and the other way round. With
--handbook, the calibration of all questions is judged on so many of the example handbook, each with
and without its document.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import fmean

from ragcache import RagCache
from ragcache.answers.confidence import ConfidenceFeatures
from ragcache.calibration import (
    CalibrationExample,
    RefusalReport,
    collect_examples,
    fit_built_in,
    judge,
    judge_by,
)
from ragcache.evaluation import load_dataset
from ragcache.evaluation.builtin import builtin_dataset
from ragcache_api.cli.console import example_handbook

SPLITS = 10

Examples = dict[str, list[CalibrationExample]]


def asked(model: str, count: int, mode: str | None, device: str) -> Examples:
    """Ask the built-in questions, and `count` of the handbook's."""
    found, built_in = {}, builtin_dataset()
    with (
        tempfile.TemporaryDirectory() as folder,
        RagCache.open(folder, model, embedding="none", device=device) as rag,
    ):
        began = time.process_time()
        rag.ingest("built-in", built_in.documents)
        found["built-in"] = collect_examples(
            rag, "built-in", built_in.questions, extractive=False, mode=mode
        )
        print(f"built-in questions: {time.process_time() - began:.0f} s of the processor")
        if count:
            rag.ingest("handbook", [example_handbook()])
            questions = load_dataset(Path("examples/questions.jsonl")).sample(count).questions
            found["handbook"] = collect_examples(
                rag, "handbook", questions, extractive=False, mode=mode
            )
    return found


def read_or_ask(file: Path | None, ask: Callable[[], Examples]) -> Examples:
    """Return the examples in the file, if there is one, or ask and write them."""
    if file is not None and file.exists():
        return {
            name: [
                CalibrationExample(**{**row, "evidence": ConfidenceFeatures(**row["evidence"])})
                for row in rows
            ]
            for name, rows in json.loads(file.read_text()).items()
        }
    found = ask()
    if file is not None:
        file.write_text(
            json.dumps({name: [asdict(e) for e in each] for name, each in found.items()})
        )
    return found


def halves(examples: Sequence[CalibrationExample], seed: int) -> list[list[CalibrationExample]]:
    """Divide examples by the documents of their questions."""
    documents = {each.question: each.document for each in builtin_dataset().questions}
    names = sorted(set(documents.values()))
    chosen = set(random.Random(seed).sample(names, len(names) // 2))
    return [
        [each for each in examples if (documents[each.question] in chosen) is one]
        for one in (True, False)
    ]


def held_out(examples: Sequence[CalibrationExample]) -> list[RefusalReport]:
    """Judge each half of the questions by a calibration of the other, for all divisions."""
    reports = []
    for seed in range(SPLITS):
        for fitting, judged in (halves(examples, seed), halves(examples, seed)[::-1]):
            fitted = fit_built_in(fitting)
            reports.append(judge(judge_by(fitted, judged), fitted.min_confidence))
    return reports


def print_report(name: str, reports: Sequence[RefusalReport]) -> None:
    """Print the mean shares of refusals, as a row of Markdown."""
    shares = ("refused_unanswerable", "refused_right", "refused_wrong")
    means = [fmean(getattr(each, share) for each in reports) for share in shares]
    first = reports[0]
    counts = f"{first.answerable} / {first.right} / {first.unanswerable}"
    cells = " | ".join(f"{100 * mean:.1f} %" for mean in means)
    print(f"| {name} | {counts} | {cells} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--handbook", type=int, default=0)
    parser.add_argument("--examples", type=Path, help="a file to keep what was asked in")
    parser.add_argument("--mode", help="by default the model's own default mode")
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    found = read_or_ask(
        options.examples,
        lambda: asked(options.model, options.handbook, options.mode, options.device),
    )
    print("| set | with an answer / right / without | without: refused | right: | wrong: |")
    print("|---|---|---|---|---|")
    print_report("built-in, held out", held_out(found["built-in"]))
    fitted = fit_built_in(found["built-in"])
    own = judge(judge_by(fitted, found["built-in"]), fitted.min_confidence)
    print_report("built-in, as fitted", [own])
    if "handbook" in found:
        report = judge(judge_by(fitted, found["handbook"]), fitted.min_confidence)
        print_report("handbook", [report])
    print(fitted)


if __name__ == "__main__":
    main()
