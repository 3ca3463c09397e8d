"""What an engine may use, and what it did."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """pool_bytes: room for requests' own states. step_tokens: the most rows of a step in which
    something decodes, so that long new text stalls nobody; prefill_tokens: of one in which nothing
    does. running: the most requests at once. queue: the most that wait; one more is refused.
    retained: the share of the pool that may hold states of requests that have ended."""

    pool_bytes: int = 2**29
    step_tokens: int = 256
    prefill_tokens: int = 2048
    running: int = 64
    queue: int = 1024
    retained: float = 0.5


@dataclass(slots=True)
class EngineStats:
    """What the engine did. Tokens are rows of steps; seconds are of its thread.

    planning: building plans and choosing who runs; forward: the model; sampling: choosing tokens
    and telling callers. queued: the sum of the seconds that admitted requests waited.
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
