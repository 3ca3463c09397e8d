"""From built prompts to the engine: check sizes, lease states, submit requests."""

from __future__ import annotations

import logging
import math
import sys
import time
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Protocol

from ragcache.answers.citations import CitationPolicy
from ragcache.answers.confidence import ModelCalibration
from ragcache.answers.confidence_policy import ConfidencePolicy
from ragcache.answers.policy import AnsweredPrompt, AnswerPolicy
from ragcache.answers.quotations import QuotationPolicy, Quotations
from ragcache.answers.reader_policies import WordedPolicy, reader_form_policy
from ragcache.config import NAMESPACE
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
from ragcache.engine.handle import RequestChannel
from ragcache.engine.request import (
    KeepStates,
    RepetitionRule,
    check_options,
    check_stop_strings,
)
from ragcache.errors import InvalidRequest, StoreError
from ragcache.models import LoadedModel
from ragcache.modes import EXACT, Compose, ReuseMode
from ragcache.params import GenerationParams, OpenConfig
from ragcache.pipeline.answer import (
    DeferredReleases,
    PendingAnswer,
    PreparedAnswer,
    Timestamps,
    give_up,
)
from ragcache.pipeline.conversations import Conversations, PauseHint, ResumedContext
from ragcache.pipeline.gate import ModeGate
from ragcache.pipeline.prompt import PromptStates, TokenPrompt, build_context
from ragcache.store import Lease
from ragcache.structured import Grammar, compile_constraint

logger = logging.getLogger(__name__)

READER_REPETITIONS = 8
"""Times in a row that the embedded reader may write one pattern. Small models fall into loops."""


class MakeRequest(Protocol):
    """Makes the engine's request, once its context is known."""

    def __call__(
        self, context: Context, keep: KeepStates | None = None, timeout: float | None = None
    ) -> Request:
        """`timeout`: seconds, in place of the ones of the options."""


_SAMPLED = [field.name for field in fields(SamplingParams)]


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
    citations = CitationPolicy.for_prompt(prompt) if params.citations else None
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
    formed = None
    if model.extractive and params.forms:
        formed = reader_form_policy(prompt, params, quotations)
    policies = (confidence, quotation, worded, formed, citations)
    return tuple(each for each in policies if each is not None)


def request_maker(
    params: GenerationParams,
    model: LoadedModel,
    most_tokens: int,
    tenant: Hashable,
    policies: Sequence[AnswerPolicy] = (),
) -> MakeRequest:
    """Check the options of an answer, and return a function that makes the engine's request.

    The request is made later, when its context is known.

    Args:
        params: How the answer is generated.
        model: The model that answers.
        most_tokens: Most tokens of the answer. `params` may ask for fewer.
        tenant: Requests of equal tenants may share private states.
        policies: Features of the answer, which change the request. By default, the embedded reader
            always gives an answer.

    Raises:
        InvalidRequest: An option cannot be used.
    """
    grammar = Grammar.of(params) if params.forms else None
    constraint = None if grammar is None else compile_constraint(grammar, model)
    most = min(most_tokens, params.token_limit(most_tokens))
    check_options(most, params.min_tokens, params.n, params.timeout, stop=params.stop)
    stop, sampling = check_stop_strings(params.stop), sampling_params(params)
    unsaid = None if grammar is not None else model.no_answer_id

    def make_request(
        context: Context, keep: KeepStates | None = None, timeout: float | None = None
    ) -> Request:
        request = Request(
            context,
            max_tokens=most,
            min_tokens=params.min_tokens,
            stop=stop,
            stop_ids=model.stop_ids,
            sampling=sampling,
            n=params.n,
            ignore_eos=params.ignore_eos,
            text=lambda stop: TextStream(model.tokenizer, stop, params.skip_special_tokens),
            constraint=constraint,
            suppress_tokens=frozenset() if unsaid is None else frozenset({unsaid}),
            tenant=tenant if params.share else None,
            prompt_logprobs=len(context.token_ids) if params.prompt_logprobs else 0,
            repetition=repetition_rule(params, extractive=model.extractive),
            priority=params.priority,
            timeout=timeout or params.timeout,
            keep=keep,
        )
        for policy in policies:
            request = policy.change_request(request)
        return request

    return make_request


