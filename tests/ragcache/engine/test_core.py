"""The engine core: answers do not depend on other requests, memory or the step's size."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache, partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ragcache.engine import (
    Context,
    EncodeJob,
    EngineConfig,
    Request,
    RequestOutput,
    SamplingParams,
    Segment,
    TokenDelta,
    encode,
)
from ragcache.engine.encoding import StatesChannel
from ragcache.engine.handle import RequestHandle
from ragcache.errors import DeadlineExceeded, RequestCancelled
from ragcache.models import CausalLM, wrap_causal
from ragcache.states import KVStates
from tests.conftest import scaled
from tests.ragcache.engine.delayed_runner import DelayedRunner, delayed_core
from tests.ragcache.engine.stepped_engine import (
    BLOCK_SIZE,
    Answer,
    ManualClock,
    SteppedCore,
    assert_all_blocks_free,
    config_of,
    core_of,
    plain_context,
)
from tests.ragcache.engine.test_constraint import Rising
from tests.ragcache.engine.test_core_answers import words
from tests.tiny_models import random_tokens, tiny_model

MakeCore = Callable[[CausalLM, EngineConfig, ManualClock], SteppedCore]

MODULES = ((3, 0), (7, 11), (12, 0), (5, 4), (9, 30))
"""Lengths of the shared modules, and where they were encoded."""


@dataclass(frozen=True)
class Spec:
    """A request in plain values. The first `lead` own tokens stand before the modules; the next
    `common` ones are shared by all requests of the same family, and `tail` others follow."""

    modules: tuple[int, ...]
    family: int
    lead: int
    common: int
    tail: int
    gap: int
    limit: int
    n: int = 1
    tenant: str | None = None
    sampling: SamplingParams = SamplingParams()
    early: int = 0
    stop: tuple[int, ...] = ()
    text: str = ""
    constraint: str = ""
    timeout: float | None = None

    @property
    def blocks(self) -> int:
        """The blocks that it needs alone."""
        return -(-(self.lead + self.common + self.tail + self.limit) // BLOCK_SIZE)


SPECS = st.builds(
    Spec,
    modules=st.permutations(range(len(MODULES))).flatmap(
        lambda order: st.integers(0, 4).map(lambda count: tuple(order[:count]))
    ),
    family=st.integers(0, 1),
    lead=st.sampled_from([0, 0, 0, 2]),
    common=st.sampled_from([0, 3, 8, 9, 17]),
    tail=st.integers(1, 6),
    gap=st.sampled_from([0, 0, 5]),
    limit=st.integers(1, 14),
    n=st.sampled_from([1, 1, 1, 2, 3]),
    tenant=st.sampled_from([None, "a", "a", "b"]),
    sampling=st.builds(
        SamplingParams,
        temperature=st.sampled_from([0, 0, 1]),
        seed=st.sampled_from([1, 2]),
        top_k=st.sampled_from([0, 7]),
        presence_penalty=st.sampled_from([0, 0, 1.5]),
        repetition_penalty=st.sampled_from([1, 1, 1.4]),
        logprobs=st.sampled_from([None, None, 2]),
    ),
    early=st.sampled_from([0, 0, 4]),
    stop=st.sampled_from([(), (), tuple(range(0, 128, 9)), tuple(range(0, 128, 5))]),
    text=st.sampled_from(["", "words", "stops"]),
    constraint=st.sampled_from(["", "", "", "rising", "short"]),
    timeout=st.sampled_from([None, None, None, 3.0]),
)
CONSTRAINTS = {"": None, "rising": Rising, "short": partial(Rising, length=3)}


class World:
    """One model, its modules, and what each request answers alone."""

    def __init__(self) -> None:
        # larger weights than usual: every answer depends on every token before it
        self.causal = wrap_causal(tiny_model("llama", initializer_range=0.2))
        jobs = [EncodeJob(random_tokens(n, seed=n + start), start) for n, start in MODULES]
        self.states = list(encode(self.causal, jobs))
        self.run_alone = lru_cache(maxsize=None)(self._run_alone)

    def context(self, spec: Spec) -> Context:
        segments, at = [], spec.lead
        for number in spec.modules:
            length, start = MODULES[number]
            tokens = random_tokens(length, seed=length + start)
            segments.append(Segment(self.states[number], at, f"module {number}", token_ids=tokens))
            at = segments[-1].end
        shared = random_tokens(40, seed=50 + spec.family)[: spec.lead + spec.common]
        own = [*shared, *random_tokens(spec.tail, seed=60 + spec.tail)]
        behind = range(at + spec.gap, at + spec.gap + len(own) - spec.lead)
        positions = (*range(spec.lead), *behind)
        return Context(tuple(segments), tuple(own), positions, positions[-1] + 1 + spec.gap)

    def request(self, spec: Spec, priority: int = 0) -> Request:
        return Request(
            self.context(spec),
            spec.limit,
            frozenset(spec.stop),
            spec.sampling,
            spec.n,
            stop=(f"word{spec.stop[0] + 1} ",) if spec.text == "stops" and spec.stop else (),
            text=words if spec.text else None,
            min_tokens=min(spec.early, spec.limit),
            tenant=spec.tenant,
            timeout=spec.timeout,
            constraint=CONSTRAINTS[spec.constraint],
            priority=priority,
        )

    def _run_alone(self, spec: Spec) -> list[tuple[object, ...]]:
        [output] = core_of(self.causal).run(self.request(replace(spec, timeout=None)))
        return plain(output)


def plain(output: RequestOutput) -> list[tuple[object, ...]]:
    """All but log-probabilities, which depend on a batch by their last digits."""
    return [(c.token_ids, c.text, c.finish_reason, c.stopped_by) for c in output.choices]


def check_deltas(handle: Answer, output: RequestOutput) -> None:
    """The deltas of each answer are its tokens and its text, in order."""
    deltas: list[TokenDelta] = list(handle)
    for index, choice in enumerate(output.choices):
        own = [delta for delta in deltas if delta.choice == index]
        shown = [delta.chosen.token for delta in own if delta.chosen is not None]
        assert tuple(shown) == choice.token_ids
        assert "".join(delta.text for delta in own) == choice.text


@pytest.fixture(scope="module")
def world() -> World:
    return World()


@dataclass(frozen=True)
class Visit:
    """A request that comes before some step and may be given up before a later one."""

    spec: Spec
    arrives: int
    leaves: int | None
    priority: int


@dataclass(frozen=True)
class Day:
    """Requests and events of an engine. spare: blocks beyond the largest request's need."""

    visits: list[Visit]
    encodings: list[tuple[int, int]]  # when, how many tokens
    spare: int
    step_tokens: int
    prefill_tokens: int
    running: int

    @property
    def blocks(self) -> int:
        return max(visit.spec.blocks for visit in self.visits) + self.spare


