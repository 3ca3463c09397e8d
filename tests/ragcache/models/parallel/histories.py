"""Random histories of an engine: requests that join, end, are canceled or late, preempted, forked
and constrained, over documents of a tier that is too small for them, and encodings beside them. The
same for every model of the same sizes."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
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
from ragcache.errors import RagCacheError, StoreBudgetExceeded
from ragcache.models import CausalLM
from ragcache.states import Arrival, KVKey, KVStates
from ragcache.states.quantization import StoredStates, wait_for_arrival
from ragcache.store.tiers.base import MemoryTier
from ragcache.store.tiers.device import DeviceTier
from ragcache.store.tiers.host import HostTier
from tests.ragcache.engine.stepped_engine import (
    BLOCK_SIZE,
    Answer,
    ManualClock,
    SteppedCore,
    core_of,
)
from tests.tiny_models import VOCABULARY

PREAMBLE, DOCUMENTS = 8, (5, 9, 12, 20, 31)  # tokens
BLOCKS, LARGE_BLOCKS = 20, 4  # of the pool: too few for the requests that run
PADDING = (0, 8, 16)  # further tokens of a prompt where blocks are large, so that answers fill one
ROOM = 0.6  # of the documents' bytes, in the tier


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
    evicted: int = 0
    """How often a document was removed from the tier for another."""
    refused: int = 0
    """How often no document could be removed, because requests read all of them."""


class _Documents:
    """Encoded documents, which requests read from a tier that is too small for all of them."""

    def __init__(
        self, causal: CausalLM, states: list[KVStates], runner: ModelRunner | None
    ) -> None:
        ranks, device = causal.copies, causal.device
        self._device = device
        bytes_of_all = 2**20 + sum(each.nbytes for each in states)  # at least, with all heads
        self.tier: MemoryTier
        if runner is None:
            self.tier = HostTier(0, pinned=False, reserve=causal.host_memory)
            self._home: list[StoredStates] = [*states]
        else:
            self.tier = DeviceTier(bytes_of_all, device, ranks=ranks)
            self.tier.bind(getattr(runner, "stream", None), 0)
            pinned = device.type == "cuda"
            host = HostTier(16 * bytes_of_all, pinned=pinned, slab_bytes=2**24, ranks=ranks)
            self._home = [host.begin_copy(each) for each in states]
            for each in self._home:
                wait_for_arrival(each)
            self._home = [replace(each, arrival=None) for each in self._home]
        sizes = [self.tier.size_of(each) for each in self._home]
        self.tier.budget_bytes = max(max(sizes), int(ROOM * sum(sizes)))
        self.evicted = self.refused = 0
        self._arrivals: list[Arrival] = []
        self._used: dict[int, None] = {}  # the last one most recently

    def take(self, numbers: list[int]) -> list[StoredStates] | None:
        """States of documents in the tier, if it has room for all of them."""
        while self._arrivals:
            self._arrivals.pop().synchronize()
        taken = []
        for number in numbers:
            key = KVKey(str(number))
            while key not in self.tier:
                self._free_places()
                try:
                    self.tier.put(key, self._home[number])
                except StoreBudgetExceeded:
                    if not self._evict(numbers):
                        self.refused += 1
                        return None
            self._used.pop(number, None)
            self._used[number] = None
            taken.append(self.tier.get(key))
        self._arrivals += [each.arrival for each in taken if each.arrival is not None]
        return taken

    def _free_places(self) -> None:
        """Free all places that nothing refers to. How many are free in one piece would otherwise
        depend on how far each device has come."""
        self.tier.settle()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self.tier.settle()

    def _evict(self, wanted: list[int]) -> bool:
        """Remove the document that was used longest ago. Requests may still read it."""
        for number in self._used:
            if number not in wanted:
                del self._used[number]
                self.tier.delete(KVKey(str(number)))
                self.evicted += 1
                return True
        return False


class _Events:
    """Draws what happens. Nothing depends on what a model computes."""

    def __init__(self, seed: int, *, large_blocks: bool) -> None:
        self.rng = random.Random(seed)
        self._padding, self._longest = (PADDING, 80) if large_blocks else ((0,), 24)
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

    def request(self, root: Segment, documents: _Documents) -> Request | None:
        """A request, unless there is no room for its documents."""
        rng, at, segments = self.rng, PREAMBLE, [root]
        taken = documents.take(rng.sample(range(len(DOCUMENTS)), rng.randrange(4)))
        for states in taken or ():
            segments.append(Segment(states, at, name=str(states.length)))
            at = segments[-1].end
        own = [*rng.choice(self._beginnings), *self.tokens(rng.choice((1, 5, 17)))]
        own += self.tokens(rng.choice(self._padding))
        context = Context(
            tuple(segments), tuple(own), tuple(range(at, at + len(own))), at + len(own)
        )
        parity, length = rng.randrange(2), rng.randrange(2, 9)
        constrained = rng.random() < 0.2
        request = Request(
            context,
            max_tokens=rng.randrange(1, self._longest),
            stop_ids=frozenset({rng.randrange(VOCABULARY)}),
            sampling=self.sampling(),
            n=rng.choice((1, 1, 1, 2, 3)),
            tenant=rng.choice((None, "a", "b")),
            priority=rng.choice((0, 0, 1)),
            timeout=rng.choice((None, None, None, 1.5)),
            constraint=(lambda: EveryOther(parity, length)) if constrained else None,
        )
        return None if taken is None else request


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
    events, clock = _Events(seed, large_blocks=runner is not None), ManualClock()
    preamble = events.tokens(PREAMBLE)
    [states] = encode(causal, [EncodeJob(preamble)])
    root = Segment(states, 0, name="root")
    jobs = [EncodeJob(events.tokens(length), PREAMBLE, root) for length in DOCUMENTS]
    documents = _Documents(causal, list(encode(causal, jobs)), runner)
    tokens = BLOCKS * BLOCK_SIZE if runner is None else LARGE_BLOCKS * kv_cache.BLOCK_SIZE
    nbytes = tokens * causal.computed_bytes_per_token
    config = EngineConfig(nbytes, 24, 48, running=6, draft_tokens=3, draft_requests=4)
    core = SteppedCore(runner, config, clock) if runner else core_of(causal, config, clock)
    history = History(stats=core.stats)
    answers, encodings = list[Answer](), list[RequestHandle[KVStates, None]]()
    while len(answers) < requests or core.busy:
        if len(answers) < requests and events.rng.random() < 0.4:
            for _ in range(events.rng.randrange(1, 4)):
                if (request := events.request(root, documents)) is not None:
                    answers.append(core.submit(request))
                del request  # it refers to documents
        if events.rng.random() < 0.05:
            encodings.append(_encoding(core, events, root))
        if answers and events.rng.random() < 0.05:
            events.rng.choice(answers[-8:]).cancel()
        core.step()
        clock.now += 0.05
    history.evicted, history.refused = documents.evicted, documents.refused
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