def repetition_rule(params: GenerationParams, *, extractive: bool) -> RepetitionRule | None:
    """Return the rule that ends an answer which repeats itself, if there is one.

    Args:
        params: Parameters of the answer.
        extractive: Whether the embedded reader answers, which has a limit by default.
    """
    limit = params.repetition_limit
    if limit is None:
        limit = READER_REPETITIONS if extractive and not params.ignore_eos else 0
    return RepetitionRule(limit, params.repetition_period) if limit else None


def sampling_params(params: GenerationParams) -> SamplingParams:
    """Return the options that the engine's sampler reads, which have the same names."""
    return SamplingParams(**{name: getattr(params, name) for name in _SAMPLED})


@dataclass(frozen=True, slots=True)
class Submitter:
    """Runs built prompts on the engine."""

    model: LoadedModel
    """The model of the engine."""
    engine: LLMEngine
    """The engine."""
    deferred: DeferredReleases
    """Leases that the next call ends."""
    config: OpenConfig
    """The settings of the state folder."""
    namespace: str = NAMESPACE
    """The namespace whose requests share private states."""
    quotations: Quotations | None = None
    """Quotable texts of the namespace's modules. Without them no answer is a quotation."""
    gate: ModeGate | None = None
    """The gate of reuse modes. Without it every mode is allowed."""
    calibration: ModelCalibration | None = None
    """The calibration of the model's free answers."""
    conversations: Conversations | None = None
    """The conversations of the namespace. Without it nothing of a chat is kept."""

    def run(
        self, prompts: Sequence[TokenPrompt], generation: GenerationParams | None = None
    ) -> list[PendingAnswer]:
        """Submit prompts in order, all or none.

        Options, sizes and modes are checked before any state is leased.

        Args:
            prompts: The prompts.
            generation: How the answers are generated. Defaults to one greedy answer.

        Raises:
            InvalidRequest: An option cannot be used.
            PromptTooLong: A prompt leaves no room for an answer in the window or the engine's pool.
            ModeRefused: The answers of a mode are too far from `exact`.
            QueueFull: The queue is full. Prompts that were submitted already are canceled.
            DeadlineExceeded: States of running requests filled the first tier for too long.
            EngineClosed: The engine has been closed.
        """
        self.deferred.release()
        generation = generation or GenerationParams()
        policies = [
            answer_policies(
                prompt, generation, self.model, self.engine, self.quotations, self.calibration
            )
            for prompt in prompts
        ]
        requests = [
            self._validate_request(prompt, generation, applied)
            for prompt, applied in zip(prompts, policies, strict=True)
        ]
        self._check_modes(prompts)
        for prompt in prompts[1:]:  # in the background, while the first prompt is leased
            if prompt.states is not None:
                prompt.states.prefetch()
        refusal = "" if generation.forms else generation.refusal  # a refusal keeps to no grammar
        pending: list[PendingAnswer] = []
        try:
            for each in zip(prompts, requests, policies, strict=True):
                pending.append(self._lease_and_submit(*each, refusal, generation))
        except BaseException:
            give_up(pending)
            raise
        return pending

    def build_and_run(
        self,
        build: Callable[[ReuseMode], Sequence[TokenPrompt]],
        mode: ReuseMode,
        generation: GenerationParams | None = None,
    ) -> list[PendingAnswer]:
        """Build prompts in a mode, and submit them; see `run`.

        Prompts that would read states are built in `exact` instead while the gate measures the mode
        in the background, on a model whose states do not compose, and if they read parts of modules
        that cannot be divided.

        Args:
            build: Builds the prompts in a mode. Leases nothing.
            mode: Mode that the caller asked for.
            generation: How the answers are generated.
        """
        prompts = build(mode)
        if _modes_read(prompts) and (self._replaces(mode) or self._are_cut(prompts)):
            prompts = [
                replace(each, question=replace(each.question, replaced_mode=mode))
                for each in build(EXACT)
            ]
        return self.run(prompts, generation)

    def _replaces(self, mode: ReuseMode) -> bool:
        """Tell whether prompts in a mode are built in `exact` instead."""
        if not self.model.causal.composes:
            return True
        return self.gate is not None and self.gate.defers(mode)

    def _are_cut(self, prompts: Sequence[TokenPrompt]) -> bool:
        """Tell whether PML prompts read texts of modules that cannot be divided."""
        return not self.model.causal.divides and any(each.kind == "prompt" for each in prompts)

    def _composition(self, prompt: TokenPrompt) -> Compose:
        """Return how the documents of a prompt compose in recurrent layers."""
        return "order" if self.gate is None else self.gate.composition(prompt.question.mode)

    def check_sizes(self, own: int, documents: int) -> None:
        """Raise `PromptTooLong` for a prompt that leaves no room for an answer.

        Args:
            own: Number of tokens of the preamble.
            documents: Number of tokens of the modules.
        """
        most = self.config.max_tokens
        checker, end = self.engine.checker, own + documents
        checker.check_sizes(own=own, documents=documents, end=end, max_tokens=most)

    def _check_modes(self, prompts: Sequence[TokenPrompt]) -> None:
        """Raise `ModeRefused` for a mode whose answers are too far from answers in `exact`."""
        if self.gate is not None:
            for mode in _modes_read(prompts):
                self.gate.check_mode(mode)

    def _validate_request(
        self,
        prompt: TokenPrompt,
        generation: GenerationParams,
        policies: Sequence[AnswerPolicy],
    ) -> MakeRequest:
        """Check sizes and options, and return the maker of the request. Leases nothing.

        An answer is limited to the tokens that the prompt leaves.
        """
        if generation.prompt_logprobs and prompt.states is not None:
            raise InvalidRequest(
                "prompt_logprobs needs every token computed, and this prompt reads states; ask in "
                "mode exact"
            )
        checker = self.engine.checker
        computed = len(prompt.computed_tokens)
        room = checker.max_answer_tokens(computed, prompt.end)
        most = generation.token_limit(self.config.max_tokens)
        most = min(most, max(room, generation.min_tokens))
        tenant = self.namespace if prompt.cacheable else None
        request = request_maker(generation, self.model, most, tenant, policies)
        checker.check_sizes(
            own=computed - prompt.recomputed,
            documents=prompt.read_tokens + prompt.recomputed,
            recomputed=prompt.recomputed,
            end=prompt.end,
            max_tokens=most,
        )
        return request

    def _lease_and_submit(
        self,
        prompt: TokenPrompt,
        make_request: MakeRequest,
        policies: Sequence[AnswerPolicy],
        refusal: str,
        generation: GenerationParams,
    ) -> PendingAnswer:
        """Lease the states that the prompt reads, and queue the request.

        Waiting for room in the first tier takes of the request's time.
        """
        if not prompt.has_documents:
            return self._refuse(prompt, refusal)
        states, lease, resumed = prompt.states, None, None
        timeout, began = generation.timeout, time.perf_counter()
        try:
            if states is not None:
                lease = states.lease(math.inf if timeout is None else timeout)
                _record_owners(states, lease)
            found = ((), ()) if lease is None else (lease.keys, lease.states)
            context = build_context(prompt, *found, self._composition(prompt))
            resumed = self._resume(prompt, context, generation)
            prepared = prepare_answer(prompt, lease, time.perf_counter(), policies, resumed.tokens)
            if timeout is not None:
                left = timeout - (time.perf_counter() - began)
                timeout = max(left, sys.float_info.min)
            request = make_request(resumed.context, resumed.keep, timeout)
            handle = self.engine.submit_request(request)
            return PendingAnswer(prepared, handle, self.deferred, lease, resumed.lease)
        except BaseException:
            for held in (lease, None if resumed is None else resumed.lease):
                if held is not None:
                    held.release()
            raise

    def _resume(
        self, prompt: TokenPrompt, context: Context, generation: GenerationParams
    ) -> ResumedContext:
        """Start a chat from the kept states of its earlier turns, if there are any."""
        shared = generation.share and prompt.cacheable and not generation.prompt_logprobs
        shared = shared and self.model.causal.divides
        if self.conversations is None or prompt.kind != "chat" or not shared:
            return ResumedContext(context)
        name, seconds = generation.prompt_cache_key, generation.retention_seconds
        hint = PauseHint(name, seconds, prompt.question.keeper)
        return self.conversations.resume(context, keep=generation.store, hint=hint)

    def _refuse(self, prompt: TokenPrompt, refusal: str) -> PendingAnswer:
        """Answer with the refusal: no module was found, and the model shall invent nothing."""
        now = prompt.question.times.retrieved
        empty = replace(prompt, computed_tokens=(), spans=())
        prepared = prepare_answer(empty, None, now)
        channel = RequestChannel[TokenDelta, RequestOutput](lambda: None)
        channel.put(TokenDelta(0, None, refusal))
        choice = Choice((), refusal, "no_documents")
        channel.finish(RequestOutput((choice,), 0, now, now, now, now))
        return PendingAnswer(prepared, RequestHandle(channel), self.deferred)


