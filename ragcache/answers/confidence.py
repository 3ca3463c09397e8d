"""Confidence in answers, and the refusal of answers below a minimum.

`ConfidenceFeatures` holds the model's probabilities of an answer and the scores of retrieval.
A logistic model over them (`Calibration`) gives the probability that the answer is right (selective
prediction, El-Yaniv and Wiener, JMLR 2010; calibrators of question answering, Kamath et al., ACL
2020). Without a calibration, the answer's tokens are scored a second time after the question
without the documents: the confidence is how much the documents add to their likelihood.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ragcache.db import Ledger
from ragcache.engine import Choice
from ragcache.engine.sampler import SampledToken
from ragcache.errors import ConfigurationError, StoreError
from ragcache.models import INSTRUCTION, LoadedModel
from ragcache.models.reader import READER

if TYPE_CHECKING:
    from ragcache.retrieval import Selection

logger = logging.getLogger(__name__)

VERSION = 2
"""Version of the built-in questions and of the evidence. Model calibrations of other versions are
ignored."""

_REREAD_SECONDS = 10.0  # after which a missing model calibration is looked for again
_LEAST = -20.0  # lower limit of log-probabilities and odds


@dataclass(frozen=True, slots=True)
class ConfidenceFeatures:
    """Evidence for an answer. Unknown features are None. Logarithms are natural."""

    span: float | None = None
    """Mean log-probability of the answer's tokens and its end, relative to the tokens that the
    quotation allowed."""
    free: float | None = None
    """Mean log-probability of the answer's tokens and its end in the model's own distribution."""
    no_answer: float | None = None
    """Log-odds of the no-answer token against the answer's first token."""
    coverage: float | None = None
    """BM25 score of the best module, as a share of the highest score possible for the question."""
    gap: float | None = None
    """Difference between the two best modules' `coverage`, whether or not the second is read."""
    cosine: float | None = None
    """Highest cosine of a module's vector with the question's."""
    support: float | None = None
    """Weighted share of the question's words around a quotation (`LexicalSupport.share`)."""
    grounding: float | None = None
    """How far one passage has the words of a free answer, and its module the question's
    (`LexicalSupport.grounding`)."""
    lift: float | None = None
    """Mean increase of the log-probability of the answer's tokens by the documents."""

    @classmethod
    def of_selection(cls, selection: Selection) -> ConfidenceFeatures:
        """Return the features of a search result."""
        cosines = [hit.cosine for hit in selection.hits if hit.cosine is not None]
        cosine = max(cosines, default=None)
        if selection.words is None:
            return cls(cosine=cosine)
        most = sum(selection.words.values())
        shares = [min(1.0, each / (most or 1.0)) for each in selection.best_bm25]
        best, second = [*shares, 0.0, 0.0][:2]
        return cls(coverage=best, gap=best - second, cosine=cosine)

    def with_answer(self, choice: Choice, no_answer: int | None) -> ConfidenceFeatures:
        """Return these features with `span`, `free` and `no_answer` of an answer.

        Args:
            choice: The answer, with log-probabilities.
            no_answer: The id of the model's no-answer token, if it has one.
        """
        tokens = [*choice.chosen, *([] if choice.ending is None else [choice.ending])]
        if not tokens:  # it ended before anything could be said
            return replace(self, span=_LEAST, free=_LEAST)
        free = [max(_LEAST, _logprob(each)) for each in tokens]
        span = [max(_LEAST, _logprob(each) - each.allowed) for each in tokens]
        odds = None if no_answer is None else _odds(tokens[0], no_answer)
        return replace(self, span=_mean(span), free=_mean(free), no_answer=odds)

    def known(self) -> dict[str, float]:
        """Return the known features by name."""
        return {name: value for name, value in asdict(self).items() if value is not None}


FEATURES = tuple(each.name for each in fields(ConfidenceFeatures))


def _logprob(token: SampledToken) -> float:
    return _LEAST if token.logprob is None else token.logprob


def lift_of(chosen: Sequence[SampledToken], alone: Sequence[SampledToken]) -> float:
    """Return the mean increase of the log-probability of an answer's tokens by the documents.

    Args:
        chosen: The answer's tokens, sampled with the documents.
        alone: The same tokens, scored without the documents.
    """
    pairs = zip(chosen, alone, strict=True)
    return _mean(
        [max(_LEAST, _logprob(each)) - max(_LEAST, _logprob(other)) for each, other in pairs]
    )


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _odds(first: SampledToken, no_answer: int) -> float:
    """Return the log-odds of the no-answer token against an answer's first token.

    If the token is not among the alternatives, the likelihood of the last alternative is used.
    """
    if first.token == no_answer:
        return -_LEAST
    least = min((value for _, value in first.alternatives), default=0.0)
    odds = dict(first.alternatives).get(no_answer, least) - _logprob(first)
    return min(max(odds, _LEAST), -_LEAST)


@dataclass(frozen=True, slots=True)
class Calibration:
    """A logistic model of whether an answer is right."""

    bias: float
    """Log-odds of an answer whose features are all at their means."""
    weights: Mapping[str, float]
    """Weights of features, by their names in `ConfidenceFeatures`."""
    means: Mapping[str, float]
    """Means of the features with weights. An unknown feature counts as its mean."""
    min_confidence: float = 0.0
    """Default of `GenerationParams.min_confidence`: answers below it are refused."""
    questions: int = 0
    """Number of questions that it was fitted on."""
    most_modules: int | None = None
    """Most modules that the embedded reader reads, the best ones. Unlimited by default."""

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
        """Return the probability, 0 to 1, that an answer with this evidence is right."""
        known = evidence.known()
        odds = self.bias + sum(
            weight * (known[name] - self.means[name])
            for name, weight in self.weights.items()
            if name in known
        )
        return 1 / (1 + math.exp(-min(max(odds, -700.0), 700.0)))

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as plain values, for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Calibration:
        """Return the calibration of the values of `to_dict`. Raises `ConfigurationError`."""
        try:
            return cls(**values)
        except TypeError as error:
            raise ConfigurationError(f"not a calibration: {error}") from error


