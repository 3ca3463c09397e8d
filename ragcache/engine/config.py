"""Limits and counters of an engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

GPU_RESERVE = 4 * 2**30
"""Bytes of a GPU that are left to activations, CUDA graphs and the allocator."""
GPU_POOL_SHARE = 0.3
"""Share of the remaining memory for the pool of requests' own states."""
GPU_ENCODE_SHARE = 0.1
"""Share of the remaining memory for encodings and their states until they are stored."""


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Memory and limits of an engine."""

    pool_bytes: int = 2**29
    """Memory for the states of requests' own tokens."""
    step_tokens: int = 256
    """Token budget of a step in which a request decodes, so that long prompts stall no answer."""
    prefill_tokens: int = 2048
    """Token budget of a step in which no request decodes."""
    running: int = 64
    """Maximum number of running requests."""
    queue: int = 1024
    """Maximum number of waiting requests. One more raises `QueueFull`."""
    retained: float = 0.5
    """Share of the pool that may hold states of ended requests, for reuse."""
    encode_bytes: int = 2**31
    """Memory for encodings and for finished states that their callers have not taken. A larger
    module is encoded alone."""
    draft_tokens: int = 0
    """Maximum number of tokens of an answer that are drafted from its prompt in a step."""
    draft_requests: int = 8
    """Most running requests with drafts. One on a CPU, where every row of a step takes time."""
    max_gap_ms: float | None = None
    """Longest gap between two tokens of an answer that prompts and encodings beside it may cause,
    in milliseconds. Defaults to the time of `step_tokens`."""
    int8_states: bool = False
    """Whether documents are kept in eight bits on a GPU. Kernels that also read these are then
    compiled at start, instead of at the first such document."""
    warm_up: bool = False
    """Whether a GPU's graphs are captured at start instead of at the first steps of each size."""

    @classmethod
    def for_device(cls, device: torch.device, **changes: Any) -> EngineConfig:
        """The limits that suit a device. On a GPU, memory is sized from the bytes that are free
        now.

        Args:
            device: The device of the model.
            changes: Fields to override. None keeps the device's value.
        """
        limits: dict[str, Any] = {"draft_requests": 1}
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
    """Counters of an engine. Tokens are rows of steps; times are in seconds.

    On a GPU, which runs ahead of the engine's thread, `forward` and `idle` are device times. All
    other times are of the engine's thread.
    """

    steps: int = 0
    prompt_tokens: int = 0
    decoded_tokens: int = 0
    encoded_tokens: int = 0
    shared_tokens: int = 0
    drafted_tokens: int = 0
    """Tokens that were drafted from prompts, which `decoded_tokens` counts too."""
    accepted_tokens: int = 0
    """Drafted tokens that the model chose too."""
    admitted: int = 0
    preempted: int = 0
    queued: float = 0.0
    """Sum of the waiting times of admitted requests."""
    planning: float = 0.0
    """Time to schedule and to build batches."""
    forward: float = 0.0
    """Time of the model."""
    sampling: float = 0.0
    """Time to sample tokens and to deliver them."""
    idle: float = 0.0
    """Time between two steps in which the GPU had no work."""

    def prompt_rate(self) -> float:
        """Return the tokens of prompts and documents computed a second. 0 before the first step.

        A lower bound: the time of decoded tokens counts.
        """
        tokens = self.prompt_tokens + self.encoded_tokens
        return tokens / self.forward if self.forward else 0.0
