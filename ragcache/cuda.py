"""Streams and events of CUDA, whose constructors PyTorch does not type."""

from __future__ import annotations

import torch


def new_stream(device: torch.device | str | None = None) -> torch.cuda.Stream:
    """A stream of its own. device: None is the current one."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # see the module


def new_event(*, timing: bool = False) -> torch.cuda.Event:
    """An event of the current device, not yet recorded. timing: whether it measures time."""
    return torch.cuda.Event(enable_timing=timing)  # type: ignore[no-untyped-call]  # see the module
