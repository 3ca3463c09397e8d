"""The queue of requests where a device has too little memory for all that may run."""

from __future__ import annotations

import pytest

from ragcache.engine import Request
from ragcache.models import CausalLM, wrap_causal
from tests.ragcache.engine.stepped_engine import Answer, SteppedCore, config_of, plain_context
from tests.ragcache.engine.test_core_ahead import ForgetfulRunner
from tests.tiny_models import random_tokens, tiny_model

RUNNING = 4


@pytest.fixture(scope="module")
def causal() -> CausalLM:
    return wrap_causal(tiny_model("llama", num_hidden_layers=1))


def submitted(core: SteppedCore, limits: tuple[int, ...] = (20, 20, 20, 20)) -> list[Answer]:
    """Requests with 5 tokens each, and these limits of their answers."""
    prompts = (plain_context(random_tokens(5, seed=number)) for number in range(len(limits)))
    return [core.submit(Request(each, limit)) for each, limit in zip(prompts, limits, strict=True)]


@pytest.fixture
def core(causal: CausalLM) -> SteppedCore:
    """A core that has memory for one prompt at a time."""
    runner = ForgetfulRunner(causal)
    runner.most_rows = 7
    return SteppedCore(runner, config_of(causal, running=RUNNING))


def test_requests_wait_for_one_that_ends_where_memory_ended(core: SteppedCore) -> None:
    first, *others = submitted(core, (3, 20, 20, 20))
    while not first.done:
        core.step()
        assert core.stats.preempted == 3, "once each, and no more while the first one runs"
    core.step()
    assert core.stats.preempted == 5, "memory was tried again"
    core.drain()
    assert all(len(each.result(0).token_ids) == 20 for each in others)


def test_memory_is_not_tried_again_for_a_request_that_waited(core: SteppedCore) -> None:
    *_, last = submitted(core)
    core.step()
    preempted = core.stats.preempted
    last.cancel()
    core.step()
    assert (core.running, core.waiting) == (1, 2)
    assert core.stats.preempted == preempted


def test_all_may_run_again_where_one_that_ran_was_canceled(core: SteppedCore) -> None:
    first, *others = submitted(core)
    core.step()
    first.cancel()
    core.runner.most_rows = 100  # type: ignore[attr-defined]
    core.step()
    assert (core.running, core.waiting) == (len(others), 0)


def test_all_may_run_again_behind_a_failure(core: SteppedCore) -> None:
    failed = submitted(core)
    core.step()
    core.fail_all(RuntimeError("a step failed"))
    assert all(each.done for each in failed)
    core.runner.most_rows = 100  # type: ignore[attr-defined]
    again = submitted(core)
    core.step()
    assert (core.running, core.waiting) == (len(again), 0)
