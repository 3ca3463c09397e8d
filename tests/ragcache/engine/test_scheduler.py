"""Who runs in the next step: nobody stalls, nobody starves, and no block is granted twice."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ragcache.engine.scheduler import (
    AGING_SECONDS,
    MAX_BYPASS_SECONDS,
    SchedulableRequest,
    SchedulerConfig,
    SchedulerOutput,
    schedule,
)
from tests.conftest import scaled

BLOCK_SIZE = 4
WIDE = SchedulerConfig(BLOCK_SIZE, step_tokens=8, prefill_tokens=32, max_running=16)


def decide(
    running: Sequence[SchedulableRequest] = (),
    waiting: Sequence[SchedulableRequest] = (),
    *,
    limits: SchedulerConfig = WIDE,
    free: int = 100,
    now: float = 0.0,
) -> SchedulerOutput:
    return schedule(running, waiting, limits, free_blocks=free, now=now)


def decoding(number: int, free_slots: int = 1, held_blocks: int = 1) -> SchedulableRequest:
    return SchedulableRequest(number, float(number), 1, free_slots, held_blocks)


def waits(number: int, pending: int, since: float = 0.0) -> SchedulableRequest:
    return SchedulableRequest(number, since, pending)


def test_decoding_comes_first_and_a_prompt_takes_the_rest() -> None:
    prefilling = SchedulableRequest(0, 0.0, 50, free_slots=50)
    assert decide([prefilling, *(decoding(n) for n in (1, 2, 3))]).tokens == {
        1: 1,
        2: 1,
        3: 1,
        0: 5,
    }


@pytest.mark.parametrize(
    ("slots", "free", "tokens"), [(20, 100, {0: 20, 1: 12}), (3, 2, {0: 11, 1: 3})]
)
def test_prompts_are_limited_by_budget_slots_and_blocks(
    slots: int, free: int, tokens: dict[int, int]
) -> None:
    prompts = [SchedulableRequest(n, float(n), 20, free_slots=slots) for n in range(3)]
    assert decide(prompts[: len(tokens)], free=free).tokens == tokens


def test_all_decoding_requests_run_beyond_the_step_budget() -> None:
    running = [*(decoding(n) for n in range(12)), SchedulableRequest(12, 12.0, 5, free_slots=5)]
    assert decide(running, [waits(13, 1)]).tokens == dict.fromkeys(range(12), 1)


@pytest.mark.parametrize(
    ("running", "waiting", "free", "admitted"),
    [
        pytest.param(1, [3, 9, 2], 100, (1, 2), id="while the step has tokens left"),
        pytest.param(2, [8], 5, (2,), id="with blocks for the text and one for each request"),
        pytest.param(2, [8], 4, (), id="not without these blocks"),
        pytest.param(0, [11, 1], 3, (0,), id="alone with the whole pool"),
        pytest.param(0, [12], 3, (), id="not beyond the pool"),
    ],
)
def test_requests_are_admitted_in_order(
    running: int, waiting: list[int], free: int, admitted: tuple[int, ...]
) -> None:
    asked = [waits(running + n, pending) for n, pending in enumerate(waiting)]
    assert decide([decoding(n) for n in range(running)], asked, free=free).admitted == admitted


def test_running_requests_are_limited() -> None:
    limits = SchedulerConfig(BLOCK_SIZE, 32, 32, max_running=3)
    decision = decide([decoding(0)], [waits(n, 2) for n in range(1, 6)], limits=limits)
    assert decision.admitted == (1, 2)


def test_the_last_admitted_prompt_begins_with_a_portion() -> None:
    assert decide([decoding(0)], [waits(1, 3), waits(2, 9)]).tokens == {0: 1, 1: 3, 2: 4}


@pytest.mark.parametrize(
    ("big_since", "now", "admitted"),
    [
        pytest.param(5.0, 5.0 + MAX_BYPASS_SECONDS, (1,), id="for a while"),
        pytest.param(5.0, 5.1 + MAX_BYPASS_SECONDS, (), id="no longer"),
        pytest.param(6.0 - AGING_SECONDS, 6.0, (), id="a level of priority counts as waiting"),
    ],
)
def test_younger_requests_pass_one_that_does_not_fit(
    big_since: float, now: float, admitted: tuple[int, ...]
) -> None:
    big, small = waits(0, 40, since=big_since), waits(1, 2, since=6.0)
    assert decide([decoding(9)], [big, small], free=6, now=now).admitted == admitted


@pytest.mark.parametrize(
    ("slots", "held", "free", "preempted"),
    [
        (0, 1, 4, ()),
        (0, 1, 3, (3,)),
        (0, 2, 1, (3,)),
        (0, 1, 0, (3, 2)),
        (1, 1, 0, ()),
        (0, 0, 0, (3, 2, 1)),
    ],
)
def test_no_more_than_needed_are_preempted_the_youngest_first(
    slots: int, held: int, free: int, preempted: tuple[int, ...]
) -> None:
    running = [decoding(n, slots, held) for n in range(4)]
    decision = decide(running, [waits(9, 1)], free=free)
    assert decision.preempted == preempted, "never the last one"
    assert not (preempted and decision.admitted)
    assert decision.tokens.keys() == set(range(4 - len(preempted))) | set(decision.admitted)


@dataclass
class Job:
    """A request in a pool of plain counts: tokens computed so far, and blocks held."""

    number: int
    arrives: float
    priority: int
    prompt: int
    answer: int
    known: int = 0
    computed: int = 0
    blocks: int = 0
    ended: float | None = None

    @property
    def seniority(self) -> float:
        return self.arrives - AGING_SECONDS * self.priority

    def schedulable(self) -> SchedulableRequest:
        room = self.blocks * BLOCK_SIZE - self.computed
        pending = self.known - self.computed
        return SchedulableRequest(self.number, self.seniority, pending, room, self.blocks)


class Machine:
    """Carries decisions out, and checks each."""

    def __init__(
        self, jobs: Sequence[Job], limits: SchedulerConfig, total: int, tick: float
    ) -> None:
        self.limits, self.free, self.total, self.tick = limits, total, total, tick
        self.jobs = {job.number: job for job in jobs}
        self.coming = sorted(jobs, key=lambda job: job.arrives)
        self.waiting: list[Job] = []
        self.running: list[Job] = []
        self.now = 0.0

    def run(self, rounds: int) -> None:
        while rounds and (self.coming or self.waiting or self.running):
            while self.coming and self.coming[0].arrives <= self.now:
                job = self.coming.pop(0)
                job.known = job.prompt
                self.waiting.append(job)
            self.round()
            self.now += self.tick
            rounds -= 1

    def round(self) -> None:
        for queue in (self.waiting, self.running):
            queue.sort(key=lambda job: (job.seniority, job.number))
        decision = schedule(
            [job.schedulable() for job in self.running],
            [job.schedulable() for job in self.waiting],
            self.limits,
            free_blocks=self.free,
            now=self.now,
        )
        self.check(decision)
        for number in decision.preempted:
            job = self.running.pop()
            assert job.number == number, "the youngest first"
            self.free += job.blocks
            job.blocks = job.computed = 0
            self.waiting.append(job)
        for number in decision.admitted:
            job = self.jobs[number]
            self.waiting.remove(job)
            self.running.append(job)
            self.grow(job, job.known)
        for number, count in decision.tokens.items():
            self.compute(self.jobs[number], count)

    def check(self, decision: SchedulerOutput) -> None:
        kept = [job for job in self.running if job.number not in decision.preempted]
        decodes = {job.number for job in kept if job.known - job.computed == 1}
        assert decodes <= decision.tokens.keys(), "every answer goes on"
        assert all(count > 0 for count in decision.tokens.values())
        most = self.limits.step_tokens if decodes else self.limits.prefill_tokens
        assert sum(decision.tokens.values()) <= max(most, len(decodes))
        assert len(kept) + len(decision.admitted) <= self.limits.max_running
        assert not (decision.preempted and decision.admitted)
        if self.running or self.waiting:
            assert decision.tokens, "something goes on in every step"

    def grow(self, job: Job, tokens: int) -> None:
        needed = max(0, -(-(job.computed + tokens) // BLOCK_SIZE) - job.blocks)
        assert needed <= self.free, "more blocks were granted than are free"
        self.free -= needed
        job.blocks += needed

    def compute(self, job: Job, count: int) -> None:
        self.grow(job, count)
        job.computed += count
        if job.computed < job.known:
            return
        job.known += 1
        if job.known == job.prompt + job.answer:  # the last token needs no states
            self.running.remove(job)
            self.free += job.blocks
            job.blocks, job.ended = 0, self.now


@st.composite
def machines(draw: st.DrawFn) -> Machine:
    total = draw(st.integers(3, 16))
    lengths = st.integers(1, total * BLOCK_SIZE - 1)
    jobs = []
    for number in range(draw(st.integers(1, 14))):
        prompt = draw(lengths | st.integers(1, 6))
        answer = draw(st.integers(1, min(20, total * BLOCK_SIZE - prompt)))
        arrives = draw(st.integers(0, 40)) / 10
        jobs.append(Job(number, arrives, draw(st.integers(-1, 1)), prompt, answer))
    limits = SchedulerConfig(
        BLOCK_SIZE,
        step_tokens=draw(st.integers(1, 12)),
        prefill_tokens=draw(st.integers(1, 40)),
        max_running=draw(st.integers(1, 8)),
    )
    return Machine(jobs, limits, total, tick=0.1)


@settings(max_examples=scaled(200))
@given(machines())
def test_all_requests_end_and_all_blocks_come_back(machine: Machine) -> None:
    work = sum(job.prompt + job.answer for job in machine.jobs.values())
    patience = 10 * (MAX_BYPASS_SECONDS + AGING_SECONDS)
    machine.run(rounds=int(work + 40 + patience * len(machine.jobs)))
    assert [job.number for job in machine.jobs.values() if job.ended is None] == []
    assert machine.free == machine.total


def test_a_big_request_does_not_starve_in_a_stream_of_small_ones() -> None:
    big = Job(0, 0.5, 0, prompt=30, answer=2)
    stream = [Job(n, n / 5, 0, prompt=3, answer=12) for n in range(1, 150)]
    machine = Machine([big, *stream], WIDE, total=8, tick=0.1)
    machine.run(rounds=200)
    assert big.ended is not None
    assert MAX_BYPASS_SECONDS < big.ended - big.arrives < MAX_BYPASS_SECONDS + 5
    assert machine.coming, "the stream goes on"


def test_a_long_prompt_goes_on_though_answers_fill_the_steps() -> None:
    """It was there first: nobody enters while the answers take the whole step."""
    long = Job(0, 0.5, 0, prompt=60, answer=2)
    stream = [Job(n, n / 10, 0, prompt=1, answer=30) for n in range(1, 100)]
    limits = SchedulerConfig(BLOCK_SIZE, step_tokens=4, prefill_tokens=64, max_running=6)
    machine = Machine([long, *stream], limits, total=80, tick=0.1)
    machine.run(rounds=150)
    assert long.ended is not None
    assert long.ended < 5
    assert sum(job.ended is None for job in stream) > 50
