"""From built prompts to the engine: check the sizes, lease the states, submit."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any

from ragcache.answers.confidence import REFUSAL, UNCALIBRATED, AnswerCheck, find_calibration
from ragcache.answers.quotation_index import Quotation, QuotationText
from ragcache.answers.quotations import Quotations, QuotationSources
from ragcache.config import NAMESPACE, RagCacheConfig, blend_percent
from ragcache.engine import (
    Choice,
    Context,
    LLMEngine,
    Request,
    RequestHandle,
    RequestOutput,
    SamplingParams,
    TextStream,
    TokenDelta,
)
from ragcache.engine.detokenizer import check_stop_strings
from ragcache.engine.handle import RequestChannel
from ragcache.engine.request import MakeText, check_options
from ragcache.errors import InvalidRequest, StoreError
from ragcache.models import LoadedModel
from ragcache.pipeline.answer import DeferredReleases, PendingAnswer, PreparedAnswer, give_up
from ragcache.pipeline.blend import blend_prompt, most_blended
from ragcache.pipeline.gate import ModeGate
from ragcache.pipeline.prompt import BuiltPrompt, PromptStates, build_context
from ragcache.store import Lease
from ragcache.structured import Grammar, compile_constraint

logger = logging.getLogger(__name__)

MakeRequest = Callable[[Context], Request]


@dataclass(frozen=True, slots=True)
class Generation:
    """Options of one request. The default is one greedy answer.

    Attributes:
        sampling: How tokens are drawn.
        max_tokens: The most tokens of an answer; None is what the state folder was opened with.
        stop: Strings that end an answer and do not belong to it.
        n: How many answers.
        min_tokens: No stop token is chosen before.
        ignore_eos: Whether stop tokens end nothing.
        timeout: In seconds, from when the request is queued.
        priority: Each level counts as 10 seconds of waiting.
        share: Whether states of the question's own tokens may be shared with other requests.
        grammar: The form that every answer keeps to.
        extractive: Whether every answer is a quotation: a contiguous run of the text of one of the
            modules that it is read from, from word boundary to word boundary, whose places are
            `Answer.spans`. None is what the model does with questions: the embedded reader quotes,
            others do not.
        skip_special_tokens: Whether control tokens are left out of the text; False where they mark
            tool calls (`ToolStyle.special`).
        confidence: Whether to find out how confident the answer is (`Answer.confidence`). None does
            so for questions where a calibration is at hand, as it is for the quotations of the
            embedded reader (`RagCache.calibration`), which costs nothing. With True others are
            scored once more behind the question without the documents, as they always are where a
            calibration weighs `lift`.
        min_confidence: 0 to 1. An answer of less confidence is refused: its text is `refusal`, its
            `finish_reason` is `no_answer`, and a stream shows nothing before that is known. None is
            that of the calibration; 0 refuses nothing.
        refusal: The text of a refused answer.
        unbounded: Whether `max_tokens` None is as many as the model's window and the engine's
            pool leave.
    """

    sampling: SamplingParams = field(default_factory=SamplingParams)
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    n: int = 1
    min_tokens: int = 0
    ignore_eos: bool = False
    timeout: float | None = None
    priority: int = 0
    share: bool = True
    grammar: Grammar | None = None
    extractive: bool | None = None
    skip_special_tokens: bool = True
    unbounded: bool = False
    confidence: bool | None = None
    min_confidence: float | None = None
    refusal: str = REFUSAL

    def __post_init__(self) -> None:
        least = self.min_confidence
        if least is not None and not 0 <= least <= 1:
            raise InvalidRequest(f"min_confidence is {least}; it lies between 0 and 1")
        if least and self.confidence is False:
            raise InvalidRequest(
                f"min_confidence is {least}, which takes the confidence that confidence=False "
                "leaves out; leave out either"
            )
        if least and self.grammar is not None:
            raise InvalidRequest(
                "a refused answer keeps to no grammar; leave out either min_confidence, or "
                "response format and grammar"
            )
        if not self.refusal.strip():
            raise InvalidRequest("the refusal is blank; give the text of answers that are refused")

    @classmethod
    def of(cls, **options: Any) -> Generation:
        """Options by their plain names, those of `SamplingParams` among them: `of(temperature=0.7,
        stop="\\n")`, and those of `Grammar`: `json_schema={...}`, `json_object=True`,
        `regex="..."`, `ebnf="..."`. None is the default. Raises `InvalidRequest` for an unknown
        name."""
        given = {name: value for name, value in options.items() if value is not None}
        grammars = [_GRAMMARS[name](given.pop(name)) for name in _GRAMMARS if name in given]
        grammars = [each for each in grammars if each is not None]
        sampling = {f.name: given.pop(f.name) for f in fields(SamplingParams) if f.name in given}
        known = [field.name for field in fields(cls) if field.name != "sampling"]
        if unknown := sorted(given.keys() - set(known)):
            sampled = (field.name for field in fields(SamplingParams))
            names = ", ".join(sorted([*known, *sampled, *_GRAMMARS]))
            raise InvalidRequest(f"unknown option {unknown[0]!r}; options: {names}")
        if "stop" in given:
            stop = given["stop"]
            given["stop"] = (stop,) if isinstance(stop, str) else tuple(stop)
        if len(grammars) + ("grammar" in given) > 1:
            raise InvalidRequest("an answer keeps to one grammar; several were given")
        if grammars:
            given["grammar"] = grammars[0]
        return cls(sampling=SamplingParams(**sampling), **given)

    def token_limit(self, default: int) -> int:
        """The most tokens of an answer."""
        return default if self.max_tokens is None else self.max_tokens

    def request_maker(
        self, model: LoadedModel, default_tokens: int, tenant: Hashable,
        quoted: QuotationSources | None = None, check: AnswerCheck | None = None,
    ) -> MakeRequest:  # fmt: skip
        """Makes the engine's request once its context is known. All options are checked here.
        Raises `InvalidRequest`. quoted: what the answer quotes.
        check: of the confidence in it. Where it refuses nothing, a reader does not say that there
        is no answer."""
        constraint = None if self.grammar is None else compile_constraint(self.grammar, model)
        text: MakeText = partial(_plain_text, model, self.skip_special_tokens)
        if quoted is not None:
            constraint = partial(Quotation, quoted.index)
            text = partial(QuotationText, quoted.index)
        most = self.token_limit(default_tokens)
        check_options(most, self.min_tokens, self.n, self.timeout, stop=self.stop)
        sampling, refuses = self.sampling, check is not None and check.holds
        if check is not None:
            sampling = replace(sampling, logprobs=check.wanted_logprobs)
        unsaid = None if refuses or constraint is not None else model.no_answer_id
        suppressed = frozenset[int]() if unsaid is None else frozenset({unsaid})
        return partial(
            Request,
            max_tokens=most, min_tokens=self.min_tokens,
            stop=check_stop_strings(self.stop), stop_ids=model.stop_ids,
            sampling=sampling, n=self.n, ignore_eos=self.ignore_eos,
            text=text, constraint=constraint, suppress_tokens=suppressed,
            tenant=tenant if self.share else None, priority=self.priority, timeout=self.timeout,
        )  # fmt: skip


def _plain_text(model: LoadedModel, skip_special_tokens: bool, stop: Sequence[str]) -> TextStream:
    return TextStream(model.tokenizer, stop, skip_special_tokens)


_GRAMMARS: dict[str, Callable[[Any], Grammar | None]] = {
    "json_schema": Grammar.json_schema,
    "json_object": lambda wanted: Grammar.json_object() if wanted else None,
    "regex": Grammar.regex,
    "ebnf": Grammar.ebnf,
}

GREEDY = Generation()
"""One greedy answer: the default of every call."""


@dataclass(frozen=True, slots=True)
class _Plan:
    """What an answer may quote, and how it is checked; None where it is not."""

    quoted: QuotationSources | None = None
    check: AnswerCheck | None = None


@dataclass(frozen=True, slots=True)
class Submitter:
    """Runs built prompts on the engine. namespace: whose requests share private states.
    quotations: of modules that prompts read; None where those are of schemas. gate: of the modes
    that prompts read states in; None lets all pass."""

    model: LoadedModel
    engine: LLMEngine
    deferred: DeferredReleases
    config: RagCacheConfig
    namespace: str = NAMESPACE
    quotations: Quotations | None = None
    gate: ModeGate | None = None

    def run(
        self, prompts: Sequence[BuiltPrompt], generation: Generation = GREEDY
    ) -> list[PendingAnswer]:
        """Submits prompts, in order; all or none.

        Raises `InvalidRequest`, `PromptTooLong` or `ModeRefused` before anything is leased or
        computed, and `QueueFull` or `EngineClosed`, after which those submitted already are given
        up.
        """
        self.deferred.release()
        plans = [self._planned(prompt, generation) for prompt in prompts]
        requests = [
            self._check(prompt, generation, plan)
            for prompt, plan in zip(prompts, plans, strict=True)
        ]
        self._check_modes(prompts)
        for prompt in prompts[1:]:  # while the first, whose lease follows at once, is prepared
            if prompt.states is not None:
                prompt.states.prefetch()
        pending: list[PendingAnswer] = []
        try:
            for prompt, request, plan in zip(prompts, requests, plans, strict=True):
                pending.append(self._lease_and_submit(prompt, request, plan))
        except BaseException:
            give_up(pending)
            raise
        return pending

    def check_sizes(self, own: int, documents: int) -> None:
        """Raises `PromptTooLong` where no answer could follow a prompt of these sizes."""
        most = self.config.max_tokens
        checker, end = self.engine.core.checker, own + documents
        checker.check_sizes(own=own, documents=documents, end=end, max_tokens=most)

    def _planned(self, prompt: BuiltPrompt, generation: Generation) -> _Plan:
        """Raises `InvalidRequest`."""
        quoted = self._quoted(prompt, generation)
        return _Plan(quoted, self._checked(prompt, generation, extractive=quoted is not None))

    def _checked(
        self, prompt: BuiltPrompt, generation: Generation, *, extractive: bool
    ) -> AnswerCheck | None:
        """How the confidence in the answers is found; None where it is not. Raises
        `InvalidRequest`."""
        wanted = bool(generation.confidence or generation.min_confidence)
        if wanted and prompt.kind == "prompt":
            raise InvalidRequest(
                "the confidence in an answer is that in what documents say, and a PML prompt reads "
                "a schema; ask a collection instead, or leave out confidence and min_confidence"
            )
        if generation.confidence is False or not prompt.modules or prompt.bare is None:
            return None
        calibration = None  # of a chat: nothing was retrieved for it
        if prompt.kind == "question":
            calibration = find_calibration(prompt.calibrations, self.model, extractive=extractive)
        if not wanted and (calibration is None or generation.grammar is not None):
            return None
        calibration = calibration or UNCALIBRATED
        least = generation.min_confidence
        if least is None:
            least = 0.0 if generation.grammar is not None else calibration.min_confidence
        score = partial(self._score, prompt.bare) if "lift" in calibration.weights else None
        return AnswerCheck(
            calibration, prompt.evidence, least, prompt.support, generation.refusal,
            self.model.no_answer_id, score, generation.sampling.logprobs,
        )  # fmt: skip

    def _score(
        self, bare: Callable[[], Sequence[int]], answer: Sequence[int]
    ) -> RequestHandle[TokenDelta, RequestOutput]:
        """Submits a pass that scores an answer behind a prompt without modules."""
        tokens = (*bare(), *answer)
        context = Context((), tokens, tuple(range(len(tokens))), len(tokens))
        request = Request(context, max_tokens=1, prompt_logprobs=len(answer))
        return self.engine.submit_request(request, follow_up=True)

    def _quoted(self, prompt: BuiltPrompt, generation: Generation) -> QuotationSources | None:
        """What the answer may quote; None where it need not quote. Raises `InvalidRequest`."""
        wanted = generation.extractive
        if wanted and generation.grammar is not None:
            raise InvalidRequest(
                "an extractive answer is a quotation and keeps to no grammar; leave out either "
                "extractive, or response format and grammar"
            )
        if wanted and prompt.kind == "prompt":
            raise InvalidRequest(
                "an extractive answer quotes documents, and a PML prompt reads a schema; ask a "
                "collection instead, or leave out extractive"
            )
        if wanted and not prompt.modules and prompt.answerable:
            raise InvalidRequest(
                "an extractive answer quotes documents, and no ingested text was recognized in the "
                "conversation; ask with a collection, or leave out extractive"
            )
        if wanted is None:
            plain = prompt.kind == "question" and generation.grammar is None
            wanted = plain and self.model.extractive
        if not wanted or not prompt.modules or self.quotations is None:
            return None
        return self.quotations.of(prompt.modules)

    def _check_modes(self, prompts: Sequence[BuiltPrompt]) -> None:
        """Raises `ModeRefused` for a mode whose answers are too far from those of `exact`."""
        if self.gate is not None:
            reading = [p for p in prompts if p.answerable and p.states is not None]
            for mode in {prompt.requested_mode for prompt in reading}:
                self.gate.check_mode(mode)

    def _check(self, prompt: BuiltPrompt, generation: Generation, plan: _Plan) -> MakeRequest:
        """Step 1: the sizes and the options, while nothing is leased."""
        checker = self.engine.core.checker
        blended = most_blended(prompt, blend_percent(prompt.requested_mode))
        computed, recomputed = len(prompt.own) + blended, prompt.recomputed + blended
        default = self.config.max_tokens
        if generation.unbounded:
            default = checker.max_answer_tokens(computed, prompt.end)
        tenant = self.namespace if prompt.shares else None
        request = generation.request_maker(self.model, default, tenant, plan.quoted, plan.check)
        checker.check_sizes(
            own=computed - recomputed, documents=prompt.read_tokens + prompt.recomputed,
            recomputed=recomputed, end=prompt.end, max_tokens=generation.token_limit(default),
        )  # fmt: skip
        return request

    def _lease_and_submit(
        self, prompt: BuiltPrompt, request: MakeRequest, plan: _Plan
    ) -> PendingAnswer:
        """Steps 2 and 3."""
        if not prompt.answerable:
            return self._answer_at_once(prompt)
        if prompt.states is None:
            return self._submit(prompt, request, None, plan)
        lease = prompt.states.lease()
        try:
            _record_owners(prompt.states, lease)
            return self._submit(prompt, request, lease, plan)
        except BaseException:
            lease.release()
            raise

    def _submit(
        self, prompt: BuiltPrompt, request: MakeRequest, lease: Lease | None, plan: _Plan
    ) -> PendingAnswer:
        """Queues the request. The lease remains the caller's until this returns."""
        if lease is not None:
            prompt = self._blended(prompt, lease)
        found = ((), ()) if lease is None else (lease.keys, lease.states)
        context = build_context(prompt, *found)
        prepared = prepare_answer(prompt, lease, time.perf_counter(), plan)
        handle = self.engine.submit_request(request(context))
        return PendingAnswer(prepared, handle, lease, self.deferred)

    def _blended(self, prompt: BuiltPrompt, lease: Lease) -> BuiltPrompt:
        """The prompt laid out in mode `blend:R`, now that there are states; any other as it is."""
        percent = blend_percent(prompt.requested_mode)
        if not percent or prompt.states is None:
            return prompt
        token_ids, model = prompt.states.token_ids, self.model.causal
        return blend_prompt(prompt, percent, lease.states, token_ids, model, self.engine)

    def _answer_at_once(self, prompt: BuiltPrompt) -> PendingAnswer:
        """Retrieval found no module that shares anything with the question: nothing is made up."""
        now = prompt.timestamps.retrieved
        empty = replace(prompt, own=(), spans=())
        prepared = prepare_answer(empty, None, now)
        channel = RequestChannel[TokenDelta, RequestOutput](lambda: None)
        channel.finish(RequestOutput((Choice((), "", "no_documents"),), 0, now, now, now, now))
        return PendingAnswer(prepared, RequestHandle(channel), None, self.deferred)


