"""The policy of answers that have a confidence."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from ragcache.answers.confidence import (
    UNCALIBRATED,
    Calibration,
    ConfidenceFeatures,
    ModelCalibration,
    find_calibration,
    lift_of,
)
from ragcache.answers.passages import LexicalSupport
from ragcache.answers.policy import AnsweredPrompt, AnswerOutput, AnswerPolicy, Pass, refused
from ragcache.engine import (
    Choice,
    Context,
    LLMEngine,
    Request,
    RequestOutput,
    SampledToken,
    TokenDelta,
)
from ragcache.errors import InvalidRequest
from ragcache.models import LoadedModel
from ragcache.params import REFUSAL, GenerationParams

_ALTERNATIVES = 20  # likeliest tokens among which the no-answer token is looked for


@dataclass(frozen=True, slots=True)
class ConfidencePolicy(AnswerPolicy):
    """Computes the confidence in answers, and refuses answers with a low one."""

    calibration: Calibration
    """The model of the confidence."""
    features: ConfidenceFeatures
    """Features of the search result."""
    min_confidence: float
    """Confidence, 0 to 1, below which answers are refused."""
    support: LexicalSupport | None = None
    """Finds the question's words around an answer. Set after a search by words."""
    quotes: bool = False
    """Whether answers are quotations."""
    refusal: str = REFUSAL
    """The text of a refused answer."""
    no_answer: int | None = None
    """The model's no-answer token; see `LoadedModel`."""
    score: Callable[[Sequence[int]], Pass] | None = None
    """Submits a pass that scores tokens after the prompt without documents. Set for calibrations
    with `lift`."""
    logprobs: int | None = None
    """Number of alternatives to each token that the caller asked for."""

    @classmethod
    def for_prompt(
        cls,
        prompt: AnsweredPrompt,
        params: GenerationParams,
        model: LoadedModel,
        engine: LLMEngine,
        built_in: ModelCalibration | None = None,
        *,
        extractive: bool,
    ) -> ConfidencePolicy | None:
        """Return the policy of a prompt whose answers have a confidence; other prompts have none.

        Answers have one if the caller asks for it, or if there is a calibration.

        Raises:
            InvalidRequest: The caller asks for the confidence in the answer to a PML prompt.
        """
        wanted = bool(params.confidence or params.min_confidence)
        if wanted and prompt.kind == "prompt":
            raise InvalidRequest(
                "the confidence in an answer is that in what documents say, and a PML prompt reads "
                "a schema; ask a collection instead, or leave out confidence and min_confidence"
            )
        selection = prompt.selection
        if not prompt.modules or not (wanted or selection):
            return None
        calibration, features, support = None, ConfidenceFeatures(), None
        if selection is not None:
            kept = selection.version.calibrations
            if selection.version.instruction is not None:  # other answers than the calibrated ones
                built_in = None
            calibration = find_calibration(kept, model, built_in, extractive=extractive)
        if not wanted and (calibration is None or params.forms):
            return None
        if selection is not None:
            features = ConfidenceFeatures.of_selection(selection)
            if selection.words is not None:
                support = LexicalSupport(selection.words, prompt.modules)
        calibration = calibration or UNCALIBRATED
        least = params.min_confidence
        if least is None:
            least = 0.0 if params.forms else calibration.min_confidence
        score = None
        if "lift" in calibration.weights:
            score = partial(_score, engine, prompt.without_documents, params.priority)
        return cls(
            calibration,
            features,
            least,
            support,
            extractive,
            params.refusal,
            model.no_answer_id,
            score,
            params.logprobs,
        )

    @property
    def holds(self) -> bool:
        """Whether answers may be refused."""
        return self.min_confidence > 0

    @property
    def follows_up(self) -> bool:
        """Whether answers are scored without the documents."""
        return self.score is not None

    def change_request(self, request: Request) -> Request:
        """Report log-probabilities. Allow the no-answer token if answers may be refused."""
        own = 0 if self.no_answer is None else _ALTERNATIVES
        sampling = replace(request.sampling, logprobs=max(own, self.logprobs or 0))
        suppressed = frozenset[int]() if self.holds else request.suppress_tokens
        return replace(request, sampling=sampling, suppress_tokens=suppressed)

    def follow_up(self, output: RequestOutput) -> Sequence[Pass]:
        """Score each answer with tokens again, without the documents."""
        score = self.score
        said = [each.token_ids for each in output.choices if each.token_ids]
        return () if score is None else [score(token_ids) for token_ids in said]

    def finish(self, answer: AnswerOutput, passes: Sequence[RequestOutput]) -> AnswerOutput:
        """Return the answer with its confidences, and with refusals in place of refused choices."""
        output, scored = answer.output, iter(passes)
        found = [
            self.features_of(each, next(scored, None) if each.token_ids else None)
            for each in output.choices
        ]
        confidences = tuple(map(self.confidence_of, output.choices, found))
        choices = tuple(
            refused(choice, self.refusal)
            if confidence < self.min_confidence
            else self._shown(choice)
            for choice, confidence in zip(output.choices, confidences, strict=True)
        )
        finished = max([output.finished_at, *(each.finished_at for each in passes)])
        output = replace(output, choices=choices, finished_at=finished)
        return replace(answer, output=output, confidences=confidences, features=tuple(found))

    def features_of(
        self, choice: Choice, scored: RequestOutput | None = None
    ) -> ConfidenceFeatures:
        """Return all features of an answer.

        Args:
            choice: The answer.
            scored: Output of the pass without documents.
        """
        features = self.features.with_answer(choice, self.no_answer)
        if self.support is not None and self.quotes:
            features = replace(features, support=self.support.share(choice.text))
        elif self.support is not None:
            features = replace(features, grounding=self.support.grounding(choice.text))
        if scored is None or not choice.chosen:
            return features
        return replace(features, lift=lift_of(choice.chosen, scored.prompt_logprobs))

    def confidence_of(self, choice: Choice, features: ConfidenceFeatures) -> float:
        """Return the confidence in an answer.

        It is 0 for an empty answer and for one with the no-answer token.
        """
        declined = self.no_answer is not None and self.no_answer in choice.token_ids
        if declined or not choice.text.strip():
            return 0.0
        return self.calibration.confidence(features)

    def release(self, deltas: Sequence[TokenDelta], answer: AnswerOutput) -> list[TokenDelta]:
        """Return the deltas of accepted answers, and the refusals of the others."""
        choices = answer.output.choices
        hidden = {n for n, each in enumerate(choices) if each.finish_reason == "no_answer"}
        shown = [
            each if each.chosen is None else replace(each, chosen=self._shown_token(each.chosen))
            for each in deltas
            if each.choice not in hidden
        ]
        return [*shown, *(TokenDelta(n, None, choices[n].text) for n in sorted(hidden))]

    def _shown(self, choice: Choice) -> Choice:
        """Return the answer with the log-probabilities that the caller asked for."""
        if self.logprobs is None:
            return replace(choice, chosen=(), ending=None)
        chosen = tuple(map(self._shown_token, choice.chosen))
        ending = None if choice.ending is None else self._shown_token(choice.ending)
        return replace(choice, chosen=chosen, ending=ending)

    def _shown_token(self, token: SampledToken) -> SampledToken:
        """Return the token with the log-probabilities that the caller asked for."""
        if self.logprobs is None:
            return SampledToken(token.token)
        return replace(token, alternatives=token.alternatives[: self.logprobs])


def _score(
    engine: LLMEngine,
    without_documents: Callable[[], Sequence[int]],
    priority: int,
    answer: Sequence[int],
) -> Pass:
    """Submit a pass that scores an answer after a prompt without modules."""
    tokens = (*without_documents(), *answer)
    context = Context((), tokens, tuple(range(len(tokens))), len(tokens))
    request = Request(context, max_tokens=1, prompt_logprobs=len(answer), priority=priority)
    return engine.submit_request(request, follow_up=True)
