"""Fixtures: the two ends of a request."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from ragcache.models import CausalLM, compiled
from tests.ragcache.engine.channels import IntChannel, IntHandle, Wakes
from tests.ragcache.engine.delayed_runner import delayed_core
from tests.ragcache.engine.stepped_engine import SteppedCore, core_of


@pytest.fixture
def wakes() -> Wakes:
    return Wakes()


@pytest.fixture
def channel(wakes: Wakes) -> IntChannel:
    return IntChannel(wakes)


@pytest.fixture
def handle(channel: IntChannel) -> IntHandle:
    return IntHandle(channel)


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(16) as pool:
        yield pool


@pytest.fixture
def eager_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runners of GPUs compile no layers, for tests of what is around these: that takes seconds."""
    monkeypatch.setattr(compiled, "compile_layers", lambda *_: False)


@pytest.fixture(params=[core_of, delayed_core])
def core(request: pytest.FixtureRequest, causal: CausalLM) -> SteppedCore:
    """A core in step with its device, and one ahead of it."""
    made: SteppedCore = request.param(causal)
    return made
