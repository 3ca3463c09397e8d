"""Calibration of answers with known questions: a model of whether an answer is right.

Each question that names its document is asked twice: with all documents, and without that one, so
that it has no answer. Questions without accepted answers have no answer either. A logistic model is
fitted to the answers. The effect of refusals is measured as risk and coverage (El-Yaniv and Wiener,
JMLR 2010).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from ragcache.answers.confidence import (
    FEATURES,
    Calibration,
    ConfidenceFeatures,
    ModelCalibration,
)
from ragcache.answers.policy import AnswerOutput
from ragcache.config import DEFAULT_K, DEFAULT_RELATIVE_THRESHOLD
from ragcache.errors import (
    ConfigurationError,
    EngineClosed,
    ModeRefused,
    PromptTooLong,
    RagCacheError,
)
from ragcache.evaluation import Dataset, Question, contains_answer, f1
from ragcache.evaluation.builtin import builtin_dataset
from ragcache.models import LoadedModel
from ragcache.modes import EXACT, ReuseMode
from ragcache.params import GenerationParams
from ragcache.rag import RagCache
from ragcache.retrieval import HeldOutSearch

Floats = npt.NDArray[np.float64]
Progress = Callable[[int, int], None]

logger = logging.getLogger(__name__)

BUILT_IN = "ragcache.built-in"
"""Namespace of the built-in documents, which are there while a model is calibrated."""

PRIORITY = -360
"""Priority of the built-in questions: prompts that arrive within an hour go first."""

FALSE_REFUSALS = 0.05
"""Share of right answers that a calibration's `min_confidence` refuses."""

BUILT_IN_REFUSALS = 0.03
"""The same of a model's calibration: on questions that it was not fitted on, it refuses more."""

ENOUGH = 0.88
"""Share of built-in questions without an answer that a model's calibration refuses at most, since
every refusal more loses right answers over other documents (ADR 104)."""

BUILT_IN_FEATURES = ("free", "grounding")
"""Features of a model's calibration. Those of the search depend on the collection, and add nothing
to these two on the built-in questions (ADR 74)."""

FOLDS = 5
FEWEST = 20  # minimum of right and of wrong answers to fit a calibration
_FITTED = tuple(name for name in FEATURES if name != "lift")
"""Features of a fit. `lift` takes another pass and adds nothing to the others (ADR 74)."""

_BATCH = 8  # questions that are asked at once
_RIGHT = 0.5  # F1 from which an answer counts as right
_RIDGE = 1.0  # penalty on weights of normalized features
_STEPS = 50  # maximum steps of Newton's method, which needs about ten


@dataclass(frozen=True, slots=True)
class CalibrationExample:
    """A question that was asked, and its answer."""

    question: str
    answerable: bool
    """Whether the question has an answer."""
    right: bool
    """Whether the answer shares most words with an accepted one."""
    evidence: ConfidenceFeatures
    confidence: float | None = None
    """Confidence by the calibration in use. Unset if retrieval found nothing."""
    answer: str = ""
    """Text of the answer."""


def collect_examples(
    rag: RagCache,
    collection: str,
    questions: Sequence[Question],
    *,
    mode: str | ReuseMode | None = None,
    k: int = DEFAULT_K,
    relative_threshold: float = DEFAULT_RELATIVE_THRESHOLD,
    extractive: bool | None = None,
    priority: int = 0,
    progress: Progress | None = None,
) -> list[CalibrationExample]:
    """Ask questions with and without the documents that answer them.

    Args:
        rag: Open folder with the collection.
        collection: The collection.
        questions: Questions, with accepted answers if they have any.
        mode, k, relative_threshold, extractive: Options of the answers to calibrate.
        priority: Priority of the questions in the engine's queue.
        progress: Called with the number of questions asked so far and their total.

    Returns:
        An example for each question that was asked. Examples for which retrieval found nothing have
        no confidence.

    Raises:
        UnknownCollection: There is no such collection.
    """
    submitter, asked_in = rag.internals.submitter, rag.internals.shared.mode_of(mode)
    if not (submitter.model.extractive if extractive is None else extractive):
        submitter = replace(submitter, calibration=_evidence_only(submitter.model))
    generation = GenerationParams(
        extractive=extractive, confidence=True, min_confidence=0.0, priority=priority
    )
    asked = [(each, frozenset[str]()) for each in questions]
    asked += [
        (replace(each, answers=()), frozenset({each.document}))
        for each in questions
        if each.answers and each.document
    ]
    examples: list[CalibrationExample] = []
    for start in range(0, len(asked), _BATCH):
        part, prompts = asked[start : start + _BATCH], []
        for question, left_out in part:
            params = HeldOutSearch(
                k=k,
                filters=question.filters,
                relative_threshold=relative_threshold,
                left_out=left_out,
            )
            prompts += rag.internals.ask.prepare_prompts(
                [question.question], collection, params, asked_in
            )
        pending = submitter.run(prompts, generation)
        for (question, _), each in zip(part, pending, strict=True):
            examples.append(_example(question, each.output()))
        if progress is not None:
            progress(len(examples), len(asked))
    return examples