def prepare_answer(
    prompt: BuiltPrompt, lease: Lease | None, assembled: float,
    plan: _Plan | None = None,
) -> PreparedAnswer:  # fmt: skip
    """What the answer says besides what is generated, now that it is known which tier each of the
    states came from."""
    plan = plan or _Plan()
    tiers = [] if lease is None else [lease.source[key] for key in lease.keys]
    tokens: Counter[str] = Counter()
    for span in prompt.spans:
        tokens[tiers[span.group]] += span.length
    return PreparedAnswer(
        prompt.question,
        sources=tuple(
            cited if group is None else replace(cited, tier=tiers[group])
            for cited, group in prompt.sources
        ),
        mode=prompt.mode,
        prompt_tokens=len(prompt.own) + prompt.read_tokens,
        cached_tokens=tokens.total() - tokens["encoded"],
        created_tokens=tokens["encoded"], tokens=tokens,
        bytes_moved={} if lease is None else dict(lease.moved),
        timestamps=replace(prompt.timestamps, assembled=assembled),
        quoted=plan.quoted, check=plan.check,
    )  # fmt: skip


def _record_owners(states: PromptStates, lease: Lease) -> None:
    """Records who owns what was encoded. Where the ledger cannot (its disk is full), the question
    is answered all the same; states without an owner are removed when the folder is opened."""
    try:
        states.record_owners(lease)
    except StoreError as error:
        logger.warning("%s; states of this question are not kept", error)
