"""`ragcache ask`, `prompt` and `demo`: questions in, answers out."""

from __future__ import annotations

import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from ragcache.errors import EmptyQuestion, NoDocuments
from ragcache.modes import EXACT, ISOLATED, ROOTED, ReuseMode
from ragcache.params import GenerationParams, SearchParams
from ragcache_api.cli import console as ui
from ragcache_api.cli.options import ASKING, ONE_ANSWER, WITHOUT_DOCUMENTS, Offer, expand_options
from ragcache_api.cli.progress import progress_bar
from ragcache_api.service_options import ServiceOptions

if TYPE_CHECKING:
    from ragcache import Answer, RagCache
    from ragcache_api.settings import ServiceSettings


@expand_options
def ask(
    question: Annotated[str, typer.Argument(help="What you want to know.")],
    params: Annotated[GenerationParams, ONE_ANSWER],
    search: SearchParams,
    options: Annotated[ServiceOptions, ASKING],
    collection: Annotated[str, typer.Option("--collection", "-c", help="Where to look.")],
    mode: ui.ModeOption = None,
    stream: ui.StreamOption = None,
    server: ui.ServerOption = None,
    key: ui.KeyOption = None,
    as_json: ui.JsonOption = False,
) -> None:
    """Answer a question from the documents of a collection.

    A new process takes seconds to begin; a running service (--server) answers at once.
    """
    if not question.strip():
        raise EmptyQuestion("the question is empty; write what you want to know")
    if server is not None:
        from ragcache_api.cli.served import ServedAnswer

        body: dict[str, Any] = {"question": question, "collection": collection}
        if mode is not None:
            body["mode"] = str(mode)
        served = ServedAnswer.ask(server, key, body | params.given() | search.given())
        if as_json:
            served.result()
            ui.print_json(served.values)
        else:
            ui.print_answer(served, pieces=stream)
        return
    with ui.open_existing_rag(options, collection) as rag:
        if mode is None and not rag.internals.shared.model.extractive:
            rag.gate.measure_in_background(())  # the first answer does not wait for it
        answer = rag.stream(
            question, collection=collection, mode=mode, generation=params, **search.given()
        )
        if as_json:
            ui.print_json({**answer.result().to_dict(), "encoded": rag.stats().encoded})
        else:
            ui.print_answer(answer, pieces=stream)
            ui.print_reader_note(rag, collection, answer.answer)
            ui.print_calibration_note(rag, collection, answer.answer, options)
        rag.internals.shared.store.keep_encoded()
        ui.finish_measurement(rag, answer.answer)


@expand_options
def prompt(
    file: Annotated[Path, typer.Argument(help="A PML prompt.")],
    params: Annotated[GenerationParams, WITHOUT_DOCUMENTS],
    options: Annotated[ServiceOptions, Offer(("model", "dtype", "force_modes", "state"))],
    mode: Annotated[ReuseMode, ui.mode_option(f"{ISOLATED} or {EXACT}.")] = ISOLATED,
    stream: ui.StreamOption = None,
    as_json: ui.JsonOption = False,
) -> None:
    """Answer a PML prompt over a schema that was added before."""
    text = ui.read_text(file)
    with ui.open_existing_rag(options, embedding="none") as rag:
        answer = rag.stream_prompt(text, mode=mode, source=str(file), generation=params)
        if as_json:
            ui.print_json({**answer.result().to_dict(), "encoded": rag.stats().encoded})
        else:
            ui.print_answer(answer, pieces=stream)
            ui.print_unkept(rag, "`ragcache schema add` keeps those of a schema")


QUESTIONS = (
    "Who do I ring first if the cold store alarm goes off?",
    "How long may I stay inside the freezer at most?",
    "Where does the key of the pool car hang?",
    "For how many hours is sediment dried at 60 degrees?",
    "What are fires in the boat hall fought with?",
)
UNANSWERABLE = "Who painted the ceiling of the chapel?"
RUNS = 5  # runs of each mode, in turn; medians are printed


@dataclass(frozen=True, slots=True)
class OtherAnswer:
    """The answer of the model that `ragcache demo --model` compares with the embedded reader."""

    model: str
    answer: Answer


@dataclass(frozen=True, slots=True)
class DemoAnswer:
    """An answer from cached modules, with median seconds to first token in both modes."""

    answer: Answer
    cached_seconds: float
    exact_seconds: float
    other: OtherAnswer | None = None

    @property
    def ratio(self) -> float:
        return self.exact_seconds / self.cached_seconds

    def to_dict(self) -> dict[str, object]:
        return {
            **_with_other(self.answer, self.other),
            "first_token_cached": self.cached_seconds,
            "first_token_exact": self.exact_seconds,
            "ratio": self.ratio,
        }


