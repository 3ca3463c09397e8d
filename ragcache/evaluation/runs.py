"""Runs of questions in several modes: their answers are marked, and the modes compared."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from html import escape
from statistics import fmean, median
from typing import Any, Literal

from ragcache.config import DEFAULT_K, DEFAULT_RELATIVE_THRESHOLD
from ragcache.engine import Choice
from ragcache.errors import ConfigurationError
from ragcache.evaluation.datasets import Question
from ragcache.evaluation.metrics import (
    Interval,
    bootstrap_interval,
    exact_match,
    f1,
    paired_bootstrap,
    rouge_l,
)
from ragcache.fidelity import compare_first_tokens
from ragcache.modes import EXACT, ReuseMode
from ragcache.notebooks import notebook_progress
from ragcache.options import AskOptions, SearchOptions
from ragcache.params import GenerationParams
from ragcache.pipeline import Answer
from ragcache.rag import RagCache

Through = Literal["ask", "chat"]
"""How questions are sent: by `ask`, or as a chat whose message contains the retrieved modules."""

Progress = Callable[[int, int], None]

PASTED = (
    "Use the following pieces of context to answer the question at the end. Keep the answer as "
    "short as possible.\n\n{documents}\n\nQuestion: {question}"
)
"""Message of such a chat. Its start differs from the preamble of encoded modules."""

MARKS = ("exact_match", "f1", "rouge_l")
"""Marks of an answer by which modes are compared."""


@dataclass(frozen=True, slots=True)
class MarkedAnswer:
    """A question with its answer and marks. See `ragcache.evaluation.metrics` for the marks."""

    question: Question
    given: str
    """The answer."""
    exact_match: bool
    f1: float
    rouge_l: float
    retrieved: bool | None
    """Whether the document that answers it was retrieved, if the question names one."""
    first_token: int | None
    """First token of the answer, if it has any."""
    first_token_seconds: float
    """Seconds from the call to the first token, with all states in the cache."""
    prompt_tokens: int
    """Tokens of the prompt, as in `Reuse`."""
    cached_tokens: int
    computed_tokens: int
    finish_reason: str
    """See `Answer`."""
    kl_divergence: float | None = None
    """Divergence of the first token's distribution from mode `exact`, in nats. Unset unless `exact`
    ran and both answers have a first token."""
    agrees: bool | None = None
    """Whether the likeliest first token is the same as in mode `exact`, if known."""


@dataclass(frozen=True, slots=True)
class EvaluationReport:
    """Results of one mode. Means are from 0 to 1, unless a field says otherwise."""

    mode: str
    """Name of the mode, or `chat:MODE` for chats."""
    questions: int
    """Number of questions."""
    exact_match: float
    f1: float
    rouge_l: float
    retrieved: float | None
    """Share of retrieved documents among the questions that name one, if any does."""
    kl_divergence: float | None
    """Mean divergence of first tokens from mode `exact`, in nats, if `exact` ran."""
    agreement: float | None
    """Share of first tokens that are the same as in mode `exact`, if `exact` ran."""
    first_token_seconds: float
    """Median seconds to the first token."""
    cached_share: float
    """Share of the prompts' tokens whose states were read."""
    computed_tokens: float
    """Mean number of computed tokens of a prompt."""
    intervals: Mapping[str, Interval] = field(default_factory=dict)
    """95 % bootstrap intervals by the name of the mean."""
    marked: tuple[MarkedAnswer, ...] = ()
    """All answers."""

    @classmethod
    def of(cls, mode: str, marked: Sequence[MarkedAnswer], seed: int = 0) -> EvaluationReport:
        """Summarize one or more marked answers. `seed` is the seed of the bootstrap."""
        names = (*MARKS, "retrieved", "kl_divergence", "agrees")
        marks = {name: _known([getattr(each, name) for each in marked]) for name in names}
        means = {name: fmean(known) if known else None for name, known in marks.items()}
        means["agreement"] = means.pop("agrees")
        prompts = sum(each.prompt_tokens for each in marked)
        return cls(
            mode=mode,
            questions=len(marked),
            first_token_seconds=median(each.first_token_seconds for each in marked),
            cached_share=sum(each.cached_tokens for each in marked) / max(1, prompts),
            computed_tokens=fmean(each.computed_tokens for each in marked),
            intervals={
                "agreement" if name == "agrees" else name: bootstrap_interval(known, seed)
                for name, known in marks.items()
                if known
            },
            marked=tuple(marked),
            **means,  # type: ignore[arg-type]  # the marks are always known
        )


