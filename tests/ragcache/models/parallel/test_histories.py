"""Random histories end over several ranks as in one process, in float32."""

from __future__ import annotations

import os
from collections import Counter
from contextlib import closing

import pytest
import torch

from ragcache.models import CausalLM, wrap_causal
from ragcache.models.parallel.leader import split_model
from tests.conftest import scaled
from tests.ragcache.models.parallel.histories import History, run_history
from tests.ragcache.models.parallel.thread_ranks import split_in_threads
from tests.tiny_models import tiny_model

CLOSE = {"rtol": 1e-4, "atol": 1e-5}


def assert_alike(found: History, expected: History) -> None:
    assert found.outcomes == expected.outcomes
    for name in ("steps", "prompt_tokens", "decoded_tokens", "encoded_tokens", "preempted"):
        assert getattr(found.stats, name) == getattr(expected.stats, name), name
    assert (found.evicted, found.refused) == (expected.evicted, expected.refused)
    for ours, theirs in zip(found.encoded, expected.encoded, strict=True):
        torch.testing.assert_close(ours.keys, theirs.keys, **CLOSE)
        torch.testing.assert_close(ours.values, theirs.values, **CLOSE)


@pytest.mark.parametrize(
    ("ranks", "requests"), [(2, 4), pytest.param(4, 40, marks=pytest.mark.slow)]
)
def test_a_history_is_the_same_over_several_ranks(
    causal: CausalLM, ranks: int, requests: int
) -> None:
    expected = run_history(causal, requests)
    split = split_in_threads(wrap_causal(tiny_model("llama")), ranks)
    try:
        assert_alike(run_history(split, requests), expected)
    finally:
        split.close()


@pytest.mark.slow
def test_histories_are_the_same_over_two_processes(forked_ranks: None, causal: CausalLM) -> None:
    """A hundred requests; `RAGCACHE_TEST_REQUESTS` or the full profile say more."""
    requests = int(os.environ.get("RAGCACHE_TEST_REQUESTS", scaled(1000, quick=0.1)))
    with closing(split_model(wrap_causal(tiny_model("llama")), 2)) as split:
        for seed in range(-(-requests // 100)):
            expected = run_history(causal, 100, seed)
            assert_alike(run_history(split, 100, seed), expected)


@pytest.mark.slow
def test_histories_have_everything_that_they_are_for(causal: CausalLM) -> None:
    history = run_history(causal, 100)
    ends = Counter(each if isinstance(each, str) else each[0][1] for each in history.outcomes)
    assert {"RequestCancelled", "DeadlineExceeded", "length", "stop"} <= ends.keys()
    assert history.stats.preempted > 10
    assert history.evicted > 50
    assert history.refused, "requests read all of a full tier"
    assert history.stats.shared_tokens
    assert history.encoded
    assert any(len(each) == 3 for each in history.outcomes if not isinstance(each, str))