def _evidence_only(model: LoadedModel) -> ModelCalibration:
    """Return a calibration without weights, so that features are collected without `lift`."""
    calibration = ModelCalibration(model, "", ledger=None)
    calibration.keep(Calibration(0.0, {}, {}))
    return calibration


def _example(question: Question, answer: AnswerOutput) -> CalibrationExample:
    said = answer.output.choices[0].text
    return CalibrationExample(
        question.question,
        answerable=bool(question.answers),
        right=bool(question.answers) and _is_right(said, question.answers),
        evidence=next(iter(answer.features), ConfidenceFeatures()),
        confidence=next(iter(answer.confidences), None),
        answer=said,
    )


def _is_right(said: str, answers: Sequence[str]) -> bool:
    """Tell whether an answer shares most words with an accepted one, or holds it in a sentence."""
    return f1(said, answers) >= _RIGHT or contains_answer(said, answers)


def calibrate_model(
    rag: RagCache, *, dataset: Dataset | None = None, progress: Progress | None = None
) -> Calibration | None:
    """Fit the calibration of a model's free answers to the built-in questions, and keep it.

    The ledger keeps it for all collections and processes; a model that was calibrated before is not
    asked again. The built-in documents are in a namespace of their own and are deleted afterward.
    The questions have a low priority, so that other questions go first.

    Args:
        rag: Open folder with the model.
        dataset: Other documents and questions. Defaults to the built-in ones.
        progress: Called with the number of questions asked so far and their total.

    Returns:
        The calibration. None if the model answers too few of the questions, or has no room for
        their prompts, so that nothing can be fitted; answers are then not refused.

    Raises:
        RequestError: The engine failed or was closed.
        StoreError: The built-in documents cannot be stored.

    Example:
        >>> calibrate_model(rag)                                  # doctest: +SKIP
        Calibration(bias=-1.98, weights={'free': 2.65, 'grounding': 6.53}, ...)
    """
    kept = rag.internals.shared.calibration
    if kept.is_fitted:
        return kept.find()
    dataset = dataset or builtin_dataset()
    own = rag.within(BUILT_IN)
    try:
        own.ingest(dataset.name, dataset.documents)
        examples = collect_examples(
            own,
            dataset.name,
            dataset.questions,
            mode=_default_mode(rag),
            extractive=False,
            priority=PRIORITY,
            progress=progress,
        )
        return kept.keep(fit_built_in(examples))
    except (ConfigurationError, PromptTooLong) as error:  # too few right answers, or no room
        logger.info("the model's answers are not checked: %s", error)
        return kept.keep(None)
    finally:
        with suppress(RagCacheError):
            own.collections.delete(dataset.name)


def _default_mode(rag: RagCache) -> ReuseMode:
    """Return the default mode or, on a model on which the gate refuses it, `exact`."""
    mode = rag.internals.shared.default_mode
    try:
        rag.gate.check_mode(mode)
    except ModeRefused:
        return EXACT
    return mode


def fit_built_in(examples: Sequence[CalibrationExample]) -> Calibration:
    """Fit a model's calibration to the built-in questions. Raises as `fit_calibration` does."""
    fitted = fit_calibration(examples, BUILT_IN_REFUSALS, BUILT_IN_FEATURES)
    known = [each for each in examples if each.confidence is not None and not each.answerable]
    enough = np.quantile([fitted.confidence(each.evidence) for each in known], ENOUGH)
    return replace(fitted, min_confidence=min(fitted.min_confidence, float(enough)))


