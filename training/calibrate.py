"""Fits the calibration that ships with the reader, and measures what refusing does.

    python3 training/calibrate.py --data DATA

Asks the questions of the handbook, of held-out paragraphs and of XQuAD English, with and without the
document that answers each, and the handbook the questions of the others. Writes `calibration.json` beside
the reader, the curves to `docs/images/refusals.svg`, and prints the tables of docs/measurements/quality.md. `--reader`
takes the folder of another reader, whose calibration is written there; `--examples` keeps what was collected,
and reads it again.

The weights are fitted on all sets, the least confidence is chosen on the handbook: its questions were written for
the collection, those of the others each for one paragraph.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from dataclasses import asdict, replace
from itertools import accumulate
from pathlib import Path

from matplotlib.figure import Figure

from evaluation_files import held_out, write, xquad
from ragcache import RagCache
from ragcache.calibration import (
    CalibrationExample,
    RefusalReport,
    choose_threshold,
    collect_examples,
    cross_validate,
    fit_calibration,
    judge,
    judge_by,
)
from ragcache.errors import ConfigurationError
from ragcache.evaluation import Question
from ragcache.models import LoadedModel, load_model
from ragcache.models.reader import READER
from ragcache.answers.confidence import ConfidenceFeatures

ROOT = Path(__file__).parent.parent
EVERY = {"handbook": 1, "held-out paragraphs": 7, "XQuAD English": 6}  # of the questions one in so many is asked
MODULES = 4  # the reader was trained on no more, and answers few questions over eight
FOREIGN = 100  # questions of XQuAD that the handbook is asked


def read_questions(file: Path) -> list[Question]:
    lines = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    return [
        Question(row.get("id", ""), row["question"], tuple(row["answers"]), row["document"])
        for row in lines
    ]


def sets_of(folder: Path, data: Path) -> dict[str, tuple[Path, list[Question]]]:
    """Documents and questions of each set, by its name."""
    write(folder / "held_out", held_out(Path(__file__).parent))
    sets = {"handbook": (ROOT / "examples" / "handbook", ROOT / "examples" / "questions.jsonl")}
    sets["held-out paragraphs"] = (folder / "held_out/documents", folder / "held_out/questions.jsonl")
    if (data / "xquad.en.json").exists():
        write(folder / "xquad", xquad(data / "xquad.en.json"))
        sets["XQuAD English"] = (folder / "xquad/documents", folder / "xquad/questions.jsonl")
    return {name: (documents, read_questions(file)) for name, (documents, file) in sets.items()}


def collect(
    model: LoadedModel, sets: dict[str, tuple[Path, list[Question]]], folder: Path
) -> dict[str, list[CalibrationExample]]:
    """Examples of each set."""
    found = {}
    with RagCache.open(folder / "state", model, embedding="none") as rag:
        for name, (documents, questions) in sets.items():
            rag.ingest(name, [documents])
            asked = questions[:: EVERY[name]]
            if name == "handbook":
                others = sets.get("XQuAD English", ((), ()))[1][:FOREIGN]
                asked += [replace(q, answers=(), document="") for q in others]
            found[name] = collect_examples(
                rag, name, asked, progress=lambda done, total: print(f"\r{done}/{total}", end="", flush=True)
            )
            print(f"\r{name}: {len(found[name])} questions asked")
    return found


def collected(reader: Path, data: Path, file: Path | None) -> dict[str, list[CalibrationExample]]:
    """Examples of each set, from the file if there is one."""
    if file is not None and file.exists():
        kept = json.loads(file.read_text(encoding="utf-8"))
        return {
            name: [CalibrationExample(**{**each, "evidence": ConfidenceFeatures(**each["evidence"])}) for each in rows]
            for name, rows in kept.items()
        }
    model = load_model(None if reader == READER else reader)
    with tempfile.TemporaryDirectory() as made:
        found = collect(replace(model, extractive=True), sets_of(Path(made), data), Path(made))
    if file is not None:
        rows = {name: [asdict(each) for each in examples] for name, examples in found.items()}
        file.write_text(json.dumps(rows), encoding="utf-8")
    return found


def row(name: str, report: RefusalReport) -> str:
    cells = (
        report.refused_unanswerable, report.refused_right, report.refused_wrong, report.refused_answerable,
    )
    shares = " | ".join(f"{100 * each:.1f} %" for each in cells)
    return f"| {name} | {report.answerable} / {report.right} / {report.unanswerable} | {shares} | {report.area:.2f} |"


def refusals(examples: list[CalibrationExample]) -> tuple[list[float], list[float]]:
    """Percentages of right answers, and of answers to questions that have none, which are refused, as the least
    confidence rises."""
    ranked = sorted(examples, key=lambda each: each.confidence or 0.0)
    right = accumulate(each.right for each in ranked)
    vain = accumulate(not each.answerable for each in ranked)
    rights, vains = sum(e.right for e in ranked), sum(not e.answerable for e in ranked)
    return [100 * n / max(1, rights) for n in right], [100 * n / max(1, vains) for n in vain]


def plot_refusals(judged: dict[str, list[CalibrationExample]], reports: dict[str, RefusalReport], file: Path) -> None:
    """Draws risk over coverage, and refusals of questions without an answer over those of right answers, a line for
    each set."""
    figure = Figure(figsize=(11, 4), layout="constrained", dpi=150)
    risk, refused = figure.subplots(1, 2)
    for name, report in reports.items():
        risk.plot(*(100 * each for each in report.risk_coverage()), label=name)
        refused.plot(*refusals(judged[name]), label=name)
        point = 100 * report.refused_right, 100 * report.refused_unanswerable
        refused.plot(*point, "o", color=refused.lines[-1].get_color())
    risk.set(xlabel="coverage: answered, %", ylabel="risk: of the answered, not right, %")
    refused.set(
        xlabel="right answers refused, %", ylabel="without an answer, refused, %",
        xlim=(0, 50), ylim=(0, 102),
    )  # fmt: skip
    for axes in (risk, refused):
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(file)


HEAD = (
    "| set | answerable / right / without | without an answer: refused | right: refused | wrong: refused | "
    "all answerable: refused | area |\n|---|---|---|---|---|---|---|"
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--reader", type=Path, default=READER)
    parser.add_argument("--plot", type=Path, default=ROOT / "docs" / "images" / "refusals.svg")
    parser.add_argument("--examples", type=Path, help="a file to keep what was collected in")
    arguments = parser.parse_args()
    found = collected(arguments.reader, arguments.data, arguments.examples)
    fitted = fit_calibration([each for examples in found.values() for each in examples])
    fitted = replace(choose_threshold(fitted, found["handbook"]), most_modules=MODULES)
    (arguments.reader / "calibration.json").write_text(
        json.dumps(fitted.to_dict(), indent=2) + "\n", encoding="utf-8"
    )
    print(f"\n{fitted}\n\nthe calibration that ships, over what it was fitted on\n{HEAD}")
    reports, judged = {}, {}
    for name, examples in found.items():
        judged[name] = judge_by(fitted, examples)
        reports[name] = judge(judged[name], fitted.min_confidence)
        print(row(name, reports[name]))
    print(f"\nfitted on the other sets, with the least confidence of 5 % of their right answers\n{HEAD}")
    for name, examples in found.items():
        others = fit_calibration([e for other in found if other != name for e in found[other]])
        print(row(name, judge(judge_by(others, examples), others.min_confidence)))
    print(f"\nfitted on the set itself, each fifth judged by the others (`ragcache eval --calibrate`)\n{HEAD}")
    for name, examples in found.items():
        try:
            print(row(name, cross_validate(examples)))
        except ConfigurationError as error:  # too few right answers
            print(f"{name}: {error}")
    plot_refusals(judged, reports, arguments.plot)


if __name__ == "__main__":
    main()
