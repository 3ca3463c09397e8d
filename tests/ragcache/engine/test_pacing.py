"""Prompts and encodings beside answers: as many tokens as a bound of the gap between tokens
allows."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ragcache.engine import EncodeJob, Request
from ragcache.engine.batch import ScheduledChunk
from ragcache.engine.encoding import StatesChannel
from ragcache.engine.pacing import LEAST_TOKENS, StepPace
from ragcache.models import CausalLM, wrap_causal
from tests.ragcache.engine.delayed_runner import DelayedRunner
from tests.ragcache.engine.stepped_engine import (
    ManualClock,
    SmallBlockRunner,
    SteppedCore,
    config_of,
    plain_context,
)
from tests.tiny_models import random_tokens, tiny_model

FIXED, PER_ROW = 0.008, 0.0001
"""Seconds of a step, and of each of its rows."""


@pytest.fixture(scope="module")
def causal() -> CausalLM:
    return wrap_causal(tiny_model("llama", num_hidden_layers=1, max_position_embeddings=4096))


class TimedRunner(SmallBlockRunner):
    """A runner whose steps take seconds of a clock by their rows."""

    def __init__(self, causal: CausalLM, clock: ManualClock) -> None:
        super().__init__(causal)
        self.clock, self.rows = clock, list[int]()

    def prepare_batch(self, chunks: Sequence[ScheduledChunk]) -> Callable[[], Tensor]:
        rows = sum(len(chunk.token_ids) for chunk in chunks)
        compute = super().prepare_batch(chunks)

        def timed() -> Tensor:
            self.clock.now += FIXED + PER_ROW * rows
            self.rows.append(rows)
            return compute()

        return timed


def gaps_beside_encodings(
    causal: CausalLM, max_gap_ms: float | None, steps: int
) -> tuple[list[float], list[int], SteppedCore]:
    """Milliseconds between the tokens of an answer while documents are encoded, and rows of these
    steps."""
    clock = ManualClock()
    runner = TimedRunner(causal, clock)
    config = replace(config_of(causal, blocks=400, step_tokens=512), max_gap_ms=max_gap_ms)
    core = SteppedCore(runner, config, clock)
    handle = core.submit(Request(plain_context(random_tokens(5)), 60))
    for _ in range(3):
        core.step()
    channel = StatesChannel(lambda: None)
    core.add_encoding([EncodeJob(random_tokens(900, seed=n)) for n in range(8)], channel)
    times, first = [], len(runner.rows)
    for _ in range(steps):
        count = handle.channel.count
        core.step()
        assert handle.channel.count == count + 1
        times.append(clock.now)
    return [1e3 * (b - a) for a, b in pairwise(times)], runner.rows[first + 1 :], core


def test_gaps_stay_below_the_bound_and_encodings_use_them(causal: CausalLM) -> None:
    unbounded, rows, _ = gaps_beside_encodings(causal, None, 4)
    assert min(rows) == 512
    assert min(unbounded) > 40
    gaps, rows, core = gaps_beside_encodings(causal, 30.0, 25)
    assert max(gaps) <= 30.0
    fitting = (0.030 - FIXED) / PER_ROW
    assert min(rows[10:]) > 0.75 * fitting
    assert core.stats.encoded_tokens > 0.7 * 25 * fitting


@pytest.mark.parametrize("max_gap_ms", [None, 30.0])
def test_prompts_beside_answers_keep_the_bound(causal: CausalLM, max_gap_ms: float | None) -> None:
    clock = ManualClock()
    runner = TimedRunner(causal, clock)
    config = replace(config_of(causal, blocks=600, step_tokens=512), max_gap_ms=max_gap_ms)
    core = SteppedCore(runner, config, clock)
    handle = core.submit(Request(plain_context(random_tokens(5)), 60))
    for _ in range(4):
        core.step()
    first = len(runner.rows)
    prompt = core.submit(Request(plain_context(random_tokens(900, seed=1)), 1))
    while not prompt.done:
        core.step()
    rows = runner.rows[first:]
    assert sum(rows) >= 900
    assert not handle.done
    longest = 1e3 * (FIXED + PER_ROW * max(rows))
    assert longest <= 30 if max_gap_ms else longest > 55


def test_a_bound_that_no_step_keeps_leaves_encodings_some_tokens(causal: CausalLM) -> None:
    _, rows, _ = gaps_beside_encodings(causal, 2.0, 10)
    assert set(rows) == {1 + LEAST_TOKENS}


def test_without_answers_the_bound_counts_for_nothing(causal: CausalLM) -> None:
    clock = ManualClock()
    runner = TimedRunner(causal, clock)
    core = SteppedCore(runner, replace(config_of(causal), max_gap_ms=1.0), clock)
    core.add_encoding([EncodeJob(random_tokens(900))], StatesChannel(lambda: None))
    core.step()
    assert runner.rows == [900]


class RecordedPace(StepPace):
    """A pace that keeps the seconds of each step."""

    def __init__(self) -> None:
        super().__init__(0.030)
        self.seconds = list[float]()

    def observe(self, rows: int, seconds: float) -> None:
        self.seconds.append(seconds)
        super().observe(rows, seconds)


@pytest.mark.parametrize("delayed", [False, True])
def test_waiting_for_a_caller_is_no_time_of_a_step(causal: CausalLM, *, delayed: bool) -> None:
    clock = ManualClock()
    runner = DelayedRunner(causal) if delayed else TimedRunner(causal, clock)
    core = SteppedCore(runner, replace(config_of(causal), max_gap_ms=30.0, encode_bytes=1), clock)
    core._times.pace = pace = RecordedPace()
    channel = StatesChannel(lambda: None)
    core.add_encoding([EncodeJob(random_tokens(20, seed=n)) for n in range(2)], channel)
    while not core.is_stalled:
        core.step()
    assert core.busy
    clock.now += 5.0
    channel.event(0)
    handle = core.submit(Request(plain_context(random_tokens(5)), 3))
    core.drain()
    assert handle.done
    assert pace.seconds
    assert max(pace.seconds) < 0.030


@pytest.mark.parametrize("delayed", [False, True])
def test_waiting_after_a_failure_is_no_time_of_a_step(causal: CausalLM, *, delayed: bool) -> None:
    clock = ManualClock()
    runner = DelayedRunner(causal) if delayed else TimedRunner(causal, clock)
    core = SteppedCore(runner, replace(config_of(causal), max_gap_ms=30.0), clock)
    core._times.pace = pace = RecordedPace()
    for _ in range(2):
        handle = core.submit(Request(plain_context(random_tokens(5)), 6))
        for _ in range(3):
            core.step()
        core.fail_all(RuntimeError("the step failed"))
        assert handle.done
        clock.now += 5.0
    assert pace.seconds
    assert max(pace.seconds) < 0.030


def test_steps_behind_a_running_one_keep_the_bound(causal: CausalLM) -> None:
    """The decode batch counts as rows."""
    config = replace(config_of(causal, blocks=400, step_tokens=64), max_gap_ms=1.0)
    core = SteppedCore(DelayedRunner(causal), config, ManualClock())
    handles = [core.submit(Request(plain_context(random_tokens(5, seed=n)), 30)) for n in range(3)]
    for _ in range(4):
        core.step()
    before = core.stats.encoded_tokens
    core.add_encoding([EncodeJob(random_tokens(300))], StatesChannel(lambda: None))
    core.step()
    core.step()
    assert 0 < core.stats.encoded_tokens - before <= 2 * LEAST_TOKENS
    core.drain()
    assert all(handle.done for handle in handles)
    assert core.stats.encoded_tokens == 300


@given(
    fixed=st.floats(0.001, 0.02),
    per_row=st.floats(1e-5, 1e-3),
    rows=st.integers(1, 200),
    bound=st.floats(0.03, 0.2),
    seed=st.integers(0, 99),
)
def test_the_pace_finds_the_rows_that_fit(
    fixed: float, per_row: float, rows: int, bound: float, seed: int
) -> None:
    pace, rng = StepPace(bound), random.Random(seed)
    fitting = (bound - fixed) / per_row
    for number in range(60):
        beside = pace.tokens_beside(rows)
        seconds = fixed + per_row * (rows + beside)
        assert beside == LEAST_TOKENS or seconds <= 1.05 * bound
        if number > 40 and fitting > rows + 2 * LEAST_TOKENS:
            assert rows + beside > 0.7 * fitting
        pace.observe(rows + beside, seconds * rng.uniform(0.99, 1.01))