@st.composite
def visits(draw: st.DrawFn) -> list[Visit]:
    """Some requests, each with others that are like it up to the order of the modules."""
    found = []
    for first in draw(st.lists(SPECS, min_size=1, max_size=4)):
        for _ in range(draw(st.integers(1, 4))):
            order, tail = draw(st.permutations(first.modules)), draw(st.integers(1, 3))
            spec = replace(first, modules=tuple(order), tail=tail)
            leaves = draw(st.none() | st.none() | st.integers(0, 14))
            found.append(Visit(spec, draw(st.integers(0, 8)), leaves, draw(st.integers(-1, 1))))
    return found


DAYS = st.builds(
    Day,
    visits=visits(),
    encodings=st.lists(st.tuples(st.integers(0, 8), st.integers(1, 30)), max_size=2),
    spare=st.integers(0, 12) | st.just(200),
    step_tokens=st.integers(1, 24),
    prefill_tokens=st.integers(1, 60),
    running=st.integers(1, 16),
)


class Run:
    """An engine that a day is played to."""

    def __init__(self, world: World, day: Day, make: MakeCore) -> None:
        self.world, self.day = world, day
        self.clock = ManualClock()
        limits = config_of(
            world.causal, day.blocks, day.step_tokens, day.prefill_tokens, day.running
        )
        self.core = make(world.causal, limits, self.clock)
        self.answers: dict[int, Answer] = {}
        self.states: list[tuple[EncodeJob, RequestHandle[KVStates, None]]] = []

    def play(self) -> None:
        for step in range(15):
            for number, visit in enumerate(self.day.visits):
                if visit.arrives == step:
                    request = self.world.request(visit.spec, visit.priority)
                    self.answers[number] = self.core.submit(request)
                if visit.leaves == step and number in self.answers:
                    self.answers[number].cancel()
            for when, count in self.day.encodings:
                if when == step:
                    self.encode(EncodeJob(random_tokens(count, seed=count), 7))
            self.step()
        while self.core.busy:
            self.step()

    def step(self) -> None:
        self.core.step()
        self.clock.now += 0.4
        assert self.core.running <= self.day.running
        assert self.core.stats.steps < 5000, "the engine does not come to an end"

    def encode(self, job: EncodeJob) -> None:
        channel = StatesChannel(lambda: None)
        self.core.add_encoding([job], channel)
        self.states.append((job, RequestHandle(channel)))


