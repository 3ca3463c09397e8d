"""Questions asked in one mode after another, their answers marked, and the modes compared."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
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
from ragcache.params import GenerationParams
from ragcache.pipeline import Answer, Message
from ragcache.rag import RagCache

Through = Literal["ask", "chat"]
"""How questions are sent: by `ask`, or as a chat whose message contains the retrieved modules."""

Progress = Callable[[int, int], None]

PASTED = (
    "Use the following pieces of context to answer the question at the end. Keep the answer as "
    "short as possible.\n\n{documents}\n\nQuestion: {question}"
)
"""The message of such a chat, whose beginning differs from the one modules are encoded after."""

MARKS = ("exact_match", "f1", "rouge_l")
"""The marks of an answer that modes are compared by."""


@dataclass(frozen=True, slots=True)
class MarkedAnswer:
    """A question with its answer and marks.

    Attributes:
        question: The question.
        given: The answer.
        exact_match, f1, rouge_l: Its marks; see `ragcache.evaluation.metrics`.
        retrieved: Whether the document that answers it was; None where it names none.
        first_token: The first token of the answer; None where there is none.
        first_token_seconds: From the call, with all states that it reads at hand.
        prompt_tokens, cached_tokens, computed_tokens: Of the prompt; see `Reuse`.
        finish_reason: As in `Answer`.
        kl_divergence: Of the first token's distribution from that of mode `exact`, in nats; None
            where that was not run or one of the two has no first token.
        agrees: Whether the likeliest first token is that of mode `exact`, or None.
    """

    question: Question
    given: str
    exact_match: bool
    f1: float
    rouge_l: float
    retrieved: bool | None
    first_token: int | None
    first_token_seconds: float
    prompt_tokens: int
    cached_tokens: int
    computed_tokens: int
    finish_reason: str
    kl_divergence: float | None = None
    agrees: bool | None = None


@dataclass(frozen=True, slots=True)
class EvaluationReport:
    """A mode: means over its questions, 0 to 1 where nothing else is said.

    Attributes:
        mode: `chat:MODE` where the questions were chats.
        questions: How many.
        exact_match, f1, rouge_l: Of the marks.
        retrieved: Of the questions that name a document; None where none does.
        kl_divergence, agreement: Of first tokens, beside mode `exact`; None where that was not run.
        first_token_seconds: The median.
        cached_share: Of the prompts' tokens, those whose states were read.
        computed_tokens: Of a prompt.
        intervals: 95 % bootstrap intervals, by the name of the mean.
        marked: All answers.
    """

    mode: str
    questions: int
    exact_match: float
    f1: float
    rouge_l: float
    retrieved: float | None
    kl_divergence: float | None
    agreement: float | None
    first_token_seconds: float
    cached_share: float
    computed_tokens: float
    intervals: Mapping[str, Interval] = field(default_factory=dict)
    marked: tuple[MarkedAnswer, ...] = ()

    @classmethod
    def of(cls, mode: str, marked: Sequence[MarkedAnswer], seed: int = 0) -> EvaluationReport:
        """Return the means of marked answers, of which there is at least one. seed: of the
        bootstrap.
        """
        names = (*MARKS, "retrieved", "kl_divergence", "agrees")
        marks = {name: _known([getattr(each, name) for each in marked]) for name in names}
        means = {name: fmean(known) if known else None for name, known in marks.items()}
        means["agreement"] = means.pop("agrees")
        prompts = sum(each.prompt_tokens for each in marked)
        return cls(
            mode=mode, questions=len(marked),
            first_token_seconds=median(each.first_token_seconds for each in marked),
            cached_share=sum(each.cached_tokens for each in marked) / max(1, prompts),
            computed_tokens=fmean(each.computed_tokens for each in marked),
            intervals={
                "agreement" if name == "agrees" else name: bootstrap_interval(known, seed)
                for name, known in marks.items() if known
            },
            marked=tuple(marked), **means,  # type: ignore[arg-type]  # the marks are always known
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Comparison:
    """A mark of a mode beside that of a reference, over the same questions.

    Attributes:
        mode, reference: The two modes.
        mark: One of `MARKS`.
        difference: Of the means, mode - reference.
        interval: Of the difference, by the paired bootstrap, 95 %.
        p_value: Two-sided, of no difference, by the same bootstrap.
    """

    mode: str
    reference: str
    mark: str
    difference: float
    interval: Interval
    p_value: float


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Modes over the same questions.

    Attributes:
        setting: What was asked, and how: names and values for readers of the report.
        reports: Mode by mode, in the order that they were asked for.
        comparisons: Each mode with the reference: `exact` if it is among them, or else the first.
    """

    setting: Mapping[str, Any]
    reports: tuple[EvaluationReport, ...]
    comparisons: tuple[Comparison, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)


