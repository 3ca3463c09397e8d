"""`ragcache eval`: the answers to known questions, mode by mode."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from ragcache.errors import ConfigurationError, NoState
from ragcache.modes import EXACT, ReuseMode
from ragcache.params import GenerationParams, SearchParams
from ragcache_api.cli import console as ui
from ragcache_api.cli.options import ENCODING, Offer, expand_options
from ragcache_api.cli.progress import progress_bar
from ragcache_api.service_options import ServiceOptions

if TYPE_CHECKING:
    from ragcache import RagCache
    from ragcache.evaluation import Comparison, Dataset, Evaluation, EvaluationReport, Question

TITLES = {
    "exact_match": "exact match",
    "f1": "F1",
    "rouge_l": "ROUGE-L",
    "retrieved": "retrieved",
    "kl_divergence": "KL",
    "agreement": "agreement",
}
"""Names of a mode's means in the report."""

TEMPORARY = "-"
"""Name of a temporary collection, which is deleted afterwards."""

OverOption = Annotated[
    str,
    typer.Option(
        "--over",
        help="Documents that questions are asked over: `all`, or each question's `own`.",
    ),
]
SampleOption = Annotated[
    int | None, typer.Option("--sample", min=1, help="Ask so many of the questions, drawn.")
]
SeedOption = Annotated[int, typer.Option("--seed", help="Seed of the sample and the bootstraps.")]


@expand_options
def evaluate_command(
    collection: Annotated[
        str, typer.Argument(help="The collection to ask; - for a temporary one.")
    ],
    questions: Annotated[
        Path,
        typer.Argument(
            help="Known questions: JSON lines, or a file of SQuAD, whose documents are ingested."
        ),
    ],
    search: Annotated[SearchParams, Offer(("k", "relative_threshold"))],
    params: Annotated[GenerationParams, Offer(("extractive",))],
    options: Annotated[ServiceOptions, Offer((*ENCODING.names, "embedding", "reranker"))],
    modes: Annotated[
        str | None,
        typer.Option(
            "--modes",
            "--mode",
            help="Modes to compare, with commas. Defaults to the model's mode and exact.",
        ),
    ] = None,
    over: OverOption = "all",
    sample: SampleOption = None,
    seed: SeedOption = 0,
    through: Annotated[
        str, typer.Option("--through", help="`ask`, or `chat` with the modules pasted into it.")
    ] = "ask",
    calibrate: Annotated[
        bool, typer.Option("--calibrate", help="Fit on the questions which answers are refused.")
    ] = False,
    wrong: Annotated[bool, typer.Option("--wrong", help="List the wrong answers.")] = False,
    as_json: ui.JsonOption = False,
) -> None:
    """Mark the answers to known questions, mode by mode.

    QUESTIONS are about the documents of COLLECTION, or the file has documents of its own. These are
    ingested into COLLECTION, which must hold no others, and stay there: a second run encodes
    nothing. With `-` they go to a temporary folder.

    With --calibrate, each question is asked with and without its document, in the first of the
    modes. The calibration of this model's confidence, and the confidence below which answers are
    refused, are kept with the collection.
    """
    _check_choice("--through", through, ("ask", "chat"))
    _check_choice("--over", over, ("all", "own"))
    if calibrate:
        _check_calibrates(collection, {"--through chat": through == "chat", "--wrong": wrong})
    named = [] if modes is None else [ReuseMode.parse(each.strip()) for each in modes.split(",")]
    if not questions.is_file():
        raise ConfigurationError(f"cannot read the questions in {questions}: there is no such file")
    from ragcache.evaluation.datasets import load_dataset

    dataset = load_dataset(questions, over)  # type: ignore[arg-type]  # it was checked
    drawn = dataset if sample is None else dataset.sample(sample, seed)
    asked: dict[str, Any] = {
        "k": search.k,
        "relative_threshold": search.relative_threshold,
        "extractive": params.extractive,
    }
    with _opened(options, collection, dataset, drawn) as (rag, name):
        named = named or [rag.internals.shared.default_mode, EXACT]
        if calibrate:
            _calibrate(rag, name, drawn.questions, as_json, mode=named[0], **asked)
            return
        setting = _setting(rag, questions, dataset, drawn, seed if sample else None) | {
            "k": search.k,
            "relative threshold": search.relative_threshold,
            "sent by": through,
        }
        evaluation = _evaluate(
            rag, name, drawn.questions, named, setting=setting, seed=seed, through=through, **asked
        )
    if as_json:
        ui.print_json(evaluation)
        return
    print_evaluation(evaluation)
    if wrong:
        _print_wrong(evaluation.reports[0])