@pytest.mark.parametrize("make", [core_of, delayed_core])
@settings(max_examples=scaled(100, quick=0.05), derandomize=True)
@given(day=DAYS)
def test_batched_answers_equal_single_answers(world: World, make: MakeCore, day: Day) -> None:
    engine = Run(world, day, make)
    engine.play()
    for number, visit in enumerate(day.visits):
        try:
            output = engine.answers[number].result(0)
        except RequestCancelled:
            assert visit.leaves is not None
        except DeadlineExceeded:
            assert visit.spec.timeout is not None
        else:
            assert plain(output) == world.run_alone(visit.spec)
            check_deltas(engine.answers[number], output)
    for job, handle in engine.states:
        [found], [expected] = list(handle), list(encode(world.causal, [job]))
        torch.testing.assert_close(found.keys, expected.keys, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(found.values, expected.values, rtol=1e-4, atol=1e-5)
    if isinstance(engine.core.runner, DelayedRunner):
        engine.core.runner.late.synchronize()
    assert_all_blocks_free(engine.core)


SPEC = Spec((2, 0), family=0, lead=0, common=9, tail=2, gap=0, limit=8, tenant="a")


def test_preempted_requests_answer_the_same(world: World) -> None:
    """Penalties count the tokens from before the preemption."""
    sampling = SamplingParams(temperature=1, presence_penalty=2.0, seed=3)
    specs = [replace(SPEC, tail=n, limit=10, tenant=None, sampling=sampling) for n in range(1, 7)]
    core = core_of(world.causal, config_of(world.causal, blocks=17))
    handles = [core.submit(world.request(each)) for each in specs]
    for _ in range(10):
        assert not handles[0].done
        core.step()
    assert handles[0].done, "one token in every step"
    core.drain()
    assert core.stats.preempted > 0
    for each, handle in zip(specs, handles, strict=True):
        assert plain(handle.result(0)) == world.run_alone(each)
    assert_all_blocks_free(core)


def test_higher_priority_comes_first(world: World) -> None:
    core = core_of(world.causal, config_of(world.causal, running=1))
    request = world.request(replace(SPEC, limit=2))
    handles = {p: core.submit(replace(request, priority=p)) for p in (0, -1, 1)}
    ended: list[int] = []
    while core.busy:
        core.step()
        ended += [p for p, handle in handles.items() if handle.done and p not in ended]
    assert ended == [1, 0, -1]


def test_long_prompt_does_not_stall_decoding_requests(world: World) -> None:
    core = core_of(world.causal, config_of(world.causal, step_tokens=8))
    answering = [
        core.submit(Request(plain_context(random_tokens(3, seed=n)), 40)) for n in range(3)
    ]
    core.step()
    long = core.submit(Request(plain_context(random_tokens(60)), 1))
    prefilling = 0
    before = [1, 1, 1]
    while core.busy:
        core.step()
        now = [handle.channel.count for handle in answering]
        if not long.done:
            prefilling += 1
            assert now == [count + 1 for count in before], "each gets its token in every step"
        before = now
    assert prefilling == 11, "60 tokens in portions of 5, the last with the answer"