def evaluate_modes(
    rag: RagCache, collection: str, questions: Sequence[Question],
    modes: Sequence[str | ReuseMode], *, setting: Mapping[str, Any] | None = None, seed: int = 0,
    progress: Callable[[str, int, int], None] | None = None, **options: Any,
) -> Evaluation:  # fmt: skip
    """Ask the same questions in several modes, and compares these.

    Mode `exact` is asked first if it is among them: first tokens of the others are compared with
    its.

    Args:
        rag: Where the collection is.
        collection: Its name.
        questions: What to ask.
        modes: What to ask in; each once.
        setting: Kept in the result.
        seed: Of the bootstraps.
        progress: Called with the mode and the numbers of marked and of all questions.
        **options: As for `ask_questions`.

    Raises:
        ConfigurationError: There are no questions or no modes.
    """
    if not modes:
        raise ConfigurationError("there are no modes to ask in")
    reference, reports = None, {}
    wanted = dict.fromkeys(map(ReuseMode.parse, modes))
    for mode in sorted(wanted, key=lambda each: each.reads_states):
        shown = None if progress is None else partial(progress, str(mode))
        marked, choices = ask_questions(
            rag, collection, questions, mode=mode, reference=reference, progress=shown, **options
        )
        reports[mode] = EvaluationReport.of(_name(mode, options), marked, seed)
        if not mode.reads_states:
            reference = choices
    ordered = tuple(reports[mode] for mode in wanted)
    return Evaluation(dict(setting or {}), ordered, compare_reports(ordered, seed))


def _name(mode: ReuseMode, options: Mapping[str, Any]) -> str:
    return f"chat:{mode}" if options.get("through") == "chat" else str(mode)


def ask_questions(
    rag: RagCache, collection: str, questions: Sequence[Question], *,
    mode: str | ReuseMode, k: int = DEFAULT_K,
    relative_threshold: float = DEFAULT_RELATIVE_THRESHOLD, through: Through = "ask",
    extractive: bool | None = None, reference: Sequence[Choice] | None = None,
    progress: Progress | None = None,
) -> tuple[list[MarkedAnswer], list[Choice]]:  # fmt: skip
    """Ask one question after another, so that the times to first tokens are those of a request
    alone, and shares no states of questions.

    One whose documents had to be encoded is asked again, and the second time counts.

    Args:
        rag: Where the collection is.
        collection: Its name.
        questions: What to ask; each over its own documents if it has such.
        mode, k, relative_threshold: As in `AskOptions`.
        through: `chat` puts the `k` retrieved modules into a message.
        extractive: As in `GenerationParams`.
        reference: The choices that mode `exact` gave to the same questions.
        progress: Called with the numbers of marked and of all questions.

    Returns:
        The marked answers, and the choices with the distributions of their first tokens.

    Raises:
        ConfigurationError: There are no questions.
    """
    if not questions:
        raise ConfigurationError("there are no questions to ask")
    generation = GenerationParams(
        extractive=extractive, share=False, first_logprobs=True, min_confidence=0.0
    )  # nothing is refused: what the model says is marked
    search: dict[str, Any] = {"collection": collection, "k": k}
    search["relative_threshold"] = relative_threshold
    generating: dict[str, Any] = {"mode": mode, "generation": generation}

    def ask(question: Question) -> Answer:
        filters = question.filters
        if through == "ask":
            return rag.ask(question.question, filters=filters, **search, **generating)
        hits = rag.retrieve(question.question, filters=filters, **search).hits
        message = _pasted(question.question, [hit.module.text for hit in hits])
        return rag.chat([message], **generating)

    ask(questions[0])  # what a process makes once, such as the index, is in no time
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


def _pasted(question: str, texts: Sequence[str]) -> Message:
    """Return a message with the texts of the retrieved modules, as RAG programs write it."""
    documents = "\n\n".join(text.strip() for text in texts)
    return {"role": "user", "content": PASTED.format(documents=documents, question=question)}


def _mark(question: Question, answer: Answer, exact: Choice | None) -> MarkedAnswer:
    """exact: what mode `exact` gave."""
    choice, text, accepted = answer.choices[0], answer.text, question.answers
    divergence, agrees = None, None
    if exact is not None and not (exact.first_logprobs is None or choice.first_logprobs is None):
        fidelity = compare_first_tokens([exact], [choice])
        divergence, agrees = fidelity.kl_divergence, fidelity.agreements[0]
    return MarkedAnswer(
        question, text, exact_match(text, accepted), f1(text, accepted), rouge_l(text, accepted),
        _retrieved(question, answer), next(iter(choice.token_ids), None),
        answer.timings.first_token, answer.reuse.prompt_tokens, answer.reuse.cached_tokens,
        answer.reuse.computed_tokens, answer.finish_reason, divergence, agrees,
    )  # fmt: skip


def _retrieved(question: Question, answer: Answer) -> bool | None:
    if not question.document:
        return None
    return any(source.document == question.document for source in answer.sources)


def _known(values: Sequence[float | None]) -> list[float]:
    return [float(value) for value in values if value is not None]


def compare_reports(reports: Sequence[EvaluationReport], seed: int = 0) -> tuple[Comparison, ...]:
    """Each mode beside `exact`, or else beside the first one. seed: of the bootstraps."""
    named = (each for each in reports if each.mode.removeprefix("chat:") == str(EXACT))
    reference = next(named, reports[0])
    return tuple(
        _compare(report, reference, mark, seed)
        for report in reports if report is not reference
        for mark in MARKS
    )  # fmt: skip


def _compare(
    report: EvaluationReport, reference: EvaluationReport, mark: str, seed: int
) -> Comparison:
    one, other = ([getattr(m, mark) for m in each.marked] for each in (report, reference))
    interval, p_value = paired_bootstrap(one, other, seed)
    difference = getattr(report, mark) - getattr(reference, mark)
    return Comparison(report.mode, reference.mode, mark, difference, interval, p_value)
