"""Policies of an answer: the features that change a request and finish its answer.

A question without such features has no policy. A policy is made before states are leased, so that
it refuses options before anything is computed. It then changes the engine's request, and finishes
its answers.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

from ragcache.answers.citations import cite
from ragcache.answers.confidence import (
    UNCALIBRATED,
    Calibration,
    ConfidenceFeatures,
    ModelCalibration,
    find_calibration,
    lift_of,
)
from ragcache.answers.passages import LexicalSupport
from ragcache.answers.quotation_index import Quotation, QuotationText
from ragcache.answers.quotations import AnswerSpan, Quotations, QuotationSources
from ragcache.db import ModuleRow
from ragcache.engine import (
    Choice,
    Context,
    LLMEngine,
    Request,
    RequestHandle,
    RequestOutput,
    TokenDelta,
)
from ragcache.engine.sampler import SampledToken
from ragcache.errors import InvalidRequest
from ragcache.models import LoadedModel
from ragcache.params import REFUSAL, GenerationParams
from ragcache.retrieval import Selection

Pass = RequestHandle[TokenDelta, RequestOutput]
"""A request to the engine that an answer waits for."""

_ALTERNATIVES = 20  # likeliest tokens among which the no-answer token is looked for


@dataclass(frozen=True, slots=True)
class AnswerOutput:
    """A finished request, with the findings of its policies."""

    output: RequestOutput
    """The output of the engine. Refused answers are replaced."""
    confidences: tuple[float, ...] = ()
    """Confidence in each choice, 0 to 1. Empty without a `ConfidencePolicy`."""
    features: tuple[ConfidenceFeatures, ...] = ()
    """The features that each confidence was computed from."""
    spans: tuple[AnswerSpan, ...] = ()
    """Document positions of the choices. Empty without a `QuotationPolicy`."""


class AnswerPolicy:
    """One feature of the answers to one request. The base changes nothing."""

    __slots__ = ()

    @property
    def holds(self) -> bool:
        """Whether a stream shows nothing before the answer is finished."""
        return False

    @property
    def follows_up(self) -> bool:
        """Whether finishing the answer takes more passes of the engine."""
        return False

    def change_request(self, request: Request) -> Request:
        """Return the request with the changes that the feature needs."""
        return request

    def follow_up(self, output: RequestOutput) -> Sequence[Pass]:  # noqa: ARG002
        """Submit the passes whose outputs `finish` needs."""
        return ()

    def finish(
        self,
        answer: AnswerOutput,
        passes: Sequence[RequestOutput],  # noqa: ARG002
    ) -> AnswerOutput:
        """Return the answer with the feature's findings. passes: outputs of `follow_up`."""
        return answer

    def release(
        self,
        deltas: Sequence[TokenDelta],
        answer: AnswerOutput,  # noqa: ARG002
    ) -> list[TokenDelta]:
        """Return the deltas to show of a stream that was held until its answer was finished."""
        return list(deltas)


class AnsweredPrompt(Protocol):
    """The properties of a prompt that policies depend on."""

    @property
    def kind(self) -> str:
        """`question`, `chat`, or `prompt` for PML."""

    @property
    def has_documents(self) -> bool:
        """False if retrieval found nothing."""

    @property
    def modules(self) -> tuple[ModuleRow, ...]:
        """The modules in the prompt, best first."""

    @property
    def selection(self) -> Selection | None:
        """The result of the search. PML prompts, and chats without a collection, have none."""

    @property
    def without_documents(self) -> Callable[[], Sequence[int]]:
        """Function that makes the prompt's tokens without its modules."""


def answer_policies(
    prompt: AnsweredPrompt,
    params: GenerationParams,
    model: LoadedModel,
    engine: LLMEngine,
    quotations: Quotations | None,
    calibration: ModelCalibration | None = None,
) -> tuple[AnswerPolicy, ...]:
    """Return the policies of a prompt's answers, in the order in which they finish them.

    Args:
        prompt: The prompt that is answered.
        params: The options of the call.
        model: The model that answers.
        engine: The engine that confidence policies submit their passes to.
        quotations: Quotable texts of the namespace. Without them no answer is a quotation.
        calibration: The calibration of the model's free answers.

    Raises:
        InvalidRequest: An option does not go with the prompt or with another option.
    """
    quotation = confidence = None
    citations = CitationPolicy.for_prompt(prompt, params)
    if params.extractive or (params.extractive is None and model.extractive):
        quotation = QuotationPolicy.for_prompt(prompt, params, quotations)
    if params.confidence is not False:
        built_in = calibration if prompt.kind == "question" or params.confidence else None
        confidence = ConfidencePolicy.for_prompt(
            prompt, params, model, engine, built_in, extractive=quotation is not None
        )
    worded = None
    if prompt.kind == "chat" and model.extractive and not (confidence or params.forms):
        worded = WordedPolicy(params.refusal)
    formed = reader_form_policy(prompt, params, quotations) if model.extractive else None
    policies = (confidence, quotation, worded, formed, citations)
    return tuple(each for each in policies if each is not None)


