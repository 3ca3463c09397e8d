"""Launches that wait while a step runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import pytest
import torch

from ragcache.engine import Request
from ragcache.engine.config import EngineStats
from ragcache.engine.launching import MOST_ANSWERS, PAUSE, STEPS, LaunchTimer, QuestionTurns
from ragcache.engine.step import LaunchedStep, ScheduledWork, StepTimes
from ragcache.models import CausalLM, wrap_causal
from tests.ragcache.engine.delayed_runner import delayed_core
from tests.ragcache.engine.stepped_engine import ManualClock, SteppedCore, core_of, plain_context
from tests.ragcache.engine.test_core_ahead import runner_of
from tests.tiny_models import random_tokens, tiny_model

STEP = 0.010


@pytest.fixture(scope="module")
def causal() -> CausalLM:
    return wrap_causal(tiny_model("llama", num_hidden_layers=1))


def steady_timer(launch: float = 0.001) -> LaunchTimer:
    timer = LaunchTimer()
    for _ in range(STEPS):
        timer.observe_launch(launch)
        timer.observe_step(STEP)
    return timer


def test_a_launch_waits_until_the_running_step_is_nearly_over() -> None:
    timer = steady_timer()
    assert 0.6 * STEP < timer.seconds_left(0.0) < 0.9 * STEP
    assert timer.seconds_left(0.004) == pytest.approx(timer.seconds_left(0.0) - 0.004)
    assert timer.seconds_left(STEP) == 0


def test_preparations_and_shorter_steps_leave_less_time() -> None:
    timer = steady_timer()
    before = timer.seconds_left(0.0)
    timer.observe_launch(0.003)
    assert timer.seconds_left(0.0) == pytest.approx(before - 0.002)
    timer.observe_step(STEP / 2)
    assert timer.seconds_left(0.0) < before - 0.4 * STEP
    assert steady_timer(launch=STEP).seconds_left(0.0) == 0


def test_preparations_count_by_the_kind_of_step() -> None:
    timer = steady_timer()
    before = timer.seconds_left(0.0)
    timer.observe_launch(0.003, prompts=True)
    assert timer.seconds_left(0.0) == before
    assert timer.seconds_left(0.0, prompts=True) == pytest.approx(before - 0.002)


def test_an_idle_device_makes_launches_earlier_for_a_while() -> None:
    timer = steady_timer()
    before = timer.seconds_left(0.0)
    timer.observe_idle(0.001)
    assert timer.seconds_left(0.0) == pytest.approx(before - 0.002)
    for _ in range(300):
        timer.observe_idle(0.00001)
    assert timer.seconds_left(0.0) == pytest.approx(before, rel=0.01)


def test_nothing_waits_before_steps_are_known() -> None:
    timer = LaunchTimer()
    assert timer.seconds_left(0.0) == 0
    timer = steady_timer()
    timer.forget_steps()
    assert timer.seconds_left(0.0) == 0


@dataclass
class DeviceTime:
    """A time of a device in seconds."""

    at: float

    def elapsed_time(self, end: DeviceTime, /) -> float:
        return 1e3 * (end.at - self.at)


def test_steps_with_prompts_teach_a_timer_nothing() -> None:
    """Neither the time of such a step nor the idle time before it, which counts as idle."""
    timer, stats, nobody = steady_timer(), EngineStats(), cast("Any", None)
    before = timer.seconds_left(0.0)
    times, prompt = StepTimes(stats, None, timer), ScheduledWork(nobody, nobody, 5, 5)
    seen = []
    for number, work in enumerate(([], [prompt], [])):
        begin, end = 2 * number * STEP, (2 * number + 1) * STEP
        timestamps = [DeviceTime(begin), DeviceTime(end), DeviceTime(end)]
        step = LaunchedStep(work, torch.empty(0), [], [], 1, timestamps=timestamps)
        step.launched_at = begin if not work else end - 0.1 * STEP
        times.observe_step(step, end, 0.0)
        seen.append(timer.seconds_left(0.0))
        assert stats.idle == pytest.approx(number * STEP)
    assert seen[:2] == pytest.approx([before, before])
    assert seen[2] == 0, "the device stood idle for as long as a step takes"


class BusyDeviceTimer(LaunchTimer):
    """The device of these tests counts its work in place of time."""

    def observe_idle(self, seconds: float) -> None:
        """Never idle."""


def late_core(causal: CausalLM, clock: ManualClock) -> SteppedCore:
    core = delayed_core(causal, clock=clock)
    core._times.launches = BusyDeviceTimer()
    return core


def stepped(core: SteppedCore, clock: ManualClock, steps: int) -> None:
    """Steps of which each takes the device STEP seconds."""
    for _ in range(steps):
        clock.now += STEP
        core.step()


def test_a_core_has_time_to_spare_while_its_device_computes(causal: CausalLM) -> None:
    clock = ManualClock()
    core = late_core(causal, clock)
    handle = core.submit(Request(plain_context(random_tokens(5)), 40))
    assert core.seconds_to_spare() == 0
    stepped(core, clock, STEPS + 4)
    spare = core.seconds_to_spare()
    assert 0 < spare < STEP
    clock.now += spare
    assert core.seconds_to_spare() == pytest.approx(0, abs=1e-9)
    core.drain()
    assert handle.done
    assert core.seconds_to_spare() == 0


def test_a_core_that_runs_one_step_at_a_time_never_waits(causal: CausalLM) -> None:
    clock = ManualClock()
    core = core_of(causal, clock=clock)
    handle = core.submit(Request(plain_context(random_tokens(5)), 30))
    stepped(core, clock, STEPS + 4)
    assert core.busy
    assert not handle.done
    assert core.seconds_to_spare() == 0


def test_steps_of_other_requests_are_not_expected_after_a_pause(causal: CausalLM) -> None:
    clock = ManualClock()
    core = late_core(causal, clock)
    handles = [core.submit(Request(plain_context(random_tokens(5)), 20))]
    stepped(core, clock, STEPS + 4)
    assert core.seconds_to_spare() > 0
    core.drain()
    handles.append(core.submit(Request(plain_context(random_tokens(5, seed=1)), 20)))
    stepped(core, clock, 2)
    assert [handle.done for handle in handles] == [True, False]
    assert core.seconds_to_spare() == 0


def test_questions_have_turns_beside_few_answers_only() -> None:
    turns = QuestionTurns()
    assert not turns.take(0, 10, 1.0), "nothing else would be computed"
    assert not turns.take(MOST_ANSWERS + 1, 10, 1.0)
    assert not turns.take(3, 1000, 1.0)
    assert turns.take(MOST_ANSWERS, 10, 1.0)
    assert not turns.take(3, 10, 1.0 + 0.9 * PAUSE)
    assert turns.take(3, 10, 1.0 + 1.1 * PAUSE)


def test_answers_wait_for_a_question_once(causal: CausalLM) -> None:
    """Answers go on behind it, each as alone."""
    clock = ManualClock()
    prompts = [plain_context(random_tokens(5 + n, seed=n)) for n in range(3)]
    requests = [Request(context, 12) for context in prompts]
    expected = [core_of(causal).run(each)[0].token_ids for each in requests]
    core = late_core(causal, clock)
    handles = [core.submit(each) for each in requests[:2]]
    stepped(core, clock, 4)
    handles.append(core.submit(requests[2]))
    seen = list[tuple[int, int]]()
    for _ in range(3):
        stepped(core, clock, 1)
        assert core._launched is not None
        seen.append((core._launched.decoding, core._launched.rows))
    assert seen == [(0, 7), (1, 3), (3, 3)], "the question, then everything"
    core.drain()
    assert runner_of(core).ahead == core.stats.steps - 1, "none waits for another one's tokens"
    assert [handle.result().token_ids for handle in handles] == expected