def _evaluate(
    rag: RagCache,
    collection: str,
    questions: Sequence[Question],
    modes: Sequence[ReuseMode],
    **options: Any,
) -> Evaluation:
    """Evaluate modes behind a progress bar. `options`: see `evaluate_modes`."""
    from ragcache.evaluation import evaluate_modes

    with progress_bar("asking") as progress:
        options["progress"] = lambda _, done, total: progress(done, total)
        return evaluate_modes(rag, collection, questions, modes, **options)


def _calibrate(
    rag: RagCache, collection: str, questions: Sequence[Question], as_json: bool, **options: Any
) -> None:
    """Fit a calibration, store it with the collection, and print its effect."""
    from ragcache.calibration import collect_examples, cross_validate, fit_calibration

    with progress_bar("asking, with and without the documents") as progress:
        examples = collect_examples(rag, collection, questions, progress=progress, **options)
    fitted, report = fit_calibration(examples), cross_validate(examples)
    rag.collections.set_calibration(collection, fitted, extractive=options["extractive"])
    if as_json:
        ui.print_json({"calibration": fitted.to_dict(), **report.to_dict()})
        return
    rows = (
        ("without an answer", report.unanswerable, report.refused_unanswerable),
        ("answered correctly", report.right, report.refused_right),
        ("answered incorrectly", report.answerable - report.right, report.refused_wrong),
    )
    table = ui.plain_table(
        "questions",
        "",
        "refused",
        rows=[(name, str(count), f"{100 * share:.1f}%") for name, count, share in rows],
    )
    ui.console.print(table)
    coverage, risk = report.risk_coverage()
    for share in (0.25, 0.5, 0.75, 1.0):
        at = math.ceil(share * len(risk)) - 1
        ui.console.print(
            f"of the {100 * coverage[at]:.0f}% most confident, "
            f"{100 * (1 - risk[at]):.0f}% are right"
        )
    ui.console.print(
        f"kept with {escape(collection)}: answers below {fitted.min_confidence:.3f} are refused"
    )


@expand_options
def calibrate(
    options: Annotated[ServiceOptions, ENCODING],
    as_json: ui.JsonOption = False,
) -> None:
    """Fit which answers of a model are refused, once, on built-in questions.

    A service does so in the background. The calibration is for answers to questions, from any
    collection with the same instruction. `ragcache eval --calibrate` fits another to your own
    questions.
    """
    from ragcache.calibration import calibrate_model

    with ui.open_rag(options, embedding="none") as rag:
        if rag.internals.shared.model.extractive:
            raise ConfigurationError(
                "the embedded reader is calibrated already; name another model with --model"
            )
        with progress_bar("asking, with and without the documents") as progress:
            fitted = calibrate_model(rag, progress=progress)
    if as_json:
        ui.print_json({"calibration": None if fitted is None else fitted.to_dict()})
    elif fitted is None:
        ui.console.print("the model answers too few questions for a calibration: none is refused")
    else:
        ui.console.print(
            f"fitted on {fitted.questions} questions: answers below "
            f"{fitted.min_confidence:.3f} are refused"
        )


def _check_calibrates(collection: str, others: Mapping[str, bool]) -> None:
    """Check the options of `--calibrate`. `others` says which other options were given."""
    if collection == TEMPORARY:
        raise ConfigurationError("a calibration is kept with a collection; name one instead of -")
    if given := [name for name, is_given in others.items() if is_given]:
        raise ConfigurationError(f"--calibrate does without {given[0]}; leave out either")


def _check_choice(option: str, given: str, known: Sequence[str]) -> None:
    if given not in known:
        names = " or ".join(known)
        raise ConfigurationError(f"{option} is {given!r}; give {names}")