UNCALIBRATED = Calibration(0.0, {"lift": 1.0}, {"lift": 0.0})
"""Calibration of models without one: p / (p + q), where p and q are the likelihoods of a token with
and without the documents."""


GENERAL = Calibration(
    bias=-2.6780,
    weights={"free": 5.9029, "grounding": 7.2929},
    means={"free": -0.3901, "grounding": 0.4459},
    min_confidence=0.1870,
    questions=562,
)
"""Calibration of free answers of a model that has none of its own yet: fitted to the answers of two
models to the built-in questions (`benchmarks/refusals.py`, ADRs 98 and 99)."""


def calibration_key(model: LoadedModel, *, extractive: bool) -> str:
    """Return the name under which a collection stores the calibration of a model's answers."""
    kind = "extractive" if extractive else "free"
    return f"{kind}:{model.causal.fingerprint}:{model.tokenizer_fingerprint}"


@lru_cache(64)
def read_calibrations(text: str | None) -> Mapping[str, Calibration]:
    """Parse the calibrations of a collection, by `calibration_key`, from the ledger's JSON."""
    kept = {} if text is None else json.loads(text)
    return {key: Calibration.from_dict(values) for key, values in kept.items()}


def write_calibrations(kept: Mapping[str, Calibration]) -> str | None:
    """Return calibrations as JSON for `read_calibrations`; no calibrations give None."""
    return json.dumps({key: each.to_dict() for key, each in kept.items()}) if kept else None


@lru_cache(1)
def reader_calibration(file: Path = READER / "calibration.json") -> Calibration | None:
    """Return the calibration of the embedded reader's quotations, if it has one."""
    if not file.exists():
        return None
    return Calibration.from_dict(json.loads(file.read_text(encoding="utf-8")))


@dataclass(eq=False)
class ModelCalibration:
    """The calibration of a model's free answers that was fitted to the built-in questions.

    The ledger keeps it under the model, its tokenizer and the instruction, for all processes. It
    does not apply to collections with an instruction of their own. Thread-safe.
    """

    model: LoadedModel
    instruction: str
    """Instruction of the folder."""
    ledger: Ledger | None
    """The ledger that keeps the calibration. Without it, it stays in memory."""
    forced: bool = False
    """Whether the folder leaves out all measurements (`OpenConfig.force_modes`)."""
    _known: Calibration | None = field(default=None, init=False)
    _settled: bool = field(default=False, init=False)
    """Whether the model was asked the built-in questions. Too few right answers fit nothing."""
    _read_at: float = field(default=-math.inf, init=False)

    @property
    def is_fitted(self) -> bool:
        """Whether the model was asked the built-in questions, here or in another process."""
        self._read()
        return self._settled

    def find(self) -> Calibration | None:
        """Return the model's calibration, or the general one until it has its own.

        A model that answered too few of the built-in questions has none.
        """
        self._read()
        return self._known if self._settled else self.general

    def _read(self) -> None:
        """Read the ledger, at most every 10 seconds."""
        now = time.monotonic()
        if self._settled or self.ledger is None or now < self._read_at + _REREAD_SECONDS:
            return
        self._read_at = now
        try:
            text = self.ledger.get_fact(self._fact)
        except StoreError as error:
            logger.warning("%s; the model's calibration is looked for again later", error)
            return
        if text is not None:
            self._settle(text)

    @property
    def general(self) -> Calibration | None:
        """The calibration of other models, which serves until the model was asked itself.

        There is none for other instructions than it was fitted with, and none for the free answers
        of the embedded reader.
        """
        fits = self.instruction == INSTRUCTION and not self.model.extractive
        return GENERAL if fits and not self.forced else None

    def keep(self, fitted: Calibration | None) -> Calibration | None:
        """Keep a calibration, or that none could be fitted.

        Returns:
            The calibration in use, which another process may have fitted before.
        """
        text = json.dumps(None if fitted is None else fitted.to_dict())
        if self.ledger is not None:
            try:
                text = self.ledger.agree_on_fact(self._fact, text)
            except StoreError as error:
                logger.warning("%s; the model's calibration is not kept", error)
        self._settle(text)
        return self._known

    def _settle(self, text: str) -> None:
        values = json.loads(text)
        self._known = None if values is None else Calibration.from_dict(values)
        self._settled = True

    @property
    def _fact(self) -> str:
        instruction = hashlib.sha256(self.instruction.encode()).hexdigest()[:16]
        return (
            f"calibration/{VERSION}/{calibration_key(self.model, extractive=False)}/{instruction}"
        )


def find_calibration(
    kept: str | None, model: LoadedModel, built_in: ModelCalibration | None, *, extractive: bool
) -> Calibration | None:
    """Return the calibration of a model's answers, if there is one.

    Args:
        kept: The collection's calibrations, from the ledger. They come first.
        model: The model that answers.
        built_in: The calibration of the model's free answers.
        extractive: Whether answers are quotations. The embedded reader has a calibration of its
            own for them.
    """
    found = read_calibrations(kept).get(calibration_key(model, extractive=extractive))
    if found is not None:
        return found
    if extractive:
        return reader_calibration() if model.extractive else None
    return None if built_in is None else built_in.find()