@dataclass(frozen=True, slots=True)
class WordedPolicy(AnswerPolicy):
    """Refuses in words where the embedded reader says nothing in a chat."""

    refusal: str
    """The text of a refused answer."""

    def finish(
        self,
        answer: AnswerOutput,
        passes: Sequence[RequestOutput],  # noqa: ARG002
    ) -> AnswerOutput:
        """Return the answer with refusals in place of blank choices."""
        choices = tuple(
            each if each.text.strip() else refused(each, self.refusal)
            for each in answer.output.choices
        )
        return replace(answer, output=replace(answer.output, choices=choices))


def refused(choice: Choice, refusal: str) -> Choice:
    """Return a refused choice: the refusal's text, and no log-probabilities."""
    said = replace(choice, text=refusal, finish_reason="no_answer", stopped_by=None)
    return replace(said, chosen=(), ending=None)


@dataclass(frozen=True, slots=True)
class QuotationPolicy(AnswerPolicy):
    """Limits answers to contiguous runs of the modules' texts."""

    sources: QuotationSources
    """The modules that may be quoted."""

    @classmethod
    def for_prompt(
        cls, prompt: AnsweredPrompt, params: GenerationParams, quotations: Quotations | None
    ) -> QuotationPolicy | None:
        """Return the policy of a prompt whose answers are quotations; other prompts have none.

        Raises:
            InvalidRequest: `extractive` is set, and the prompt cannot be answered by quotations.
        """
        if params.extractive:
            _check_extractive(prompt, params)
        elif prompt.selection is None or params.forms or params.citations:
            return None
        if not prompt.modules or quotations is None:
            return None
        return cls(quotations.of(prompt.modules))

    def change_request(self, request: Request) -> Request:
        """Allow only the tokens of quotations, and end their text at word boundaries."""
        index = self.sources.index
        constraint, text = partial(Quotation, index), partial(QuotationText, index)
        return replace(request, constraint=constraint, text=text, suppress_tokens=frozenset())

    def finish(
        self,
        answer: AnswerOutput,
        passes: Sequence[RequestOutput],  # noqa: ARG002
    ) -> AnswerOutput:
        """Return the answer with its document positions."""
        return replace(answer, spans=self.sources.spans(answer.output.choices))


def reader_form_policy(
    prompt: AnsweredPrompt, params: GenerationParams, quotations: Quotations | None
) -> AnswerPolicy | None:
    """Return the policy of the embedded reader's JSON from documents; other answers have none.

    The reader was trained to quote a few words. A schema with one string gets its quotation.

    Raises:
        InvalidRequest: Any JSON object is asked for.
    """
    if params.json_object:
        raise InvalidRequest(
            "the embedded reader quotes a few words, and cannot invent a JSON object; give a "
            "json_schema with one string to fill, or a model: --model Qwen/Qwen2.5-1.5B-Instruct"
        )
    if params.json_schema is None or not prompt.selection:
        return None
    name = _only_string(params.json_schema)
    if name is None or params.extractive is False or quotations is None or not prompt.modules:
        return ReaderFormPolicy()
    return QuotedFormPolicy(quotations.of(prompt.modules), name)


def _only_string(schema: str | Mapping[str, Any]) -> str | None:
    """Return the name of a schema's property, if it has one only, which may be any string."""
    value = json.loads(schema) if isinstance(schema, str) else schema
    properties = value.get("properties") if isinstance(value, Mapping) else None
    if not isinstance(properties, Mapping) or len(properties) != 1 or not value.keys() <= _PLAIN:
        return None
    [(name, kind)] = properties.items()
    plain = isinstance(kind, Mapping) and kind.get("type") == "string" and kind.keys() <= _NOTES
    return str(name) if plain else None


_NOTES = frozenset({"type", "title", "description", "default"})
_PLAIN = _NOTES | {"properties", "required", "additionalProperties", "$schema", "$defs"}


@dataclass(frozen=True, slots=True)
class ReaderFormPolicy(AnswerPolicy):
    """Refuses JSON that the embedded reader has no words for."""

    def finish(
        self,
        answer: AnswerOutput,
        passes: Sequence[RequestOutput],  # noqa: ARG002
    ) -> AnswerOutput:
        """Return the answer.

        Raises:
            InvalidRequest: A string of a complete answer has no word.
        """
        for choice in answer.output.choices:
            if choice.finish_reason == "stop" and not isinstance(choice.stopped_by, str):
                _check_words(json.loads(choice.text))
        return answer


