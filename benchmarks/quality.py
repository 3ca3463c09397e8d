"""Quality of answers, set by set and mode by mode: the figures of docs/measurements/quality.md.

    python benchmarks/quality.py --data DATA --json FILE

DATA holds those of the files in `SETS` that are to be asked; the example handbook is always there.
The table is printed as Markdown. *Held* is the share of questions of which the retrieved modules
hold an accepted answer, and *F1 held* the F1 of these. All modes are asked one portion of the
questions after another, and the file is written after each portion, so that a run that is ended
leaves its figures.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
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
    print_figures,
    run_benchmark,
)

from ragcache import RagCache
from ragcache.config import DEFAULT_RELATIVE_THRESHOLD
from ragcache.documents import load_sources
from ragcache.evaluation import (
    Dataset,
    Evaluation,
    EvaluationReport,
    Question,
    compare_reports,
    contains_answer,
    evaluate_modes,
    load_dataset,
)
from ragcache.evaluation.datasets import DatasetBuilder, Over, answers_of, read_rows
from ragcache_api.cli.console import example_handbook
from ragcache_api.cli.evaluate import format_mean

MODES = "exact,rooted,primed:16,isolated"
TOKENS = 32  # of an answer
PORTION = 25  # questions that are asked in all modes before the next ones


@dataclass(frozen=True, slots=True)
class QuestionSet:
    """How a set is asked.

    Attributes:
        name: In the table.
        file: In the data folder; "" for the example handbook.
        questions: The most that are asked, drawn.
        over: See `load_set`.
        k, relative_threshold: See `AskOptions`.
    """

    name: str
    file: str
    questions: int = 24
    over: Over = "all"
    k: int = 4
    relative_threshold: float = DEFAULT_RELATIVE_THRESHOLD


SETS = (
    QuestionSet("handbook", "", questions=48),
    QuestionSet("QED", "qed.jsonl", questions=48),
    QuestionSet("XQuAD, English", "xquad.en.json", questions=48),
    QuestionSet("MuSiQue", "musique_s.json", over="own", k=10, relative_threshold=0.0),
    QuestionSet("XQuAD, Chinese", "xquad.zh.json", over="own"),
    QuestionSet("CMRC 2018", "cmrc2018.trial.json", over="own"),
    QuestionSet("COVID-QA", "covid_qa.json", questions=12, over="own"),
    QuestionSet("QMSum", "qmsum.val.jsonl", questions=12, over="own"),
)
"""Sets whose documents are too long to encode for a few questions.

