"""Distance of modes from `exact` by number and length of modules.

The gate's own prompts are short, so that a mode is measured before its first answer. The prompts
here have as many and as long modules as prompts of users have, and every token of `exact`'s answer
is compared. They tell which mode to choose and take long on a CPU: `ragcache doctor
--compare-modes` measures them.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator, Sequence
from itertools import chain
from statistics import fmean
from typing import NamedTuple

from ragcache.engine import (
    Choice,
    Context,
    EncodeJob,
    LLMEngine,
    Request,
    RequestOutput,
    SampledToken,
    SamplingParams,
)
from ragcache.errors import PromptTooLong
from ragcache.models import LoadedModel
from ragcache.modes import ReuseMode
from ragcache.pipeline.ask import most_modules
from ragcache.pipeline.gate_measurement import (
    PRIORITY,
    WAVE,
    Measurement,
    SizeResult,
    after_states,
)
from ragcache.pipeline.prompt import build_context
from ragcache.states import KVKey

logger = logging.getLogger(__name__)

SIZES = ((2, 100), (4, 100), (2, 384), (8, 100), (4, 384), (8, 384))
"""Numbers and tokens of the modules of prompts, by what they cost."""

ORDERS_OF = {2: 3, 4: 2, 8: 1}
"""Number of orders of the documents, by their number. Prompts ask about the first four documents of
an order."""

LIKELIEST = 20
"""Tokens whose probabilities are compared one by one at each place of an answer."""


class _Scored(NamedTuple):
    """The tokens of an answer as a mode sees them."""

    scores: tuple[SampledToken, ...]
    ends: bool
    """Whether the answer ends after these tokens."""


def measure_sizes(
    model: LoadedModel, engine: LLMEngine, modes: Sequence[ReuseMode], seconds: float
) -> dict[ReuseMode, tuple[SizeResult, ...]]:
    """Measure modes over prompts of several sizes, the cheapest size first.

    Args:
        model: The model.
        engine: The engine of the model. Its errors are raised unchanged.
        modes: Modes.
        seconds: Time after which no size begins. A size that would end later, at the speed of the
            sizes before it, is left out.

    Returns:
        The results of each mode by size, without sizes that were left out, exceed the window, or
        have more modules than the model reads.
    """
    found: dict[ReuseMode, list[SizeResult]] = {mode: [] for mode in modes}
    begin, done, most = time.perf_counter(), 0, most_modules(model)
    for documents, tokens in SIZES:
        if most is not None and documents > most:
            continue
        cost = documents * tokens * ORDERS_OF[documents]
        spent = time.perf_counter() - begin
        if done and spent * (1 + cost / done) > seconds:
            logger.info("%d modules of %d tokens are not measured: no time", documents, tokens)
            break
        try:
            sized = _SizedMeasurement(model, engine, documents, tokens)
            for mode, result in sized.results(modes):
                found[mode].append(result)
        except PromptTooLong as error:
            logger.info("prompts of %d modules do not fit: %s", documents, error)
        done += cost
    return {mode: tuple(results) for mode, results in found.items()}


class _SizedMeasurement(Measurement):
    """Prompts of one size, and the answers that `exact` gives to them."""

    def __init__(self, model: LoadedModel, engine: LLMEngine, documents: int, tokens: int) -> None:
        super().__init__(
            model,
            engine,
            documents,
            asked=4,
            module_tokens=tokens,
            orders=ORDERS_OF[documents],
        )
        self.size = documents, tokens
        self.answers: list[Choice] = []
        self.reference: list[_Scored] = []
        for order, questions in zip(self.orders, self.questions, strict=True):
            whole = [*self.preamble, *chain(*(self.documents[each] for each in order))]
            [states] = self.engine.encode([EncodeJob(whole)])
            contexts = [after_states(states, question) for question in questions]
            given = self._answers(contexts)
            self.answers += given
            self.reference += self._scored(contexts, given)

    def results(self, modes: Sequence[ReuseMode]) -> Iterator[tuple[ReuseMode, SizeResult]]:
        """Yield each mode with its distance from `exact`."""
        for mode in modes:
            contexts = [
                build_context(prompt, [KVKey("")] * len(states), states)
                for prompt, states in self.prompts(mode)
            ]
            pairs = list(zip(self.reference, self._scored(contexts, self.answers), strict=True))
            kl = fmean(divergence_of(exact.scores, own.scores) for exact, own in pairs)
            equal = fmean(_is_equal(exact, own) for exact, own in pairs)
            yield mode, SizeResult(*self.size, len(pairs), kl, equal)

    def _scored(self, contexts: Sequence[Context], answers: Sequence[Choice]) -> list[_Scored]:
        """Score the tokens of answers that follow contexts."""
        found: list[_Scored] = []
        for begin in range(0, len(contexts), WAVE):
            part = zip(contexts[begin : begin + WAVE], answers[begin : begin + WAVE], strict=True)
            handles = [self.engine.submit_request(self._scoring(*pair)) for pair in part]
            found += [_scored(handle.result()) for handle in handles]
        return found

    def _scoring(self, context: Context, answer: Choice) -> Request:
        """Return a request that scores an answer, and asks for the token after it."""
        tokens = answer.token_ids
        end = context.position_ids[-1] + 1
        longer = Context(
            context.segments,
            (*context.token_ids, *tokens),
            (*context.position_ids, *range(end, end + len(tokens))),
            end + len(tokens),
        )
        sampling = SamplingParams(logprobs=LIKELIEST)
        return Request(
            longer,
            1,
            stop_ids=self.stop_ids,
            sampling=sampling,
            priority=PRIORITY,
            prompt_logprobs=len(tokens),
        )


def _scored(output: RequestOutput) -> _Scored:
    return _Scored(output.prompt_logprobs, output.finish_reason == "stop")


def _is_equal(exact: _Scored, own: _Scored) -> bool:
    """Tell whether a mode gives the answer of `exact`: each token is its likeliest one."""
    likeliest = all(each.alternatives[0][0] == each.token for each in own.scores)
    return likeliest and (own.ends or not exact.ends)


def divergence_of(exact: Sequence[SampledToken], own: Sequence[SampledToken]) -> float:
    """Return the mean divergence over an answer's tokens, in nats.

    Tokens beyond the likeliest ones of both are taken together. The result is at most the
    divergence over the whole vocabulary.
    """
    terms = [
        _divergence(dict(one.alternatives), dict(other.alternatives))
        for one, other in zip(exact, own, strict=True)
    ]
    return fmean(terms) if terms else 0.0


def _divergence(exact: dict[int, float], own: dict[int, float]) -> float:
    both = exact.keys() & own.keys()
    kl = sum(math.exp(exact[each]) * (exact[each] - own[each]) for each in both)
    left, taken = (
        max(1e-9, 1.0 - sum(math.exp(each[token]) for token in both)) for each in (exact, own)
    )
    return max(0.0, kl + left * math.log(left / taken))
