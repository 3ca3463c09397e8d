"""The CUDA streams on which states move, beside the one on which the engine computes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from ragcache.machine import new_event, new_stream
from ragcache.states import Arrival
from ragcache.states.kv import CopyEvent, capture_lock
from ragcache.states.quantization import StoredStates


class DeviceStreams:
    """The streams of one device: `compute`, on which the engine reads states, and `upload`, on
    which they are copied there."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.upload: Any = new_stream(device)
        self.compute: Any = torch.cuda.current_stream(device)

    @contextmanager
    def on(self, stream: Any) -> Iterator[None]:
        """Queues what follows on a stream, on its device."""
        with self._no_capture(stream), torch.cuda.stream(stream):
            yield

    def record(self, stream: Any) -> CopyEvent:
        """An event after what is queued on a stream."""
        with self._no_capture(stream), torch.cuda.device(self.device):
            event = new_event()
            event.record(stream)
        return event

    def holds(self, tensor: Tensor) -> bool:
        """Whether a tensor is on the device."""
        return tensor.device == self.device

    def _no_capture(self, stream: Any) -> AbstractContextManager[object]:
        return capture_lock if stream == self.compute else nullcontext()

    def follow_thread(self) -> None:
        """Makes the compute stream come after what the calling thread has queued on its own."""
        own = torch.cuda.current_stream(self.device)
        if own != self.compute:
            with capture_lock:
                self.compute.wait_stream(own)


def indexed(device: torch.device) -> torch.device:
    """A device by its number, as tensors name it."""
    number: int | None = device.index
    if device.type == "cuda" and number is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


@dataclass(slots=True, eq=False)
class Download:
    """Copies from a GPU to main memory. queued: whether they are only queued. arrival: their end,
    once they are."""

    queued: bool = False
    arrival: Arrival | None = None


@contextmanager
def downloading(states: StoredStates) -> Iterator[Download]:
    """Queues the copies of states that are on a GPU on its download stream, behind what computes
    them and what this thread has queued; of others they are done at once."""
    if not states.keys.is_cuda:
        yield Download()
        return
    device = states.keys.device
    stream, download = _download_stream(device), Download(queued=True)
    stream.wait_stream(torch.cuda.current_stream(device))
    if states.arrival is not None:
        states.arrival.wait(stream)
    with torch.cuda.stream(stream):
        yield download
        event = new_event()
        event.record(stream)
    download.arrival = Arrival([event], sources=states)


@cache
def _download_stream(device: torch.device) -> torch.cuda.Stream:
    """One a device: copies to main memory come one after another."""
    return new_stream(device)