Their questions are asked over each question's own documents.
"""


Read = Callable[[DatasetBuilder, Any, int], None]
"""Adds a row, with its number in the file."""


def _read_cmrc(builder: DatasetBuilder, row: Any, _: int) -> None:
    """A context of CMRC 2018 as it was first published."""
    document = builder.add_document(row["context_text"], row.get("title", ""))
    for asked in row["qas"]:
        answers = dict.fromkeys(answers_of(asked))
        builder.add_question(asked["query_id"], asked["query_text"], answers, [document])


def _read_qed(builder: DatasetBuilder, row: Any, number: int) -> None:
    document = builder.add_document(row["paragraph_text"], row.get("title_text", ""))
    answers = [each["string"] for each in row["original_nq_answers"]]
    question = row["question"] if "question" in row else row["question_text"]
    builder.add_question(row.get("example_id", number), question, answers, [document])


def _read_passages(builder: DatasetBuilder, row: Any, number: int) -> None:
    """A question of MuSiQue, as CacheBlend publishes it."""
    documents = [builder.add_document(each["text"], each.get("title", "")) for each in row["ctxs"]]
    builder.add_question(row.get("id", number), row["question"], answers_of(row), documents)


def _read_meeting(builder: DatasetBuilder, row: Any, number: int) -> None:
    """A meeting of QMSum, with two lists of queries."""
    turns = [f"{each['speaker']}: {each['content']}" for each in row["meeting_transcripts"]]
    document = builder.add_document("\n\n".join(turns))
    queries = [*row.get("general_query_list", ()), *row.get("specific_query_list", ())]
    for index, asked in enumerate(queries):
        builder.add_question(f"{number}-{index}", asked["query"], [asked["answer"]], [document])


_READERS: dict[str, tuple[str, Read]] = {
    "context_text": ("CMRC", _read_cmrc),
    "paragraph_text": ("QED", _read_qed),
    "ctxs": ("MuSiQue", _read_passages),
    "meeting_transcripts": ("QMSum", _read_meeting),
}
"""Published formats, by a key of their rows."""


def load_set(path: Path, over: Over = "all") -> Dataset:
    """Read a published set, or what `load_dataset` reads."""
    _, first = next(read_rows(path))
    for key, (name, read) in _READERS.items():
        if key in first:
            builder = DatasetBuilder(over, skip_empty=True)
            for number, row in read_rows(path):
                read(builder, row, number)
            return builder.build(path, name)
    return load_dataset(path, over)


def handbook_set() -> Dataset:
    """The example handbook with its questions."""
    folder = example_handbook()
    known = load_dataset(folder.parent / "questions.jsonl")
    documents = load_sources([folder]).documents
    return Dataset("handbook", known.format, known.questions, tuple(documents))


def bench_quality(
    data: Path | None, sets: Sequence[QuestionSet], questions: int | None = None,
    seed: int = 0, model: str | None = None, modes: str = MODES, device: str = "cpu",
    keep: Callable[[dict[str, Any]], object] = lambda _: None,
    progress: Progress = lambda _: None,
) -> dict[str, Any]:  # fmt: skip
    """Figures of each set that is there, without its answers and texts.

    Args:
        data: The folder of the files.
        sets: What to ask.
        questions: The most of each set, instead of its own number.
        seed: Of the samples and of the bootstraps.
        model: A folder, a hub name or a GGUF file; the embedded reader by default.
        modes: With commas.
        device: cpu or cuda.
        keep: Called with the result after each portion of the questions.
        progress: Called with what is done now.
    """
    rows: dict[str, dict[str, Any]] = {}
    result = {"machine": describe_machine(), "seed": seed, "device": device}
    for each in sets:
        path = None if not each.file or data is None else data / each.file
        if each.file and (path is None or not path.is_file()):
            continue
        dataset = handbook_set() if path is None else load_set(path, each.over)
        drawn = dataset.sample(questions or each.questions, seed)
        for figures in _evaluate(each, dataset, drawn, seed, model, modes, device, progress):
            rows[each.name] = {"set": asdict(each), **figures}
            keep(result | {"sets": list(rows.values())})
    return result | {"sets": list(rows.values())}


def _evaluate(
    each: QuestionSet, dataset: Dataset, drawn: Dataset, seed: int, model: str | None,
    modes: str, device: str, progress: Progress,
) -> Iterator[dict[str, Any]]:  # fmt: skip
    """The figures of the questions so far, after each portion."""
    with (
        tempfile.TemporaryDirectory() as state,
        open_for_questions(state, model, device) as rag,
    ):
        progress(f"{each.name}: encoding {len(drawn.documents)} documents")
        rag.ingest("evaluated", drawn.documents)
        setting = {
            "questions": each.name, "format": dataset.format,
            "asked": f"{len(drawn.questions)} of {len(dataset.questions)}, drawn with seed {seed}",
            "documents": len(drawn.documents),
            "over": "each question's own documents" if drawn.questions[0].own else "all documents",
            "model": rag.internals.shared.model.name, "retrieved by": "BM25",
            "k": each.k, "relative threshold": each.relative_threshold,
        }  # fmt: skip
        held: list[bool] = []
        parts: list[Evaluation] = []
        for begin in range(0, len(drawn.questions), PORTION):
            progress(f"{each.name}: {begin} of {len(drawn.questions)} questions")
            portion = drawn.questions[begin : begin + PORTION]
            held += [_is_held(rag, each, question) for question in portion]
            parts.append(evaluate_modes(
                rag, "evaluated", portion, modes.split(","), seed=seed, k=each.k,
                relative_threshold=each.relative_threshold,
            ))  # fmt: skip
            yield _figures(_joined(parts, setting, seed), held)


def open_for_questions(state: str, model: str | None, device: str) -> RagCache:
    """A folder with BM25 and short answers. On a GPU it leaves room for other processes."""
    on_gpu = device != "cpu"
    return RagCache.open(
        state, model, embedding="none", max_tokens=TOKENS, force_modes=True, device=device,
        private_bytes="1GiB" if on_gpu else None, device_bytes="2GiB" if on_gpu else None,
    )  # fmt: skip


def _is_held(rag: RagCache, each: QuestionSet, question: Question) -> bool:
    """Whether the modules that are retrieved hold an accepted answer, letter by letter."""
    selection = rag.retrieve(
        question.question, collection="evaluated", k=each.k,
        relative_threshold=each.relative_threshold, filters=question.filters,
    )  # fmt: skip
    texts = (hit.module.text for hit in selection.hits)
    return contains_answer("\n".join(texts), question.answers)


def _joined(parts: Sequence[Evaluation], setting: Mapping[str, Any], seed: int) -> Evaluation:
    """One evaluation of the questions of several ones."""
    by_mode = zip(*(part.reports for part in parts), strict=True)
    reports = tuple(
        EvaluationReport.of(
            same[0].mode, tuple(chain.from_iterable(each.marked for each in same)), seed
        )
        for same in by_mode
    )
    return Evaluation(setting, reports, compare_reports(reports, seed))


def _figures(evaluation: Evaluation, held: Sequence[bool]) -> dict[str, Any]:
    plain = evaluation.to_dict() | {"held": fmean(held)}
    for report in plain["reports"]:
        found = [each["f1"] for each, kept in zip(report["marked"], held, strict=True) if kept]
        report["f1_held"] = fmean(found) if found else None
        del report["marked"]
    return plain


def table_of(rows: Sequence[dict[str, Any]]) -> str:
    """The figures as a table of Markdown."""
    lines = [
        "| set, questions, held | mode | EM | F1 (95 %) | F1 held | less `exact` (95 %) | ROUGE-L "
        "| KL | agreement | TTFT | cached |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    return "\n".join([*lines, *(line for row in rows for line in _lines(row))])


def _lines(row: dict[str, Any]) -> Iterator[str]:
    less = {each["mode"]: each for each in row["comparisons"] if each["mark"] == "f1"}
    for number, report in enumerate(row["reports"]):
        held = f"{100 * row['held']:.0f} %"
        name = f"{row['set']['name']}, {report['questions']}, {held}" if number == 0 else ""
        shown = (
            name, f"`{report['mode']}`", format_mean("exact_match", report["exact_match"]),
            f"{format_mean('f1', report['f1'])} {_interval(report['intervals']['f1'])}",
            format_mean("f1", report["f1_held"]), _less(less.get(report["mode"])),
            *(format_mean(name, report[name]) for name in ("rouge_l", "kl_divergence")),
            format_mean("agreement", report["agreement"]),
            f"{1e3 * report['first_token_seconds']:.0f} ms",
            format_mean("cached", report["cached_share"]),
        )  # fmt: skip
        yield f"| {' | '.join(shown)} |"


def _interval(ends: Mapping[str, float]) -> str:
    return f"({format_mean('f1', ends['low'])} to {format_mean('f1', ends['high'])})"


def _less(comparison: Mapping[str, Any] | None) -> str:
    """The difference of F1 from the reference, in points."""
    if comparison is None:
        return ""
    ends = comparison["interval"]
    return (
        f"{100 * comparison['difference']:+.1f} "
        f"({100 * ends['low']:+.1f} to {100 * ends['high']:+.1f})"
    )


def main(
    data: Annotated[Path | None, typer.Option(help="A folder with the files of the sets.")] = None,
    questions: Annotated[int | None, typer.Option(min=1, help="The most of each set.")] = None,
    only: Annotated[str | None, typer.Option(help="Names of sets, with semicolons.")] = None,
    seed: Annotated[int, typer.Option(help="Of the samples and of the bootstraps.")] = 0,
    model: Annotated[str | None, typer.Option(help="Instead of the embedded reader.")] = None,
    modes: Annotated[str, typer.Option(help="Modes of reuse, with commas.")] = MODES,
    device: DeviceOption = "cpu",
    json_file: JsonFile = None,
) -> None:
    """Asks every set in every mode."""
    wanted = None if only is None else {name.strip() for name in only.split(";")}
    sets = [each for each in SETS if wanted is None or each.name in wanted]

    def keep(figures: dict[str, Any]) -> None:
        print_figures([], figures, json_file)

    result = run_benchmark(
        lambda progress: bench_quality(
            data, sets, questions, seed, model, modes, device, keep, progress
        )
    )
    print_figures([], result, json_file)
    typer.echo(table_of(result["sets"]))


if __name__ == "__main__":
    typer.run(main)
