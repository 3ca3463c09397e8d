"""From built prompts to the engine: check the sizes, lease the states, submit."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial

from ragcache.answers.confidence import UNCALIBRATED, AnswerCheck, find_calibration
from ragcache.answers.quotation_index import Quotation, QuotationText
from ragcache.answers.quotations import Quotations, QuotationSources
from ragcache.config import NAMESPACE, RagCacheConfig
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
from ragcache.params import GenerationParams
from ragcache.pipeline.answer import DeferredReleases, PendingAnswer, PreparedAnswer, give_up
from ragcache.pipeline.blend import blend_prompt, most_blended
from ragcache.pipeline.gate import ModeGate
from ragcache.pipeline.prompt import BuiltPrompt, PromptStates, build_context
from ragcache.store import Lease
from ragcache.structured import Grammar, compile_constraint

logger = logging.getLogger(__name__)

MakeRequest = Callable[[Context], Request]


def request_maker(
    params: GenerationParams, model: LoadedModel, default_tokens: int, tenant: Hashable,
    quoted: QuotationSources | None = None, check: AnswerCheck | None = None,
) -> MakeRequest:  # fmt: skip
    """Prepare the engine's request, which is made once its context is known.

    All options are checked here.

    Args:
        params: How the answer is generated.
        default_tokens: Most tokens of the answer, unless `params` says otherwise.
        tenant: Requests of equal tenants may share private states.
        quoted: Sources of an answer that is a quotation.
        check: Check of the confidence in the answer. Unless it refuses answers, a reader does not
            say that there is no answer.

    Raises:
        InvalidRequest: An option cannot be used.
    """
    grammar = Grammar.of(params)
    constraint = None if grammar is None else compile_constraint(grammar, model)
    text: MakeText = partial(_plain_text, model, params.skip_special_tokens)
    if quoted is not None:
        constraint = partial(Quotation, quoted.index)
        text = partial(QuotationText, quoted.index)
    most, stop = params.token_limit(default_tokens), tuple(params.stop)
    check_options(most, params.min_tokens, params.n, params.timeout, stop=stop)
    sampling, refuses = sampling_params(params), check is not None and check.holds
    if check is not None:
        sampling = replace(sampling, logprobs=check.wanted_logprobs)
    unsaid = None if refuses or constraint is not None else model.no_answer_id
    suppressed = frozenset[int]() if unsaid is None else frozenset({unsaid})
    return partial(
        Request,
        max_tokens=most, min_tokens=params.min_tokens,
        stop=check_stop_strings(stop), stop_ids=model.stop_ids,
        sampling=sampling, n=params.n, ignore_eos=params.ignore_eos,
        text=text, constraint=constraint, suppress_tokens=suppressed,
        tenant=tenant if params.share else None, priority=params.priority, timeout=params.timeout,
    )  # fmt: skip


def sampling_params(params: GenerationParams) -> SamplingParams:
    """The options that the engine's sampler reads. They have the same names."""
    names = [field.name for field in fields(SamplingParams)]
    return SamplingParams(**{name: getattr(params, name) for name in names})


def _plain_text(model: LoadedModel, skip_special_tokens: bool, stop: Sequence[str]) -> TextStream:
    return TextStream(model.tokenizer, stop, skip_special_tokens)


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
        self, prompts: Sequence[BuiltPrompt], generation: GenerationParams | None = None
    ) -> list[PendingAnswer]:
        """Submits prompts, in order; all or none.

        Raises `InvalidRequest`, `PromptTooLong` or `ModeRefused` before anything is leased or
        computed, and `QueueFull` or `EngineClosed`, after which those submitted already are given
        up.
        """
        self.deferred.release()
        generation = generation or GenerationParams()
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

    def _planned(self, prompt: BuiltPrompt, generation: GenerationParams) -> _Plan:
        """Raises `InvalidRequest`."""
        quoted = self._quoted(prompt, generation)
        return _Plan(quoted, self._checked(prompt, generation, extractive=quoted is not None))

    def _checked(
        self, prompt: BuiltPrompt, generation: GenerationParams, *, extractive: bool
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
        if not wanted and (calibration is None or generation.forms):
            return None
        calibration = calibration or UNCALIBRATED
        least = generation.min_confidence
        if least is None:
            least = 0.0 if generation.forms else calibration.min_confidence
        score = partial(self._score, prompt.bare) if "lift" in calibration.weights else None
        return AnswerCheck(
            calibration, prompt.evidence, least, prompt.support, generation.refusal,
            self.model.no_answer_id, score, generation.logprobs,
        )  # fmt: skip

    def _score(
        self, bare: Callable[[], Sequence[int]], answer: Sequence[int]
    ) -> RequestHandle[TokenDelta, RequestOutput]:
        """Submits a pass that scores an answer behind a prompt without modules."""
        tokens = (*bare(), *answer)
        context = Context((), tokens, tuple(range(len(tokens))), len(tokens))
        request = Request(context, max_tokens=1, prompt_logprobs=len(answer))
        return self.engine.submit_request(request, follow_up=True)

    def _quoted(self, prompt: BuiltPrompt, generation: GenerationParams) -> QuotationSources | None:
        """What the answer may quote; None where it need not quote. Raises `InvalidRequest`."""
        wanted = generation.extractive
        if wanted and generation.forms:
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
            plain = prompt.kind == "question" and not generation.forms
            wanted = plain and self.model.extractive
        if not wanted or not prompt.modules or self.quotations is None:
            return None
        return self.quotations.of(prompt.modules)

    def _check_modes(self, prompts: Sequence[BuiltPrompt]) -> None:
        """Raises `ModeRefused` for a mode whose answers are too far from those of `exact`."""
        if self.gate is not None:
            reading = [p for p in prompts if p.answerable and p.states is not None]
            for mode in {prompt.mode for prompt in reading}:
                self.gate.check_mode(mode)

    def _check(self, prompt: BuiltPrompt, generation: GenerationParams, plan: _Plan) -> MakeRequest:
        """Step 1: the sizes and the options, while nothing is leased."""
        checker = self.engine.core.checker
        blended = most_blended(prompt, prompt.mode.blend_percent)
        computed, recomputed = len(prompt.own) + blended, prompt.recomputed + blended
        default = self.config.max_tokens
        if generation.unbounded:
            default = checker.max_answer_tokens(computed, prompt.end)
        tenant = self.namespace if prompt.shares else None
        request = request_maker(generation, self.model, default, tenant, plan.quoted, plan.check)
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
        percent = prompt.mode.blend_percent
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
        mode=prompt.answer_mode,
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
