"""Refusals of models by their calibrations, on built-in questions that these were not fitted on.

    python benchmarks/refusals.py MODEL ... [--data DATA] [--examples FOLDER] [--json FILE]

The built-in questions are asked once. Ten times, the calibration is fitted to the questions over
one half of the documents, drawn, and judged on the other half, and the other way round. The
calibration of all of them is judged on questions of the example handbook and, with --data, of XQuAD
(DATA/xquad.en.json) and QED (DATA/qed.jsonl), each with and without its document. With several
models, the calibration of the others is judged on each model's answers, and so is the calibration
of all, which is printed (`ragcache.answers.confidence.GENERAL`).
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
from quality import handbook_set, load_set
from wordings import drawn

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
BUILT_IN = builtin_dataset().name
OTHERS = ("xquad.en.json", "qed.jsonl")
SHARES = ("refused_unanswerable", "refused_right", "refused_wrong")

Examples = Mapping[str, Sequence[CalibrationExample]]


def ask_sets(
    model: str, data: Path | None, count: int, device: str, progress: Progress
) -> Examples:
    """Ask a model the built-in questions, and so many of each other set."""
    sets = [builtin_dataset(), drawn(handbook_set(), count)]
    if data is not None:
        sets += [drawn(load_set(data / name), count) for name in OTHERS]
    found: dict[str, list[CalibrationExample]] = {}
    with (
        tempfile.TemporaryDirectory() as folder,
        RagCache.open(folder, model, embedding="none", device=device) as rag,
    ):
        for each in sets:
            progress(f"{Path(model).name}: {each.name}")
            rag.ingest(each.name, each.documents)
            found[each.name] = collect_examples(rag, each.name, each.questions, extractive=False)
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
    """The refusals of each model, by its own calibration, by the other models' and by that of all.

    Args:
        asked: Of each model, the examples of each set.

    Returns:
        rows, with the mean shares of refusals, and `general`, the calibration of all models.
    """
    built_in = {model: found[BUILT_IN] for model, found in asked.items()}
    general = fit_built_in(list(chain.from_iterable(built_in.values())))
    rows = []
    for model, found in asked.items():
        rows.append(_row(model, BUILT_IN, "own, held out", held_out(built_in[model])))
        fits = {"own": fit_built_in(built_in[model])}
        others = [each for name, each in built_in.items() if name != model]
        if others:
            fits["others"] = fit_built_in(list(chain.from_iterable(others)))
            fits["general"] = general
        rows += [
            _row(model, name, kind, [_judged_by(fitted, each)])
            for kind, fitted in fits.items()
            for name, each in found.items()
        ]
    return {"rows": rows, "general": general.to_dict(), "machine": describe_machine()}


def _row(model: str, name: str, kind: str, reports: Sequence[RefusalReport]) -> dict[str, Any]:
    first = reports[0]
    counts = {key: getattr(first, key) for key in ("answerable", "right", "unanswerable")}
    means = {share: fmean(getattr(each, share) for each in reports) for share in SHARES}
    return {"model": model, "set": name, "calibration": kind, **counts, **means}


def main(
    models: Annotated[list[str], typer.Argument(help="Names, folders or files of models.")],
    data: Annotated[Path | None, typer.Option(help="Folder of published sets.")] = None,
    questions: Annotated[int, typer.Option(min=1, help="Questions of each other set.")] = 120,
    examples: Annotated[Path | None, typer.Option(help="Folder that keeps what was asked.")] = None,
    device: DeviceOption = "cpu",
    json_file: JsonFile = None,
) -> None:
    """Measure refusals on questions that no calibration was fitted on."""

    def ask(model: str, progress: Progress) -> Examples:
        file = None if examples is None else examples / f"{Path(model).stem}.json"
        if file is not None and file.exists():
            return read_examples(file)
        found = ask_sets(model, data, questions, device, progress)
        if file is not None:
            write_examples(file, found)
        return found

    result = run_benchmark(
        lambda progress: bench_refusals({Path(each).stem: ask(each, progress) for each in models})
    )
    headers = (
        "set",
        "calibration",
        "with an answer / right / without",
        "without: refused",
        "right:",
        "wrong:",
    )
    table = plain_table("model", *headers, left=3)
    for row in result["rows"]:
        counts = f"{row['answerable']} / {row['right']} / {row['unanswerable']}"
        shares = [f"{100 * row[share]:.1f} %" for share in SHARES]
        table.add_row(row["model"], row["set"], row["calibration"], counts, *shares)
    print_figures([table], result, json_file)


if __name__ == "__main__":
    typer.run(main)
