"""Confidence in answers, and the refusal of those that it is too low for.

`ConfidenceFeatures` are the model's probabilities of an answer and the scores of retrieval.
A logistic model over them (`Calibration`) gives the probability that the answer is right (selective
prediction, El-Yaniv and Wiener, JMLR 2010; calibrators of question answering, Kamath et al., ACL
2020). Without a calibration, the answer's tokens are scored a second time behind the question
without the documents: the confidence is how much the documents add to their likelihood.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ragcache.engine import Choice
from ragcache.engine.sampler import SampledToken
from ragcache.errors import ConfigurationError
from ragcache.models import LoadedModel
from ragcache.models.reader import READER

if TYPE_CHECKING:
    from ragcache.retrieval import Selection

_LEAST = -20.0  # log-probabilities and odds below count as this


@dataclass(frozen=True, slots=True)
class ConfidenceFeatures:
    """What speaks for an answer; None where it is not known. Logarithms are natural.

    Attributes:
        span: The mean log-probability of the answer's tokens and its end, among those that the
            quotation allowed.
        free: The same in the model's own distribution.
        no_answer: The log-odds of the no-answer token against the answer's first token.
        coverage: The best module's BM25 score, as a share of the most that any text could score
            for the question.
        gap: How far the second module is below that, as the same share, whether it is read or not.
        cosine: That of the best module by its vector.
        support: How much of the question stands around the answer (`LexicalSupport.share`).
        lift: How much more likely the documents make each token of the answer, as the mean of the
            differences of log-probabilities.
    """

    span: float | None = None
    free: float | None = None
    no_answer: float | None = None
    coverage: float | None = None
    gap: float | None = None
    cosine: float | None = None
    support: float | None = None
    lift: float | None = None

    @classmethod
    def of_selection(cls, selection: Selection) -> ConfidenceFeatures:
        """What retrieval found."""
        cosines = [hit.cosine for hit in selection.hits if hit.cosine is not None]
        cosine = max(cosines, default=None)
        if selection.words is None:
            return cls(cosine=cosine)
        most = sum(selection.words.values())
        shares = [min(1.0, each / (most or 1.0)) for each in selection.best_bm25]
        best, second = [*shares, 0.0, 0.0][:2]
        return cls(coverage=best, gap=best - second, cosine=cosine)

    def with_answer(self, choice: Choice, no_answer: int | None) -> ConfidenceFeatures:
        """With what the log-probabilities of an answer's tokens say. no_answer: the id of the
        no-answer token, if there is one."""
        tokens = [*choice.chosen, *([] if choice.ending is None else [choice.ending])]
        if not tokens:  # it ended before anything could be said
            return replace(self, span=_LEAST, free=_LEAST)
        free = [max(_LEAST, _logprob(each)) for each in tokens]
        span = [max(_LEAST, _logprob(each) - each.allowed) for each in tokens]
        odds = None if no_answer is None else _odds(tokens[0], no_answer)
        return replace(self, span=_mean(span), free=_mean(free), no_answer=odds)

    def known(self) -> dict[str, float]:
        """What is known, by name."""
        return {name: value for name, value in asdict(self).items() if value is not None}


FEATURES = tuple(each.name for each in fields(ConfidenceFeatures))


def _logprob(token: SampledToken) -> float:
    return _LEAST if token.logprob is None else token.logprob


def lift_of(chosen: Sequence[SampledToken], alone: Sequence[float]) -> float:
    """The mean difference between the log-probabilities of an answer's tokens, limited from below.
    chosen: the tokens with the documents; alone: log-probabilities without them."""
    pairs = zip(chosen, alone, strict=True)
    return _mean([max(_LEAST, _logprob(each)) - max(_LEAST, other) for each, other in pairs])


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _odds(first: SampledToken, no_answer: int) -> float:
    """The no-answer token is at most as likely as the last alternative where it is none of them."""
    if first.token == no_answer:
        return -_LEAST
    least = min((value for _, value in first.alternatives), default=0.0)
    odds = dict(first.alternatives).get(no_answer, least) - _logprob(first)
    return min(max(odds, _LEAST), -_LEAST)


@dataclass(frozen=True, slots=True)
class Calibration:
    """A logistic model of whether an answer is right.

    Attributes:
        bias: The log-odds of an answer whose evidence is the mean one.
        weights: Of each kind of evidence, by its name in `ConfidenceFeatures`.
        means: Of each kind with a weight; evidence that is not known counts as its mean.
        min_confidence: Answers below are refused, unless `GenerationParams.min_confidence` is
            another.
        questions: How many questions it was fitted on.
    """

    bias: float
    weights: Mapping[str, float]
    means: Mapping[str, float]
    min_confidence: float = 0.0
    questions: int = 0

    def __post_init__(self) -> None:
        unknown = sorted(set(self.weights) - set(FEATURES)) or set(self.weights) ^ set(self.means)
        numbers = [self.bias, self.min_confidence, *self.weights.values(), *self.means.values()]
        if unknown or not all(map(math.isfinite, numbers)):
            raise ConfigurationError(
                f"not a calibration: each weight belongs to one of {', '.join(FEATURES)} and has a "
                f"mean, and all are finite; found {dict(self.weights)} and {dict(self.means)}"
            )
        if not 0 <= self.min_confidence <= 1:
            raise ConfigurationError(
                f"min_confidence is {self.min_confidence}; it lies between 0 and 1"
            )

    def confidence(self, evidence: ConfidenceFeatures) -> float:
        """The probability, 0 to 1, that an answer with this evidence is right."""
        known = evidence.known()
        odds = self.bias + sum(
            weight * (known[name] - self.means[name])
            for name, weight in self.weights.items()
            if name in known
        )
        return 1 / (1 + math.exp(-min(max(odds, -700.0), 700.0)))

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Calibration:
        """What `to_dict` gave. Raises `ConfigurationError`."""
        try:
            return cls(**values)
        except TypeError as error:
            raise ConfigurationError(f"not a calibration: {error}") from error


UNCALIBRATED = Calibration(0.0, {"lift": 1.0}, {"lift": 0.0})
"""Of answers for which nothing is calibrated: the likelihood of a token with the documents, as a
share of those with and without them."""


def calibration_key(model: LoadedModel, *, extractive: bool) -> str:
    """The name under which a collection keeps the calibration of a model's answers."""
    kind = "extractive" if extractive else "free"
    return f"{kind}:{model.causal.fingerprint}:{model.tokenizer_fingerprint}"


@lru_cache(64)
def read_calibrations(text: str | None) -> Mapping[str, Calibration]:
    """The calibrations of a collection, by `calibration_key`, as the ledger keeps them."""
    kept = {} if text is None else json.loads(text)
    return {key: Calibration.from_dict(values) for key, values in kept.items()}


def write_calibrations(kept: Mapping[str, Calibration]) -> str | None:
    """As `read_calibrations` reads them; None where there are none."""
    return json.dumps({key: each.to_dict() for key, each in kept.items()}) if kept else None


@lru_cache(1)
def reader_calibration(file: Path = READER / "calibration.json") -> Calibration | None:
    """That of the embedded reader's quotations, in the package; None of a reader without one."""
    if not file.exists():
        return None
    return Calibration.from_dict(json.loads(file.read_text(encoding="utf-8")))


def find_calibration(
    kept: str | None, model: LoadedModel, *, extractive: bool
) -> Calibration | None:
    """The calibration of a model's answers among those that a collection keeps, or else that of the
    embedded reader's quotations; None where there is neither."""
    found = read_calibrations(kept).get(calibration_key(model, extractive=extractive))
    return reader_calibration() if found is None and extractive and model.extractive else found
