"""Fixtures: the two ends of a request."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.ragcache.engine.channels import IntChannel, IntHandle, Wakes


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
