"""A device's streams and events as a test plays them: copies happen at once, and a log tells their
order."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from ragcache.store.tiers.streams import DeviceStreams


@dataclass(eq=False)
class Event:
    """The end of what was queued on a stream so far."""

    log: list[str]
    name: str
    ended: bool = False

    def query(self) -> bool:
        return self.ended

    def wait(self, stream: Any) -> None:
        self.log.append(f"{stream} waits for {self.name}")

    def synchronize(self) -> None:
        self.ended = True


@dataclass(eq=False)
class Streams(DeviceStreams):
    """Streams whose queue is a log. computed: tensors that are taken for the device's own;
    holds_all: whether all are."""

    log: list[str] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    computed: list[Tensor] = field(default_factory=list)
    holds_all: bool = False
    upload: Any = "upload"
    compute: Any = "compute"

    @contextmanager
    def on(self, stream: Any) -> Iterator[None]:
        self.log.append(f"copy on {stream}")
        yield

    def record(self, stream: Any) -> Event:
        self.events.append(Event(self.log, f"{stream} {len(self.events)}"))
        return self.events[-1]

    def holds(self, tensor: Tensor) -> bool:
        return self.holds_all or any(tensor is each for each in self.computed)

    def follow_thread(self) -> None:
        self.log.append("compute follows the thread")

    def end_all(self) -> None:
        for event in self.events:
            event.ended = True
