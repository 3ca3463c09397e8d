"""Refusals of models by their calibrations, on built-in questions that these were not fitted on.

    python benchmarks/refusals.py MODEL ... [--handbook 40] [--examples FOLDER] [--json FILE]

The built-in questions are asked once. Ten times, the calibration is fitted to the questions over
one half of the documents, drawn, and judged on the other half, and the other way round. With
--handbook, the calibration of all questions is judged on so many of the example handbook, each with
and without its document. With several models, the calibration of the others is judged on each
model's answers, and the calibration of all is printed (`ragcache.answers.confidence.GENERAL`).
"""

from __future__ import annotations

import json
import random
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from statistics import fmean
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
from quality import handbook_set

from ragcache import RagCache
from ragcache.answers.confidence import Calibration, ConfidenceFeatures
from ragcache.calibration import (
    CalibrationExample,
    RefusalReport,
    collect_examples,
    fit_built_in,
    judge,
    judge_by,
)
from ragcache.evaluation.builtin import builtin_dataset

SPLITS = 10
SHARES = ("refused_unanswerable", "refused_right", "refused_wrong")

Examples = Mapping[str, Sequence[CalibrationExample]]


def ask_sets(model: str, handbook: int, device: str, progress: Progress) -> Examples:
    """Ask a model the built-in questions, and so many of the handbook's."""
    sets = [builtin_dataset()]
    found: dict[str, list[CalibrationExample]] = {}
    if handbook:
        sets.append(handbook_set())
    with (
        tempfile.TemporaryDirectory() as folder,
        RagCache.open(folder, model, embedding="none", device=device) as rag,
    ):
        for each in sets:
            progress(f"{Path(model).name}: {each.name}")
            rag.ingest(each.name, each.documents)
            questions = each.questions if each is sets[0] else each.sample(handbook).questions
            found[each.name] = collect_examples(rag, each.name, questions, extractive=False)
    return found


def read_examples(file: Path) -> Examples:
    """Read the answers of a model that `write_examples` wrote."""
    return {
        name: [
            CalibrationExample(**{**row, "evidence": ConfidenceFeatures(**row["evidence"])})
            for row in rows
        ]
        for name, rows in json.loads(file.read_text()).items()
    }


def write_examples(file: Path, found: Examples) -> None:
    """Write the answers of a model, with their evidence."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps({name: [asdict(e) for e in each] for name, each in found.items()}))


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
            reports.append(_judged_by(fit_built_in(fitting), judged))
    return reports


def _judged_by(fitted: Calibration, examples: Sequence[CalibrationExample]) -> RefusalReport:
    return judge(judge_by(fitted, examples), fitted.min_confidence)


def bench_refusals(asked: Mapping[str, Examples]) -> dict[str, Any]:
    """The refusals of each model, by its own calibration and by the other models'.

    Args:
        asked: Of each model, the examples of each set; `built-in` is one.

    Returns:
        rows, with the mean shares of refusals, and `general`, the calibration of all models.
    """
    rows = []
    for model, found in asked.items():
        own = fit_built_in(found["built-in"])
        rows.append(_row(model, "built-in, held out", held_out(found["built-in"])))
        rows += [_row(model, name, [_judged_by(own, each)]) for name, each in found.items()]
        others = [each["built-in"] for name, each in asked.items() if name != model]
        if others:
            fitted = fit_built_in(list(chain.from_iterable(others)))
            reports = {name: [_judged_by(fitted, each)] for name, each in found.items()}
            rows += [_row(model, f"{name}, by others", each) for name, each in reports.items()]
    every = list(chain.from_iterable(each["built-in"] for each in asked.values()))
    return {"rows": rows, "general": fit_built_in(every).to_dict(), "machine": describe_machine()}


def _row(model: str, name: str, reports: Sequence[RefusalReport]) -> dict[str, Any]:
    first = reports[0]
    counts = {key: getattr(first, key) for key in ("answerable", "right", "unanswerable")}
    means = {share: fmean(getattr(each, share) for each in reports) for share in SHARES}
    return {"model": model, "set": name, **counts, **means}


def main(
    models: Annotated[list[str], typer.Argument(help="Names, folders or files of models.")],
    handbook: Annotated[int, typer.Option(min=0, help="Questions of the handbook.")] = 0,
    examples: Annotated[Path | None, typer.Option(help="Folder that keeps what was asked.")] = None,
    device: DeviceOption = "cpu",
    json_file: JsonFile = None,
) -> None:
    """Measure refusals on questions that no calibration was fitted on."""

    def ask(model: str, progress: Progress) -> Examples:
        file = None if examples is None else examples / f"{Path(model).stem}.json"
        if file is not None and file.exists():
            return read_examples(file)
        found = ask_sets(model, handbook, device, progress)
        if file is not None:
            write_examples(file, found)
        return found

    result = run_benchmark(
        lambda progress: bench_refusals({Path(each).stem: ask(each, progress) for each in models})
    )
    headers = ("set", "with an answer / right / without", "without: refused", "right:", "wrong:")
    table = plain_table("model", *headers, left=2)
    for row in result["rows"]:
        counts = f"{row['answerable']} / {row['right']} / {row['unanswerable']}"
        shares = [f"{100 * row[share]:.1f} %" for share in SHARES]
        table.add_row(row["model"], row["set"], counts, *shares)
    print_figures([table], result, json_file)


if __name__ == "__main__":
    typer.run(main)