@dataclass(frozen=True, slots=True)
class QuotedFormPolicy(QuotationPolicy):
    """Quotes the modules, and writes the quotation as the only string of a JSON object."""

    name: str
    """Name of the string."""

    @property
    def holds(self) -> bool:
        """Whether a stream shows nothing before the answer is finished: always."""
        return True

    def finish(self, answer: AnswerOutput, passes: Sequence[RequestOutput]) -> AnswerOutput:
        """Return the answer in its form, with the document positions of the quotation.

        Raises:
            InvalidRequest: The quotation has no word.
        """
        quoted = QuotationPolicy.finish(self, answer, passes)
        choices = []
        for choice in answer.output.choices:
            value = {self.name: choice.text.strip()}
            _check_words(value)
            choices.append(replace(choice, text=json.dumps(value, ensure_ascii=False)))
        return replace(quoted, output=replace(answer.output, choices=tuple(choices)))

    def release(
        self,
        deltas: Sequence[TokenDelta],  # noqa: ARG002
        answer: AnswerOutput,
    ) -> list[TokenDelta]:
        """Return the whole text of each choice."""
        return [TokenDelta(n, None, each.text) for n, each in enumerate(answer.output.choices)]


def _check_words(value: Any) -> None:
    """Raise `InvalidRequest` if a string of a JSON value has no letter or digit."""
    if (blank := _string_without_words(value, "the answer")) is not None:
        raise InvalidRequest(
            f"the embedded reader found no words for {blank} of the JSON schema; it quotes a few "
            "words, and fills one string at most. Give a model: --model Qwen/Qwen2.5-1.5B-Instruct"
        )


def _string_without_words(value: Any, name: str) -> str | None:
    """Return the name of a string without a letter or digit in a JSON value, if there is one."""
    if isinstance(value, str):
        return None if any(map(str.isalnum, value)) else name
    parts = dict(enumerate(value)) if isinstance(value, list) else value
    items = parts.items() if isinstance(parts, dict) else ()
    found = (_string_without_words(each, repr(key)) for key, each in items)
    return next((each for each in found if each is not None), None)


@dataclass(frozen=True, slots=True)
class CitationPolicy(AnswerPolicy):
    """Puts source marks into free answers, and lists their places in the documents."""

    modules: tuple[ModuleRow, ...]
    """The modules in the prompt, best first."""

    @classmethod
    def for_prompt(cls, prompt: AnsweredPrompt, params: GenerationParams) -> CitationPolicy | None:
        """Return the policy of a prompt whose answers cite; other prompts have none.

        Raises:
            InvalidRequest: Citations are asked for in the answer to a PML prompt.
        """
        if not params.citations:
            return None
        if prompt.kind == "prompt":
            raise InvalidRequest(
                "citations name documents, and a PML prompt reads a schema; ask a collection "
                "instead, or leave out citations"
            )
        return cls(prompt.modules)

    @property
    def holds(self) -> bool:
        """A mark is known at the end of its sentence, and the answer is checked as a whole."""
        return True

    def finish(
        self,
        answer: AnswerOutput,
        passes: Sequence[RequestOutput],  # noqa: ARG002
    ) -> AnswerOutput:
        """Return the answer with marks in its choices, and their spans. Refusals cite nothing."""
        choices, spans = list[Choice](), list[AnswerSpan]()
        for number, choice in enumerate(answer.output.choices):
            if choice.finish_reason != "no_answer":
                text, found = cite(choice.text, self.modules, number)
                choice = replace(choice, text=text)
                spans += found
            choices.append(choice)
        output = replace(answer.output, choices=tuple(choices))
        return replace(answer, output=output, spans=(*answer.spans, *spans))

    def release(self, deltas: Sequence[TokenDelta], answer: AnswerOutput) -> list[TokenDelta]:
        """Return the deltas with the whole text of each choice, with its marks, at its end."""
        cited = {
            number: choice.text
            for number, choice in enumerate(answer.output.choices)
            if choice.finish_reason != "no_answer"
        }
        shown = [replace(each, text="") if each.choice in cited else each for each in deltas]
        return [*shown, *(TokenDelta(number, None, text) for number, text in cited.items())]


def _check_extractive(prompt: AnsweredPrompt, params: GenerationParams) -> None:
    """Raise `InvalidRequest` for a prompt or options that exclude quotations."""
    if params.forms:
        raise InvalidRequest(
            "an extractive answer is a quotation and keeps to no grammar; leave out either "
            "extractive, or response format and grammar"
        )
    if prompt.kind == "prompt":
        raise InvalidRequest(
            "an extractive answer quotes documents, and a PML prompt reads a schema; ask a "
            "collection instead, or leave out extractive"
        )
    if not prompt.modules and prompt.has_documents:
        raise InvalidRequest(
            "an extractive answer quotes documents, and no ingested text was recognized in the "
            "conversation; ask with a collection, or leave out extractive"
        )


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
