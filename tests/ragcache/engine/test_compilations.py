"""A rank that compiles is not taken for one that hangs, even if the leader compiles nothing."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import pytest
import torch
from torch._dynamo.callback import callback_handler

pytest.importorskip("triton", reason="triton is not installed")

from triton import knobs

from ragcache.engine.device_follower import Compilations
from ragcache.models.parallel.collectives import SignsOfLife
from ragcache.models.parallel.memory import SharedArena

LONG_AGO = 5.0  # seconds since which the rank has worked on its message


@pytest.fixture
def signs() -> Iterator[SignsOfLife]:
    made = SignsOfLife(SharedArena.create(), 2)
    before = list(knobs.runtime.kernel_load_start_hook.calls)
    Compilations(made, 1).report()
    yield made
    callback_handler.clear()
    knobs.runtime.kernel_load_start_hook.calls[:] = before


def compile_graph(during: Callable[[], object]) -> None:
    def backend(graph: torch.fx.GraphModule, _: object) -> Callable[..., object]:
        during()
        return graph.forward

    torch.compile(lambda numbers: numbers + 1, backend=backend)(torch.ones(2))


def load_kernel() -> None:
    knobs.runtime.kernel_load_start_hook(None, None, "attend", {}, "hash")


def spent(signs: SignsOfLife) -> float:
    """Seconds that the watch counts."""
    return time.monotonic() - float(signs.waiting[1])


def test_a_graph_has_time_until_it_is_compiled(signs: SignsOfLife) -> None:
    signs.waiting[1] = time.monotonic() - LONG_AGO
    during: list[float] = []
    compile_graph(lambda: during.append(spent(signs)))
    assert during[0] < -200
    assert 0 <= spent(signs) < LONG_AGO


def test_a_kernel_that_is_loaded_is_progress(signs: SignsOfLife) -> None:
    signs.waiting[1] = time.monotonic() - LONG_AGO
    load_kernel()
    assert 0 <= spent(signs) < LONG_AGO


def test_kernels_of_a_graph_do_not_end_its_time(signs: SignsOfLife) -> None:
    signs.waiting[1] = time.monotonic() - LONG_AGO
    during: list[float] = []
    compile_graph(lambda: (load_kernel(), during.append(spent(signs))))
    assert during[0] < -200


def test_between_messages_nothing_is_awaited(signs: SignsOfLife) -> None:
    compile_graph(load_kernel)
    assert signs.waiting[1] == 0
