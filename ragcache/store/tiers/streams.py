"""CUDA streams that copy states, in addition to the stream on which the engine computes."""

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
    """The streams of one device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.upload: Any = new_stream(device)
        self.compute: Any = torch.cuda.current_stream(device)

    @contextmanager
    def on(self, stream: Any) -> Iterator[None]:
        """Queue work on a stream, on its device."""
        with self._no_capture(stream), torch.cuda.stream(stream):
            yield

    def record(self, stream: Any) -> CopyEvent:
        """Return an event after all work queued on a stream."""
        with self._no_capture(stream), torch.cuda.device(self.device):
            event = new_event()
            event.record(stream)
        return event

    def holds(self, tensor: Tensor) -> bool:
        """Return whether a tensor is on the device."""
        return tensor.device == self.device

    def _no_capture(self, stream: Any) -> AbstractContextManager[object]:
        return capture_lock if stream == self.compute else nullcontext()

    def follow_thread(self) -> None:
        """Make the compute stream wait for the work queued by the calling thread."""
        own = torch.cuda.current_stream(self.device)
        if own != self.compute:
            with capture_lock:
                self.compute.wait_stream(own)


def indexed(device: torch.device) -> torch.device:
    """Return a device with its number, as tensors name it."""
    number: int | None = device.index
    if device.type == "cuda" and number is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


@dataclass(slots=True, eq=False)
class Download:
    """Copies from a GPU to main memory."""

    queued: bool = False
    """Whether the copies are queued. False if they end at once."""
    arrival: Arrival | None = None
    """End of queued copies, set after they are queued."""
    event: CopyEvent | None = None
    """The event of `arrival`."""


@contextmanager
def downloading(states: StoredStates) -> Iterator[Download]:
    """Queue copies of states on the download stream of their GPU.

    The copies follow the computation of the states and the work queued by this thread. States in
    main memory are copied at once.
    """
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
    download.event, download.arrival = event, Arrival([event], sources=states)


@cache
def _download_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the download stream of a device. Downloads run one after another."""
    return new_stream(device)