def _modes_read(prompts: Sequence[TokenPrompt]) -> set[ReuseMode]:
    """Return the modes of the prompts that read states of documents."""
    reading = [each for each in prompts if each.has_documents and each.states is not None]
    return {each.question.mode for each in reading}


def prepare_answer(
    prompt: TokenPrompt,
    lease: Lease | None,
    assembled: float,
    policies: Sequence[AnswerPolicy] = (),
    resumed_tokens: Mapping[str, int] | None = None,
) -> PreparedAnswer:
    """Return the parts of the answer that are known before it is generated.

    Args:
        prompt: The prompt.
        lease: The lease of its states, which knows their tiers.
        assembled: Time at which the states were leased.
        policies: Features of the answer.
        resumed_tokens: Tokens of earlier turns that are read, by the tier of their states.
    """
    tiers = [] if lease is None else [lease.source[key] for key in lease.keys]
    replaced, times = prompt.question.replaced_mode, prompt.question.times
    tokens: Counter[str] = Counter()
    for span in prompt.spans:
        tokens[tiers[span.group]] += span.length
    tokens.update(resumed_tokens or {})
    return PreparedAnswer(
        prompt.question.text,
        sources=tuple(
            cited if group is None else replace(cited, tier=tiers[group])
            for cited, group in prompt.retrieved.citations
        ),
        mode=prompt.answer_mode,
        prompt_tokens=len(prompt.computed_tokens) + prompt.read_tokens,
        cached_tokens=tokens.total() - tokens["encoded"],
        created_tokens=tokens["encoded"],
        tokens=tokens,
        bytes_moved={} if lease is None else dict(lease.moved),
        timestamps=Timestamps(times.called, times.retrieved, assembled, times.rerank),
        replaced_mode=None if replaced is None else str(replaced),
        resumed_tokens=resumed_tokens or {},
        policies=tuple(policies),
    )


def _record_owners(states: PromptStates, lease: Lease) -> None:
    """Record the owners of newly encoded states.

    If the ledger fails, for example because its disk is full, the question is answered anyway.
    States without an owner are removed when the folder is opened.
    """
    try:
        states.record_owners(lease)
    except StoreError as error:
        logger.warning("%s; states of this question are not kept", error)
