"""The engine core ahead of its device: the same answers, in order, over memory that is still there.

The runner computes late (`delayed_runner`), so that all that the core reads too early is wrong.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch

from ragcache.engine import Context, EncodeJob, Request, Segment, encode, launching
from ragcache.engine import core as core_module
from ragcache.engine.encoding import StatesChannel
from ragcache.engine.handle import RequestHandle
from ragcache.errors import EngineFailed, InvalidRequest
from ragcache.models import CausalLM, wrap_causal
from ragcache.states import KVStates
from ragcache.states.quantization import StoredStates, quantize
from tests.ragcache.engine.delayed_runner import DelayedRunner, delayed_core
from tests.ragcache.engine.stepped_engine import (
    BLOCK_SIZE,
    ManualClock,
    SmallBlockRunner,
    SteppedCore,
    assert_all_blocks_free,
    config_of,
    core_of,
    plain_context,
)
from tests.ragcache.engine.test_core_answers import Words, words
from tests.tiny_models import random_tokens, tiny_model

PROMPT = random_tokens(9, seed=2)

MakeCore = Callable[..., SteppedCore]


@pytest.fixture(scope="module")
def causal() -> CausalLM:
    return wrap_causal(tiny_model("llama", initializer_range=0.2))


def runner_of(core: SteppedCore) -> DelayedRunner:
    assert isinstance(core.runner, DelayedRunner)
    return core.runner


def assert_answers_alone(core: SteppedCore, requests: list[Request]) -> None:
    """All at once have the answers that each has alone, and no block stays in use."""
    outputs = core.run(*requests)
    for request, output in zip(requests, outputs, strict=True):
        assert output.choices == core_of(core.runner.model).run(request)[0].choices
    assert_all_blocks_free(core)


def test_steady_steps_need_neither_scheduler_nor_batch(
    causal: CausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    core = delayed_core(causal)
    requests = [Request(plain_context(random_tokens(5, seed=n)), 40) for n in range(3)]
    handles = [core.submit(request) for request in requests]
    core.step()
    core.step()
    core.step()
    prepared = runner_of(core).prepared

    def refused(*_: object, **__: object) -> None:
        raise AssertionError("nothing has changed")

    with monkeypatch.context() as patched:
        patched.setattr(core_module, "schedule", refused)
        for _ in range(30):
            core.step()
    assert (runner_of(core).prepared, runner_of(core).continued) == (prepared, 31)
    core.drain()
    assert [len(handle.result(0).token_ids) for handle in handles] == [40] * 3
    assert core.stats.decoded_tokens == 3 * 39


@pytest.mark.slow
@pytest.mark.usefixtures("little_to_collect")
@pytest.mark.parametrize("make", [core_of, delayed_core])
def test_steps_leave_tokens_and_blocks_behind_alone(causal: CausalLM, make: MakeCore) -> None:
    """A collection visits every object that lives, while all streams wait."""
    core = make(causal, config_of(causal, blocks=400))
    requests = [Request(plain_context(random_tokens(5, seed=n)), 150) for n in range(3)]
    handles = [core.submit(request) for request in requests]
    counts = []
    for _ in range(3):
        for _ in range(40):
            core.step()
        gc.collect()
        counts.append(Counter(type(each).__name__ for each in gc.get_objects()))
    grown = counts[2] - counts[1]  # the first count makes objects of its own
    assert grown.pop("TokenDelta") == grown.pop("SampledToken") == 3 * 40
    assert grown.pop("RadixNode") == pytest.approx(3 * 40 / BLOCK_SIZE, abs=3)
    assert grown.total() < 3 * 40 / BLOCK_SIZE + 10, "a key of a block, and no more"
    core.drain()
    assert all(handle.done for handle in handles)


def test_a_step_goes_on_while_requests_leave_and_join(causal: CausalLM) -> None:
    """An answer that ends, or a prompt that comes, costs no step behind the device."""
    core = delayed_core(causal)
    early, late = (Request(plain_context(random_tokens(5, seed=n)), 9 + n) for n in range(2))
    handles = [core.submit(early)]
    for _ in range(4):
        core.step()
    handles.append(core.submit(late))
    core.drain()
    assert [len(handle.result(0).token_ids) for handle in handles] == [9, 10]
    assert runner_of(core).ahead == core.stats.steps - 1


def test_texts_are_delivered_in_order_while_the_device_goes_on(causal: CausalLM) -> None:
    [expected] = core_of(causal).run(Request(plain_context(PROMPT), 8))
    core = delayed_core(causal)
    handle = core.submit(Request(plain_context(PROMPT), 8, text=words))
    counts = []
    while core.busy:
        core.step()
        assert bool(runner_of(core).pending) == core.busy, "the device always has something to do"
        counts.append(handle.channel.count)
    assert counts == [0, *range(1, 9)]
    assert all(later - sooner == 1 for sooner, later in pairwise(counts))
    assert handle.result(0).choices[0].text == Words().decode(list(expected.token_ids))


def test_a_first_token_is_delivered_before_the_next_is_sampled(
    causal: CausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    core = delayed_core(causal)
    handle = core.submit(Request(plain_context(PROMPT), 3))
    shown: list[int] = []
    sample = core._sample
    monkeypatch.setattr(core, "_sample", lambda s: (shown.append(handle.channel.count), sample(s)))
    core.step()
    assert handle.wait_launched(0), "what computes the request runs"
    assert handle.channel.count == 0
    core.drain()
    assert shown == [0, 1, 1], "later tokens are shown while the device computes"


def test_first_tokens_come_before_tokens_of_other_answers(
    causal: CausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launching, "MOST_ANSWERS", 0)
    core = delayed_core(causal)
    handles = [core.submit(Request(plain_context(PROMPT), 12))]
    for _ in range(4):
        core.step()
    handles.append(core.submit(Request(plain_context(PROMPT), 3)))
    shown: list[list[int]] = []
    sample = core._sample

    def sampled(step: Any) -> None:
        shown.append([handle.channel.count for handle in handles])
        sample(step)

    monkeypatch.setattr(core, "_sample", sampled)
    core.drain()
    first = next(at for at, (_, count) in enumerate(shown) if count == 1)
    assert shown[first][0] == shown[first - 1][0] + 1, "the other token waits for the sampling"
    assert [handle.channel.count for handle in handles] == [12, 3]


def over_modules(causal: CausalLM, seed: int) -> Context:
    """A prompt over modules that nothing else references."""
    jobs = [EncodeJob(random_tokens(6, seed=10 * seed + n)) for n in range(2)]
    first, second = encode(causal, jobs)
    segments = (Segment(first, 0), Segment(second, 6))
    return Context(segments, tuple(random_tokens(4, seed=seed)), tuple(range(12, 16)), 16)


@pytest.mark.usefixtures("little_to_collect")
@pytest.mark.parametrize(
    "end",
    [
        "stop string",
        "cancel",
        *(pytest.param(end, marks=pytest.mark.slow) for end in ("stop token", "limit", "deadline")),
    ],
)
def test_segments_are_held_until_no_step_reads_them(causal: CausalLM, end: str) -> None:
    [output] = core_of(causal).run(Request(over_modules(causal, 1), 12))
    fifth = output.token_ids[4]
    clock = ManualClock()
    core = delayed_core(causal, clock=clock)
    request = Request(
        over_modules(causal, 1),
        5 if end == "limit" else 12,
        frozenset({fifth}) if end == "stop token" else frozenset(),
        stop=(f"word{fifth} ",) if end == "stop string" else (),
        text=words,
        timeout=5.0 if end == "deadline" else None,
    )
    handle = core.submit(request)
    other = core.submit(Request(over_modules(causal, 2), 20))
    del request
    for _ in range(6):
        core.step()
    if end == "cancel":
        handle.cancel()
    clock.now += 10
    for _ in range(3):
        core.step()
        gc.collect()
    assert handle.done
    core.drain()
    assert len(other.result(0).token_ids) == 20


@pytest.mark.parametrize("after", [0, 1, 2, 6])
def test_a_failed_launch_ends_the_requests_not_the_engine(causal: CausalLM, after: int) -> None:
    core = delayed_core(causal)
    done = core.submit(Request(plain_context(PROMPT), after)) if after else None
    handles = [core.submit(Request(plain_context(PROMPT), 12)) for _ in range(3)]
    runner_of(core).failures.extend([*[None] * after, RuntimeError("broken")])
    with pytest.raises(RuntimeError, match="broken") as caught:
        core.drain()
    core.fail_all(caught.value)
    assert not core.busy
    for handle in handles:
        with pytest.raises(RuntimeError, match="broken"):
            handle.result(0)
    if done is not None:
        assert done.channel.count >= after - 1, "what was accepted was delivered"
    assert_answers_alone(core, [Request(plain_context(PROMPT), 12)])


class ForgetfulRunner(SmallBlockRunner):
    """A runner that has too little memory for some steps."""

    failures = 0
    most_rows = 10**9

    def prepare_batch(self, chunks: Any) -> Any:
        rows = sum(len(chunk.token_ids) for chunk in chunks)
        if rows > self.most_rows:
            type(self).failures += 1
            raise torch.OutOfMemoryError("no memory")
        return super().prepare_batch(chunks)


@pytest.mark.parametrize("most_rows", [1, 2, 7])
def test_a_step_is_tried_with_less_where_memory_ends(causal: CausalLM, most_rows: int) -> None:
    runner = ForgetfulRunner(causal)
    runner.most_rows = most_rows
    core = SteppedCore(runner)
    requests = [Request(plain_context(random_tokens(3 * n, seed=n)), 6) for n in range(1, 5)]
    channel = StatesChannel(lambda: None)
    core.add_encoding([EncodeJob(random_tokens(9))], channel)
    assert_answers_alone(core, requests)
    assert len(list(RequestHandle(channel))) == 1
    assert runner.failures
    assert_all_blocks_free(core)


def test_without_memory_for_a_token_the_request_fails(causal: CausalLM) -> None:
    runner = ForgetfulRunner(causal)
    runner.most_rows = 0
    core = SteppedCore(runner)
    handles = [core.submit(Request(plain_context(PROMPT), 6)) for _ in range(2)]
    core.drain()
    for handle in handles:
        with pytest.raises(EngineFailed, match="no memory left"):
            handle.result(0)
    runner.most_rows = 100
    assert len(core.run(Request(plain_context(PROMPT), 6))[0].token_ids) == 6
    assert_all_blocks_free(core)


@pytest.mark.parametrize("at", range(9))
def test_memory_that_ends_ahead_of_the_device_is_tried_later(causal: CausalLM, at: int) -> None:
    core = delayed_core(causal)
    runner_of(core).failures.extend([*[None] * at, torch.OutOfMemoryError("no memory")])
    requests = [Request(plain_context(random_tokens(5, seed=n)), 4 + n) for n in range(4)]
    assert_answers_alone(core, requests)


@pytest.mark.parametrize("limit", range(5, 12))
def test_a_request_waits_for_the_blocks_of_an_ending_one(causal: CausalLM, limit: int) -> None:
    core = delayed_core(causal, config_of(causal, blocks=5))
    requests = [
        Request(plain_context(random_tokens(5, seed=1)), limit),
        Request(plain_context(random_tokens(7, seed=2)), 4),
    ]
    assert_answers_alone(core, requests)


def over(states: StoredStates) -> Request:
    length = states.length
    return Request(Context((Segment(states, 0),), (1,), (length,), length + 1), 2)


@pytest.mark.parametrize("make", [core_of, delayed_core])
def test_states_of_another_model_or_device_are_refused(
    causal: CausalLM, make: Callable[..., SteppedCore]
) -> None:
    core = make(causal)
    [states] = encode(causal, [EncodeJob(PROMPT)])
    core.checker.check_request(over(states))
    core.checker.check_request(over(states.part(2, 5, 2)))
    core.checker.check_request(over(quantize(states, "int8")))
    others = [
        KVStates(states.keys.half(), states.values.half(), 0),
        KVStates(states.keys[1:], states.values[1:], 0),
        KVStates(states.keys[:, 1:], states.values[:, 1:], 0),
        KVStates(states.keys[..., 1:], states.values[..., 1:], 0),
        KVStates(states.keys.to("meta"), states.values.to("meta"), 0),
    ]
    for other in others:
        with pytest.raises(InvalidRequest, match="not those of this model"):
            core.checker.check_request(over(other))


def test_states_that_a_device_cannot_read_in_place_are_refused(causal: CausalLM) -> None:
    [states] = encode(causal, [EncodeJob(PROMPT)])
    apart = states.keys.transpose(1, 2).contiguous().transpose(1, 2)
    for other in [KVStates(apart, states.values, 0), KVStates(apart, apart, 0)]:
        core_of(causal).checker.check_request(over(other))
        with pytest.raises(InvalidRequest, match="one after another"):
            delayed_core(causal).checker.check_request(over(other))


def test_the_seconds_of_the_device_are_counted(causal: CausalLM) -> None:
    """Its time goes on with each piece of work: a mark, a forward pass, the sampling."""
    core = delayed_core(causal)
    core.run(Request(plain_context(PROMPT), 10))
    steps, cleared = 10, 1
    assert core.stats.steps == steps
    assert core.stats.forward == pytest.approx((steps + steps) / 1e3, abs=cleared / 1e3)
    assert 0 < core.stats.idle < core.stats.forward
