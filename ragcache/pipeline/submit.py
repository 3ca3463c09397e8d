"""From built prompts to the engine: check the sizes, lease the states, submit."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial, reduce

from ragcache.answers.policy import AnswerPolicy, answer_policies
from ragcache.answers.quotations import Quotations
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
from ragcache.engine.detokenizer import check_stop_strings
from ragcache.engine.handle import RequestChannel
from ragcache.engine.request import check_options
from ragcache.errors import StoreError
from ragcache.models import LoadedModel
from ragcache.params import GenerationParams, OpenConfig
from ragcache.pipeline.answer import DeferredReleases, PendingAnswer, PreparedAnswer, give_up
from ragcache.pipeline.blend import blend_prompt, most_blended
from ragcache.pipeline.gate import ModeGate
from ragcache.pipeline.prompt import PromptStates, TokenPrompt, build_context
from ragcache.store import Lease
from ragcache.structured import Grammar, compile_constraint

logger = logging.getLogger(__name__)

MakeRequest = Callable[[Context], Request]


def request_maker(
    params: GenerationParams, model: LoadedModel, default_tokens: int, tenant: Hashable,
    policies: Sequence[AnswerPolicy] = (),
) -> MakeRequest:  # fmt: skip
    """Prepare the engine's request, which is made once its context is known.

    All options are checked here.

    Args:
        params: How the answer is generated.
        model: The model that answers.
        default_tokens: Most tokens of the answer, unless `params` says otherwise.
        tenant: Requests of equal tenants may share private states.
        policies: Features of the answer, which change the request. Without them, a reader does not
            say that there is no answer.

    Raises:
        InvalidRequest: An option cannot be used.
    """
    grammar = Grammar.of(params) if params.forms else None
    constraint = None if grammar is None else compile_constraint(grammar, model)
    most, stop = params.token_limit(default_tokens), tuple(params.stop)
    check_options(most, params.min_tokens, params.n, params.timeout, stop=stop)
    unsaid = None if grammar is not None else model.no_answer_id
    make = partial(
        Request,
        max_tokens=most, min_tokens=params.min_tokens,
        stop=check_stop_strings(stop), stop_ids=model.stop_ids,
        sampling=sampling_params(params), n=params.n, ignore_eos=params.ignore_eos,
        text=partial(_plain_text, model, params.skip_special_tokens), constraint=constraint,
        suppress_tokens=frozenset() if unsaid is None else frozenset({unsaid}),
        tenant=tenant if params.share else None, priority=params.priority, timeout=params.timeout,
    )  # fmt: skip
    return lambda context: reduce(_changed, policies, make(context))


def _changed(request: Request, policy: AnswerPolicy) -> Request:
    return policy.change_request(request)


def sampling_params(params: GenerationParams) -> SamplingParams:
    """The options that the engine's sampler reads. They have the same names."""
    names = [field.name for field in fields(SamplingParams)]
    return SamplingParams(**{name: getattr(params, name) for name in names})