@contextmanager
def _opened(
    options: ServiceOptions, collection: str, dataset: Dataset, drawn: Dataset
) -> Iterator[tuple[RagCache, str]]:
    """Open the folder and the collection to ask, and ingest the dataset's documents.

    `drawn` is the part of the dataset that is asked.
    """
    with ExitStack() as stack:
        if not dataset.documents:
            if collection == TEMPORARY:
                raise ConfigurationError(
                    "the questions bring no documents; name the collection that they are about"
                )
            opened = ui.open_existing_rag(options, collection, force_modes=True)
            yield stack.enter_context(opened), collection
            return
        if collection == TEMPORARY:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="ragcache-eval-"))
            options, collection = options.replace(state=folder), dataset.name
        else:
            _check_own(options, collection, dataset)
        rag = stack.enter_context(ui.open_rag(options, force_modes=True))
        with progress_bar("encoding") as progress:
            rag.ingest(collection, drawn.documents, progress=progress)
        yield rag, collection


def _check_own(options: ServiceOptions, collection: str, dataset: Dataset) -> None:
    """Raise `ConfigurationError` if a collection has documents that the dataset lacks.

    Loads no model.
    """
    from ragcache.config import NAMESPACE
    from ragcache.db import Catalog

    own, held = {each.id for each in dataset.documents}, set[str]()
    settings = ui.read_settings(options)
    with suppress(NoState), ui.open_ledger(settings) as database:
        catalog = Catalog(database, "", None, NAMESPACE)
        if collection in catalog.versions():
            held = {each.document for each in catalog.modules(collection)}
    if others := sorted(held - own):
        raise ConfigurationError(
            f"the questions bring {len(own)} documents, and the collection {collection!r} holds "
            f"{len(others)} others, such as {others[0]!r}; name a new collection, or - for one "
            "that is deleted afterwards"
        )


def _setting(
    rag: RagCache, path: Path, dataset: Dataset, drawn: Dataset, seed: int | None
) -> dict[str, Any]:
    """Return the setting of an evaluation, for its report."""
    import ragcache
    from ragcache.machine import describe_machine

    own = sum(1 for question in drawn.questions if question.own)
    sampled = "" if seed is None else f" of {len(dataset.questions)}, drawn with seed {seed}"
    return {
        "questions": path.name,
        "format": dataset.format,
        "asked": f"{len(drawn.questions)}{sampled}",
        "documents": len(drawn.documents) or "of the collection",
        "over": "each question's own documents" if own else "all documents",
        "model": rag.internals.shared.model.name,
        "ragcache": ragcache.__version__,
        "machine": ", ".join(f"{name} {value}" for name, value in describe_machine().items()),
    }


def format_mean(name: str, value: float | None) -> str:
    """Format a mean in percent or in nats, or `-` if it is unknown."""
    if value is None:
        return "-"
    return f"{value:.4f}" if name == "kl_divergence" else f"{100 * value:.1f}"


def print_evaluation(evaluation: Evaluation) -> None:
    """Print the modes and their comparisons."""
    table = ui.plain_table("mode", "questions", *TITLES.values(), "TTFT", "cached", "computed")
    for report in evaluation.reports:
        table.add_row(
            report.mode,
            str(report.questions),
            *(format_mean(name, getattr(report, name)) for name in TITLES),
            f"{1e3 * report.first_token_seconds:.0f} ms",
            f"{100 * report.cached_share:.1f}",
            f"{report.computed_tokens:,.0f} tokens",
        )
    ui.console.print(table)
    for comparison in evaluation.comparisons:
        ui.console.print(_sentence(comparison, TITLES[comparison.mark]), style="dim")


def _sentence(comparison: Comparison, mark: str) -> str:
    low, high = 100 * comparison.interval.low, 100 * comparison.interval.high
    return (
        f"{comparison.mode} against {comparison.reference}: {mark} "
        f"{100 * comparison.difference:+.1f} points (95 % {low:+.1f} to {high:+.1f}), "
        f"p = {comparison.p_value:.3f}"
    )


def _print_wrong(report: EvaluationReport) -> None:
    for marked in report.marked:
        if not marked.exact_match:
            asked = marked.question
            right = asked.answers[0] if asked.answers else ""
            line = f"{asked.id} {asked.question} -> {marked.given!r}, right: {right!r}"
            ui.console.print(line, markup=False)