@expand_options
def demo(
    options: Annotated[ServiceOptions, Offer(("model", "dtype"))],
    handbook: Annotated[
        Path | None, typer.Option(help="Another folder of documents, with the same questions.")
    ] = None,
    as_json: ui.JsonOption = False,
) -> None:
    """Ingest the example handbook and answer five questions, cached and ordinary side by side, and
    refuse one that it does not answer. With --model, show that model's answers beside the embedded
    reader's."""
    handbook = ui.example_handbook() if handbook is None else handbook
    if not handbook.is_dir():
        raise NoDocuments(f"there is no folder {handbook}; give another with --handbook")
    settings = ui.read_settings(options)
    ui.check_model(settings.model)
    others = _ask_other(settings, handbook)
    with ui.errors.status("loading the model"):
        from ragcache import RagCache
    with (
        tempfile.TemporaryDirectory(prefix="ragcache-demo-") as state,
        RagCache.open(state, dtype=settings.dtype, embedding="none", force_modes=True) as rag,
    ):
        with progress_bar("encoding modules") as progress:
            done = rag.ingest("handbook", [handbook], progress=progress)
        with progress_bar("asking") as progress:
            answers = []
            for number, question in enumerate(QUESTIONS, start=1):
                answers.append(replace(_measure(rag, question), other=others.get(question)))
                progress(number, len(QUESTIONS))
        begin = time.perf_counter()
        rag.ask_batch(QUESTIONS, collection="handbook")
        batch_seconds = time.perf_counter() - begin
        refused = rag.ask(UNANSWERABLE, collection="handbook")
    if as_json:
        last = _with_other(refused, others.get(UNANSWERABLE))
        ui.print_json([*(each.to_dict() for each in answers), last])
        return
    ui.console.print(
        f"{done.added} documents, {done.modules} modules, {done.tokens:,} tokens encoded once\n"
    )
    for each in answers:
        _print_demo_answer(each)
    reason = ("finish reason", refused.finish_reason)
    beside = _other_rows(others.get(UNANSWERABLE))
    _print_rows(refused, *beside, reason, *_confidence_row(refused), _sources_row(refused))
    single_seconds = sum(each.answer.timings.total for each in answers)
    ui.console.print(
        f"all {len(QUESTIONS)} questions together: {ui.format_milliseconds(batch_seconds)} to the "
        f"last answer; one after another: {ui.format_milliseconds(single_seconds)}"
    )


def _ask_other(settings: ServiceSettings, handbook: Path) -> dict[str, OtherAnswer]:
    """Return the answers of the given model by question. Without a model there are none."""
    if settings.model is None:
        return {}
    with ui.errors.status("loading the model"):
        from ragcache import RagCache
        from ragcache.answers.confidence import GENERAL
    with (
        tempfile.TemporaryDirectory(prefix="ragcache-demo-") as state,
        RagCache.open(
            state,
            settings.model,
            dtype=settings.dtype,
            quantization=settings.quantization,
            embedding="none",
            force_modes=True,
        ) as rag,
    ):
        name = rag.internals.shared.model.name
        with progress_bar(f"encoding modules with {Path(name).name}") as progress:
            rag.ingest("handbook", [handbook], progress=progress)
        rag.collections.set_calibration("handbook", GENERAL, extractive=False)
        asked = (*QUESTIONS, UNANSWERABLE)
        with progress_bar(f"asking {Path(name).name}") as progress:
            found = {}
            for number, question in enumerate(asked, start=1):
                for _ in range(2):  # the first time, modules are encoded for later places
                    answer = rag.ask(question, collection="handbook", relative_threshold=0.0)
                found[question] = OtherAnswer(name, answer)
                progress(number, len(asked))
    return found


def _with_other(answer: Answer, other: OtherAnswer | None) -> dict[str, object]:
    """Return an answer as plain values, with the other model's answer if there is one."""
    beside = {} if other is None else {"other": {"model": other.model, **other.answer.to_dict()}}
    return answer.to_dict() | beside


def _other_rows(other: OtherAnswer | None) -> list[tuple[str, str]]:
    """Return the rows with the other model's answer, if there is one."""
    if other is None:
        return []
    answer, details = other.answer, []
    if answer.confidence is not None:
        details.append(f"confidence {answer.confidence:.2f}")
    details.append(f"first token {ui.format_milliseconds(answer.timings.first_token)}")
    text = f"[bold]{escape(answer.text)}[/]  ({', '.join(details)})"
    return [(escape(Path(other.model).name), text)]


def _measure(rag: RagCache, question: str) -> DemoAnswer:
    """Ask a question from cached modules and with an ordinary prefill, in turn."""
    from statistics import median  # slow to import

    times: dict[ReuseMode, list[float]] = {ROOTED: [], EXACT: []}
    answers = {}
    unshared = GenerationParams(share=False)  # or a run may reuse the question's own states
    for _ in range(RUNS):
        for mode, seconds in times.items():
            answers[mode] = rag.ask(
                question,
                collection="handbook",
                mode=mode,
                generation=unshared,
                relative_threshold=0.0,  # four modules in each prompt
            )
            seconds.append(answers[mode].timings.first_token)
    return DemoAnswer(answers[ROOTED], median(times[ROOTED]), median(times[EXACT]))


def _print_demo_answer(measured: DemoAnswer) -> None:
    answer = measured.answer
    cached, exact = map(ui.format_milliseconds, (measured.cached_seconds, measured.exact_seconds))
    times = f"{cached} cached, {exact} exact: [green]{measured.ratio:.1f}x[/]"
    _print_rows(
        answer,
        *_other_rows(measured.other),
        *_confidence_row(answer),
        *(("quoted from", ui.format_span(each, answer).strip()) for each in answer.spans[:1]),
        _sources_row(answer),
        ("mode", answer.mode),
        ("prompt", ui.format_reuse(answer)),
        ("first token", times),
    )


def _print_rows(answer: Answer, *rows: tuple[str, str]) -> None:
    ui.console.print(answer.question, style="cyan", markup=False)
    first = ("answer", f"[bold]{escape(answer.text)}[/]")
    ui.console.print(ui.plain_table(rows=(first, *rows)))
    ui.console.print()


def _sources_row(answer: Answer) -> tuple[str, str]:
    return "sources", ", ".join(escape(source.module) for source in answer.sources)


def _confidence_row(answer: Answer) -> list[tuple[str, str]]:
    return [] if answer.confidence is None else [("confidence", f"{answer.confidence:.2f}")]
