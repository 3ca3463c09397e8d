"""The limits of an engine, and its counters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

GPU_RESERVE = 4 * 2**30
"""Bytes of a GPU that are left to activations, graphs and the allocator."""
GPU_POOL_SHARE = 0.3
"""Of the rest: what the pool takes. Documents take what is left."""
GPU_ENCODE_SHARE = 0.1
"""Of the rest: what encodings and their states may take until these are stored."""


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Memory and limits of an engine.

    Args:
        pool_bytes: Memory for the states of requests' own tokens.
        step_tokens: The most rows of a step in which something decodes, so that long new text
            stalls no answer.
        prefill_tokens: The most rows of a step in which nothing decodes.
        running: The most requests at once.
        queue: The most requests that wait; one more is refused.
        retained: The share of the pool that may hold states of requests that have ended.
        encode_bytes: Memory for modules that are being encoded, and for finished states that their
            callers have not taken. A larger module is encoded by itself.
        warm_up: Whether a GPU's graphs are captured when the engine starts, rather than when the
            first steps of their size come.
    """

    pool_bytes: int = 2**29
    step_tokens: int = 256
    prefill_tokens: int = 2048
    running: int = 64
    queue: int = 1024
    retained: float = 0.5
    encode_bytes: int = 2**31
    warm_up: bool = False

    @classmethod
    def for_device(cls, device: torch.device, **changes: Any) -> EngineConfig:
        """The limits that suit a device; changes: other values than the defaults, None for those.
        On a GPU the pool is sized from the memory that is free now."""
        limits: dict[str, Any] = {}
        if device.type == "cuda":
            free, _ = torch.cuda.mem_get_info(device)
            rest = max(free - GPU_RESERVE, free // 2)
            pool, encode = int(rest * GPU_POOL_SHARE), int(rest * GPU_ENCODE_SHARE)
            limits = {"pool_bytes": pool, "step_tokens": 512, "prefill_tokens": 8192}
            limits |= {"running": 256, "encode_bytes": encode}
        given = {name: value for name, value in changes.items() if value is not None}
        return cls(**(limits | given))


@dataclass(slots=True)
class EngineStats:
    """Counters of an engine. Tokens are rows of steps; seconds are of its thread.

    planning: scheduling and building batches; forward: the model; sampling: choosing tokens and
    handing them to callers. queued: the sum of the seconds that admitted requests waited. On a GPU,
    which computes while the thread goes on, forward and idle are seconds of the device; idle: it
    had nothing to do between two steps.
    """

    steps: int = 0
    prompt_tokens: int = 0
    decoded_tokens: int = 0
    encoded_tokens: int = 0
    shared_tokens: int = 0
    admitted: int = 0
    preempted: int = 0
    queued: float = 0.0
    planning: float = 0.0
    forward: float = 0.0
    sampling: float = 0.0
    idle: float = 0.0
