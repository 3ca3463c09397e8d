"""After many requests an engine holds what it held after a few."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Iterator

import pytest

from ragcache.engine import Request, Sampling
from ragcache.engine.core import EngineCore
from ragcache.models import CausalLM, wrap_causal
from tests.conftest import tiny_model
from tests.ragcache.engine.engines import check_whole, core_of, drain, plain, settings_of, submit

FEW, MANY = 200, 10_000
TOGETHER = 50


@pytest.fixture(scope="module")
def causal() -> CausalLM:
    """As small as a model can be."""
    sizes = {"hidden_size": 8, "intermediate_size": 8, "head_dim": 4, "vocab_size": 16}
    heads = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
    return wrap_causal(tiny_model("llama", **sizes, **heads))


@pytest.fixture
def tracing() -> Iterator[None]:
    tracemalloc.start()
    yield
    tracemalloc.stop()


def request(number: int) -> Request:
    """Some leave a chunk to be found, some find one, some have several answers."""
    sampling = Sampling(temperature=1, presence_penalty=1) if number % 5 == 0 else Sampling()
    several = 1 + (number % 20 == 0)
    if number % 3:
        return Request(plain([number % 7]), 1 + number % 2, n=several, sampling=sampling)
    digits = [number % 16, number // 16 % 16, number // 256 % 16, number % 2, 5]
    return Request(plain(digits), 1, tenant=number % 4, n=several, sampling=sampling)


def serve(core: EngineCore, count: int) -> None:
    for begin in range(0, count, TOGETHER):
        handles = [submit(core, request(begin + at)) for at in range(TOGETHER)]
        handles[7].cancel()
        core.step()
        handles[8].cancel()
        drain(core)
        assert all(handle.done for handle in handles)


def held(core: EngineCore) -> tuple[int, int, int, int]:
    """Python objects that the collector knows; nodes and queue of the tree; traced bytes."""
    gc.collect()
    tree = core.memory.tree
    traced, _ = tracemalloc.get_traced_memory()
    return len(gc.get_objects()), len(tree._nodes), len(tree._queue), traced


def test_ten_thousand_requests_leave_nothing_behind(causal: CausalLM, tracing: None) -> None:
    core = core_of(causal, settings_of(causal, chunks=60))
    tree = core.memory.tree
    serve(core, FEW)
    assert tree.retained == tree.budget, "what is retained grows no more"
    objects, nodes, _, traced = held(core)
    serve(core, MANY)
    objects_now, nodes_now, queue_now, traced_now = held(core)
    assert core.tally.admitted > 0.9 * MANY
    assert nodes_now == nodes == tree.retained
    assert queue_now <= nodes
    assert objects_now - objects < 100
    assert traced_now - traced < 32 * MANY, "one object a request would be more"
    check_whole(core)