def calibrate_in_background(rag: RagCache) -> None:
    """Calibrate the model in a thread, once its default mode was measured. Returns at once.

    Questions are answered without a confidence meanwhile. After an error the next start of the
    service tries again. With `force_modes`, which leaves out measurements, nothing is calibrated.
    """
    if not (rag.internals.shared.model.extractive or rag.gate.forced):
        task = partial(_calibrate_after_gate, rag)
        rag.internals.shared.run_in_background(task, "ragcache-calibration")


def _calibrate_after_gate(rag: RagCache) -> None:
    try:
        rag.gate.join()
        calibrate_model(rag)
    except EngineClosed:
        return
    except Exception as error:  # answers go on without a confidence
        logger.warning("the model could not be calibrated, and no answer is refused: %r", error)


def fit_calibration(
    examples: Sequence[CalibrationExample],
    false_refusals: float = FALSE_REFUSALS,
    features: Sequence[str] = _FITTED,
) -> Calibration:
    """Fit a logistic model of whether an answer is right.

    Args:
        examples: Questions that were asked, and their answers.
        false_refusals: Share of these right answers that its `min_confidence` refuses.
        features: Names of the features. Features that few examples have are left out.

    Raises:
        ConfigurationError: There are too few examples.
    """
    known = [each for each in examples if each.confidence is not None]
    right = sum(each.right for each in known)
    if min(right, len(known) - right) < FEWEST:
        raise ConfigurationError(
            f"{right} of {len(known)} answers are right; a calibration takes {FEWEST} right and "
            f"{FEWEST} others: give more questions, or a collection that answers them"
        )
    return choose_threshold(_fit(known, features), known, false_refusals)


def _fit(known: Sequence[CalibrationExample], features: Sequence[str] = _FITTED) -> Calibration:
    """Fit a calibration to examples with a confidence, of which some are right and some wrong."""
    right = np.array([each.right for each in known], dtype=np.float64)
    names = [
        name
        for name in features
        if sum(getattr(each.evidence, name) is not None for each in known) >= FEWEST
    ]
    columns = [[getattr(each.evidence, name) for each in known] for name in names]
    values = np.array(columns, dtype=np.float64).T  # NaN for unknown values
    means = np.nanmean(values, axis=0)
    centered = np.nan_to_num(values - means)
    deviations = np.maximum(centered.std(axis=0), 1e-9)
    bias, *weights = _logistic(centered / deviations, right).tolist()
    scaled = dict(zip(names, (np.array(weights) / deviations).tolist(), strict=True))
    fitted = Calibration(
        bias, scaled, dict(zip(names, means.tolist(), strict=True)), questions=len(known)
    )
    return choose_threshold(fitted, known)


def choose_threshold(
    calibration: Calibration,
    examples: Iterable[CalibrationExample],
    false_refusals: float = FALSE_REFUSALS,
) -> Calibration:
    """Set the `min_confidence` that refuses a share of the right answers."""
    right = [calibration.confidence(each.evidence) for each in examples if each.right]
    least = np.quantile(right, false_refusals, method="lower")
    return replace(calibration, min_confidence=float(least))


def _logistic(values: Floats, right: Floats) -> Floats:
    """Return bias and weights of a ridge logistic regression of `values` [N, D].

    Uses Newton's method.
    """
    rows = np.column_stack([np.ones(len(values)), values])
    ridge = np.diag([1e-9, *[_RIDGE] * values.shape[1]])
    weights = np.zeros(rows.shape[1])
    for _ in range(_STEPS):
        odds = rows @ weights
        shares = 1 / (1 + np.exp(-odds))
        slope = rows.T @ (shares - right) + ridge @ weights
        curve = (rows.T * (shares * (1 - shares))) @ rows + ridge
        step = np.linalg.solve(curve, slope)
        weights = weights - step
        if np.abs(step).max() < 1e-10:
            break
    return weights