def _plain_text(model: LoadedModel, skip_special_tokens: bool, stop: Sequence[str]) -> TextStream:
    return TextStream(model.tokenizer, stop, skip_special_tokens)


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

    def run(
        self, prompts: Sequence[TokenPrompt], generation: GenerationParams | None = None
    ) -> list[PendingAnswer]:
        """Submits prompts, in order; all or none.

        Raises:
            InvalidRequest: An option cannot be used. Nothing was leased or computed, nor with the
                next two errors.
            PromptTooLong: A prompt with its answer does not fit the window or the engine's pool.
            ModeRefused: The answers of a mode are too far from `exact`.
            QueueFull: The queue is full. Prompts that were submitted already are given up.
            EngineClosed: The engine has been closed.
        """
        self.deferred.release()
        generation = generation or GenerationParams()
        policies = [
            answer_policies(prompt, generation, self.model, self.engine, self.quotations)
            for prompt in prompts
        ]
        requests = [
            self._validate_request(prompt, generation, applied)
            for prompt, applied in zip(prompts, policies, strict=True)
        ]
        self._check_modes(prompts)
        for prompt in prompts[1:]:  # while the first, whose lease follows at once, is prepared
            if prompt.states is not None:
                prompt.states.prefetch()
        pending: list[PendingAnswer] = []
        try:
            for each in zip(prompts, requests, policies, strict=True):
                pending.append(self._lease_and_submit(*each))
        except BaseException:
            give_up(pending)
            raise
        return pending

    def check_sizes(self, own: int, documents: int) -> None:
        """Raises `PromptTooLong` where no answer could follow a prompt of these sizes."""
        most = self.config.max_tokens
        checker, end = self.engine.core.checker, own + documents
        checker.check_sizes(own=own, documents=documents, end=end, max_tokens=most)

    def _check_modes(self, prompts: Sequence[TokenPrompt]) -> None:
        """Raises `ModeRefused` for a mode whose answers are too far from those of `exact`."""
        if self.gate is not None:
            reading = [p for p in prompts if p.has_documents and p.states is not None]
            for mode in {prompt.question.mode for prompt in reading}:
                self.gate.check_mode(mode)

    def _validate_request(
        self,
        prompt: TokenPrompt,
        generation: GenerationParams,
        policies: Sequence[AnswerPolicy],
    ) -> MakeRequest:
        """Checks sizes and options while nothing is leased. Returns the maker of the request."""
        checker, percent = self.engine.core.checker, prompt.question.mode.blend_percent
        blended = most_blended(prompt, percent) if percent else 0
        computed, recomputed = len(prompt.computed_tokens) + blended, prompt.recomputed + blended
        default = self.config.max_tokens
        if generation.unbounded:
            default = checker.max_answer_tokens(computed, prompt.end)
        tenant = self.namespace if prompt.cacheable else None
        request = request_maker(generation, self.model, default, tenant, policies)
        checker.check_sizes(
            own=computed - recomputed, documents=prompt.read_tokens + prompt.recomputed,
            recomputed=recomputed, end=prompt.end, max_tokens=generation.token_limit(default),
        )  # fmt: skip
        return request

    def _lease_and_submit(
        self, prompt: TokenPrompt, request: MakeRequest, policies: Sequence[AnswerPolicy]
    ) -> PendingAnswer:
        """Leases the states that the prompt reads, and queues the request."""
        if not prompt.has_documents:
            return self._answer_at_once(prompt)
        if prompt.states is None:
            return self._submit(prompt, request, policies, None)
        lease = prompt.states.lease()
        try:
            _record_owners(prompt.states, lease)
            return self._submit(prompt, request, policies, lease)
        except BaseException:
            lease.release()
            raise

    def _submit(
        self,
        prompt: TokenPrompt,
        request: MakeRequest,
        policies: Sequence[AnswerPolicy],
        lease: Lease | None,
    ) -> PendingAnswer:
        """Queues the request. The lease remains the caller's until this returns."""
        if lease is not None:
            prompt = self._apply_blend(prompt, lease)
        found = ((), ()) if lease is None else (lease.keys, lease.states)
        context = build_context(prompt, *found)
        prepared = prepare_answer(prompt, lease, time.perf_counter(), policies)
        handle = self.engine.submit_request(request(context))
        return PendingAnswer(prepared, handle, lease, self.deferred)

    def _apply_blend(self, prompt: TokenPrompt, lease: Lease) -> TokenPrompt:
        """Lays out a prompt of mode `blend:R`, which takes its states; returns any other as it
        is."""
        percent = prompt.question.mode.blend_percent
        if not percent or prompt.states is None:
            return prompt
        token_ids, model = prompt.states.token_ids, self.model.causal
        return blend_prompt(prompt, percent, lease.states, token_ids, model, self.engine)

    def _answer_at_once(self, prompt: TokenPrompt) -> PendingAnswer:
        """Retrieval found no module that shares anything with the question: nothing is made up."""
        now = prompt.question.times.retrieved
        empty = replace(prompt, computed_tokens=(), spans=())
        prepared = prepare_answer(empty, None, now)
        channel = RequestChannel[TokenDelta, RequestOutput](lambda: None)
        channel.finish(RequestOutput((Choice((), "", "no_documents"),), 0, now, now, now, now))
        return PendingAnswer(prepared, RequestHandle(channel), None, self.deferred)


def prepare_answer(
    prompt: TokenPrompt, lease: Lease | None, assembled: float,
    policies: Sequence[AnswerPolicy] = (),
) -> PreparedAnswer:  # fmt: skip
    """What the answer says besides what is generated, now that it is known which tier each of the
    states came from."""
    tiers = [] if lease is None else [lease.source[key] for key in lease.keys]
    tokens: Counter[str] = Counter()
    for span in prompt.spans:
        tokens[tiers[span.group]] += span.length
    return PreparedAnswer(
        prompt.question.text,
        sources=tuple(
            cited if group is None else replace(cited, tier=tiers[group])
            for cited, group in prompt.retrieved.citations
        ),
        mode=prompt.answer_mode,
        prompt_tokens=len(prompt.computed_tokens) + prompt.read_tokens,
        cached_tokens=tokens.total() - tokens["encoded"],
        created_tokens=tokens["encoded"], tokens=tokens,
        bytes_moved={} if lease is None else dict(lease.moved),
        timestamps=replace(prompt.question.times, assembled=assembled),
        policies=tuple(policies),
    )  # fmt: skip


def _record_owners(states: PromptStates, lease: Lease) -> None:
    """Records who owns what was encoded. Where the ledger cannot (its disk is full), the question
    is answered all the same; states without an owner are removed when the folder is opened."""
    try:
        states.record_owners(lease)
    except StoreError as error:
        logger.warning("%s; states of this question are not kept", error)
