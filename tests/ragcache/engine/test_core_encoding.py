"""Encoding beside answering: in portions, each job once, and nothing kept afterwards."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from ragcache.engine import Context, EncodeJob, Request, Segment, encode
from ragcache.engine.core import States
from ragcache.engine.handle import Handle
from ragcache.models import CausalLM
from tests.conftest import random_tokens
from tests.ragcache.engine.engines import core_of, drain, plain, run, settings_of, submit


def test_encoding_does_not_stall_those_that_decode(causal: CausalLM) -> None:
    core = core_of(causal, settings_of(causal, step_tokens=8))
    answering = submit(core, Request(plain(random_tokens(3)), 30))
    core.step()
    jobs = [EncodeJob(random_tokens(n, seed=n), 2) for n in (20, 0, 3, 12)]
    channel = States(lambda: None)
    handle = Handle(channel)
    core.add_encoding(jobs, channel)
    steps = 0
    while not handle.done:
        core.step()
        steps += 1
        assert len(answering._channel._events) == 1 + steps
    assert steps == 5, "35 tokens in portions of 7"
    assert core.tally.encoded_tokens == 35
    for states, expected in zip(handle, encode(causal, jobs), strict=True):
        assert states.start == expected.start
        torch.testing.assert_close(states.keys, expected.keys, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(states.values, expected.values, rtol=1e-4, atol=1e-5)
    drain(core)


def test_each_job_is_computed_once(causal: CausalLM) -> None:
    core, channel = core_of(causal), States(lambda: None)
    core.add_encoding([EncodeJob(random_tokens(10, seed=n)) for n in range(3)], channel)
    core.step()
    assert (core.tally.encoded_tokens, core.busy) == (30, False)


@pytest.mark.parametrize("jobs", [[], [EncodeJob([])]])
def test_nothing_to_encode_ends_at_once(causal: CausalLM, jobs: list[EncodeJob]) -> None:
    core, channel = core_of(causal), States(lambda: None)
    handle = Handle(channel)
    core.add_encoding(jobs, channel)
    core.step()
    assert not core.busy
    assert [states.length for states in handle] == [0] * len(jobs)


def test_jobs_of_a_caller_who_went_away_are_dropped(causal: CausalLM) -> None:
    core, channel = core_of(causal, settings_of(causal, prefill_tokens=4)), States(lambda: None)
    core.add_encoding([EncodeJob(random_tokens(10))], channel)
    core.step()
    channel.cancel()
    core.step()
    assert (core.tally.encoded_tokens, core.busy) == (4, False)


def test_an_idle_engine_holds_no_states(causal: CausalLM) -> None:
    """Neither of what it answered nor of what it encoded last."""
    core, channel = core_of(causal), States(lambda: None)
    handle = Handle(channel)
    core.add_encoding([EncodeJob(random_tokens(10))], channel)
    core.step()
    [states] = handle
    keys = weakref.ref(states.keys)
    context = Context((Segment(states, 0),), (1, 2), (10, 11), 12)
    run(core, Request(context, 3))
    del states, context, handle, channel
    gc.collect()
    assert keys() is None
