"""Arrivals: what waits for which layer, and how long sources live."""

from __future__ import annotations

import gc
import weakref
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch

from ragcache.states import Arrival, KVStates
from ragcache.states.quantization import QuantizedStates, quantize
from tests.ragcache.conftest import make_states


@dataclass
class Event:
    """The end of a copy, which the test brings about."""

    ended: bool = False
    waiting: list[Any] = field(default_factory=list)

    def query(self) -> bool:
        return self.ended

    def wait(self, stream: Any) -> None:
        self.waiting.append(stream)

    def synchronize(self) -> None:
        self.ended = True


class Source:
    """Something that a weak reference can name."""


@pytest.mark.parametrize(
    ("ends", "expected"),
    [
        ([1, 2, 3, 4, 5], [0, 1, 2, 3, 4]),
        ([3, 4, 5], [0, 0, 0, 1, 2]),
        ([5], [0] * 5),
        ([], [0] * 5),
    ],
)
def test_a_layer_waits_for_the_event_after_it(ends: list[int], expected: list[int]) -> None:
    events = [Event() for _ in range(expected[-1] + 1)]
    arrival = Arrival(events, ends)
    for layer in range(5):
        arrival.wait(layer, layer)
    assert [n for layer in range(5) for n, e in enumerate(events) if layer in e.waiting] == expected
    arrival.wait("all")
    assert [n for n, event in enumerate(events) if "all" in event.waiting] == [len(events) - 1]


def test_an_arrival_is_ready_with_its_last_event() -> None:
    events = [Event(ended=True), Event()]
    arrival = Arrival(events, [1, 2])
    assert not arrival.ready()
    events[1].ended = True
    assert arrival.ready()
    arrival.wait("stream", 0)
    assert not events[0].waiting


def test_the_stream_that_writes_states_waits_for_nothing() -> None:
    event = Event()
    arrival = Arrival([event], stream="writes")
    arrival.wait("writes")
    arrival.wait("reads")
    assert event.waiting == ["reads"]
    assert arrival.ready("writes")
    assert not arrival.ready("reads")
    assert not arrival.ready()


@pytest.mark.parametrize("end", ["ready", "synchronize"])
def test_sources_live_until_the_copy_has_ended(end: str) -> None:
    source, event = Source(), Event()
    alive = weakref.ref(source)
    arrival = Arrival([event], sources=[source])
    del source
    gc.collect()
    assert not arrival.ready()
    assert alive() is not None
    event.ended = end == "ready"
    getattr(arrival, end)()
    assert event.ended
    assert alive() is None


def test_what_is_derived_from_states_arrives_with_them() -> None:
    arrival = Arrival([Event()])
    plain = make_states(1, 5)
    states = KVStates(plain.keys, plain.values, 1, arrival=arrival)
    assert states.part(1, 3, 2).arrival is arrival
    kept = quantize(states, "int8")
    assert isinstance(kept, QuantizedStates)
    assert arrival.ready(), "its bytes were read here"
    assert replace(kept, arrival=arrival).part(1, 3, 2).arrival is arrival


def test_a_part_of_quantized_states_is_restored_as_a_part_of_all() -> None:
    states = KVStates(*torch.randn(2, 2, 3, 9, 4), 7)
    kept = quantize(states, "int8")
    assert isinstance(kept, QuantizedStates)
    part, whole = kept.part(2, 6, 9).restore(), kept.restore().part(2, 6, 9)
    assert torch.equal(part.keys, whole.keys)
    assert torch.equal(part.values, whole.values)
    assert (part.start, kept.part(2, 6, 9).length) == (9, 4)