def judge_by(
    calibration: Calibration, examples: Iterable[CalibrationExample]
) -> list[CalibrationExample]:
    """Return the examples with the confidences of another calibration."""
    return [
        each
        if each.confidence is None
        else replace(each, confidence=calibration.confidence(each.evidence))
        for each in examples
    ]


def cross_validate(examples: Sequence[CalibrationExample]) -> RefusalReport:
    """Report the effect of a calibration on questions that it was not fitted on.

    Each fifth of the questions is judged by a calibration of the others. A question is in one fold
    with and without its document. Raises `ConfigurationError` if there are too few examples.
    """
    fit_calibration(examples)
    rightly = dict.fromkeys(each.question for each in examples if each.right)
    every = dict.fromkeys([*rightly, *(each.question for each in examples)])
    folds = {question: number % FOLDS for number, question in enumerate(every)}
    judged: list[tuple[CalibrationExample, bool]] = []
    for number in range(FOLDS):
        others = [each for each in examples if folds[each.question] != number]
        mine = [each for each in examples if folds[each.question] == number]
        fitted = _fit([each for each in others if each.confidence is not None])
        judged += _refusals(judge_by(fitted, mine), fitted.min_confidence)
    return RefusalReport.of(judged)


def _refusals(
    examples: Iterable[CalibrationExample], least: float
) -> list[tuple[CalibrationExample, bool]]:
    return [(each, (each.confidence or 0.0) < least) for each in examples]


def judge(examples: Sequence[CalibrationExample], least: float) -> RefusalReport:
    """Report the effect of refusing all answers below a confidence."""
    return RefusalReport.of(_refusals(examples, least))


@dataclass(frozen=True, slots=True)
class RefusalReport:
    """The effect of refusals, over questions with and without an answer."""

    answerable: int
    """Number of questions with an answer."""
    unanswerable: int
    """Number of questions without an answer."""
    right: int
    """Number of right answers before refusals."""
    refused_right: float
    """Refused share of right answers."""
    refused_wrong: float
    """Refused share of wrong answers to answerable questions."""
    refused_unanswerable: float
    """Refused share of answers to unanswerable questions. Counts questions for which retrieval
    finds nothing."""
    rights: tuple[bool, ...]
    """Whether each question was answered rightly, most confident first."""

    @classmethod
    def of(cls, judged: Sequence[tuple[CalibrationExample, bool]]) -> RefusalReport:
        def share(wanted: Callable[[CalibrationExample], bool]) -> float:
            refusals = [refused for each, refused in judged if wanted(each)]
            return sum(refusals) / len(refusals) if refusals else 0.0

        ranked = sorted((each for each, _ in judged), key=lambda each: -(each.confidence or 0.0))
        return cls(
            answerable=sum(each.answerable for each in ranked),
            unanswerable=sum(not each.answerable for each in ranked),
            right=sum(each.right for each in ranked),
            refused_right=share(lambda each: each.right),
            refused_wrong=share(lambda each: each.answerable and not each.right),
            refused_unanswerable=share(lambda each: not each.answerable),
            rights=tuple(each.right for each in ranked),
        )

    @property
    def refused_answerable(self) -> float:
        """Refused share of the answers to questions that have one, right or wrong."""
        wrong = self.answerable - self.right
        refused = self.refused_right * self.right + self.refused_wrong * wrong
        return refused / self.answerable if self.answerable else 0.0

    def risk_coverage(self) -> tuple[Floats, Floats]:
        """Return coverage and risk as the minimum confidence falls.

        Coverage is the share of questions that are answered, risk the share of these answers that
        are wrong. Answers to unanswerable questions are always wrong.
        """
        count = np.arange(1, len(self.rights) + 1)
        return count / len(count), 1 - np.cumsum(self.rights) / count

    @property
    def area(self) -> float:
        """Area under the curve of risk over coverage. Less is better."""
        return float(np.mean(self.risk_coverage()[1]))

    def to_dict(self) -> dict[str, Any]:
        """Return the figures, without the curves' points."""
        return {
            "answerable": self.answerable,
            "unanswerable": self.unanswerable,
            "right": self.right,
            "refused_right": self.refused_right,
            "refused_wrong": self.refused_wrong,
            "refused_answerable": self.refused_answerable,
            "refused_unanswerable": self.refused_unanswerable,
            "area": self.area,
        }