@dataclass(frozen=True, slots=True)
class Comparison:
    """A difference between two modes over the same questions."""

    mode: str
    reference: str
    mark: str
    """One of `MARKS`."""
    difference: float
    """Difference of the means, `mode` minus `reference`."""
    interval: Interval
    """Interval of the difference, by the paired bootstrap, 95 %."""
    p_value: float
    """Two-sided p-value of no difference, by the same bootstrap."""


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Modes over the same questions."""

    setting: Mapping[str, Any]
    """Names and values that describe the run, for readers of the report."""
    reports: tuple[EvaluationReport, ...]
    """Reports in the order of the modes."""
    comparisons: tuple[Comparison, ...]
    """Comparisons of each mode with the reference: `exact` if it ran, or else the first mode."""

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
        return asdict(self)

    def _repr_html_(self) -> str:
        """Return a table of the modes for notebooks."""
        rows = "".join(
            f"<tr><td>{escape(each.mode)}</td><td>{each.questions}</td>"
            f"<td>{each.exact_match:.1%}</td><td>{each.f1:.1%}</td>"
            f"<td>{'' if each.agreement is None else f'{each.agreement:.1%}'}</td>"
            f"<td>{1000 * each.first_token_seconds:.0f} ms</td>"
            f"<td>{each.cached_share:.1%}</td></tr>"
            for each in self.reports
        )
        titles = ("mode", "questions", "exact match", "F1", "same first token", "to first token")
        named = "".join(f"<th>{title}</th>" for title in (*titles, "read from states"))
        return f"<table><tr>{named}</tr>{rows}</table>"


def evaluate_modes(
    rag: RagCache,
    collection: str,
    questions: Sequence[Question],
    modes: Sequence[str | ReuseMode],
    *,
    setting: Mapping[str, Any] | None = None,
    seed: int = 0,
    progress: Callable[[str, int, int], None] | None = None,
    **options: Any,
) -> Evaluation:
    """Ask the same questions in several modes, and compare the modes.

    Mode `exact`, if included, is asked first: first tokens of the others are compared with it.

    Args:
        rag: Open folder with the collection.
        collection: Name of the collection.
        questions: Questions to ask.
        modes: Modes to ask in, without duplicates.
        setting: Description of the run, kept in the result.
        seed: Seed of the bootstraps.
        progress: Called with the mode, the number of marked questions and their total.
        **options: See `ask_questions`.

    Raises:
        ConfigurationError: There are no questions or no modes.
    """
    if not modes:
        raise ConfigurationError("there are no modes to ask in")
    reference, reports = None, {}
    prefix = "chat:" if options.get("through") == "chat" else ""
    wanted = dict.fromkeys(map(ReuseMode.parse, modes))
    for mode in sorted(wanted, key=lambda each: each.reads_states):
        shown = None if progress is None else partial(progress, str(mode))
        marked, choices = ask_questions(
            rag, collection, questions, mode=mode, reference=reference, progress=shown, **options
        )
        reports[mode] = EvaluationReport.of(f"{prefix}{mode}", marked, seed)
        if not mode.reads_states:
            reference = choices
    ordered = tuple(reports[mode] for mode in wanted)
    return Evaluation(dict(setting or {}), ordered, compare_reports(ordered, seed))


def ask_questions(
    rag: RagCache,
    collection: str,
    questions: Sequence[Question],
    *,
    mode: str | ReuseMode,
    k: int = DEFAULT_K,
    relative_threshold: float = DEFAULT_RELATIVE_THRESHOLD,
    through: Through = "ask",
    extractive: bool | None = None,
    reference: Sequence[Choice] | None = None,
    progress: Progress | None = None,
) -> tuple[list[MarkedAnswer], list[Choice]]:
    """Ask one question after another, and mark the answers.

    Times to first tokens are therefore times of a single request. Questions share no states. If
    documents had to be encoded for a question, it is asked again, and only the second answer
    counts.

    Args:
        rag: Open folder with the collection.
        collection: Name of the collection.
        questions: Questions to ask, each over its own documents if it has any.
        mode, k, relative_threshold: See `AskOptions`.
        through: `chat` puts the `k` retrieved modules into a message.
        extractive: See `GenerationParams`.
        reference: Choices that mode `exact` gave to the same questions.
        progress: Called with the number of marked questions and their total. A bar by default in
            notebooks.

    Returns:
        The marked answers, and the choices with the distributions of their first tokens.

    Raises:
        ConfigurationError: There are no questions.
    """
    if not questions:
        raise ConfigurationError("there are no questions to ask")
    generation = GenerationParams(
        extractive=extractive, share=False, first_logprobs=True, min_confidence=0.0
    )  # no refusals: every answer is marked
    options = AskOptions(
        collection=collection,
        k=k,
        relative_threshold=relative_threshold,
        mode=mode,
        generation=generation,
    )
    progress = progress or notebook_progress(f"{mode}: questions")
    ask = partial(_ask if through == "ask" else _paste, rag, options)
    ask(questions[0])  # warm-up: builds the index and everything else that is built once
    marked, choices, reads = [], list[Choice](), ReuseMode.parse(mode).reads_states
    for number, question in enumerate(questions):
        answer = ask(question)
        if answer.reuse.created_tokens:
            answer = ask(question)
        choice = answer.choices[0]
        exact = None if reference is None else reference[number]
        exact = exact if reads else choice
        marked.append(_mark(question, answer, exact))
        choices.append(choice)
        if progress is not None:
            progress(len(marked), len(questions))
    return marked, choices


def _ask(rag: RagCache, options: AskOptions, question: Question) -> Answer:
    return rag.ask(question.question, **options.replace(filters=question.filters).given())


def _paste(rag: RagCache, options: AskOptions, question: Question) -> Answer:
    """Ask a chat with the retrieved modules in the message."""
    search = SearchOptions.part_of(options).replace(filters=question.filters)
    hits = rag.retrieve(question.question, **search.given()).hits
    documents = "\n\n".join(hit.module.text.strip() for hit in hits)
    content = PASTED.format(documents=documents, question=question.question)
    message = {"role": "user", "content": content}
    return rag.chat([message], mode=options.mode, generation=options.generation)


def _mark(question: Question, answer: Answer, exact: Choice | None) -> MarkedAnswer:
    """Mark an answer. `exact` is the choice of mode `exact`."""
    choice, text, accepted = answer.choices[0], answer.text, question.answers
    divergence, agrees = None, None
    if exact is not None and not (exact.first_logprobs is None or choice.first_logprobs is None):
        fidelity = compare_first_tokens([exact], [choice])
        divergence, agrees = fidelity.kl_divergence, fidelity.agreements[0]
    return MarkedAnswer(
        question,
        text,
        exact_match(text, accepted),
        f1(text, accepted),
        rouge_l(text, accepted),
        _retrieved(question, answer),
        next(iter(choice.token_ids), None),
        answer.timings.first_token,
        answer.reuse.prompt_tokens,
        answer.reuse.cached_tokens,
        answer.reuse.computed_tokens,
        answer.finish_reason,
        divergence,
        agrees,
    )


def _retrieved(question: Question, answer: Answer) -> bool | None:
    if not question.document:
        return None
    return any(source.document == question.document for source in answer.sources)


def _known(values: Sequence[float | None]) -> list[float]:
    return [float(value) for value in values if value is not None]


def compare_reports(reports: Sequence[EvaluationReport], seed: int = 0) -> tuple[Comparison, ...]:
    """Compare each mode with `exact`, or else with the first one."""
    named = (each for each in reports if each.mode.removeprefix("chat:") == str(EXACT))
    reference = next(named, reports[0])
    return tuple(
        _compare(report, reference, mark, seed)
        for report in reports
        if report is not reference
        for mark in MARKS
    )


def _compare(
    report: EvaluationReport, reference: EvaluationReport, mark: str, seed: int
) -> Comparison:
    one, other = ([getattr(m, mark) for m in each.marked] for each in (report, reference))
    interval, p_value = paired_bootstrap(one, other, seed)
    difference = getattr(report, mark) - getattr(reference, mark)
    return Comparison(report.mode, reference.mode, mark, difference, interval, p_value)
