"""Random histories of an engine: requests that join, end, are canceled or late, preempted, forked
and constrained, and encodings beside them. The same for every model of the same sizes."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ragcache.engine import (
    Context,
    EncodeJob,
    EngineConfig,
    Request,
    RequestHandle,
    SamplingParams,
    Segment,
    encode,
    kv_cache,
)
from ragcache.engine.config import EngineStats
from ragcache.engine.encoding import StatesChannel
from ragcache.engine.runner import ModelRunner
from ragcache.errors import RagCacheError
from ragcache.models import CausalLM
from ragcache.states import KVStates
from tests.ragcache.engine.stepped_engine import (
    BLOCK_SIZE,
    Answer,
    ManualClock,
    SteppedCore,
    core_of,
)
from tests.tiny_models import VOCABULARY

PREAMBLE, DOCUMENTS = 8, (5, 9, 12, 20, 31)  # tokens
BLOCKS, LARGE_BLOCKS = 30, 4  # of the pool: too few for the requests that run


class EveryOther:
    """Allows tokens of one parity, and ends an answer."""

    def __init__(self, parity: int, length: int) -> None:
        bits = 0x55555555 << parity
        self._mask = torch.full((VOCABULARY // 32,), bits - 2**32 * (bits >= 2**31)).int()
        self._left = length

    def mask(self) -> Tensor:
        return self._mask

    def accept(self, token: int) -> None:
        self._left -= 1

    @property
    def finished(self) -> bool:
        return self._left <= 0


@dataclass
class History:
    """Outcomes of requests, in the order of their submission."""

    outcomes: list[Any] = field(default_factory=list)
    encoded: list[KVStates] = field(default_factory=list)
    stats: EngineStats = field(default_factory=EngineStats)


class _Events:
    """Draws what happens. Nothing depends on what a model computes."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self._beginnings = [self.tokens(12) for _ in range(3)]

    def tokens(self, count: int) -> list[int]:
        return [self.rng.randrange(VOCABULARY) for _ in range(count)]

    def sampling(self) -> SamplingParams:
        seed = self.rng.randrange(1000)
        return self.rng.choice(
            [
                SamplingParams(),
                SamplingParams(logprobs=2),
                SamplingParams(temperature=0.7, seed=seed),
                SamplingParams(temperature=1.3, top_k=20, top_p=0.9, min_p=0.01, seed=seed),
                SamplingParams(presence_penalty=1.0, frequency_penalty=0.5),
            ]
        )

    def request(self, root: Segment, documents: list[KVStates]) -> Request:
        rng, at, segments = self.rng, PREAMBLE, [root]
        for states in rng.sample(documents, rng.randrange(4)):
            segments.append(Segment(states, at, name=str(states.length)))
            at = segments[-1].end
        own = [*rng.choice(self._beginnings), *self.tokens(rng.choice((1, 5, 17)))]
        context = Context(
            tuple(segments), tuple(own), tuple(range(at, at + len(own))), at + len(own)
        )
        parity, length = rng.randrange(2), rng.randrange(2, 9)
        constrained = rng.random() < 0.2
        return Request(
            context,
            max_tokens=rng.randrange(1, 24),
            stop_ids=frozenset({rng.randrange(VOCABULARY)}),
            sampling=self.sampling(),
            n=rng.choice((1, 1, 1, 2, 3)),
            tenant=rng.choice((None, "a", "b")),
            priority=rng.choice((0, 0, 1)),
            timeout=rng.choice((None, None, None, 1.5)),
            constraint=(lambda: EveryOther(parity, length)) if constrained else None,
        )


def run_history(
    causal: CausalLM, requests: int, seed: int = 0, runner: ModelRunner | None = None
) -> History:
    """Run a random history to its end.

    Args:
        causal: The model.
        requests: How many requests are submitted.
        seed: Of everything that is drawn.
        runner: Computes the steps. Defaults to a CPU's with small blocks.
    """
    events, clock = _Events(seed), ManualClock()
    preamble = events.tokens(PREAMBLE)
    [states] = encode(causal, [EncodeJob(preamble)])
    root = Segment(states, 0, name="root")
    jobs = [EncodeJob(events.tokens(length), PREAMBLE, root) for length in DOCUMENTS]
    documents = list(encode(causal, jobs))
    tokens = BLOCKS * BLOCK_SIZE if runner is None else LARGE_BLOCKS * kv_cache.BLOCK_SIZE
    nbytes = tokens * causal.computed_bytes_per_token
    config = EngineConfig(nbytes, 24, 48, running=6, draft_tokens=3, draft_requests=4)
    core = SteppedCore(runner, config, clock) if runner else core_of(causal, config, clock)
    history = History(stats=core.stats)
    answers, encodings = list[Answer](), list[RequestHandle[KVStates, None]]()
    while len(answers) < requests or core.busy:
        if len(answers) < requests and events.rng.random() < 0.4:
            for _ in range(events.rng.randrange(1, 4)):
                answers.append(core.submit(events.request(root, documents)))
        if events.rng.random() < 0.05:
            encodings.append(_encoding(core, events, root))
        if answers and events.rng.random() < 0.05:
            events.rng.choice(answers[-8:]).cancel()
        core.step()
        clock.now += 0.05
    history.outcomes = [_outcome(each) for each in answers]
    history.encoded = [states for handle in encodings for states in handle]
    return history


def _encoding(core: SteppedCore, events: _Events, root: Segment) -> RequestHandle[KVStates, None]:
    channel = StatesChannel(lambda: None)
    lengths = [events.rng.randrange(1, 60) for _ in range(events.rng.randrange(1, 3))]
    core.add_encoding([EncodeJob(events.tokens(n), PREAMBLE, root) for n in lengths], channel)
    return RequestHandle(channel)


def _outcome(answer: Answer) -> Any:
    try:
        return [(list(each.token_ids), each.finish_reason) for each in answer.result(0).choices]
    except RagCacheError as error:
        return type(error).__name__
